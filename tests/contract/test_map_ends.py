"""How a map ends: by errors, at their place or at once, and early, by whoever uses it."""

import asyncio
import functools
import gc
import itertools
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

import percore
from percore._supervisor.pool_worker import PoolWorker
from tests import jobs
from tests.contract.conftest import MakeRunner
from tests.contract.pipes import Gate, Log
from tests.internals import arena_of, supervisor_of
from tests.waiting import until

pytestmark = pytest.mark.differs("uvloop", because="the loop finalises async generators, and orders the callbacks of an end")


class Source:
    """A generator, sync or async, over numbers, and whether it was closed."""

    def __init__(self, *, fails_after: int | None = None) -> None:
        self.closed = asyncio.Event()
        self._fails_after = fails_after

    def numbers(self) -> Iterator[int]:
        try:
            for i in itertools.count():
                if i == self._fails_after:
                    raise OSError("the input broke")
                yield i
        finally:
            self.closed.set()

    async def anumbers(self) -> AsyncIterator[int]:
        try:
            for i in itertools.count():
                if i == self._fails_after:
                    raise OSError("the input broke")
                yield i
        finally:
            self.closed.set()

    def open(self, kind: str) -> Any:
        return self.numbers() if kind == "sync" else self.anumbers()


KINDS = pytest.mark.parametrize("kind", ["sync", "async"])


def _waiting(runner: percore.Runner, log: Log, gate: Gate, source: Any, **options: Any) -> percore.Map[Any]:
    """A map of which no call ends before the gate is open."""
    return runner.map(jobs.await_, itertools.repeat(log.path), itertools.repeat(gate.path), source, **options)


async def _all(results: percore.Map[Any], seen: list[Any] | None = None) -> None:
    """Use the map as a stream, to its end; what it gave is in `seen`."""
    async for value in results:
        if seen is not None:
            seen.append(value)


# Errors


async def test_a_stream_raises_an_error_at_its_place(make: MakeRunner, log: Log, gate: Gate, other_gate: Gate) -> None:
    async with make() as runner:
        same = [itertools.repeat(value) for value in (log.path, gate.path, other_gate.path)]
        results = aiter(runner.map(jobs.wait_or_fail, *same, range(7), itertools.repeat(3)))
        first = asyncio.ensure_future(anext(results))
        # Those after the error are cancelled at once, while those before it still run.
        said = await log.take(9)
        assert sorted(said) == sorted(["0", "1", "2", "4", "5", "6", "cancelled 4", "cancelled 5", "cancelled 6"])
        assert not first.done()
        gate.open()
        assert [await first, await anext(results), await anext(results)] == [0, 1, 2]
        with pytest.raises(ValueError, match="failed at 3"):
            await anext(results)
        with pytest.raises(StopAsyncIteration):
            await anext(results)


async def test_a_list_raises_an_error_as_soon_as_it_happens(make: MakeRunner, log: Log, gate: Gate, other_gate: Gate) -> None:
    async with make() as runner:
        same = [itertools.repeat(value) for value in (log.path, gate.path, other_gate.path)]
        with pytest.raises(ValueError, match="failed at 3"):
            await runner.map(jobs.wait_or_fail, *same, range(7), itertools.repeat(3))
        said = [line for line in await log.take(12) if line.startswith("cancelled")]
        assert sorted(said) == [f"cancelled {i}" for i in (0, 1, 2, 4, 5, 6)]


async def test_an_unordered_stream_raises_an_error_as_soon_as_it_happens(
    make: MakeRunner, log: Log, gate: Gate, other_gate: Gate
) -> None:
    async with make() as runner:
        same = [itertools.repeat(value) for value in (log.path, gate.path, other_gate.path)]
        with pytest.raises(ValueError, match="failed at 3"):
            await anext(aiter(runner.map(jobs.wait_or_fail, *same, range(7), itertools.repeat(3), ordered=False)))
        await log.take(12)


@pytest.mark.parametrize("ordered", [True, False])
async def test_after_an_error_nothing_more_is_pulled(make: MakeRunner, ordered: bool) -> None:
    pulled = itertools.count()
    errors = (ValueError(f"bad {i}") for i in pulled)
    async with make() as runner:
        with pytest.raises(ValueError, match="bad"):
            await _all(runner.map(jobs.afail, errors, ordered=ordered))
        count = next(pulled)
        await runner.run(jobs.aecho)
        assert next(pulled) == count + 1


