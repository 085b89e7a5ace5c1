"""max_tasks_per_worker: a worker is replaced after so many calls, without a gap."""

import asyncio
import functools
import signal
from typing import Any

import pytest

import percore
from tests import jobs
from tests.contract.conftest import MakeRunner, worker_of
from tests.contract.pipes import Gate, Log

LIMITS = pytest.mark.parametrize("limit", [1, 2, 3, 7])


async def _generation(runner: percore.Runner, generation: int, index: int = 0) -> None:
    """Call until a worker of this generation, at least, answers."""
    while True:
        workers = await runner.broadcast(jobs.awhere)
        if workers[index].generation >= generation:
            return
        await runner.run(jobs.aecho)


@LIMITS
@pytest.mark.parametrize("workers", [1, 2])
async def test_t3_every_call_is_done(make: MakeRunner, limit: int, workers: int) -> None:
    async with make(workers, max_tasks_per_worker=limit, concurrency=4, threads=2) as runner:
        runs = [runner.run(fn, i) for i in range(20) for fn in (jobs.echo, jobs.aecho)]
        maps = [runner.map(fn, range(60)).collect() for fn in (jobs.echo, jobs.aecho)]
        results = await asyncio.gather(*runs, *maps)
        assert results == [*(i for i in range(20) for _ in range(2)), [*range(60)], [*range(60)]]
        await _generation(runner, 3)
        statistics = runner.statistics()
        assert (statistics.failed, statistics.retried) == (0, 0)
        assert statistics.restarts == sum(worker.generation - 1 for worker in statistics.workers)


@LIMITS
async def test_t3_deaths_in_between(make: MakeRunner, limit: int) -> None:
    async with make(2, max_tasks_per_worker=limit, retries=1000, concurrency=4, threads=2) as runner:
        task = asyncio.create_task(runner.map(jobs.aecho, range(150), window=8).collect())
        threads = asyncio.create_task(runner.map(jobs.echo, range(150), window=8).collect())
        for i in range(6):
            while runner.statistics().workers[i % 2].state != "ready":  # noqa: ASYNC110  # there is no event for it
                await asyncio.sleep(0)
            await runner.run(jobs.aecho)
            for member in list(runner._supervisor.members)[: 1 + i % 2]:
                member.worker.kill(signal.SIGKILL if i % 3 else signal.SIGTERM)
        assert await task == list(range(150))
        assert await threads == list(range(150))
        assert runner.statistics().failed == 0


