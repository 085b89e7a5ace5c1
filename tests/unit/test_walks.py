"""Nested maps and streams, with a family that the test plays: what is closed ends, and whoever waits for it hears of that."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from itertools import count
from types import SimpleNamespace
from typing import Any, cast

import pytest

from percore._common.inputs import Inputs
from percore._worker.nested_maps import MapSource, MapSpec, NestedMap
from tests.waiting import until

EAGER: Any = getattr(asyncio, "eager_task_factory", None)


class Kin:
    """A family. It asks nobody, so no answer ever comes."""

    is_over = False

    def __init__(self) -> None:
        self.asked: list[Any] = []
        self.dropped: list[Any] = []
        self.enders: dict[Callable[[], object], None] = {}
        channel = SimpleNamespace(loop=asyncio.get_running_loop(), send=None, keep=None, flush=lambda: None)
        self.families = SimpleNamespace(channel=channel)

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
