"""The supervisor's death by SIGKILL ends every worker and the fork server, whatever they are doing, and nothing is left.

A name in /dev/shm that somebody of the family holds when its supervisor is killed would be left for ever.
"""

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import pytest

from tests import leaks
from tests.counts import LONG, times
from tests.e2e import held
from tests.e2e.family import Family
from tests.faults import Program, Watch, Wire, figures, wait_stopped

HARD = 2.0
METHODS = ["forkserver", "spawn"]
STATES = ["idle", "in_flight", "load", "mid_spawn", "lifespan", "close", "nested"]

TOLD = {"in_flight": 2, "lifespan": 2, "close": 2, "nested": 1, "sleep": 2, "c": 2, "blocked": 2, "ignoring": 2}
"""How many workers say, in each state, that they are there."""


class Mother:
    """A program that forks supervisors to be killed, and all that descends from it."""

    def __init__(self, folder: Path) -> None:
        self.family = Family()
        self._wire = Wire(folder / "wire")
        with self.family.marked():
            self.program = Program(self._wire.path, stderr=folder / "stderr", module="tests.e2e.doomed_programs")

    def __enter__(self) -> Self:
        self.program.__enter__()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._wire.write("end\n")
        try:
            if kind is None:
                assert self.program.end() == 0
                assert self.family.alive() == []
        finally:
            self.program.__exit__(kind, error, trace)
            self._wire.close()

    def fork(self, state: str, method: str, folder: Path) -> None:
        self._wire.write(f"{state} {method} {folder}\n")


class Doomed:
    """A supervisor in a state, to be killed, and all that descends from it. Nothing of it is left, not even a word."""

    def __init__(self, mother: Mother, state: str, method: str, folder: Path) -> None:
        self.state = state
        self.family = mother.family
        self._program = mother.program
        self._stderr_before = len(mother.program.stderr)
        self._folder = folder / "temporary"
        self._folder.mkdir()
        self.pid: int = 0
        self._fork: int | None = None
        mother.fork(state, method, self._folder)

    def __enter__(self) -> Self:
        """Wait until the state is reached, told in lines of any order, by the supervisor and its workers."""
        lines = [self._program.line() for _ in range(1 + TOLD.get(self.state, 0))]
        words = sorted(line.partition(" ")[0] for line in lines)
        assert words == ["calls"] * (len(lines) - 1) + ["ready"], self._program.stderr
        told = json.loads(next(line for line in lines if line.startswith("ready")).removeprefix("ready "))
        self.pid, self._fork = told["pid"], told["fork"]
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is not None:  # the next test meets nobody of this one
            with Watch([self.pid, *self.alive()]) as left:
                left.kill()
            self._program.expect("over")
            return
        self._program.expect("over")
        assert self._program.stderr[self._stderr_before :] == ""
        # Again: a process that has just begun to run another program shows no environment, and so not whose it is.
        assert self.family.wait_gone(HARD, f"-{self.pid}") == []
        assert list(self._folder.iterdir()) == []
        self._folder.rmdir()

    def alive(self) -> list[int]:
        return self.family.alive(f"-{self.pid}")

    def kill(self) -> float:
        """Seconds from its death until everybody is gone."""
        if self.state == "stopped":
            stop(self.alive())
        with Watch([self.pid]) as itself, Watch([self._fork] if self._fork else []) as spared:
            assert leaks.names_held(self.alive()) == []
            began = time.perf_counter()
            assert itself.send(self.pid, signal.SIGKILL)
            assert self.family.wait_gone(HARD, f"-{self.pid}") == []
            took = time.perf_counter() - began
            assert itself.wait_gone(HARD) == []
            assert len(spared.wait_gone(0)) == len(spared), "this is about a fork that lives"
            spared.kill()
            assert spared.wait_gone(HARD) == []
        return took


def stop(pids: list[int]) -> None:
    assert pids
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    for pid in pids:
        wait_stopped(pid)


@pytest.fixture(scope="module")
def mother(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Mother]:
    with Mother(tmp_path_factory.mktemp("mother")) as mother:
        yield mother


@pytest.fixture
def kill(mother: Mother, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> "Kill":
    def kill(state: str, method: str, rounds: int) -> None:
        took = []
        for _ in range(rounds):
            with Doomed(mother, state, method, tmp_path) as doomed:
                took.append(doomed.kill())
        with capfd.disabled():
            os.write(1, f"\n{figures(f'supervisor killed, {state}, {method}', took)}\n".encode())

    return kill


Kill = Callable[[str, str, int], None]


def each(under_fork_server: list[str], spawned: list[str]) -> pytest.MarkDecorator:
    """States under the fork server, and those that differ where each worker is an interpreter of its own."""
    return pytest.mark.parametrize(
        ("state", "method"), [(state, "forkserver") for state in under_fork_server] + [(state, "spawn") for state in spawned]
    )


@each(STATES, ["idle", "mid_spawn", "close", "nested"])
def test_p1_a_killed_supervisor_leaves_nobody(state: str, method: str, kill: Kill) -> None:
    kill(state, method, 1)


@pytest.mark.parametrize("method", METHODS)
def test_p1_a_killed_supervisor_leaves_no_process_that_only_comes_up(method: str, tmp_path: Path) -> None:
    count = 1 if method == "forkserver" else 2
    with (
        held.interpreters(tmp_path) as interpreters,
        Mother(tmp_path) as mother,
        Doomed(mother, "unarmed", method, tmp_path) as doomed,
    ):
        interpreters.wait(count)
        with Watch([doomed.pid]) as itself, Watch(doomed.alive()) as everybody:
            assert len(everybody) == count
            itself.kill()
            assert itself.wait_gone(HARD) == []
            assert len(everybody.wait_gone(0)) == count, "this is about processes that are not armed yet"
            interpreters.let_go(count)
            assert everybody.wait_gone(HARD) == []


@each(["sleep", "c", "blocked", "stopped", "ignoring"], ["c", "stopped"])
def test_p2_whatever_its_workers_do(state: str, method: str, kill: Kill) -> None:
    kill(state, method, 1)


@pytest.mark.parametrize("method", METHODS)
def test_p3_although_a_fork_of_it_lives(method: str, kill: Kill) -> None:
    kill("fork", method, 1)


@pytest.mark.long
@pytest.mark.timeout(120)
@pytest.mark.parametrize("part", range(times(1, 10)))
@pytest.mark.parametrize("state", STATES if LONG else ["load", "mid_spawn"])
def test_p4_again_and_again(state: str, part: int, kill: Kill) -> None:
    """200 times in each state, in parts that can share the processors."""
    kill(state, "forkserver", times(2, 20))


@pytest.mark.parametrize("method", METHODS)
def test_p5_although_the_thread_of_its_loop_has_ended(method: str, kill: Kill) -> None:
    """Until then the workers live: `ready` is told after that thread's end."""
    kill("thread", method, 1)
