"""Streams: items in order, as fast as they are taken, beside everything else that a runner does."""

import asyncio
import functools
from collections.abc import AsyncIterator
from typing import Any

import pytest

import percore
from tests import jobs
from tests.contract import stream_jobs as streams
from tests.contract.conftest import MakeRunner
from tests.contract.pipes import Gate, Log
from tests.contract.test_nested_ends import check_empty
from tests.internals import is_leased, slots_used

pytestmark = pytest.mark.differs("nodes", because="items pass a socket, and are copied on their way")

FEW_SLOTS = {"max_message": 1 << 36}
"""Four slots for items and results."""


async def all_of(stream: AsyncIterator[Any]) -> list[Any]:
    return [item async for item in stream]


async def take(stream: percore.Stream[Any], count: int) -> list[Any]:
    return [await anext(stream) for _ in range(count)]


# Items


@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_items_come_in_order_however_they_travel(make: MakeRunner, subtests: pytest.Subtests) -> None:
    expected = [streams.item(number) for number in range(60)]
    async with make() as runner:
        for fn in (streams.items, streams.aitems):
            for prefetch in (1, 2, 3, 16, 1000):
                with subtests.test(fn=fn.__name__, prefetch=prefetch):
                    stream = runner.options(prefetch=prefetch).stream(fn, 60)
                    assert await all_of(stream) == expected
        assert not slots_used(runner)
        assert not is_leased(runner)
        statistics = runner.statistics()
        assert (statistics.done, statistics.failed, statistics.running) == (10, 0, 0)


async def test_what_can_be_streamed(make: MakeRunner, subtests: pytest.Subtests) -> None:
    def local(count: int) -> Any:
        yield from range(2, 2 + count)

    functions: list[Any] = [
        functools.partial(streams.numbers, start=2),
        functools.partial(functools.partial(streams.anumbers), start=2),
        streams.Range(2),
        streams.Range(2).anumbers,
        functools.partial(streams.Range(2)),
        local,
    ]
    async with make() as runner:
        for fn in functions:
            with subtests.test(fn=str(fn)):
                assert await all_of(runner.stream(fn, 3)) == [2, 3, 4]
        for _ in range(2):
            assert await all_of(runner.stream(streams.Range.first, 3)) == [0, 1, 2]
        assert await all_of(runner.stream(streams.numbers, 0)) == []
        assert await all_of(runner.stream(streams.anumbers, count=2, start=5)) == [5, 6]


async def test_what_cannot_be_streamed(make: MakeRunner) -> None:
    async with make() as runner:
        stream: Any = runner.stream  # any argument is accepted
        one: Any
        for one in (jobs.echo, jobs.aecho, print, functools.partial(jobs.add, 1)):
            with pytest.raises(TypeError, match=r"is not a generator function, .*runner\.run\(.*runner\.map\("):
                stream(one, 1)
        with pytest.raises(TypeError, match="expected a generator function, not 5"):
            stream(5, 1)
        for made in (streams.numbers(3), streams.anumbers(3), jobs.aecho()):
            with pytest.raises(TypeError, match=r"runner\.stream\((a?numbers|aecho), \.\.\.\), not"):
                stream(made)
        # Other verbs name `stream`, also when they have met the function as one.
        for one in (streams.numbers, streams.anumbers, streams.Range.first):
            assert await all_of(runner.stream(one, 1)) == [0]
            with pytest.raises(TypeError, match=r"is a generator function, .*runner\.stream\("):
                _ = runner.submit(one, 1)
            with pytest.raises(TypeError, match=r"runner\.stream\("):
                await runner.run(one, 1)
            with pytest.raises(TypeError, match=r"runner\.stream\("):
                _ = runner.map(one, [1])
        for options in ({"retries": 1}, {"timeout": 1.0}):
            with pytest.raises(TypeError, match="stream"):
                runner.options(**options).stream(streams.numbers, 1)
    with pytest.raises(percore.RunnerClosed):
        runner.stream(streams.numbers, 1)


