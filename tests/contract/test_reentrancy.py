"""Objects that run code while they are pickled, read or collected, and call percore from there.

`_act` is what such an object does, wherever it is pickled, read or collected in this process; it is set by each test.
"""

import asyncio
import gc
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import asynccontextmanager
from contextvars import ContextVar
from functools import partial
from typing import Any, NoReturn

import pytest

import percore
from percore import Runner
from percore._common.system import IS_FREE_THREADED
from tests import jobs
from tests.contract import serial_calls as calls
from tests.contract.conftest import MakeRunner
from tests.counts import times
from tests.fakes import FakeRunner
from tests.internals import supervisor_of
from tests.waiting import until

variable: ContextVar[Any] = ContextVar("variable")

_act: Callable[[], object] | None = None


@pytest.fixture(autouse=True)
def quiet_at_the_end() -> Iterator[None]:
    yield
    _set(None)
    gc.collect()


def _set(act: Callable[[], object] | None) -> None:
    global _act
    _act = act


def _do() -> None:
    # A fake worker's threads are this process's, too: there the runner refuses, and not for this.
    if _act is not None and threading.current_thread() is threading.main_thread():
        _act()


class WhenPickled:
    """Arrives as a number, or as bytes."""

    def __init__(self, becomes: Any = 0) -> None:
        self.becomes = becomes

    def __reduce__(self) -> tuple[Any, ...]:
        _do()
        return type(self.becomes), (self.becomes,)


class WhenRead:
    """Acts in the process that reads it, if there is something to do there."""

    def __init__(self, data: Any = 0) -> None:
        self.data = data

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _do()


class ErrorWhenRead(Exception):
    def __reduce__(self) -> tuple[Any, ...]:
        return _read_error, self.args


def _read_error(*args: Any) -> ErrorWhenRead:
    _do()
    return ErrorWhenRead(*args)


class WhenCollected:
    """Part of a cycle: only a garbage collection finds that nobody wants it."""

    def __init__(self) -> None:
        self.cycle = self

    def __del__(self) -> None:
        _do()


class FunctionWhenPickled:
    """A callable that travels as `jobs.echo`."""

    def __call__(self, value: Any) -> Any:
        return value

    def __reduce__(self) -> tuple[Any, ...]:
        _do()
        return getattr, (jobs, "echo")


def give_read(data: Any = 0, _place: int = 0) -> WhenRead:
    return WhenRead(data)


def fail_read(*args: Any) -> NoReturn:
    raise ErrorWhenRead(*args)


# Where it happens: what makes `_act` be called, and gives what has to end

Place = Callable[[Runner], Coroutine[Any, Any, object]]


async def _argument(runner: Runner) -> object:
    return await runner.run(jobs.echo, WhenPickled(1))


async def _large_argument(runner: Runner) -> object:
    return await runner.run(calls.atake, [calls.LARGE, WhenPickled(1)])


async def _keyword(runner: Runner) -> object:
    return await runner.run(jobs.aadd, 1, right=WhenPickled(1))


async def _item(runner: Runner) -> object:
    return await runner.map(jobs.echo, [WhenPickled(place) for place in range(50)])


async def _large_item(runner: Runner) -> object:
    inputs: list[Any] = [WhenPickled(calls.LARGE) for _ in range(20)]
    return await runner.map(jobs.alength, inputs, window=20)


async def _streamed_item(runner: Runner) -> object:
    return [pair async for pair in runner.map_items(jobs.aecho, [WhenPickled(place) for place in range(50)], window=50)]


async def _function(runner: Runner) -> object:
    return await runner.map(FunctionWhenPickled(), range(50))


async def _result(runner: Runner) -> object:
    return await asyncio.gather(*(runner.run(give_read) for _ in range(5)))


async def _large_result(runner: Runner) -> object:
    return await asyncio.gather(*(runner.run(give_read, calls.LARGE) for _ in range(5)))


async def _item_result(runner: Runner) -> object:
    return await runner.map(give_read, range(50))


async def _exception(runner: Runner) -> object:
    futures: list[asyncio.Future[NoReturn]] = [runner.submit(fail_read, place) for place in range(5)]
    await asyncio.wait(futures)
    return [future.exception() for future in futures]


