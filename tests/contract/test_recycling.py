"""max_tasks_per_worker: a worker is replaced after so many calls, without a gap."""

import asyncio
import functools
import signal
from collections import Counter
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest

import percore
from percore._protocol.messages import Kind
from percore._scheduler.dispatch import Dispatch
from percore._scheduler.replacement import RestartBudget
from percore._supervisor.limited_worker import LimitedWorker
from percore._supervisor.timing import Turn
from tests import jobs
from tests.contract import life_jobs
from tests.contract.conftest import MakeRunner, Starts, worker_of
from tests.contract.pipes import Gate, Log
from tests.internals import members_of, supervisor_of
from tests.rows import repeated_rows, repeats
from tests.waiting import until

pytestmark = pytest.mark.differs("fallbacks", because="bells are pipes, and the workers' loop is asyncio's", on="fake")
launches = pytest.mark.differs("spawn", because="a successor is launched, and a worker's exit seen, in another way")
in_processes = pytest.mark.differs("fallbacks", because="a worker's exit is seen in another way")

LIMITS = pytest.mark.parametrize("limit", [3, 1, *repeats(2, 7)])


async def _generation(runner: percore.Runner, generation: int, index: int = 0) -> None:
    """Call until a worker of this generation, at least, answers."""
    while True:
        workers = await runner.broadcast(jobs.awhere)
        if workers[index].generation >= generation:
            return
        await runner.run(jobs.aecho)


@LIMITS
@pytest.mark.parametrize("workers", [*repeats(1), 2])
@launches
async def test_t3_every_call_is_done(make: MakeRunner, limit: int, workers: int, starts: Starts) -> None:
    few, many = starts(2) * limit, starts(4) * limit
    async with make(workers, max_tasks_per_worker=limit, concurrency=4, threads=2) as runner:
        runs = [runner.run(fn, i) for i in range(few) for fn in (jobs.echo, jobs.aecho)]
        maps = [runner.map(fn, range(many)).collect() for fn in (jobs.echo, jobs.aecho)]
        results = await asyncio.gather(*runs, *maps)
        assert results == [*(i for i in range(few) for _ in range(2)), [*range(many)], [*range(many)]]
        await _generation(runner, 3)
        statistics = runner.statistics()
        assert (statistics.failed, statistics.retried) == (0, 0)
        assert statistics.restarts == sum(worker.generation - 1 for worker in statistics.workers)


@LIMITS
@in_processes
async def test_t3_deaths_in_between(make: MakeRunner, limit: int, starts: Starts) -> None:
    count = starts(10) * limit
    async with make(2, max_tasks_per_worker=limit, retries=1000, concurrency=4, threads=2) as runner:
        task = asyncio.create_task(runner.map(jobs.aecho, range(count), window=8).collect())
        threads = asyncio.create_task(runner.map(jobs.echo, range(count), window=8).collect())
        for i in range(starts(6)):
            await until(lambda place: runner.statistics().workers[place].state == "ready", i % 2)
            await runner.run(jobs.aecho)
            for member in members_of(runner)[: 1 + i % 2]:
                member.worker.kill(signal.SIGKILL if i % 3 else signal.SIGTERM)
        assert await task == list(range(count))
        assert await threads == list(range(count))
        assert runner.statistics().failed == 0


@in_processes
@launches
async def test_t3_its_replacement_starts_ahead_and_takes_over_when_its_last_call_is_sent(
    make: MakeRunner, log: Log, gate: Gate
) -> None:
    lifespan = functools.partial(jobs.others_behind, log.path, gate.path)
    async with make(max_tasks_per_worker=3, lifespan=lifespan) as runner:
        assert await log.next() == "enter 1"
        for _ in range(2):
            assert (await runner.run(jobs.awhere)).generation == 1
        assert await log.next() == "enter 2"
        gate.open()
        while (following := supervisor_of(runner).slots[0].next) is None or not following.is_ready:
            await runner.broadcast(jobs.awhere)  # which is not counted
        assert [(await runner.run(jobs.awhere)).generation for _ in range(4)] == [1, 2, 2, 2]
        assert runner.statistics().workers[0].state == "ready"


