"""broadcast: once in every ready worker, beside all other calls."""

import asyncio
import functools
import os
import signal
from typing import Any

import pytest

import percore
from percore._protocol.messages import Kind
from percore._scheduler.places import MOST_BROADCASTS
from tests import jobs
from tests.contract.conftest import MakeRunner, threads_ended, worker_of
from tests.contract.pipes import Gate, Log
from tests.fakes import FakeWorker
from tests.internals import members_of, slots_used, supervisor_of
from tests.waiting import until

WHERE = pytest.mark.parametrize("fn", [jobs.where, jobs.awhere])
HELD = pytest.mark.parametrize("fn", [jobs.wait, jobs.await_])


@WHERE
@pytest.mark.apart(because="a worker that is a process has a pid, and an end, of its own")
async def test_results_are_by_index(make: MakeRunner, fn: Any) -> None:
    async with make(3) as runner:
        workers = await runner.broadcast(fn)
        assert [worker.index for worker in workers] == [0, 1, 2]
        assert [worker.pid for worker in workers] == [worker.pid for worker in runner.statistics().workers]
        assert runner.statistics().done == 3


async def test_arguments_and_results(make: MakeRunner, subtests: pytest.Subtests) -> None:
    async with make(2) as runner:
        for fn in [jobs.echo, jobs.aecho, jobs.later]:
            for argument in [7, [7], bytes(300_000)]:
                with subtests.test(argument=argument, fn=fn):
                    assert await runner.broadcast(fn, argument) == [argument] * 2
                    assert await runner.broadcast(functools.partial(fn, argument)) == [argument] * 2
                    assert await runner.options(timeout=1e6).broadcast(jobs.aadd, 1, right=2, scale=10) == [30, 30]
                    assert slots_used(runner) <= 1  # the function itself may stay there


@WHERE
async def test_beside_a_full_worker(make: MakeRunner, log: Log, gate: Gate, fn: Any) -> None:
    async with make(2, concurrency=1, threads=1) as runner:
        held = [runner.submit(job, log.path, gate.path, i) for i in range(14) for job in (jobs.wait, jobs.await_)]
        await log.take(4)
        assert [worker.index for worker in await runner.broadcast(fn)] == [0, 1]
        assert log.rest() == []
        gate.open()
        await asyncio.gather(*held)


@WHERE
async def test_twenty_at_once(make: MakeRunner, log: Log, gate: Gate, fn: Any) -> None:
    async with make(2, concurrency=1, threads=1) as runner:
        held = [runner.submit(job, log.path, gate.path, i) for i in range(2) for job in (jobs.wait, jobs.await_)]
        await log.take(4)
        results = await asyncio.gather(*(runner.broadcast(fn) for _ in range(20)))
        assert [[worker.index for worker in workers] for workers in results] == [[0, 1]] * 20
        gate.open()
        await asyncio.gather(*held)


@HELD
async def test_twenty_that_wait(make: MakeRunner, log: Log, gate: Gate, fn: Any) -> None:
    async with make(2) as runner:
        tasks = [asyncio.create_task(runner.broadcast(fn, log.path, gate.path, i)) for i in range(20)]
        await log.take(2 * 16)  # so many are beside at once; the others wait for them
        gate.open()
        assert await asyncio.gather(*tasks) == [[i, i] for i in range(20)]


# A worker that does not answer


def _stop(worker: Any) -> None:
    if isinstance(worker, FakeWorker):
        worker.pause()
    else:
        os.kill(worker.pid, signal.SIGSTOP)


def _go_on(worker: Any) -> None:
    if isinstance(worker, FakeWorker):
        worker.resume()
    else:
        os.kill(worker.pid, signal.SIGCONT)


async def _give_up(runner: percore.Runner, fn: Any, *args: Any) -> None:
    """A broadcast that is cancelled when it was sent, as by a timeout."""
    task = asyncio.create_task(runner.broadcast(fn, *args))
    await asyncio.sleep(0)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task


