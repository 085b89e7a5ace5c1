"""How long `await runner.run(coroutine)` takes beside a map that saturates both workers with plain calls of 1 ms.

A service answers single calls while a bulk map runs in the same pool. The map is endless and CPU-bound: every worker
has a thread that computes and more items waiting behind it, and the workers and this process share the machine's CPUs.
One no-op coroutine is awaited at a time. It may have to wait for one batch of the map (1 ms of measured work) and for
its turn at the GIL and the CPU: 5 ms are left for that. Without the map the same calls show what they cost alone.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from functools import partial
from itertools import repeat
from typing import TYPE_CHECKING

import percore
from benchmarks._figures import Limit, quantile
from benchmarks._harness import Round, Row, Sample
from benchmarks.calls import same, steps_for, work

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

WORKERS = 2
COMPUTING = 0.001
UNDER_WAY = 500
"""Results of the map before the first single call is timed: it has made its batches by then."""


def row(*, quick: bool) -> Row:
    calls = 20 if quick else 300
    return Row(
        contestants={
            "alone": partial(_alone, calls),
            "beside the map": partial(_beside_map, calls, steps_for(COMPUTING)),
        },
        targets=[Limit("beside the map", "p50", at_most=0.001 + 0.005)],
        rounds=2 if quick else 9,
    )


@asynccontextmanager
async def _alone(calls: int) -> AsyncIterator[Round]:
    async with percore.Runner(workers=WORKERS) as runner:
        yield partial(_timed, calls, runner)


@asynccontextmanager
async def _beside_map(calls: int, steps: int) -> AsyncIterator[Round]:
    async with percore.Runner(workers=WORKERS) as runner:

        async def once() -> Sample:
            under_way = asyncio.Event()
            async with asyncio.TaskGroup() as tasks:
                bulk = tasks.create_task(_bulk(runner, steps, under_way))
                await under_way.wait()
                sample = await _timed(calls, runner)
                bulk.cancel()
            return sample

        yield once


async def _bulk(runner: percore.Runner, steps: int, under_way: asyncio.Event) -> None:
    ended = 0
    async with runner.map(work, repeat(steps)) as results:
        async for _ in results:
            ended += 1
            if ended == UNDER_WAY:
                under_way.set()


async def _timed(calls: int, runner: percore.Runner) -> Sample:
    seconds = []
    for number in range(calls):
        start = time.perf_counter()
        answer = await runner.run(same, number)
        seconds.append(time.perf_counter() - start)
        if answer != number:
            raise RuntimeError("a call gave the result of another one")
    return {"p50": quantile(seconds, 0.5), "p99": quantile(seconds, 0.99)}
