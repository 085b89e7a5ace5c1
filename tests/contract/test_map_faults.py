"""Maps over inputs without end, left in every way, and over inputs that raise, block, or use the runner themselves."""

import asyncio
import gc
import itertools
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import psutil
import pytest

import percore
from tests import jobs
from tests.contract.conftest import MakeRunner
from tests.contract.pipes import Gate, Log
from tests.counts import times
from tests.internals import rests, slots_used
from tests.waiting import until

BOTH = pytest.mark.parametrize("fn", [jobs.echo, jobs.aecho])


class Items:
    """Numbers without end, each in a list of its own: how many of these are alive."""

    def __init__(self) -> None:
        self.count = 0
        self.closed = asyncio.Event()
        self._alive: weakref.WeakSet[Number] = weakref.WeakSet()

    def __iter__(self) -> "Iterator[Number]":
        try:
            while True:
                number = Number(self.count)
                self._alive.add(number)
                self.count += 1
                yield number
                del number
        finally:
            self.closed.set()

    @property
    def alive(self) -> int:
        return len(self._alive)

    def are_gone(self) -> bool:
        gc.collect()  # errors and the frames they name hold each other
        return not self._alive


class Number:
    def __init__(self, value: int) -> None:
        self.value = value

    def __reduce__(self) -> tuple[Any, ...]:
        return int, (self.value,)


async def _at_rest(runner: percore.Runner, mapped: percore.Map[Any]) -> None:
    """Until all items have ended that were pulled, and the map waits for its consumer."""
    while not rests(mapped):
        await runner.run(jobs.aecho)


async def _idle(runner: percore.Runner) -> None:
    """Until nothing is under way, and what that brings about has been done."""
    while runner.statistics().running or runner.statistics().queued:
        await runner.run(jobs.aecho)
    for _ in range(20):
        await asyncio.sleep(0)


# M1


@BOTH
@pytest.mark.parametrize("pairs", [False, True], ids=["results", "pairs"])
async def test_m1_while_the_consumer_waits_the_window_is_all_that_is_alive(
    make: MakeRunner, fn: Callable[..., Any], pairs: bool
) -> None:
    items = Items()
    async with make() as runner:
        mapped: percore.Map[Any] = (runner.map_items if pairs else runner.map)(fn, items, window=10)
        async with mapped as results:
            for turn in range(1, 6):
                first = await anext(results)
                del first
                await _at_rest(runner, mapped)
                assert items.count == turn + 10
                await until(lambda: items.alive <= 11)  # the generator itself holds the last one
        assert items.closed.is_set()
        await until(lambda: items.alive <= 1)  # a map that is closed keeps no results, also if somebody still has it
        await results.aclose()


@pytest.mark.parametrize("fn", [jobs.echo, jobs.aecho])
async def test_m1_without_a_window_what_is_pulled_stays_bounded_while_the_consumer_waits(
    make: MakeRunner, fn: Callable[..., Any]
) -> None:
    items = Items()
    async with make() as runner, runner.map(fn, items) as results:
        await anext(results)
        await _at_rest(runner, results)
        before = items.count
        assert before <= 16_384 + 1
        await runner.map(jobs.echo, range(100))
        assert items.count == before


@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.asyncio_only
async def test_m1_memory_is_flat_over_a_million_items(make_real: MakeRunner) -> None:
    async with make_real(2) as runner:
        here = psutil.Process()
        everybody = [here, *(psutil.Process(worker.pid) for worker in runner.statistics().workers)]

        async def after(count: int) -> int:
            async for number in runner.map(jobs.echo, range(count)):
                assert number >= 0
            gc.collect()
            return sum(process.memory_info().rss for process in everybody)

        before = await after(times(10_000, 200_000))
        assert await after(times(40_000, 1_000_000)) < before * 1.05 + (2 << 20)


# M2


@pytest.mark.long
@BOTH
@pytest.mark.parametrize("ordered", [True, False])
async def test_m2_what_was_left_is_all_gone_and_the_runner_serves(make: MakeRunner, fn: Callable[..., Any], ordered: bool) -> None:
    """Left in every way, many times over: nothing of any of these maps is kept."""
    async with make(concurrency=4, threads=2) as runner:
        for _ in range(times(2, 10)):
            for leave in (_by_break, _by_cancel, _by_closing, _by_dropping):
                items = Items()
                await leave(runner.map(fn, items, window=20, ordered=ordered))
                gc.collect()
                await asyncio.wait_for(items.closed.wait(), 10)
                await _idle(runner)
                await until(items.are_gone)  # a thread may still hold what it has just answered
        assert await runner.map(fn, range(100)) == list(range(100))
        assert slots_used(runner) == 0


