"""Ctrl-C on a real terminal, and the signals that end a supervisor politely.

What is right is what plain asyncio does: one KeyboardInterrupt, one traceback of the user's program, the same return code.
"""

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path

import pytest

from tests.faults import LIMIT, Program, Watch, terminal

HARD = 2.0
CTRL_C = b"\x03"

Start = Callable[..., AbstractContextManager[Program]]


@pytest.fixture(params=["asyncio", "uvloop"])
def loop(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture
def keyboard() -> Iterator[tuple[int, int]]:
    with terminal() as sides:
        yield sides


@pytest.fixture
def start(loop: str, keyboard: tuple[int, int], tmp_path: Path) -> Start:
    @contextmanager
    def started(story: str, way: str = "on_terminal") -> Iterator[Program]:
        with Program(way, story, loop, stderr=tmp_path / story, terminal=keyboard[1]) as program:
            yield program

    return started


@pytest.fixture
def ctrl_c(keyboard: tuple[int, int]) -> Callable[[], None]:
    def typed() -> None:
        os.write(keyboard[0], CTRL_C)

    return typed


@pytest.fixture
def plain(start: Start, ctrl_c: Callable[[], None]) -> tuple[int, int]:
    """Return code and tracebacks of a program without percore."""
    with start("plain") as program:
        program.expect("ready")
        ctrl_c()
        code = program.end()
        return code, program.stderr.count("Traceback")


def judge(program: Program, everybody: Watch, plain: tuple[int, int], seconds: float = LIMIT) -> None:
    """It ends as a plain asyncio program does, and so does everybody it started."""
    code = program.end(seconds)
    assert everybody.wait_gone(HARD) == []
    assert code == plain[0]
    stderr = program.stderr
    assert last_line(program) == "KeyboardInterrupt"
    assert stderr.count("Traceback") == plain[1], stderr
    assert stderr.count("\nKeyboardInterrupt") == 1, stderr
    assert "worker" not in stderr.replace("_worker", ""), stderr


def last_line(program: Program) -> str:
    return program.stderr.rstrip().rpartition("\n")[2]


def rest(program: Program) -> list[str]:
    """The first words of what it still says, to its end."""
    words = []
    while line := program.line():
        words.append(line.split()[0])
    return words


def test_at_idle(start: Start, ctrl_c: Callable[[], None], plain: tuple[int, int]) -> None:
    with start("idle") as program:
        program.expect("ready")
        with Watch(program.descendants()) as everybody:
            ctrl_c()
            judge(program, everybody, plain)
        assert rest(program) == ["left", "left"], "the lifespans are left in order"


def test_under_load(start: Start, ctrl_c: Callable[[], None], plain: tuple[int, int]) -> None:
    with start("loaded") as program:
        program.expect("ready")
        with Watch(program.descendants()) as everybody:
            ctrl_c()
            judge(program, everybody, plain)
        assert sorted(rest(program)) == ["cancelled"] * 10 + ["left"] * 2, "calls are cancelled, lifespans left"


def test_during_start(start: Start, ctrl_c: Callable[[], None], plain: tuple[int, int]) -> None:
    with start("starting") as program:
        program.expect("entering")
        program.expect("entering")
        with Watch(program.descendants()) as everybody:
            ctrl_c()
            judge(program, everybody, plain, HARD)
        assert rest(program) == []


def test_while_processes_come_up(start: Start, ctrl_c: Callable[[], None], plain: tuple[int, int]) -> None:
    with start("booting") as program:
        program.expect("ready")
        ctrl_c()
        with Watch(program.descendants()) as everybody:
            judge(program, everybody, plain, HARD)


def test_during_close(start: Start, ctrl_c: Callable[[], None], plain: tuple[int, int]) -> None:
    with start("closing") as program:
        program.expect("leaving")
        program.expect("leaving")
        with Watch(program.descendants()) as everybody:
            ctrl_c()
            judge(program, everybody, plain, HARD)
        assert rest(program) == []


def test_a_second_one_kills_at_once(start: Start, ctrl_c: Callable[[], None], plain: tuple[int, int]) -> None:
    with start("twice") as program:
        program.expect("stubborn")
        with Watch(program.descendants()) as everybody:
            ctrl_c()
            program.expect("refused")
            assert everybody.wait_gone(0) != []
            ctrl_c()
            code = program.end(HARD)
            assert everybody.wait_gone(HARD) == []
        assert code == plain[0]
        assert last_line(program) == "KeyboardInterrupt"
        assert "worker" not in program.stderr.replace("_worker", ""), program.stderr


def test_two_at_once(start: Start, ctrl_c: Callable[[], None], plain: tuple[int, int]) -> None:
    with start("loaded") as program:
        program.expect("ready")
        with Watch(program.descendants()) as everybody:
            ctrl_c()
            ctrl_c()
            assert program.end() == plain[0]
            assert everybody.wait_gone(HARD) == []
        assert last_line(program) == "KeyboardInterrupt"


def test_a_program_started_in_a_worker_obeys(start: Start, ctrl_c: Callable[[], None]) -> None:
    # The supervisor's own program takes no notice, so what ends is ended by the terminal and nobody else.
    with start("subprocesses", "deaf") as program:
        sleeping = [int(program.expect("sleeps")) for _ in range(2)]
        with Watch(sleeping) as sleepers:
            ctrl_c()
            assert sleepers.wait_gone(HARD) == []
        assert program.told("ended") == [-signal.SIGINT, -signal.SIGINT]
        assert program.end() == 0
        assert program.stderr == ""


@pytest.mark.parametrize("signum", [signal.SIGTERM, signal.SIGHUP])
def test_a_signal_that_ends_the_supervisor_leaves_nobody(start: Start, signum: signal.Signals) -> None:
    with start("loaded") as program:
        program.expect("ready")
        with Watch(program.descendants()) as everybody:
            program.process.send_signal(signum)
            assert program.end() == -signum
            assert everybody.wait_gone(HARD) == []


def test_a_terminal_that_goes_away_leaves_nobody(loop: str, tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    with Program("on_terminal", "loaded", loop, stderr=tmp_path / "stderr", terminal=theirs) as program:
        os.close(theirs)
        program.expect("ready")
        with Watch(program.descendants()) as everybody:
            os.close(ours)
            assert program.end() == -signal.SIGHUP
            assert everybody.wait_gone(HARD) == []


def test_a_program_that_is_stopped_and_goes_on_has_lost_nobody(
    start: Start, keyboard: tuple[int, int], plain: tuple[int, int]
) -> None:
    with start("idle") as program:
        program.expect("ready")
        with Watch(program.descendants()) as everybody:
            count = len(everybody)
            os.killpg(program.pid, signal.SIGSTOP)
            os.killpg(program.pid, signal.SIGCONT)
            assert len(everybody.wait_gone(0)) == count
            os.write(keyboard[0], CTRL_C)
            judge(program, everybody, plain)
