"""aclose in all its outcomes."""

import asyncio
import functools
import gc
import os
from typing import Any

import pytest

import percore
from percore._supervisor.pool import Pool
from tests import jobs
from tests.contract.conftest import MakeRunner
from tests.contract.pipes import Gate, Log
from tests.internals import members_of

pytestmark = [
    pytest.mark.differs("uvloop", because="the loop takes its descriptors back in another way"),
    pytest.mark.differs("fallbacks", because="bells are pipes, and the workers' loop is asyncio's", on="fake"),
    pytest.mark.differs(
        "nodes", because="the far half has ended its workers and has the same payloads as the near half when both close"
    ),
    pytest.mark.differs("threads", because="a worker ends as its loop does, and nothing can end its threads"),
]


in_processes = pytest.mark.differs("fallbacks", because="a thread sees that a worker has ended")
spawned = pytest.mark.differs("spawn", because="the program itself reaps the workers, and no fork server ends with them")


async def _closing(runner: percore.Runner, grace: float | None = None) -> "asyncio.Task[None]":
    """aclose under way: it has been called and waits."""
    task = asyncio.create_task(runner.aclose(grace=grace))
    await asyncio.sleep(0)
    assert not task.done()
    return task


def _errors(futures: "list[asyncio.Future[Any]]") -> list[type]:
    """What done futures ended with; none may be cancelled."""
    assert all(future.done() for future in futures)
    assert not any(future.cancelled() for future in futures)
    return [type(future.exception()) for future in futures]


@pytest.mark.parametrize("fn", [jobs.wait, jobs.await_])
@spawned
@in_processes
async def test_x1_it_lets_accepted_calls_finish_and_takes_no_new_ones(make: MakeRunner, log: Log, gate: Gate, fn: Any) -> None:
    runner = make(concurrency=1, threads=1)
    await runner.start()
    futures = [runner.submit(fn, log.path, gate.path, i) for i in range(8)]
    assert await log.next() == "0"
    closing = await _closing(runner)
    for use in (runner.submit, runner.map):
        with pytest.raises(percore.RunnerClosed, match="closing"):
            use(jobs.echo, [1])
    with pytest.raises(percore.RunnerClosed, match="closing"):
        await runner.run(jobs.aecho)
    gate.open()
    await closing
    assert [future.result() for future in futures] == list(range(8))


async def test_x1_grace_zero_withdraws_what_waits_and_cancels_what_runs(make: MakeRunner, log: Log, gate: Gate) -> None:
    runner = make(concurrency=1)
    await runner.start()
    futures = [runner.submit(jobs.await_, log.path, gate.path, i) for i in range(5)]
    assert await log.next() == "0"
    await runner.aclose(grace=0)
    assert _errors(futures) == [percore.RunnerClosed] * 5
    assert log.rest() == ["cancelled 0"]


async def test_grace_zero_takes_back_what_was_queued_ahead(make: MakeRunner, log: Log, gate: Gate) -> None:
    runner = make(threads=1)
    await runner.start()
    futures = [runner.submit(jobs.wait, log.path, gate.path, i) for i in range(20)]
    assert await log.next() == "0"
    closing = await _closing(runner, 0)
    await asyncio.wait(futures[1:])
    gate.open()
    await closing
    assert _errors(futures[1:]) == [percore.RunnerClosed] * 19
    assert log.rest() == []


async def test_a_grace_that_is_over(make: MakeRunner, log: Log, gate: Gate) -> None:
    runner = make(concurrency=1)
    await runner.start()
    futures = [runner.submit(jobs.await_, log.path, gate.path, i) for i in range(3)]
    assert await log.next() == "0"
    await runner.aclose(grace=0.05)
    assert _errors(futures) == [percore.RunnerClosed] * 3


async def test_a_grace_that_is_enough(make: MakeRunner, log: Log, gate: Gate) -> None:
    runner = make(concurrency=1)
    await runner.start()
    futures = [runner.submit(jobs.await_, log.path, gate.path, i) for i in range(3)]
    assert await log.next() == "0"
    closing = await _closing(runner, 30)
    gate.open()
    await closing
    assert [future.result() for future in futures] == [0, 1, 2]


@spawned
@in_processes
async def test_x1_what_does_not_end_is_killed(make: MakeRunner, log: Log, gate: Gate) -> None:
    runner = make(threads=1, kill_after=0.1)
    await runner.start()
    future = runner.submit(jobs.wait, log.path, gate.path, 0)
    assert await log.next() == "0"
    await runner.aclose(grace=0)
    assert _errors([future]) == [percore.RunnerClosed]


