"""An article's workload, 2 processes: 10,000 calls of 20 ms waiting and about 0.8 ms of arithmetic, against a hand split.

Threads make 5,000 of them in a round, so that there are five rounds; coroutines make all, because a thousand are under way.

I/O-bound calls that together need more than one CPU. By hand one starts a process for each CPU, gives each half of the
items and lets it work on so many threads, or as coroutines under a semaphore of 500. percore gets the same numbers of
processes, threads and coroutines, and hands the items out one by one. The arithmetic is a fixed number of steps,
counted once here, and every result is compared with its input.

Calls that start together wake together: so many coroutines then wait for the CPU at once that the next ones, which
start when these end, go to sleep together as well. The hand split starts 500 at once in each process; a map's default
window starts small and grows. So for the target percore gets a window that lets it start as many at once, and the
default window is shown beside it.
"""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import TYPE_CHECKING

import uvloop

import percore
from benchmarks._figures import Target
from benchmarks._harness import Contestant, Row, Settings
from benchmarks.calls import page, page_async, steps_for
from benchmarks.peers import timed_map
from benchmarks.peers.split import hand_split

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from benchmarks.peers import MapAll, OpenMap
    from benchmarks.peers.split import Half

PROCESSES = 2
THREADS = (10, 20, 30, 40)
CONCURRENCY = 500
COMPUTING = 0.0008
WARMING = 4


def row(*, quick: bool) -> Row:
    calls = 1000 if quick else 10_000
    of_threads = 1000 if quick else 5000
    steps = steps_for(COMPUTING)
    pairs: dict[str, OpenMap] = {}
    for threads in THREADS:
        pairs[f"hand split, {threads} threads"] = partial(hand_split, partial(split_threads, steps, threads), PROCESSES)
        pairs[f"percore, {threads} threads"] = partial(percore_threads, steps, threads)
    pairs["hand split, coroutines"] = partial(hand_split, partial(split_coroutines, steps, CONCURRENCY), PROCESSES)
    pairs["percore, coroutines"] = partial(percore_coroutines, steps, CONCURRENCY, calls)
    pairs["percore, coroutines, default window"] = partial(percore_coroutines, steps, CONCURRENCY, None)
    contestants: dict[str, Contestant | Settings] = {
        name: partial(timed_map, partial(warm, opening), range(of_threads if "threads" in name else calls))
        for name, opening in pairs.items()
    }
    kinds = [f"{threads} threads" for threads in THREADS] + ["coroutines"]
    return Row(
        contestants=contestants,
        targets=[Target(f"percore, {kind}", f"hand split, {kind}", "a call", at_most=1.05, towards=1.0) for kind in kinds],
        rounds=3 if quick else 5,
        seconds=15 if quick else 215,
        warm_ups=0,  # of ten thousand calls; some are made while it opens
    )


@asynccontextmanager
async def warm(opening: OpenMap) -> AsyncIterator[MapAll]:
    """Every thread of it has made some calls."""
    async with opening() as run:
        await run(range(WARMING * PROCESSES * max(THREADS)))
        yield run


@asynccontextmanager
async def percore_threads(steps: int, threads: int) -> AsyncIterator[MapAll]:
    async with percore.Runner(workers=PROCESSES, threads=threads) as runner:
        yield lambda items: runner.map(partial(page, steps=steps), items).collect()


@asynccontextmanager
async def percore_coroutines(steps: int, concurrency: int, window: int | None) -> AsyncIterator[MapAll]:
    async with percore.Runner(workers=PROCESSES, concurrency=concurrency) as runner:
        yield lambda items: runner.map(partial(page_async, steps=steps), items, window=window).collect()


@contextmanager
def split_threads(steps: int, threads: int) -> Iterator[Half]:
    """In a process of the hand split: its half on so many threads, kept from round to round."""
    with ThreadPoolExecutor(threads) as pool:
        yield lambda items: list(pool.map(partial(page, steps=steps), items))


@contextmanager
def split_coroutines(steps: int, concurrency: int) -> Iterator[Half]:
    """In a process of the hand split: its half as tasks of one loop, so many at once."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        yield lambda items: loop.run(_half(items, steps, concurrency))


async def _half(items: Sequence[int], steps: int, concurrency: int) -> list[int]:
    places = asyncio.Semaphore(concurrency)

    async def one(item: int) -> int:
        async with places:
            return await page_async(item, steps)

    return await asyncio.gather(*map(one, items))
