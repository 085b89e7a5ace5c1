"""The end of a process as its launcher tells it: once, whatever interrupts the telling."""

import asyncio
import os
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from percore._common.worker_errors import how
from percore._engines.processes.descriptors import Fd, hold, pipe
from percore._engines.processes.launch import Watched
from percore._engines.processes.spawn_launcher import ThreadWatchedProcess
from percore._protocol.interfaces import Exit
from percore._scheduler.lifecycle import State
from percore._supervisor.burials import Burials, _explained
from tests import jobs
from tests.contract.conftest import worker_of
from tests.fakes import FakeRunner
from tests.internals import supervisor_of

STRUCK = ("processes/launch.py", "processes/descriptors.py", "_common/sure_handles.py")


class Dead(Watched):
    """A process that has ended: its pidfd is readable."""

    def __init__(self, loop: asyncio.AbstractEventLoop, on_exit: Callable[[int | None], None], codes: list[int | None]) -> None:
        super().__init__(loop, on_exit)
        self._codes = codes
        read_end, write_end = os.pipe()
        os.close(write_end)
        self._watch(1, hold(Fd(read_end)))

    def _known_code(self, pidfd: Fd) -> int | None:
        return self._codes.pop(0) if len(self._codes) > 1 else self._codes[0]

    def _patience(self) -> float:
        return 0.0


@contextmanager
def ctrl_c(at: int) -> Iterator[list[str]]:
    """Raise KeyboardInterrupt at the entry or at the end of one of the functions that a death calls. Yield its name."""
    left, hit = [at], list[str]()

    def strike(frame: FrameType, event: str) -> None:
        if left[0] == 0:
            hit.append(f"{event} {frame.f_code.co_qualname}")
        left[0] -= 1
        if left[0] == -1:
            raise KeyboardInterrupt

    def ends(frame: FrameType, event: str, _argument: Any) -> Any:
        if event == "return":
            strike(frame, event)
        return ends

    def called(frame: FrameType, event: str, _argument: Any) -> Any:
        if not frame.f_code.co_filename.endswith(STRUCK):
            return None
        strike(frame, event)
        return ends

    before = sys.gettrace()
    sys.settrace(called)
    try:
        yield hit
    finally:
        sys.settrace(before)


@pytest.mark.parametrize("codes", [[3], [None, 3], [None, None]], ids=str)
def test_p6_an_exit_is_told_although_ctrl_c_comes_at_any_step(codes: list[int | None], subtests: pytest.Subtests) -> None:
    for at in range(100):
        told: list[int | None] = []
        loop = asyncio.new_event_loop()
        try:
            dead = Dead(loop, told.append, list(codes))
            with ctrl_c(at) as hit:
                try:
                    loop.run_until_complete(asyncio.sleep(0.01))
                except KeyboardInterrupt:
                    assert hit
            with subtests.test(hit[0] if hit else "no interrupt"):
                loop.run_until_complete(asyncio.sleep(0.01))
                assert set(told) == {codes[-1]}
                assert dead._pidfd is None
        finally:
            loop.close()
        if not hit:
            assert len(told) == 1
            return
    raise AssertionError("the steps have no end")


async def test_p6_a_burial_that_ctrl_c_has_ended_is_ended_by_the_next_call(
    monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    """A launcher calls once more if the first call raised one."""
    for name in ("_fill", "_report_death", "_bury"):
        steps: Any = vars(Burials)[name]

        def interrupted(self: Burials, *args: Any, name: str = name, steps: Any = steps, **kwargs: Any) -> None:
            monkeypatch.setattr(Burials, name, steps)
            raise KeyboardInterrupt

        with subtests.test(name):
            async with FakeRunner(1) as runner:
                burials = supervisor_of(runner).pool._burials
                exited = burials.exited

                def told(*args: Any, exited: Any = exited) -> None:
                    try:
                        exited(*args)
                    except KeyboardInterrupt:
                        exited(*args)

                monkeypatch.setattr(burials, "exited", told)
                monkeypatch.setattr(Burials, name, interrupted)
                worker_of(runner).kill()
                assert await asyncio.wait_for(runner.run(jobs.aecho, 1), 10) == 1
                assert runner.statistics().workers[0].generation == 2


def test_sigterm_is_explained_by_the_state_in_which_it_came() -> None:
    """A worker of a Runner drains if it is ready, and one of a pool does not: then there is nothing to explain."""
    told: dict[State, str] = {}
    for state in State:
        member: Any = SimpleNamespace(memory=None, life=SimpleNamespace(state=state))
        told[state] = how(-15, _explained(Exit(-15), member).why)
    assert told == dict.fromkeys(State, "by SIGTERM") | {
        State.STARTING: "by SIGTERM (terminated while it was starting)",
        State.DRAINING: "by SIGTERM (terminated while it was draining)",
    }


def test_x5_a_fork_of_the_program_ends_no_worker_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the fork a timer of the loop may kill what was a worker, as if it were its own."""
    killed: list[int] = []
    copied: Any = SimpleNamespace(_owner=os.getppid(), _lock=threading.Lock(), _alive=True, pid=1)
    copied._lock.acquire()  # by a thread that the fork does not have
    monkeypatch.setattr(os, "kill", lambda pid, _signum: killed.append(pid))
    ThreadWatchedProcess.kill(copied)
    assert killed == []


def test_a_collection_that_kills_a_worker_as_it_is_reaped_does_not_hang(monkeypatch: pytest.MonkeyPatch) -> None:
    """A runner that was dropped, and whose loop is closed, kills its workers in whatever thread the collection runs."""
    told: list[int | None] = []
    loop = asyncio.new_event_loop()
    watched: list[ThreadWatchedProcess] = []
    reap = os.waitpid

    def waitpid(pid: int, options: int) -> tuple[int, int]:
        watched[0].kill()
        return reap(pid, options)

    pid = os.posix_spawn(sys.executable, [sys.executable, "-I", "-S", "-c", "import signal; signal.alarm(60); signal.pause()"], {})
    monkeypatch.setattr(os, "waitpid", waitpid)
    read_end, lifeline = pipe()
    read_end.close()
    try:
        watched.append(ThreadWatchedProcess(loop, pid, lifeline, told.append))
        watched[0].kill()
        waiter = watched[0]._thread
        waiter.join(10)
        assert not waiter.is_alive()
        loop.run_until_complete(asyncio.sleep(0))
        assert told == [-9]
    finally:
        loop.close()
