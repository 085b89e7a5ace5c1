"""A map of a bound method whose object holds a dict of about 40 MB, over 1,000,000 ints, 2 workers.

multiprocessing.Pool sends the object along with every chunk, and so becomes several times slower than one process. percore
sends a function, with what is bound to it, once to each worker. The limit is what nobody can spare: one dumps and one
loads of the object, and a map of as many calls of a tiny function; it is measured in the same rounds. The pools get the
same method with large chunks, which is the best that can be done for them short of a global.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import pickle
import time
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import percore
from benchmarks._figures import Target
from benchmarks._harness import Round, Row, Sample
from benchmarks.calls import Bits, same_plainly
from benchmarks.peers import executors, timed_map

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Sequence

    from benchmarks.peers import MapAll

WORKERS = 2
ENTRIES = 1 << 20
CALLS = 1_000_000


def row(*, quick: bool) -> Row:
    bits = Bits(ENTRIES >> 7 if quick else ENTRIES)
    calls = 20_000 if quick else CALLS
    items = [number * 7919 % len(bits) for number in range(calls)]  # all over the dict
    expected = [bits.ones(item) for item in items]
    halves = {f"{parts} chunks": calls // parts for parts in (2, 4, 8)}
    return Row(
        contestants={
            "percore": partial(timed_map, partial(_percore, bits), items, expected),
            "limit": partial(_limit, bits, items),
            "one process": partial(timed_map, partial(_one_process, bits), items, expected),
            "multiprocessing.Pool": {
                name: partial(timed_map, partial(_pool, bits, chunk), items, expected) for name, chunk in halves.items()
            },
            "ProcessPoolExecutor": {
                name: partial(
                    timed_map, partial(executors.mapping, executors.processes, WORKERS, chunk, bits.ones), items, expected
                )
                for name, chunk in halves.items()
            },
        },
        targets=[Target("percore", "limit", "a call", at_most=1.10)],
        rounds=1 if quick else 5,
        seconds=8 if quick else 90,
    )


@asynccontextmanager
async def _percore(bits: Bits) -> AsyncIterator[MapAll]:
    async with percore.Runner(workers=WORKERS) as runner:
        yield lambda items: runner.map(bits.ones, items).collect()


@asynccontextmanager
async def _limit(bits: Bits, items: Sequence[int]) -> AsyncIterator[Round]:
    async with percore.Runner(workers=WORKERS) as runner:

        async def once() -> Sample:
            start = time.perf_counter()
            pickle.loads(pickle.dumps(bits, protocol=5))
            results = await runner.map(same_plainly, items)
            seconds = time.perf_counter() - start
            if results != items:
                raise RuntimeError("the results are not those of these items")
            return {"a call": seconds / len(items)}

        yield once


@asynccontextmanager
async def _one_process(bits: Bits) -> AsyncIterator[MapAll]:
    async def run(items: Sequence[int]) -> list[int]:
        return [bits.ones(item) for item in items]

    yield run


@asynccontextmanager
async def _pool(bits: Bits, chunk: int) -> AsyncIterator[MapAll]:
    with multiprocessing.get_context("forkserver").Pool(WORKERS) as pool:
        yield lambda items: asyncio.to_thread(pool.map, bits.ones, items, chunk)
        await asyncio.to_thread(_end, pool)


def _end(pool: multiprocessing.pool.Pool) -> None:
    pool.close()
    pool.join()
