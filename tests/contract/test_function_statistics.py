"""statistics().functions: what is counted of each function, by each verb, on every engine."""

import asyncio
from typing import Any

import pytest

import percore
from percore import FunctionStatistics
from percore._engines.nodes.worker import NodeWorker
from tests import jobs, nested_jobs
from tests.contract.conftest import MakeRunner, worker_of
from tests.contract.pipes import Gate, Log
from tests.fakes import FakeWorker
from tests.waiting import until

pytestmark = pytest.mark.differs("nodes", because="nothing tells how far a call is")


def of(runner: percore.Runner | percore.LoopPoolExecutor, fn: Any) -> FunctionStatistics:
    name = f"{fn.__module__}.{fn.__qualname__}"
    (found,) = [one for one in runner.statistics().functions if one.name == name]
    return found


def counts(runner: percore.Runner, fn: Any) -> tuple[int, int, int, int]:
    found = of(runner, fn)
    return found.begun, found.ended, found.failed, found.running


def check_workers(runner: percore.Runner) -> None:
    """The figures of the workers are parts of the totals: of their functions, and of all workers."""
    now = runner.statistics()
    for worker in now.workers:
        assert sum(one.ended for one in worker.functions) == worker.done
        assert sum(one.failed for one in worker.functions) == worker.failed
        assert sum(one.running for one in worker.functions) == worker.running
    for function in now.functions:
        parts = [one for worker in now.workers for one in worker.functions if one.name == function.name]
        assert sum(one.ended for one in parts) == function.ended
        assert sum(one.failed for one in parts) == function.failed
        assert sum(one.running for one in parts) == function.running
        assert sum(one.run.count for one in parts if one.run) == (function.run.count if function.run else 0)


async def test_every_verb_counts(make: MakeRunner) -> None:
    async with make(2, threads=2) as runner:
        assert runner.statistics().functions == ()
        await runner.run(jobs.aecho, 1)
        await runner.run(jobs.echo, [1])
        with pytest.raises(ValueError, match="broken"):
            await runner.submit(jobs.fail, ValueError("broken"))
        with pytest.raises(ValueError, match="broken"):
            await runner.options(timeout=50).run(jobs.afail, ValueError("broken"))
        await runner.run(lambda: 1)
        await runner.run(lambda: 2)
        assert await runner.map(jobs.add, range(100)) == [*range(100)]
        assert len(await runner.starmap(jobs.odd, [(ValueError, 0), (ValueError, 1)], return_exceptions=True)) == 2
        assert await runner.map(jobs.aadd, range(3)) == [0, 1, 2]
        assert [item async for item in runner.stream(jobs.numbers)] == [item async for item in runner.stream(jobs.anumbers)]
        await runner.broadcast(jobs.where)
        await runner.run(nested_jobs.down, 3)
        assert counts(runner, jobs.aecho) == counts(runner, jobs.echo) == (1, 1, 0, 0)
        assert counts(runner, jobs.fail) == counts(runner, jobs.afail) == (1, 1, 1, 0)
        assert counts(runner, jobs.add) == (100, 100, 0, 0)
        assert counts(runner, jobs.odd) == (2, 2, 1, 0)
        assert counts(runner, jobs.aadd) == (3, 3, 0, 0)
        assert counts(runner, jobs.numbers) == counts(runner, jobs.anumbers) == (1, 1, 0, 0)
        assert counts(runner, jobs.where) == (2, 2, 0, 0)
        assert counts(runner, nested_jobs.down) == (4, 4, 0, 0)
        name = f"{__name__}.test_every_verb_counts.<locals>.<lambda>"
        assert [one.ended for one in runner.statistics().functions if one.name == name] == [2]
        assert sum(one.ended for one in runner.statistics().functions) == runner.statistics().done
        check_workers(runner)


