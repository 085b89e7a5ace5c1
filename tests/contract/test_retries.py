"""Further attempts: which errors are worth one, how long it waits, what it carries, and what ends it."""

import asyncio
import itertools
import os
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, cast

import pytest

import percore
from percore._scheduler.windows import Cost
from tests import jobs
from tests.contract.conftest import MakeRunner, kill_arrived, threads_ended, worker_of
from tests.contract.pipes import Gate, Log
from tests.fakes import FakeRunner
from tests.internals import slots_used, supervisor_of
from tests.waiting import until

BOTH = pytest.mark.parametrize("fn", [jobs.fail_first, jobs.afail_first])
FOR_EVER = 1e6
"""Seconds that no test waits for."""


async def _delayed(runner: percore.Runner, count: int = 1) -> None:
    """Wait until so many calls wait for their next attempt."""
    await until(lambda: len(supervisor_of(runner).calls.retries.delayed) >= count)


def _is_worth_it(error: BaseException) -> bool:
    return isinstance(error, ValueError) and str(error) != "attempt 3"


# Which errors


@BOTH
async def test_an_error_that_is_worth_it_is_tried_again(
    make: MakeRunner, tmp_path: Path, fn: Callable[..., Any], subtests: pytest.Subtests
) -> None:
    worth: dict[str, Any] = {
        "a class": ValueError,
        "classes": (KeyError, ValueError),
        "a function": lambda error: isinstance(error, ValueError),
    }
    async with make(2) as runner:
        for count, (name, retry_on) in enumerate(worth.items(), 1):
            with subtests.test(name):
                view = runner.options(retries=3, retry_on=retry_on)
                assert await view.run(fn, str(tmp_path), 3, ValueError, count) == count
                statistics = runner.statistics()
                assert (statistics.done, statistics.failed, statistics.retried) == (count, 0, 3 * count)


@BOTH
async def test_the_last_error_is_raised(make: MakeRunner, tmp_path: Path, fn: Callable[..., Any]) -> None:
    async with make() as runner:
        with pytest.raises(ValueError, match="attempt 3"):
            await runner.options(retries=2, retry_on=ValueError).run(fn, str(tmp_path), 9, ValueError, 7)
        statistics = runner.statistics()
        assert (statistics.done, statistics.failed, statistics.retried) == (1, 1, 2)


@BOTH
async def test_other_errors_are_not(make: MakeRunner, tmp_path: Path, fn: Callable[..., Any], subtests: pytest.Subtests) -> None:
    others: dict[str, Any] = {"none": None, "a class": KeyError, "classes": (KeyError, OSError), "a function": lambda _: False}
    async with make(retries=5) as runner:
        for number, (name, retry_on) in enumerate(others.items()):
            with subtests.test(name), pytest.raises(ValueError, match="attempt 1"):
                await runner.options(retries=5, retry_on=retry_on).run(fn, str(tmp_path), 9, ValueError, number)
            assert runner.statistics().retried == 0


async def test_a_predicate_sees_each_error(make: MakeRunner, tmp_path: Path) -> None:
    seen: list[str] = []

    def is_worth_it(error: BaseException) -> bool:
        seen.append(str(error))
        return _is_worth_it(error)

    async with make() as runner:
        with pytest.raises(ValueError, match="attempt 3"):
            await runner.options(retries=9, retry_on=is_worth_it).run(jobs.fail_first, str(tmp_path), 9, ValueError, 7)
    assert seen == ["attempt 1", "attempt 2", "attempt 3"]


async def test_bad_options_are_refused(make: MakeRunner, subtests: pytest.Subtests) -> None:
    async with make() as runner:
        for options in [
            {"retries": -1},
            {"retries": 1.5},
            {"retry_on": [ValueError]},
            {"retry_on": 5},
            {"retry_on": (ValueError, 5)},
            {"backoff": -1},
            {"backoff": float("nan")},
            {"backoff": "1"},
            {"backoff": True},
        ]:
            with subtests.test(options=options), pytest.raises((TypeError, ValueError)):
                runner.options(**cast(Any, options))


# Deaths


