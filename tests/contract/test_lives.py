"""A worker's life beside its calls: what its lifespan may do, and by when it ends."""

import asyncio
import functools
import signal

from percore import Runner
from tests import jobs
from tests.contract import life_jobs
from tests.contract.conftest import MakeRunner, worker_of
from tests.contract.pipes import Gate, Log


async def _alone(runner: Runner, workers: int = 1) -> None:
    """Call until there are no more workers than that."""
    while len(runner._supervisor.members) > workers:
        await runner.run(jobs.aecho)


# Deadlines


async def test_a_replacement_that_fails_and_does_not_end_is_killed(make_real: MakeRunner, log: Log) -> None:
    async with make_real(lifespan=functools.partial(life_jobs.fails_and_stays, log.path), kill_after=0.1) as runner:
        worker_of(runner).kill()
        assert await log.next() == "fails"
        assert (await runner.run(jobs.awhere)).generation == 3


async def test_a_draining_worker_is_killed_if_it_hangs_after_its_last_call(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(lifespan=functools.partial(life_jobs.stays_at_its_end, log.path), kill_after=0.1) as runner:
        old = runner._supervisor.slots[0].current
        assert old is not None
        call = runner.submit(jobs.await_, log.path, gate.path, "call")
        assert await log.next() == "call"
        old.worker.kill(signal.SIGTERM)
        while (await runner.run(jobs.awhere)).generation == 1:
            """Its replacement takes over."""
        assert old.deadline is None  # its call has all the time it needs
        gate.open()
        assert await call == "call"
        assert await log.next() == "leaves"
        await _alone(runner)
        assert runner.statistics().failed == 0


async def test_a_worker_that_drains_while_it_starts_is_killed_if_it_hangs(make: MakeRunner, log: Log) -> None:
    async with make(lifespan=functools.partial(life_jobs.stays_at_its_start, log.path), kill_after=0.1) as runner:
        worker_of(runner).kill()
        assert await log.next() == "enters"
        worker_of(runner).kill(signal.SIGTERM)
        assert (await runner.run(jobs.awhere)).generation == 3
        await _alone(runner)


async def test_a_worker_that_retires_is_killed_if_it_hangs(make: MakeRunner, log: Log) -> None:
    lifespan = functools.partial(life_jobs.stays_at_its_end, log.path)
    async with make(lifespan=lifespan, kill_after=0.1, max_tasks_per_worker=50) as runner:
        while (await runner.run(jobs.awhere)).generation == 1:
            """It is replaced."""
        assert await log.next() == "leaves"
        await asyncio.gather(*(runner.run(jobs.aecho) for _ in range(10)))
        await _alone(runner)