async def test_what_runs_and_what_was_cancelled_before_it_began(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(threads=1) as runner:
        running = runner.submit(jobs.wait, log.path, gate.path)
        assert await log.next()
        task = runner.submit(jobs.await_, log.path, gate.path)
        assert await log.next()
        waiting = runner.submit(jobs.echo, 1)
        assert counts(runner, jobs.wait) == counts(runner, jobs.await_) == (1, 0, 0, 1)
        assert [one.name for one in runner.statistics().functions] == ["tests.jobs.wait", "tests.jobs.await_"]
        current = runner.statistics().workers[0].current
        assert {one.name for one in current} == {"tests.jobs.wait", "tests.jobs.await_"}
        assert all(one.seconds is None or one.seconds > 0 for one in current)
        check_workers(runner)
        waiting.cancel()
        task.cancel()
        await until(lambda: of(runner, jobs.await_).ended == 1)
        gate.open()
        await running
        await asyncio.wait([waiting])
        assert counts(runner, jobs.wait) == counts(runner, jobs.await_) == (1, 1, 0, 0)
        assert "tests.jobs.echo" not in {one.name for one in runner.statistics().functions}
        assert runner.statistics().workers[0].current == ()


async def test_calls_that_end_with_their_worker_have_begun_ended_and_failed(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(threads=1) as runner:
        await runner.run(jobs.echo, 1)
        lost = runner.submit(jobs.wait, log.path, gate.path)
        assert await log.next()
        behind = runner.submit(jobs.echo, 2)
        worker_of(runner).kill()
        with pytest.raises(percore.WorkerDied):
            await lost
        gate.open()
        assert await behind == 2
        assert counts(runner, jobs.wait) == (1, 1, 1, 0)
        assert counts(runner, jobs.echo) == (2, 2, 0, 0)
        check_workers(runner)


async def test_metrics_can_be_switched_off(make: MakeRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERCORE_METRICS", "0")
    async with make() as runner:
        await runner.run(jobs.echo, 1)
        statistics = runner.statistics()
        assert (statistics.functions, statistics.done) == ((), 1)
        worker = worker_of(runner)
        assert not isinstance(worker, FakeWorker) or worker.core.server.sampler is None


@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_waits_runs_and_payloads_are_measured_for_each_verb(make: MakeRunner) -> None:
    """Also of a result that waits for room: there are 64 slots, and each of these takes one."""
    async with make(threads=2) as runner:
        sizes = [len(data) for data in await asyncio.gather(*(runner.submit(jobs.pattern, 300_000) for _ in range(200)))]
        assert sizes == [300_000] * 200
        await runner.run(jobs.aecho, [b"x" * 1000])
        await runner.map(jobs.length, [b"x" * 50_000] * 100)
        assert [item async for item in runner.stream(jobs.numbers)]
        await runner.broadcast(jobs.where)
        await runner.run(nested_jobs.down, 2)
        measured = (jobs.pattern, jobs.aecho, jobs.length, jobs.numbers, jobs.where, nested_jobs.down)
        await until(lambda: all(of(runner, fn).run for fn in measured))
        for fn in measured:
            found = of(runner, fn)
            assert found.run is not None
            assert 0 < found.run.p50 <= found.run.p90 <= found.run.p99
            if not isinstance(worker_of(runner), NodeWorker):  # nobody sees when a call on another node begins
                assert found.wait is not None
                assert 0 <= found.wait.p50 <= found.wait.p90 <= found.wait.p99
        large = of(runner, jobs.pattern)
        assert large.payload is not None
        assert large.payload.count > 0
        assert large.payload.p50 == pytest.approx(300_000, rel=0.07)
        assert (large.pickling.dumps, large.pickling.worker_loads) == (0, 0)
        assert large.pickling.loads > 0 < large.pickling.load_seconds
        await until(lambda: of(runner, jobs.pattern).pickling.worker_dumps > 0)
        echoed = of(runner, jobs.aecho).pickling
        assert (echoed.dumps, echoed.loads, echoed.worker_loads, echoed.worker_dumps) == (1, 1, 1, 1)
        assert echoed.seconds > 0
        (worker,) = runner.statistics().workers
        assert worker.run is not None
        assert worker.run.count == sum(0 if one.run is None else one.run.count for one in runner.statistics().functions)


async def test_figures_outlive_the_worker(make: MakeRunner) -> None:
    async with make() as runner:
        await runner.run(jobs.echo, [1])
        await until(lambda: of(runner, jobs.echo).run)
        worker_of(runner).kill()
        await until(lambda: runner.statistics().workers[0].restarts == 1)
        await runner.run(jobs.aecho, 1)
        assert of(runner, jobs.echo).run is not None
        await until(lambda: of(runner, jobs.aecho).run)
        check_workers(runner)
        run = runner.statistics().workers[0].run
        assert run is not None
        assert run.count == 2
