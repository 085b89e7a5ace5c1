"""What CI makes of tests that fail: scripts/once_more.py."""

import os
import subprocess
import sys
from pathlib import Path

ONCE_MORE = Path(__file__).parents[2] / "scripts" / "once_more.py"

TESTS = """\
from pathlib import Path
import pytest

@pytest.mark.parametrize("number", range({count}))
def test_second_time(number):
    met = Path(__file__).with_name(f"met-{{number}}")
    first = not met.exists()
    met.touch()
    assert not first

def test_never():
    assert {passes}

def test_always():
    with Path(__file__).with_name("always").open("a") as runs:
        runs.write("once")
"""


def ci(folder: Path, count: int, passes: bool, *options: str) -> "tuple[int, str]":
    """Run it with the plugins that are named alone: to import all of them takes longer than the tests."""
    (folder / "test_it.py").write_text(TESTS.format(count=count, passes=passes))
    command = [
        sys.executable,
        str(ONCE_MORE),
        *options,
        "-q",
        "--rootdir",
        str(folder),
        "-c",
        "/dev/null",
        str(folder / "test_it.py"),
    ]
    variables = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=False, cwd=folder)
    assert (folder / "always").read_text() == "once"
    return done.returncode, done.stdout


def test_what_failed_by_accident_is_named_and_fails_nothing(tmp_path: Path) -> None:
    status, said = ci(tmp_path, 2, True, "-p", "xdist", "-n", "2")  # as `make test` has it
    assert status == 0
    assert said.splitlines()[-1].startswith("== flaky: failed once and passed alone, to be mended: ")
    assert "test_second_time[0]" in said.splitlines()[-1]
    assert "test_second_time[1]" in said.splitlines()[-1]


def test_what_fails_again_fails(tmp_path: Path) -> None:
    status, said = ci(tmp_path, 1, False)
    assert status == 1
    assert "flaky" not in said


def test_many_failures_are_no_accident(tmp_path: Path) -> None:
    status, said = ci(tmp_path, 4, True)
    assert status == 1
    assert "once more" not in said