async def test_return_exceptions_puts_errors_at_their_places(make: MakeRunner) -> None:
    async with make() as runner:
        results = await runner.map(jobs.add, [1, "a", 3], [1, 1, 1], return_exceptions=True)
        assert (results[0], type(results[1]), results[2]) == (2, TypeError, 4)
        streamed = [value async for value in runner.map(jobs.aadd, [1, "a", 3], [1, 1, 1], return_exceptions=True)]
        assert [type(value) for value in streamed] == [int, TypeError, int]
        unordered = await runner.map(jobs.aadd, [1, "a", 3], [1, 1, 1], return_exceptions=True, ordered=False)
        assert sorted(type(value).__name__ for value in unordered) == ["TypeError", "int", "int"]


@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_arguments_that_cannot_be_pickled_are_an_error_at_their_place(make: MakeRunner) -> None:
    async with make() as runner:
        results = await runner.map(jobs.aecho, [1, jobs.RefusesPickle(), 3], return_exceptions=True)
        assert (results[0], type(results[1]), results[2]) == (1, ValueError, 3)


@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_a_function_that_cannot_be_pickled_fails_the_map(make: MakeRunner) -> None:
    refusing = jobs.RefusesPickle()
    async with make() as runner:
        with pytest.raises(ValueError, match="do not pickle me"):
            await runner.map(lambda _: refusing, [1])
        assert await runner.map(jobs.aecho, [1]) == [1]


@KINDS
async def test_m3_a_failing_input_fails_the_stream_after_what_was_pulled(make: MakeRunner, kind: str) -> None:
    source = Source(fails_after=3)
    seen: list[int] = []
    async with make() as runner:
        with pytest.raises(OSError, match="the input broke"):
            await _all(runner.map(jobs.aecho, source.open(kind)), seen)
    assert seen == [0, 1, 2]


@KINDS
async def test_m3_a_failing_input_fails_the_list_after_what_was_pulled(make: MakeRunner, log: Log, gate: Gate, kind: str) -> None:
    source = Source(fails_after=3)
    async with make() as runner:
        task = asyncio.create_task(_waiting(runner, log, gate, source.open(kind)).collect())
        assert await log.take(3) == ["0", "1", "2"]
        await source.closed.wait()
        assert not task.done()
        gate.open()
        with pytest.raises(OSError, match="the input broke"):
            await task
        assert log.rest() == []


async def test_an_input_that_cannot_be_iterated_after_all_fails_the_map(make: MakeRunner) -> None:
    class Broken:
        def __iter__(self) -> Iterator[int]:
            raise OSError("no iterator")

    async with make() as runner:
        with pytest.raises(OSError, match="no iterator"):
            await runner.map(jobs.aecho, Broken())


# Leaving early


@KINDS
async def test_m2_leaving_async_with_cancels_the_rest_and_closes_generators(
    make: MakeRunner, log: Log, gate: Gate, kind: str
) -> None:
    source = Source()
    async with make() as runner:
        async with _waiting(runner, log, gate, source.open(kind), window=2) as results:
            first = asyncio.ensure_future(anext(aiter(results)))
            await log.take(2)
            first.cancel()
            await asyncio.wait([first])
        assert source.closed.is_set()
        assert sorted(await log.take(2)) == ["cancelled 0", "cancelled 1"]
        with pytest.raises(RuntimeError, match="used once"):
            aiter(results)


@KINDS
async def test_m2_aclose_cancels_the_rest_and_closes_generators(make: MakeRunner, log: Log, gate: Gate, kind: str) -> None:
    source = Source()
    async with make() as runner:
        results = runner.map(jobs.aecho, source.open(kind), window=4)
        stream = aiter(results)
        assert await anext(stream) == 0
        await results.aclose()
        assert source.closed.is_set()
        with pytest.raises(StopAsyncIteration):
            await anext(stream)
        await results.aclose()


