"""Programs that end while calls wait and run: with their own exit code, at once, and nobody stays behind."""

import signal
from pathlib import Path

import pytest

from tests.e2e.family import Family
from tests.faults import Program
from tests.rows import repeated_rows

HARD = 2.0


@pytest.mark.parametrize(
    ("story", "code", "loop"),
    [
        ("by_sys_exit", 3, "asyncio"),
        ("by_an_error", 1, "asyncio"),
        ("by_os_exit", 4, "uvloop"),
        ("by_sys_exit_in_a_callback", 5, "uvloop"),
        ("by_abort", -signal.SIGABRT, "asyncio"),
        ("by_its_last_line", 0, "asyncio"),
        ("by_its_last_line", 0, "uvloop"),
        ("in_a_daemon_thread", 6, "uvloop"),
        ("by_stopping_the_loop", 7, "asyncio"),
        *repeated_rows(("by_sys_exit", 3, "uvloop"), ("by_sys_exit_in_a_callback", 5, "asyncio")),
        *repeated_rows(("in_a_daemon_thread", 6, "asyncio"), ("by_stopping_the_loop", 7, "uvloop")),
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


@pytest.mark.parametrize(
    ("loop", "story"),
    [
        ("asyncio", "after_the_main_thread"),
        ("uvloop", "after_the_main_thread_and_left_open"),
        *repeated_rows(("uvloop", "after_the_main_thread"), ("asyncio", "after_the_main_thread_and_left_open")),
    ],
)
def test_peers_18_it_works_in_a_thread_that_outlives_the_main_one(story: str, loop: str, tmp_path: Path) -> None:
    family = Family()
    with family.marked():
        program = Program(story, loop, stderr=tmp_path / "stderr", module="tests.e2e.exit_programs")
    with program:
        assert program.expect("sum") == str(sum(range(101)))
        assert program.end() == 0, program.stderr
        assert family.wait_gone(HARD) == []
    assert program.stderr == ""
