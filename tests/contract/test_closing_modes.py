"""Closing in every mode over very many calls, and with every other use of it at the same time."""

import asyncio
import functools
import itertools
import math
from typing import Any

import pytest

import percore
from tests import jobs
from tests.contract.conftest import REAL, MakeRunner
from tests.contract.pipes import Gate, Log
from tests.internals import members_of

MANY = 10_000
LIMIT = 30.0

# Closing is the same whatever has started the processes, and many starts of fresh interpreters take long.
some_engines = pytest.mark.parametrize("engine", ["fake", REAL[0]])
one_real_engine = pytest.mark.parametrize("real_engine", REAL[:1])


def ended_as(futures: "list[asyncio.Future[Any]]") -> set[str]:
    """What became of futures, every one of which has ended."""
    assert all(future.done() for future in futures)
    return {
        "cancelled" if future.cancelled() else type(future.exception()).__name__ if future.exception() is not None else "value"
        for future in futures
    }


# Over very many calls


@pytest.mark.asyncio_only
async def test_x1_ten_thousand_are_drained(make_real: MakeRunner) -> None:
    runner = make_real(2)
    await runner.start()
    futures = [runner.submit(jobs.aecho if number % 2 else jobs.echo, number) for number in range(MANY)]
    mapped = asyncio.ensure_future(runner.map(jobs.echo, range(MANY)).collect())
    await asyncio.sleep(0)
    await asyncio.wait_for(runner.aclose(), LIMIT)
    assert [future.result() for future in futures] == list(range(MANY))
    done, _ = await asyncio.wait([mapped])
    assert ended_as([*done]) <= {"value", "RunnerClosed"}  # all of it may have been pulled before