@pytest.mark.parametrize("ordered", [True, False])
@KINDS
async def test_aclose_while_another_task_iterates(make: MakeRunner, log: Log, gate: Gate, kind: str, ordered: bool) -> None:
    source = Source()
    async with make() as runner:
        results = _waiting(runner, log, gate, source.open(kind), window=2, ordered=ordered)
        seen: list[Any] = []
        task = asyncio.create_task(_all(results, seen))
        await log.take(2)
        await results.aclose()
        await task  # it comes to its end
        assert seen == []
        assert source.closed.is_set()
        assert sorted(await log.take(2)) == ["cancelled 0", "cancelled 1"]
        assert runner.statistics().queued == 0


async def test_a_list_that_is_closed_while_its_input_is_about_to_go_on_is_empty(make: MakeRunner) -> None:
    async def numbers() -> AsyncIterator[int]:
        while True:  # at every moment, the task that pulls is about to run before the one that collects
            await asyncio.sleep(0)
            yield 1

    async with make() as runner:
        mapped = runner.map(jobs.aecho, numbers())
        collecting = asyncio.create_task(mapped.collect())
        for _ in range(5):
            await asyncio.sleep(0)
        await mapped.aclose()
        assert await collecting == []


async def test_aclose_of_one_that_iterates_a_map_over_a_map(make: MakeRunner, log: Log, gate: Gate) -> None:
    source = Source()
    async with make() as runner:
        inner = _waiting(runner, log, gate, source.numbers(), window=2)
        outer = runner.map(jobs.aecho, inner)
        task = asyncio.create_task(_all(outer))
        await log.take(2)
        await outer.aclose()
        await task
        await inner.aclose()
        assert source.closed.is_set()
        assert sorted(await log.take(2)) == ["cancelled 0", "cancelled 1"]


async def test_an_error_of_an_inner_map_is_one_of_its_input(make: MakeRunner) -> None:
    async with make() as runner:
        seen: list[int] = []
        with pytest.raises(ZeroDivisionError):
            await _all(runner.map(jobs.echo, runner.map(jobs.inverse, [1, 1, 0, 1])), seen)
        assert seen == [1, 1]
        with pytest.raises(ZeroDivisionError):
            await runner.map(jobs.aecho, runner.map(jobs.inverse, [1, 1, 0, 1]))
        inner = runner.map(jobs.inverse, [1, 0, 1], return_exceptions=True)
        results = await runner.map(jobs.echo, inner)
        assert [type(result) for result in results] == [int, ZeroDivisionError, int]


@KINDS
async def test_m2_break_cancels_the_rest_and_closes_generators(make: MakeRunner, log: Log, gate: Gate, kind: str) -> None:
    source = Source()
    async with make() as runner:
        async for value in runner.map(jobs.aecho, source.open(kind), window=4):
            assert value == 0
            break
        gc.collect()
        await source.closed.wait()


@KINDS
async def test_m2_a_dropped_iterator_cancels_the_rest_and_closes_generators(
    make: MakeRunner, log: Log, gate: Gate, kind: str
) -> None:
    source = Source()
    async with make() as runner:
        results = aiter(runner.map(jobs.first_returns, [log.path] * 3, [gate.path] * 3, source.open(kind)))
        assert await anext(results) == 0
        assert sorted(await log.take(2)) == ["1", "2"]
        del results
        gc.collect()
        await source.closed.wait()
        assert sorted(await log.take(2)) == ["cancelled 1", "cancelled 2"]


@KINDS
async def test_kept_in_a_variable_it_goes_on_after_break_until_it_is_dropped(
    make: MakeRunner, log: Log, gate: Gate, kind: str
) -> None:
    source = Source()
    async with make() as runner:
        results = runner.map(jobs.first_returns, [log.path] * 3, [gate.path] * 3, source.open(kind))
        async for value in results:
            assert value == 0
            break
        assert sorted(await log.take(2)) == ["1", "2"]
        gc.collect()
        await runner.run(jobs.aecho)
        assert not source.closed.is_set()
        assert log.rest() == []
        del results
        gc.collect()
        await source.closed.wait()
        assert sorted(await log.take(2)) == ["cancelled 1", "cancelled 2"]