@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_arrays_are_views_of_shared_memory(make: MakeRunner) -> None:
    pytest.importorskip("numpy")
    length = 50_000
    async with make(**FEW_SLOTS) as runner:
        kept = []
        number = 0
        async for array in runner.stream(streams.arrays, 40, length):
            assert array.shape == (length,)
            assert array[0] == array[-1] == number
            if number % 4 == 0:  # more than there are slots
                array[:] = -1
                kept.append(array)
            number += 1
        assert number == 40
        assert all(array[0] == -1 for array in kept)
        assert await runner.run(jobs.pattern, 300_000) == jobs.pattern(300_000)
        del array
        kept.clear()


@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_pickling_happens_when_an_item_is_yielded(make: MakeRunner) -> None:
    pytest.importorskip("numpy")
    async with make() as runner:
        assert [array[0] for array in await all_of(runner.stream(streams.arrays, 5, 10))] == [0, 1, 2, 3, 4]


# Back-pressure


async def test_the_worker_is_never_more_than_prefetch_ahead(make: MakeRunner, log: Log) -> None:
    async with make() as runner:
        for fn in (streams.told, streams.atold):
            stream = runner.options(prefetch=4).stream(fn, log.path)
            assert log.rest() == []
            taken = produced = 0
            for more in (1, 1, 1, 4, 1):
                assert await take(stream, more) == list(range(taken, taken + more))
                taken += more
                # A grant may wait until half of four items are taken, so the last of them may be made later.
                least = taken + 3
                lines = await log.take(max(0, least - produced))
                await runner.run(jobs.aecho)
                lines += log.rest()
                assert lines == [str(number) for number in range(produced, produced + len(lines))]
                produced += len(lines)
                assert produced in {least, taken + 4}
            await stream.aclose()
            assert await log.take(2) == ["GeneratorExit", "closed"]


async def test_with_a_prefetch_of_one_an_item_is_made_while_the_last_one_is_used(make: MakeRunner, log: Log) -> None:
    async with make() as runner, runner.options(prefetch=1).stream(streams.told, log.path) as stream:
        for number in range(3):
            assert await anext(stream) == number
            assert await log.take(1 if number else 2) == [str(n) for n in ([number + 1] if number else [0, 1])]