async def test_t3_calls_wait_for_the_replacement_of_a_worker_that_may_begin_no_more(make: MakeRunner, log: Log, gate: Gate) -> None:
    lifespan = functools.partial(jobs.others_behind, log.path, gate.path)
    async with make(max_tasks_per_worker=3, lifespan=lifespan) as runner:
        assert await log.next() == "enter 1"
        functions: list[Callable[[], Any]] = [jobs.awhere, jobs.where]
        calls: list[asyncio.Future[Any]] = [runner.submit(fn) for fn in functions for _ in range(3)]
        pulled = asyncio.Event()

        def inputs() -> Iterator[int]:
            yield from range(10)
            pulled.set()

        mapped: asyncio.Task[list[int]] = asyncio.ensure_future(runner.map(life_jobs.generation, inputs()).collect())
        done = await asyncio.gather(*calls[:3])
        assert await log.next() == "enter 2"
        await pulled.wait()  # on a busy machine the map gives way to the loop in between
        assert runner.statistics().queued == 13
        assert [where.generation for where in await runner.broadcast(jobs.awhere)] == [1]
        gate.open()
        generations = [where.generation for where in [*done, *await asyncio.gather(*calls[3:])]] + await mapped
        assert max(Counter(generations).values()) <= 3


@pytest.mark.parametrize(
    ("fn", "limit"),
    [
        *[(life_jobs.generation, 3), (life_jobs.ageneration, 1)],
        *repeated_rows((life_jobs.generation, 1), (life_jobs.ageneration, 3)),
        *repeated_rows(*((fn, limit) for fn in (life_jobs.generation, life_jobs.ageneration) for limit in (2, 7))),
    ],
)
async def test_t3_no_worker_begins_more_calls_than_its_limit(
    make: MakeRunner, fn: Callable[..., Any], limit: int, starts: Starts
) -> None:
    count = starts(10) * limit
    async with make(max_tasks_per_worker=limit) as runner:
        await runner.map(life_jobs.generation, range(starts(4) * limit))  # from now on they travel in batches
        before = runner.statistics().workers[0].generation
        begun = await asyncio.gather(*(runner.run(fn, number) for number in range(10)), runner.map(fn, range(count)).collect())
        calls = Counter([*begun[:-1], *begun[-1]])
        del calls[before]
        assert max(calls.values()) <= limit
        assert sum(calls.values()) >= 10 + count - limit


async def test_t3_a_close_runs_what_waits_within_the_limit(make: MakeRunner) -> None:
    runner = make(max_tasks_per_worker=2)
    await runner.start()
    calls = [runner.submit(life_jobs.ageneration) for _ in range(9)]
    await runner.aclose()
    assert max(Counter(call.result() for call in calls).values()) <= 2


@LIMITS
@pytest.mark.parametrize("workers", [*repeats(1), 3])
@in_processes
async def test_t3_whenever_a_call_ends_every_slot_has_a_worker_that_is_ready(
    make: MakeRunner, limit: int, workers: int, starts: Starts
) -> None:
    async with make(workers, max_tasks_per_worker=limit, concurrency=2, threads=2) as runner:
        states: set[str] = set()

        def look(_: object) -> None:
            states.update(worker.state for worker in runner.statistics().workers)

        futures = [runner.submit(jobs.echo if i % 2 else jobs.aecho, i) for i in range(starts(6) * limit)]
        while min(worker.generation for worker in runner.statistics().workers) < 1 + starts(3):
            futures.append(runner.submit(jobs.aecho, len(futures)))
            futures[-1].add_done_callback(look)
            await futures[-1]
        assert await asyncio.gather(*futures) == list(range(len(futures)))
        assert states == {"ready"}