@pytest.mark.parametrize("fn", [jobs.echo, jobs.aecho])
async def test_an_input_that_blocks_is_pulled_in_a_thread(make: MakeRunner, fn: Any) -> None:
    let_through, closed = threading.Semaphore(0), threading.Event()

    def numbers() -> Iterator[int]:
        try:
            for number in itertools.count():
                if number:
                    let_through.acquire()
                yield number
        finally:
            closed.set()

    async with make() as runner:
        async with runner.map(fn, percore.threaded(numbers())) as results:
            for number in range(20):
                assert await anext(results) == number  # while the input blocks
                let_through.release()
            thread = next(thread for thread in threading.enumerate() if thread.name == "percore-threaded")
        let_through.release(2)
        await asyncio.to_thread(thread.join)
        assert closed.is_set()


async def test_m2_cancelling_the_await_cancels_the_calls(make: MakeRunner, log: Log, gate: Gate) -> None:
    source = Source()
    async with make(concurrency=2) as runner:
        task = asyncio.create_task(_waiting(runner, log, gate, source.numbers(), window=5).collect())
        await log.take(2)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert source.closed.is_set()
        assert sorted(await log.take(2)) == ["cancelled 0", "cancelled 1"]
        assert await runner.run(jobs.aecho, 1) == 1
        assert log.rest() == []


async def test_m3_cancelling_a_map_that_waits_for_its_input(make: MakeRunner) -> None:
    never = asyncio.Event()

    async def stuck() -> AsyncIterator[int]:
        yield 0
        await never.wait()

    async with make() as runner:
        results = aiter(runner.map(jobs.aecho, stuck()))
        assert await anext(results) == 0
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(0.05):
                await anext(results)


async def test_the_user_s_file_stays_open(make: MakeRunner, tmp_path: Path) -> None:
    (tmp_path / "urls").write_text("a\nb\nc\n")
    with (tmp_path / "urls").open() as lines:
        async with make() as runner:
            async with runner.map(jobs.aecho, lines, window=1) as results:
                assert await anext(aiter(results)) == "a\n"
            assert not lines.closed


# Closing the runner


@pytest.mark.parametrize("ordered", [True, False])
async def test_an_open_list_ends_what_it_pulled_when_the_runner_closes(
    make: MakeRunner, log: Log, gate: Gate, ordered: bool
) -> None:
    source = Source()
    runner = make()
    await runner.start()
    task = asyncio.create_task(_waiting(runner, log, gate, source.numbers(), window=3, ordered=ordered).collect())
    await log.take(3)
    closing = asyncio.create_task(runner.aclose())
    await asyncio.sleep(0)
    gate.open()
    with pytest.raises(percore.RunnerClosed):
        await task
    await closing
    assert log.rest() == []
    assert source.closed.is_set()


async def test_peers_24_an_open_stream_gives_what_it_pulled_when_the_runner_closes(make: MakeRunner, log: Log, gate: Gate) -> None:
    runner = make()
    await runner.start()
    results = aiter(_waiting(runner, log, gate, Source().numbers(), window=3))
    first = asyncio.ensure_future(anext(results))
    await log.take(3)
    closing = asyncio.create_task(runner.aclose())
    await asyncio.sleep(0)
    gate.open()
    assert [await first, await anext(results), await anext(results)] == [0, 1, 2]
    with pytest.raises(percore.RunnerClosed):
        await anext(results)
    await closing


async def test_m3_a_map_that_waits_for_its_input_ends_when_the_runner_closes(make: MakeRunner) -> None:
    never = asyncio.Event()

    async def stuck() -> AsyncIterator[int]:
        yield 0
        await never.wait()

    runner = make()
    await runner.start()
    results = aiter(runner.map(jobs.aecho, stuck()))
    assert await anext(results) == 0
    await runner.aclose()
    async with asyncio.timeout(2):
        with pytest.raises(percore.RunnerClosed):
            await anext(results)


@pytest.mark.parametrize("kind", ["list", "stream"])
@pytest.mark.parametrize("grace", [None, 0])
async def test_a_map_that_begins_just_before_the_close_ends(make: MakeRunner, kind: str, grace: float | None) -> None:
    runner = make()
    await runner.start()
    numbers = runner.map(jobs.add, itertools.count(), [1])
    # In one turn of the loop: 1. the map begins, and its feeding task is made  2. the runner closes  3. that task would begin.
    beginning = asyncio.create_task(numbers.collect() if kind == "list" else _all(numbers))
    closing = asyncio.create_task(runner.aclose(grace=grace))
    with pytest.raises(percore.RunnerClosed):
        await asyncio.wait_for(beginning, 10)
    await closing