@pytest.mark.asyncio_only
@one_real_engine
async def test_x1_ten_thousand_are_cut_off(make_real: MakeRunner, log: Log, gate: Gate) -> None:
    runner = make_real(2, concurrency=50, threads=2)
    await runner.start()
    futures = [runner.submit(fn, log.path, gate.path, 0) for fn in (jobs.await_, jobs.wait) for _ in range(MANY // 2)]
    mapped = asyncio.ensure_future(runner.map(jobs.await_, [log.path] * MANY, [gate.path] * MANY).collect())
    await log.take(52)
    closing = asyncio.create_task(runner.aclose(grace=0))
    await asyncio.sleep(0)
    gate.open()  # threads cannot be cancelled; these end by themselves
    await asyncio.wait_for(closing, LIMIT)
    assert ended_as(futures) <= {"RunnerClosed", "value"}
    with pytest.raises(percore.RunnerClosed):
        await mapped


@pytest.mark.asyncio_only
@one_real_engine
@pytest.mark.parametrize("how", ["kill_after", "cancelled"])
async def test_x1_ten_thousand_are_killed(make_real: MakeRunner, log: Log, gate: Gate, how: str) -> None:
    runner = make_real(2, concurrency=50, threads=2, kill_after=0.1 if how == "kill_after" else 1000)
    await runner.start()
    calls: list[tuple[Any, tuple[str, ...]]] = [
        (jobs.ignore_cancel, (log.path, gate.path, gate.path)),
        (jobs.wait, (log.path, gate.path)),
    ]
    futures = [runner.submit(fn, *args) for fn, args in calls for _ in range(MANY // 2)]
    await log.take(52)
    closing = asyncio.create_task(runner.aclose(grace=0))
    await asyncio.sleep(0)
    if how == "cancelled":
        closing.cancel()
    await asyncio.wait([closing], timeout=LIMIT)
    assert closing.cancelled() == (how == "cancelled")
    assert ended_as(futures) == {"RunnerClosed"}
    assert not members_of(runner)


@some_engines
@pytest.mark.parametrize("grace", [None, 0])
async def test_peers_16_when_all_that_waited_was_cancelled_or_could_not_be_pickled(
    make: MakeRunner, log: Log, gate: Gate, grace: float | None
) -> None:
    runner = make(threads=1, concurrency=1)
    await runner.start()
    cancelled = [runner.submit(fn, log.path, gate.path) for fn in (jobs.wait, jobs.await_) for _ in range(100)]
    await log.take(2)
    refused = [runner.submit(jobs.echo, jobs.RefusesPickle()) for _ in range(100)]
    for future in cancelled:
        future.cancel()
    closings = [asyncio.create_task(runner.aclose(grace=grace)) for _ in range(3)]
    await asyncio.sleep(0)
    gate.open()
    await asyncio.wait_for(asyncio.gather(*closings), LIMIT)
    assert ended_as(cancelled) == {"cancelled"}
    assert ended_as(refused) == {"ValueError"}


@some_engines
async def test_peers_17_when_closing_returns_every_future_has_ended(make: MakeRunner, log: Log, gate: Gate) -> None:
    runner = make(2, threads=2, concurrency=2)
    await runner.start()
    between: asyncio.Future[Any] = runner.options(retries=1, retry_on=ValueError, backoff=1000).submit(
        jobs.fail, ValueError("again")
    )
    late = runner.options(timeout=0.01).submit(jobs.wait, log.path, gate.path)
    keyed = [runner.options(key=number % 3).submit(jobs.await_, log.path, gate.path, number) for number in range(20)]
    large = [runner.submit(jobs.alength, bytes(200_000)) for _ in range(20)]
    told = asyncio.ensure_future(runner.broadcast(jobs.await_, log.path, gate.path))
    await log.next()
    await asyncio.wait([late])
    closing = asyncio.create_task(runner.aclose())
    await asyncio.sleep(0)
    gate.open()
    await asyncio.wait_for(closing, LIMIT)
    assert ended_as([between]) <= {"RunnerClosed", "ValueError"}  # it may have failed only after that
    assert ended_as([late]) == {"TimeoutError"}
    assert ended_as([*keyed, *large]) == {"value"}
    assert await told == [None, None]


# With every other use of it


@pytest.mark.asyncio_only
@some_engines
@pytest.mark.parametrize("state", ["idle", "busy"])
async def test_x2_every_pair_of_closings(make: MakeRunner, log: Log, gate: Gate, state: str) -> None:
    await close_in_pairs(make, log, (jobs.await_, log.path, gate.path) if state == "busy" else None)


@pytest.mark.asyncio_only
@one_real_engine
async def test_x2_every_pair_of_closings_over_calls_that_have_to_be_killed(
    make_real: MakeRunner, log: Log, gate: Gate, other_gate: Gate
) -> None:
    await close_in_pairs(make_real, log, (jobs.ignore_cancel, log.path, gate.path, other_gate.path))


async def close_in_pairs(make: MakeRunner, log: Log, call: tuple[Any, ...] | None) -> None:
    for first, second in itertools.product([None, 0, 0.01, "cancelled"], [None, 0, "cancelled"]):
        runner = make(concurrency=2, threads=1, kill_after=0.02)
        await runner.start()
        futures: list[asyncio.Future[Any]] = [] if call is None else [runner.submit(*call) for _ in range(4)]
        if futures:
            await log.next()
        closings = []
        for how in (first, second):
            grace: Any = None if how == "cancelled" else how
            closings.append(asyncio.create_task(runner.aclose(grace=grace)))
            await asyncio.sleep(0)
            if how == "cancelled":
                closings[-1].cancel()
        if (first, second) == (None, None):
            closings.append(asyncio.create_task(runner.aclose(grace=0)))
        done, waiting = await asyncio.wait(closings, timeout=LIMIT)
        assert not waiting
        assert all(task.cancelled() or task.exception() is None for task in done)
        assert not futures or ended_as(futures) == {"RunnerClosed"}
        await asyncio.wait_for(runner.aclose(), LIMIT)
        with pytest.raises(percore.RunnerClosed, match="is closed"):
            runner.statistics()


@pytest.mark.asyncio_only
@some_engines
@pytest.mark.parametrize("how", ["start", "aclose", "aclose(0)"])
async def test_x2_cancelled_and_closed_while_it_starts(make: MakeRunner, log: Log, gate: Gate, how: str) -> None:
    for turns in range(6):
        runner = make(2, lifespan=functools.partial(jobs.resource_behind, log.path, gate.path))
        starting = asyncio.create_task(runner.start())
        for _ in range(turns):
            await asyncio.sleep(0)
        closing = asyncio.create_task(runner.aclose(grace=0 if how == "aclose(0)" else None))
        await asyncio.sleep(0)
        (starting if how == "start" else closing).cancel()
        done, waiting = await asyncio.wait([starting, closing], timeout=LIMIT)
        assert not waiting
        for task in done:
            assert task.cancelled() or isinstance(task.exception(), percore.PercoreError | RuntimeError | None)
        await asyncio.wait_for(runner.aclose(), LIMIT)
        with pytest.raises(percore.RunnerClosed):
            _ = runner.submit(jobs.echo)


@some_engines
async def test_x2_closing_from_a_callback_of_a_call(make: MakeRunner, log: Log, gate: Gate) -> None:
    runner = make(concurrency=2)
    await runner.start()
    closings: list[asyncio.Task[None]] = []
    futures = [runner.submit(jobs.await_, log.path, gate.path, number) for number in range(6)]
    for future in futures:
        future.add_done_callback(lambda _: closings.append(asyncio.create_task(runner.aclose(grace=0))))
    await log.take(2)
    futures[3].cancel()
    await asyncio.sleep(0)
    while len(closings) < len(futures):  # each call that is cut off closes once more
        await asyncio.wait_for(asyncio.gather(*closings), LIMIT)
    await asyncio.wait_for(asyncio.gather(*closings), LIMIT)
    assert ended_as(futures) == {"cancelled", "RunnerClosed"}


async def test_x2_the_closing_after_an_error_is_cancelled(make_real: MakeRunner, log: Log, gate: Gate) -> None:
    futures: list[asyncio.Future[Any]] = []
    may_fail = asyncio.Event()

    async def body() -> None:
        async with make_real(kill_after=1000) as runner:
            futures.append(runner.submit(jobs.ignore_cancel, log.path, gate.path, gate.path))
            await may_fail.wait()
            raise KeyError("body")

    task = asyncio.create_task(body())
    assert await log.next() == "began"
    may_fail.set()
    assert await log.next() == "ignored"  # the closing has cancelled it, and it takes no notice
    task.cancel()
    with pytest.raises(asyncio.CancelledError) as caught:
        await asyncio.wait_for(task, LIMIT)
    assert isinstance(caught.value.__context__, KeyError)
    assert ended_as(futures) == {"RunnerClosed"}


@some_engines
async def test_peers_7_plain_functions_where_coroutines_were_expected(make: MakeRunner) -> None:
    async with make() as runner:
        assert await runner.map(math.sqrt, [1, 4, 9]) == [1, 2, 3]
        assert await runner.run(math.sqrt, 16) == 4
        assert [root async for root in runner.map(math.sqrt, [25])] == [5]
        with pytest.raises(ValueError, match=r"math domain error|nonnegative"):
            await runner.run(math.sqrt, -1)
