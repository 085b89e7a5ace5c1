"""Nested maps and streams, with a family that the test plays: what is closed ends, and whoever waits for it hears of that."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any, cast

import pytest

from percore._common.inputs import Inputs
from percore._protocol.messages import ANSWER_VALUE, CLOSE
from percore._worker.nested_maps import MapSource, MapSpec, NestedMap
from percore._worker.nested_streams import NestedStream, StreamSource
from tests.waiting import until

EAGER: Any = getattr(asyncio, "eager_task_factory", None)


class Kin:
    """A family. It asks nobody, so no answer ever comes."""

    is_over = False

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.dropped: list[Any] = []
        self.enders: dict[Callable[[], object], None] = {}
        self.sent: list[int] = []
        channel = SimpleNamespace(loop=asyncio.get_running_loop(), send=None, keep=None, flush=lambda: None)
        channel.send_from_thread = lambda op, _number, _body: self.sent.append(op)
        self.families = SimpleNamespace(channel=channel, unpack=lambda child: child.take_answer())

    def child(self, kind: Any, tell: Any) -> Any:
        return kind(self, 1, tell)

    def ask(self, _request: Any, child: Any, _send: Any = None) -> None:
        self.asked.append(child)

    def drop_soon(self, child: Any) -> None:
        self.dropped.append(child)


def map_of(kin: Kin, inputs: Any) -> NestedMap[Any]:
    spec = MapSpec(True, None, None, False, False, False, cast(Any, lambda _args, _key: SimpleNamespace(pickle=b"")))
    return NestedMap(MapSource(cast(Any, kin), None, Inputs((inputs,)), spec))


async def nothing() -> AsyncIterator[int]:
    for number in range(0):
        yield number


@pytest.mark.skipif(EAGER is None, reason="Python 3.11 has no eager tasks")
async def test_a_map_over_an_async_input_ends_in_a_loop_with_eager_tasks() -> None:
    loop, kin = asyncio.get_running_loop(), Kin()
    loop.set_task_factory(EAGER)
    try:
        async with asyncio.timeout(10):
            assert await map_of(kin, nothing()) == []
    finally:
        loop.set_task_factory(None)
    assert not kin.enders


@pytest.mark.parametrize("leaves", [False, True], ids=["read", "left"])
async def test_a_map_ends_and_closes_its_input_though_its_feeder_is_cancelled_before_its_first_step(leaves: bool) -> None:
    """As by another call that cancels all tasks, between the step that makes the feeder and the first one of the feeder."""
    kin, closed = Kin(), asyncio.Event()

    async def numbers() -> AsyncIterator[int]:
        try:
            yield 1
            yield 2
        finally:
            await asyncio.sleep(0)
            closed.set()

    source = numbers()
    await anext(source)
    walk = map_of(kin, source)
    taking = asyncio.ensure_future(anext(walk))
    asyncio.get_running_loop().call_soon(lambda: feeder_of(walk).cancel())  # after the step of `taking`
    await asyncio.sleep(0)
    async with asyncio.timeout(10):
        if leaves:
            await walk.aclose()
            assert closed.is_set()
        if leaves:
            with pytest.raises(StopAsyncIteration):
                await taking
        else:
            with pytest.raises(RuntimeError, match="the input raised CancelledError"):
                await taking
        await closed.wait()
        await asyncio.wait([feeder_of(walk)])
    assert not kin.asked
    assert not kin.enders


def feeder_of(walk: NestedMap[Any]) -> asyncio.Task[None]:
    feeder = cast(MapSource, walk._source).feeder
    assert feeder is not None
    return feeder


def fails_when_closed() -> Iterator[int]:
    try:
        yield from count()
    finally:
        raise ValueError("closed")


async def test_who_waits_for_a_map_hears_of_its_end_although_its_input_fails_as_it_is_closed() -> None:
    kin = Kin()
    walk = map_of(kin, fails_when_closed())
    taking = asyncio.ensure_future(anext(walk))
    await until(lambda: bool(kin.asked))
    with pytest.raises(ValueError, match="closed"):
        await walk.aclose()
    async with asyncio.timeout(10):
        with pytest.raises(StopAsyncIteration):
            await taking
    assert kin.dropped == kin.asked


async def closers_of_a_stream(kin: Kin) -> tuple[Any, list[asyncio.Task[None]]]:
    """A nested stream that was begun, and two tasks that wait for its end."""
    stream: NestedStream[Any] = NestedStream(StreamSource(cast(Any, kin), None, 4, cast(Any, lambda: None)))
    taking = asyncio.ensure_future(anext(stream))
    await until(lambda: bool(kin.asked))
    closers = [asyncio.ensure_future(stream.aclose()) for _ in range(2)]
    with pytest.raises(StopAsyncIteration):
        await taking
    assert kin.sent == [CLOSE]
    return kin.asked[0], closers


async def test_a_cancelled_closer_of_a_stream_leaves_the_other_one_waiting_for_the_end() -> None:
    kin = Kin()
    child, (one, other) = await closers_of_a_stream(kin)
    one.cancel()
    await asyncio.wait([one])
    assert not other.done()
    assert not kin.dropped
    child.answer = (ANSWER_VALUE, None)
    child.tell(child)
    async with asyncio.timeout(10):
        await other


async def test_a_stream_is_dropped_when_all_of_its_closers_are_cancelled() -> None:
    kin = Kin()
    child, closers = await closers_of_a_stream(kin)
    for closer in closers:
        closer.cancel()
    await asyncio.wait(closers)
    assert kin.dropped == [child]
