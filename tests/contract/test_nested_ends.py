"""Calls from inside a call, while their workers drain, are replaced, removed or die, while they are cancelled, and while the runner
closes.
"""

import asyncio
import logging
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, Final, NoReturn

import pytest

import percore
from percore import RunnerClosed, WorkerDied
from percore._protocol.messages import ASK, BrokenFrame, Kind
from percore._protocol.nested_calls import NestedRequest
from percore._supervisor import nested_answers
from tests import nested_jobs as jobs
from tests import nested_walks as walks
from tests.contract.conftest import MakeRunner, kill_arrived, worker_of
from tests.contract.pipes import Gate, Log
from tests.fakes import FakeRunner
from tests.internals import channel_of, members_of, slots_used, supervisor_of
from tests.waiting import until

pytestmark = pytest.mark.differs("nodes", because="the pickles of nested calls are passed on")


async def drain(runner: percore.Runner) -> None:
    worker_of(runner).kill(signal.SIGTERM)
    while runner.statistics().workers[0].generation == 1:
        await runner.run(jobs.echo, 1)


async def resize(runner: percore.Runner) -> None:
    """Remove the worker of the caller, whose slot is the last."""
    await runner.resize(1)


def check_empty(runner: percore.Runner) -> None:
    """Check that no call has left anything behind."""
    for member in members_of(runner):
        member.check_empty()
        assert (member.families, member._aside) == ({}, [0, 0])
    nested = supervisor_of(runner).nested
    assert not nested.held
    assert all(not (room.asked or room.announced or room.lent) for room in nested.rooms.values())
    assert slots_used(runner) == 0


OUTCOMES: Final[dict[str, tuple[Any, ...]]] = {
    "arguments": (jobs.acall, jobs.echo, b"x" * 300_000),
    "result": (jobs.acall, bytes, 300_000),
    "item": (walks.asum_of_large, 2),
}
"""Calls whose nested call has arguments, a result or an item that the supervisor has to copy."""


async def test_r4_a_nested_call_for_whose_copy_there_is_no_memory_ends(
    monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    monkeypatch.setattr(logging.getLogger("percore"), "disabled", True)  # pytest keeps records, whose tracebacks keep memory
    async with FakeRunner(1) as runner:
        answers = supervisor_of(runner).nested.answers
        for name, (fn, *args) in OUTCOMES.items():
            with subtests.test(copied=name), monkeypatch.context() as patch:
                adopt: Any = answers.store.adopt

                def fails(data: bytes, patch: pytest.MonkeyPatch = patch, adopt: Any = adopt) -> Any:
                    if len(data) < 100_000:
                        return adopt(data)
                    patch.undo()
                    raise MemoryError

                patch.setattr(answers.store, "adopt", fails)
                async with asyncio.timeout(20):
                    with pytest.raises(MemoryError):
                        await runner.run(fn, *args)
                    await until(lambda: not supervisor_of(runner).closing.unfinished())
                check_empty(runner)
        assert runner.statistics().restarts == 0


async def test_r4_without_memory_for_its_error_a_nested_call_ends_with_a_memory_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: Any, **__: Any) -> NoReturn:
        raise MemoryError

    async with FakeRunner(1) as runner:
        assert await runner.run(jobs.acall, jobs.echo, 1) == 1
        monkeypatch.setattr(nested_answers, "dump_exception", fails)
        async with asyncio.timeout(20):
            with pytest.raises(MemoryError, match="no memory for the outcome"):
                await runner.options(key="k").run(jobs.with_key, "k")


def ask(caller: int) -> tuple[Any, ...]:
    return tuple(NestedRequest(caller, Kind.TASK, "echo", "jobs", None, False, 0, None, None, (), b"N."))


