"""A worker's life beside its calls: what its lifespan may do, and by when it ends."""

import asyncio
import functools
import signal
import traceback
from typing import Any

import pytest

import percore
from percore import Runner
from percore._scheduler.replacement import RestartBudget
from tests import jobs
from tests.contract import life_jobs
from tests.contract.conftest import MakeRunner, worker_of
from tests.contract.pipes import Gate, Log
from tests.internals import current_member, members_of, supervisor_of

pytestmark = pytest.mark.differs("threads", because="the lifespan and its tasks belong to a loop beside others in one process")

launches = pytest.mark.differs("spawn", because="a fresh interpreter is launched and ends in another way than a forked worker")


async def _alone(runner: Runner, workers: int = 1) -> None:
    """Call until there are no more workers than that."""
    while len(members_of(runner)) > workers:
        await runner.run(jobs.aecho)


# Deadlines


@launches
async def test_a_replacement_that_fails_and_does_not_end_is_killed(make_real: MakeRunner, log: Log) -> None:
    async with make_real(lifespan=functools.partial(life_jobs.fails_and_stays, log.path), kill_after=0.1) as runner:
        worker_of(runner).kill()
        assert await log.next() == "fails"
        assert (await runner.run(jobs.awhere)).generation == 3


@launches
async def test_a_draining_worker_is_killed_if_it_hangs_after_its_last_call(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(lifespan=functools.partial(life_jobs.stays_at_its_end, log.path), kill_after=0.1) as runner:
        old = current_member(runner)
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


@launches
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


@launches
async def test_a_start_that_fails_without_words_says_where(make: MakeRunner) -> None:
    with pytest.raises(percore.StartupFailed, match=r"worker 0 could not start: BadText: <exception str\(\) failed>"):
        await make(lifespan=life_jobs.fails_without_words).start()


# Tasks of the lifespan

WROTE = [f"wrote {item}" for item in range(20)]


@pytest.mark.parametrize(
    "lifespan",
    [life_jobs.with_task, life_jobs.with_tasks_of_unknown_context, life_jobs.with_task_group, life_jobs.with_anyio_group],
    ids=lambda lifespan: lifespan.__name__,
)
@pytest.mark.parametrize("ends", ["by closing", "by draining"])
async def test_the_lifespan_s_tasks_work_until_it_is_left(make: MakeRunner, log: Log, lifespan: Any, ends: str) -> None:
    async with make(lifespan=functools.partial(lifespan, log.path)) as runner:
        await asyncio.gather(*(runner.run(life_jobs.put, item) for item in range(20)))
        assert log.rest() == []
        if ends == "by draining":
            worker_of(runner).kill(signal.SIGTERM)
            assert await log.take(20) == WROTE
    left = ["left"] if lifespan in {life_jobs.with_task_group, life_jobs.with_anyio_group} else []
    first, rest = ([], log.rest()) if ends == "by draining" else (WROTE, log.rest())
    assert rest[: len(first) + len(left)] == first + left


async def test_a_session_of_the_lifespan_ends_in_order(make: MakeRunner, log: Log) -> None:
    async with make(lifespan=functools.partial(life_jobs.with_session, log.path)) as runner:
        await asyncio.gather(*(runner.run(life_jobs.request, str(number)) for number in range(20)))
        assert log.rest() == []
    assert log.rest() == ["wrote 0", "left"]


@pytest.mark.asyncio_only
def test_the_lifespan_s_tasks_work_until_an_executor_ends(log: Log) -> None:
    with percore.LoopPoolExecutor(1, lifespan=functools.partial(life_jobs.with_task, log.path)) as executor:
        for item in range(20):
            _ = executor.submit(life_jobs.put, item)
    assert log.rest() == WROTE


async def test_a_task_that_a_plain_function_left_is_cancelled_before_the_lifespan_is_left(
    make_real: MakeRunner, log: Log, gate: Gate
) -> None:
    async with make_real(lifespan=functools.partial(life_jobs.with_loop, log.path)) as runner:
        await runner.run(life_jobs.leave_task_from_thread, log.path, gate.path)
        assert await log.next() == "task"
    assert log.rest() == ["cancelled task", "left"]


# Lifespans that fail


@pytest.mark.parametrize(
    "failing",
    [
        (life_jobs.fails_in_group, "ConnectionError: the token server is gone"),
        (life_jobs.fails_in_anyio_group, "ConnectionError: the token server is gone"),
        (life_jobs.times_out, "TimeoutError"),
    ],
    ids=["asyncio", "anyio", "timeout"],
)
async def test_a_lifespan_that_fails_while_calls_run_says_why(
    make: MakeRunner, log: Log, gate: Gate, other_gate: Gate, caplog: pytest.LogCaptureFixture, failing: Any
) -> None:
    lifespan, text = failing
    async with make(lifespan=functools.partial(lifespan, log.path, gate.path), concurrency=1) as runner:
        running = runner.submit(jobs.await_, log.path, other_gate.path, "running")
        assert await log.next() == "running"
        waiting = runner.submit(jobs.awhere)
        gate.open()
        with pytest.raises(percore.WorkerDied) as caught:
            await running
        assert text in "".join(traceback.format_exception(caught.value))
        assert (await waiting).generation == 2
        assert text in caplog.text
        assert log.rest() == ["cancelled running"]  # and the lifespan was not left in order
    assert log.rest() == ["left in order"]


async def test_lifespans_that_fail_again_and_again_break_the_runner_and_say_why(
    make_real: MakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    # With processes alone: the tracebacks that are logged would keep the frames of the fake engine's workers, and so their memory.
    monkeypatch.setattr(RestartBudget, "died", _at_once(RestartBudget.died))
    async with make_real(lifespan=life_jobs.always_fails) as runner:
        worker_of(runner).kill()
        errors: asyncio.Queue[percore.RunnerBroken] = asyncio.Queue()
        fail = supervisor_of(runner).fail

        def fail_and_tell(error: percore.RunnerBroken) -> None:
            fail(error)
            errors.put_nowait(error)

        monkeypatch.setattr(supervisor_of(runner), "fail", fail_and_tell)
        error = await errors.get()
        assert "the token server is gone" in "".join(traceback.format_exception(error))
        with pytest.raises(percore.RunnerBroken) as caught:
            await runner.run(jobs.aecho)
        assert "the token server is gone" in "".join(traceback.format_exception(caught.value))


def _at_once(died: Any) -> Any:
    """No back-off between starts."""
    return lambda budget: None if died(budget) is None else 0.0


async def test_a_call_that_cancels_all_tasks_costs_no_worker(make_real: MakeRunner, log: Log) -> None:
    async with make_real(lifespan=functools.partial(jobs.resource, log.path)) as runner:
        pid = (await runner.run(jobs.awhere)).pid
        with pytest.raises(percore.RemoteError, match="CancelledError"):
            await runner.run(life_jobs.cancel_all)
        assert await runner.run(life_jobs.cancel_all_others) == "alive"
        assert (await runner.run(jobs.awhere)).pid == pid
        assert log.rest() == ["enter"]
    assert log.rest() == ["exit"]
