"""map: as a list and as a stream, over inputs of every kind, in a window."""

import asyncio
import io
import itertools
import socket
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from typing import Any

import pytest
from rich.console import Console
from rich.progress import Progress
from tqdm.asyncio import tqdm

from percore._scheduler import windows
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
async def test_peers_37_nothing_gives_nothing(make: MakeRunner, ordered: bool) -> None:
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
async def test_m1_endless_inputs(make: MakeRunner, fn: Callable[..., Any], kind: type[Counting]) -> None:
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


class Telling:
    """Numbers. Each is told to a socket as it is pulled, and `behind` is by how many others had not gone on at the next one."""

    def __init__(self, count: int) -> None:
        self.left, self.right = socket.socketpair()
        self.count, self.pulled, self.done = count, 0, 0
        self.behind: list[int] = []

    def __iter__(self) -> Iterator[int]:
        return self

    def __next__(self) -> int:
        self.behind.append(self.pulled - self.done)
        if self.pulled == self.count:
            raise StopIteration
        self.pulled += 1
        self.left.send(b".")
        return self.pulled

    async def read(self) -> None:
        """Wait for the socket, in a task of its own, and go on in this one."""
        loop = asyncio.get_running_loop()
        reader, writer = await asyncio.open_connection(sock=self.right)
        for _ in range(self.count):
            await loop.create_task(reader.readexactly(1))
            self.done += 1
        writer.close()
        await writer.wait_closed()
        self.left.close()


@pytest.mark.parametrize("is_mixed", [False, True])
async def test_others_go_on_between_two_pulls_of_an_input_that_blocks(
    make: MakeRunner, monkeypatch: pytest.MonkeyPatch, is_mixed: bool
) -> None:
    for limit in ("_PULL_SECONDS", "_CHUNK_SECONDS"):  # each pull takes too long
        monkeypatch.setattr(f"percore._map.feeder.{limit}", -1.0)
    async with make() as runner:
        numbers = Telling(20)
        reading = asyncio.create_task(numbers.read())
        others = [_arange(100)] if is_mixed else []
        await runner.map(jobs.aadd, numbers, *others, window=100)
        await reading
    assert numbers.behind == [0] * 21


# The window


@pytest.mark.parametrize("ordered", [True, False])
@pytest.mark.parametrize("kind", [Counting, CountingAsync])
async def test_m1_the_window_is_exact_for_a_stream(make: MakeRunner, kind: type[Counting], ordered: bool) -> None:
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
            await log.take(windows.LEAST)
            await runner.run(jobs.aecho)
            assert numbers.count == windows.LEAST
            gate.open()
            assert await first == 0
            await numbers.reached(2 * 200)
            await runner.run(jobs.aecho)
            assert numbers.count <= 1 + windows.MOST


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
        async with runner.map(jobs.await_, ["1", "2", "3"], ["a", "b"], itertools.count()) as results:
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
            for _ in results:  # type: ignore[attr-defined]
                pass
        with pytest.raises(TypeError, match="async for"):
            list(results)  # type: ignore[call-overload]


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


# Pairs, rows, keys


@BOTH
@pytest.mark.parametrize("ordered", [True, False])
async def test_pairs_of_item_and_result(make: MakeRunner, fn: Callable[..., Any], ordered: bool) -> None:
    async with make(2) as runner:
        items = [f"item {i}" for i in range(100)]
        pairs = await runner.map_items(fn, items, ordered=ordered)
        assert sorted(pairs) == sorted((item, item) for item in items)
        assert not ordered or pairs == [(item, item) for item in items]
        streamed = [pair async for pair in runner.map_items(fn, _arange(50), ordered=ordered)]
        assert sorted(streamed) == [(i, i) for i in range(50)]


@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_an_item_of_a_pair_is_the_very_object(make: MakeRunner) -> None:
    items = [["a"], ["b"]]
    async with make() as runner:
        pairs = await runner.map_items(jobs.aecho, items)
        assert [item is items[place] for place, (item, _) in enumerate(pairs)] == [True, True]
        assert [result == items[place] and result is not items[place] for place, (_, result) in enumerate(pairs)] == [True, True]


