"""wool: coroutines on processes that are spoken to by gRPC."""

from __future__ import annotations

import asyncio
import importlib
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, TypeVar, cast

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

T = TypeVar("T")
R = TypeVar("R")


@asynccontextmanager
async def opened(workers: int) -> AsyncIterator[None]:
    """Raises ModuleNotFoundError where it is not installed."""
    wool: Any = importlib.import_module("wool")
    loop = asyncio.get_running_loop()
    before = loop.get_task_factory()
    try:
        async with wool.WorkerPool(spawn=workers):
            yield
    finally:
        loop.set_task_factory(before)  # it leaves its own behind, which everybody's tasks would pay for


@asynccontextmanager
async def calling(workers: int, function: Callable[[T], Awaitable[R]]) -> AsyncIterator[Callable[[T], Awaitable[R]]]:
    async with opened(workers):
        # Its functions are made by a decorator, and must be found by their name where they run.
        routines = importlib.import_module("benchmarks.peers.wool_routines")
        yield cast("Callable[[T], Awaitable[R]]", getattr(routines, function.__name__))
