"""The supervisor's death by SIGKILL ends every worker and the fork server, whatever they are doing, and nothing is left.

A name in /dev/shm that somebody of the family holds when its supervisor is killed would be left for ever.
"""

import contextlib
import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests import leaks
from tests.counts import LONG, times
from tests.e2e import held
from tests.e2e.family import Family
from tests.faults import Program, Watch, figures, wait_stopped

HARD = 2.0
METHODS = ["forkserver", "spawn"]
STATES = ["idle", "in_flight", "load", "mid_spawn", "lifespan", "close", "nested"]

TOLD = {"in_flight": 2, "lifespan": 2, "close": 2, "nested": 1, "sleep": 2, "c": 2, "blocked": 2, "ignoring": 2}
"""How many workers say, in each state, that they are there."""


class Doomed:
    """A program that forks supervisors to be killed, and all that descends from it."""

    def __init__(self, state: str, method: str, folder: Path) -> None:
        self.state = state
        self.method = method
        self.family = Family()
        self.folder = folder / method
        self.folder.mkdir()

    @contextlib.contextmanager
    def program(self, rounds: int) -> Iterator[Program]:
        with self.family.marked(), pytest.MonkeyPatch.context() as patch:
            patch.setenv("TMPDIR", str(self.folder))
            stderr = self.folder.with_suffix(".err")
            program = Program(self.state, self.method, str(rounds), stderr=stderr, module="tests.e2e.doomed_programs")
        with program:
            yield program
            assert program.end() == 0
        assert program.stderr == ""
        assert self.family.alive() == []
        assert list(self.folder.iterdir()) == []

    def wait_ready(self, program: Program) -> tuple[int, int | None]:
        """Until the state is reached, told in lines of any order: the supervisor, and a fork of it."""
        lines = [program.line() for _ in range(1 + TOLD.get(self.state, 0))]
        words = sorted(line.partition(" ")[0] for line in lines)
        assert words == ["calls"] * (len(lines) - 1) + ["ready"], program.stderr
        told = json.loads(next(line for line in lines if line.startswith("ready")).removeprefix("ready "))
        return told["pid"], told["fork"]

    def kill_one(self, program: Program) -> float:
        """Seconds from the death of a supervisor until everybody is gone."""
        supervisor, fork = self.wait_ready(program)
        branch = f"-{supervisor}"
        if self.state == "stopped":
            stop(self.family.alive(branch))
        with Watch([supervisor]) as itself, Watch([fork] if fork else []) as spared:
            assert leaks.names_held(self.family.alive(branch)) == []
            began = time.perf_counter()
            assert itself.send(supervisor, signal.SIGKILL)
            assert self.family.wait_gone(HARD, branch) == []
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


@pytest.fixture
def kill(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> Callable[[str, str, int], None]:
    def kill(state: str, method: str, rounds: int) -> None:
        doomed = Doomed(state, method, tmp_path)
        with doomed.program(rounds) as program:
            took = [doomed.kill_one(program) for _ in range(rounds)]
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
    doomed = Doomed("unarmed", method, tmp_path)
    with held.interpreters(tmp_path) as interpreters, doomed.program(1) as program:
        supervisor, _ = doomed.wait_ready(program)
        interpreters.wait(count)
        with Watch([supervisor]) as itself, Watch(doomed.family.alive(f"-{supervisor}")) as everybody:
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
