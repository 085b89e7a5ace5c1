"""examples/threads.py as a program: one table of both engines."""

import os
import subprocess
import sys

from tests.crawling import EXAMPLES


def test_the_demonstration_shows_both_engines_side_by_side() -> None:
    command = [sys.executable, "-W", "ignore::RuntimeWarning", str(EXAMPLES / "threads.py"), "0.02"]
    output = subprocess.run(
        command, capture_output=True, text=True, timeout=45, check=True, env=os.environ | {"COLUMNS": "120"}
    ).stdout
    assert "GIL" in output
    for row in ("the article's call", "there and back", "fib(18)", "threads / processes"):
        assert row in output
