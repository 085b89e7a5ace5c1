"""mpire: plain functions; its callbacks come in a thread of its own."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

T = TypeVar("T")
R = TypeVar("R")


@asynccontextmanager
async def opened(workers: int) -> AsyncIterator[Any]:
    """Raises ModuleNotFoundError where it is not installed."""
    from mpire.pool import WorkerPool

    pool = WorkerPool(workers, start_method="forkserver", keep_alive=True)
    try:
        yield pool
    finally:
        await asyncio.to_thread(pool.stop_and_join)


@asynccontextmanager
async def calling(workers: int, function: Callable[[T], R]) -> AsyncIterator[Callable[[T], Awaitable[R]]]:
    loop = asyncio.get_running_loop()
    async with opened(workers) as pool:

        def call(argument: T) -> Awaitable[R]:
            future: asyncio.Future[R] = loop.create_future()
            pool.apply_async(
                function,
                (argument,),
                callback=lambda result: loop.call_soon_threadsafe(future.set_result, result),
                error_callback=lambda error: loop.call_soon_threadsafe(future.set_exception, error),
            )
            return future

        yield call


@asynccontextmanager
async def mapping(
    workers: int, chunk: int, function: Callable[[T], R]
) -> AsyncIterator[Callable[[Sequence[T]], Awaitable[list[R]]]]:
    async with opened(workers) as pool:

        def run(items: Sequence[T]) -> list[R]:
            results: list[R] = pool.map(function, items, chunk_size=chunk)
            return results

        yield lambda items: asyncio.to_thread(run, items)
