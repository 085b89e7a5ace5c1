"""statistics(), and who gets which call."""

import asyncio
import dataclasses
import signal
from collections.abc import Callable
from typing import Any

import pytest

import percore
from percore._scheduler.choice import BLOCKED
from percore._supervisor.pool_worker import PoolWorker
from tests import jobs
from tests.contract.conftest import MakeRunner
from tests.contract.pipes import Gate, Log
from tests.fakes import FakeWorker
from tests.internals import current_member, members_of, replace_members
from tests.waiting import until

pytestmark = pytest.mark.differs("nodes", because="a message tells when a worker has read on, and nothing tells how far a call is")


@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_counters_of_an_idle_runner(make: MakeRunner) -> None:
    async with make(2) as runner:
        snapshot = runner.statistics()
        assert isinstance(snapshot, percore.Statistics)
        assert (snapshot.running, snapshot.queued, snapshot.done, snapshot.failed, snapshot.restarts) == (0, 0, 0, 0, 0)
        assert [(worker.index, worker.generation, worker.state) for worker in snapshot.workers] == [
            (0, 1, "ready"),
            (1, 1, "ready"),
        ]
        assert len({worker.pid for worker in snapshot.workers}) == 2
        with pytest.raises(dataclasses.FrozenInstanceError):
            snapshot.done = 5  # type: ignore[misc]


