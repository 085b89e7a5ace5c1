"""Streams: what an item of a generator costs that runs in another process, and what it costs by hand."""

from __future__ import annotations

import asyncio
import multiprocessing
import time
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.calls import give_arrays, give_numbers, give_numbers_in_loop, send_all
from benchmarks.contestants import WrongResult, playing, runner
from benchmarks.figures import Target, in_seconds
from benchmarks.harness import Row, row

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator
    from multiprocessing.connection import Connection

    import percore
    from benchmarks.harness import Contestant
    from benchmarks.results import Sample

MB = 1_000_000

AN_ITEM = "an item"
PIPE = "a process and a pipe"


@row(rounds=9, seconds=30)
def stream_tiny(quick: bool) -> Row:
    """A stream of ints from one worker, an item after the other, by `prefetch`, against a process that sends them by a pipe.

    The cost of an item without work. With prefetch=16, the default, the worker may be 16 items ahead, and each half of that is
    a round trip of messages: so latency decides. A pipe holds some thousand such items, which nobody bounds.
    """
    count = 20_000 if quick else 100_000
    ours = {
        "percore": _streaming(give_numbers_in_loop, count, 16),
        "percore, prefetch=64": _streaming(give_numbers_in_loop, count, 64),
        "percore, prefetch=64, plain generator": _streaming(give_numbers, count, 64),
        "percore, prefetch=1000": _streaming(give_numbers_in_loop, count, 1000),
    }
    return Row(
        {
            **ours,
            PIPE: _piping(give_numbers, count),
            "in one loop": playing(_nothing, partial(_iterate, lambda _: give_numbers_in_loop(count), count)),
        },
        [
            Target("percore", AN_ITEM, PIPE, at_most=1.5),
            Target("percore, prefetch=64", AN_ITEM, PIPE, at_most=1.0),
            *(Target(name, AN_ITEM, at_most=5e-6) for name in ours if "64" in name),
        ],
        units={AN_ITEM: in_seconds},
    )


@row(rounds=9, seconds=30)
def stream_arrays(quick: bool) -> Row:
    """A stream of numpy arrays of 1 MB from one worker, against a process that sends them by a pipe.

    The generator yields the same array each time, and each item is dropped before the next one is taken.
    """
    count = 200 if quick else 1000
    return Row(
        {"percore": _streaming(give_arrays, count, 16), PIPE: _piping(give_arrays, count)},
        [Target("percore", AN_ITEM, PIPE, at_most=0.5), Target("percore", AN_ITEM, at_most=MB / 400e6)],
        units={AN_ITEM: in_seconds},
    )


def _streaming(fn: Callable[[int], Any], count: int, prefetch: int) -> Contestant:
    def items(opened: percore.Runner) -> AsyncIterator[Any]:
        return opened.options(prefetch=prefetch).stream(fn, count)

    return playing(runner(1), partial(_iterate, items, count))


async def _iterate(items: Callable[[Any], AsyncIterator[Any]], count: int, opened: Any) -> Sample:
    number = 0
    began = time.perf_counter()
    async for item in items(opened):
        if int(item if type(item) is int else item[0]) != number:
            raise WrongResult("an item is another one")
        number += 1
    seconds = time.perf_counter() - began
    if number != count:
        raise WrongResult(f"{number} items instead of {count}")
    return {AN_ITEM: seconds / count}


@asynccontextmanager
async def _nothing() -> AsyncIterator[None]:
    yield None


def _piping(fn: Callable[[int], Iterator[Any]], count: int) -> Contestant:
    return playing(partial(_pipe, fn), partial(_receive, count))


@asynccontextmanager
async def _pipe(fn: Callable[[int], Iterator[Any]]) -> AsyncIterator[Connection[Any, Any]]:
    """A process that sends what the generator yields, once for each number that it is sent."""
    context = multiprocessing.get_context("forkserver")
    here, there = context.Pipe()
    process = context.Process(target=send_all, args=(fn, there))
    process.start()
    there.close()
    try:
        yield here
    finally:
        here.close()
        await asyncio.to_thread(process.join)


async def _receive(count: int, pipe: Connection[Any, Any]) -> Sample:
    """It blocks the loop, which has nothing else to do: a reader of the loop would take longer."""
    pipe.send(count)
    began = time.perf_counter()
    for number in range(count):
        item = pipe.recv()
        if int(item if type(item) is int else item[0]) != number:
            raise WrongResult("an item is another one")
    return {AN_ITEM: (time.perf_counter() - began) / count}