async def test_a_call_that_ends_while_it_is_cut_keeps_its_result(make: MakeRunner, log: Log, gate: Gate, other_gate: Gate) -> None:
    runner = make()
    await runner.start()
    future = runner.submit(jobs.ignore_cancel, log.path, gate.path, other_gate.path)
    assert await log.next() == "began"
    closing = await _closing(runner, 0)
    assert await log.next() == "ignored"
    other_gate.open()
    await closing
    assert future.result() == "answer"


async def test_x2_a_second_caller_waits_for_the_first(make: MakeRunner, log: Log, gate: Gate) -> None:
    runner = make()
    await runner.start()
    future = runner.submit(jobs.await_, log.path, gate.path, 0)
    first, second = await _closing(runner), await _closing(runner)
    gate.open()
    await second
    assert future.result() == 0
    await first


async def test_x2_a_smaller_grace_tightens_the_first(make: MakeRunner, log: Log, gate: Gate) -> None:
    runner = make()
    await runner.start()
    future = runner.submit(jobs.await_, log.path, gate.path, 0)
    assert await log.next() == "0"
    first = await _closing(runner)
    await runner.aclose(grace=0.01)
    await first
    assert _errors([future]) == [percore.RunnerClosed]


async def test_x2_a_larger_grace_does_not_loosen_the_first(make: MakeRunner, log: Log, gate: Gate) -> None:
    runner = make()
    await runner.start()
    future = runner.submit(jobs.await_, log.path, gate.path, 0)
    assert await log.next() == "0"
    first = await _closing(runner, 0.05)
    async with asyncio.timeout(10):
        await runner.aclose(grace=1000)
    await first
    assert _errors([future]) == [percore.RunnerClosed]


@spawned
@in_processes
@pytest.mark.apart(because="a worker that is a process has a pid, and an end, of its own")
async def test_x2_cancelled_it_kills_at_once_and_still_reaps(make: MakeRunner, log: Log, gate: Gate) -> None:
    runner = make(2, kill_after=1000, lifespan=functools.partial(jobs.resource, log.path))
    await runner.start()
    pids = [worker.pid for worker in runner.statistics().workers]
    futures = [runner.submit(fn, log.path, gate.path, "call") for fn in (jobs.wait, jobs.await_)]
    assert sorted(await log.take(4)) == ["call", "call", "enter", "enter"]
    closing = await _closing(runner)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert _errors(futures) == [percore.RunnerClosed] * 2
    for pid in pids:
        with pytest.raises(ProcessLookupError):
            os.kill(pid or 0, 0)
    with pytest.raises(percore.RunnerClosed, match="is closed"):
        _ = runner.submit(jobs.echo)


@in_processes
async def test_x2_cancelled_it_kills_a_worker_whose_loop_is_blocked(make_real: MakeRunner, log: Log, gate: Gate) -> None:
    runner = make_real(kill_after=1000)
    await runner.start()
    futures = [runner.submit(jobs.block_loop, log.path, gate.path), runner.submit(jobs.aecho, 1)]
    assert await log.next() == "blocked"
    closing = await _closing(runner, 0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert _errors(futures) == [percore.RunnerClosed] * 2


async def test_x2_of_two_callers_one_is_cancelled(make: MakeRunner, log: Log, gate: Gate) -> None:
    runner = make(threads=1)
    await runner.start()
    future = runner.submit(jobs.wait, log.path, gate.path, 0)
    assert await log.next() == "0"
    first, second = await _closing(runner), await _closing(runner)
    second.cancel()
    await first
    with pytest.raises(asyncio.CancelledError):
        await second
    assert _errors([future]) == [percore.RunnerClosed]


async def test_a_cut_call_fails_a_task_group(make: MakeRunner, log: Log, gate: Gate) -> None:
    runner = make()
    await runner.start()

    async def close() -> None:
        await log.next()
        await runner.aclose(grace=0)

    with pytest.raises(ExceptionGroup) as caught:  # noqa: PT012
        async with asyncio.TaskGroup() as group:
            group.create_task(runner.run(jobs.await_, log.path, gate.path, 0))
            group.create_task(close())
    assert [type(error) for error in caught.value.exceptions] == [percore.RunnerClosed]
    await runner.aclose()


async def test_a_cut_call_that_nobody_reads_is_not_reported(make: MakeRunner, log: Log, gate: Gate) -> None:
    reports: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: reports.append(context))
    runner = make(concurrency=1)
    await runner.start()
    for i in range(3):
        _ = runner.submit(jobs.await_, log.path, gate.path, i)
    await log.next()
    await runner.aclose(grace=0)
    gc.collect()
    assert reports == []


async def test_x2_the_body_s_error_closes_with_grace_zero(make: MakeRunner, log: Log, gate: Gate) -> None:
    futures = []
    with pytest.raises(KeyError, match="body"):  # noqa: PT012
        async with make(concurrency=1) as runner:
            futures = [runner.submit(jobs.await_, log.path, gate.path, i) for i in range(3)]
            await log.next()
            raise KeyError("body")
    assert _errors(futures) == [percore.RunnerClosed] * 3