async def test_running_and_queued(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(concurrency=2, threads=1) as runner:
        futures = [runner.submit(jobs.await_, log.path, gate.path) for _ in range(5)]
        futures += [runner.submit(jobs.wait, log.path, gate.path) for _ in range(8)]
        await log.take(3)
        snapshot = runner.statistics()
        assert (snapshot.running, snapshot.queued, snapshot.done) == (3, 10, 0)
        gate.open()
        await asyncio.gather(*futures)
        snapshot = runner.statistics()
        assert (snapshot.running, snapshot.queued, snapshot.done) == (0, 0, 13)


@pytest.mark.local_memory(because="start marks tell how far the calls of a worker have come that reads nothing")
async def test_calls_behind_a_blocked_coroutine_are_queued(make_real: MakeRunner, log: Log, gate: Gate) -> None:
    async with make_real(threads=2) as runner:
        blocked = runner.submit(jobs.block_loop, log.path, gate.path)
        await log.next()
        behind = [runner.submit(fn, number) for number in range(5) for fn in (jobs.aecho, jobs.echo)]
        for _ in range(2):  # they are sent in the first of these turns of the loop
            await asyncio.sleep(0)
            snapshot = runner.statistics()
            assert (snapshot.running, snapshot.queued) == (1, 10)
            assert (snapshot.workers[0].running, snapshot.workers[0].queued) == (1, 10)
        gate.open()
        await asyncio.gather(blocked, *behind)
        assert (runner.statistics().running, runner.statistics().queued) == (0, 0)


async def test_a_worker_that_is_buried_while_another_thread_asks(
    make: MakeRunner, log: Log, gate: Gate, monkeypatch: pytest.MonkeyPatch
) -> None:
    """1. a thread has listed the workers  2. the loop's buries one, and releases its start marks  3. the thread reads them."""
    async with make() as runner:
        held = runner.submit(jobs.await_, log.path, gate.path)
        await log.next()
        (member,) = members_of(runner)
        marks = memoryview(bytearray(8))
        marks.release()
        with monkeypatch.context() as patch:
            patch.setattr(PoolWorker, "has_read", lambda member: False)
            assert member.statistics(1, may_look=True) == (1, 0)
            patch.setattr(member.worker, "fate", lambda call_id: marks[0])
            assert member.statistics(1, may_look=True) == (0, 0)
            assert member.statistics(1, may_look=False) == (1, 0)
        gate.open()
        await held


async def test_done_and_failed(make: MakeRunner) -> None:
    async with make(2) as runner:
        await runner.map(jobs.aadd, [1, 2, "a"], [1] * 3, return_exceptions=True)
        await runner.map(jobs.add, [1, 2, "a"], [1] * 3, return_exceptions=True)
        snapshot = runner.statistics()
        assert (snapshot.done, snapshot.failed) == (6, 2)
        assert sum(worker.done for worker in snapshot.workers) == 6
        assert sum(worker.failed for worker in snapshot.workers) == 2


async def test_a_death_is_counted(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make() as runner:
        await runner.run(jobs.aecho)
        future = runner.submit(jobs.await_, log.path, gate.path)
        await log.next()
        (member,) = members_of(runner)
        member.worker.kill()
        await asyncio.wait([future])
        assert isinstance(future.exception(), percore.WorkerDied)
        await runner.run(jobs.aecho)
        snapshot = runner.statistics()
        assert (snapshot.done, snapshot.failed, snapshot.restarts) == (3, 1, 1)
        assert (snapshot.workers[0].generation, snapshot.workers[0].restarts) == (2, 1)


@pytest.mark.local_memory(because="rings count bytes, and another channel may count messages")
@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_bytes_grow(make: MakeRunner) -> None:
    async with make() as runner:
        before = runner.statistics().workers[0]
        await runner.run(jobs.aecho, bytes(10_000))
        after = runner.statistics().workers[0]
        assert after.bytes_in - before.bytes_in > 10_000
        assert after.bytes_out - before.bytes_out > 10_000


async def test_it_can_be_asked_while_closing(make: MakeRunner, log: Log, gate: Gate) -> None:
    runner = make()
    await runner.start()
    future = runner.submit(jobs.await_, log.path, gate.path)
    closing = asyncio.create_task(runner.aclose())
    await log.next()
    assert runner.statistics().running == 1
    gate.open()
    await closing
    await future


class _Members(set[Any]):
    """Asks for statistics at the worst moment: while a dead worker leaves."""

    def __init__(self, members: list[Any], ask: Callable[[], percore.Statistics]) -> None:
        super().__init__(members)
        self._ask = ask
        self.told: list[percore.Statistics] = []
        self.are_gone = asyncio.Event()

    def discard(self, member: Any) -> None:
        self.told.append(self._ask())
        super().discard(member)
        self.told.append(self._ask())
        if len(self.told) == 4:
            self.are_gone.set()


async def test_they_can_be_asked_from_any_thread_at_any_moment(make: MakeRunner) -> None:
    async with make(2) as runner:
        assert await runner.map(jobs.aecho, range(10)) == list(range(10))
        elsewhere = await asyncio.to_thread(runner.statistics)
        assert (elsewhere.done, len(elsewhere.workers)) == (10, 2)
        members = _Members(members_of(runner), runner.statistics)
        replace_members(runner, members)
        for member in list(members):
            member.worker.kill()
        await members.are_gone.wait()
        assert [snapshot.done for snapshot in members.told] == [10] * 4


# Who gets which call


async def test_peers_25_calls_spread_over_workers(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(2) as runner:
        futures = [runner.submit(jobs.await_, log.path, gate.path) for _ in range(20)]
        await log.take(20)
        running = sorted(worker.running for worker in runner.statistics().workers)
        assert sum(running) == 20
        assert running[0] >= 10 - BLOCKED, "each step in which a worker has read nothing counts as a call"
        gate.open()
        await asyncio.gather(*futures)


async def test_peers_25_plain_calls_take_every_free_thread(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(2, threads=4) as runner:
        futures = [runner.submit(jobs.wait, log.path, gate.path, i) for i in range(8)]
        assert sorted(await log.take(8)) == [str(i) for i in range(8)]  # all have begun
        # Where the supervisor cannot see starts, it hears a moment later that no worker holds calls back any more.
        await until(lambda: [worker.running for worker in runner.statistics().workers] == [4, 4])
        gate.open()
        assert await asyncio.gather(*futures) == list(range(8))


async def _block(runner: percore.Runner, log: Log, gate: Gate) -> int:
    """Block the loop of one worker, for so long that it is taken for blocked; its index."""
    member = current_member(runner)
    assert member is not None
    worker: Any = member.worker
    if isinstance(worker, FakeWorker):
        worker.pause()
        blocked = 0
    else:
        _ = runner.submit(jobs.block_loop, log.path, gate.path)
        assert await log.next() == "blocked"
        blocked = next(worker.index for worker in runner.statistics().workers if worker.running)
    # The least loaded gets a call: so each gets some of four. What this one does not read tells that it is blocked.
    futures = [runner.submit(jobs.aecho) for _ in range(4)]
    await asyncio.wait(futures, return_when=asyncio.FIRST_COMPLETED)
    silent = current_member(runner, blocked)
    assert silent is not None
    await until(lambda: silent.silence() >= BLOCKED)  # only the clock changes it
    return blocked


def _unblock(runner: percore.Runner, gate: Gate) -> None:
    gate.open()
    member = current_member(runner)
    assert member is not None
    worker: Any = member.worker
    if isinstance(worker, FakeWorker):
        worker.resume()


async def test_a_blocked_worker_is_not_given_coroutines(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(2) as runner:
        blocked = await _block(runner, log, gate)
        for _ in range(30):
            assert (await runner.run(jobs.awhere)).index != blocked
        _unblock(runner, gate)


async def test_a_blocked_worker_is_not_given_many_coroutines_at_once(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(2, kill_after=0.2) as runner:
        blocked = await _block(runner, log, gate)
        async with asyncio.timeout(3):
            workers = await asyncio.gather(*(runner.run(jobs.awhere) for _ in range(30)))
        assert blocked not in {worker.index for worker in workers}
        _unblock(runner, gate)


async def test_a_blocked_worker_is_not_given_plain_calls(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(2, threads=2) as runner:
        blocked = await _block(runner, log, gate)
        for _ in range(30):
            assert (await runner.run(jobs.where)).index != blocked
        _unblock(runner, gate)


async def test_a_busy_thread_holds_up_nobody_while_another_is_free(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(2, threads=1) as runner:
        busy = runner.submit(jobs.wait, log.path, gate.path)
        await log.next()
        assert await runner.map(jobs.echo, range(30)) == list(range(30))
        gate.open()
        await busy


async def test_what_waits_behind_a_busy_thread_is_recalled(make: MakeRunner, log: Log, gate: Gate, other_gate: Gate) -> None:
    async with make(2, threads=1) as runner:
        busy = [runner.submit(jobs.wait, log.path, path) for path in (gate.path, other_gate.path)]
        await log.take(2)
        ahead = [runner.submit(jobs.echo, i) for i in range(8)]
        other_gate.open()
        assert await asyncio.gather(*ahead) == list(range(8))
        assert not busy[0].done()
        gate.open()
        await asyncio.gather(*busy)


async def test_a_worker_that_drains_still_counts(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make() as runner:
        await runner.run(jobs.aecho)
        future = runner.submit(jobs.await_, log.path, gate.path)
        await log.next()
        (member,) = members_of(runner)
        member.worker.kill(signal.SIGTERM)
        await until(lambda: runner.statistics().restarts)
        snapshot = runner.statistics()
        assert (snapshot.done, snapshot.running) == (1, 1)
        gate.open()
        await future
        assert runner.statistics().done == 2