@in_processes
async def test_a_running_call_finishes_on_the_old_worker(make: MakeRunner, log: Log, gate: Gate) -> None:
    lifespan = functools.partial(jobs.resource, log.path)
    async with make(max_tasks_per_worker=2, threads=1, lifespan=lifespan) as runner:
        assert await log.next() == "enter"
        calls = [runner.submit(jobs.await_, log.path, gate.path, "task"), runner.submit(jobs.wait, log.path, gate.path, "plain")]
        told: list[str] = []
        while not {"plain", "task"} <= set(told):
            told.append(await log.next())
        while (await runner.run(jobs.awhere)).generation == 1:
            """Both workers are there."""
        assert (await runner.run(jobs.where)).generation >= 2
        gate.open()
        assert await asyncio.gather(*calls) == ["task", "plain"]
        assert runner.statistics().failed == 0
    told += log.rest()
    # One that starts when the runner closes may be killed.
    assert told.count("enter") <= told.count("exit") <= told.count("enter") + 1


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


@launches
async def test_a_replacement_that_cannot_start_is_tried_again_while_calls_wait(make: MakeRunner, log: Log) -> None:
    lifespan = functools.partial(jobs.first_generation_alone, log.path)
    async with make(max_tasks_per_worker=2, lifespan=lifespan) as runner:
        assert await log.next() == "enter 1"
        calls = [runner.submit(jobs.awhere) for _ in range(3)]
        assert [(await call).generation for call in calls[:2]] == [1, 1]
        assert await log.take(2) == ["enter 2", "enter 3"]
        assert not calls[2].done()
        calls[2].cancel()


async def test_replacements_that_never_start_break_the_runner(make: MakeRunner, log: Log, monkeypatch: pytest.MonkeyPatch) -> None:
    died = RestartBudget.died
    monkeypatch.setattr(RestartBudget, "died", lambda budget: None if died(budget) is None else 0.0)
    lifespan = functools.partial(jobs.first_generation_alone, log.path)
    async with make(max_tasks_per_worker=1, lifespan=lifespan) as runner:
        first, second = runner.submit(jobs.awhere), runner.submit(jobs.awhere)
        assert (await first).generation == 1
        with pytest.raises(percore.RunnerBroken):
            await second


def test_a_call_for_which_no_place_is_left_is_taken_back() -> None:
    """Its worker was chosen, and then a `__del__` made a call that took the last place."""
    low: list[object] = []
    refused: list[object] = []
    dispatch: Any = Dispatch(4, 4)
    member = LimitedWorker(0, 1, dispatch, Turn(asyncio.new_event_loop()), 3, low.append, refused.append)
    batch: Any = SimpleNamespace(kind=Kind.THREAD, size=4)
    member.send(batch)
    assert (refused, low, member.tickets, member.load) == ([batch], [], 3, [0, 0, 0])
    member._turn.loop.close()


@in_processes
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


@in_processes
@launches
async def test_t3_the_replacement_dies_while_it_starts(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(max_tasks_per_worker=2, lifespan=functools.partial(jobs.others_behind, log.path, gate.path)) as runner:
        assert await log.next() == "enter 1"
        await runner.run(jobs.aecho)
        await runner.run(jobs.aecho)
        assert await log.next() == "enter 2"
        following: Any = supervisor_of(runner).slots[0].next
        following.worker.kill()
        assert await log.next() == "enter 3"
        waiting = runner.submit(jobs.awhere)
        gate.open()
        assert (await waiting).generation == 3


@in_processes
async def test_t3_closing_while_the_replacement_starts(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(max_tasks_per_worker=2, lifespan=functools.partial(jobs.others_behind, log.path, gate.path)) as runner:
        assert await log.next() == "enter 1"
        await runner.run(jobs.aecho)
        await runner.run(jobs.aecho)
        assert await log.next() == "enter 2"
        call = runner.submit(jobs.awhere)
        closing = asyncio.create_task(runner.aclose())
        await asyncio.sleep(0)
        gate.open()
        await closing
        assert (await call).generation == 2
    assert sorted(log.rest()) == ["exit 1", "exit 2"]


@pytest.mark.apart(because="a worker that is a process has a pid, and an end, of its own")
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