async def _item_exception(runner: Runner) -> object:
    return await runner.map(fail_read, range(50), return_exceptions=True)


async def _collection(runner: Runner) -> object:
    async def collect() -> None:
        WhenCollected()
        gc.collect()

    return await asyncio.gather(collect(), runner.map(jobs.echo, range(50)), runner.map(jobs.aecho, range(50)))


PLACES: list[Place] = [
    _argument,
    _large_argument,
    _keyword,
    _item,
    _large_item,
    _streamed_item,
    _function,
    _result,
    _large_result,
    _item_result,
    _exception,
    _item_exception,
    _collection,
]


# What is done there


def _first_step(coroutine: Coroutine[Any, Any, Any]) -> None:
    """Begin it here and now, as a loop with eager tasks does; and leave it."""
    try:
        coroutine.send(None)
    except StopIteration:
        return
    coroutine.close()


class Acts:
    """Everything that can be asked of a runner without waiting. What is asked from there must end, too."""

    def __init__(self, runner: Runner) -> None:
        self.runner = runner
        self.futures: list[asyncio.Future[Any]] = []
        self.tasks: set[asyncio.Task[Any]] = set()
        self.count = 0

    def submit(self) -> None:
        self.futures += [self.runner.submit(jobs.echo, [1]), self.runner.submit(jobs.alength, calls.LARGE)]

    def cancel(self) -> None:
        for future in self.futures:
            future.cancel()
        self.submit()
        self.futures.pop().cancel()

    def ask(self) -> None:
        assert self.runner.statistics().failed >= 0

    def map(self) -> None:
        self.tasks.add(asyncio.create_task(self.runner.map(jobs.echo, range(20)).collect()))
        _first_step(self.runner.map(jobs.aecho, range(5)).aclose())

    def all(self) -> None:
        if self.count < 5:
            self.count += 1
            self.submit()
            self.ask()
            self.map()
            self.cancel()

    async def ended(self) -> None:
        await asyncio.gather(*self.tasks)
        if self.futures:
            await asyncio.wait(self.futures)
        assert all(future.cancelled() or future.result() in ([1], len(calls.LARGE)) for future in self.futures)


async def _nothing_is_left(runner: Runner) -> None:
    await runner.broadcast(jobs.aecho)
    supervisor = supervisor_of(runner)
    await until(lambda: not (supervisor.closing.unfinished() or supervisor.functions.retired))  # cancelled calls end without a word
    assert (supervisor.store.in_use, supervisor.dispatch.waiting(), len(supervisor.closing.enders)) == (0, 0, 0)
    for member in supervisor.members:
        assert (member.calls, member.load, len(member.free)) == ({}, [0, 0, 0], member.places)
    assert runner.statistics().restarts == 0


@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_s6_calls_from_inside_pickling_reading_and_collecting_work(make: MakeRunner) -> None:
    async with make(2) as runner:
        for place in PLACES:
            acts = Acts(runner)
            expected = _comparable(await place(runner))
            _set(acts.all)
            result = _comparable(await place(runner))
            _set(None)
            await acts.ended()
            assert acts.count, place
            assert result == expected, place
            await _nothing_is_left(runner)
        assert await runner.map(jobs.echo, range(100)) == list(range(100))


def _comparable(result: Any) -> Any:
    """Results of which each is another object every time, as what they are."""
    if isinstance(result, list | tuple):
        return [_comparable(one) for one in result]
    return type(result).__name__ if isinstance(result, WhenPickled | WhenRead | BaseException) else result


@pytest.mark.parametrize("grace", [None, 0])
async def test_s6_closing_from_inside_pickling_reading_and_collecting_ends_everything(grace: float | None) -> None:
    for place in PLACES:
        for act_at in (1, 3):
            runner = FakeRunner(2)
            await runner.start()
            await _close_from(place, runner, grace, act_at)


@pytest.mark.asyncio_only
async def test_s6_closing_from_there_ends_real_workers(make_real: MakeRunner) -> None:
    for place in (_item, _large_result):
        runner = make_real(2)
        await runner.start()
        await _close_from(place, runner, 0, 1)


