"""timeout: how long one attempt may run in its worker. Nothing here measures time: what is awaited ends by the timeout or never."""

import asyncio
import itertools
from typing import Any, cast

import pytest

import percore
from tests import jobs, rows
from tests.contract.conftest import MakeRunner, threads_ended, worker_of
from tests.contract.pipes import Gate, Log
from tests.contract.stream_jobs import USER
from tests.internals import members_of
from tests.waiting import until

timed = pytest.mark.differs("uvloop", because="uvloop's timers have a clock of their own")

TINY = 0.02
SHORT = 0.5
"""For what has to be in time beside what is not."""

LONG = 1e6
BOTH = pytest.mark.parametrize("fn", [jobs.wait, jobs.await_, *rows.repeats(jobs.later_wait_for)])


async def _late(runner: percore.Runner, count: int = 1) -> None:
    """Wait until so many calls wait for their threads, to be attempted once more."""
    members = members_of(runner)
    await until(
        lambda: sum(call.plan is not None and call.plan.late is not None for m in members for call in m.calls.values()) >= count
    )


# Coroutines


async def test_a_coroutine_is_cancelled_and_has_cleaned_up(make: MakeRunner, log: Log, gate: Gate, other_gate: Gate) -> None:
    async with make() as runner:
        call = runner.options(timeout=TINY).submit(jobs.clean_up, log.path, gate.path, other_gate.path)
        assert await log.take(2) == ["began", "cleaning"]
        assert await runner.run(jobs.aecho, 1) == 1
        assert not call.done()  # its `finally` still runs
        other_gate.open()
        with pytest.raises(TimeoutError, match=r"^clean_up ran for longer than timeout=0\.02 s$"):
            await call
        assert log.rest() == ["clean"]
        statistics = runner.statistics()
        assert (statistics.running, statistics.failed) == (0, 1)


async def test_a_coroutine_that_swallows_its_cancellation(make: MakeRunner, log: Log, gate: Gate, other_gate: Gate) -> None:
    async with make() as runner:
        call = runner.options(timeout=TINY).submit(jobs.ignore_cancel, log.path, gate.path, other_gate.path)
        assert await log.take(2) == ["began", "ignored"]
        assert not call.done()
        other_gate.open()
        assert await call == "answer"  # as under asyncio.timeout


