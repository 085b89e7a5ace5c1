"""Generators that tests of streams have workers run. Light to import: workers do."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from contextvars import ContextVar
from typing import Any

import percore
from tests import jobs

USER: ContextVar[str] = ContextVar("USER")


def item(number: int) -> Any:
    """Items of every way to travel: scalars, text, small pickles, pickles of a message of their own, and payloads in slots."""
    kinds: list[Any] = [
        number,
        -(2**300) - number,
        2**200,
        None,
        number % 2 == 0,
        number / 8,
        f"text {number}",
        "\N{GRINNING FACE}" * 4096,
        b"x" * (number % 4096),
        (number, [number]),
        {"number": number},
        jobs.Place(number),
        bytes([number % 256]) * 30_000,
        bytes([number % 256]) * 300_000,
    ]
    return kinds[number % len(kinds)]


def items(count: int) -> Iterator[Any]:
    for number in range(count):
        yield item(number)


async def aitems(count: int) -> AsyncIterator[Any]:
    for number in range(count):
        if number % 7 == 3:
            await asyncio.sleep(0)
        yield item(number)


def numbers(count: int, *, start: int = 0) -> Iterator[int]:
    yield from range(start, start + count)


async def anumbers(count: int, *, start: int = 0) -> AsyncIterator[int]:
    for number in range(start, start + count):
        yield number


class Range:
    """Its instances are generator functions, too, and so are its methods."""

    def __init__(self, start: int) -> None:
        self.start = start

    def __call__(self, count: int) -> Iterator[int]:
        yield from range(self.start, self.start + count)

    async def anumbers(self, count: int) -> AsyncIterator[int]:
        for number in self(count):
            yield number

    @classmethod
    def first(cls, count: int) -> Iterator[int]:
        yield from cls(0)(count)


class AsyncRange(Range):
    def __call__(self, count: int) -> AsyncIterator[int]:  # type: ignore[override]
        return self.anumbers(count)


def told(log: str, count: int = 1_000_000) -> Iterator[int]:
    """Say each number before it is yielded, and how the generator is ended."""
    try:
        for number in range(count):
            jobs.say(log, number)
            yield number
    except BaseException as error:
        jobs.say(log, type(error).__name__)
        raise
    finally:
        jobs.say(log, "closed")


async def atold(log: str, count: int = 1_000_000) -> AsyncIterator[int]:
    try:
        for number in range(count):
            jobs.say(log, number)
            yield number
    except BaseException as error:
        jobs.say(log, type(error).__name__)
        raise
    finally:
        jobs.say(log, "closed")


def slow_to_close(log: str, gate: str) -> Iterator[int]:
    try:
        while True:
            yield 1
    finally:
        jobs.say(log, "closing")
        jobs.pass_gate(gate)
        jobs.say(log, "closed")


async def aslow_to_close(log: str, gate: str) -> AsyncIterator[int]:
    try:
        while True:
            yield 1
    finally:
        jobs.say(log, "closing")
        await jobs.apass_gate(gate)
        jobs.say(log, "closed")


def gated(log: str, gate: str, count: int) -> Iterator[int]:
    """Yield this many numbers, then wait at the gate, then one more."""
    try:
        yield from range(count)
        jobs.say(log, "waits")
        jobs.pass_gate(gate)
        yield count
    finally:
        jobs.say(log, "closed")


async def agated(log: str, gate: str, count: int) -> AsyncIterator[int]:
    try:
        for number in range(count):
            yield number
        jobs.say(log, "waits")
        await jobs.apass_gate(gate)
        yield count
    except BaseException as error:
        jobs.say(log, type(error).__name__)
        raise
    finally:
        jobs.say(log, "closed")


async def stubborn(log: str, gate: str) -> AsyncIterator[int]:
    """Swallows its cancellation and yields on."""
    yield 0
    jobs.say(log, "waits")
    try:
        await jobs.apass_gate(gate)
    except asyncio.CancelledError:
        jobs.say(log, "CancelledError")
    try:
        while True:
            yield 1
    finally:
        jobs.say(log, "closed")


def failing(at: int, make: Callable[[], Any]) -> Iterator[Any]:
    """Yield or raise what `make` returns as the item of this number; then another item."""
    yield from range(at)
    thing = make()
    if isinstance(thing, BaseException):
        raise thing
    yield thing
    yield "one too many"


async def afailing(at: int, make: Callable[[], Any]) -> AsyncIterator[Any]:
    for number in range(at):
        yield number
    thing = make()
    if isinstance(thing, BaseException):
        raise thing
    yield thing
    yield "one too many"


def fails_to_close(count: int = 1_000_000) -> Iterator[int]:
    try:
        yield from range(count)
    finally:
        raise LookupError("failed to close")


async def afails_to_close(count: int = 1_000_000) -> AsyncIterator[int]:
    try:
        for number in range(count):
            yield number
    finally:
        raise LookupError("failed to close")


def refuses_to_close() -> Iterator[int]:
    try:
        while True:
            yield 1
    except GeneratorExit:
        yield 2


async def arefuses_to_close() -> AsyncIterator[int]:
    try:
        while True:
            yield 1
    except GeneratorExit:
        yield 2


def large(count: int, size: int) -> Iterator[bytes]:
    for number in range(count):
        yield bytes([number % 256]) * size


async def alarge(count: int, size: int) -> AsyncIterator[bytes]:
    for number in range(count):
        yield bytes([number % 256]) * size


def users(count: int) -> Iterator[str]:
    for _ in range(count):
        yield USER.get("nobody")


async def ausers(count: int) -> AsyncIterator[str]:
    for _ in range(count):
        yield USER.get("nobody")


def places(count: int) -> Iterator[percore.CurrentWorker]:
    for _ in range(count):
        yield percore.current_worker()


async def aplaces(count: int) -> AsyncIterator[percore.CurrentWorker]:
    for _ in range(count):
        yield percore.current_worker()


def arrays(count: int, length: int) -> Iterator[Any]:
    import numpy as np

    array = np.zeros(length)
    for number in range(count):
        array[:] = number  # the same array each time: an item is pickled when it is yielded
        yield array


def total(numbers: list[int]) -> Iterator[int]:
    sum_ = 0
    for number in numbers:
        sum_ += number
        yield sum_


def of_unreadable() -> Iterator[Any]:
    """An item that cannot be unpickled."""
    yield jobs.RefusesUnpickle()