async def _close_from(place: Place, runner: Runner, grace: float | None, act_at: int) -> None:
    """When it is called for so many times, it begins to close the runner: what is under way ends, one way or the other."""
    count = 0

    def close() -> None:
        nonlocal count
        count += 1
        if count == act_at:
            _first_step(runner.aclose(grace=grace))

    others = [runner.submit(jobs.aecho, number) for number in range(5)]
    _set(close)
    async with asyncio.timeout(20):
        (result,) = await asyncio.gather(place(runner), return_exceptions=True)
        _set(None)
        await runner.aclose(grace=grace)
    assert not isinstance(result, BaseException) or isinstance(result, percore.RunnerClosed)
    assert all(future.done() for future in others)
    assert all(isinstance(future.exception(), percore.RunnerClosed | None) for future in others)


@asynccontextmanager
async def _open_at_last(make: MakeRunner, **options: Any) -> AsyncIterator[Runner]:
    """A runner that is closed by the test, and once more."""
    runner = make(2, **options)
    await runner.start()
    try:
        yield runner
    finally:
        _set(None)
        async with asyncio.timeout(20):
            await runner.aclose()


@pytest.mark.asyncio_only
@pytest.mark.parametrize("grace", [None, 0])
@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_s6_closing_while_a_context_variable_is_pickled_refuses_the_call(make: MakeRunner, grace: float | None) -> None:
    async with _open_at_last(make, contextvars=[variable]) as runner:
        variable.set(WhenPickled(1))
        _set(lambda: _first_step(runner.aclose(grace=grace)))
        with pytest.raises(percore.RunnerClosed):
            await runner.submit(jobs.echo, 1)


@pytest.mark.asyncio_only
@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_s6_closing_while_a_context_variable_is_pickled_refuses_a_broadcast(make: MakeRunner) -> None:
    async with _open_at_last(make, contextvars=[variable]) as runner:
        variable.set(WhenPickled(1))
        _set(lambda: _first_step(runner.aclose(grace=0)))
        with pytest.raises(percore.RunnerClosed):
            await runner.broadcast(jobs.echo, 1)


@pytest.mark.asyncio_only
@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_s6_closing_while_the_first_item_is_pickled_ends_the_map(make: MakeRunner) -> None:
    async with _open_at_last(make) as runner:
        _set(lambda: _first_step(runner.aclose()))
        async with asyncio.timeout(20):
            with pytest.raises(percore.RunnerClosed):
                await runner.map(jobs.echo, [WhenPickled(place) for place in range(20)])


# A map that its own items, or its function, close


@pytest.mark.asyncio_only
@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_s6_a_map_that_an_item_closes_sends_nothing_more(make: MakeRunner) -> None:
    async with make() as runner:
        for fn, becomes in ((jobs.echo, 0), (jobs.aecho, 0), (jobs.length, calls.LARGE)):
            for at in (1, 2, 100):
                assert await _pickled_until_closed(runner, fn, becomes, at) == at
                await _nothing_is_left(runner)
        assert await runner.map(jobs.echo, range(20)) == list(range(20))


async def _pickled_until_closed(runner: Runner, fn: Callable[..., Any], becomes: object, at: int) -> int:
    count = 0
    results = runner.map(fn, [WhenPickled(becomes) for _ in range(200)], window=200)

    def close_at() -> None:
        nonlocal count
        count += 1
        if count == at:
            _first_step(results.aclose())

    _set(close_at)
    assert await results == []
    _set(None)
    return count


@pytest.mark.asyncio_only
@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_s6_a_map_that_its_function_closes_leaves_nothing(make: MakeRunner) -> None:
    async with make() as runner:
        results = runner.map(FunctionWhenPickled(), range(5))
        _set(lambda: _first_step(results.aclose()))
        assert await results == []
        stream = runner.map(FunctionWhenPickled(), range(5))
        _set(lambda: _first_step(stream.aclose()))
        assert [value async for value in stream] == []
        _set(None)
        await _nothing_is_left(runner)
        assert not supervisor_of(runner).dispatch._maps


