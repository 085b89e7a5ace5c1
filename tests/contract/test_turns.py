"""Maps and single calls take turns: what waits in one queue never waits for the end of another."""

import asyncio
import itertools
from typing import Any

import pytest

from tests import jobs
from tests.contract.conftest import MakeRunner
from tests.contract.pipes import Gate, Log
from tests.rows import repeats

pytestmark = pytest.mark.differs("uvloop", because="what one iteration of the loop takes up is the loop's choice")

BOTH = pytest.mark.parametrize("fn", [jobs.echo, jobs.aecho])


async def _consume(results: Any) -> None:
    """Use an endless map until it is closed."""
    async for _ in results:
        pass


@BOTH
@pytest.mark.parametrize("bulk", [jobs.echo, jobs.aecho])
@pytest.mark.parametrize("workers", [*repeats(1), 2])
async def test_a_run_beside_an_endless_map(make: MakeRunner, fn: Any, bulk: Any, workers: int) -> None:
    async with make(workers, concurrency=2, threads=1) as runner:
        async with runner.map(bulk, itertools.count()) as results:
            task = asyncio.create_task(_consume(results))
            for i in range(20):
                assert await runner.run(fn, i) == i
            assert await asyncio.gather(*(runner.run(fn, i) for i in range(50))) == list(range(50))
            assert not task.done()
        await task


@BOTH
async def test_a_run_is_done_before_a_list_of_many(make: MakeRunner, fn: Any) -> None:
    async with make(2) as runner:
        task = asyncio.create_task(runner.map(fn, range(200_000)).collect())
        await asyncio.sleep(0)
        for one in (jobs.echo, jobs.aecho):
            assert await runner.run(one, 1) == 1
        assert not task.done()
        task.cancel()
        await asyncio.wait([task])


@BOTH
async def test_maps_of_different_sizes_all_advance(make: MakeRunner, fn: Any) -> None:
    async with make(2, concurrency=3, threads=2) as runner:
        async with runner.map(fn, itertools.count()) as endless, runner.map(fn, itertools.count()) as another:
            tasks = [asyncio.create_task(_consume(endless)), asyncio.create_task(_consume(another))]
            assert await runner.map(fn, range(1000)) == list(range(1000))
            assert await runner.map(fn, range(10)) == list(range(10))
            assert not any(task.done() for task in tasks)
        await asyncio.gather(*tasks)


@BOTH
async def test_a_map_beside_single_calls_without_end(make: MakeRunner, fn: Any) -> None:
    is_over = False

    async def calls() -> None:
        while not is_over:
            await asyncio.gather(*(runner.run(fn, i) for i in range(20)))

    async with make(concurrency=2, threads=1) as runner:
        tasks = [asyncio.create_task(calls()) for _ in range(3)]
        assert await runner.map(fn, range(200)) == list(range(200))
        is_over = True
        await asyncio.gather(*tasks)


async def test_of_two_free_places_a_run_gets_one(make: MakeRunner, log: Log, gate: Gate, other_gate: Gate) -> None:
    gates = itertools.chain([gate.path] * 2, itertools.repeat(other_gate.path))
    async with (
        make(concurrency=3) as runner,
        runner.map(jobs.await_, itertools.repeat(log.path), gates, itertools.count()) as results,
    ):
        first = asyncio.ensure_future(anext(aiter(results)))
        assert sorted(await log.take(3)) == ["0", "1", "2"]
        run = runner.submit(jobs.tell_async, log.path, "run")
        await runner.run(jobs.echo)
        assert log.rest() == []  # all places are taken
        gate.open()
        assert await run == "run"  # those of the map that follow never end
        assert await first == 0


async def test_kinds_do_not_wait_for_each_other(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(concurrency=1, threads=1) as runner:
        plain = [runner.submit(jobs.wait, log.path, gate.path, i) for i in range(30)]
        await log.take(1)
        assert await runner.map(jobs.aecho, range(100)) == list(range(100))
        task = runner.submit(jobs.await_, log.path, gate.path, "task")
        assert await log.next() == "task"
        for call in plain[1:]:
            call.cancel()
        gate.open()
        assert [await task, await plain[0]] == ["task", 0]
        assert await runner.map(jobs.echo, range(100)) == list(range(100))


async def test_threads_do_not_wait_for_coroutines(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(concurrency=1, threads=1) as runner:
        held = asyncio.create_task(runner.map(jobs.await_, [log.path] * 30, [gate.path] * 30, range(30)).collect())
        assert await log.next() == "0"
        assert await runner.map(jobs.echo, range(100)) == list(range(100))
        gate.open()
        assert await held == list(range(30))
