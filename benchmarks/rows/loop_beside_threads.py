"""How soon a worker's loop answers beside six threads that compute, 1 worker, one no-op coroutine at a time.

The threads and the loop share the worker's GIL. Long calls (100 ms) keep all six threads computing at once; short ones
(1 ms) are the harder case for a loop, because each end of one hands the GIL over again. A loop that ran by itself beside
six such threads in one process is shown for comparison: the time between two turns of it.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING, Any

import percore
from benchmarks._figures import Limit, latencies
from benchmarks._harness import Round, Row, Sample
from benchmarks._pinning import Pin
from benchmarks.calls import same, steps_for, work
from benchmarks.peers import executors

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

    from benchmarks.peers import Call

THREADS = 6
LONG, SHORT = 0.1, 0.001
UNDER_WAY = 2 * THREADS
"""Results before the first single call is timed."""


def row(*, quick: bool) -> Row:
    calls = 10 if quick else 200
    long, short = steps_for(LONG), steps_for(SHORT)
    return Row(
        contestants={
            "percore, calls of 100 ms": partial(_percore, calls, long),
            "percore, calls of 1 ms": partial(_percore, calls, short),
            "one process, calls of 100 ms": partial(_one_process, calls, long),
        },
        targets=[Limit(f"percore, calls of {length}", "p99", at_most=0.050, towards=0.010) for length in ("100 ms", "1 ms")],
        rounds=3 if quick else 7,
        seconds=8 if quick else 50,
        pin=Pin.TWO,
    )


@asynccontextmanager
async def _percore(calls: int, steps: int) -> AsyncIterator[Round]:
    async with percore.Runner(workers=1, threads=THREADS) as runner:

        async def bulk(under_way: asyncio.Event) -> None:
            ended = 0
            async with runner.map(work, repeat(steps)) as results:
                async for _ in results:
                    ended += 1
                    if ended == UNDER_WAY:
                        under_way.set()

        yield partial(_beside, bulk, calls, partial(runner.run, same))


@asynccontextmanager
async def _one_process(calls: int, steps: int) -> AsyncIterator[Round]:
    loop = asyncio.get_running_loop()
    async with executors.opened(executors.threads, THREADS) as pool:

        async def bulk(under_way: asyncio.Event) -> None:
            pending = {loop.run_in_executor(pool, work, steps) for _ in range(THREADS)}
            under_way.set()
            while True:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                pending |= {loop.run_in_executor(pool, work, steps) for _ in done}

        async def turn(number: int) -> int:
            await asyncio.sleep(0.001)  # the loop waits for a while, as a worker's does, and must get the GIL back
            return number

        yield partial(_beside, bulk, calls, turn)


async def _beside(bulk: Callable[[asyncio.Event], Coroutine[Any, Any, None]], calls: int, call: Call) -> Sample:
    under_way = asyncio.Event()
    seconds = []
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(bulk(under_way))
        await under_way.wait()
        for number in range(calls):
            start = time.perf_counter()
            await call(number)
            seconds.append(time.perf_counter() - start)
        running.cancel()
    return latencies(seconds)
