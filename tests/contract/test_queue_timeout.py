"""queue_timeout: how long a call may wait until it begins. Nothing here measures time: what is awaited ends by it or never."""

import asyncio
from typing import Any, cast

import pytest

import percore
from percore._engines.nodes.worker import NodeWorker
from percore._protocol.interfaces import Fate
from percore._scheduler.places import MOST_BROADCASTS
from tests import jobs
from tests.contract.conftest import MakeRunner, threads_ended, worker_of
from tests.contract.pipes import Gate, Log
from tests.fakes import FakeWorker
from tests.internals import members_of, slots_used, supervisor_of

pytestmark = pytest.mark.differs("nodes", because="nobody reads start marks of nodes")
timed = pytest.mark.differs("uvloop", because="uvloop's clock has coarse ticks")

TINY = 0.02
SOON = 0.3
"""For what has to begin in time."""

LONG = 1e6
LATE = "did not begin within queue_timeout=0.02 s, and never runs"
FULL = pytest.mark.parametrize(("holding", "fn"), [(jobs.await_, jobs.await_), (jobs.wait, jobs.wait)], ids=["task", "thread"])


async def hold(
    runner: percore.Runner | percore.Options, holding: Any, log: Log, gate: Gate, places: int = 1
) -> list[asyncio.Future[Any]]:
    """Take all places of this kind until the gate is open."""
    held = [runner.submit(holding, log.path, gate.path, f"holds {i}") for i in range(places)]
    await log.take(places)
    return held


@timed
@FULL
async def test_what_waits_too_long_never_runs(make: MakeRunner, log: Log, gate: Gate, holding: Any, fn: Any) -> None:
    async with make(concurrency=1, threads=1) as runner:
        held = await hold(runner, holding, log, gate)
        view = runner.options(queue_timeout=TINY, retries=5, retry_on=TimeoutError)
        large = bytes(300_000)
        awaited = [asyncio.ensure_future(view.run(fn, log.path, gate.path, what)) for what in (1, [2], large)]
        submitted = [view.submit(fn, log.path, gate.path, what) for what in (1, [2], large)]
        mapped = asyncio.ensure_future(
            view.map(fn, [log.path] * 3, [gate.path] * 3, [4, [5], large], return_exceptions=True).collect()
        )
        errors = await asyncio.gather(*awaited, *submitted, return_exceptions=True) + cast(list[Any], await mapped)
        assert {(type(error), str(error)) for error in errors} == {(TimeoutError, f"{fn.__qualname__} {LATE}")}
        gate.open()
        await asyncio.gather(*held)
        assert await runner.run(fn, log.path, gate.path, "next") == "next"
        assert log.rest() == ["next"]
        assert slots_used(runner) == 0
        assert runner.statistics().queued == runner.statistics().running == runner.statistics().retried == 0


