"""map: as a list and as a stream, over inputs of every kind, in a window."""

import asyncio
import itertools
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest

from percore._core import flow
from tests import jobs
from tests.contract.conftest import MakeRunner
from tests.contract.pipes import Gate, Log

BOTH = pytest.mark.parametrize("fn", [jobs.echo, jobs.aecho])


async def _arange(count: int) -> AsyncIterator[int]:
    for i in range(count):
        await asyncio.sleep(0)
        yield i


class Counting:
    """Endless numbers; counts how many were pulled."""

    def __init__(self) -> None:
        self.count = 0
        self._waiters: list[tuple[int, asyncio.Future[None]]] = []

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        self.count += 1
        for count, waiter in self._waiters:
            if count == self.count and not waiter.done():
                waiter.set_result(None)
        return self.count - 1

    async def reached(self, count: int) -> None:
        """Wait until so many were pulled."""
        if self.count < count:
            waiter = asyncio.get_running_loop().create_future()
            self._waiters.append((count, waiter))
            await waiter


class CountingAsync(Counting):
    __iter__ = None  # type: ignore[assignment]

    def __aiter__(self) -> "CountingAsync":
        return self

    async def __anext__(self) -> int:
        return next(self)


async def _settle() -> None:
    """Let everything that is ready run, here; nothing here waits for a worker."""
    for _ in range(20):
        await asyncio.sleep(0)


# Lists and streams


@BOTH
async def test_await_gives_a_list_in_order(make: MakeRunner, fn: Callable[..., Any]) -> None:
    async with make(2) as runner:
        assert await runner.map(fn, range(500)) == list(range(500))


@BOTH
async def test_async_for_gives_results_in_order(make: MakeRunner, fn: Callable[..., Any]) -> None:
    async with make(2) as runner:
        assert [value async for value in runner.map(fn, range(300))] == list(range(300))


async def test_order_does_not_depend_on_who_ends_first(make: MakeRunner, log: Log, gate: Gate, other_gate: Gate) -> None:
    gates = [gate.path, other_gate.path]
    async with make() as runner:
        task = asyncio.create_task(runner.map(jobs.await_, [log.path] * 2, gates, [0, 1]).collect())
        await log.take(2)
        other_gate.open()
        await runner.run(jobs.await_, log.path, other_gate.path)
        gate.open()
        assert await task == [0, 1]


async def test_unordered_gives_results_as_they_come(make: MakeRunner, log: Log, gate: Gate, other_gate: Gate) -> None:
    gates = [gate.path, other_gate.path]
    async with make() as runner:
        results = aiter(runner.map(jobs.await_, [log.path] * 2, gates, [0, 1], ordered=False))
        other_gate.open()
        assert await anext(results) == 1
        gate.open()
        assert await anext(results) == 0
        with pytest.raises(StopAsyncIteration):
            await anext(results)


async def test_unordered_list_has_all(make: MakeRunner) -> None:
    async with make(2) as runner:
        assert sorted(await runner.map(jobs.aecho, range(200), ordered=False)) == list(range(200))


@pytest.mark.parametrize("ordered", [True, False])
async def test_nothing_gives_nothing(make: MakeRunner, ordered: bool) -> None:
    async with make() as runner:
        assert await runner.map(jobs.aecho, [], ordered=ordered) == []
        assert [value async for value in runner.map(jobs.aecho, _arange(0), ordered=ordered)] == []


# Inputs


async def test_several_iterables_end_with_the_shortest(make: MakeRunner) -> None:
    async with make() as runner:
        assert await runner.map(jobs.aadd, [1, 2, 3], [10, 20]) == [11, 22]
        assert await runner.map(jobs.add, itertools.count(), range(4)) == [0, 2, 4, 6]


async def test_async_inputs(make: MakeRunner) -> None:
    async with make() as runner:
        assert await runner.map(jobs.echo, _arange(100)) == list(range(100))
        assert [value async for value in runner.map(jobs.aecho, _arange(100))] == list(range(100))


async def test_sync_and_async_inputs_together(make: MakeRunner) -> None:
    async with make() as runner:
        assert await runner.map(jobs.aadd, _arange(5), itertools.count(10)) == [10, 12, 14, 16, 18]


class _OldStyle:
    """Iterable by __getitem__ alone."""

    def __getitem__(self, index: int) -> int:
        if index == 3:
            raise IndexError
        return index


async def test_an_input_that_is_iterable_by_index(make: MakeRunner) -> None:
    async with make() as runner:
        source: Any = _OldStyle()
        assert await runner.map(jobs.aecho, source) == [0, 1, 2]


async def test_an_async_input_is_sent_item_by_item(make: MakeRunner) -> None:
    """The next item of the input needs the result of the one before."""
    results: asyncio.Queue[int] = asyncio.Queue()

    async def chain() -> AsyncIterator[int]:
        value = 1
        for _ in range(5):
            yield value
            value = await results.get() * 2

    async with make() as runner:
        seen = []
        async for value in runner.map(jobs.aecho, chain()):
            seen.append(value)
            results.put_nowait(value)
    assert seen == [1, 2, 4, 8, 16]


async def test_nothing_is_pulled_before_the_map_is_used(make: MakeRunner) -> None:
    async with make() as runner:
        numbers = Counting()
        async with runner.map(jobs.aecho, numbers) as results:
            await _settle()
            assert numbers.count == 0
            assert await anext(aiter(results)) == 0


