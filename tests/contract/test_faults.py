"""Whatever is raised while one call is ended costs that call alone: the others end, the slot is filled, and the runner closes.

A fault is injected at each step: at the entry of the first, second, third … function of percore that is called meanwhile, until a
run is not hit any more. Some rooms are left out: `tests/unit` injects faults into decisions (`_scheduler`), and what is
below them keeps promises of its own. Real faults are those of the system (no memory, an error of a system call) and those of
percore.
"""

import asyncio
import contextlib
import functools
import gc
import itertools
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, Final, NoReturn, TypeAlias

import pytest

import percore
from percore._common import log as log_module
from percore._scheduler.windows import Cost
from percore._supervisor.burials import Burials
from percore._supervisor.outcomes import Outcomes
from percore._supervisor.supervisor import Supervisor
from tests import jobs
from tests.contract.conftest import threads_ended, worker_of
from tests.contract.pipes import Gate, Log
from tests.counts import LONG
from tests.fakes import FakeRunner
from tests.internals import supervisor_of
from tests.strikes import Fault, Strike
from tests.waiting import until

pytestmark = pytest.mark.asyncio_only

SOURCE: Final = str(Path(percore.__file__).parent)

OTHERS: Final = tuple(
    f"{SOURCE}/{folder}"
    for folder in ("_engines", "_protocol", "_scheduler", "_serialization", "_testing", "_transport", "_worker")
)

SPINE: Final = {
    *(
        "Burials.exited",
        "Burials._bury",
        "Burials._fill",
        "Deaths.end_calls",
        "Deaths._return",
        "Deaths._return.<locals>.each",
        "Deaths._give_up",
    ),
    *("CallRegistry.give_up", "CallRegistry.failed_with"),
    "Supervisor.advance",
    *("Outcomes.receiver.<locals>.receive", "Outcomes._isolate"),
    *("InFlight.ended", "InFlight.failed", "InFlight.broke"),
}
"""Functions that keep the steps apart, and begin with that."""

Story: TypeAlias = Callable[[Strike, Log, Gate], Coroutine[Any, Any, dict[str, Any]]]


def counts(code: CodeType) -> bool:
    """Whether a fault is injected into this function. Properties and methods called `done` only read a field."""
    name = code.co_filename
    if not name.startswith(SOURCE) or name.startswith(OTHERS) or name.endswith("_common/log.py"):
        return False
    return code.co_qualname not in SPINE and code.co_name not in {"done", "<genexpr>"}


async def outcome(awaitable: Awaitable[Any]) -> Any:
    """What became of a call: its result, or its error."""
    try:
        return await awaitable
    except Exception as error:
        return error


class Calls:
    """Calls of every kind, by name."""

    def __init__(self, runner: percore.Runner, log: Log, gate: Gate) -> None:
        self._runner = runner
        self._log = log
        self._gate = gate
        self._made: dict[str, asyncio.Future[Any]] = {}

    def add(self, name: str, made: Awaitable[Any]) -> None:
        """Add one call, or one map."""
        self._made[name] = asyncio.ensure_future(made)

    async def begin(self) -> None:
        """Begin calls that wait at the gate."""
        runner, log, gate = self._runner, self._log.path, self._gate.path
        for i in range(2):
            self.add(f"begun {i}", runner.submit(jobs.await_, log, gate, i))
            self.add(f"awaited {i}", runner.run(jobs.await_, log, gate, i))
            self.add(f"retried {i}", runner.options(retries=1).submit(jobs.await_, log, gate, i))
            self.add(f"plain {i}", runner.submit(jobs.wait, log, gate, i))
        self.add("broadcast", runner.broadcast(jobs.await_, log, gate, "b"))
        await self._log.take(10)
        self.add("batches", runner.map(functools.partial(jobs.wait, log, gate), range(64)).collect())
        await self._log.take(2)  # one in each worker: all threads are taken

    def queue(self) -> None:
        """Make calls that wait behind these."""
        runner = self._runner
        for i in range(3):
            self.add(f"large {i}", runner.submit(jobs.alength, bytes(200_000)))
            self.add(f"behind {i}", runner.submit(jobs.echo, i))
            self.add(f"keyed {i}", runner.options(key="k").submit(jobs.aecho, i))
        self.add("failing", runner.submit(jobs.fail, ValueError("x")))
        self.add("retried failing", runner.options(retries=1).submit(jobs.fail, ValueError("x")))
        self.add("map", runner.map(jobs.echo, range(100)).collect())
        self.add("keyed map", runner.map(jobs.aecho, range(5), key=lambda i: i % 2).collect())

    async def outcomes(self) -> dict[str, Any]:
        """What became of each."""
        return {name: await outcome(call) for name, call in self._made.items()}