@pytest.mark.asyncio_only
async def test_v9_what_a_message_about_a_nested_call_breaks_is_no_call_with_its_number(
    log: Log, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with FakeRunner(1) as runner:
        running = runner.submit(jobs.aheld, log.path, gate.path, "x")
        await log.take(1)
        (member,) = members_of(runner)
        (number,) = member.calls

        def fails(*_: Any) -> NoReturn:
            raise ValueError("an error of percore")

        monkeypatch.setattr(supervisor_of(runner).nested, "_call", fails)
        monkeypatch.setattr(supervisor_of(runner).nested, "_refuse", fails)
        with pytest.raises(ValueError, match="of percore"):
            channel_of(member).on_frame([(ASK, number, ask(number))])
        assert list(member.calls) == [number]
        gate.open()
        assert await running == "x"


@pytest.mark.asyncio_only
async def test_v9_a_number_whose_last_answer_was_not_read_is_given_to_no_other_nested_call(log: Log, gate: Gate) -> None:
    """The parcel of the first answer would never be discarded."""
    async with FakeRunner(1) as runner:
        running = runner.submit(jobs.both, log.path, gate.path)
        await log.take(2)
        (member,) = members_of(runner)
        room = supervisor_of(runner).nested.rooms[member]
        room.lent[77] = 0
        with pytest.raises(BrokenFrame, match="made twice"):
            channel_of(member).on_frame([(ASK, 77, ask(next(iter(member.families))))])
        del room.lent[77]
        gate.open()
        await running


@pytest.mark.own_fork_server  # a reload starts another one
@pytest.mark.parametrize("leave", [drain, percore.Runner.reload, resize], ids=["drain", "reload", "resize"])
async def test_a_worker_that_leaves_answers_its_callers(
    make: MakeRunner, log: Log, gate: Gate, leave: Callable[[percore.Runner], Awaitable[None]]
) -> None:
    async with make(2 if leave is resize else 1, concurrency=4, threads=2) as runner:
        calls = [runner.submit(fn, log.path, gate.path, "x") for fn in (jobs.two_in_turn, jobs.two_in_turn_on_a_thread)]
        assert await log.take(2) == ["begun"] * 2
        await leave(runner)
        gate.open()
        async with asyncio.timeout(20):
            assert await asyncio.gather(*calls) == ["firstx"] * 2
        assert runner.statistics().failed == 0
        check_empty(runner)


async def test_a_worker_that_drains_while_the_runner_closes_ends_its_callers(make: MakeRunner, log: Log, gate: Gate) -> None:
    """Nobody takes its place, so the calls that its callers make begin nowhere."""
    runner = make()
    await runner.start()
    calls = [runner.submit(fn, log.path, gate.path, "x") for fn in (jobs.two_in_turn, jobs.two_in_turn_on_a_thread)]
    assert await log.take(2) == ["begun"] * 2
    closing = asyncio.ensure_future(runner.aclose())
    await asyncio.sleep(0)
    members_of(runner)[0].worker.kill(signal.SIGTERM)
    await until(lambda: not members_of(runner)[0].is_ready)
    gate.open()
    async with asyncio.timeout(20):
        assert {type(error) for error in await asyncio.gather(*calls, return_exceptions=True)} == {RunnerClosed}
        await closing


STAGES = ["queued", "running", "ended"]


@asynccontextmanager
async def at(stage: str, make: MakeRunner, log: Log, gate: Gate, other: Gate) -> AsyncIterator[Any]:
    """Give a runner, a caller whose call has come so far, and the other calls that are under way."""
    async with make(concurrency=1, threads=1) as runner:
        if stage == "queued":
            caller = runner.submit(jobs.both, log.path, gate.path)
            assert await log.take(1) == ["begun"]
            others = []
        else:
            caller = runner.submit(jobs.acall, jobs.held, log.path, gate.path, "x")
            assert await log.take(1) == ["begun"]
            others = [runner.submit(jobs.aheld, log.path, other.path, "y")]  # it has the place of the caller
            assert await log.take(1) == ["begun"]
            if stage == "ended":
                gate.open()
                await until(lambda: bool(supervisor_of(runner).nested.held))
        yield runner, caller, others


@pytest.mark.parametrize("stage", STAGES)
async def test_a_caller_that_is_cancelled(make: MakeRunner, log: Log, gate: Gate, other_gate: Gate, stage: str) -> None:
    async with asyncio.timeout(20), at(stage, make, log, gate, other_gate) as (runner, caller, others):
        caller.cancel()
        if stage != "ended":
            gate.open()
        other_gate.open()
        assert await asyncio.gather(*others) == ["y"] * len(others)
        assert await runner.run(jobs.adown, 2) == 2
        await until(lambda: not any(member.calls for member in members_of(runner)))
        check_empty(runner)


@pytest.mark.parametrize("grace", [None, 0])
@pytest.mark.parametrize("stage", STAGES)
async def test_a_runner_that_closes(  # noqa: PLR0917  # fixtures
    make: MakeRunner, engine: str, log: Log, gate: Gate, other_gate: Gate, stage: str, grace: float | None
) -> None:
    async with asyncio.timeout(20), at(stage, make, log, gate, other_gate) as (runner, caller, others):
        members = members_of(runner)
        closing = asyncio.ensure_future(runner.aclose(grace=grace))
        await asyncio.sleep(0)
        if stage != "ended":
            gate.open()
        other_gate.open()
        results = await asyncio.gather(caller, *others, return_exceptions=True)
        await closing
        if grace is None:
            assert results == ([["0", "1"]] if stage == "queued" else ["x", "y"])
        else:
            if engine == "nodes":  # a call may end before its host hears that it is to be cancelled
                results = [result for result in results if isinstance(result, BaseException)]
            assert {type(result) for result in results} <= {RunnerClosed}
            assert results or engine == "nodes"
        for member in members:
            member.check_empty()
        check_empty(runner)


@pytest.mark.parametrize("retries", [0, 1])
@pytest.mark.parametrize("stage", STAGES)
async def test_a_worker_that_dies_with_a_caller_and_its_call(
    make_real: MakeRunner, log: Log, gate: Gate, other_gate: Gate, stage: str, retries: int
) -> None:
    def make(**options: Any) -> percore.Runner:
        return make_real(retries=retries, **options)

    async with asyncio.timeout(20), at(stage, make, log, gate, other_gate) as (runner, caller, others):
        (member,) = members_of(runner)
        member.worker.kill()
        await kill_arrived(member.worker)
        if stage != "ended":
            gate.open()
        other_gate.open()
        results = await asyncio.gather(caller, *others, return_exceptions=True)
        if retries:
            assert results == ([["0", "1"]] if stage == "queued" else ["x", "y"])
        else:
            assert {type(result) for result in results} == {WorkerDied}
        assert await runner.run(jobs.down, 2) == 2
        member.check_empty()
        check_empty(runner)


async def test_a_close_without_grace_ends_a_thread_that_waits_for_its_call(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with asyncio.timeout(20), make(threads=1) as runner:
        caller = runner.submit(jobs.call, jobs.held, log.path, gate.path, "x")
        assert await log.take(1) == ["begun"]
        closing = asyncio.ensure_future(runner.aclose(grace=0))
        await asyncio.sleep(0)
        gate.open()
        with pytest.raises(RunnerClosed):
            await caller
        await closing