@BOTH
@pytest.mark.parametrize("kind", [Counting, CountingAsync])
async def test_endless_inputs(make: MakeRunner, fn: Callable[..., Any], kind: type[Counting]) -> None:
    async with make() as runner:
        numbers = kind()
        seen = []
        async with runner.map(fn, numbers) as results:
            async for value in results:
                seen.append(value)
                if len(seen) == 200:
                    break
        assert seen == list(range(200))


async def test_an_endless_input_leaves_the_loop_to_others(make: MakeRunner) -> None:
    async with make(concurrency=4000) as runner:
        turns = 0

        async def others() -> None:
            nonlocal turns
            while True:
                turns += 1
                await asyncio.sleep(0)

        task = asyncio.create_task(others())
        async with runner.map(jobs.aecho, Counting()) as results:
            assert await anext(aiter(results)) == 0
        assert turns > 3
        task.cancel()
        await asyncio.wait([task])


# The window


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("kind", [Counting, CountingAsync])
async def test_the_window_is_exact_for_a_stream(make: MakeRunner, kind: type[Counting], ordered: bool) -> None:
    async with make() as runner:
        numbers = kind()
        async with runner.map(jobs.aecho, numbers, window=3, ordered=ordered) as results:
            handed_over = 0
            async for _ in results:
                handed_over += 1
                assert numbers.count <= handed_over + 3
                await numbers.reached(handed_over + 3)
                await _settle()
                assert numbers.count == handed_over + 3
                if handed_over == 20:
                    break


async def test_the_window_of_a_list_is_its_calls_in_flight(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make() as runner:
        numbers = Counting()
        task = asyncio.create_task(
            runner.map(jobs.await_, itertools.repeat(log.path, 20), itertools.repeat(gate.path), numbers, window=4).collect()
        )
        await log.take(4)
        await runner.run(jobs.aecho)
        assert numbers.count == 4
        assert log.rest() == []
        gate.open()
        assert await task == list(range(20))


async def test_a_window_of_one_is_one_after_the_other(make: MakeRunner) -> None:
    async with make(2, lifespan=jobs.counter) as runner:
        assert await runner.map(jobs.aecho, range(30), window=1) == list(range(30))


async def test_the_default_window_begins_small_and_grows_with_the_results(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(2, concurrency=100) as runner:
        numbers = Counting()
        results = runner.map(jobs.await_, itertools.repeat(log.path), itertools.repeat(gate.path), numbers)
        async with results:
            first = asyncio.ensure_future(anext(aiter(results)))
            await log.take(flow.LEAST)
            await runner.run(jobs.aecho)
            assert numbers.count == flow.LEAST
            gate.open()
            assert await first == 0
            await numbers.reached(2 * 200)
            await runner.run(jobs.aecho)
            assert numbers.count <= 1 + flow.MOST


# The map itself


async def test_it_is_used_once(make: MakeRunner) -> None:
    async with make() as runner:
        results = runner.map(jobs.aecho, [1])
        assert await results == [1]
        with pytest.raises(RuntimeError, match="used once"):
            await results
        with pytest.raises(RuntimeError, match="used once"):
            aiter(results)


async def test_collect_is_a_coroutine(make: MakeRunner) -> None:
    async with make() as runner:
        assert await asyncio.create_task(runner.map(jobs.aecho, [1, 2]).collect()) == [1, 2]


async def test_never_used_it_warns(make: MakeRunner) -> None:
    async with make() as runner:
        results = runner.map(jobs.aecho, [1])
        held = [results]
        del results
        with pytest.warns(RuntimeWarning, match="never used"):
            held.clear()


async def test_len_is_that_of_the_shortest_sized_input(make: MakeRunner) -> None:
    async with make() as runner:
        async with runner.map(jobs.aadd, [1, 2, 3], range(2), itertools.count()) as results:
            assert len(results) == 2
        async with runner.map(jobs.aecho, itertools.count()) as results:
            with pytest.raises(TypeError, match="no len"):
                len(results)


async def test_it_is_true_even_when_empty(make: MakeRunner) -> None:
    async with make() as runner, runner.map(jobs.aecho, []) as results:
        assert results
        assert len(results) == 0


async def test_a_plain_for_gets_a_sentence(make: MakeRunner) -> None:
    async with make() as runner, runner.map(jobs.aecho, [1]) as results:
        with pytest.raises(TypeError, match="async for"):
            for _ in results:
                pass
        with pytest.raises(TypeError, match="async for"):
            list(results)


async def test_maps_and_runs_side_by_side(make: MakeRunner) -> None:
    async with make(2) as runner:
        maps = [runner.map(fn, range(100)).collect() for fn in (jobs.echo, jobs.aecho, jobs.echo)]
        runs = [runner.run(jobs.aecho, i) for i in range(100)]
        lists = await asyncio.gather(*maps, asyncio.gather(*runs))
        assert lists == [list(range(100))] * 4


async def test_a_run_beside_an_endless_map_has_its_turn(make: MakeRunner) -> None:
    async with make(concurrency=2) as runner, runner.map(jobs.aecho, Counting(), window=50) as results:
        stream = aiter(results)
        for i in range(50):
            assert await anext(stream) == i
            assert await runner.run(jobs.aecho, "run") == "run"