async def test_a_cut_map_raises_runner_closed(make: MakeRunner, log: Log, gate: Gate) -> None:
    runner = make()
    await runner.start()
    task = asyncio.create_task(_waiting(runner, log, gate, range(3), return_exceptions=True).collect())
    await log.take(3)
    await runner.aclose(grace=0)
    with pytest.raises(percore.RunnerClosed):
        await task


@pytest.mark.parametrize("key", [None, lambda *_: "key"], ids=["plain", "keyed"])
async def test_a_cut_stream_that_nobody_reads_holds_nothing_up(
    make: MakeRunner, log: Log, gate: Gate, other_gate: Gate, key: Any
) -> None:
    runner = make(concurrency=1)
    await runner.start()
    gates = [gate.path, *[other_gate.path] * 5]
    results = aiter(runner.map(jobs.await_, itertools.repeat(log.path), gates, range(6), key=key))
    gate.open()
    assert await anext(results) == 0
    assert await log.take(2) == ["0", "1"]
    # 1. items 2 to 5 are withdrawn  2. the end of item 2 fails the stream, which cancels those after it: they wait nowhere now.
    await asyncio.wait_for(runner.aclose(grace=0), 10)
    with pytest.raises(percore.RunnerClosed):
        await anext(results)


async def test_an_input_that_is_cancelled_is_no_end(make: MakeRunner) -> None:
    async def numbers() -> AsyncIterator[int]:
        yield 1
        task = asyncio.ensure_future(asyncio.Event().wait())
        task.cancel()
        await task

    async with make() as runner:
        with pytest.raises(RuntimeError, match="the input raised CancelledError"):
            await runner.map(jobs.aecho, numbers())
        seen = []
        with pytest.raises(RuntimeError, match="the input raised CancelledError"):  # noqa: PT012
            async for value in runner.map(jobs.aecho, numbers()):
                seen.append(value)  # noqa: PERF401  # what came before the error is what matters
        assert seen == [1]


@pytest.mark.parametrize("kind", ["list", "stream"])
async def test_a_map_ends_though_its_feeder_is_cancelled_before_its_first_step(make: MakeRunner, kind: str) -> None:
    """As by a program that cancels all of its tasks but two."""
    source = Source()

    def cancel() -> None:
        (feeder,) = (task for task in asyncio.all_tasks() if task.get_name() == "percore-map")
        feeder.cancel()

    async with make() as runner, asyncio.timeout(20):
        numbers = source.anumbers()
        assert await anext(numbers) == 0
        results = runner.map(jobs.aecho, numbers)
        using = asyncio.ensure_future(results.collect() if kind == "list" else anext(aiter(results)))
        asyncio.get_running_loop().call_soon(cancel)  # after the step that makes the feeder
        with pytest.raises(RuntimeError, match="the input raised CancelledError"):
            await using
        assert source.closed.is_set()
        assert await runner.map(jobs.aecho, [1, 2]) == [1, 2]


async def test_nothing_that_was_pulled_after_an_error_runs(make: MakeRunner, log: Log, gate: Gate) -> None:
    pulls, goes_on = asyncio.Event(), asyncio.Event()

    async def places() -> AsyncIterator[int]:
        yield 0
        yield 1
        pulls.set()
        await goes_on.wait()
        yield 2

    async with make() as runner:
        # The call at place 1 fails at once; that at place 0 waits, so nobody has been told yet.
        iterator = aiter(
            runner.map(
                jobs.wait_or_fail,
                itertools.repeat(log.path),
                itertools.repeat(gate.path),
                itertools.repeat(gate.path),
                places(),
                itertools.repeat(1),
            )
        )
        first = asyncio.ensure_future(anext(iterator))
        await pulls.wait()
        assert await log.next() == "0"
        await until(lambda: runner.statistics().failed)
        goes_on.set()
        await asyncio.sleep(0)
        gate.open()
        assert await first == 0
        with pytest.raises(ValueError, match="failed at 1"):
            await anext(iterator)
    assert log.rest() == []


async def test_a_map_is_used_where_its_runner_is(make: MakeRunner) -> None:
    async with make() as runner:
        stream = runner.map(jobs.aecho, [1])
        with pytest.raises(RuntimeError, match="another thread"):
            await asyncio.to_thread(lambda: asyncio.run(stream.collect()))


