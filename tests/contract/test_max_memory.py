"""max_memory_per_worker: workers that have too much memory are replaced between calls, and nothing else changes."""

import asyncio
import functools
import logging
import multiprocessing
import re
from collections.abc import Awaitable, Callable, Iterator, Sequence
from typing import Any

import pytest

import percore
from percore import Runner
from percore._scheduler import memory_limit
from percore._supervisor import memory_watch
from tests import jobs
from tests.contract import life_jobs
from tests.contract.conftest import MakeRunner, worker_of
from tests.contract.pipes import Gate, Log
from tests.internals import members_of, seats_at_each_change, supervisor_of

pytestmark = pytest.mark.apart(because="a process has memory of its own")

far = pytest.mark.differs("nodes", because="another process knows the memory")
launches = pytest.mark.differs("spawn", because="the replacement is launched, and the program itself reads its memory")

MIB = 2**20
LIMIT, MUCH = 96 * MIB, 128 * MIB
"""A worker has much less than the limit by itself, and much more with `jobs.hoard(MUCH)`."""


@pytest.fixture(autouse=True)
def often(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Sample as often as readings take; and free what fake workers hold."""
    monkeypatch.setattr(memory_watch, "_EVERY", 0.01)
    monkeypatch.setattr(memory_watch, "_SHARE", 0)
    yield
    jobs.HOARDS.clear()


class Samples:
    """Counts the samples of a runner, and may have them fail."""

    def __init__(self, runner: Runner) -> None:
        self.taken = 0
        self.error: Exception | None = None
        self._changed = asyncio.Event()
        engine: Any = supervisor_of(runner).engine
        self._memory: Callable[..., Awaitable[list[int | None]]] = engine.memory
        engine.memory = self._read

    async def _read(self, workers: Sequence[Any], enough: int) -> list[int | None]:
        try:
            if self.error is not None:
                raise self.error
            return await self._memory(workers, enough)
        finally:
            self.taken += 1
            self._changed.set()

    async def wait(self, count: int) -> None:
        """Wait until this many more samples were taken, and compared with the limit."""
        wanted = self.taken + count + 1
        while self.taken < wanted:
            self._changed.clear()
            await self._changed.wait()


async def replaced(runner: Runner, generation: int, index: int = 0) -> percore.CurrentWorker:
    """Wait until the worker of a slot, of this generation or a later one, takes calls. Calls are made meanwhile."""
    while True:
        (where,) = [where for where in await runner.broadcast(jobs.awhere) if where.index == index]
        if where.generation >= generation:
            return where


def records(caplog: pytest.LogCaptureFixture, about: str) -> list[logging.LogRecord]:
    return [record for record in caplog.records if about in record.getMessage()]


@far
@launches
async def test_a_worker_over_the_limit_is_replaced_behind_a_ready_one(make: MakeRunner, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "percore")
    async with make(2, max_memory_per_worker=LIMIT, threads=1) as runner:
        samples = Samples(runner)
        await samples.wait(2)
        assert runner.statistics().restarts == 0
        assert all(MIB <= (worker.memory or 0) < LIMIT for worker in runner.statistics().workers)
        with seats_at_each_change(runner) as seats:
            worker = await runner.run(jobs.hoard, MUCH)
            await replaced(runner, 2, worker.index)
            assert min(seats) >= 2
            assert seats[:2] == [3, 2]
        statistics = runner.statistics()
        assert (statistics.failed, statistics.restarts) == (0, 1)
        assert [one.restarts_for_memory for one in statistics.workers] == [one.index == worker.index for one in statistics.workers]
        (record,) = records(caplog, "max_memory_per_worker")
        pattern = rf"percore: worker {worker.index} \(pid {worker.pid}\) has ([0-9.]+) MiB of memory, .* its replacement starts"
        found = re.fullmatch(pattern, record.getMessage())
        assert found is not None
        assert LIMIT <= float(found[1]) * MIB < MUCH + LIMIT
        assert record.levelno == logging.INFO


async def test_t4_workers_that_reach_the_limit_together_are_replaced_behind_ready_ones(make: MakeRunner) -> None:
    async with make(2, max_memory_per_worker=LIMIT, threads=1) as runner:
        with seats_at_each_change(runner) as seats:
            assert len(await runner.broadcast(jobs.hoard, MUCH)) == 2
            for index in range(2):
                await replaced(runner, 2, index)
            assert min(seats) >= 2, "less workers took calls meanwhile"
        statistics = runner.statistics()
        assert (statistics.failed, statistics.restarts) == (0, 2)


async def test_its_calls_go_on_and_it_has_one_successor_until_it_has_ended(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(1, max_memory_per_worker=LIMIT, threads=2) as runner:
        samples = Samples(runner)
        await samples.wait(2)
        long = asyncio.ensure_future(runner.run(jobs.hoard_and_wait, MUCH, log.path, gate.path))
        await log.take(1)
        assert (await replaced(runner, 2)).generation == 2
        await samples.wait(2)
        assert (await runner.run(jobs.hoard, MUCH)).generation == 2
        await samples.wait(5)  # the first worker still drains, so the second one stays
        assert (await runner.run(jobs.where)).generation == 2
        assert not long.done()
        gate.open()
        assert (await long).generation == 1
        await replaced(runner, 3)
        assert runner.statistics().failed == 0


async def test_without_the_option_nothing_is_sampled(make: MakeRunner) -> None:
    async with make(1) as runner:
        samples = Samples(runner)
        await runner.run(jobs.echo, 1)
        pool = supervisor_of(runner).pool
        assert (pool.memory_watch, samples.taken, runner.statistics().workers[0].memory) == (None, 0, None)


async def test_workers_that_have_too_much_from_their_start_are_told_of_once(
    make: MakeRunner, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_limit, "LONGEST_WAIT", 0.1)
    async with make(1, max_memory_per_worker=LIMIT, lifespan=functools.partial(jobs.hoarding, MUCH)) as runner:
        samples = Samples(runner)
        await replaced(runner, 3)  # the first replacement comes at once, the next one after a wait
        await samples.wait(2)
        (record,) = records(caplog, "replacing workers does not help")
        assert record.levelno == logging.WARNING
        assert runner.statistics().failed == 0


@far
async def test_killed_while_its_replacement_starts_it_is_replaced_by_that_one(make_real: MakeRunner, log: Log, gate: Gate) -> None:
    lifespan = functools.partial(life_jobs.second_waits, log.path, gate.path)
    async with make_real(1, max_memory_per_worker=LIMIT, lifespan=lifespan) as runner:
        await runner.run(jobs.hoard, MUCH)
        await log.take(1)  # the second worker starts
        worker_of(runner).kill()
        gate.open()
        assert (await runner.run(jobs.where)).generation == 2
        assert runner.statistics().restarts == 1


@far
@launches
async def test_a_death_by_sigkill_tells_the_memory_of_the_last_sample(
    make_real: MakeRunner, log: Log, gate: Gate, caplog: pytest.LogCaptureFixture
) -> None:
    async with make_real(1, max_memory_per_worker=LIMIT) as runner:
        await Samples(runner).wait(2)
        call = asyncio.ensure_future(runner.run(jobs.wait, log.path, gate.path))
        await log.take(1)
        worker_of(runner).kill()
        with pytest.raises(percore.WorkerDied) as died:
            await call
        found = re.search(
            r"by SIGKILL \(perhaps out of memory, or killed by an operator; it last had ([0-9.]+) MiB\)", str(died.value)
        )
        assert found is not None
        assert MIB < float(found[1]) * MIB < LIMIT
        assert (died.value.memory or 0) > MIB
        assert records(caplog, f"it last had {found[1]} MiB")


async def test_a_replacement_that_dies_in_its_start_leaves_the_worker_in_service(make: MakeRunner, log: Log, gate: Gate) -> None:
    lifespan = functools.partial(life_jobs.second_waits, log.path, gate.path)
    async with make(1, max_memory_per_worker=LIMIT, lifespan=lifespan) as runner:
        await runner.run(jobs.hoard, MUCH)
        await log.take(1)
        (starting,) = [member for member in members_of(runner) if member.generation == 2]
        starting.worker.kill()
        assert (await runner.run(jobs.awhere)).generation == 1  # a thread could begin after the next replacement is ready
        await replaced(runner, 3)
        assert runner.statistics().failed == 0


@far
async def test_a_close_ends_the_sampling_whatever_it_does(make: MakeRunner, log: Log, gate: Gate) -> None:
    lifespan = functools.partial(life_jobs.second_waits, log.path, gate.path)
    async with make(2, max_memory_per_worker=LIMIT, lifespan=lifespan) as runner:
        worker = await runner.run(jobs.hoard, MUCH)
        await log.take(1)
        running = asyncio.ensure_future(runner.broadcast(jobs.aecho, worker.index))
        await asyncio.sleep(0)
    assert await running == [worker.index] * 2
    gate.open()
    for _ in range(3):  # while the first sample is read
        async with make(1, max_memory_per_worker=LIMIT) as runner:
            samples = Samples(runner)
            await samples.wait(0)
        watch = supervisor_of(runner).pool.memory_watch
        assert watch is not None
        assert watch._timer is None


@pytest.mark.asyncio_only
def test_an_executor_has_the_option() -> None:
    with percore.LoopPoolExecutor(max_workers=1, max_memory_per_worker=LIMIT) as executor:
        assert executor.submit(jobs.hoard, MUCH).result().generation == 1
        while executor.submit(jobs.where).result().generation == 1:
            pass
        assert executor.statistics().workers[0].restarts_for_memory == 1
    with pytest.raises(ValueError, match='max_memory_per_worker cannot be used with the "fork" start method'):
        percore.LoopPoolExecutor(mp_context=multiprocessing.get_context("fork"), max_memory_per_worker=LIMIT)


@pytest.mark.own_fork_server
@far
async def test_a_reload_and_a_resize_meanwhile(make: MakeRunner) -> None:
    async with make(2, max_memory_per_worker=LIMIT, threads=1) as runner:
        samples = Samples(runner)
        await samples.wait(2)
        await runner.broadcast(jobs.hoard, MUCH)
        await runner.reload()
        await samples.wait(2)
        worker = await runner.run(jobs.hoard, MUCH)
        await runner.resize(1)
        await runner.resize(2)
        await replaced(runner, worker.generation + 1, worker.index)
        await samples.wait(2)
        assert [len([m for m in members_of(runner) if m.index == index and m.is_ready]) for index in (0, 1)] == [1, 1]
        assert runner.statistics().failed == 0


async def test_with_a_limit_of_calls_too_no_call_is_lost_and_none_is_beyond_it(make: MakeRunner) -> None:
    async with make(2, max_memory_per_worker=LIMIT, max_tasks_per_worker=20, threads=1) as runner:
        await runner.run(jobs.hoard, MUCH)
        assert await runner.map(jobs.echo, range(300)) == [*range(300)]
        statistics = runner.statistics()
        assert (statistics.failed, statistics.done) == (0, 301)
        assert statistics.restarts >= 14


@far
async def test_if_nothing_can_be_read_it_says_so_once(make: MakeRunner, caplog: pytest.LogCaptureFixture) -> None:
    async with make(1, max_memory_per_worker=LIMIT) as runner:
        samples = Samples(runner)
        samples.error = RuntimeError("can't start new thread")
        await runner.run(jobs.hoard, MUCH)
        await samples.wait(3)
        (record,) = records(caplog, "so max_memory_per_worker has no effect")
        assert record.levelno == logging.WARNING
        assert (await runner.run(jobs.where)).generation == 1
        samples.error = None
        await replaced(runner, 2)
