"""How long `await runner.run(coroutine)` takes beside a map of CPU-bound calls of 1 ms that fills both workers.

A service answers single calls while a bulk map runs in the same pool. The map is endless and CPU-bound: every worker
has a thread that computes and more items waiting behind it, and the workers and this process share the machine's CPUs.
One no-op coroutine is awaited at a time. It has to wait for one batch of the map (1 ms of measured work) and for its turn
at the GIL and the CPU. Without the map the same calls show what they cost alone. ProcessPoolExecutor has one queue for
all: there the map is as many calls as are kept submitted, and the single call waits behind them.
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
from benchmarks.calls import same, same_plainly, steps_for, work
from benchmarks.peers import executors

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Coroutine

    from benchmarks.peers import Call

WORKERS = 2
COMPUTING = 0.001
KEPT = (4, 16, 64)
"""Calls that a user of ProcessPoolExecutor keeps submitted, so that no process waits for work."""
UNDER_WAY = 500
"""Results of the map before the first single call is timed: it has made its batches by then."""


def row(*, quick: bool) -> Row:
    calls = 20 if quick else 1000
    steps = steps_for(COMPUTING)
    return Row(
        contestants={
            "percore, alone": partial(_alone, calls),
            "percore, beside the map": partial(_beside_map, calls, steps),
            "ProcessPoolExecutor, beside as much": {f"{n} submitted": partial(_pool, calls // 20 or 1, steps, n) for n in KEPT},
        },
        targets=[Limit("percore, beside the map", "p50", at_most=0.010, towards=0.003)],
        rounds=3 if quick else 9,
        seconds=8 if quick else 45,
        pin=Pin.TWO,
        is_cheap=True,
    )


@asynccontextmanager
async def _alone(calls: int) -> AsyncIterator[Round]:
    async with percore.Runner(workers=WORKERS) as runner:
        yield partial(_timed, calls, partial(runner.run, same))


@asynccontextmanager
async def _beside_map(calls: int, steps: int) -> AsyncIterator[Round]:
    async with percore.Runner(workers=WORKERS) as runner:

        async def bulk(under_way: asyncio.Event) -> None:
            ended = 0
            async with runner.map(work, repeat(steps)) as results:
                async for _ in results:
                    ended += 1
                    if ended == UNDER_WAY:
                        under_way.set()

        yield partial(_beside, bulk, calls, partial(runner.run, same))


@asynccontextmanager
async def _pool(calls: int, steps: int, kept: int) -> AsyncIterator[Round]:
    loop = asyncio.get_running_loop()
    async with executors.opened(executors.processes, WORKERS) as pool:

        async def bulk(under_way: asyncio.Event) -> None:
            pending = {loop.run_in_executor(pool, work, steps) for _ in range(kept)}
            under_way.set()
            while True:
                done, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
                pending |= {loop.run_in_executor(pool, work, steps) for _ in done}

        yield partial(_beside, bulk, calls, lambda number: loop.run_in_executor(pool, same_plainly, number))


async def _beside(bulk: Callable[[asyncio.Event], Coroutine[Any, Any, None]], calls: int, call: Call) -> Sample:
    under_way = asyncio.Event()
    async with asyncio.TaskGroup() as tasks:
        running = tasks.create_task(bulk(under_way))
        await under_way.wait()
        sample = await _timed(calls, call)
        running.cancel()
    return sample


async def _timed(calls: int, call: Call) -> Sample:
    seconds = []
    for number in range(calls):
        start = time.perf_counter()
        answer = await call(number)
        seconds.append(time.perf_counter() - start)
        if answer != number:
            raise RuntimeError("a call gave the result of another one")
    return latencies(seconds)