async def serves(runner: percore.Runner) -> None:
    """The runner does all it did before."""
    while any(one.state != "ready" for one in runner.statistics().workers):  # noqa: ASYNC110  # there is no event for it
        await asyncio.sleep(0)
    assert await runner.broadcast(jobs.aecho, 1) == [1, 1]
    assert await runner.map(jobs.echo, range(30)) == list(range(30))
    # What was cancelled may still run. A count that does not agree with the calls would never become 0.
    while (counts := runner.statistics()).queued or counts.running:  # noqa: ASYNC110  # there is no event for it
        await asyncio.sleep(0)
    calls = supervisor_of(runner).calls
    assert not calls.is_moving, "calls that are cancelled from now on would never be withdrawn"
    assert not calls.withdrawn


async def death(strike: Strike, log: Log, gate: Gate) -> dict[str, Any]:
    """A worker dies with calls of every kind."""
    async with FakeRunner(2, threads=2, concurrency=4, per_key=1) as runner:
        try:
            worker = worker_of(runner)
            calls = Calls(runner, log, gate)
            await calls.begin()
            worker.pause()  # what it gets from now on it does not begin
            calls.queue()
            await asyncio.sleep(0)
            worker.kill()
            while runner.statistics().workers[0].generation == 1:  # noqa: ASYNC110  # there is no event for it
                await asyncio.sleep(0)
        finally:
            gate.open()  # also after a failure: a fake worker that ends waits for its threads
        outcomes = await calls.outcomes()
        await threads_ended(worker)
        await serves(runner)
    return outcomes


async def life(strike: Strike, log: Log, gate: Gate) -> dict[str, Any]:
    """Workers send outcomes of every kind."""
    strike.is_armed = False
    async with FakeRunner(2, threads=2, concurrency=4, per_key=1) as runner:
        workers = [worker_of(runner, 0), worker_of(runner, 1)]
        try:
            calls = Calls(runner, log, gate)
            await calls.begin()
            calls.queue()
            await asyncio.sleep(0)
            strike.is_armed = True
        finally:
            gate.open()
        outcomes = await calls.outcomes()
        strike.is_armed = False
        for index, worker in enumerate(workers):
            if worker.exitcode is not None:  # killed, perhaps just now: a broadcast would still go to it
                await threads_ended(worker)
                while runner.statistics().workers[index].generation == 1:  # noqa: ASYNC110  # there is no event for it
                    await asyncio.sleep(0)
        await serves(runner)
    return outcomes