async def _by_break(mapped: percore.Map[Any]) -> None:
    async for _ in mapped:
        break


async def _by_cancel(mapped: percore.Map[Any]) -> None:
    began = asyncio.Event()

    async def consume() -> None:
        async for _ in mapped:
            began.set()

    task = asyncio.create_task(consume())
    await began.wait()
    task.cancel()
    await asyncio.wait([task])


async def _by_closing(mapped: percore.Map[Any]) -> None:
    async with mapped:
        await anext(mapped)


async def _by_dropping(mapped: percore.Map[Any]) -> None:
    await anext(aiter(mapped))


# M3


@pytest.mark.parametrize("max_pending", [None, 1, 2])
async def test_m3_an_async_input_may_use_the_runner_itself(
    make: MakeRunner, max_pending: int | None, subtests: pytest.Subtests
) -> None:
    async with make(concurrency=1, threads=1, max_pending=max_pending) as runner:

        async def numbers() -> AsyncIterator[int]:
            for number in range(20):
                yield await runner.run(jobs.aecho, number) + await runner.run(jobs.echo, number)

        for window in (None, 1, 3):
            with subtests.test(window=window):
                async with asyncio.timeout(20):
                    assert await runner.map(jobs.aadd, numbers(), window=window) == [2 * number for number in range(20)]
                    mapped = runner.map(jobs.add, numbers(), window=window)
                    assert [value async for value in mapped] == [2 * number for number in range(20)]


async def test_m3_a_sync_input_may_submit(make: MakeRunner) -> None:
    async with make(concurrency=1, threads=1) as runner:
        submitted = []

        def numbers() -> Iterator[int]:
            for number in range(30):
                submitted.append(runner.submit(jobs.aecho, number))
                yield number

        async with asyncio.timeout(20):
            assert await runner.map(jobs.aecho, numbers(), window=3) == list(range(30))
            assert await asyncio.gather(*submitted) == list(range(30))


@pytest.mark.parametrize("window", [1, 4])
async def test_m3_an_input_that_maps_over_itself_deeper_and_deeper(make: MakeRunner, window: int) -> None:
    async with make(concurrency=2) as runner, asyncio.timeout(20):
        mapped: Any = range(50)
        for _ in range(10):
            mapped = runner.map(jobs.aadd, mapped, itertools.repeat(1), window=window)
        assert [value async for value in mapped] == list(range(10, 60))


@pytest.mark.parametrize("kind", [StopIteration, asyncio.CancelledError])
async def test_m3_an_input_that_raises_what_is_no_exception(make: MakeRunner, kind: type[BaseException]) -> None:
    class Numbers:
        def __init__(self) -> None:
            self.count = 0

        def __iter__(self) -> "Numbers":
            return self

        def __next__(self) -> int:
            self.count += 1
            if self.count > 3:
                raise kind
            return self.count

    async with make() as runner:
        if kind is StopIteration:  # the end of it
            assert await runner.map(jobs.aecho, Numbers()) == [1, 2, 3]
        else:
            seen = []
            with pytest.raises(BaseException) as caught:  # noqa: PT012
                async for value in runner.map(jobs.aecho, Numbers()):
                    seen.append(value)  # noqa: PERF401  # what came before the error is what matters
            assert seen == [1, 2, 3]
            assert not isinstance(caught.value, StopAsyncIteration)
        assert await runner.run(jobs.aecho, 1) == 1


async def test_m3_one_map_that_waits_for_its_input_holds_up_no_other(make: MakeRunner, log: Log, gate: Gate) -> None:
    never = asyncio.Event()

    async def stuck() -> AsyncIterator[int]:
        yield 0
        await never.wait()

    async with make(concurrency=1) as runner, runner.map(jobs.aecho, stuck()) as waiting:
        assert await anext(waiting) == 0
        assert await runner.map(jobs.aecho, range(100)) == list(range(100))
        assert await runner.run(jobs.echo, 1) == 1
