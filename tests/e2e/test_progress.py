"""Progress at a terminal and without one."""

import os
import re
import subprocess
import sys

from tests.terminals import shown_at_terminal

COMMAND = [sys.executable, "-m", "tests.e2e.progress_program"]


def test_at_a_terminal_rich_shows_a_bar_for_each_map() -> None:
    status, shown = shown_at_terminal(COMMAND, os.environ)
    text = re.sub(r"\x1b\[[0-9;?]*[a-zA-Z]", "", shown)
    assert status == 0, text
    assert re.search(r"\becho .*100/100", text)
    assert re.search(r"\blength .*50/50", text)
    assert text.splitlines()[-1] == "150"


def test_without_a_terminal_each_map_writes_a_line() -> None:
    done = subprocess.run(COMMAND, capture_output=True, text=True, check=True)
    assert done.stdout == "150\n"
    assert re.fullmatch(r"(?:echo: 100 of|length: 50 of) .*\n(?:echo: 100 of|length: 50 of) .*\n", done.stderr)
