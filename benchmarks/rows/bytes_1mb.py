"""1 MB of bytes to a worker and back, 1 worker, one call at a time.

The identity, as a coroutine and as a plain function, so that nothing but the way there and back is left.
"""

from __future__ import annotations

import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from statistics import fmean

import percore
from benchmarks._figures import Target
from benchmarks._harness import Round, Row, Sample
from benchmarks.calls import same, same_plainly
from benchmarks.peers import executors

SIZE = 1_000_000

Echo = Callable[[bytes], Awaitable[bytes]]


def row(*, quick: bool) -> Row:
    calls = 20 if quick else 200
    return Row(
        contestants={
            "ProcessPoolExecutor": partial(_process_pool, calls),
            "percore, coroutine": partial(_percore, calls, same),
            "percore, plain function": partial(_percore, calls, same_plainly),
        },
        targets=[
            Target("percore, coroutine", "ProcessPoolExecutor", "a call", at_least=7),
            Target("percore, plain function", "ProcessPoolExecutor", "a call", at_least=7),
        ],
        rounds=3 if quick else 15,
        seconds=6 if quick else 20,
    )


@asynccontextmanager
async def _percore(calls: int, function: Callable[[bytes], object]) -> AsyncIterator[Round]:
    async with percore.Runner(workers=1) as runner:
        yield partial(_round, calls, partial(runner.run, function))


@asynccontextmanager
async def _process_pool(calls: int) -> AsyncIterator[Round]:
    async with executors.calling(executors.processes, 1, same_plainly) as call:
        yield partial(_round, calls, call)


async def _round(calls: int, echo: Echo) -> Sample:
    payload = os.urandom(SIZE)
    return {"a call": fmean([await _timed(echo, payload) for _ in range(calls)])}


async def _timed(echo: Echo, payload: bytes) -> float:
    start = time.perf_counter()
    answer = await echo(payload)
    seconds = time.perf_counter() - start
    if answer != payload:
        raise RuntimeError("other bytes came back")
    return seconds