async def test_a_call_whose_worker_died_is_tried_again(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make() as runner:
        call = runner.options(retries=2).submit(jobs.await_, log.path, gate.path, 7)
        for _ in range(2):
            while await log.next() != "7":
                """A fake is cancelled when it is killed."""
            worker = worker_of(runner)
            worker.kill()
            await kill_arrived(worker)
        gate.open()
        assert await call == 7
        assert (runner.statistics().done, runner.statistics().failed, runner.statistics().retried) == (1, 0, 2)


@pytest.mark.parametrize("kind", ["default", "view", "map"])
async def test_attempts_are_counted(make: MakeRunner, log: Log, gate: Gate, kind: str) -> None:
    async with make(retries=2 if kind == "default" else 0) as runner:
        arguments = (log.path, gate.path, 7)
        if kind == "default":
            call: asyncio.Future[Any] = runner.submit(jobs.await_, *arguments)
        elif kind == "view":
            call = runner.options(retries=2).submit(jobs.await_, *arguments)
        else:
            mapped = runner.options(retries=2).map(jobs.await_, *([argument] for argument in arguments))
            call = asyncio.ensure_future(mapped.collect())
        for _ in range(3):
            while await log.next() != "7":
                """A fake is cancelled when it is killed."""
            worker_of(runner).kill()
        with pytest.raises(percore.WorkerDied) as caught:
            await call
        assert (caught.value.attempts, caught.value.started) == (3, True)
        assert runner.statistics().retried == 2


async def test_a_view_s_retries_win_over_the_runner_s(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(retries=5) as runner:
        call = runner.options(retries=0).submit(jobs.await_, log.path, gate.path, 7)
        await log.next()
        worker_of(runner).kill()
        with pytest.raises(percore.WorkerDied):
            await call


@pytest.mark.parametrize("items", [[1, 2, 3], [b"x" * 300_000, 2, 3], bytearray(300_000), [bytearray(300_000)]])
@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_a_retry_sends_the_original_bytes(make: MakeRunner, log: Log, gate: Gate, items: Any) -> None:
    async with make() as runner:
        call = runner.options(retries=2).submit(jobs.change_and_wait, log.path, gate.path, items)
        for _ in range(2):
            assert await log.next() == str(len(items))
            worker_of(runner).kill()
        assert await log.next() == str(len(items))
        gate.open()
        assert await call == len(items) + 1
        assert slots_used(runner) == 0


@pytest.mark.parametrize("items", [[1, 2, 3], [b"x" * 30_000, 2], [b"x" * 300_000, 2, 3], bytearray(300_000)])
async def test_a_retry_of_a_plain_function_sends_the_original_bytes(make_real: MakeRunner, tmp_path: Path, items: Any) -> None:
    async with make_real() as runner:
        view = runner.options(retries=1)
        (tmp_path / "map").mkdir()
        assert await view.run(jobs.change_and_die, str(tmp_path), items) == len(items)
        mapped = view.map(partial(jobs.change_and_die, str(tmp_path / "map")), [items] * 3)
        assert await mapped == [len(items)] * 3
        assert slots_used(runner) == 0


@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_a_retry_of_an_error_sends_the_original_bytes(make: MakeRunner) -> None:
    async with make() as runner:
        view = runner.options(retries=3, retry_on=ValueError)
        for size in (3, 300_000):
            with pytest.raises(ValueError, match=str(size)):
                await view.run(jobs.change_and_fail, bytearray(size))
        assert runner.statistics().retried == 6
        assert slots_used(runner) == 0


# Maps


@BOTH
@pytest.mark.parametrize("ordered", [True, False])
async def test_items_of_a_map_are_tried_again(
    make: MakeRunner, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fn: Callable[..., Any], ordered: bool
) -> None:
    monkeypatch.setattr(Cost, "batch", lambda *_: 16)
    async with make(2) as runner:
        view = runner.options(retries=2, retry_on=ValueError)
        results = await view.map(partial(fn, str(tmp_path), 2, ValueError), range(100), ordered=ordered)
        assert (results if ordered else sorted(results)) == list(range(100))
        statistics = runner.statistics()
        assert (statistics.done, statistics.failed, statistics.retried) == (100, 0, 200)


@BOTH
async def test_items_of_a_stream_that_fail_too_often(make: MakeRunner, tmp_path: Path, fn: Callable[..., Any]) -> None:
    async with make(2) as runner:
        view = runner.options(retries=1, retry_on=ValueError)
        mapped = view.map_items(partial(fn, str(tmp_path), 2, ValueError), range(50), return_exceptions=True)
        pairs = [pair async for pair in mapped]
        assert [place for place, _ in pairs] == list(range(50))
        assert {str(error) for _, error in pairs} == {"attempt 2"}


@pytest.mark.parametrize("shape", ["bare", "rows", "pickled"])
async def test_items_of_a_batch_over_a_death(
    make_real: MakeRunner, tmp_path: Path, log: Log, monkeypatch: pytest.MonkeyPatch, shape: str
) -> None:
    monkeypatch.setattr(Cost, "batch", lambda *_: 16)
    fixed = (str(tmp_path), log.path, 20)
    async with make_real(threads=1, retries=1) as runner:
        if shape == "rows":
            results = await runner.map(jobs.die_first, *map(itertools.repeat, fixed), range(64))
        else:
            items = range(64) if shape == "bare" else map(jobs.Place, range(64))
            results = await runner.map(partial(jobs.die_first, *fixed), items)
        assert results == list(range(64))
        runs = Counter(map(int, log.rest()))
        assert runs[20] == 2
        assert set(runs) == set(range(64))
        assert runner.statistics().retried >= sum(runs.values()) - 64
        assert runner.statistics().failed == 0


async def test_a_map_that_is_left_drops_items_that_wait_for_their_next_attempt(make: MakeRunner) -> None:
    async with make(2) as runner:
        view = runner.options(retries=1, retry_on=ValueError, backoff=FOR_EVER)
        for fn in (jobs.fail, jobs.afail):
            mapped = view.map(fn, [ValueError(i) for i in range(20)])
            task = asyncio.create_task(mapped.collect())
            await _delayed(runner, 20)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert runner.statistics().queued == 0


@BOTH
async def test_an_error_of_a_map_drops_later_items_that_wait_for_their_next_attempt(
    make: MakeRunner, tmp_path: Path, fn: Callable[..., Any]
) -> None:
    async with make() as runner:
        never_worth_it = partial(fn, str(tmp_path), 1, ValueError)
        retry_on = _NotForTheLast(runner, 9)
        with pytest.raises(ValueError, match="attempt 1"):
            await runner.options(retries=1, retry_on=retry_on, backoff=FOR_EVER).map(never_worth_it, range(10))
        assert runner.statistics().queued == 0


class _NotForTheLast:
    """A predicate: the first so many errors are worth a further attempt."""

    def __init__(self, runner: percore.Runner, count: int) -> None:
        self._runner = runner
        self._count = count

    def __call__(self, error: BaseException) -> bool:
        self._count -= 1
        return self._count >= 0


# Delays


async def test_backoff_is_asked_with_the_number_of_failed_attempts(make: MakeRunner, tmp_path: Path) -> None:
    asked: list[int] = []

    def backoff(failed: int) -> float:
        asked.append(failed)
        return 0.001 * (failed % 2)

    async with make() as runner:
        view = runner.options(retries=4, retry_on=ValueError, backoff=backoff)
        assert await view.run(jobs.afail_first, str(tmp_path), 4, ValueError, 7) == 7
        assert await view.map(partial(jobs.fail_first, str(tmp_path), 2, ValueError), [1]) == [1]
    assert asked == [1, 2, 3, 4, 1, 2]


@BOTH
async def test_after_a_delay_the_call_goes_on(
    make: MakeRunner, tmp_path: Path, fn: Callable[..., Any], subtests: pytest.Subtests
) -> None:
    backoffs: dict[str, Any] = {"none": 0, "seconds": 0.001, "a function": lambda _: 0.001}
    async with make(2) as runner:
        for case, (name, backoff) in enumerate(backoffs.items()):
            with subtests.test(name):
                numbers = range(20 * case, 20 * case + 20)
                view = runner.options(retries=3, retry_on=ValueError, backoff=backoff)
                assert await view.map(partial(fn, str(tmp_path), 3, ValueError), numbers) == list(numbers)


@BOTH
async def test_a_delay_holds_no_place(make: MakeRunner, tmp_path: Path, fn: Callable[..., Any]) -> None:
    async with make(concurrency=1, threads=1, per_key=1) as runner:
        view = runner.options(key="k", retries=1, retry_on=ValueError, backoff=FOR_EVER)
        call = view.submit(fn, str(tmp_path), 1, ValueError, 7)
        await _delayed(runner)
        assert await runner.options(key="k").run(jobs.aecho, 1) == 1
        assert await runner.run(jobs.echo, 2) == 2
        statistics = runner.statistics()
        assert (statistics.running, statistics.queued, statistics.retried) == (0, 1, 1)
        assert not call.done()
        call.cancel()


@pytest.mark.parametrize("fn", [jobs.fail, jobs.afail])
async def test_cancelled_while_it_waits_for_its_next_attempt(make: MakeRunner, fn: Any) -> None:
    async with make() as runner:
        view = runner.options(retries=1, retry_on=ValueError, backoff=FOR_EVER)
        task = asyncio.create_task(view.run(fn, ValueError(bytes(300_000))))
        await _delayed(runner)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert runner.statistics().queued == 0
        assert slots_used(runner) == 0


async def test_cancelled_at_the_very_moment_of_its_next_attempt(make: MakeRunner, tmp_path: Path) -> None:
    async with make() as runner:
        view = runner.options(retries=1, retry_on=ValueError, backoff=FOR_EVER)
        task = asyncio.create_task(view.run(jobs.afail_first, str(tmp_path), 1, ValueError, 7))
        await _delayed(runner)
        calls = supervisor_of(runner).calls
        task.cancel()
        (call,) = calls.retries.delayed
        calls._attempt(call)  # as the timer would, which has fired in the same iteration of the loop
        with pytest.raises(asyncio.CancelledError):
            await task
        assert await runner.run(jobs.aecho, 1) == 1
        assert os.listdir(tmp_path) == ["7 0"]
        statistics = runner.statistics()
        assert (statistics.running, statistics.queued) == (0, 0)


@pytest.mark.parametrize("grace", [None, 0])
@BOTH
async def test_closed_while_it_waits_for_its_next_attempt(
    make: MakeRunner, tmp_path: Path, fn: Callable[..., Any], grace: float | None
) -> None:
    runner = make()
    await runner.start()
    view = runner.options(retries=1, retry_on=ValueError, backoff=FOR_EVER)
    call = view.submit(fn, str(tmp_path), 1, ValueError, 7)
    task = asyncio.create_task(view.map(partial(fn, str(tmp_path), 1, ValueError), range(3)).collect())
    await _delayed(runner, 4)
    await runner.aclose(grace=grace)
    with pytest.raises(percore.RunnerClosed):
        await call
    with pytest.raises(percore.RunnerClosed):
        await task


async def test_a_call_that_fails_while_the_runner_closes_waits_for_nothing(make: MakeRunner, log: Log, gate: Gate) -> None:
    runner = make()
    await runner.start()
    call = runner.options(retries=1, retry_on=ValueError, backoff=FOR_EVER).submit(jobs.wait_and_fail, log.path, gate.path)
    await log.next()
    closing = asyncio.create_task(runner.aclose())
    await asyncio.sleep(0)
    gate.open()
    with pytest.raises(ValueError, match="after the gate"):
        await call
    await closing


# What the user's own functions do


def _raise(*_: object) -> Any:
    raise LookupError("my own fault")


def _stop(*_: object) -> Any:
    raise StopIteration


def _raise_frozen(*_: object) -> Any:
    raise jobs.FrozenError("my own fault")


async def test_b5_a_predicate_or_backoff_that_fails_is_the_outcome(make: MakeRunner, subtests: pytest.Subtests) -> None:
    async with make() as runner:
        for options, error, text in [
            ({"retry_on": _raise}, LookupError, "my own fault"),
            ({"retry_on": ValueError, "backoff": _raise}, LookupError, "my own fault"),
            ({"retry_on": _raise_frozen}, jobs.FrozenError, "my own fault"),
            ({"retry_on": _stop}, RuntimeError, "StopIteration"),
            ({"retry_on": ValueError, "backoff": lambda _: "soon"}, TypeError, "number of seconds"),
            ({"retry_on": ValueError, "backoff": lambda _: None}, TypeError, "number of seconds"),
            ({"retry_on": ValueError, "backoff": lambda _: -1}, ValueError, "zero or more"),
            ({"retry_on": ValueError, "backoff": lambda _: float("nan")}, ValueError, "zero or more"),
        ]:
            for fn in [jobs.fail, jobs.afail]:
                with subtests.test(fn=fn, options=options, error=error, text=text):
                    view = runner.options(retries=3, **cast(Any, options))
                    with pytest.raises(error, match=text) as caught:
                        await view.run(fn, ValueError("first"))
                    if error is not RuntimeError:  # that stands for one that cannot be raised
                        assert str(caught.value.__context__) == "first"
                    results = await view.map(fn, [ValueError("first")] * 3, return_exceptions=True)
                    assert [type(result) for result in results] == [error] * 3
                    assert runner.statistics().retried == 0


async def test_b5_a_predicate_that_cancels_its_call(make: MakeRunner) -> None:
    calls: list[asyncio.Future[Any]] = []
    async with make() as runner:
        calls.append(runner.options(retries=3, retry_on=lambda _: calls[0].cancel()).submit(jobs.afail, ValueError("first")))
        await asyncio.wait(calls)
        assert calls[0].cancelled()
        assert await runner.run(jobs.aecho, 1) == 1


async def test_b5_a_predicate_that_cancels_who_awaits_the_call(make: MakeRunner, tmp_path: Path) -> None:
    """Of which the call hears a moment later: until then it is not attempted again."""
    tasks: list[asyncio.Task[Any]] = []
    asked: list[BaseException] = []

    def cancel(error: BaseException) -> bool:
        asked.append(error)
        return tasks[0].cancel()

    async with make() as runner:
        view = runner.options(retries=3, retry_on=cancel)
        tasks.append(asyncio.create_task(view.run(jobs.afail_first, str(tmp_path), 3, ValueError, 7)))
        with pytest.raises(asyncio.CancelledError):
            await tasks[0]
        assert await runner.run(jobs.aecho, 1) == 1
        assert [str(error) for error in asked] == ["attempt 1"]
        statistics = runner.statistics()
        assert (statistics.retried, sum(worker.failed for worker in statistics.workers)) == (0, 1)
        assert os.listdir(tmp_path) == ["7 0"]


async def test_b5_a_predicate_that_cancels_calls_of_a_dead_worker(make: MakeRunner, log: Log, gate: Gate) -> None:
    calls: list[asyncio.Future[Any]] = []

    def cancel_all(_: BaseException) -> bool:
        for call in calls:
            call.cancel()
        return True

    async with make(concurrency=2, threads=1) as runner:
        view = runner.options(retries=3, retry_on=cancel_all)
        calls += [view.submit(jobs.await_, log.path, gate.path, i) for i in range(4)]
        calls += [view.submit(jobs.wait, log.path, gate.path, i) for i in range(4, 8)]
        assert sorted(await log.take(3)) == ["0", "1", "4"]
        worker = worker_of(runner)
        worker.kill()
        await asyncio.wait(calls)
        assert all(call.cancelled() for call in calls)
        gate.open()
        await threads_ended(worker)
        assert await runner.run(jobs.echo, 1) == await runner.run(jobs.aecho, 1) == 1
        statistics = runner.statistics()
        assert (statistics.running, statistics.queued) == (0, 0)


async def test_not_for_broadcast(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(retries=3) as runner:
        with pytest.raises(TypeError, match="a broadcast goes to each worker once"):
            await runner.options(retries=1).broadcast(jobs.aecho)
        task = asyncio.create_task(runner.broadcast(jobs.await_, log.path, gate.path, 7))
        await log.next()
        worker_of(runner).kill()
        with pytest.raises(percore.WorkerDied) as caught:
            await task
        assert caught.value.attempts == 1
        assert runner.statistics().retried == 0


@pytest.mark.parametrize("key", [None, "k"])
async def test_s6_a_collection_that_cancels_a_call_while_it_is_attempted_again(
    monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests, key: str | None
) -> None:
    """A `__del__` may run in the midst of the choice of a worker: the call is in no place then, and never begins again."""
    async with FakeRunner(1, concurrency=1) as runner:
        dispatch = supervisor_of(runner).dispatch
        submitted = dispatch.submitted
        for delay, when, others in itertools.product([0.0, 1e-6], ["before", "after"], [0, 2]):
            with subtests.test(delay=delay, when=when, others=others):
                attempts: list[Any] = []

                def collecting(one: Any, queue: Any = None, when: str = when, attempts: list[Any] = attempts) -> Any:
                    is_again = one in attempts
                    attempts.append(one)
                    if is_again and when == "before":
                        one.cancel()
                    seat = submitted(one, queue)
                    if is_again and when == "after":
                        one.cancel()
                    return seat

                view = runner.options(key=key, retries=1, retry_on=ValueError, backoff=delay)
                monkeypatch.setattr(dispatch, "submitted", collecting)
                call = view.submit(jobs.afail, ValueError("once"))
                waiting = [runner.submit(jobs.aecho, number) for number in range(others)]  # else it finds a free place
                await asyncio.wait([call, *waiting])
                monkeypatch.setattr(dispatch, "submitted", submitted)
                assert call.cancelled()
                assert await runner.run(jobs.aecho, 1) == 1
                statistics = runner.statistics()
                assert (statistics.queued, statistics.running) == (0, 0)
                assert not len(dispatch.keys)
