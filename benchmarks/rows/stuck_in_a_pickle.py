"""A map of a bound method whose object holds a dict of about 40 MB, over 1,000,000 ints, 2 workers.

multiprocessing.Pool sends the object along with every chunk, and so becomes several times slower than one process. percore
sends a function, with what is bound to it, once to each worker. The limit is what nobody can spare: one dumps and one
loads of the object, and a map of as many calls of a tiny function; it is measured in the same rounds. A call of this method
takes longer than one of the tiny function, and that is no cost of the pickle: so there is a second limit, to which the time
of these calls in one process is added, divided by the workers. The pools get the same method with large chunks, which is
the best that can be done for them short of a global.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import multiprocessing.pool
import pickle
import time
from contextlib import asynccontextmanager
from functools import cache, partial
from typing import TYPE_CHECKING

import percore
from benchmarks._figures import Target
from benchmarks._harness import Round, Row, Sample
from benchmarks.calls import Bits, same_plainly
from benchmarks.peers import executors, timed_map

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from contextlib import AbstractAsyncContextManager

    from benchmarks.peers import MapAll, OpenMap

WORKERS = 2
ENTRIES = 1 << 20
CALLS = 1_000_000
CALL, WITH_WORK = "a call", "a call, its work in the limit"


def row(*, quick: bool) -> Row:
    entries, calls = (ENTRIES >> 7, 20_000) if quick else (ENTRIES, CALLS)
    timed = partial(_timed, entries, calls)
    chunks = {f"{parts} chunks": calls // parts for parts in (2, 4, 8)}
    return Row(
        contestants={
            "percore": partial(timed, _percore),
            "limit": partial(_limit, entries, calls),
            "one process": partial(timed, _one_process),
            "multiprocessing.Pool": {name: partial(timed, partial(_pool, chunk)) for name, chunk in chunks.items()},
            "ProcessPoolExecutor": {name: partial(timed, partial(_executor, chunk)) for name, chunk in chunks.items()},
        },
        targets=[Target("percore", "limit", metric, at_most=1.10) for metric in (CALL, WITH_WORK)],
        rounds=3 if quick else 7,
        seconds=8 if quick else 80,
        warm_ups=0,  # of a million calls; some are made while it opens
        trials=1,
    )


@cache
def work_for(entries: int, calls: int) -> tuple[Bits, list[int], list[int]]:
    """The object, the items (all over its dict), and what must come back for each. Made when the first contestant opens."""
    bits = Bits(entries)
    items = [number * 7919 % entries for number in range(calls)]
    return bits, items, [bits.ones(item) for item in items]


@asynccontextmanager
async def _timed(entries: int, calls: int, opening: Callable[[Bits], AbstractAsyncContextManager[MapAll]]) -> AsyncIterator[Round]:
    bits, items, expected = work_for(entries, calls)
    async with timed_map(partial(_warmed, partial(opening, bits), items[: calls // 20]), items, expected) as run:

        async def once() -> Sample:
            sample = await run()
            return {CALL: sample[CALL], WITH_WORK: sample[CALL]}

        yield once


@asynccontextmanager
async def _warmed(opening: OpenMap, items: Sequence[int]) -> AsyncIterator[MapAll]:
    async with opening() as run:
        await run(items)
        yield run


@asynccontextmanager
async def _percore(bits: Bits) -> AsyncIterator[MapAll]:
    async with percore.Runner(workers=WORKERS) as runner:
        yield lambda items: runner.map(bits.ones, items).collect()


@asynccontextmanager
async def _limit(entries: int, calls: int) -> AsyncIterator[Round]:
    bits, items, expected = work_for(entries, calls)
    async with percore.Runner(workers=WORKERS) as runner:
        await runner.map(same_plainly, items[: calls // 20])

        async def once() -> Sample:
            start = time.perf_counter()
            pickle.loads(pickle.dumps(bits, protocol=5))
            results = await runner.map(same_plainly, items)
            middle = time.perf_counter()
            worked = [bits.ones(item) for item in items]
            end = time.perf_counter()
            if results != items or worked != expected:
                raise RuntimeError("the results are not those of these items")
            limit = middle - start
            return {CALL: limit / len(items), WITH_WORK: (limit + (end - middle) / WORKERS) / len(items)}

        yield once


@asynccontextmanager
async def _one_process(bits: Bits) -> AsyncIterator[MapAll]:
    async def run(items: Sequence[int]) -> list[int]:
        return [bits.ones(item) for item in items]

    yield run


@asynccontextmanager
async def _pool(chunk: int, bits: Bits) -> AsyncIterator[MapAll]:
    with multiprocessing.get_context("forkserver").Pool(WORKERS) as pool:
        yield lambda items: asyncio.to_thread(pool.map, bits.ones, items, chunk)
        await asyncio.to_thread(_end, pool)


def _executor(chunk: int, bits: Bits) -> AbstractAsyncContextManager[MapAll]:
    return executors.mapping(executors.processes, WORKERS, chunk, bits.ones)


def _end(pool: multiprocessing.pool.Pool) -> None:
    pool.close()
    pool.join()
