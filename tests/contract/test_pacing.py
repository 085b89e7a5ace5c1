"""How many calls of a plain function run at once in a worker: one while they compute, as many as it has threads while they wait."""

import asyncio
from pathlib import Path

import pytest

from percore._common.system import IS_FREE_THREADED
from tests import jobs
from tests.contract import pacing_jobs
from tests.contract.conftest import MakeRunner
from tests.contract.pipes import Gate, Log
from tests.waiting import until

pytestmark = [
    pytest.mark.differs("nodes", because="that calls are held is told through a connection"),
    pytest.mark.skipif(IS_FREE_THREADED, reason="calls that compute run at once there, and none is held"),
]


@pytest.fixture(autouse=True)
def one_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there are more CPUs than workers, two calls begin at once."""
    monkeypatch.setattr("percore._calls.worker_start.usable_cpus", lambda: 1)


async def test_calls_that_compute_begin_one_at_a_time_and_move_to_an_idle_worker(
    make_real: MakeRunner, log: Log, tmp_path: Path
) -> None:
    path = tmp_path / "done"
    async with make_real(1, threads=4) as runner:
        calls = [runner.submit(pacing_jobs.compute, log.path, str(path)) for _ in range(4)]
        await log.take(1)
        await until(lambda: runner.statistics().queued == 3)
        await runner.resize(2)
        await log.take(1)
        await until(lambda: (runner.statistics().running, runner.statistics().queued) == (2, 2))
        assert [worker.running for worker in runner.statistics().workers] == [1, 1]
        path.touch()
        await asyncio.gather(*calls)


async def test_calls_of_other_functions_do_not_wait_for_them(make_real: MakeRunner, log: Log, tmp_path: Path) -> None:
    path = tmp_path / "done"
    async with make_real(1, threads=2) as runner:
        calls = [runner.submit(pacing_jobs.compute, log.path, str(path)) for _ in range(4)]
        await log.take(1)
        assert await runner.run(jobs.echo, 1) == 1
        path.touch()
        await asyncio.gather(*calls)


async def test_a_call_that_stops_computing_lets_others_begin(make_real: MakeRunner, log: Log, gate: Gate, tmp_path: Path) -> None:
    path = tmp_path / "done"
    async with make_real(1, threads=4) as runner:
        calls = [runner.submit(pacing_jobs.compute_and_wait, log.path, str(path), gate.path) for _ in range(4)]
        await log.take(1)
        await until(lambda: runner.statistics().queued == 3)
        path.touch()
        await log.take(3)
        gate.open()
        await asyncio.gather(*calls)


async def test_calls_that_wait_for_each_other_all_begin(make_real: MakeRunner, tmp_path: Path) -> None:
    path = tmp_path / "done"
    async with make_real(1, threads=4) as runner:
        calls = [runner.submit(pacing_jobs.compute_and_meet, str(path)) for _ in range(4)]
        await until(lambda: runner.statistics().queued == 3)
        path.touch()
        await asyncio.gather(*calls)
        path.unlink()
        results = runner.map(pacing_jobs.compute_and_meet, [str(path)] * 8)
        task = asyncio.create_task(results.collect())
        await until(lambda: runner.statistics().running > 0)
        path.touch()
        await task


async def test_a_held_call_can_be_cancelled(make_real: MakeRunner, log: Log, tmp_path: Path) -> None:
    path = tmp_path / "done"
    async with make_real(1, threads=4) as runner:
        calls = [runner.submit(pacing_jobs.compute, log.path, str(path)) for _ in range(3)]
        await log.take(1)
        await until(lambda: runner.statistics().queued == 2)
        calls[1].cancel()
        await until(lambda: runner.statistics().queued == 1)
        path.touch()
        await asyncio.gather(calls[0], calls[2])
        assert runner.statistics().queued == 0