@pytest.fixture
def sixteen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every batch is of sixteen items, whatever they take."""
    monkeypatch.setattr(Cost, "batch", lambda _, waiting, __: min(16, waiting))
    # Without the exceptions, whose tracebacks would keep the memory of all the workers.
    monkeypatch.setattr(log_module, "report", lambda *_, exc_info: None)


def run(story: Story, strike: Strike, folder: Path) -> dict[str, Any]:
    """A story in a loop of its own."""
    folder.mkdir()
    log, gate = Log(folder / "log"), Gate(folder / "gate")
    gc.collect()
    gc.disable()  # the end of an earlier story's runner is no step of this one
    try:
        return asyncio.run(asyncio.wait_for(story(strike, log, gate), 20))
    except TimeoutError as error:
        raise AssertionError(f"fault {folder.name}, in {strike.name}: something has no end") from error
    except Exception as error:
        error.add_note(f"after fault {folder.name}, in {strike.name}")
        raise
    finally:
        gc.enable()
        gate.close()
        log.close()


def is_fault(error: object) -> bool:
    return isinstance(error, Fault) or (isinstance(error, percore.WorkerDied) and isinstance(error.__cause__, Fault))


def is_expected(name: str, one: object) -> bool:
    return not isinstance(one, BaseException) or isinstance(one, percore.WorkerDied) or "failing" in name


def every(story: Story, folder: Path, most: int) -> None:
    """A fault at each step: it costs at most so many calls beside those of workers that died."""
    for at in range(0, 100_000, 1 if LONG else 37):
        strike = _now[0] = Strike(at, counts)
        outcomes = run(story, strike, folder / str(at))
        failed = {name for name, one in outcomes.items() if is_fault(one)}
        assert len(failed) <= most, (at, strike.name, failed)
        assert all(is_expected(name, one) for name, one in outcomes.items() if name not in failed), (at, strike.name, outcomes)
        if not strike.name:
            assert at > 100
            return


_now: list[Strike] = [Strike(0, lambda _: False)]
"""The strike of the current story."""


def struck(run: Callable[..., Any]) -> Callable[..., Any]:
    """The same function, while whose runs the current strike is on."""

    def run_struck(*args: Any) -> Any:
        with _now[0].on():
            return run(*args)

    return run_struck


def test_a_fault_just_after_a_replacement_was_started(tmp_path: Path, sixteen: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """The slot knows its worker by then, and gets another one."""
    monkeypatch.setattr(Burials, "exited", struck(Burials.exited))
    strike = _now[0] = Strike(0, lambda code: code.co_qualname == "Placeless.look")
    run(death, strike, tmp_path / "0")
    assert strike.name


def test_a_fault_at_the_end_of_each_move_of_calls(tmp_path: Path, sixteen: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """What moves calls must not seem to go on: a call that is cancelled later would never be withdrawn."""
    monkeypatch.setattr(Burials, "exited", struck(Burials.exited))
    monkeypatch.setattr(Supervisor, "advance", struck(Supervisor.advance))
    for mover in ("Deaths._end", "Deaths._lost_item", "Deaths._return", "CallRegistry._accept_again", "CallRegistry.send_waiting"):
        strike = _now[0] = Strike(0, functools.partial(ends, mover))
        run(death, strike, tmp_path / mover)
        assert strike.name, mover


def ends(mover: str, code: CodeType) -> bool:
    """Whether this function is called at the end of a move."""
    return code.co_qualname == "CallRegistry.moved" and sys._getframe(3).f_code.co_qualname == mover


def test_a_fault_as_an_item_of_a_dead_batch_ends(tmp_path: Path, sixteen: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Burials, "exited", struck(Burials.exited))
    strike = _now[0] = Strike(0, lambda code: code.co_qualname == "Item.set_exception")
    outcomes = run(death, strike, tmp_path / "0")
    assert strike.name
    assert is_fault(outcomes["batches"])


class Interrupted(BaseException):
    """As a KeyboardInterrupt, but the loop goes on."""


def interrupt() -> NoReturn:
    raise Interrupted


def submits(code: CodeType) -> bool:
    """Whether this is a step in which a map makes items of inputs."""
    frame: FrameType | None = sys._getframe(2)
    while frame is not None and frame.f_code.co_qualname != "Feeder._submit":
        frame = frame.f_back
    return frame is not None and code.co_filename.startswith(SOURCE) and code.co_name != "note"  # of the audit, by a collection


@pytest.mark.loop_reports  # of a feeder that was interrupted
@pytest.mark.parametrize("after_builtins", [False, True])
@pytest.mark.parametrize(("fn", "key"), [(jobs.echo, None), (jobs.aecho, None), (jobs.aecho, lambda i: i % 2)])
async def test_p6_a_map_ends_after_a_ctrl_c_at_each_step_of_an_item(fn: Any, key: Any, after_builtins: bool) -> None:
    """It ends with an error, or with all results."""
    async with FakeRunner(1, concurrency=2, threads=1) as runner:
        assert await runner.map(fn, range(3), key=key) == [0, 1, 2]
        for at in itertools.count():
            strike = Strike(at, submits, interrupt, after_builtins=after_builtins)
            async with asyncio.timeout(5):
                with strike.on():
                    error = await outcome(runner.map(fn, range(3), key=key).collect())
            assert isinstance(error, Exception) or error == [0, 1, 2], strike.name
            if not strike.name:
                break
        assert at > 5


@pytest.mark.parametrize("step", ["Keys.left", "Keys.ended", "CallRegistry.returned", "CallRegistry.put_back"])
def test_p6_calls_end_after_a_ctrl_c_as_others_end_or_come_back(step: str, tmp_path: Path, sixteen: None) -> None:
    """The worker is killed. The key of its calls is free, and what it had handed back is not lost."""
    log, gate = Log(tmp_path / "log"), Gate(tmp_path / "gate")
    strike = Strike(0, lambda code: code.co_qualname == step, ctrl_c)

    async def use() -> list[Any]:
        async with FakeRunner(1, concurrency=1, threads=1) as runner:
            keyed = [runner.options(key="a", retries=1).submit(jobs.aecho, i) for i in range(4)]
            plain = [outcome(runner.submit(jobs.wait, log.path, gate.path, i)) for i in range(2)]
            mapped = outcome(runner.map(functools.partial(jobs.wait, log.path, gate.path), range(32)).collect())
            rest = asyncio.gather(*plain, mapped)
            await log.next()
            reloading = asyncio.ensure_future(outcome(runner.reload()))  # what has not begun comes back
            async with asyncio.timeout(5):
                await until(lambda: bool(strike.name))
                gate.open()
                await asyncio.gather(*keyed, rest, reloading)
            return [call.result() for call in keyed]

    with asyncio.Runner() as loop, strike.on():
        task = loop.get_loop().create_task(use())
        for _ in range(2):
            with contextlib.suppress(KeyboardInterrupt):
                loop.get_loop().run_until_complete(task)
    gate.close()
    log.close()
    assert task.result() == [0, 1, 2, 3]


def ctrl_c() -> NoReturn:
    raise KeyboardInterrupt


@pytest.mark.loop_reports  # of the audit: the count is wrong until the supervisor catches up
async def test_p6_a_close_ends_after_a_ctrl_c_as_a_waiting_call_was_cancelled(log: Log, gate: Gate) -> None:
    """It came after the future was cancelled, and before its queue counted that. The map has a queue that takes turns with it."""
    strike = Strike(0, lambda code: code.co_qualname == "CallRegistry.cancelled", ctrl_c)
    async with FakeRunner(1, concurrency=1) as runner:
        first = runner.submit(jobs.await_, log.path, gate.path, 1)
        await log.next()
        mapped = asyncio.ensure_future(runner.map(jobs.aecho, range(3)).collect())
        call = runner.submit(jobs.aecho, 2)
        with pytest.raises(KeyboardInterrupt), strike.on():
            call.cancel()
        await until(lambda: runner.statistics().queued == 4)
        gate.open()
        await asyncio.gather(first, mapped)
        supervisor_of(runner).catch_up()  # as the loop does while calls seem to wait
        async with asyncio.timeout(5):
            await runner.aclose()


@pytest.mark.loop_reports  # of the interrupt
@pytest.mark.parametrize("step", ["MapLife.advance", "InFlight.wake"])
async def test_p6_a_map_ends_after_a_ctrl_c_at_the_last_step_of_its_feeder(step: str) -> None:
    async def last(until: "asyncio.Future[None]") -> AsyncIterator[int]:
        yield 1
        await until

    def is_last(code: CodeType) -> bool:
        return code.co_qualname == step and sys._getframe(3).f_code.co_qualname == "Feeder._feed"

    strike = Strike(0, is_last, interrupt)
    async with FakeRunner(1) as runner:
        has_result = asyncio.get_running_loop().create_future()
        results = aiter(runner.map(jobs.aecho, last(has_result)))
        assert await anext(results) == 1
        with strike.on():
            has_result.set_result(None)
            async with asyncio.timeout(5):
                assert [one async for one in results] == []
    assert strike.name


@pytest.mark.loop_reports  # of the interrupt
async def test_p6_a_map_ends_after_a_ctrl_c_as_the_result_of_an_item_arrives() -> None:
    strike = Strike(0, lambda code: code.co_qualname == "InFlight.ended", interrupt)
    async with FakeRunner(1) as runner:
        with strike.on():
            async with asyncio.timeout(5):
                with pytest.raises(RuntimeError, match="Interrupted"):
                    await runner.map(jobs.aecho, [1], key=str)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_fault_at_each_step_of_a_burial(tmp_path: Path, sixteen: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Burials, "exited", struck(Burials.exited))
    every(death, tmp_path, 1)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_a_fault_at_each_step_of_an_outcome(
    tmp_path: Path, sixteen: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    receiver = Outcomes.receiver
    monkeypatch.setattr(Outcomes, "receiver", lambda *args: struck(receiver(*args)))
    monkeypatch.setattr(Supervisor, "advance", struck(Supervisor.advance))
    every(life, tmp_path, 1)
    assert "KeyError" not in caplog.text  # each outcome was of a call that the supervisor still knew