async def test_the_body_s_end_closes_gracefully(make: MakeRunner) -> None:
    async with make(2) as runner:
        futures = [runner.submit(fn, i) for i in range(50) for fn in (jobs.echo, jobs.aecho)]
    assert [future.result() for future in futures] == [i for i in range(50) for _ in range(2)]


async def test_x2_closing_twice_does_nothing(make: MakeRunner) -> None:
    runner = make()
    await runner.start()
    await runner.aclose()
    await runner.aclose()
    await runner.aclose(grace=0)


async def test_closing_what_never_started(make: MakeRunner) -> None:
    runner = make()
    await runner.aclose()
    with pytest.raises(percore.RunnerClosed, match="closed"):
        _ = runner.submit(jobs.echo)
    with pytest.raises(RuntimeError, match="started once"):
        await runner.start()


@spawned
@in_processes
async def test_x2_closing_while_it_starts(make: MakeRunner, log: Log, gate: Gate) -> None:
    runner = make(2, lifespan=functools.partial(jobs.resource_behind, log.path, gate.path))
    starting = asyncio.create_task(runner.start())
    await log.take(2)
    async with asyncio.timeout(10):
        await runner.aclose(grace=0)
        with pytest.raises(percore.PercoreError):
            await starting
    with pytest.raises(percore.RunnerClosed):
        _ = runner.submit(jobs.echo)


async def test_x2_cancelled_with_all_tasks_as_its_last_worker_has_ended(make: MakeRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    """The task that releases what the workers shared is cancelled before its first step, in which it would do nothing."""
    loop, cancelled = asyncio.get_running_loop(), list[str]()
    create_task = loop.create_task

    def cancelled_at_once(coro: Any, *, name: str = "", **options: Any) -> "asyncio.Task[Any]":
        task = create_task(coro, name=name, **options)
        if name == "percore-close" and not cancelled:
            cancelled.append(name)
            task.cancel()
        return task

    runner = make()
    await runner.start()
    monkeypatch.setattr(loop, "create_task", cancelled_at_once)
    with pytest.raises(asyncio.CancelledError):
        await runner.aclose()
    assert cancelled
    assert repr(runner).startswith("<percore.Runner closed")


@spawned
@in_processes
async def test_a_worker_that_dies_while_it_closes_leaves_no_future_undone(make: MakeRunner, log: Log, gate: Gate) -> None:
    runner = make(concurrency=2)
    await runner.start()
    futures = [runner.submit(jobs.await_, log.path, gate.path, i) for i in range(6)]
    assert sorted(await log.take(2)) == ["0", "1"]
    closing = await _closing(runner)
    (member,) = members_of(runner)
    member.worker.kill()
    await closing
    errors = _errors(futures)
    assert errors[:2] == [percore.WorkerDied] * 2
    assert set(errors[2:]) <= {percore.WorkerDied, percore.RunnerClosed}
    died = [error for future in futures[2:] if isinstance(error := future.exception(), percore.WorkerDied)]
    assert not any(error.started for error in died)


@spawned
@in_processes
@pytest.mark.apart(because="a worker that is a process has a pid, and an end, of its own")
async def test_two_runners_live_side_by_side(make: MakeRunner) -> None:
    async with make() as one, make() as other:
        pids = {(await runner.run(jobs.where)).pid for runner in (one, other)}
        assert len(pids) == 2
        await one.aclose()
        assert await other.run(jobs.aecho, 1) == 1


@in_processes
async def test_x2_closing_at_the_moment_the_last_worker_is_ready(make: MakeRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    closings: list[asyncio.Task[None]] = []
    ready = Pool.ready

    def close_first(pool: Pool, member: Any) -> None:
        closings.append(asyncio.create_task(runner.aclose()))  # runs before the one that waits for the start
        ready(pool, member)

    monkeypatch.setattr(Pool, "ready", close_first)
    runner = make()
    with pytest.raises(percore.RunnerClosed, match="while it started"):
        await runner.start()
    await asyncio.wait(closings)
    with pytest.raises(percore.RunnerClosed):
        await runner.run(jobs.echo)


async def test_a_bad_grace_changes_nothing(make: MakeRunner, subtests: pytest.Subtests) -> None:
    bad: list[tuple[Any, type[Exception]]] = [("1", TypeError), (True, TypeError), (float("nan"), ValueError)]
    async with make() as runner:
        for grace, error in bad:
            with subtests.test(grace=grace), pytest.raises(error, match="grace must be None or a number of seconds"):
                await runner.aclose(grace=grace)
            assert await runner.run(jobs.echo, 1) == 1
