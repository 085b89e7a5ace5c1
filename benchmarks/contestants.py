"""The parts that rows are made of: percore opened for calls and maps, and rounds that time calls, maps and callers."""

from __future__ import annotations

import asyncio
import operator
import os
import time
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

import percore
from benchmarks.calls import same
from benchmarks.figures import quantile

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
    from contextlib import AbstractAsyncContextManager

    from benchmarks.harness import Contestant, Round
    from benchmarks.peers import Call, Function, MapAll, OpenMap
    from benchmarks.results import Sample

T = TypeVar("T")


class WrongResult(Exception):
    """A contestant that returns this fails, however fast it was."""


def check(answer: object, expected: object) -> None:
    if answer != expected:
        raise WrongResult("a call returned the result of another one")


def playing(
    opening: Callable[[], AbstractAsyncContextManager[T]],
    once: Callable[[T], Awaitable[Sample]],
    warm: Callable[[T], Awaitable[object]] | None = None,
) -> Contestant:
    """A contestant: each round is `once` with the opened object, which `warm` uses first."""

    @asynccontextmanager
    async def contestant() -> AsyncIterator[Round]:
        async with opening() as opened:
            if warm is not None:
                await warm(opened)
            yield partial(once, opened)

    return contestant


# percore


def runner(workers: int, **options: Any) -> Callable[[], percore.Runner]:
    return partial(percore.Runner, workers=workers, **options)


@asynccontextmanager
async def percore_call(function: Function = same, **options: Any) -> AsyncIterator[Call]:
    async with percore.Runner(**options) as opened:
        yield partial(opened.run, function)


@asynccontextmanager
async def percore_map(function: Function, window: int | None = None, **options: Any) -> AsyncIterator[MapAll]:
    async with percore.Runner(**options) as opened:
        yield lambda items: opened.map(function, items, window=window).collect()


# In this process


@asynccontextmanager
async def task_call(function: Function) -> AsyncIterator[Call]:
    """A task of this loop."""
    loop = asyncio.get_running_loop()
    yield lambda argument: loop.create_task(function(argument))


@asynccontextmanager
async def plain_loop(function: Function) -> AsyncIterator[MapAll]:
    async def run(items: Sequence[Any]) -> list[Any]:
        return [function(item) for item in items]

    yield run


# One call at a time


async def timed(call: Call, argument: Any, is_same: Callable[[Any, Any], bool] = operator.eq) -> float:
    """The seconds of one call, which returns its argument."""
    start = time.perf_counter()
    answer = await call(argument)
    seconds = time.perf_counter() - start
    if not is_same(answer, argument):
        raise WrongResult("a call returned the result of another one")
    return seconds


# Many callers


async def await_all(callers: Sequence[Call], calls: int, argument: Function = int, answer: Function = int) -> int:
    """Each caller awaits `calls` calls, one after the other; returns the number of calls."""

    async def caller(call: Call) -> None:
        for number in range(calls):
            given = argument(number)
            if await call(given) != answer(given):
                raise WrongResult("a call returned the result of another one")

    await asyncio.gather(*map(caller, callers))
    return len(callers) * calls


async def by_calls(work: Awaitable[int], clock: Callable[[], float] = time.perf_counter) -> float:
    """The seconds of this work, divided by the number of calls that it returns."""
    start = clock()
    calls = await work
    return (clock() - start) / calls


# Workers on other nodes


async def far_calls(call: Call, calls: int, *, quick: bool) -> Sample:
    """The figures of calls to workers that may be on other nodes.

    "a call" has 500 awaiters of so many calls each, and "driver CPU" is this process's CPU time of such a call. The round trip and
    1 MB of bytes there and back are one call at a time, as medians.
    """
    awaiters = 50 if quick else 500
    cpu = time.process_time()
    a_call = await by_calls(await_all([call] * awaiters, calls))
    cpu = (time.process_time() - cpu) / (awaiters * calls)
    trips = [await timed(call, number) for number in range(50 if quick else 500)]
    payload = os.urandom(1_000_000)
    large = [await timed(call, payload) for _ in range(10 if quick else 100)]
    return {
        "a call": a_call,
        "driver CPU": cpu,
        "round trip": quantile(trips, 0.5),
        "1 MB there and back": quantile(large, 0.5),
    }


# Maps


def mapping(open_map: OpenMap, items: Sequence[Any], expected: list[Any] | None = None, warm: Sequence[Any] = ()) -> Contestant:
    """A contestant: the map over these items, whose results are the items unless others are expected. Its metric is "a call"."""
    wanted = list(items) if expected is None else expected

    async def once(run: MapAll) -> Sample:
        return {"a call": await map_seconds(run, items, wanted) / len(items)}

    async def warm_up(run: MapAll) -> None:
        if warm:
            await run(warm)

    return playing(open_map, once, warm_up)


async def map_seconds(run: MapAll, items: Sequence[Any], expected: list[Any]) -> float:
    start = time.perf_counter()
    results = await run(items)
    seconds = time.perf_counter() - start
    if results != expected:
        raise WrongResult("the results are not those of these items")
    return seconds


def sized(openings: Mapping[int, OpenMap], items: Sequence[Any], expected: list[Any], per: int = 1) -> Contestant:
    """A contestant: a round maps the items with each size in turn, and opens it for that alone. The metrics are the sizes."""

    async def seconds(opening: OpenMap) -> float:
        async with opening() as run:
            await run(items[: len(items) // 5])  # starts what starts with the first calls
            return await map_seconds(run, items, expected) / per

    async def once() -> Sample:
        return {str(size): await seconds(opening) for size, opening in openings.items()}

    return always(once)


def always(once: Round) -> Contestant:
    """A contestant that keeps nothing open between rounds."""

    @asynccontextmanager
    async def contestant() -> AsyncIterator[Round]:
        yield once

    return contestant


def settings(openings: Mapping[str, Mapping[str, T]], make: Callable[[str, T], Contestant]) -> dict[str, Mapping[str, Contestant]]:
    """The contestants of peers, each in all of its settings."""
    return {name: {setting: make(name, opening) for setting, opening in some.items()} for name, some in openings.items()}