@pytest.mark.asyncio_only
@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_s6_a_call_that_its_own_result_cancels_is_cancelled(make: MakeRunner) -> None:
    async with make() as runner:
        for data in (0, calls.LARGE):
            future = runner.submit(give_read, data)
            _set(future.cancel)
            await asyncio.wait([future])
            _set(None)
            assert future.cancelled()
        failing: asyncio.Future[NoReturn] = runner.submit(fail_read, 1)
        _set(failing.cancel)
        await asyncio.wait([failing])
        assert failing.cancelled()
        await _nothing_is_left(runner)


# Collections at any moment


class Garbage:
    """Acts when it is collected, and leaves the same again behind, until it is told to stop."""

    def __init__(self, act: Callable[[], bool]) -> None:
        self.act = act
        self.cycle = self

    def __del__(self) -> None:
        if self.act():
            Garbage(self.act)


@pytest.mark.long
@pytest.mark.timeout(120)
@pytest.mark.skipif(IS_FREE_THREADED, reason="the collector waits there until a thread has made hundreds of objects more")
@pytest.mark.apart(because="the threads of the program share its collector, which runs in any of them")
async def test_s6_garbage_that_calls_percore_at_any_moment(make: MakeRunner) -> None:
    count = times(100, 2000)
    futures: list[asyncio.Future[Any]] = []
    is_over = False

    def act() -> bool:
        is_here = threading.current_thread() is threading.main_thread()
        if is_here and not is_over and len(futures) < 20 * count:
            futures.append(runner.submit(jobs.aecho, [1]))
            futures.append(runner.submit(jobs.length, calls.LARGE) if len(futures) % 64 == 1 else runner.submit(jobs.echo, 1))
            futures[len(futures) // 2].cancel()
            runner.statistics()
        return not is_over

    threshold = gc.get_threshold()
    async with make(2, concurrency=4) as runner:
        Garbage(act)
        gc.set_threshold(3, 5, 5)
        try:
            for size in (count, count // 10):
                assert await runner.map(jobs.echo, range(size)) == list(range(size))
                assert [value async for value in runner.map(jobs.aecho, [[1]] * size)] == [[1]] * size
                calls_made = [runner.submit(jobs.alength, calls.LARGE) for _ in range(20)]
                assert await asyncio.gather(*calls_made) == [len(calls.LARGE)] * 20
        finally:
            is_over = True
            gc.set_threshold(*threshold)
        await asyncio.wait(futures)
        assert len(futures) > count // 10
        assert {type(future.exception()) for future in futures if not future.cancelled()} <= {type(None)}
        await _nothing_is_left(runner)


# In the worker


@pytest.mark.long
@pytest.mark.parametrize("fn", [calls.keep_state, calls.akeep_state])
async def test_s6_where_it_is_can_be_asked_while_pickled_read_and_collected(make_real: MakeRunner, fn: Callable[..., Any]) -> None:
    expected = ["no worker", "no worker", "worker 0", "worker 0", "no worker"]
    async with make_real() as runner:
        for _ in range(times(2, 200)):
            seen = await asyncio.gather(*(runner.run(fn, calls.OfState()) for _ in range(50)))
            assert [thing.seen for thing in seen] == [expected] * 50
        mapped = await runner.map(calls.keep_state, [calls.OfState() for _ in range(50)])
        assert [thing.seen for thing in mapped] == [expected] * 50


@pytest.mark.asyncio_only
@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_s6_a_runner_used_where_arguments_are_read_refuses_in_words(make: MakeRunner) -> None:
    async with make() as runner:
        for fn in (jobs.echo, jobs.aecho):
            assert "not started" in await runner.run(fn, calls.StartsRunner())
        assert await runner.run(jobs.echo, 1) == 1


@pytest.mark.asyncio_only
@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_s6_the_runner_itself_cannot_be_reached_from_what_it_pickles(make: MakeRunner) -> None:
    async with make() as runner:
        for thing in (runner, runner.options(), partial(runner.submit, abs)):
            with pytest.raises(TypeError, match="cannot be pickled"):
                await runner.run(jobs.echo, thing)
        await _nothing_is_left(runner)


def test_the_places_are_all_different() -> None:
    assert len({place.__name__ for place in PLACES}) == len(PLACES)
    assert variable.name in vars(sys.modules[__name__])
