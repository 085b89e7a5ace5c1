"""The executors: the standard library's, loky's, and percore's own."""

from __future__ import annotations

import asyncio
import concurrent.futures
import multiprocessing
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from benchmarks.peers import Call, Function, MapAll

    Make = Callable[[int], Executor]

FORKSERVER = multiprocessing.get_context("forkserver")

threads: Make = ThreadPoolExecutor


def processes(workers: int) -> Executor:
    return ProcessPoolExecutor(workers, mp_context=FORKSERVER)


def interpreters(workers: int) -> Executor:
    """Raises ModuleNotFoundError before Python 3.14, which introduced it."""
    pool = getattr(concurrent.futures, "InterpreterPoolExecutor", None)
    if pool is None:
        raise ModuleNotFoundError("this Python has no InterpreterPoolExecutor")
    return cast("Executor", pool(workers))


def loky(workers: int) -> Executor:
    from loky import ProcessPoolExecutor as LokyExecutor

    return cast("Executor", LokyExecutor(workers))


@asynccontextmanager
async def opened(make: Make, workers: int) -> AsyncIterator[Executor]:
    """Its processes start with the first call."""
    pool = make(workers)
    try:
        yield pool
    finally:
        await asyncio.to_thread(pool.shutdown)


@asynccontextmanager
async def calling(make: Make, workers: int, function: Function) -> AsyncIterator[Call]:
    loop = asyncio.get_running_loop()
    async with opened(make, workers) as pool:
        yield lambda argument: loop.run_in_executor(pool, function, argument)


@asynccontextmanager
async def mapping(make: Make, workers: int, chunk: int, function: Function) -> AsyncIterator[MapAll]:
    async with opened(make, workers) as pool:

        def run(items: Sequence[Any]) -> list[Any]:
            return list(pool.map(function, items, chunksize=chunk))

        yield lambda items: asyncio.to_thread(run, items)