@pytest.mark.parametrize("fn", [jobs.add, jobs.aadd])
async def test_pairs_of_several_iterables(make: MakeRunner, fn: Callable[..., Any]) -> None:
    async with make() as runner:
        assert await runner.map_items(fn, [1, 2, 3], _arange(2)) == [((1, 0), 1), ((2, 1), 3)]


@pytest.mark.parametrize("fn", [jobs.add, jobs.aadd])
async def test_pairs_say_which_item_has_failed(make: MakeRunner, fn: Callable[..., Any]) -> None:
    async with make() as runner:
        for ordered in (True, False):
            pairs = await runner.map_items(fn, [1, "a", 3], ordered=ordered, return_exceptions=True)
            outcomes = {item: result if isinstance(result, int) else type(result) for item, result in pairs}
            assert outcomes == {1: 1, "a": TypeError, 3: 3}
        with pytest.raises(TypeError):
            await runner.map_items(fn, [1, "a", 3])


async def test_rows_of_arguments(make: MakeRunner, subtests: pytest.Subtests) -> None:
    kinds: list[Callable[[Any], Any]] = [tuple, list, iter]
    functions: list[Callable[..., Any]] = [jobs.add, jobs.aadd]
    async with make() as runner:
        for row in kinds:
            for fn in functions:
                with subtests.test(fn=fn, row=row):
                    assert await runner.starmap(fn, [row((i, 10)) for i in range(50)]) == list(range(10, 60))
                    assert await runner.starmap(fn, [row((1,)), row((1, 2))]) == [1, 3]


async def test_rows_from_anywhere(make: MakeRunner) -> None:
    async def rows() -> AsyncIterator[tuple[int, int]]:
        for i in range(5):
            yield i, i

    async with make() as runner:
        assert await runner.starmap(jobs.add, zip(range(5), range(5), strict=True)) == [0, 2, 4, 6, 8]
        assert await runner.starmap(jobs.aadd, rows()) == [0, 2, 4, 6, 8]
        assert await runner.starmap(jobs.add, {"ab": 1, "cd": 2}) == ["ab", "cd"]
        assert [value async for value in runner.starmap(jobs.echo, [()] * 3)] == [None] * 3
        results = runner.starmap(jobs.aadd, [(1, 2), (3, 4)])
        assert len(results) == 2
        assert await results == [3, 7]


def _failing_row() -> Iterator[int]:
    yield 1
    raise OSError("half a row")


@pytest.mark.parametrize("fn", [jobs.add, jobs.aadd])
async def test_rows_that_are_none(make: MakeRunner, fn: Callable[..., Any]) -> None:
    async with make() as runner:
        rows: list[Any] = [(1, 2), 5, (1, 2, 3, 4), _failing_row(), (), (3, 4)]
        results = await runner.starmap(fn, rows, return_exceptions=True)
        assert (results[0], results[5]) == (3, 7)
        assert [type(result) for result in results[1:5]] == [TypeError, TypeError, OSError, TypeError]
        seen = []
        with pytest.raises(TypeError):  # noqa: PT012
            async for value in runner.starmap(fn, [(1, 2), 5, (3, 4)]):  # type: ignore[list-item]
                seen.append(value)  # noqa: PERF401  # what came before the error is what matters
        assert seen == [3]


async def test_rows_with_keys(make: MakeRunner) -> None:
    keys: list[tuple[int, int]] = []

    def key(left: int, right: int) -> int:
        keys.append((left, right))
        return left % 2

    async with make(2) as runner:
        rows = [(i, 1) for i in range(20)]
        assert await runner.starmap(jobs.aadd, rows, key=key) == list(range(1, 21))
        assert keys == rows
        where = await runner.map(jobs.awhere_of, range(20), key=lambda i: i % 3)
        assert all(len({where[i].index for i in range(20) if i % 3 == rest}) == 1 for rest in range(3))
        assert await runner.map_items(jobs.aadd, range(3), range(3), key=lambda left, _right: left) == [
            ((0, 0), 0),
            ((1, 1), 2),
            ((2, 2), 4),
        ]


# Maps over maps, and inside other programs


