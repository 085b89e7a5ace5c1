"""Closing a pool of two idle workers: until the last of their processes is gone.

What `async with` takes at its end when nothing is left to do. Each pool is opened, makes a call in each worker and is then
closed; only the closing is timed.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import percore
from benchmarks._figures import Limit
from benchmarks._harness import Round, Row, Sample
from benchmarks.calls import pid_after, same
from benchmarks.peers import aiomultiprocess, distex, executors

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from benchmarks.peers import Call, OpenCall

WORKERS = 2


def row(*, quick: bool) -> Row:
    pool = partial(partial, executors.calling)
    openings: dict[str, OpenCall] = {
        "percore": _percore,
        "ProcessPoolExecutor": pool(executors.processes, WORKERS, pid_after),
        "loky": pool(executors.loky, WORKERS, pid_after),
        "distex": partial(distex.calling, WORKERS, 2, same),
        "aiomultiprocess": partial(aiomultiprocess.calling, WORKERS, 16, same),
    }
    return Row(
        contestants={name: partial(_closing, opening) for name, opening in openings.items()},
        targets=[Limit("percore", "close", at_most=0.050)],
        rounds=3 if quick else 11,
        seconds=8 if quick else 20,
        warm_ups=0,
    )


@asynccontextmanager
async def _percore() -> AsyncIterator[Call]:
    async with percore.Runner(workers=WORKERS) as runner:
        yield partial(runner.run, pid_after)


@asynccontextmanager
async def _closing(opening: OpenCall) -> AsyncIterator[Round]:
    async def once() -> Sample:
        async with opening() as call:
            await asyncio.gather(*(call(0.01) for _ in range(2 * WORKERS)))
            start = time.perf_counter()
        return {"close": time.perf_counter() - start}

    yield once
