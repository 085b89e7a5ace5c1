"""anyio.to_process: plain functions, one after the other in each process."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, TypeVar

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

T = TypeVar("T")
R = TypeVar("R")


@asynccontextmanager
async def calling(workers: int, function: Callable[[T], R]) -> AsyncIterator[Callable[[T], Awaitable[R]]]:
    """Its processes end with the loop, as anyio has it. Raises ModuleNotFoundError where it is not installed."""
    from anyio import CapacityLimiter, to_process

    limiter = CapacityLimiter(workers)
    yield lambda argument: asyncio.ensure_future(to_process.run_sync(function, argument, limiter=limiter))
