"""Ctrl-C on a real terminal, and the signals that end a supervisor politely.

What is right is what plain asyncio does: one KeyboardInterrupt, one traceback of the user's program, the same return code.
"""

import functools
import os
import signal
import tempfile
import termios
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, closing, contextmanager
from pathlib import Path

import pytest

from tests.e2e import held
from tests.faults import LIMIT, Program, Watch, Wire, terminal, wait_stopped
from tests.rows import repeated_rows, repeats

HARD = 2.0
CTRL_C, CTRL_Z = b"\x03", b"\x1a"
PROGRAMS = "tests.e2e.fault_programs"

Start = Callable[..., AbstractContextManager[Program]]

# Whose signal handlers run, and when, is the loop's choice. Where the terminal or the kernel ends, stops or resumes the program,
# one loop tells what the other one would.
in_asyncio = pytest.mark.parametrize("loop", ["asyncio", *repeats("uvloop")])
in_uvloop = pytest.mark.parametrize("loop", ["uvloop", *repeats("asyncio")])


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
    def started(story: str, *arguments: str, way: str = "on_terminal", module: str = PROGRAMS) -> Iterator[Program]:
        before = termios.tcgetattr(keyboard[1])
        with Program(way, story, loop, *arguments, stderr=tmp_path / story, terminal=keyboard[1], module=module) as program:
            yield program
        assert termios.tcgetattr(keyboard[1]) == before, "the terminal is as it was"

    return started


@pytest.fixture
def ctrl_c(keyboard: tuple[int, int]) -> Callable[[], None]:
    def typed() -> None:
        os.write(keyboard[0], CTRL_C)

    return typed


@functools.cache
def _plain(loop: str) -> tuple[int, int]:
    """Return code and tracebacks of a program without percore."""
    with (
        terminal() as (ours, theirs),
        tempfile.TemporaryDirectory() as folder,
        Program("on_terminal", "plain", loop, stderr=Path(folder) / "stderr", terminal=theirs) as program,
    ):
        program.expect("ready")
        os.write(ours, CTRL_C)
        code = program.end()
        return code, program.stderr.count("Traceback")


@pytest.fixture
def plain(loop: str) -> tuple[int, int]:
    return _plain(loop)


def judge(program: Program, everybody: Watch, plain: tuple[int, int], seconds: float = LIMIT) -> None:
    """It ends as a plain asyncio program does, and so does everybody it started."""
    code = program.end(seconds)
    assert everybody.wait_gone(HARD) == []
    assert code == plain[0]
    stderr = program.stderr
    assert last_line(program) == "KeyboardInterrupt"
    assert stderr.count("Traceback") == plain[1], stderr
    assert stderr.count("\nKeyboardInterrupt") == 1, stderr
    assert_no_word_of_workers(stderr)


def assert_no_word_of_workers(stderr: str) -> None:
    """Within a traceback, which is indented, code of percore may be shown that has the word."""
    assert not [line for line in stderr.splitlines() if "worker" in line and not line.startswith(" ")], stderr


def last_line(program: Program) -> str:
    return program.stderr.rstrip().rpartition("\n")[2]


def rest(program: Program) -> list[str]:
    """The first words of what it still says, to its end."""
    words = []
    while line := program.line():
        words.append(line.split()[0])
    return words


def test_p6_p7_at_idle_also_after_a_stop(start: Start, ctrl_c: Callable[[], None], plain: tuple[int, int]) -> None:
    with start("idle") as program:
        program.expect("ready")
        with Watch(program.descendants()) as everybody:
            count = len(everybody)
            os.killpg(program.pid, signal.SIGSTOP)
            os.killpg(program.pid, signal.SIGCONT)
            assert len(everybody.wait_gone(0)) == count, "a program that is stopped and goes on has lost nobody"
            ctrl_c()
            judge(program, everybody, plain)
        assert rest(program) == ["left", "left"], "the lifespans are left in order"


def test_p6_under_load(start: Start, ctrl_c: Callable[[], None], plain: tuple[int, int]) -> None:
    with start("loaded") as program:
        program.expect("ready")
        with Watch(program.descendants()) as everybody:
            ctrl_c()
            judge(program, everybody, plain)
        assert sorted(rest(program)) == ["cancelled"] * 10 + ["left"] * 2, "calls are cancelled, lifespans left"


def test_p6_during_start(start: Start, ctrl_c: Callable[[], None], plain: tuple[int, int]) -> None:
    with start("starting") as program:
        program.expect("entering")
        program.expect("entering")
        with Watch(program.descendants()) as everybody:
            ctrl_c()
            judge(program, everybody, plain, HARD)
        assert rest(program) == []