async def test_a_coroutine_that_raises_something_else_when_it_is_cancelled(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make() as runner:
        with pytest.raises(ValueError, match="raised instead"):
            await runner.options(timeout=TINY).run(jobs.fail_when_cancelled, log.path, gate.path)


async def test_a_timeout_of_the_user_s_own_is_itself(make: MakeRunner) -> None:
    async with make() as runner:
        with pytest.raises(TimeoutError, match="mine"):
            await runner.options(timeout=LONG).run(jobs.afail, TimeoutError("mine"))


async def test_cancelled_before_its_timeout(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make() as runner:
        task = asyncio.create_task(runner.options(timeout=LONG).run(jobs.await_, log.path, gate.path, 7))
        assert await log.next() == "7"
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await log.next() == "cancelled 7"


async def test_in_time(make: MakeRunner, subtests: pytest.Subtests) -> None:
    fns: list[Any] = [jobs.echo, jobs.aecho, jobs.later]
    async with make() as runner:
        view = runner.options(timeout=LONG)
        for fn in fns:
            with subtests.test(fn.__name__):
                assert await view.run(fn, 7) == 7
                assert await view.run(fn, [bytes(300_000)]) == [bytes(300_000)]
                assert await view.map(fn, range(100)) == list(range(100))
                assert runner.statistics().running == 0


async def test_its_exception_is_in_time(make: MakeRunner) -> None:
    async with make() as runner:
        for fn in (jobs.fail, jobs.afail):
            with pytest.raises(KeyError):
                await runner.options(timeout=LONG).run(fn, KeyError("x"))


@timed
async def test_each_call_has_its_own_limit_and_others_have_none(make: MakeRunner, gate: Gate) -> None:
    """One message tells a worker the timeout of the calls that follow, but not of those with large arguments or variables."""
    large = bytes(300_000)
    async with make(concurrency=40, threads=20, contextvars=[USER]) as runner:
        limited, plain, patient = runner.options(timeout=TINY), runner, runner.options(timeout=LONG)
        calls: list[list[asyncio.Future[Any]]] = [[], [], []]
        fns: list[Any] = [jobs.plain_then, jobs.await_unless_first] * 3
        for count, fn in enumerate(fns):
            if count == 2:
                USER.set("somebody")
            for place, view in enumerate((limited, plain, patient)):
                calls[place].append(view.submit(fn, gate.path, 7 if count < 4 else large))
        late = await asyncio.gather(*calls[0], return_exceptions=True)
        names = ["plain_then", "await_unless_first"] * 3
        assert [str(error) for error in late] == [f"{name} ran for longer than timeout=0.02 s" for name in names]
        assert not any(call.done() for call in (*calls[1], *calls[2]))
        gate.open()
        assert [await call for call in (*calls[1], *calls[2])] == ([7] * 4 + [large] * 2) * 2


# Plain functions


async def test_a_plain_function_s_caller_waits_no_longer(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(threads=1) as runner:
        with pytest.raises(TimeoutError, match=r"^wait ran for longer than timeout=0\.02 s$"):
            await runner.options(timeout=TINY).run(jobs.wait, log.path, gate.path, 7)
        assert await log.next() == "7"
        # The thread is busy until it ends, and its loop is not.
        following = runner.submit(jobs.echo, 1)
        assert await runner.run(jobs.aecho, 2) == 2
        assert not following.done()
        assert runner.statistics().running == 1
        gate.open()
        assert await following == 1
        statistics = runner.statistics()
        assert (statistics.running, statistics.done) == (0, 3)


async def test_a_late_result_is_dropped(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(threads=1) as runner:
        calls = [runner.options(timeout=TINY).submit(jobs.plain_then, gate.path, what) for what in (7, [8], bytes(300_000))]
        results = asyncio.gather(*calls[:1], return_exceptions=True)
        assert [type(result) for result in await results] == [TimeoutError]
        gate.open()
        await asyncio.wait(calls)
        assert await runner.run(jobs.echo, 1) == 1
        assert runner.statistics().running == 0


async def test_a_late_error_is_dropped(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(threads=1) as runner:
        with pytest.raises(TimeoutError):
            await runner.options(timeout=TINY).run(jobs.wait_then_fail, gate.path)
        gate.open()
        assert await runner.run(jobs.echo, 1) == 1


async def test_an_awaitable_of_a_plain_function(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(threads=1) as runner:
        with pytest.raises(TimeoutError):
            await runner.options(timeout=TINY).run(jobs.later_wait, log.path, gate.path)
        assert await log.take(2) == ["later", "cancelled later"]
        assert await runner.run(jobs.echo, 1) == 1


async def test_an_awaitable_that_comes_too_late(make: MakeRunner, log: Log, gate: Gate, other_gate: Gate) -> None:
    async with make(threads=1) as runner:
        with pytest.raises(TimeoutError):
            await runner.options(timeout=TINY).run(jobs.wait_then_later, log.path, gate.path, other_gate.path)
        gate.open()  # the function has returned its awaitable: that is cancelled where it first waits
        said = await log.take(3)
        assert said == ["waits", "later", "cancelled later"]
        assert await runner.run(jobs.echo, 1) == 1


async def test_a_death_after_the_timeout(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(threads=1) as runner:
        with pytest.raises(TimeoutError):
            await runner.options(timeout=TINY, retries=3).run(jobs.wait, log.path, gate.path, 7)
        assert await log.next() == "7"
        worker = worker_of(runner)
        worker.kill()
        assert await runner.run(jobs.aecho, 1) == 1
        gate.open()
        await threads_ended(worker)
        assert log.rest() == []


# Waiting is not counted


@pytest.mark.parametrize(
    ("first", "second"), [(jobs.await_, jobs.aecho), (jobs.wait, jobs.echo), *rows.repeated_rows((jobs.wait, jobs.later))]
)
async def test_waiting_for_a_place_is_not_counted(
    make: MakeRunner, log: Log, gate: Gate, other_gate: Gate, first: Any, second: Any
) -> None:
    async with make(concurrency=2, threads=1) as runner:
        view = runner.options(timeout=SHORT)
        held = [runner.submit(first, log.path, gate.path, i) for i in range(2 if first is jobs.await_ else 1)]
        await log.take(len(held))
        waiting = [view.submit(second, i) for i in range(3)]  # some of them are queued ahead, in the worker
        if first is jobs.await_:
            plain = view.run(jobs.wait, log.path, other_gate.path, "timed out")
        else:
            plain = view.run(jobs.await_, log.path, other_gate.path, "timed out")
        with pytest.raises(TimeoutError):  # so long has passed, at least
            await plain
        gate.open()
        other_gate.open()
        assert await asyncio.gather(*waiting) == [0, 1, 2]
        await asyncio.gather(*held)


# Maps


@BOTH
async def test_items_of_a_map_time_out_alone(make: MakeRunner, log: Log, gate: Gate, other_gate: Gate, fn: Any) -> None:
    other_gate.open()
    gates = [gate.path if i % 4 == 1 else other_gate.path for i in range(12)]
    async with make(2, threads=4) as runner:
        await runner.broadcast(jobs.aecho)  # importing is not what is timed here
        view = runner.options(timeout=SHORT)
        results = await view.map(fn, itertools.repeat(log.path), gates, range(12), return_exceptions=True)
        assert [type(result) for result in results] == [TimeoutError if i % 4 == 1 else int for i in range(12)]
        gate.open()


@BOTH
async def test_an_item_that_times_out_fails_the_map(make: MakeRunner, log: Log, gate: Gate, fn: Any) -> None:
    async with make(threads=2) as runner:
        with pytest.raises(TimeoutError):
            await runner.options(timeout=TINY).map(fn, [log.path] * 6, [gate.path] * 6, range(6))
        gate.open()
        assert await runner.run(jobs.echo, 1) == 1


# Timeouts and retries


@timed
@pytest.mark.parametrize("as_map", [False, True])
async def test_a_coroutine_that_times_out_is_tried_again(make: MakeRunner, log: Log, gate: Gate, as_map: bool) -> None:
    async with make() as runner:
        view = runner.options(timeout=TINY, retries=2, retry_on=TimeoutError)
        mapped = view.map(jobs.await_, [log.path], [gate.path], [7])
        with pytest.raises(TimeoutError):
            await (mapped if as_map else view.run(jobs.await_, log.path, gate.path, 7))
        await mapped.aclose()
        assert log.rest() == ["7", "cancelled 7"] * 3
        assert runner.statistics().retried == 2


@pytest.mark.parametrize(
    ("as_map", "fn"),
    [
        *[(False, jobs.wait), (True, jobs.wait_then_fail_with)],
        *rows.repeated_rows((True, jobs.wait), (False, jobs.wait_then_fail_with)),
    ],
)
async def test_no_attempt_begins_before_the_thread_has_ended(make: MakeRunner, log: Log, gate: Gate, as_map: bool, fn: Any) -> None:
    async with make(threads=2) as runner:
        view = runner.options(timeout=SHORT, retries=1, retry_on=TimeoutError)
        if as_map:
            mapped = view.map(fn, [log.path], [gate.path], [7])
            call: asyncio.Future[Any] = asyncio.ensure_future(mapped.collect())
        else:
            call = view.submit(fn, log.path, gate.path, 7)
        assert await log.next() == "7"
        await _late(runner)
        assert await runner.run(jobs.echo, 1) == 1  # there is a free thread
        assert log.rest() == []
        assert not call.done()
        gate.open()
        if fn is jobs.wait:
            assert await call in (7, [7])
        else:
            with pytest.raises(ValueError, match="at last"):
                await call
        assert log.rest() == ["7"]
        assert runner.statistics().retried == 1


async def test_cancelled_while_its_thread_has_not_ended(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(threads=1) as runner:
        call = runner.options(timeout=TINY, retries=1, retry_on=TimeoutError).submit(jobs.wait, log.path, gate.path, 7)
        await _late(runner)
        call.cancel()
        gate.open()
        assert await runner.run(jobs.echo, 1) == 1
        assert log.rest() == ["7"]
        assert runner.statistics().retried == 0


async def test_its_worker_dies_while_its_thread_has_not_ended(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(threads=1) as runner:
        call = runner.options(timeout=2 * SHORT, retries=1, retry_on=TimeoutError).submit(jobs.wait, log.path, gate.path, 7)
        await _late(runner)
        assert await log.next() == "7"
        worker = worker_of(runner)
        worker.kill()
        assert await runner.run(jobs.aecho, 1) == 1
        gate.open()
        await threads_ended(worker)
        # It has failed by its timeout, which was worth another attempt; its thread has ended with its worker.
        assert await call == 7
        assert log.rest() == ["7"]


async def test_closed_while_its_thread_has_not_ended(make: MakeRunner, log: Log, gate: Gate) -> None:
    runner = make(threads=1)
    await runner.start()
    call = runner.options(timeout=TINY, retries=1, retry_on=TimeoutError, backoff=LONG).submit(jobs.wait, log.path, gate.path, 7)
    await _late(runner)
    closing = asyncio.create_task(runner.aclose())
    await asyncio.sleep(0)
    gate.open()
    with pytest.raises(percore.RunnerClosed):
        await call
    await closing


# Bad ones


async def test_bad_timeouts_are_refused(make: MakeRunner, subtests: pytest.Subtests) -> None:
    async with make() as runner:
        for timeout in [0, -1, float("nan"), float("inf"), "1", True]:
            with subtests.test(timeout=timeout), pytest.raises((TypeError, ValueError), match="timeout"):
                runner.options(timeout=cast(Any, timeout))
