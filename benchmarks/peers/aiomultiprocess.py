"""aiomultiprocess: coroutines on processes with a loop each. It looks for work and results every 5 ms."""

from __future__ import annotations

from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

T = TypeVar("T")
R = TypeVar("R")


@asynccontextmanager
async def opened(workers: int, concurrency: int) -> AsyncIterator[Any]:
    """Raises ModuleNotFoundError where it is not installed."""
    import uvloop
    from aiomultiprocess import Pool

    async with Pool(workers, childconcurrency=concurrency, loop_initializer=uvloop.new_event_loop) as pool:
        yield pool


@asynccontextmanager
async def calling(
    workers: int, concurrency: int, function: Callable[[T], Awaitable[R]]
) -> AsyncIterator[Callable[[T], Awaitable[R]]]:
    async with opened(workers, concurrency) as pool:
        yield lambda argument: pool.apply(function, (argument,))


@asynccontextmanager
async def mapping(
    workers: int, concurrency: int, function: Callable[[T], Awaitable[R]]
) -> AsyncIterator[Callable[[Sequence[T]], Awaitable[list[R]]]]:
    async with opened(workers, concurrency) as pool:

        async def run(items: Sequence[T]) -> list[R]:
            return list(await pool.map(function, items))

        yield run