def test_p6_while_processes_come_up(start: Start, ctrl_c: Callable[[], None], plain: tuple[int, int]) -> None:
    with start("booting") as program:
        program.expect("ready")
        ctrl_c()
        with Watch(program.descendants()) as everybody:
            judge(program, everybody, plain)


def test_p6_while_the_fork_server_comes_up_slowly(
    start: Start, ctrl_c: Callable[[], None], plain: tuple[int, int], tmp_path: Path
) -> None:
    with held.interpreters(tmp_path) as interpreters, start("booting") as program:
        interpreters.wait(1)
        with Watch(program.descendants()) as everybody:
            ctrl_c()
            judge(program, everybody, plain)


def test_p6_during_close(start: Start, ctrl_c: Callable[[], None], plain: tuple[int, int]) -> None:
    with start("closing") as program:
        program.expect("leaving")
        program.expect("leaving")
        with Watch(program.descendants()) as everybody:
            ctrl_c()
            judge(program, everybody, plain, HARD)
        assert rest(program) == []


def test_p6_a_second_one_kills_at_once(start: Start, ctrl_c: Callable[[], None], plain: tuple[int, int]) -> None:
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
        assert_no_word_of_workers(program.stderr)


@pytest.mark.parametrize(
    ("loop", "story", "word"),
    [
        *[("asyncio", "idle", "ready"), ("uvloop", "loaded", "ready"), ("asyncio", "booting", "ready")],
        *[("uvloop", "starting", "entering"), ("asyncio", "closing", "leaving")],
        *repeated_rows(("uvloop", "idle", "ready"), ("asyncio", "loaded", "ready"), ("uvloop", "booting", "ready")),
        *repeated_rows(("asyncio", "starting", "entering"), ("uvloop", "closing", "leaving")),
    ],
)
def test_p6_two_at_once(start: Start, ctrl_c: Callable[[], None], plain: tuple[int, int], story: str, word: str) -> None:
    with start(story) as program:
        program.expect(word)
        with Watch(program.descendants()) as everybody:
            ctrl_c()
            ctrl_c()
            # The second may be raised where asyncio has taken the task's wake-up and not run it yet. Then that is lost, and any
            # asyncio program waits for ever, until a third one.
            if everybody.wait_gone(LIMIT / 4):
                ctrl_c()
            # Or when percore has ended, in the midst of what Python does to end itself: then the end is Python's.
            assert program.end() in (plain[0], 1)
            assert everybody.wait_gone(HARD) == []
        assert "KeyboardInterrupt" in program.stderr
        assert_no_word_of_workers(program.stderr)


def test_p6_in_the_midst_of_percore(loop: str, plain: tuple[int, int], tmp_path: Path) -> None:
    """A second one is raised wherever the program is; here, where it has read a bell."""
    points = "supervisor.bell.read=interrupt@3"
    with Program("interrupted_program", loop, stderr=tmp_path / "stderr", points=points) as program:
        program.expect("started")
        with Watch(program.descendants()) as everybody:
            assert program.end() == plain[0]
            assert everybody.wait_gone(HARD) == []
        assert last_line(program) == "KeyboardInterrupt"
        assert_no_word_of_workers(program.stderr)


class Counting:
    """The files of the story `counting`, which goes on until it is enough."""

    def __init__(self, folder: Path) -> None:
        self._ledger = folder / "ledger"
        self._enough = folder / "enough"
        self.arguments = (str(self._ledger), str(self._enough))

    def judge_so_far(self, program: Program) -> None:
        """No call has run twice, and nothing was complained of."""
        numbers = self._ledger.read_text().split("\n")[:-1]  # the last line may be on its way
        assert len(set(numbers)) == len(numbers)
        assert program.stderr == ""

    def judge(self, program: Program) -> None:
        """Every call has run once and has its result, in the same workers."""
        self._enough.touch()
        count, *rest = program.told("counted")
        assert rest == [True, True, 0]
        assert sorted(map(int, self._ledger.read_text().split())) == list(range(count))
        assert program.stderr == ""


@pytest.fixture
def counting(tmp_path: Path) -> Counting:
    return Counting(tmp_path)


@in_asyncio
def test_peers_30_a_program_started_in_a_worker_obeys(start: Start, ctrl_c: Callable[[], None]) -> None:
    # The supervisor's own program takes no notice, so what ends is ended by the terminal and nobody else.
    with start("subprocesses", way="deaf") as program:
        sleeping = [int(program.expect("sleeps")) for _ in range(2)]
        with Watch(sleeping) as sleepers:
            ctrl_c()
            assert sleepers.wait_gone(HARD) == []
        assert program.told("ended") == [-signal.SIGINT, -signal.SIGINT]
        assert program.end() == 0
        assert program.stderr == ""


