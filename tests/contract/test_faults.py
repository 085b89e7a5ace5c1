"""Whatever is raised while one call is ended costs that call alone: the others end, the slot is filled, and the runner closes.

A fault is injected at each step: at the entry of the first, second, third … function of percore that is called meanwhile, until a
run is not hit any more. What lies in folders is left out: decisions (`_core`) call nothing that could fail, and what is below them
keeps promises of its own. Real faults are those of the system (no memory, an error of a system call) and those of percore.
"""

import asyncio
import contextlib
import functools
import sys
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import percore
from percore import _faults
from percore._core.flow import Cost
from percore._member import Member
from tests import jobs
from tests.contract.conftest import threads_ended, worker_of
from tests.contract.pipes import Gate, Log
from tests.counts import LONG
from tests.fakes import FakeRunner
from tests.internals import supervisor_of

pytestmark = pytest.mark.asyncio_only

SOURCE = str(Path(percore.__file__).parent)

OTHERS = tuple(f"{SOURCE}/{folder}" for folder in ("_core", "_engines", "_ipc", "_worker"))

SPINE = {
    *("_exited", "_bury", "end_calls", "_return", "_give_up", "give_up", "failed_with", "finish"),
    *("_advance_despite", "_take"),
}
"""Functions that keep the steps apart, and begin with that."""


class Fault(OSError):
    """What is injected."""


class Strike:
    """Raises at the entry of one of percore's functions, while it is on."""

    def __init__(self, at: int) -> None:
        """`at`: which of the functions that are called, from 0."""
        self._left = at
        self.name = ""
        """The function that was hit."""

    def _called(self, frame: FrameType, event: str, _argument: Any) -> None:
        code = frame.f_code
        if event != "call" or not code.co_filename.startswith(SOURCE) or code.co_filename.startswith(OTHERS):
            return
        if code.co_filename.endswith("_faults.py") or code.co_name in SPINE or code.co_name in ("done", "<genexpr>"):
            return
        if self._left == 0 and not self.name:
            self.name = code.co_qualname if sys.version_info >= (3, 11) else code.co_name
            raise Fault(f"injected into {self.name}")
        self._left -= 1

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(None if self.name else self._called)
        try:
            yield
        finally:
            sys.settrace(before)


async def outcome(awaitable: Awaitable[Any]) -> Any:
    """What became of a call: its result, or the class of its error."""
    try:
        return await awaitable
    except Exception as error:
        return error


async def story(strike: Strike, log: Log, gate: Gate) -> dict[str, Any]:
    """A worker dies with calls of every kind. What became of each."""
    async with FakeRunner(2, threads=2, concurrency=4, per_key=1) as runner:
        exited = supervisor_of(runner).pool._exited

        def struck(*args: Any) -> None:
            with strike.on():
                exited(*args)

        vars(supervisor_of(runner).pool)["_exited"] = struck
        worker = worker_of(runner)
        again = runner.options(retries=1)
        a, p = jobs.await_, jobs.wait
        calls: dict[str, Awaitable[Any]] = {}

        def add(name: str, made: Awaitable[Any]) -> None:
            calls[name] = asyncio.ensure_future(made)

        for i in range(2):
            add(f"begun {i}", runner.submit(a, log.path, gate.path, i))
            add(f"awaited {i}", runner.run(a, log.path, gate.path, i))
            add(f"retried {i}", again.submit(a, log.path, gate.path, i))
            add(f"plain {i}", runner.submit(p, log.path, gate.path, i))
        add("broadcast", runner.broadcast(a, log.path, gate.path, "b"))
        await log.take(10)
        add("batches", runner.map(functools.partial(jobs.wait_at, log.path, gate.path, 5), range(64)).collect())
        await log.take(1)
        worker.pause()  # what it gets from now on it does not begin
        for i in range(3):
            add(f"large {i}", runner.submit(jobs.alength, bytes(200_000)))
            add(f"behind {i}", runner.submit(jobs.echo, i))
            add(f"keyed {i}", runner.options(key="k").submit(jobs.aecho, i))
        add("map", runner.map(jobs.echo, range(100)).collect())
        add("keyed map", runner.map(jobs.aecho, range(5), key=lambda i: i % 2).collect())
        await asyncio.sleep(0)
        worker.kill()
        while supervisor_of(runner).slots[0].generation == 1:  # noqa: ASYNC110  # there is no event for it
            await asyncio.sleep(0)
        gate.open()
        outcomes = {name: await outcome(call) for name, call in calls.items()}
        await threads_ended(worker)
        while any(one.state != "ready" for one in runner.statistics().workers):  # noqa: ASYNC110  # likewise
            await asyncio.sleep(0)
        assert await runner.broadcast(jobs.aecho, 1) == [1, 1]
        assert await runner.map(jobs.echo, range(30)) == list(range(30))
        snapshot = runner.statistics()
        assert (snapshot.queued, snapshot.running) == (0, 0)
    return outcomes


