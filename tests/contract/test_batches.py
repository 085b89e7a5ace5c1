"""Tiny plain functions of a map travel in batches: each item keeps its own start, outcome and cancellation."""

import asyncio
import itertools
import signal
from collections import Counter
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

import percore
from percore._scheduler.windows import Cost
from tests import jobs
from tests.contract.conftest import MakeRunner, threads_ended, worker_of
from tests.contract.pipes import Gate, Log
from tests.internals import slots_used, supervisor_of
from tests.waiting import until

pytestmark = [
    pytest.mark.differs("fallbacks", because="bells are pipes, and the worker's loop is asyncio's", on="fake"),
    pytest.mark.differs(
        "nodes", because="how many items of a batch had begun arrives with an exit, and results one message at a time"
    ),
]
in_processes = pytest.mark.differs("fallbacks", because="the other end of a bell is another process's, and so is an exit")

BATCH = 16
COUNT = 4 * BATCH  # as many as the first window holds

SHAPES = pytest.mark.parametrize("shape", ["bare", "rows", "pickled"])


@pytest.fixture
def sixteen(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every batch is of sixteen items, whatever they take."""
    monkeypatch.setattr(Cost, "batch", lambda *_: BATCH)


def _map(runner: percore.Runner, shape: str, fn: Callable[..., Any], fixed: Iterable[Any], **options: Any) -> percore.Map[Any]:
    """A map of `fn(*fixed, place)` over places, whose arguments travel in one of three ways."""
    if shape == "rows":
        return runner.map(fn, *map(itertools.repeat, fixed), range(COUNT), **options)
    return runner.map(partial(fn, *fixed), range(COUNT) if shape == "bare" else map(jobs.Place, range(COUNT)), **options)


@asynccontextmanager
async def _all_waiting(runner: percore.Runner, threads: int = 1) -> AsyncIterator[None]:
    """No plain call is sent meanwhile; afterwards they are, in batches that begin at multiples of sixteen."""
    dispatch = supervisor_of(runner).dispatch
    seats, dispatch.seats = dispatch.seats, []
    yield
    await until(lambda: dispatch.waiting() >= COUNT)
    dispatch.seats = seats
    supervisor_of(runner).advance()


async def _started(runner: percore.Runner, results: percore.Map[Any]) -> "asyncio.Task[list[Any]]":
    """Use the map as a list. All its items are under way, in batches of sixteen."""
    async with _all_waiting(runner):
        return asyncio.create_task(results.collect())


# Results


@SHAPES
@pytest.mark.parametrize("ordered", [True, False])
async def test_each_result_has_its_place(make: MakeRunner, sixteen: None, shape: str, ordered: bool) -> None:
    async with make(2, threads=2) as runner:
        results = await _map(runner, shape, jobs.add, (1000,), ordered=ordered)
        assert (results if ordered else sorted(results)) == list(range(1000, 1000 + COUNT))
        pairs = [pair async for pair in runner.map_items(partial(jobs.add, 1000), range(COUNT), ordered=ordered)]
        assert sorted(pairs) == [(place, 1000 + place) for place in range(COUNT)]
        assert runner.statistics().done == 2 * COUNT
        assert runner.statistics().failed == 0


@in_processes
async def test_many_batches_of_measured_size(make: MakeRunner) -> None:
    async with make(2) as runner:
        assert await runner.map(jobs.echo, range(20_000)) == list(range(20_000))
        seen = [value async for value in runner.map(partial(jobs.add, right=1), range(5000))]
        assert seen == list(range(1, 5001))


@SHAPES
async def test_errors_are_at_their_places(make: MakeRunner, sixteen: None, shape: str) -> None:
    async with make(2) as runner:
        results = await _map(runner, shape, jobs.odd, (KeyError,), return_exceptions=True)
        assert [type(result) for result in results] == [int if shape != "pickled" else jobs.Place, KeyError] * (COUNT // 2)
        assert [result.args[0] if isinstance(result, KeyError) else result for result in results] == list(range(COUNT))
        assert (runner.statistics().done, runner.statistics().failed) == (COUNT, COUNT // 2)


async def test_errors_of_an_unordered_map_are_in_pairs(make: MakeRunner, sixteen: None) -> None:
    async with make(2) as runner:
        pairs = runner.map_items(partial(jobs.odd, KeyError), range(COUNT), ordered=False, return_exceptions=True)
        seen = {place: result async for place, result in pairs}
        assert [type(seen[place]) for place in range(COUNT)] == [int, KeyError] * (COUNT // 2)


async def test_a_stream_raises_an_error_of_a_batch_at_its_place(make: MakeRunner, sixteen: None) -> None:
    seen = []
    async with make() as runner:
        with pytest.raises(ValueError, match="failed at 20"):  # noqa: PT012
            async for value in runner.map(_fail_at_20, range(COUNT)):
                seen.append(value)  # noqa: PERF401  # what came before the error is what matters
    assert seen == list(range(20))


def _fail_at_20(place: int) -> int:
    if place == 20:
        raise ValueError("failed at 20")
    return place


@SHAPES
async def test_results_that_are_no_scalars(make: MakeRunner, sixteen: None, shape: str, subtests: pytest.Subtests) -> None:
    kinds: list[Callable[[int], Any]] = [jobs.several, jobs.large, jobs.huge, jobs.pattern]
    async with make(2) as runner:
        for what in kinds:
            with subtests.test(what.__name__):
                results = await _map(runner, shape, what, ())
                assert results == [what(place) for place in range(COUNT)]
                mixed = await _map(runner, shape, jobs.give_at, (what, 20))
                assert mixed == [what(20) if place == 20 else place for place in range(COUNT)]


@pytest.mark.parametrize("what", [jobs.lock, jobs.unreadable])
@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_s3_results_that_cannot_travel_fail_alone(make: MakeRunner, sixteen: None, what: Callable[[int], Any]) -> None:
    async with make() as runner:
        results = await runner.map(partial(jobs.give_at, what, 20), range(COUNT), return_exceptions=True)
        assert isinstance(results.pop(20), percore.RemoteError)
        assert results == [place for place in range(COUNT) if place != 20]
        assert runner.statistics().failed == 1


@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_s1_items_that_cannot_be_pickled_fail_alone(make: MakeRunner, sixteen: None) -> None:
    items: list[Any] = list(range(COUNT))
    items[20] = jobs.RefusesPickle()
    async with make() as runner:
        results = await runner.map(jobs.echo, items, return_exceptions=True)
        assert "do not pickle me" in str(results.pop(20))
        assert results == [place for place in range(COUNT) if place != 20]


@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_s2_items_that_cannot_be_read_fail_alone(make: MakeRunner, sixteen: None) -> None:
    items: list[Any] = list(range(COUNT))
    items[20] = jobs.RefusesUnpickle()
    async with make() as runner:
        results = await runner.map(jobs.echo, items, return_exceptions=True)
        assert "do not read me" in str(results.pop(20))
        assert results == [place for place in range(COUNT) if place != 20]


@in_processes
async def test_large_items_among_small_ones(make: MakeRunner, sixteen: None) -> None:
    items = [jobs.pattern({3: 30_000, 20: 300_000}.get(place % 32, place)) for place in range(COUNT)]
    async with make(2) as runner:
        assert await runner.map(jobs.echo, items) == items
        assert [value async for value in runner.map(jobs.echo, [[item] for item in items])] == [[item] for item in items]
        assert slots_used(runner) == 0


async def test_functions_that_return_awaitables(make: MakeRunner, sixteen: None, log: Log, gate: Gate) -> None:
    async with make() as runner:
        task = await _started(runner, runner.map(partial(jobs.later_at, log.path, gate.path, 20), range(COUNT)))
        assert sorted(map(int, await log.take(COUNT))) == list(range(COUNT))  # nobody waits for the one at 20
        gate.open()
        assert await task == list(range(COUNT))
        assert runner.statistics().done == COUNT


async def test_awaitables_are_cancelled_in_the_middle_of_a_batch(make: MakeRunner, sixteen: None, log: Log, gate: Gate) -> None:
    async with make() as runner:
        task = await _started(runner, runner.map(partial(jobs.later_at, log.path, gate.path, 20), range(COUNT)))
        await log.take(COUNT)
        task.cancel()
        assert await log.next() == "cancelled 20"
        assert await runner.run(jobs.echo, 1) == 1


# Errors and cancellation in the middle


@SHAPES
async def test_an_error_cancels_what_is_behind_it_in_its_batch(
    make: MakeRunner, sixteen: None, log: Log, gate: Gate, shape: str
) -> None:
    async with make(threads=1) as runner:
        task = await _started(runner, _map(runner, shape, jobs.fail_and_wait, (log.path, gate.path, 20)))
        with pytest.raises(ValueError, match="failed at 20"):
            await task
        await runner.run(jobs.aecho)  # the worker has heard of it
        gate.open()
        await runner.run(jobs.echo)
        _check_nothing_behind(log)


def _check_nothing_behind(log: Log) -> None:
    """All items before 20 have run, the one after it may have begun before the error was heard of, and no other."""
    ran = sorted(map(int, log.rest()))
    assert ran in ([*range(20)], [*range(20), 21]), str(ran)


async def test_an_error_cancels_what_is_behind_it_while_a_stream_gives_what_is_before(
    make: MakeRunner, sixteen: None, log: Log, gate: Gate
) -> None:
    async with make(threads=1) as runner:
        stream = aiter(_map(runner, "bare", jobs.fail_and_wait, (log.path, gate.path, 20)))
        async with _all_waiting(runner):
            first = asyncio.ensure_future(anext(stream))
        await until(lambda: runner.statistics().failed)
        await runner.run(jobs.aecho)
        gate.open()
        await runner.run(jobs.echo)
        _check_nothing_behind(log)
        assert [await first, *[await anext(stream) for _ in range(19)]] == list(range(20))
        with pytest.raises(ValueError, match="failed at 20"):
            await anext(stream)


async def test_an_error_spares_the_awaitables_before_it(
    make: MakeRunner, sixteen: None, log: Log, gate: Gate, other_gate: Gate
) -> None:
    """The stream gives them, and then its own error; those behind it are cancelled."""
    async with make(threads=1) as runner:
        stream = aiter(_map(runner, "bare", jobs.await_and_fail_at, (log.path, gate.path, other_gate.path, 1)))
        async with _all_waiting(runner):
            first = asyncio.ensure_future(anext(stream))
        assert sorted(await log.take(2)) == ["0", "2"]
        other_gate.open()
        assert await log.next() == "cancelled 2"
        await runner.run(jobs.aecho)  # whatever else was cancelled has been by now
        gate.open()
        assert await first == 0
        with pytest.raises(ValueError, match="failed at 1"):
            await anext(stream)
        assert log.rest() == []


async def test_cancelling_a_map_takes_unbegun_items_of_a_batch_back(make: MakeRunner, sixteen: None, log: Log, gate: Gate) -> None:
    async with make(threads=1) as runner:
        task = await _started(runner, _map(runner, "bare", jobs.wait_at, (log.path, gate.path, 20)))
        await log.take(21)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await runner.run(jobs.aecho)
        gate.open()
        assert await runner.run(jobs.echo, 1) == 1
        assert log.rest() == []
        statistics = runner.statistics()
        assert (statistics.running, statistics.queued) == (0, 0)


@in_processes
async def test_closing_cuts_a_batch_off(make: MakeRunner, sixteen: None, log: Log, gate: Gate) -> None:
    runner = make(threads=1)
    await runner.start()
    task = await _started(runner, _map(runner, "bare", jobs.wait_at, (log.path, gate.path, 20), return_exceptions=True))
    await log.take(21)
    closing = asyncio.create_task(runner.aclose(grace=0))
    with pytest.raises(percore.RunnerClosed):
        await task
    channel = worker_of(runner).channel
    await until(lambda: channel.has_read())  # the worker has read that it is to begin nothing more
    gate.open()
    await closing
    assert log.rest() == []


async def test_closing_lets_batches_finish(make: MakeRunner, sixteen: None, log: Log, gate: Gate) -> None:
    all_pulled = asyncio.Event()

    def places() -> Iterator[int]:
        yield from range(COUNT)
        all_pulled.set()

    runner = make(threads=1)
    await runner.start()
    task = await _started(runner, runner.map(partial(jobs.wait_at, log.path, gate.path, 20), places()))
    await log.take(21)
    await all_pulled.wait()  # a map that has more to pull ends with RunnerClosed
    closing = asyncio.create_task(runner.aclose())
    await asyncio.sleep(0)
    gate.open()
    assert await task == list(range(COUNT))
    await closing


# Recall


@pytest.mark.parametrize("pool", [(2, 1), (1, 2)])
@SHAPES
async def test_what_is_behind_a_heavy_item_finishes_elsewhere(
    make: MakeRunner, sixteen: None, log: Log, gate: Gate, shape: str, pool: tuple[int, int]
) -> None:
    workers, threads = pool
    async with make(workers, threads=threads) as runner:
        results = aiter(_map(runner, shape, jobs.wait_at, (log.path, gate.path, 20), ordered=False))
        async with _all_waiting(runner):
            first = asyncio.ensure_future(anext(results))
        # The gate is shut: all of these were taken from behind it.
        seen = {await first, *[await anext(results) for _ in range(COUNT - 2)]}
        assert seen == set(range(COUNT)) - {20}
        gate.open()
        assert await anext(results) == 20
        with pytest.raises(StopAsyncIteration):
            await anext(results)
    assert sorted(map(int, log.rest())) == list(range(COUNT))


# Deaths


def _runs(log: Log) -> Counter[int]:
    return Counter(map(int, log.rest()))


def _check_death(results: list[Any], runs: Counter[int], at: int) -> None:
    """Items of the batch that had begun have died or were done, and ran once; all others were done, and ran once."""
    begun = range(at - at % BATCH, at + 1)
    died = [place for place, result in enumerate(results) if isinstance(result, percore.WorkerDied)]
    assert at in died
    assert set(died) <= set(begun)
    assert [result for place, result in enumerate(results) if place not in died] == [p for p in range(COUNT) if p not in died]
    assert runs == Counter(range(COUNT))


@SHAPES
@pytest.mark.parametrize("at", [0, 20, 31, COUNT - 1])
@in_processes
async def test_a_death_in_a_batch_costs_what_had_begun(make_real: MakeRunner, sixteen: None, log: Log, shape: str, at: int) -> None:
    async with make_real(threads=1) as runner:
        task = await _started(runner, _map(runner, shape, jobs.die_at, (log.path, at), return_exceptions=True))
        results = await task
        _check_death(results, _runs(log), at)
        error = results[at]
        assert (error.call, error.started, error.attempts, error.exitcode) == ("die_at", True, 1, 3)
        died = sum(isinstance(result, percore.WorkerDied) for result in results)
        assert (runner.statistics().done, runner.statistics().failed) == (COUNT, died)
        assert runner.statistics().queued == 0


@in_processes
async def test_a_death_in_a_batch_of_two_workers(make_real: MakeRunner, sixteen: None, log: Log) -> None:
    async with make_real(2, threads=2) as runner:
        task = await _started(runner, _map(runner, "bare", jobs.die_at, (log.path, 20), return_exceptions=True))
        results = await task
        runs = _runs(log)
        # Two threads of the worker had a batch each; the other may have died between the mark of an item and its word.
        died = {place for place, result in enumerate(results) if isinstance(result, percore.WorkerDied)}
        assert 20 in died
        assert [result for place, result in enumerate(results) if place not in died] == [p for p in range(COUNT) if p not in died]
        assert all(runs[place] == 1 or (place in died and not runs[place]) for place in range(COUNT))


@in_processes
async def test_a_death_in_a_batch_raises(make_real: MakeRunner, sixteen: None, log: Log) -> None:
    async with make_real(threads=1) as runner:
        with pytest.raises(percore.WorkerDied, match="die_at"):
            await runner.map(partial(jobs.die_at, log.path, 20), range(COUNT))
        assert await runner.map(jobs.echo, range(COUNT)) == list(range(COUNT))


@in_processes
async def test_a_death_cancels_what_is_behind_it(make_real: MakeRunner, sixteen: None, log: Log) -> None:
    async with make_real(threads=1) as runner:
        stream = aiter(runner.map(partial(jobs.die_at, log.path, 20), range(COUNT)))
        async with _all_waiting(runner):
            first = asyncio.ensure_future(anext(stream))
        await until(lambda: runner.statistics().failed)
        assert await runner.run(jobs.echo, 1) == 1
        assert max(map(int, log.rest())) == 20
        assert await first == 0
        with pytest.raises(percore.WorkerDied):
            async for _ in stream:
                pass


@in_processes
async def test_a_stream_over_a_death_in_a_batch(make_real: MakeRunner, sixteen: None, log: Log) -> None:
    async with make_real(threads=1) as runner:
        stream = runner.map_items(partial(jobs.die_at, log.path, 20), range(COUNT), return_exceptions=True)
        pairs = [pair async for pair in stream]
        assert [place for place, _ in pairs] == list(range(COUNT))
        _check_death_of_some([result for _, result in pairs], 20)
        assert _runs(log) == Counter(range(COUNT))


def _check_death_of_some(results: list[Any], at: int) -> None:
    assert isinstance(results[at], percore.WorkerDied)
    assert all(isinstance(result, percore.WorkerDied) or result == place for place, result in enumerate(results))


async def test_a_killed_worker_with_a_batch_that_waits(make: MakeRunner, sixteen: None, log: Log, gate: Gate) -> None:
    async with make(threads=1) as runner:
        blocking = runner.submit(jobs.wait, log.path, gate.path, "first")
        assert await log.next() == "first"
        task = await _started(runner, runner.map(partial(jobs.tell, log.path), range(COUNT)))
        await runner.run(jobs.aecho)  # batches are queued ahead there
        worker = worker_of(runner)
        worker.kill()
        assert await task == list(range(COUNT))
        with pytest.raises(percore.WorkerDied):
            await blocking
        gate.open()
        await threads_ended(worker)
        assert _runs(log) == Counter(range(COUNT))


# Drains


@pytest.mark.parametrize("workers", [1, 2])
@SHAPES
@in_processes
async def test_sigterm_in_the_middle_of_a_batch_loses_nothing(
    make: MakeRunner, sixteen: None, log: Log, gate: Gate, workers: int, shape: str
) -> None:
    async with make(workers, threads=1) as runner:
        task = await _started(runner, _map(runner, shape, jobs.wait_at, (log.path, gate.path, 20)))
        said = []
        while "20" not in said:
            said.append(await log.next())
        for index in range(workers):
            worker_of(runner, index).kill(signal.SIGTERM)
        while len(said) < COUNT:  # the others run on the replacement, while this one is held
            said.append(await log.next())
        assert not task.done()
        gate.open()
        assert await task == list(range(COUNT))
        assert Counter(map(int, said)) == Counter(range(COUNT))
        assert runner.statistics().failed == 0


async def test_sigterm_while_awaitables_of_a_batch_run(make: MakeRunner, sixteen: None, log: Log, gate: Gate) -> None:
    async with make(threads=1) as runner:
        task = await _started(runner, runner.map(partial(jobs.later_at, log.path, gate.path, 20), range(COUNT)))
        await log.take(COUNT)
        worker_of(runner).kill(signal.SIGTERM)
        while (await runner.run(jobs.awhere)).generation == 1:  # it has not heard of it yet
            pass
        gate.open()
        assert await task == list(range(COUNT))
        assert runner.statistics().failed == 0


async def test_rows_of_large_ints_are_weighed_as_what_they_are(make: MakeRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Cost, "batch", lambda *_: 8192)  # as of a function that takes no time
    rows = [(2**255, *[number - 2**255 for number in range(31)])] * 2000
    async with make() as runner:
        assert await runner.starmap(max, rows, window=2000) == [2**255] * 2000
        assert await runner.run(len, "and on it goes") == 14