@timed
async def test_wherever_it_waits_its_time_ends(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(concurrency=1, threads=1, per_key=1) as runner:
        held = await hold(runner.options(key="k"), jobs.await_, log, gate)
        told = [asyncio.ensure_future(runner.broadcast(jobs.await_, log.path, gate.path, "told")) for _ in range(MOST_BROADCASTS)]
        await log.take(MOST_BROADCASTS)
        limited = runner.options(queue_timeout=TINY)
        late = [
            runner.options(key="k", queue_timeout=TINY).run(jobs.aecho, 1),
            limited.broadcast(jobs.aecho, 2),
            limited.map(jobs.aecho, [3], key=lambda _: "k").collect(),
            limited.map(jobs.aecho, [4]).collect(),
        ]
        errors = await asyncio.gather(*late, return_exceptions=True)
        assert [str(error) for error in errors] == [f"aecho {LATE}"] * 4
        gate.open()
        await asyncio.gather(*held, *told)
        assert log.rest() == []


async def test_in_time(make: MakeRunner, subtests: pytest.Subtests) -> None:
    fns: list[Any] = [jobs.echo, jobs.aecho, jobs.later]
    async with make(threads=2) as runner:
        view = runner.options(queue_timeout=60)
        large = [bytes(300_000)]
        for fn in fns:
            with subtests.test(fn.__name__):
                calls = [runner.options(queue_timeout=60 + n).run(fn, n) for n in range(100)]
                assert await asyncio.gather(*calls) == list(range(100))
                mixed = [view.submit(fn, 1), runner.submit(fn, 2), view.submit(fn, large), runner.submit(fn, large)]
                assert await asyncio.gather(*mixed) == [1, 2, large, large]
                assert await view.map(fn, range(300)) == list(range(300))
                assert await view.broadcast(fn, 7) == [7]
                both = runner.options(queue_timeout=60, timeout=60, retries=2)
                assert await both.map(fn, [1, large], key=type) == [1, large]


@FULL
async def test_what_has_begun_is_not_limited(make: MakeRunner, log: Log, gate: Gate, holding: Any, fn: Any) -> None:
    async with make(concurrency=1, threads=1) as runner:
        begun = runner.options(queue_timeout=SOON).submit(holding, log.path, gate.path, 7)
        assert await log.next() == "7"
        with pytest.raises(TimeoutError):  # so long has passed, at least
            await runner.options(queue_timeout=1.1 * SOON).run(fn, log.path, gate.path, "never")
        gate.open()
        assert await begun == 7


async def test_a_worker_that_reads_nothing_begins_nothing_late(make: MakeRunner, log: Log, gate: Gate, other_gate: Gate) -> None:
    """A blocked loop cannot say what has begun, and yet callers hear in time. On another node they hear when the worker answers."""
    other_gate.open()
    async with make(concurrency=10, threads=1, per_key=1) as runner:
        held = runner.options(key="k").submit(jobs.wait, log.path, gate.path, 0)
        assert await log.next() == "0"
        worker = worker_of(runner)
        if isinstance(worker, FakeWorker):
            worker.pause()
        else:
            blocking = runner.submit(jobs.block_loop, log.path, gate.path)
            assert await log.next() == "blocked"
        view = runner.options(queue_timeout=TINY)
        calls = [
            view.submit(fn, log.path, other_gate.path, what) for fn in (jobs.await_, jobs.wait) for what in (1, [2], bytes(300_000))
        ]
        calls += [asyncio.ensure_future(view.run(fn, log.path, other_gate.path, 1)) for fn in (jobs.await_, jobs.wait)]
        told = asyncio.ensure_future(view.broadcast(jobs.aecho, 1))
        with pytest.raises(TimeoutError):  # so long has passed, at least
            await runner.options(queue_timeout=2 * TINY, key="k").run(jobs.aecho, 1)
        if isinstance(worker, NodeWorker):
            await runner.usage()  # its host reads in order: it answers when it has handed over the recalls
            gate.open()
        errors = await asyncio.gather(*calls, told, return_exceptions=True)
        assert [type(error) for error in errors] == [TimeoutError] * 9
        gate.open()  # a thread begins the next of its calls before the loop reads that it was cancelled
        if isinstance(worker, FakeWorker):
            await held
            worker.resume()
        else:
            await asyncio.gather(held, blocking)
        assert await runner.run(jobs.await_, log.path, other_gate.path, "next") == "next"
        assert await runner.run(jobs.wait, log.path, other_gate.path, "next") == "next"
        assert log.rest() == ["next", "next"]
        assert slots_used(runner) == 0
        assert not any(member.calls for member in members_of(runner))


@FULL
async def test_its_worker_dies_before_it_begins(make: MakeRunner, log: Log, gate: Gate, holding: Any, fn: Any) -> None:
    async with make(concurrency=1, threads=1) as runner:
        held = await hold(runner, holding, log, gate)
        call = runner.options(queue_timeout=TINY).submit(fn, log.path, gate.path, "never")
        patient = runner.options(queue_timeout=60).submit(fn, log.path, gate.path, "runs")
        worker = worker_of(runner)
        worker.kill()
        with pytest.raises(percore.WorkerDied):
            await held[0]
        while (said := await log.next()).startswith("cancelled"):  # by the death of a fake worker
            pass
        gate.open()
        result = (await asyncio.gather(call, return_exceptions=True))[0]
        assert result == "never" if said == "never" else isinstance(result, TimeoutError)
        assert await patient == "runs"
        await threads_ended(worker)


async def test_its_worker_dies_when_it_is_too_late(make: MakeRunner, log: Log, gate: Gate, monkeypatch: pytest.MonkeyPatch) -> None:
    """1. the mark is seen  2. the worker clears it, since it is too late  3. it dies  4. no other worker gets ready."""
    async with make(threads=1) as runner:
        held = await hold(runner, jobs.wait, log, gate)
        call = runner.options(queue_timeout=TINY).submit(jobs.echo, "never")
        (member,), engine = members_of(runner), supervisor_of(runner).engine
        worker, fate = worker_of(runner), member.fate
        with monkeypatch.context() as patched:
            patched.setattr(member, "fate", lambda one: Fate(begun=True) if one is call else fate(one))
            with pytest.raises(TimeoutError, match=LATE.replace("0.02", "0.04")):  # by then that one was looked at
                await runner.options(queue_timeout=2 * TINY).run(jobs.echo, "never")
        with monkeypatch.context() as patched:
            patched.setattr(engine, "start", lambda *_: None)
            worker.kill()
            with pytest.raises(TimeoutError, match=LATE):
                await call
        with pytest.raises(percore.WorkerDied):
            await held[0]
        gate.open()
        engine.on_place()
        assert await runner.run(jobs.echo, 1) == 1
        await threads_ended(worker)  # a fake worker's memory goes with the last of its threads


async def test_later_attempts_wait_as_long_as_they_must(make: MakeRunner, log: Log, gate: Gate, other_gate: Gate) -> None:
    async with make(concurrency=1) as runner:
        view = runner.options(queue_timeout=SOON, retries=1, retry_on=ValueError)
        call = view.submit(jobs.wait_and_fail, log.path, other_gate.path)
        assert await log.next() == "waits"
        following = runner.submit(jobs.await_, log.path, gate.path, 7)
        other_gate.open()
        assert await log.next() == "7"
        with pytest.raises(TimeoutError):  # so long has passed, at least
            await runner.options(queue_timeout=SOON).run(jobs.aecho, 1)
        gate.open()
        with pytest.raises(ValueError, match="after the gate"):
            await call
        assert await following == 7
        assert log.rest() == ["waits"]


async def test_the_wait_for_the_runner_counts(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(max_pending=1) as runner:
        held = await hold(runner, jobs.await_, log, gate)
        view = runner.options(queue_timeout=TINY)
        with pytest.raises(TimeoutError, match=r"the runner did not accept the call within queue_timeout=0\.02 s"):
            await view.run(jobs.aecho, 1)
        gate.open()
        await asyncio.gather(*held)
        assert await runner.options(queue_timeout=60).run(jobs.aecho, 1) == 1


@FULL
async def test_cancelled_and_closed(make: MakeRunner, log: Log, gate: Gate, holding: Any, fn: Any) -> None:
    runner = make(concurrency=1, threads=1)
    await runner.start()
    held = await hold(runner, holding, log, gate)
    cancelled = runner.options(queue_timeout=TINY).submit(fn, log.path, gate.path, "never")
    cancelled.cancel()
    calls = [runner.options(queue_timeout=seconds).submit(fn, log.path, gate.path, "never") for seconds in (TINY, LONG)]
    closing = asyncio.create_task(runner.aclose())
    with pytest.raises(TimeoutError):
        await calls[0]
    tight = asyncio.create_task(runner.aclose(grace=0))
    with pytest.raises(percore.RunnerClosed):
        await calls[1]
    gate.open()
    await asyncio.gather(closing, tight, *held, return_exceptions=True)
    assert "never" not in log.rest()


async def test_bad_ones_are_refused(make: MakeRunner, subtests: pytest.Subtests) -> None:
    async with make() as runner:
        for seconds in [0, -1, float("nan"), float("inf"), "1", True]:
            with subtests.test(seconds=seconds), pytest.raises((TypeError, ValueError), match="queue_timeout"):
                runner.options(queue_timeout=cast(Any, seconds))


async def test_an_error_while_calls_are_looked_through_loses_no_timeout(
    make: MakeRunner, log: Log, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Such as the KeyboardInterrupt of a Ctrl-C."""
    monkeypatch.setenv("PERCORE_DEBUG", "0")  # the audit looks at all calls, too
    told: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: told.append(str(context["exception"])))
    async with make(concurrency=1) as runner:
        calls = supervisor_of(runner).calls
        pending, errors = calls.pending, ["first", "second"]

        def interrupted() -> Any:
            if errors:
                raise RuntimeError(errors.pop(0))
            return pending()

        monkeypatch.setattr(calls, "pending", interrupted)
        with pytest.raises(TimeoutError, match="ran for longer"):
            await runner.options(hard_timeout=TINY).run(jobs.await_, log.path, gate.path, "runs")
        assert told == ["first", "second"]
        assert await log.take(2) == ["runs", "cancelled runs"]
        held = await hold(runner, jobs.await_, log, gate)
        errors += ["third", "fourth"]
        with pytest.raises(TimeoutError, match=LATE):
            await runner.options(queue_timeout=TINY).run(jobs.await_, log.path, gate.path)
        assert told == ["first", "second", "third", "fourth"]
        gate.open()
        await asyncio.gather(*held)
