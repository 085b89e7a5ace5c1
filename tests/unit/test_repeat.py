"""How scripts/repeat.py counts the tests that fail, and that it sums up at Ctrl-C."""

import importlib.util
import os
import subprocess
import sys
from pathlib import Path

REPEAT = Path(__file__).parents[2] / "scripts" / "repeat.py"

TESTS = """\
import os, signal, time

def test_that_fails():
    assert not "a - b"

def test_during_which_the_repetition_is_interrupted():
    os.kill(os.getppid(), signal.SIGINT)
    time.sleep(60)

def test_after_it():
    raise AssertionError
"""

SUMMARY = """\
=========================== short test summary info ============================
SUBFAILED[a case - of two] tests/unit/test_x.py::test_cases - assert 0
FAILED tests/unit/test_x.py::test_cases - contains 1 failed subtest
FAILED tests/unit/test_x.py::test_it[a value] - AssertionError: FAILED - twice
ERROR tests/unit/test_x.py::test_it[a value] - left behind: a thread
SKIPPED [1] tests/unit/test_x.py:7: not here
3 failed, 1 error, 1 skipped in 1.20s
"""


def test_the_tests_that_failed_are_read_from_the_summary() -> None:
    spec = importlib.util.spec_from_file_location("repeat", REPEAT)
    assert spec is not None
    assert spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    named = ["tests/unit/test_x.py::test_cases", "tests/unit/test_x.py::test_it[a value]"]
    assert script.failures(SUMMARY, 1) == named
    assert script.failures("7 passed in 1.20s\n", 0) == []
    assert script.failures("Fatal Python error: Segmentation fault\n", -11) == [
        "(a run that ended with status -11 and names no test)"
    ]


def test_an_interrupted_repetition_ends_its_runs_and_sums_up(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(TESTS)
    options = ["--rootdir", str(tmp_path), "-c", "/dev/null", "test_it.py"]
    done = subprocess.run(
        [sys.executable, str(REPEAT), "--times", "1", "--", *options],
        env=os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"},
        capture_output=True,
        text=True,
        check=False,
        cwd=tmp_path,
    )
    assert done.stdout.splitlines() == [
        "== interrupted",
        "== 0 of 1 runs ended, 1 tests failed",
        "   1 of 1 times: test_it.py::test_that_fails",
    ]
    assert done.returncode == 1
    assert "KeyboardInterrupt" in (tmp_path / "build" / "repeat" / "run-1.txt").read_text()
