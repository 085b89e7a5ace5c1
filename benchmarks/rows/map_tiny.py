"""A map of a million tiny plain calls, 2 workers, nothing tuned, against the pools at several chunksizes each.

What a call of a map costs when its own work is nothing. The pools put so many items into a message as their user tells
them to, and are as good as he guesses: so they take part once for each of several chunksizes, distex also with more
messages kept at each worker, and every one of these is a target. percore is told nothing: it measures the calls while
they run and makes batches by that. The results come as a list, in order, and are compared with the items.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import percore
from benchmarks._figures import Target
from benchmarks._harness import Contestant, Round, Row, Sample
from benchmarks._peers import distex_pool, process_pool
from benchmarks.calls import same_plainly

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

WORKERS = 2
CHUNKS = (300, 1000, 3000, 10_000, 50_000)
KEPT = (2, 8)
"""Messages that distex keeps at each worker: as it comes, and as its documentation advises for short calls."""


def row(*, quick: bool) -> Row:
    calls = 20_000 if quick else 1_000_000
    peers: dict[str, Contestant] = {}
    for chunk in CHUNKS:
        peers[f"ProcessPoolExecutor, chunks of {chunk}"] = partial(_process_pool, calls, chunk)
        if chunk < max(CHUNKS):  # it is past its best long before
            peers |= {f"distex, chunks of {chunk}, qsize={kept}": partial(_distex, calls, chunk, kept) for kept in KEPT}
    return Row(
        contestants={"percore": partial(_percore, calls), **peers},
        targets=[Target("percore", peer, "all calls", at_least=1.0) for peer in peers],
        rounds=2 if quick else 7,
    )


@asynccontextmanager
async def _percore(calls: int) -> AsyncIterator[Round]:
    async with percore.Runner(workers=WORKERS) as runner:
        yield partial(_round, calls, lambda: runner.map(same_plainly, range(calls)).collect())


@asynccontextmanager
async def _process_pool(calls: int, chunk: int) -> AsyncIterator[Round]:
    async with process_pool(WORKERS) as pool:

        def run() -> list[int]:
            return list(pool.map(same_plainly, range(calls), chunksize=chunk))

        yield partial(_round, calls, partial(asyncio.to_thread, run))


@asynccontextmanager
async def _distex(calls: int, chunk: int, kept: int) -> AsyncIterator[Round]:
    async with distex_pool(WORKERS, queued=kept) as pool:

        async def run() -> list[int]:
            return [result async for result in pool.map_async(same_plainly, range(calls), chunksize=chunk)]

        yield partial(_round, calls, run)


async def _round(calls: int, run: Callable[[], Awaitable[list[int]]]) -> Sample:
    start = time.perf_counter()
    results = await run()
    seconds = time.perf_counter() - start
    if results != list(range(calls)):
        raise RuntimeError("the results are not those of these items")
    return {"all calls": seconds}
