"""Four kinds of work, as functions that run in workers: for the CPU, the memory, the disk and the network.

Apart from calls.py, because of what they import.
"""

from __future__ import annotations

import tempfile
import urllib.request
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import percore

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    import aiohttp


def multiply(count: int) -> int:
    """So many multiplications."""
    product = 1
    for number in range(count):
        product = number * 3
    return product


def sum_of_list(count: int) -> int:
    """A list of so many ints, and their sum."""
    return sum(list(range(count)))


def write_and_read(size: int) -> int:
    """So many bytes into a temporary file, and back."""
    block = bytes(1 << 20)
    with tempfile.TemporaryFile() as file:
        for _ in range(size >> 20):
            file.write(block)
        file.seek(0)
        return sum(len(part) for part in iter(lambda: file.read(1 << 20), b""))


def ask(url: str, times: int) -> int:
    """So many requests in a row."""
    total = 0
    for _ in range(times):
        with urllib.request.urlopen(url) as answer:
            total += len(answer.read())
    return total


@asynccontextmanager
async def http() -> AsyncIterator[aiohttp.ClientSession]:
    """A worker's lifespan: one session for all of its calls."""
    import aiohttp

    async with aiohttp.ClientSession() as session:
        yield session


async def ask_async(url: str, times: int) -> int:
    """`ask` as a coroutine."""
    session: aiohttp.ClientSession = percore.state()
    total = 0
    for _ in range(times):
        async with session.get(url) as answer:
            total += len(await answer.read())
    return total