@pytest.mark.parametrize("fns", [(jobs.aecho, jobs.echo), (jobs.echo, jobs.aecho), (jobs.echo, jobs.echo)])
async def test_a_map_over_a_map(make: MakeRunner, fns: tuple[Any, Any]) -> None:
    fetch, parse = fns
    async with make(2) as runner:
        assert await runner.map(parse, runner.map(fetch, range(300))) == list(range(300))
        stages = runner.map(fetch, runner.map(parse, runner.map(fetch, range(100), ordered=False), ordered=False), ordered=False)
        assert sorted([value async for value in stages]) == list(range(100))
        pairs = runner.map_items(parse, runner.map_items(fetch, range(3)))
        assert await pairs == [((i, i), (i, i)) for i in range(3)]


async def test_m1_a_map_over_a_map_holds_its_window(make: MakeRunner) -> None:
    numbers = Counting()
    async with make() as runner, runner.map(jobs.aecho, runner.map(jobs.aecho, numbers, window=3), window=2) as results:
        stream = aiter(results)
        assert await anext(stream) == 0
        await numbers.reached(6)
        await runner.run(jobs.aecho)
        await _settle()
        assert numbers.count == 6


async def test_peers_37_inside_tqdm(make: MakeRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tqdm, "monitor_interval", 0)  # a thread that stays
    # Its own is one for processes, which since 3.14 starts a process that stays.
    monkeypatch.setattr(tqdm, "_lock", threading.RLock(), raising=False)
    async with make() as runner:
        out = io.StringIO()
        with tqdm(runner.map(jobs.aecho, range(50)), file=out) as bar:
            assert bar.total == 50
            assert [value async for value in bar] == list(range(50))
            assert bar.n == 50
        mapped = runner.map(jobs.echo, range(50))
        with tqdm(mapped, total=len(mapped), file=out) as bar:
            assert [value async for value in bar] == list(range(50))
        with tqdm(runner.map(jobs.aecho, _arange(5)), file=out) as bar:
            assert bar.total is None
            assert [value async for value in bar] == list(range(5))
        with tqdm(runner.map(jobs.afail, [ValueError("x")]), file=out) as bar, pytest.raises(ValueError, match="x"):
            await anext(bar)
        assert "50/50" in out.getvalue()


async def test_results_without_an_iterator(make: MakeRunner) -> None:
    async with make() as runner:
        results = runner.map(jobs.aecho, range(2))
        assert [await anext(results), await anext(results)] == [0, 1]
        for _ in range(2):
            with pytest.raises(StopAsyncIteration):
                await anext(results)
        with pytest.raises(RuntimeError, match="used once"):
            await results
        other = runner.map(jobs.aecho, range(2))
        assert await other == [0, 1]
        with pytest.raises(RuntimeError, match="used once"):
            await anext(other)


async def test_it_is_an_async_iterator_and_no_iterable(make: MakeRunner) -> None:
    async with make() as runner:
        results = runner.map(jobs.aecho, range(9))
        assert isinstance(results, AsyncIterator)
        assert not isinstance(results, Iterable)
        assert await anext(results) == 0
        assert aiter(results) is aiter(results)
        async for value in results:  # goes on
            assert value == 1
            break
        assert await anext(results) == 2
        assert await runner.map(jobs.aecho, results) == list(range(3, 9))  # to its end, as an input
        with pytest.raises(RuntimeError, match="used once"):
            aiter(results)
        with pytest.raises(RuntimeError, match="used once"):
            await results
        with pytest.raises(StopAsyncIteration):
            await anext(results)


async def test_a_closed_one_gives_nothing_more(make: MakeRunner) -> None:
    async with make() as runner:
        results = runner.map(jobs.aecho, range(9))
        stream = aiter(results)
        assert await anext(results) == 0
        await results.aclose()
        with pytest.raises(RuntimeError, match="used once"):
            aiter(results)
        for iterator in (results, stream):
            with pytest.raises(StopAsyncIteration):
                await anext(iterator)


async def test_inside_rich(make: MakeRunner) -> None:
    out = io.StringIO()
    async with make() as runner:
        with Progress(console=Console(file=out, width=80), auto_refresh=False) as progress:
            results = runner.map(jobs.echo, range(50))
            task = progress.add_task("fetching", total=len(results))
            async for _ in results:
                progress.advance(task)
            assert progress.finished
    assert "100%" in out.getvalue()
