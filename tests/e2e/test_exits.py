"""Programs that end while calls wait and run: with their own exit code, at once, and nobody stays behind."""

import signal
from pathlib import Path

import pytest

from tests.e2e.family import Family
from tests.faults import Program

HARD = 2.0


@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize(
    ("story", "code"),
    [
        ("by_sys_exit", 3),
        ("by_an_error", 1),
        ("by_os_exit", 4),
        ("by_sys_exit_in_a_callback", 5),
        ("by_abort", -signal.SIGABRT),
        ("by_its_last_line", 0),
        ("in_a_daemon_thread", 6),
        ("by_stopping_the_loop", 7),
    ],
)
def test_p8_the_end_of_a_program_is_its_own(story: str, code: int, loop: str, tmp_path: Path) -> None:
    family = Family()
    with family.marked():
        program = Program(story, loop, stderr=tmp_path / "stderr", module="tests.e2e.exit_programs")
    with program:
        assert program.end() == code, program.stderr
        assert family.wait_gone(HARD) == []
    if story == "by_an_error":
        assert program.stderr.splitlines()[-1] == "LookupError: the user's own"
        assert program.stderr.count("Traceback") == 1
    else:
        assert program.stderr == ""
