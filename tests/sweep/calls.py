"""What runs in the workers of a sweep. Every call enters itself in a ledger with one write before it does anything else."""

import asyncio
import contextlib
import faulthandler
import gc
import os
import signal
import time
import zlib
from collections.abc import AsyncIterator, Iterator
from typing import Any

import percore
from percore._common import fault_points
from percore._transport.channel import Channel

INLINE, STORED = 60_000, 150_000
"""Sizes of payloads: one that travels in a frame, and one that lies in a slot."""

ERROR = -1


def answer(uuid: int) -> int:
    """What a call of that number has to give."""
    return zlib.crc32(uuid.to_bytes(8, "little"))


def pattern(uuid: int, size: int) -> bytes:
    """Bytes that no other number has."""
    return (uuid.to_bytes(8, "little") * (size // 8 + 1))[:size]


def enter(ledger: str, uuid: int) -> None:
    """A write this short is never torn."""
    worker = percore.current_worker()
    fd = os.open(ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(fd, f"{uuid} {worker.pid} {worker.generation}\n".encode())
    finally:
        os.close(fd)


def _give(uuid: int, size: int, data: tuple[list[bytes], ...]) -> Any:
    for (sent,) in data:
        if sent != pattern(uuid, len(sent)):
            return "the arguments are another call's"
    if size == ERROR:
        raise LookupError(answer(uuid))
    return pattern(uuid, size) if size else answer(uuid)


async def task(ledger: str, uuid: int, seconds: float, size: int, *data: list[bytes]) -> Any:
    """Gives its number's answer, or so many bytes."""
    enter(ledger, uuid)
    if seconds:
        await asyncio.sleep(seconds)
    return _give(uuid, size, data)


def thread(ledger: str, uuid: int, seconds: float, size: int, *data: list[bytes]) -> Any:
    """As `task`, on a thread."""
    enter(ledger, uuid)
    if seconds:
        time.sleep(seconds)
    return _give(uuid, size, data)


def item(ledger: str, uuid: int) -> int:
    """One of a map."""
    enter(ledger, uuid)
    return answer(uuid)


OFTEN = 1000
"""Attempts of a nested call. It may run twice, since it enters itself nowhere."""


def given(uuid: int, size: int) -> Any:
    """What a call has to give, made in a call of its own."""
    return _give(uuid, size, ())


async def nest_task(ledger: str, uuid: int, _seconds: float, size: int) -> Any:
    """As `task`, by a call that it makes."""
    enter(ledger, uuid)
    return await percore.current_runner().options(retries=OFTEN).run(given, uuid, size)


def nest_thread(ledger: str, uuid: int, _seconds: float, size: int) -> Any:
    """As `nest_task`, on a thread."""
    enter(ledger, uuid)
    return percore.current_runner().options(retries=OFTEN).run_sync(given, uuid, size)


def parts(uuid: int, size: int) -> Iterator[int | bytes]:
    """A stream that another call consumes."""
    for number in range(ITEMS):
        yield part(uuid, number, size)


async def consume_task(ledger: str, uuid: int, _seconds: float, size: int) -> int:
    """Consumes a stream, from its beginning again if its worker dies."""
    enter(ledger, uuid)
    found: list[int | bytes] = []
    while not found:
        with contextlib.suppress(percore.WorkerDied):
            found = [item async for item in percore.current_runner().options(prefetch=4).stream(parts, uuid, size)]
    return _checked(uuid, size, found)


def consume_thread(ledger: str, uuid: int, _seconds: float, size: int) -> int:
    """As `consume_task`, on a thread."""
    enter(ledger, uuid)
    found: list[int | bytes] = []
    while not found:
        with contextlib.suppress(percore.WorkerDied):
            found = list(percore.current_runner().options(prefetch=4).stream(parts, uuid, size))
    return _checked(uuid, size, found)


def _checked(uuid: int, size: int, found: list[int | bytes]) -> int:
    return answer(uuid) if found == [part(uuid, number, size) for number in range(ITEMS)] else -1


ITEMS = 10
"""Of a stream."""


def part(uuid: int, number: int, size: int) -> int | bytes:
    """An item of a stream."""
    return pattern(uuid + number, size) if size else uuid + number


async def stream_task(ledger: str, uuid: int, size: int) -> AsyncIterator[int | bytes]:
    """A stream of `ITEMS` parts."""
    enter(ledger, uuid)
    for number in range(ITEMS):
        yield part(uuid, number, size)


def stream_thread(ledger: str, uuid: int, size: int) -> Iterator[int | bytes]:
    """As `stream_task`, on a thread."""
    enter(ledger, uuid)
    for number in range(ITEMS):
        yield part(uuid, number, size)


async def block(ledger: str, uuid: int, gate: str) -> int:
    """Holds its worker's loop until the gate gives a byte."""
    enter(ledger, uuid)
    _pass(gate)
    return answer(uuid)


async def hold(ledger: str, uuid: int, gate: str) -> int:
    """As `block`, for itself alone."""
    enter(ledger, uuid)
    await asyncio.to_thread(_pass, gate)
    return answer(uuid)


def _pass(gate: str) -> None:
    with open(gate, "rb", buffering=0) as file:
        file.read(1)


async def nothing() -> None:
    """For whoever waits until the workers are ready."""


@contextlib.contextmanager
def observed() -> Iterator[None]:
    """From now on this worker's points know its state."""
    faulthandler.disable()
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    channel = next(thing for thing in gc.get_objects() if isinstance(thing, Channel))
    fault_points.observe = _Observer(channel)
    yield


class _Observer:
    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._server: Any = channel.on_frame.__self__  # type: ignore[attr-defined]  # a bound method

    def __call__(self) -> str:
        channel, server = self._channel, self._server
        tasks, threads = server._tasks, server._threads
        calls = len(tasks.by_id) + len(tasks.handed_over) + len(threads.waiting) + len(threads._running)
        words = ["busy" if calls > 1 else "idle"]
        if channel._frame is not None:  # it waits for room in the ring
            words.append("full")
        if channel.outgoing.in_use == channel.outgoing.count:
            words.append("slots")
        return " ".join([*words, f"full_count={channel.full_count}", f"slots={channel.outgoing.in_use}/{channel.outgoing.count}"])
