"""Awaited no-op coroutines: 500 awaiters x 40 calls with an int argument, 2 workers.

What a call costs when its own work is nothing: the price of `await runner.run(f, i)` in a program that awaits many of
them at once. Beside the pools stands the same in one process, as plain asyncio tasks. distex takes part as it comes
and with more calls kept at each worker, which its documentation recommends for short ones.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import percore
from benchmarks._figures import Target
from benchmarks._harness import Round, Row, Sample
from benchmarks._peers import distex_pool, on_pool, process_pool
from benchmarks.calls import same, same_plainly

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

WORKERS = 2
CALLS = 40


def row(*, quick: bool) -> Row:
    awaiters = 50 if quick else 500
    return Row(
        contestants={
            "ProcessPoolExecutor": partial(_process_pool, awaiters),
            "distex": partial(_distex, awaiters, queued=2),
            "distex, qsize=64": partial(_distex, awaiters, queued=64),
            "asyncio tasks": partial(_tasks, awaiters),
            "percore": partial(_percore, awaiters),
        },
        targets=[
            Target("percore", "distex", "a call", at_least=1.8),
            Target("percore", "distex, qsize=64", "a call", at_least=1.8),
            Target("percore", "ProcessPoolExecutor", "a call", at_least=15),
        ],
        rounds=3 if quick else 9,
    )


@asynccontextmanager
async def _percore(awaiters: int) -> AsyncIterator[Round]:
    async with percore.Runner(workers=WORKERS) as runner:
        yield partial(_round, awaiters, partial(runner.run, same))


@asynccontextmanager
async def _distex(awaiters: int, *, queued: int) -> AsyncIterator[Round]:
    async with distex_pool(WORKERS, queued=queued) as pool:
        yield partial(_round, awaiters, partial(pool.run_async, same))


@asynccontextmanager
async def _process_pool(awaiters: int) -> AsyncIterator[Round]:
    async with process_pool(WORKERS) as pool:
        yield partial(_round, awaiters, on_pool(pool, same_plainly))


@asynccontextmanager
async def _tasks(awaiters: int) -> AsyncIterator[Round]:
    loop = asyncio.get_running_loop()
    yield partial(_round, awaiters, lambda number: loop.create_task(same(number)))


async def _round(awaiters: int, call: Callable[[int], Awaitable[int]]) -> Sample:
    start = time.perf_counter()
    await asyncio.gather(*(_awaiter(call) for _ in range(awaiters)))
    return {"a call": (time.perf_counter() - start) / (awaiters * CALLS)}


async def _awaiter(call: Callable[[int], Awaitable[int]]) -> None:
    for number in range(CALLS):
        if await call(number) != number:
            raise RuntimeError("a call gave the result of another one")