async def test_an_item_is_sent_although_the_next_one_takes_long(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make() as runner:
        for fn in (streams.agated, streams.gated):
            stream = runner.stream(fn, log.path, gate.path, 5)
            assert await take(stream, 5) == [0, 1, 2, 3, 4]
            assert await log.next() == "waits"
            if fn is streams.gated:
                gate.open()
            await stream.aclose()
            assert await log.take(2 if fn is streams.agated else 1) == ["CancelledError", "closed"][fn is streams.gated :]


@pytest.mark.timeout(120)
@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_slow_consumers_hold_up_nothing_but_their_streams(make: MakeRunner) -> None:
    """64 × 16 large items are ready, and there are four slots."""
    async with make(concurrency=80, threads=4, **FEW_SLOTS) as runner:
        slow = [runner.stream(streams.alarge, 20, 150_000) for _ in range(62)]
        slow += [runner.stream(streams.large, 20, 150_000) for _ in range(2)]
        for stream in slow:
            assert await anext(stream) == bytes(150_000)
        assert await runner.run(jobs.pattern, 300_000) == jobs.pattern(300_000)
        assert await runner.run(jobs.aecho, 1) == 1
        assert sum(await runner.map(jobs.echo, range(1000))) == 499_500
        assert len(await all_of(runner.stream(streams.anumbers, 1000))) == 1000
        rest = await asyncio.gather(*map(all_of, slow))
        assert all(items == [bytes([number]) * 150_000 for number in range(1, 20)] for items in rest)


# Beside other calls


async def test_maps_and_streams_feed_each_other(make: MakeRunner) -> None:
    async with make(2) as runner:
        expected = [2 * number for number in range(500)]
        for fn in (streams.numbers, streams.anumbers):
            assert await runner.map(jobs.add, runner.stream(fn, 500), range(500)) == expected
            async with runner.map(jobs.aadd, runner.stream(fn, 10**9), range(10**9)) as results:
                assert await anext(results) == 0
        numbers = await runner.map(jobs.add, range(10), [1] * 10)
        assert await all_of(runner.stream(streams.total, numbers)) == [1, 3, 6, 10, 15, 21, 28, 36, 45, 55]
        while runner.statistics().running:  # generators that a map has left are being closed
            await runner.run(jobs.aecho)


async def test_streams_take_the_places_of_calls_while_they_run(make: MakeRunner, log: Log, gate: Gate, other_gate: Gate) -> None:
    async with make(concurrency=1, threads=1) as runner:
        for fn, call, shut in ((streams.agated, jobs.aecho, gate), (streams.gated, jobs.echo, other_gate)):
            stream = runner.stream(fn, log.path, shut.path, 1)
            assert await anext(stream) == 0
            assert await log.next() == "waits"  # for the gate: it runs
            waiting: asyncio.Future[Any] = runner.submit(call, 1)
            second = runner.stream(streams.anumbers if fn is streams.agated else streams.numbers, 1)
            first_of_second = asyncio.ensure_future(anext(second))
            await runner.run(jobs.echo if fn is streams.agated else jobs.aecho)
            statistics = runner.statistics()
            assert (statistics.running, statistics.queued) == (1, 2)
            assert not waiting.done()
            shut.open()
            assert await all_of(stream) == [1]
            assert await waiting == 1
            assert await first_of_second == 0
            assert await all_of(second) == []
            assert await log.next() == "closed"


@pytest.mark.parametrize("prefetch", [1, 16])
async def test_a_generator_that_waits_for_its_consumer_holds_no_place(make: MakeRunner, log: Log, prefetch: int) -> None:
    """Also if the consumer waits for a call that needs the place, or for another such stream."""
    async with asyncio.timeout(40), make(concurrency=1, threads=1) as runner:
        view = runner.options(prefetch=prefetch)
        for fn, call in ((streams.atold, jobs.aecho), (streams.told, jobs.echo)):
            outer, inner = view.stream(fn, log.path, 20), view.stream(fn, log.path, 20)
            async for number in outer:
                assert await anext(inner) == number
                assert await runner.run(call, number) == number
            assert await all_of(inner) == []
            idle = [view.stream(fn, log.path) for _ in range(5)]
            assert [await anext(stream) for stream in idle] == [0] * 5
            assert await runner.run(call, 1) == 1
            assert runner.statistics().running == 5
            await asyncio.gather(*(stream.aclose() for stream in idle))
        check_empty(runner)


async def test_a_generator_that_waited_takes_its_place_again(make: MakeRunner, log: Log, gate: Gate, other_gate: Gate) -> None:
    async with make(concurrency=1, threads=1) as runner:
        for fn, call, shut in ((streams.anumbers, jobs.await_, gate), (streams.numbers, jobs.wait, other_gate)):
            stream = runner.options(prefetch=1).stream(fn, 3)
            assert await anext(stream) == 0
            running = runner.submit(call, log.path, shut.path, 7)
            assert await log.next()
            assert await anext(stream) == 1
            rest = asyncio.ensure_future(all_of(stream))
            later = runner.submit(jobs.aecho if fn is streams.anumbers else jobs.echo, 8)
            if fn is streams.numbers:  # its thread goes on when the other one has ended
                assert not rest.done()
            shut.open()
            assert await rest == [2]
            assert (await running, await later) == (7, 8)
        check_empty(runner)


async def test_a_stream_that_waits_for_its_consumer_is_closed_or_dies(make: MakeRunner, log: Log) -> None:
    for fn, call in ((streams.atold, jobs.aecho), (streams.told, jobs.echo)):
        async with make(concurrency=1, threads=1) as runner:
            stream = runner.options(prefetch=1).stream(fn, log.path)
            await anext(stream)
            assert await runner.run(call, 1) == 1  # it has stepped aside
            await stream.aclose()
            assert (await all_up_to(log, "closed"))[-2:] == ["GeneratorExit", "closed"]
            stream = runner.options(prefetch=1).stream(fn, log.path)
            await anext(stream)
            assert await runner.run(call, 1) == 1
            await runner.aclose(grace=0)
            with pytest.raises(percore.RunnerClosed):
                await all_of(stream)
            assert (await all_up_to(log, "closed"))[-2:] == ["GeneratorExit", "closed"]
            check_empty(runner)


async def all_up_to(log: Log, last: str) -> list[str]:
    """The lines up to this one. A generator may be closed before it has taken its place again for its next item, or after."""
    lines = [await log.next()]
    while lines[-1] != last:
        lines.append(await log.next())
    return lines


async def test_a_stream_that_waits_for_a_place_never_begins_once_it_is_closed(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(concurrency=1, threads=1) as runner:
        calls = [runner.submit(block, log.path, gate.path, 1) for block in (jobs.await_, jobs.wait)]
        await log.take(2)
        for fn in (streams.atold, streams.told):
            stream = runner.stream(fn, log.path)
            first = asyncio.ensure_future(anext(stream))
            await runner.broadcast(jobs.aecho)
            await stream.aclose()
            with pytest.raises(StopAsyncIteration):
                await first
        assert runner.statistics().running == 2
        gate.open()
        assert await asyncio.gather(*calls) == [1, 1]
        assert log.rest() == []


async def test_a_stream_holds_its_key(make: MakeRunner, log: Log) -> None:
    async with make(2, per_key=1) as runner:
        for fn in (streams.aplaces, streams.places):
            view = runner.options(key="key", prefetch=2)
            stream = view.stream(fn, 100)
            place = await anext(stream)
            waiting: asyncio.Future[Any] = view.submit(jobs.where)
            await runner.broadcast(jobs.aecho)
            assert not waiting.done()
            await stream.aclose()
            assert (await waiting).index == place.index


async def test_context_variables_are_those_of_the_call_of_stream(make: MakeRunner) -> None:
    async with make(contextvars=[streams.USER]) as runner:
        for fn in (streams.users, streams.ausers):
            assert await all_of(runner.stream(fn, 2)) == ["nobody", "nobody"]
            token = streams.USER.set("me")
            stream = runner.stream(fn, 2)
            streams.USER.reset(token)
            assert await all_of(stream) == ["me", "me"]


async def test_a_stream_counts_as_one_pending_call(make: MakeRunner) -> None:
    async with make(max_pending=1) as runner:
        stream = runner.stream(streams.anumbers, 100)
        assert await anext(stream) == 0
        with pytest.raises(percore.RunnerFull):
            _ = runner.submit(jobs.aecho)
        second = runner.stream(streams.anumbers, 3)
        items = asyncio.ensure_future(all_of(second))
        third = asyncio.ensure_future(anext(runner.stream(streams.anumbers, 3)))
        await asyncio.sleep(0)
        third.cancel()
        await stream.aclose()
        assert await items == [0, 1, 2]
        assert await runner.run(jobs.aecho, 1) == 1


async def test_statistics_count_streams_as_calls(make: MakeRunner, log: Log) -> None:
    async with make() as runner:
        stream = runner.stream(streams.anumbers, 100)
        await anext(stream)
        assert runner.statistics().running == 1
        await stream.aclose()
        with pytest.raises(ValueError, match="wrong"):
            await all_of(runner.stream(streams.failing, 2, functools.partial(ValueError, "wrong")))
        statistics = runner.statistics()
        assert (statistics.running, statistics.done, statistics.failed, statistics.retried) == (0, 2, 1, 0)
