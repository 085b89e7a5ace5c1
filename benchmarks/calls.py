"""The functions that run in workers. Light to import, because every contestant's processes import them."""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import asynccontextmanager, suppress
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence
    from multiprocessing.connection import Connection

    import aiohttp

    import percore

T = TypeVar("T")

PAUSE = 0.02
"""Seconds an article's call waits, as for a server."""


async def same(value: T) -> T:
    """A coroutine that does nothing. It returns its argument, so that the caller can check whose result it got."""
    return value


def same_plainly(value: T) -> T:
    return value


async def begun(_: object) -> float:
    """When it begins, by the clock that all processes share."""
    return time.monotonic()


async def page_of(url: str) -> str:
    """A coroutine that returns 1,000 characters for a URL."""
    return text_of(url)


def text_of(url: str) -> str:
    return (url * (1 + 1000 // len(url)))[:1000]


def pid_after(seconds: float) -> int:
    """The pid, after a time in which a second call goes to another process."""
    time.sleep(seconds)
    return os.getpid()


def work(steps: int) -> int:
    """A fixed amount of arithmetic.

    Not a loop until a wall-clock time: two threads that share a CPU would both end in time, with half of the work done.
    """
    total = 0
    for step in range(steps):
        total += step * step
    return total


async def work_in_loop(steps: int) -> int:
    """The same, in a loop that does nothing else meanwhile."""
    return work(steps)


# Generators


def give_numbers(count: int) -> Iterator[int]:
    yield from range(count)


async def give_numbers_in_loop(count: int) -> AsyncIterator[int]:
    for number in range(count):
        yield number


def give_arrays(count: int) -> Iterator[Any]:
    """The same array of 1 MB each time, which begins with the number of the item."""
    import numpy as np

    array = np.zeros(125_000)
    for number in range(count):
        array[0] = number
        yield array


def send_all(fn: Callable[[int], Iterator[Any]], pipe: Connection[Any, Any]) -> None:
    """In a process of its own: for each number that arrives, send so many items, until the other end is closed."""
    with suppress(EOFError):
        while True:
            for item in fn(pipe.recv()):
                pipe.send(item)


def spin(seconds: float) -> float:
    """Use this much CPU time of this thread, and return how much it was."""
    start = time.thread_time()
    end = start + seconds
    while (now := time.thread_time()) < end:
        pass
    return now - start


def spin_all(costs: Sequence[float]) -> list[float]:
    """`spin` with one after the other."""
    return [spin(cost) for cost in costs]


def last(seconds: float) -> None:
    """Take this long. Below a millisecond it computes: no sleep is that short."""
    if seconds < 0.001:
        spin(seconds)
    else:
        time.sleep(seconds)


async def last_async(seconds: float) -> None:
    """Like `last`, as a coroutine."""
    if seconds < 0.001:
        spin(seconds)
    else:
        await asyncio.sleep(seconds)


def page(item: int, steps: int) -> int:
    """The article's call as a plain function: wait for a server, compute, give the argument back."""
    time.sleep(PAUSE)
    work(steps)
    return item


async def page_async(item: int, steps: int) -> int:
    """The article's call as a coroutine."""
    await asyncio.sleep(PAUSE)
    work(steps)
    return item


def sum_of(shared: percore.Shared[Any]) -> Any:
    """The sum of a shared array."""
    return shared.value.sum()


def nothing() -> None:
    """A call that everything sent before it precedes."""


class Bits:
    """An object with a method to map and a dict that is bound to it: the binary string of each int, about 40 MB of them."""

    def __init__(self, entries: int) -> None:
        self._strings = {number: f"{number:b}" for number in range(entries)}

    def ones(self, number: int) -> int:
        """How many ones the string of this number has."""
        return self._strings[number].count("1")


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
    import tempfile

    block = bytes(1 << 20)
    with tempfile.TemporaryFile() as file:
        for _ in range(size >> 20):
            file.write(block)
        file.seek(0)
        return sum(len(part) for part in iter(lambda: file.read(1 << 20), b""))


def ask(task: tuple[str, int]) -> int:
    """This many requests for a URL, in a row."""
    import urllib.request

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
    """`ask` as a coroutine, with the worker's session."""
    import percore

    url, times = task
    session: aiohttp.ClientSession = percore.state()
    total = 0
    for _ in range(times):
        async with session.get(url) as answer:
            total += len(await answer.read())
    return total


def steps_for(seconds: float) -> int:
    """The number of steps of `work` that take this long on one CPU here."""
    return round(seconds / _seconds_of_a_step())


@cache
def _seconds_of_a_step() -> float:
    """From the best of many tries, which nothing disturbed."""
    probe = 10_000
    return min(_seconds_of(probe) for _ in range(200)) / probe


def _seconds_of(steps: int) -> float:
    start = time.perf_counter()
    work(steps)
    return time.perf_counter() - start


# Calls that make calls. They return the seconds that each took


async def nested_trips(trips: int) -> float:
    runner = _current_runner()
    began = time.perf_counter()
    for number in range(trips):
        _check(await runner.run(same, number), number)
    return (time.perf_counter() - began) / trips


def sync_trips(trips: int) -> float:
    runner = _current_runner()
    began = time.perf_counter()
    for number in range(trips):
        _check(runner.run_sync(same, number), number)
    return (time.perf_counter() - began) / trips


async def nested_many(awaiters: int, calls: int) -> float:
    runner = _current_runner()

    async def some() -> None:
        for number in range(calls):
            _check(await runner.run(same, number), number)

    began = time.perf_counter()
    await asyncio.gather(*(some() for _ in range(awaiters)))
    return (time.perf_counter() - began) / awaiters / calls


async def nested_results(items: int) -> float:
    began = time.perf_counter()
    _check(sum([result async for result in _current_runner().map(same, range(items))]), sum(range(items)))
    return (time.perf_counter() - began) / items


def sync_results(items: int) -> float:
    began = time.perf_counter()
    _check(sum(_current_runner().map(same, range(items))), sum(range(items)))
    return (time.perf_counter() - began) / items


async def nested_items(items: int, prefetch: int) -> float:
    began = time.perf_counter()
    stream = _current_runner().options(prefetch=prefetch).stream(give_numbers_in_loop, items)
    _check(sum([item async for item in stream]), sum(range(items)))
    return (time.perf_counter() - began) / items


def sync_items(items: int, prefetch: int) -> float:
    began = time.perf_counter()
    _check(sum(_current_runner().options(prefetch=prefetch).stream(give_numbers_in_loop, items)), sum(range(items)))
    return (time.perf_counter() - began) / items


def _current_runner() -> percore.CurrentRunner:
    import percore

    return percore.current_runner()


def _check(answer: object, expected: object) -> None:
    if answer != expected:
        raise ValueError("a call returned the result of another one")


async def sleep_long() -> None:
    """A coroutine that only the end of its worker ends."""
    await asyncio.sleep(1000)