@pytest.mark.parametrize(
    ("loop", "signum"),
    [
        ("asyncio", signal.SIGTERM),
        ("uvloop", signal.SIGHUP),
        *repeated_rows(("uvloop", signal.SIGTERM), ("asyncio", signal.SIGHUP)),
    ],
)
def test_p6_a_signal_that_ends_the_supervisor_leaves_nobody(start: Start, signum: signal.Signals) -> None:
    with start("loaded") as program:
        program.expect("ready")
        with Watch(program.descendants()) as everybody:
            program.process.send_signal(signum)
            assert program.end() == -signum
            assert everybody.wait_gone(HARD) == []
        assert program.stderr == ""


@in_uvloop
def test_p6_a_terminal_that_goes_away_leaves_nobody(loop: str, tmp_path: Path) -> None:
    ours, theirs = os.openpty()
    with Program("on_terminal", "loaded", loop, stderr=tmp_path / "stderr", terminal=theirs) as program:
        os.close(theirs)
        program.expect("ready")
        with Watch(program.descendants()) as everybody:
            os.close(ours)
            assert program.end() == -signal.SIGHUP
            assert everybody.wait_gone(HARD) == []
        assert program.stderr == ""


@in_asyncio
def test_p6_ctrl_z_under_load_and_going_on(start: Start, keyboard: tuple[int, int], counting: Counting) -> None:
    with start("counting", *counting.arguments, module="tests.e2e.job_shell") as shell:
        for _ in range(3):
            shell.expect("at")
            os.write(keyboard[0], CTRL_Z)
            shell.expect("stopped")
            job = shell.descendants()
            assert len(job) == 4, "the program, its fork server and two workers"
            for pid in job:
                wait_stopped(pid)
            shell.process.send_signal(signal.SIGUSR1)
        counting.judge(shell)
        assert shell.expect("ended") == "0"
        assert shell.end() == 0


@in_asyncio
def test_p7_stopped_starved_and_interrupted_under_load(
    start: Start, ctrl_c: Callable[[], None], counting: Counting, subtests: pytest.Subtests
) -> None:
    """One program is disturbed in each way. After each it goes on, in the same processes, and no call has run twice."""
    with start("counting", *counting.arguments, way="deaf") as program:
        program.expect("at")
        pids = [program.pid, *program.descendants()]
        with Watch(pids) as everybody:

            def stopped(whom: list[int]) -> None:
                for _ in range(3):
                    program.expect("at")
                    pause(whom, everybody, 0.2)

            def starved() -> None:
                """A twentieth of the time, as a container's host gives it: a moment to run, and a stop that is much longer."""
                for _ in range(20):
                    pause(pids, everybody, 0.095)
                    assert len(everybody.wait_gone(0.005)) == len(pids)

            def interrupted() -> None:
                for _ in range(5):
                    program.expect("at")
                    ctrl_c()

            ways: list[tuple[str, Callable[[], None]]] = [
                ("the supervisor is stopped", lambda: stopped([program.pid])),
                ("all are stopped", lambda: stopped(pids)),
                ("hardly any time is no reason to kill", starved),
                ("peers 30: an interrupt drops no call", interrupted),
            ]
            for way, disturb in ways:
                with subtests.test(way):
                    disturb()
                    program.expect("at")
                    program.expect("at")  # the first one may have been told before
                    assert [program.pid, *program.descendants()] == pids
                    counting.judge_so_far(program)
        counting.judge(program)
        assert program.end() == 0


@in_uvloop
def test_p7_stopped_for_longer_than_a_close_is_given(start: Start, tmp_path: Path) -> None:
    with closing(Wire(tmp_path / "gate")) as gate, start("closing_slowly", gate.path) as program:
        program.expect("leaving")
        program.expect("leaving")
        with Watch([program.pid, *program.descendants()]) as everybody:
            pause([program.pid, *program.descendants()], everybody, 3.5)  # a timer that is a second late tells of a stop
            gate.give(2)
            assert rest(program) == ["left", "left", "closed"]
        assert program.end() == 0
        assert program.stderr == ""


def pause(pids: list[int], everybody: Watch, seconds: float) -> None:
    """Stop these and let them go on, so much later. Nobody may die of it."""
    for pid in pids:
        assert everybody.send(pid, signal.SIGSTOP)
    for pid in pids:
        wait_stopped(pid)
    assert len(everybody.wait_gone(seconds)) == len(everybody)
    for pid in pids:
        assert everybody.send(pid, signal.SIGCONT)
