"""A program that forks while its runner is open: the fork has no runner, and the program's own notices nothing."""

import sys
from pathlib import Path

import pytest

from tests.contract.pipes import Gate, gate
from tests.faults import Program, Watch
from tests.rows import repeated_rows

__all__ = ["gate"]

HARD = 2.0


NO_EXIT = pytest.mark.skipif(
    sys.version_info >= (3, 14),
    reason="since 3.14 a task of a fork's copied loop cannot be left by SystemExit: asyncio raises another",
)


@pytest.mark.parametrize(
    ("loop", "how", "code"),
    [
        ("asyncio", "gc", 0),
        pytest.param("uvloop", "sys.exit", 3, marks=NO_EXIT),
        pytest.param("asyncio", "sys.exit", 3, marks=[NO_EXIT, pytest.mark.full]),
        ("asyncio", "end", 1),
        ("asyncio", "lives", 0),
        ("uvloop", "lives", 0),
        *repeated_rows(("uvloop", "end", 1), ("asyncio", "multiprocessing gc", 0)),
        ("uvloop", "multiprocessing exit", 3),
    ],
)
def test_x5_a_fork_that_uses_drops_and_leaves_its_copy_of_a_runner(
    loop: str, how: str, code: int, gate: Gate, tmp_path: Path
) -> None:
    with Program("forked", loop, how, gate.path, stderr=tmp_path / "stderr", module="tests.e2e.misuse_programs") as program:
        assert program.told("refused") == [True, []]
        if how != "lives":
            assert program.told("fork") == code
        assert program.told("parent") == [True, True]
        assert program.told("counted") == [True, int(how == "lives")]
        program.expect("closed")
        if how == "lives":
            assert program.told("fork") == code
        with Watch(program.descendants()) as left:
            assert left.wait_gone(HARD) == []
        assert program.end() == 0
        told = program.stderr.splitlines()
        if how == "end":  # it leaves `async with` as if the runner were its own
            assert told[-1].endswith("works only in the process that started it")
        elif how == "lives":
            assert [line.split("died")[1] for line in told] == [" by SIGKILL (perhaps out of memory, or killed by an operator)"]
        else:
            assert told == []
