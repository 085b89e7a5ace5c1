"""usage(): what the processes use, and that they come and go without an error."""

import asyncio
import os
import threading
from collections.abc import Mapping

import pytest

import percore
from percore._monitor.usage import UsageMeter
from tests import jobs
from tests.contract.conftest import REAL, MakeRunner
from tests.contract.pipes import Gate, Log

pytestmark = [
    pytest.mark.differs(
        "spawn", "fallbacks", because="there is no fork server among the processes, and deaths are seen in another way"
    ),
    pytest.mark.differs("nodes", because="another process may be the one that knows the workers"),
]


def workers_of(usage: percore.Usage) -> dict[str, percore.ProcessUsage]:
    return {one.role: one for one in usage.processes if one.role.startswith("worker")}


async def test_the_supervisor_comes_first(make: MakeRunner) -> None:
    async with make(2) as runner:
        usage = await runner.usage()
        assert (usage.processes[0].pid, usage.processes[0].role) == (os.getpid(), "supervisor")
        assert str(usage).splitlines()[0].split() == ["PID", "process", "RES", "USS", "%CPU", "threads"]


async def test_every_process_has_its_line(make_real: MakeRunner, real_engine: str) -> None:
    async with make_real(2) as runner:
        usage = await runner.usage()
        workers = workers_of(usage)
        pids = [worker.pid for worker in runner.statistics().workers]
        assert [(one.role, one.pid) for one in workers.values()] == [("worker 0", pids[0]), ("worker 1", pids[1])]
        helpers = [] if real_engine == "spawn" or "forkserver" not in REAL else ["fork server"]
        roles = ["supervisor", *helpers, *workers]
        if real_engine == "nodes":
            roles = ["supervisor", "host a", *helpers, "worker 0", "host b", *helpers, "worker 1"]
        assert [one.role for one in usage.processes] == roles
        assert all(one.rss > 0 and one.threads >= 1 for one in usage.processes)
        assert len(str(usage).splitlines()) == len(usage.processes) + 2


async def test_cpu_is_that_since_the_previous_one(make_real: MakeRunner) -> None:
    async with make_real() as runner:
        await runner.usage()
        await runner.run(jobs.burn, 3_000_000)
        busy = workers_of(await runner.usage())["worker 0"]
        assert 0 < busy.cpu <= 100 * (os.cpu_count() or 1)


async def test_threads_are_counted(make_real: MakeRunner, log: Log, gate: Gate) -> None:
    async with make_real(threads=3) as runner:
        before = workers_of(await runner.usage())["worker 0"].threads
        futures = [runner.submit(jobs.wait, log.path, gate.path) for _ in range(3)]
        await log.take(3)
        assert workers_of(await runner.usage())["worker 0"].threads >= max(before, 3)
        gate.open()
        await asyncio.gather(*futures)


async def test_a_worker_that_dies_is_never_an_error(make_real: MakeRunner) -> None:
    async with make_real(2) as runner:
        pids = {worker.pid for worker in runner.statistics().workers}
        meanwhile = asyncio.create_task(runner.usage())
        with pytest.raises(percore.WorkerDied) as died:
            await runner.run(jobs.die)
        assert died.value.pid in pids
        assert {one.pid for one in workers_of(await meanwhile).values()} <= pids
        afterwards = await runner.usage()
        assert afterwards.processes[0].role == "supervisor"
        assert died.value.pid not in {one.pid for one in afterwards.processes}


async def test_cancelled_it_leaves_the_runner_as_it_was(make: MakeRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    cancelled, measure = threading.Event(), UsageMeter.measure

    def measure_late(meter: UsageMeter, roles: Mapping[int, str]) -> percore.Usage:
        """Else the thread may have read everything before anybody can cancel the caller."""
        cancelled.wait()
        return measure(meter, roles)

    monkeypatch.setattr(UsageMeter, "measure", measure_late)
    async with make() as runner:
        asking = asyncio.create_task(runner.usage())
        await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        cancelled.set()
        assert (await runner.usage()).processes
        assert await runner.run(jobs.aecho, 1) == 1


async def test_while_closing_and_when_closed(make: MakeRunner, log: Log, gate: Gate) -> None:
    runner = make()
    with pytest.raises(percore.RunnerClosed, match="not started"):
        await runner.usage()
    await runner.start()
    future = runner.submit(jobs.await_, log.path, gate.path)
    await log.next()
    closing = asyncio.create_task(runner.aclose())
    await asyncio.sleep(0)
    assert (await runner.usage()).processes
    gate.open()
    await closing
    await future
    with pytest.raises(percore.RunnerClosed, match="closed"):
        await runner.usage()
