"""What CI makes of tests that fail: scripts/once_more.py."""

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


def ci(folder: Path, count: int, passes: bool) -> "tuple[int, str]":
    (folder / "test_it.py").write_text(TESTS.format(count=count, passes=passes))
    options = ["-q", "-n", "2", "--rootdir", str(folder), "-c", "/dev/null", str(folder / "test_it.py")]
    command = [sys.executable, str(ONCE_MORE), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert (folder / "always").read_text() == "once"
    return done.returncode, done.stdout


def test_what_failed_by_accident_is_named_and_fails_nothing(tmp_path: Path) -> None:
    status, said = ci(tmp_path, count=2, passes=True)
    assert status == 0
    assert said.splitlines()[-1].startswith("== flaky: failed once and passed alone, to be mended: ")
    assert "test_second_time[0]" in said.splitlines()[-1]
    assert "test_second_time[1]" in said.splitlines()[-1]


def test_what_fails_again_fails(tmp_path: Path) -> None:
    status, said = ci(tmp_path, count=1, passes=False)
    assert status == 1
    assert "flaky" not in said


def test_many_failures_are_no_accident(tmp_path: Path) -> None:
    status, said = ci(tmp_path, count=4, passes=True)
    assert status == 1
    assert "once more" not in said
