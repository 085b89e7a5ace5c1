"""Four kinds of work, as functions that run in workers: for the CPU, the memory, the disk and the network.

They are not in calls.py because their imports are heavy.
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
    """This many multiplications."""
    product = 1
    for number in range(count):
        product = number * 3
    return product


def sum_of_list(count: int) -> int:
    """A list of this many ints, and their sum."""
    return sum(list(range(count)))


def write_and_read(size: int) -> int:
    """Write this many bytes into a temporary file, and read them."""
    block = bytes(1 << 20)
    with tempfile.TemporaryFile() as file:
        for _ in range(size >> 20):
            file.write(block)
        file.seek(0)
        return sum(len(part) for part in iter(lambda: file.read(1 << 20), b""))


def ask(task: tuple[str, int]) -> int:
    """This many requests for a URL, in a row."""
    url, times = task
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


async def ask_async(task: tuple[str, int]) -> int:
    """`ask` as a coroutine."""
    url, times = task
    session: aiohttp.ClientSession = percore.state()
    total = 0
    for _ in range(times):
        async with session.get(url) as answer:
            total += len(await answer.read())
    return total
