"""Lifespans that fail, hang or work on in the background, and calls that go with them."""

import asyncio
import atexit
import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import percore
from tests.jobs import say


@asynccontextmanager
async def fails_and_stays(log: str) -> AsyncIterator[None]:
    """The second worker fails to start, and its process does not end by itself."""
    if percore.current_worker().generation == 2:
        atexit.register(threading.Event().wait)
        say(log, "fails")
        raise ConnectionError("no server")
    yield


@asynccontextmanager
async def stays_at_its_end(log: str) -> AsyncIterator[None]:
    """The first worker never gets through its exit."""
    yield
    if percore.current_worker().generation == 1:
        say(log, "leaves")
        await asyncio.Event().wait()


@asynccontextmanager
async def stays_at_its_start(log: str) -> AsyncIterator[None]:
    """The second worker never gets ready."""
    if percore.current_worker().generation == 2:
        say(log, "enters")
        await asyncio.Event().wait()
    yield