@pytest.mark.parametrize("end", ["goes on", "is killed", "is closed", "drains"])
@pytest.mark.apart(because="a worker that is a process has a pid, and an end, of its own")
async def test_broadcasts_that_a_stopped_worker_does_not_answer(make: MakeRunner, log: Log, end: str) -> None:
    """A health check that gives up each time: the places of the worker do not run out, and the other workers hear of each."""
    async with make(2, concurrency=2, threads=1, kill_after=0.5) as runner:
        members = {member.index: member for member in members_of(runner)}
        worker = worker_of(runner, 0)
        _stop(worker)
        for _ in range(members[0].places + 1):
            await _give_up(runner, jobs.aecho)
        assert members[0].load[Kind.BROADCAST] == MOST_BROADCASTS
        task = asyncio.create_task(runner.broadcast(jobs.tell_async, log.path, 7))
        assert await log.next() == "7"  # at the other worker, at once
        assert len(supervisor_of(runner).calls.broadcasts) == 1
        if end == "goes on":
            _go_on(worker)
            assert await task == [7, 7]
            assert await runner.broadcast(jobs.aecho, 1) == [1, 1]
            await until(lambda: not runner.statistics().running)
            assert runner.statistics().restarts == 0
        elif end == "is killed":
            worker.kill()
            with pytest.raises(percore.WorkerDied) as caught:
                await task
            assert not caught.value.started
        elif end == "drains":
            supervisor_of(runner).pool.draining(members[0])
            supervisor_of(runner).advance()
            with pytest.raises(percore.WorkerDied) as caught:
                await task
            assert not caught.value.started
            _go_on(worker)
        else:
            await runner.aclose(grace=0)
            with pytest.raises(percore.RunnerClosed):
                await task
            return
        assert len(supervisor_of(runner).calls.broadcasts) == 0
        assert await runner.run(jobs.aecho, 3) == 3


