"""Everything that is a concurrent.futures.Executor: the standard library's, and loky's."""

from __future__ import annotations

import asyncio
import concurrent.futures
import multiprocessing
from concurrent.futures import Executor, ProcessPoolExecutor, ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

T = TypeVar("T")
R = TypeVar("R")

FORKSERVER = multiprocessing.get_context("forkserver")


def threads(workers: int) -> Executor:
    return ThreadPoolExecutor(workers)


def processes(workers: int) -> Executor:
    return ProcessPoolExecutor(workers, mp_context=FORKSERVER)


def interpreters(workers: int) -> Executor:
    """Raises ModuleNotFoundError where the standard library has none: before Python 3.14."""
    pool = getattr(concurrent.futures, "InterpreterPoolExecutor", None)
    if pool is None:
        raise ModuleNotFoundError("this Python has no InterpreterPoolExecutor")
    return cast("Executor", pool(workers))


def loky(workers: int) -> Executor:
    from loky import ProcessPoolExecutor as LokyExecutor

    return cast("Executor", LokyExecutor(workers))


@asynccontextmanager
async def opened(make: Callable[[int], Executor], workers: int) -> AsyncIterator[Executor]:
    """Its processes start with the first call."""
    pool = make(workers)
    try:
        yield pool
    finally:
        await asyncio.to_thread(pool.shutdown)


@asynccontextmanager
async def calling(
    make: Callable[[int], Executor], workers: int, function: Callable[[T], R]
) -> AsyncIterator[Callable[[T], Awaitable[R]]]:
    loop = asyncio.get_running_loop()
    async with opened(make, workers) as pool:
        yield lambda argument: loop.run_in_executor(pool, function, argument)


@asynccontextmanager
async def mapping(
    make: Callable[[int], Executor], workers: int, chunk: int, function: Callable[[T], R]
) -> AsyncIterator[Callable[[Sequence[T]], Awaitable[list[R]]]]:
    async with opened(make, workers) as pool:

        def run(items: Sequence[T]) -> list[R]:
            return list(pool.map(function, items, chunksize=chunk))

        yield lambda items: asyncio.to_thread(run, items)


def process_pool(workers: int, **options: Any) -> ProcessPoolExecutor:
    """The standard library's pool with options of its own, for rows that use it alone."""
    return ProcessPoolExecutor(workers, mp_context=FORKSERVER, **options)
