"""max_pending: at most so many calls are accepted and not done."""

import asyncio
import contextlib
import itertools
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from types import CodeType
from typing import Any, NoReturn

import pytest

import percore
from tests import jobs
from tests.contract import stream_jobs as streams
from tests.contract.conftest import MakeRunner, worker_of
from tests.contract.pipes import Gate, Log
from tests.fakes import FakeRunner
from tests.internals import items_ready, members_of, supervisor_of
from tests.strikes import Strike
from tests.waiting import until


async def _settle() -> None:
    """Let everything that is ready run, here; nothing here waits for a worker."""
    for _ in range(20):
        await asyncio.sleep(0)


async def test_submit_at_the_bound_raises(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(max_pending=3, concurrency=2) as runner:
        calls = [runner.submit(jobs.await_, log.path, gate.path, i) for i in range(3)]
        with pytest.raises(percore.RunnerFull, match="max_pending=3") as caught:
            await runner.submit(jobs.aecho)
        assert caught.value.limit == 3
        assert isinstance(caught.value, RuntimeError)
        gate.open()
        await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        assert await runner.submit(jobs.aecho, 1) == 1
        await asyncio.gather(*calls)


@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_what_never_travels_is_done(make: MakeRunner) -> None:
    async with make(max_pending=1) as runner:
        for _ in range(3):
            with pytest.raises(ValueError, match="do not pickle me"):
                await runner.run(jobs.echo, jobs.RefusesPickle())
        assert await runner.run(jobs.echo, 1) == 1


async def test_run_waits_first_come_first_served(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(max_pending=2, threads=1) as runner:
        tasks = [asyncio.create_task(runner.run(jobs.wait, log.path, gate.path, i)) for i in range(6)]
        assert await log.next() == "0"
        await _settle()
        assert runner.statistics().running + runner.statistics().queued == 2
        with pytest.raises(percore.RunnerFull):
            await runner.submit(jobs.aecho)
        gate.open()
        assert await asyncio.gather(*tasks) == list(range(6))
        assert await log.take(5) == ["1", "2", "3", "4", "5"]


async def test_submit_does_not_overtake_those_that_wait(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(max_pending=1) as runner:
        first = runner.submit(jobs.await_, log.path, gate.path, 0)
        assert await log.next() == "0"
        task = asyncio.create_task(runner.run(jobs.await_, log.path, gate.path, 1))
        await _settle()
        first.cancel()
        with pytest.raises(percore.RunnerFull):
            await runner.submit(jobs.aecho)
        gate.open()
        assert await task == 1


@pytest.mark.parametrize("fn", [jobs.wait, jobs.await_])
@pytest.mark.parametrize("window", [None, 2, 50])
async def test_a_map_s_window_is_at_most_the_bound(make: MakeRunner, log: Log, gate: Gate, fn: Any, window: int | None) -> None:
    pulled = itertools.count()
    count = min(3, window or 3)
    async with make(max_pending=3, threads=8) as runner:
        results = runner.map(fn, itertools.repeat(log.path, 20), itertools.repeat(gate.path), pulled, window=window)
        task = asyncio.create_task(results.collect())
        assert sorted(await log.take(count)) == [str(i) for i in range(count)]
        await runner.broadcast(jobs.aecho)
        await _settle()
        assert log.rest() == []
        assert next(pulled) == count
        gate.open()
        assert len(await task) == 20


@pytest.mark.parametrize("limit", [1, 2, 7])
async def test_maps_and_runs_under_a_small_bound(make: MakeRunner, limit: int, subtests: pytest.Subtests) -> None:
    fns: list[Any] = [jobs.echo, jobs.aecho]
    async with make(2, max_pending=limit) as runner:
        for fn in fns:
            with subtests.test(fn.__name__):
                maps = [runner.map(fn, range(100)).collect() for _ in range(3)]
                runs = [runner.run(fn, i) for i in range(50)]
                *lists, singles = await asyncio.gather(*maps, asyncio.gather(*runs))
                assert lists == [list(range(100))] * 3
                assert singles == list(range(50))
                assert [value async for value in runner.map(fn, range(50))] == list(range(50))


async def test_a_map_that_is_left_makes_room(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(max_pending=2) as runner:
        async with runner.map(jobs.await_, itertools.repeat(log.path), itertools.repeat(gate.path), itertools.count()) as results:
            first = asyncio.ensure_future(anext(aiter(results)))
            await log.take(2)
            first.cancel()
            await asyncio.wait([first])
        assert await asyncio.gather(*(runner.run(jobs.aecho, i) for i in range(4))) == [0, 1, 2, 3]


async def test_a_slow_consumer_holds_nobody_up(make: MakeRunner) -> None:
    async with make(max_pending=2) as runner:
        stream = aiter(runner.map(jobs.aecho, range(10)))
        assert await anext(stream) == 0
        assert await asyncio.gather(*(runner.run(jobs.aecho, i) for i in range(10))) == list(range(10))
        assert [value async for value in stream] == list(range(1, 10))


async def test_an_input_that_is_waited_for_holds_nobody_up(make: MakeRunner) -> None:
    goes_on = asyncio.Event()

    async def numbers() -> AsyncIterator[int]:
        yield 0
        await goes_on.wait()
        yield 1

    async with make(max_pending=1) as runner:
        stream = aiter(runner.map(jobs.aecho, numbers()))
        assert await anext(stream) == 0
        await _settle()
        assert await runner.run(jobs.aecho, 7) == 7
        goes_on.set()
        assert [value async for value in stream] == [1]


@pytest.mark.parametrize("limit", [1, 2, 3])
async def test_map_over_map_under_a_small_bound(make: MakeRunner, limit: int) -> None:
    async with make(2, max_pending=limit) as runner:
        assert await runner.map(jobs.echo, runner.map(jobs.aecho, runner.map(jobs.echo, range(30)))) == list(range(30))


@pytest.mark.parametrize("fn", [jobs.echo, jobs.aecho])
async def test_maps_over_async_inputs_keep_count(make: MakeRunner, fn: Any) -> None:
    """Items end while the next one waits to be let in: both are counted."""
    async with make(2, max_pending=8) as runner:
        admission = supervisor_of(runner).admission
        assert admission is not None
        inside: list[int] = []

        async def numbers() -> AsyncIterator[int]:
            for number in range(100):
                inside.append(admission._inside)
                yield number

        assert await asyncio.gather(*(runner.map(fn, numbers()) for _ in range(3))) == [list(range(100))] * 3
        assert 0 <= min(inside) <= max(inside) <= 8
        assert admission._inside == 0
        calls = [runner.submit(jobs.aecho, number) for number in range(8)]
        with pytest.raises(percore.RunnerFull):
            await runner.submit(jobs.aecho)
        assert await asyncio.gather(*calls) == list(range(8))


async def test_a_call_between_two_attempts_counts(make: MakeRunner) -> None:
    async with make(max_pending=1) as runner:
        view = runner.options(retries=1, retry_on=ValueError, backoff=1e6)
        call = view.submit(jobs.afail, ValueError("x"))
        await until(lambda: runner.statistics().retried)
        with pytest.raises(percore.RunnerFull):
            await runner.submit(jobs.aecho)
        call.cancel()
        assert await runner.run(jobs.aecho, 1) == 1


async def test_a_death_makes_room(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(max_pending=2) as runner:
        calls = [runner.submit(jobs.await_, log.path, gate.path, i) for i in range(2)]
        await log.take(2)
        tasks = [asyncio.create_task(runner.run(jobs.aecho, i)) for i in range(4)]
        await _settle()
        worker_of(runner).kill()
        assert await asyncio.gather(*tasks) == [0, 1, 2, 3]
        assert {type(call.exception()) for call in calls} == {percore.WorkerDied}


async def test_c1_cancelled_waiters_make_way(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(max_pending=1) as runner:
        first = asyncio.create_task(runner.run(jobs.await_, log.path, gate.path, 0))
        assert await log.next() == "0"
        tasks = [asyncio.create_task(runner.run(jobs.await_, log.path, gate.path, i)) for i in range(1, 5)]
        await _settle()
        for task in tasks[:-1]:
            task.cancel()
        first.cancel()
        await asyncio.wait([first, *tasks[:-1]])
        assert await log.take(2) in (["cancelled 0", "4"], ["4", "cancelled 0"])
        gate.open()
        assert await tasks[-1] == 4
        assert await asyncio.gather(*(runner.run(jobs.aecho, i) for i in range(3))) == [0, 1, 2]


async def test_a_waiter_that_is_cancelled_when_it_is_let_in(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(max_pending=1) as runner:
        first = runner.submit(jobs.await_, log.path, gate.path, 0)
        tasks = [asyncio.create_task(runner.run(jobs.aecho, i)) for i in range(3)]
        await _settle()
        # 1. the place is free, and the first that waits gets it  2. before it runs it is cancelled: the place is the next one's
        first.cancel()
        first.add_done_callback(lambda _: tasks[0].cancel())
        assert await asyncio.gather(*tasks[1:]) == [1, 2]
        assert await runner.run(jobs.aecho, 3) == 3


@pytest.mark.parametrize("grace", [None, 0])
async def test_closing_refuses_those_that_wait(make: MakeRunner, log: Log, gate: Gate, grace: float | None) -> None:
    runner = make(max_pending=2)
    await runner.start()
    calls = [runner.submit(jobs.await_, log.path, gate.path, i) for i in range(2)]
    await log.take(2)
    tasks = [asyncio.create_task(runner.run(jobs.aecho, i)) for i in range(4)]
    mapped = asyncio.create_task(runner.map(jobs.aecho, range(10)).collect())
    stream = aiter(runner.map(jobs.aecho, range(10)))
    streamed = asyncio.ensure_future(anext(stream))
    await _settle()
    closing = asyncio.create_task(runner.aclose(grace=grace))
    results = await asyncio.gather(*tasks, mapped, streamed, return_exceptions=True)  # before the calls inside have ended
    assert [type(result) for result in results] == [percore.RunnerClosed] * 6
    gate.open()
    await closing
    assert [call.exception() is None for call in calls] == [grace is None] * 2


async def all_of(stream: "percore.Stream[Any]") -> list[Any]:
    return [item async for item in stream]


async def numbers() -> AsyncIterator[int]:
    for number in range(2):
        yield number


WAYS: dict[str, Callable[[percore.Runner], Awaitable[object]]] = {
    "submit": lambda runner: runner.submit(jobs.aecho, 1),
    "run": lambda runner: runner.run(jobs.aecho, 1),
    "run with a queue_timeout": lambda runner: runner.options(queue_timeout=10).run(jobs.aecho, 1),
    "stream": lambda runner: all_of(runner.stream(streams.anumbers, 2)),
    "map": lambda runner: runner.map(jobs.aecho, [1, 2]).collect(),
    "map over an async input": lambda runner: runner.map(jobs.aecho, numbers()).collect(),
}


class Interrupted(BaseException):
    """As a KeyboardInterrupt, but the loop goes on."""


def interrupt() -> NoReturn:
    raise Interrupted


async def ends_well(way: Callable[[percore.Runner], Awaitable[object]], runner: percore.Runner) -> bool:
    try:
        await way(runner)
    except (Interrupted, RuntimeError):  # the latter of a map whose feeder was interrupted
        return False
    return True


def enters(code: CodeType) -> bool:
    """Whether it is a step from the request of a place to the submission of the call."""
    steps = ("/_runner/verbs.py", "/_supervisor/admission.py", "/_supervisor/streams.py", "/_map/feeder.py", "/asyncio/timeouts.py")
    return code.co_filename.endswith(steps) and code.co_name not in ("leave", "left", "done", "close", "_ended")


@pytest.mark.asyncio_only
@pytest.mark.loop_reports  # of a feeder that was interrupted
@pytest.mark.parametrize("way", WAYS)
async def test_p6_a_ctrl_c_while_a_call_enters_keeps_no_place(way: str) -> None:
    """At the entry of each function, of a call that is let in at once and of one that waits."""
    async with FakeRunner(1, max_pending=1) as runner:
        admission: Any = supervisor_of(runner).admission
        assert await ends_well(WAYS[way], runner)  # with all imports
        for waits in (False, True)[: 1 + (way != "submit")]:
            places = []
            for at in itertools.count():
                strike = Strike(at, enters, interrupt)
                if waits:
                    admission.enter_now()
                    asyncio.get_running_loop().call_soon(admission.leave)
                with strike.on():
                    is_ok = await ends_well(WAYS[way], runner)
                assert is_ok or strike.name
                async with asyncio.timeout(5):
                    await until(lambda: not admission._inside)
                if not strike.name:
                    break
                places.append(strike.name)
            assert len(places) > 2, places


async def used_up(runner: percore.Runner) -> "percore.Stream[int]":
    """A stream that waits for its consumer, who has taken one item."""
    stream = runner.options(prefetch=1).stream(streams.anumbers, 1_000_000)
    assert await anext(stream) == 0
    await until(lambda: items_ready(stream) == 1)
    return stream


def ends_a_stream(code: CodeType) -> bool:
    """Whether it is one of the functions that the end of a stream calls."""
    rooms = ("/_calls/streams.py", "/_common/endings.py", "/_common/sure_handles.py")
    return code.co_filename.endswith(rooms) and code.co_name in ("_wake", "wake", "settle", "cancel")


@pytest.mark.asyncio_only
async def test_p6_a_ctrl_c_while_a_stream_ends_keeps_no_place_and_no_generator() -> None:
    async with FakeRunner(1, max_pending=1) as runner:
        admission: Any = supervisor_of(runner).admission
        (member,) = members_of(runner)
        places = []
        for at in itertools.count():
            stream = await used_up(runner)
            closing = stream.aclose()
            strike = Strike(at, ends_a_stream, interrupt)
            with strike.on(), contextlib.suppress(Interrupted):
                closing.send(None)
            closing.close()
            async with asyncio.timeout(5):
                await until(lambda: not admission._inside and not member.calls)
            if not strike.name:
                break
            places.append(strike.name)
        assert len(places) > 2, places


async def a_failure(runner: percore.Runner) -> None:
    await asyncio.wait([runner.options(key="key").submit(jobs.fail, ValueError())])


async def a_closed_stream(runner: percore.Runner) -> None:
    stream = runner.options(key="key").stream(streams.anumbers, 1_000_000)
    assert await anext(stream) == 0
    await stream.aclose()


def is_called(name: str, code: CodeType) -> bool:
    return code.co_qualname == name


@pytest.mark.asyncio_only
@pytest.mark.parametrize("way", [a_failure, a_closed_stream])
async def test_p6_a_ctrl_c_while_a_call_leaves_its_worker_frees_its_key(way: Callable[[percore.Runner], Awaitable[None]]) -> None:
    """At the entry of the functions that `take` calls, and when a built-in one returns."""
    asyncio.get_running_loop().set_exception_handler(lambda *_: None)  # a record would keep the memory of the killed workers
    async with FakeRunner(1) as runner, asyncio.timeout(10):
        for at, name, after_builtins in [
            *((0, name, False) for name in ("Choice.lowered", "Keys.left")),
            *((at, "PoolWorker.take", True) for at in range(2)),
        ]:
            strike = Strike(at, partial(is_called, name), interrupt, after_builtins=after_builtins)
            with strike.on():
                await way(runner)
            assert strike.name
            assert await runner.options(key="key").run(jobs.aecho, 1) == 1


async def test_broadcast_is_beside(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(2, max_pending=1) as runner:
        call = runner.submit(jobs.await_, log.path, gate.path, 0)
        assert await runner.broadcast(jobs.echo, 7) == [7, 7]
        gate.open()
        assert await call == 0


@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_bad_bounds_are_refused(value: Any) -> None:
    with pytest.raises((TypeError, ValueError), match="max_pending"):
        percore.Runner(max_pending=value)