async def test_a_broadcast_that_waits_is_cancelled(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(1) as runner:
        held = [asyncio.create_task(runner.broadcast(jobs.wait, log.path, gate.path, i)) for i in range(MOST_BROADCASTS)]
        await log.take(MOST_BROADCASTS)
        await _give_up(runner, jobs.echo, bytes(300_000))
        assert len(supervisor_of(runner).calls.broadcasts) == slots_used(runner) == 0
        waiting = [asyncio.create_task(runner.broadcast(jobs.aecho, i)) for i in range(3)]
        await asyncio.sleep(0)
        assert len(supervisor_of(runner).calls.broadcasts) == 3
        waiting[1].cancel()
        gate.open()
        assert await asyncio.gather(*held) == [[i] for i in range(MOST_BROADCASTS)]
        assert [await waiting[0], await waiting[2]] == [[0], [2]]


async def test_a_broadcast_that_waits_for_a_worker_that_drains_never_runs(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(1) as runner:
        held = [asyncio.create_task(runner.broadcast(jobs.wait, log.path, gate.path, i)) for i in range(MOST_BROADCASTS)]
        await log.take(MOST_BROADCASTS)
        waiting = asyncio.create_task(runner.broadcast(jobs.aecho, 1))
        await asyncio.sleep(0)
        worker_of(runner).kill(signal.SIGTERM)
        with pytest.raises(percore.WorkerDied, match=r"before it began aecho\. No other worker will run it") as death:
            await waiting
        assert (death.value.exitcode, death.value.started) == (0, False)
        gate.open()
        assert await asyncio.gather(*held) == [[i] for i in range(MOST_BROADCASTS)]


# Failures


async def test_the_first_failure_raises_and_cancels_the_others(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(3) as runner:
        with pytest.raises(ValueError, match="worker 1"):
            await runner.broadcast(jobs.wait_or_fail_at, log.path, gate.path, 1)
        said = await log.take(4)
        assert sorted(said) == ["0", "2", "cancelled 0", "cancelled 2"]
        assert await runner.broadcast(jobs.aecho, 1) == [1] * 3


async def test_a_failure_of_a_plain_function_raises(make: MakeRunner) -> None:
    async with make(2) as runner:
        with pytest.raises(KeyError):
            await runner.broadcast(jobs.fail, KeyError("x"))


@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_what_cannot_be_pickled_raises(make: MakeRunner) -> None:
    async with make(2) as runner:
        with pytest.raises(ValueError, match="do not pickle me"):
            await runner.broadcast(jobs.echo, jobs.RefusesPickle())
        assert runner.statistics().running == 0


@HELD
async def test_a_worker_dies_during_it(make: MakeRunner, log: Log, gate: Gate, fn: Any) -> None:
    async with make(2) as runner:
        task = asyncio.create_task(runner.broadcast(fn, log.path, gate.path, "x"))
        assert await log.take(2) == ["x", "x"]
        worker = worker_of(runner, 1)
        pid = worker.pid
        worker.kill()
        with pytest.raises(percore.WorkerDied) as caught:
            await task
        assert (caught.value.pid, caught.value.started, caught.value.attempts) == (pid, True, 1)
        if fn is jobs.await_:
            while "cancelled x" not in [await log.next(), *log.rest()]:
                """The other one is cancelled."""
        gate.open()
        await threads_ended(worker)
        await until(lambda: runner.statistics().workers[1].state == "ready")
        assert [worker.generation for worker in await runner.broadcast(jobs.awhere)] == [1, 2]


async def test_a_worker_dies_before_it_begins(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(2) as runner:
        worker = worker_of(runner)
        if isinstance(worker, FakeWorker):
            worker.pause()
            blocking = None
        else:
            blocking = runner.submit(jobs.block_loop, log.path, gate.path)
            assert await log.next() == "blocked"
            if (await runner.run(jobs.awhere)).index == 0:
                worker = worker_of(runner, 1)
        task = asyncio.create_task(runner.broadcast(jobs.aecho, 1))
        await asyncio.sleep(0)
        worker.kill()
        with pytest.raises(percore.WorkerDied) as caught:
            await task
        assert (caught.value.pid, caught.value.started) == (worker.pid, False)
        if blocking is not None:
            await asyncio.wait([blocking])
            assert type(blocking.exception()) is percore.WorkerDied


@pytest.mark.parametrize("has_other", [True, False], ids=["two", "one"])
async def test_a_worker_that_percore_kills_gets_nothing_more(make: MakeRunner, has_other: bool) -> None:
    """As when its channel breaks. Its end has yet to be told."""
    async with make(2 if has_other else 1) as runner:
        pool = supervisor_of(runner).pool
        (member,) = (member for member in members_of(runner) if member.index == 0)
        pool.kill_one(member, "the test says so")
        assert not member.life.is_gone
        future = runner.submit(jobs.aecho, 1)
        assert not member.calls
        assert [worker.index for worker in await runner.broadcast(jobs.awhere)] == [1] * has_other
        assert await future == 1


async def test_a_worker_that_is_gone_does_not_get_it(make: MakeRunner, log: Log, gate: Gate) -> None:
    lifespan = functools.partial(jobs.others_behind, log.path, gate.path)
    async with make(2, lifespan=lifespan) as runner:
        await log.take(2)
        worker_of(runner, 0).kill()
        while await log.next() != "enter 2":
            """A fake leaves its lifespan."""
        assert [worker.index for worker in await runner.broadcast(jobs.awhere)] == [1]
        gate.open()


# Cancelling and closing


@HELD
async def test_cancelled(make: MakeRunner, log: Log, gate: Gate, fn: Any) -> None:
    async with make(2) as runner:
        task = asyncio.create_task(runner.broadcast(fn, log.path, gate.path, "x"))
        await log.take(2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        if fn is jobs.await_:
            assert await log.take(2) == ["cancelled x"] * 2
        gate.open()
        assert await runner.broadcast(jobs.echo, 1) == [1, 1]


async def test_closed_before_and_meanwhile(make: MakeRunner, log: Log, gate: Gate) -> None:
    runner = make(2)
    with pytest.raises(percore.RunnerClosed):
        await runner.broadcast(jobs.aecho)
    await runner.start()
    tasks = [asyncio.create_task(runner.broadcast(jobs.await_, log.path, gate.path, i)) for i in range(20)]
    await log.take(2 * 16)
    await runner.aclose(grace=0)
    results = await asyncio.gather(*tasks, return_exceptions=True)
    assert [type(result) for result in results] == [percore.RunnerClosed] * 20
    with pytest.raises(percore.RunnerClosed):
        await runner.broadcast(jobs.aecho)


async def test_a_close_waits_for_it(make: MakeRunner, log: Log, gate: Gate) -> None:
    runner = make(2)
    await runner.start()
    task = asyncio.create_task(runner.broadcast(jobs.await_, log.path, gate.path, "x"))
    await log.take(2)
    closing = asyncio.create_task(runner.aclose())
    await asyncio.sleep(0)
    gate.open()
    assert await task == ["x", "x"]
    await closing


async def test_neither_key_nor_retries(make: MakeRunner) -> None:
    async with make(retries=2) as runner:
        options = runner.options
        for view in (options(key="k"), options(retries=1), options(retry_on=OSError), options(backoff=1)):
            with pytest.raises(TypeError, match="a key, retries, retry_on and backoff do not apply"):
                await view.broadcast(jobs.aecho)


async def test_retries_of_the_runner_do_not_apply(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(retries=2) as runner:
        for view in (runner.options(), runner.options(timeout=1e6), runner.options(retries=0)):
            assert await view.broadcast(jobs.aecho, 1) == [1]
        task = asyncio.create_task(runner.options(timeout=1e6).broadcast(jobs.await_, log.path, gate.path, 7))
        await log.next()
        worker_of(runner).kill()
        with pytest.raises(percore.WorkerDied) as caught:
            await task
        assert caught.value.attempts == 1
        assert runner.statistics().retried == 0