async def test_a_map_that_is_used_after_the_close(make: MakeRunner) -> None:
    async with make() as runner:
        stream = runner.map(jobs.aecho, [1])
    with pytest.raises(percore.RunnerClosed, match="closed"):
        await stream


async def test_an_iterator_that_is_dropped_or_closed_before_its_first_result_holds_nothing(make: MakeRunner) -> None:
    large = b"x" * 300_000
    async with make() as runner:
        arena = arena_of(runner)
        results = runner.map(lambda item: (item, large), [1, 2])
        dropped = aiter(results)
        del dropped
        gc.collect()
        assert arena.in_use == 0
        results = runner.map(lambda item: (item, large), [1, 2])
        iterator = aiter(results)
        await results.aclose()
        with pytest.raises(StopAsyncIteration):
            await anext(iterator)
        assert arena.in_use == 0


# What an end costs the others


class Scanned(dict[Any, Any]):
    """The calls of a worker, and how often somebody has gone through all of them."""

    scans = 0

    def values(self) -> Any:
        Scanned.scans += 1
        return super().values()


@pytest.fixture
def scanned(monkeypatch: pytest.MonkeyPatch) -> type[Scanned]:
    init = PoolWorker.__init__

    def make_scanned(member: PoolWorker, *args: Any) -> None:
        init(member, *args)
        member.calls = Scanned()

    monkeypatch.setenv("PERCORE_DEBUG", "0")  # the audit looks at all calls
    monkeypatch.setattr(PoolWorker, "__init__", make_scanned)
    monkeypatch.setattr(Scanned, "scans", 0)
    return Scanned


@pytest.mark.parametrize("way", ["cancelled", "timed out"])
async def test_nobody_goes_through_all_calls_while_a_cancelled_one_runs_on(
    make: MakeRunner, log: Log, gate: Gate, other_gate: Gate, scanned: type[Scanned], way: str
) -> None:
    """Its function, which travels by value, has to be kept until then."""
    async with make(2, threads=2) as runner:
        supervisor = supervisor_of(runner)
        fn = functools.partial(jobs.wait, log.path, gate.path)
        verbs = runner.options(timeout=0.01) if way == "timed out" else runner
        results = verbs.map(fn, [1], return_exceptions=way == "timed out")
        stuck = asyncio.ensure_future(results.collect())
        await log.next()
        if way == "timed out":
            assert [type(error) for error in await stuck] == [TimeoutError]
        else:
            await results.aclose()
            assert await stuck == []
        others = [runner.submit(jobs.await_, log.path, other_gate.path) for _ in range(20)]
        await log.take(20)
        scanned.scans = 0
        for count in range(5):
            assert await runner.run(jobs.aecho, count) == count
            assert await runner.map(jobs.aecho, [count]) == [count]
            assert await runner.map(jobs.echo, [count]) == [count]
            assert await runner.map(functools.partial(jobs.aecho, count), [()] * 0) == []
        assert scanned.scans == 0
        assert len(supervisor.functions.retired) == 1
        gate.open()
        await until(lambda: not supervisor.functions.retired)  # a cancelled call ends without a word
        other_gate.open()
        await asyncio.gather(*others)


async def test_a_function_is_forgotten_when_the_last_of_its_calls_has_ended_in_any_order(
    make: MakeRunner, log: Log, gate: Gate, other_gate: Gate
) -> None:
    async with make(2, threads=20) as runner:
        supervisor = supervisor_of(runner)
        gates = [gate] * 10 + [other_gate] * 10
        maps = [runner.map(functools.partial(jobs.wait, log.path, path.path), [number]) for number, path in enumerate(gates)]
        tasks = [asyncio.ensure_future(results.collect()) for results in maps]
        await log.take(20)
        for results in maps:
            await results.aclose()
        await asyncio.gather(*tasks)
        assert len(supervisor.functions.retired) == 20
        other_gate.open()
        while len(supervisor.functions.retired) > 10:
            await runner.run(jobs.aecho)
        gate.open()
        await until(lambda: not supervisor.closing.unfinished())
        assert not supervisor.functions.retired
        kept = {supervisor.known[id(jobs.aecho)].number}
        assert all(member.defined <= kept for member in supervisor.members)
