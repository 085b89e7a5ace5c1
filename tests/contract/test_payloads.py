"""Bytes of every size, in both directions, also when everything is full."""

import asyncio
import functools
import resource
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

import percore
from percore._transport import links
from percore._transport.frames import RING_SIZE
from percore._transport.slots import INLINE_LIMIT
from tests import jobs
from tests.contract.conftest import MakeRunner
from tests.counts import times
from tests.fakes import FakeRunner
from tests.internals import slots_at_all

pytestmark = [
    pytest.mark.differs("fallbacks", because="slots lie in files instead of memfds, and bells are pipes", on="fake"),
    pytest.mark.differs("nodes", because="payloads pass the socket in parts, and wait for room in the far half's store"),
]
in_processes = pytest.mark.differs("fallbacks", because="each process maps the files, and has its end of a bell, for itself")

AROUND = [4096, INLINE_LIMIT, RING_SIZE // 2, RING_SIZE]
SIZES = [0, 1, 100, *(edge + offset for edge in AROUND for offset in (-40, -1, 0, 1)), 1 << 20, 5_000_000]

FEW_SLOTS = {"max_message": 1 << 36}
"""The larger a slot, the fewer there are: 16 down, 4 up."""


@pytest.mark.parametrize("fn", [jobs.echo, jobs.aecho])
@in_processes
async def test_r1_every_size_there_and_back(make: MakeRunner, fn: Callable[..., Any]) -> None:
    async with make() as runner:
        for size in SIZES:
            data = jobs.pattern(size)
            assert await runner.run(fn, data) == data


@pytest.mark.parametrize("fn", [jobs.length, jobs.alength])
async def test_r1_every_size_there(make: MakeRunner, fn: Callable[..., Any]) -> None:
    async with make() as runner:
        assert await runner.map(fn, map(jobs.pattern, SIZES)) == SIZES


@pytest.mark.parametrize("fn", [jobs.pattern, jobs.apattern])
async def test_r1_every_size_back(make: MakeRunner, fn: Callable[..., Any]) -> None:
    async with make() as runner:
        assert await runner.map(fn, SIZES) == [jobs.pattern(size) for size in SIZES]


async def test_large_things_of_many_parts(make: MakeRunner) -> None:
    things = [
        [f"item {i}" for i in range(100_000)],
        {i: (str(i), float(i)) for i in range(50_000)},
        "ü" * 2_000_000,
        bytearray(b"ab") * 500_000,
        [jobs.pattern(200_000)] * 3,
    ]
    async with make() as runner:
        for thing in things:
            assert await runner.run(jobs.aecho, thing) == thing


@pytest.mark.long
@pytest.mark.parametrize("fn", [jobs.echo, jobs.aecho])
@in_processes
@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_r2_both_directions_full_of_megabytes(make: MakeRunner, fn: Callable[..., Any]) -> None:
    base = jobs.pattern(1 << 20)
    async with make(threads=2, **FEW_SLOTS) as runner:
        futures = [runner.submit(fn, b"%04d" % i + base) for i in range(times(60, 200))]
        for i, future in enumerate(futures):
            assert await future == b"%04d" % i + base


@in_processes
async def test_r2_both_directions_full_of_frames(make: MakeRunner) -> None:
    base = jobs.pattern(50_000)
    async with make() as runner:
        futures = [runner.submit(jobs.aecho, b"%04d" % i + base) for i in range(400)]
        for i, future in enumerate(futures):
            assert await future == b"%04d" % i + base


@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_small_calls_pass_beside_waiting_large_ones(make: MakeRunner) -> None:
    data = jobs.pattern(1 << 20)
    async with make(**FEW_SLOTS) as runner:
        large = [runner.submit(jobs.aecho, data) for _ in range(60)]
        small = [runner.submit(jobs.aecho, i) for i in range(300)]
        assert await asyncio.gather(*small) == list(range(300))
        assert all(result == data for result in await asyncio.gather(*large))


@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_c1_cancelled_large_calls_give_their_slots_back(make: MakeRunner) -> None:
    data = jobs.pattern(1 << 20)
    async with make(concurrency=2, **FEW_SLOTS) as runner:
        for _ in range(3):
            futures = [runner.submit(jobs.aecho, data) for _ in range(30)]
            await futures[0]
            for future in futures:
                future.cancel()
            await asyncio.wait(futures)
        assert await runner.map(jobs.alength, [data] * 40) == [len(data)] * 40


@pytest.mark.long
@in_processes
async def test_r1_frames_end_at_every_place_of_the_ring(make: MakeRunner) -> None:
    """In both directions: however a frame and its header are split where the ring begins anew, what arrives is what was sent."""
    step = RING_SIZE // 5
    async with make() as runner:
        for offset in range(0, times(64, 64 * 8), 8):
            things = [jobs.pattern(step - 64 + offset % 64 + place) for place in range(8)]
            assert await asyncio.gather(*(runner.run(jobs.aecho, thing) for thing in things)) == things


@pytest.mark.long
@pytest.mark.timeout(200)
@pytest.mark.parametrize("slots", [1, 2])
@in_processes
async def test_r2_echoes_of_a_megabyte_through_hardly_any_slots(
    make_real: MakeRunner, monkeypatch: pytest.MonkeyPatch, slots: int
) -> None:
    """Both directions are full all the time: each side has to read while it waits to write."""
    size = 2 << 20
    limits = SimpleNamespace(
        getrlimit=lambda _: (4 * size * slots, 4 * size * slots),
        RLIMIT_AS=resource.RLIMIT_AS,
        RLIM_INFINITY=resource.RLIM_INFINITY,
    )
    monkeypatch.setattr(links, "resource", limits)  # there alone: under other limits there is another fork server
    base = jobs.pattern(1 << 20)
    async with make_real(threads=2, max_message=size) as runner:
        assert slots_at_all(runner) == slots
        for fn in (jobs.echo, jobs.aecho):
            count = 0
            async for result in runner.map(fn, (b"%06d" % i + base for i in range(times(20, 1250))), window=16):
                assert result == b"%06d" % count + base
                count += 1
            assert count == times(20, 1250)


# Too large


@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_r4_arguments_above_max_message_fail_their_call_alone(make: MakeRunner) -> None:
    async with make(max_message=1 << 20) as runner:
        future = runner.submit(jobs.length, bytes(2 << 20))
        with pytest.raises(percore.PayloadTooLarge, match="max_message=1048576") as caught:
            await future
        assert caught.value.limit == 1 << 20
        assert await runner.run(jobs.length, bytes(900_000)) == 900_000


@pytest.mark.parametrize("fn", [jobs.pattern, jobs.apattern])
@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_r4_a_result_above_max_message_fails_its_call_alone(make: MakeRunner, fn: Callable[..., Any]) -> None:
    async with make(max_message=1 << 20) as runner:
        with pytest.raises(percore.PayloadTooLarge) as caught:
            await runner.run(fn, 2 << 20)
        assert caught.value.limit == 1 << 20
        assert len(await runner.run(fn, 900_000)) == 900_000
        assert runner.statistics().restarts == 0


@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_the_limit_holds_below_the_size_of_a_frame(make: MakeRunner) -> None:
    async with make(max_message=1024) as runner:
        for size in (5000, 50_000, 500_000):
            with pytest.raises(percore.PayloadTooLarge):
                await runner.run(jobs.length, bytes(size))
            with pytest.raises(percore.PayloadTooLarge):
                await runner.run(jobs.pattern, size)
        assert await runner.run(jobs.aecho, (1, 2)) == (1, 2)


@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_an_exception_above_max_message_tells_so(make: MakeRunner) -> None:
    async with make(max_message=1 << 20) as runner:
        with pytest.raises(percore.PayloadTooLarge):
            await runner.run(jobs.fail_large, 2 << 20)
        assert await runner.run(jobs.aecho, 1) == 1


@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_a_function_above_max_message_fails_its_call_alone(make: MakeRunner) -> None:
    data = bytes(2 << 20)
    async with make(max_message=1 << 20) as runner:
        with pytest.raises(percore.PayloadTooLarge):
            await runner.run(lambda: len(data))
        with pytest.raises(percore.PayloadTooLarge):
            await runner.map(lambda value: len(data) + value, [1, 2])
        assert await runner.run(jobs.aecho, 1) == 1


@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_a_large_function_travels_with_run_and_with_map(make: MakeRunner) -> None:
    data = jobs.pattern(1 << 20)
    async with make(2, **FEW_SLOTS) as runner:
        assert await runner.run(lambda: len(data)) == len(data)
        for _ in range(20):
            assert await runner.map(lambda value: len(data) + value, range(3)) == [len(data) + i for i in range(3)]


@pytest.mark.parametrize("slots", [1, 2])
async def test_r2_with_hardly_any_slots(monkeypatch: pytest.MonkeyPatch, slots: int) -> None:
    size = 1 << 20
    monkeypatch.setattr(resource, "getrlimit", lambda _: (4 * size * slots, 4 * size * slots))
    data = jobs.pattern(300_000)
    async with FakeRunner(1, concurrency=1, max_message=size) as runner, asyncio.timeout(20):
        assert slots_at_all(runner) == slots
        # Calls that wait hold slots, and the one ahead of them needs one.
        assert await asyncio.gather(*(runner.submit(jobs.alength, data) for _ in range(8))) == [len(data)] * 8
        # A held function holds one, and its calls need one.
        partials = [functools.partial(jobs.aadd, data) for _ in range(2)]
        maps = [runner.map(fn, [data] * 3) for fn in partials]
        assert await asyncio.gather(*(mapped.collect() for mapped in maps)) == [[data + data] * 3] * 2


async def test_a_future_lets_go_of_its_arguments(make: MakeRunner) -> None:
    async with make() as runner:
        future: Any = runner.submit(jobs.alength, jobs.pattern(50_000))
        await future
        assert future.body == ()
