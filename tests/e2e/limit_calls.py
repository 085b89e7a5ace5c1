"""What the tests of limits run in workers: entries in a ledger, large things, floods, and hogs of threads."""

import asyncio
import faulthandler
import gc
import mmap
import os
import signal
import threading
from pickle import PickleBuffer
from typing import Any

import percore
from percore._transport.worker_side import WorkerSide

faulthandler.register(signal.SIGUSR1, all_threads=True)

LETTERS = b"percore, a letter for each place: "


def pid() -> int:
    return os.getpid()


async def pid_of_task() -> int:
    return os.getpid()


def enter(ledger: str, number: int) -> int:
    """One line of the ledger, before anything else."""
    fd = os.open(ledger, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(fd, f"{number} {os.getpid()} {percore.current_worker().generation}\n".encode())
    finally:
        os.close(fd)
    return 7 * number


async def enter_in_task(ledger: str, number: int) -> int:
    return enter(ledger, number)


# Large things


def with_letters(size: int) -> bytearray:
    """Zeros, but for a letter at each end and around each multiple of 2**31: what a truncated length would lose."""
    data = bytearray(size)
    for place in _places(size):
        data[place] = LETTERS[place % len(LETTERS)]
    return data


async def with_letters_in_task(size: int) -> bytearray:
    return with_letters(size)


def has_letters(data: bytearray, size: int) -> bool:
    return len(data) == size and all(data[place] == LETTERS[place % len(LETTERS)] for place in _places(size))


async def has_letters_in_task(data: bytearray, size: int) -> bool:
    return has_letters(data, size)


def _places(size: int) -> set[int]:
    edges = [0, size, *range(1 << 31, size, 1 << 31)]
    return {edge + offset for edge in edges for offset in (-2, -1, 0, 1) if 0 <= edge + offset < size}


def sparse_with_letters(size: int) -> Any:
    """As `with_letters`, which is what arrives; here it takes no memory, but for the letters."""
    data = mmap.mmap(-1, size)
    for place in _places(size):
        data[place] = LETTERS[place % len(LETTERS)]
    return PickleBuffer(data)


def zeros(size: int) -> bytes:
    """Takes no memory before somebody writes it."""
    return bytes(size)


def length(data: bytes) -> int:
    return len(data)


# Floods


class _Telling(WorkerSide):
    """Tells when the ring to the supervisor is full."""

    wire = ""
    _full_count = 0

    @property
    def full_count(self) -> int:
        return self._full_count

    @full_count.setter
    def full_count(self, count: int) -> None:
        first, self._full_count = self._full_count == 0, count
        if first:
            with open(self.wire, "wb", buffering=0) as wire:
                wire.write(b"full\n")


def tell_when_full(wire: str) -> None:
    channel: Any = next(thing for thing in gc.get_objects() if isinstance(thing, WorkerSide))
    del channel.full_count
    _Telling.wire = wire
    channel.__class__ = _Telling


# Hogs, and who is beside them


async def twice_in_task(number: int, _padding: str = "") -> int:
    return 2 * number


async def stay() -> None:
    await asyncio.Event().wait()


def never(wire: str) -> None:
    """Tell, and never end."""
    with open(wire, "wb", buffering=0) as file:
        file.write(f"{os.getpid()}\n".encode())
    threading.Event().wait()


_kept: list[Any] = []


async def exhaust_default_executor(count: int) -> int:
    """Never-ending calls in so many threads of the loop's default executor."""
    loop = asyncio.get_running_loop()
    _kept.extend(loop.run_in_executor(None, threading.Event().wait) for _ in range(count))
    return os.getpid()


async def by_default_executor(number: int) -> int:
    """A plain function that waits for another one of this worker."""
    return await asyncio.to_thread(abs, number)