async def test_t3_one_worker_serves_until_its_replacement_is_ready(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(max_tasks_per_worker=3, lifespan=functools.partial(jobs.others_behind, log.path, gate.path)) as runner:
        assert await log.next() == "enter 1"
        for _ in range(3):
            await runner.run(jobs.aecho)
        assert await log.next() == "enter 2"
        for _ in range(20):
            assert (await runner.run(jobs.awhere)).generation == 1
            assert (await runner.run(jobs.where)).generation == 1
        assert runner.statistics().restarts == 1
        assert runner.statistics().workers[0].state == "ready"
        gate.open()
        while (await runner.run(jobs.awhere)).generation == 1:
            """It is replaced when that is ready, and never before."""
        assert "exit 1" in [await log.next(), *log.rest()]


@LIMITS
@pytest.mark.parametrize("workers", [1, 3])
async def test_t3_whenever_a_call_ends_every_slot_has_a_worker_that_is_ready(make: MakeRunner, limit: int, workers: int) -> None:
    async with make(workers, max_tasks_per_worker=limit, concurrency=2, threads=2) as runner:
        states: set[str] = set()

        def look(_: object) -> None:
            states.update(worker.state for worker in runner.statistics().workers)

        futures = [runner.submit(jobs.echo if i % 2 else jobs.aecho, i) for i in range(60)]
        while min(worker.generation for worker in runner.statistics().workers) < 4:
            futures.append(runner.submit(jobs.aecho, len(futures)))
            futures[-1].add_done_callback(look)
            await futures[-1]
        assert await asyncio.gather(*futures) == list(range(len(futures)))
        assert states == {"ready"}


async def test_a_running_call_finishes_on_the_old_worker(make: MakeRunner, log: Log, gate: Gate) -> None:
    lifespan = functools.partial(jobs.resource, log.path)
    async with make(max_tasks_per_worker=2, threads=1, lifespan=lifespan) as runner:
        assert await log.next() == "enter"
        calls = [runner.submit(jobs.await_, log.path, gate.path, "task"), runner.submit(jobs.wait, log.path, gate.path, "plain")]
        assert sorted(await log.take(3)) == ["enter", "plain", "task"]
        while (await runner.run(jobs.awhere)).generation == 1:
            """Both workers are there."""
        assert (await runner.run(jobs.where)).generation >= 2
        gate.open()
        assert await asyncio.gather(*calls) == ["task", "plain"]
        assert runner.statistics().failed == 0
    said = log.rest()
    entered = said.count("enter") + 2
    assert said.count("exit") == entered


async def test_calls_queued_ahead_go_to_the_replacement(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(max_tasks_per_worker=5, threads=1) as runner:
        running = runner.submit(jobs.wait, log.path, gate.path, "first")
        assert await log.next() == "first"
        ahead = [runner.submit(jobs.tell, log.path, i) for i in range(4)]
        await runner.run(jobs.aecho)
        assert await asyncio.gather(*ahead) == list(range(4))  # the old one hands them back when it retires
        assert not running.done()
        gate.open()
        assert await running == "first"
        assert sorted(log.rest()) == ["0", "1", "2", "3"]


async def test_a_replacement_that_cannot_start_leaves_the_old_one_working(make: MakeRunner, log: Log) -> None:
    lifespan = functools.partial(jobs.first_generation_alone, log.path)
    async with make(max_tasks_per_worker=2, lifespan=lifespan) as runner:
        assert await log.next() == "enter 1"
        said: list[str] = []
        while "enter 3" not in said:  # it is tried again, by and by
            assert (await runner.run(jobs.awhere)).generation == 1
            assert (await runner.run(jobs.where)).generation == 1
            said += log.rest()
        assert (await runner.map(jobs.echo, range(100))) == list(range(100))
        assert runner.statistics().failed == 0


async def test_t3_the_old_worker_dies_while_its_replacement_starts(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(max_tasks_per_worker=2, lifespan=functools.partial(jobs.others_behind, log.path, gate.path)) as runner:
        assert await log.next() == "enter 1"
        await runner.run(jobs.aecho)
        await runner.run(jobs.aecho)
        assert await log.next() == "enter 2"
        worker_of(runner).kill()
        waiting = runner.submit(jobs.awhere)
        gate.open()
        assert (await waiting).generation == 2
        assert runner.statistics().failed == 0


async def test_t3_the_replacement_dies_while_it_starts(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(max_tasks_per_worker=2, lifespan=functools.partial(jobs.others_behind, log.path, gate.path)) as runner:
        assert await log.next() == "enter 1"
        await runner.run(jobs.aecho)
        await runner.run(jobs.aecho)
        assert await log.next() == "enter 2"
        following: Any = runner._supervisor.slots[0].next
        following.worker.kill()
        assert (await runner.run(jobs.awhere)).generation == 1
        gate.open()
        while (await runner.run(jobs.awhere)).generation < 3:
            """The next one takes over."""


async def test_t3_closing_while_the_replacement_starts(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(max_tasks_per_worker=2, lifespan=functools.partial(jobs.others_behind, log.path, gate.path)) as runner:
        assert await log.next() == "enter 1"
        await runner.run(jobs.aecho)
        await runner.run(jobs.aecho)
        assert await log.next() == "enter 2"
        call = runner.submit(jobs.aecho, 1)
    assert await call == 1
    assert "exit 1" in log.rest()


async def test_keys_move_without_being_in_two_places(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(max_tasks_per_worker=1, concurrency=1) as runner:
        view = runner.options(key="k")
        first = view.submit(jobs.hold, log.path, gate.path, "k", 0)
        assert (await log.next()).startswith("in k")
        while (await runner.options(key="other").run(jobs.awhere) if first.done() else await _beside(runner)).generation == 1:
            """The replacement is there."""
        second = view.submit(jobs.hold, log.path, gate.path, "k", 1)
        await runner.run(jobs.aecho)
        assert log.rest() == []
        gate.open()
        assert await first != await second


async def _beside(runner: percore.Runner) -> percore.CurrentWorker:
    return (await runner.broadcast(jobs.awhere))[0]
