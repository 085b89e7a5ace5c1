"""An article's workload, 2 processes: 3000 calls of 20 ms waiting and about 0.8 ms of arithmetic, against a hand split.

I/O-bound calls that together need more than one CPU. By hand one starts a process for each CPU, gives each half of the
items and lets it work on 30 threads, or as coroutines under a semaphore of 500. percore gets the same numbers of
processes, threads and coroutines, and hands the items out one by one. The arithmetic is a fixed number of steps,
counted once here, and every result is compared with its input.

Calls that start together wake together: so many coroutines then wait for the CPU at once that the next ones, which
start when these end, go to sleep together as well. The hand split starts 500 at once in each process; a map's default
window starts small and grows. So for the target percore gets a window that lets it start as many at once, and the
default window is shown beside it.
"""

from __future__ import annotations

import asyncio
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING

import uvloop

import percore
from benchmarks._figures import Target
from benchmarks._harness import Round, Row, Sample
from benchmarks._peers import Half, hand_split
from benchmarks.calls import page, page_async, steps_for

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

PROCESSES = 2
THREADS = 30
CONCURRENCY = 500
COMPUTING = 0.0008


def row(*, quick: bool) -> Row:
    calls = 300 if quick else 3000
    steps = steps_for(COMPUTING)
    return Row(
        contestants={
            "hand split, threads": partial(_split, calls, steps, split_threads),
            "percore, threads": partial(_percore_threads, calls, steps),
            "hand split, coroutines": partial(_split, calls, steps, split_coroutines),
            "percore, coroutines": partial(_percore_coroutines, calls, steps, window=calls),
            "percore, coroutines, default window": partial(_percore_coroutines, calls, steps, window=None),
        },
        targets=[
            Target("percore, threads", "hand split, threads", "all calls", at_most=1.05),
            Target("percore, coroutines", "hand split, coroutines", "all calls", at_most=1.05),
        ],
        rounds=2 if quick else 9,
    )


@asynccontextmanager
async def _percore_threads(calls: int, steps: int) -> AsyncIterator[Round]:
    async with percore.Runner(workers=PROCESSES, threads=THREADS) as runner:
        yield partial(_round, calls, lambda: runner.map(page, range(calls), repeat(steps)).collect())


@asynccontextmanager
async def _percore_coroutines(calls: int, steps: int, *, window: int | None) -> AsyncIterator[Round]:
    async with percore.Runner(workers=PROCESSES, concurrency=CONCURRENCY) as runner:
        yield partial(_round, calls, lambda: runner.map(page_async, range(calls), repeat(steps), window=window).collect())


@asynccontextmanager
async def _split(calls: int, steps: int, open_half: Callable[[], AbstractContextManager[Half]]) -> AsyncIterator[Round]:
    async with hand_split(open_half, PROCESSES) as run:
        yield partial(_round, calls, partial(run, calls, steps))


async def _round(calls: int, run: Callable[[], Awaitable[list[int]]]) -> Sample:
    start = time.perf_counter()
    results = await run()
    seconds = time.perf_counter() - start
    if results != list(range(calls)):
        raise RuntimeError("the results are not those of these items")
    return {"all calls": seconds}


@contextmanager
def split_threads() -> Iterator[Half]:
    """In a process of the hand split: its half on 30 threads, kept from round to round."""
    with ThreadPoolExecutor(THREADS) as pool:
        yield lambda items, steps: list(pool.map(page, items, repeat(steps)))


@contextmanager
def split_coroutines() -> Iterator[Half]:
    """In a process of the hand split: its half as tasks of one loop, 500 at once."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as loop:
        yield lambda items, steps: loop.run(_half(items, steps))


async def _half(items: range, steps: int) -> list[int]:
    places = asyncio.Semaphore(CONCURRENCY)

    async def one(item: int) -> int:
        async with places:
            return await page_async(item, steps)

    return await asyncio.gather(*map(one, items))