@pytest.fixture
def sixteen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every batch is of sixteen items, whatever they take."""
    monkeypatch.setattr(Cost, "batch", lambda _, waiting, __: min(16, waiting))


def run(strike: Strike, folder: Path) -> dict[str, Any]:
    """A story in a loop of its own."""
    folder.mkdir()
    log, gate = Log(folder / "log"), Gate(folder / "gate")
    try:
        return asyncio.run(asyncio.wait_for(story(strike, log, gate), 20))
    except TimeoutError as error:
        raise AssertionError(f"a fault in {strike.name} left something without an end") from error
    finally:
        gate.close()
        log.close()


def is_fault(error: object) -> bool:
    return isinstance(error, Fault) or (isinstance(error, percore.WorkerDied) and isinstance(error.__cause__, Fault))


# One fault in 37 was taken in `make test`, too, until that hung once on a loaded machine, in a step that is not known yet.
@pytest.mark.skipif(not LONG, reason="hung once, and is looked into: make long")
@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_fault_at_each_step_of_a_burial(tmp_path: Path, sixteen: None, monkeypatch: pytest.MonkeyPatch) -> None:
    # Without the exceptions, whose tracebacks would keep the memory of all the workers.
    monkeypatch.setattr(_faults, "report", lambda *_, exc_info: None)
    for at in range(100_000):
        strike = Strike(at)
        outcomes = run(strike, tmp_path / str(at))
        failed = {name for name, one in outcomes.items() if is_fault(one)}
        assert len(failed) <= 1, (at, strike.name, failed)
        others = [one for name, one in outcomes.items() if name not in failed and not isinstance(one, percore.WorkerDied)]
        assert not any(isinstance(one, BaseException) for one in others), (at, strike.name, outcomes)
        if not strike.name:
            assert at > 100
            return


@pytest.mark.parametrize("way", ["run", "run with a dict", "submit", "submit with a plan", "broadcast"])
async def test_an_interrupt_while_a_call_is_sent_loses_nothing(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The program gets the KeyboardInterrupt. The call has ended: it takes no place, and the runner closes."""
    send = Member.send

    def interrupted(self: Member, call: Any) -> None:
        monkeypatch.setattr(Member, "send", send)
        raise KeyboardInterrupt

    async with FakeRunner(1, concurrency=1) as runner:
        ways: dict[str, Callable[[], Any]] = {
            "run": lambda: runner.run(jobs.aecho, 1),
            "run with a dict": lambda: runner.run(jobs.aecho, {"a": 1}),
            "submit": lambda: runner.submit(jobs.aecho, 1),
            "submit with a plan": lambda: runner.options(timeout=50).submit(jobs.aecho, [1]),
            "broadcast": lambda: runner.broadcast(jobs.aecho, 1),
        }
        monkeypatch.setattr(Member, "send", interrupted)
        with pytest.raises(KeyboardInterrupt):
            await ways[way]()
        assert await runner.run(jobs.aecho, 2) == 2
        assert (runner.statistics().running, runner.statistics().queued) == (0, 0)
