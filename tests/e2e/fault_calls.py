"""What the fault tests run in workers: calls that hold, die and misbehave, and lifespans that do."""

import asyncio
import contextlib
import faulthandler
import gc
import os
import re
import signal
import threading
from collections.abc import AsyncIterator, Iterator
from typing import Any, NoReturn

import percore
from percore._protocol.messages import MARK_WORDS, READY, RESULT, RETURNED, UNPICKLED, VALUE
from percore._transport import codec
from percore._transport.channel import Channel

faulthandler.register(signal.SIGUSR1, all_threads=True)


def tell(wire: str, word: str = "") -> None:
    """One line that says who does what. `wire` is a FIFO or a file; a write this short is never torn."""
    worker = percore.current_worker()
    append(wire, f"{worker.index} {worker.generation} {worker.pid} {word}".rstrip())


def append(path: str, line: str) -> None:
    fd = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    try:
        os.write(fd, line.encode() + b"\n")
    finally:
        os.close(fd)


async def write_down(ledger: str, number: int) -> int:
    append(ledger, str(number))
    return number


# Calls that stay


async def who() -> tuple[int, int, int]:
    return who_in_thread()


def who_in_thread() -> tuple[int, int, int]:
    worker = percore.current_worker()
    return worker.index, worker.generation, worker.pid


async def stay(wire: str, word: str = "") -> None:
    """Until it is cancelled."""
    tell(wire, word)
    try:
        await asyncio.Event().wait()
    except asyncio.CancelledError:
        tell(wire, f"{word} cancelled".lstrip())
        raise


def stay_in_thread(wire: str, word: str = "") -> None:
    """For ever."""
    tell(wire, word)
    threading.Event().wait()


async def stay_blocking(wire: str, word: str = "") -> None:
    """For ever, and its worker's loop with it."""
    stay_in_thread(wire, word)


async def stay_stubborn(wire: str, word: str = "") -> None:
    """For ever, whoever cancels it."""
    tell(wire, word)
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()


def stay_in_c(wire: str, word: str = "") -> None:
    """For longer than anybody waits, in C code that keeps the GIL."""
    tell(wire, word)
    re.match(r"(a+)+$", "a" * 60 + "b")


def hold(wire: str, gate: str) -> tuple[int, int, int]:
    """Until the gate gives a byte."""
    tell(wire)
    with open(gate, "rb", buffering=0) as file:
        file.read(1)
    return who_in_thread()


async def hold_in_task(wire: str, gate: str) -> tuple[int, int, int]:
    return await asyncio.to_thread(hold, wire, gate)


def writable_memory() -> set[int]:
    """Inodes of the shared memory that this worker can write."""
    with open("/proc/self/maps", encoding="utf-8") as maps:
        fields = [line.split(maxsplit=5) for line in maps if "/memfd:" in line]
    return {int(inode) for _, permissions, _, _, inode, _ in fields if permissions.startswith("rw-s")}


# Calls that die


async def exit_with(code: int) -> NoReturn:
    os._exit(code)


def exit_with_in_thread(code: int) -> NoReturn:
    os._exit(code)


def exit_by_libc(code: int) -> None:
    import ctypes  # seldom needed, and not cheap to import

    ctypes.CDLL(None).exit(code)


def kill_self(signum: int) -> None:
    faulthandler.disable()
    os.kill(os.getpid(), signum)
    threading.Event().wait()


async def kill_other(pid: int) -> None:
    os.kill(pid, signal.SIGKILL)


def fork_and_die(wire: str) -> None:
    """Leave a child behind that has all of this process's descriptors."""
    if os.fork():
        os._exit(7)
    tell(wire, str(os.getpid()))
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    while True:
        signal.pause()


class DiesWhenLoaded:
    """Kills the worker that unpickles it."""

    def __init__(self, wire: str) -> None:
        self.wire = wire

    def __reduce__(self) -> tuple[Any, ...]:
        return _die_loading, (self.wire,)


def _die_loading(wire: str) -> NoReturn:
    tell(wire)
    os._exit(9)


class DiesWhenPickled:
    def __reduce__(self) -> NoReturn:
        os._exit(9)


def give_unpicklable_death() -> DiesWhenPickled:
    return DiesWhenPickled()


class DiesLater:
    """A result that kills its worker when that lets go of it: after it was sent."""

    def __init__(self) -> None:
        self.home = os.getpid()

    def __del__(self) -> None:
        if os.getpid() == self.home:
            os._exit(9)

    def __reduce__(self) -> tuple[Any, ...]:
        return int, ("42",)


def give_death_later() -> DiesLater:
    return DiesLater()


def accept(*args: object) -> int:
    return len(args)


def pattern(seed: int, size: int) -> bytes:
    """Bytes that no other seed has."""
    block = seed.to_bytes(8, "little") * 512
    return (block * (size // len(block) + 1))[:size]


async def pattern_in_task(seed: int, size: int) -> bytes:
    return pattern(seed, size)


# Workers that misbehave


def _channel() -> Any:
    return next(thing for thing in gc.get_objects() if isinstance(thing, Channel))


class _Vandal:
    """Scribbles over the ring between writing and ringing, through a way no guard of Python sees."""

    def __init__(self, bell: Any) -> None:
        self._bell = bell

    def ring(self, published: int, consumed: int) -> bool:
        with open("/proc/self/maps", encoding="ascii") as maps, open("/proc/self/mem", "r+b", buffering=0) as memory:
            start, _ = next(_span(line) for line in maps if "percore" in line and "rw-s" in line and _is_cell(line))
            memory.seek(start + (1 << 19))
            memory.write(b"\xa5" * (1 << 19))
        ringing: bool = self._bell.ring(published, consumed)
        return ringing

    def __getattr__(self, name: str) -> Any:
        return getattr(self._bell, name)


def _span(line: str) -> tuple[int, int]:
    start, _, end = line.split()[0].partition("-")
    return int(start, 16), int(end, 16)


def _is_cell(line: str) -> bool:
    start, end = _span(line)
    return 1 << 20 <= end - start < 1 << 24


def misbehave(how: str) -> int:
    """Break the channel in one of many ways, from a worker's thread. Its result may or may not be sent before that shows."""
    channel = _channel()
    channel.loop.call_soon_threadsafe(_misbehave, channel, how)
    threading.Event().wait()
    return 0


def _misbehave(channel: Any, how: str) -> None:
    if how == "scribble":
        channel._bell = _Vandal(channel._bell)
        channel.send(RETURNED, 0, None)
    elif how in _LIES:
        channel._bell.ring(*_LIES[how])
    elif how == "crc":
        length = channel.tx.write(codec.encode([(RETURNED, 0, None)]))
        channel.tx._view[(channel.tx.written - 1) % channel.tx.size] ^= 1
        channel._bell.ring(length, 0)
    else:
        call_id = max(channel.on_frame.__self__._marks[::MARK_WORDS]) if how.startswith("own call") else 0
        message = _FRAMES[how]
        channel._bell.ring(channel.tx.write(codec.encode(message(call_id))), 0)


_LIES = {
    "published nothing": (100, 0),
    "published half a header": (3, 0),
    "published more than the ring": (1 << 31, 0),
    "read what was never written": (0, 1 << 31),
}

_FRAMES: dict[str, Any] = {
    "unknown message": lambda _: [(99, 1, None)],
    "unknown call": lambda _: [(VALUE, 987654321, None)],
    "unknown call unpickled": lambda _: [(UNPICKLED, 987654321, None)],
    "unknown call returned": lambda _: [(RETURNED, 987654321, None)],
    "ready again": lambda _: [(READY, 0, None)],
    "no list": lambda _: {1: 2},
    "no triple": lambda _: [(VALUE,)],
    "no numbers": lambda _: [("a", "b", "c")],
    "own call, slot out of bounds": lambda call: [(RESULT, call, (1 << 40) << 10 | 1)],
    "own call, no such slot": lambda call: [(RESULT, call, 8 << 10 | 1023)],
    "own call, negative slot": lambda call: [(RESULT, call, -5)],
    "own call, body of a wrong type": lambda call: [(RESULT, call, "text")],
    "own call, error of a wrong type": lambda call: [(3, call, 1.5)],
}

MISDEEDS = ["scribble", "crc", *_LIES, *_FRAMES]


# Lifespans, with functools.partial


@contextlib.asynccontextmanager
async def telling(wire: str) -> AsyncIterator[None]:
    tell(wire, "entered")
    yield
    tell(wire, "left")


@contextlib.contextmanager
def dying_if(path: str, births: str, index: int = -1) -> Iterator[None]:
    """Die while the file exists, in that slot or in all."""
    tell(births)
    if os.path.exists(path) and index in (-1, percore.current_worker().index):
        os._exit(5)
    yield


@contextlib.asynccontextmanager
async def hanging_if(path: str, births: str) -> AsyncIterator[None]:
    """Never be ready if the file existed before this was told."""
    hangs = os.path.exists(path)  # noqa: ASYNC240  # a look at a name
    tell(births)
    if hangs:
        await asyncio.Event().wait()
    yield


@contextlib.asynccontextmanager
async def hanging_at_the_end(wire: str) -> AsyncIterator[None]:
    tell(wire, "entered")
    yield
    tell(wire, "leaving")
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()


@contextlib.asynccontextmanager
async def dying_at_the_end() -> AsyncIterator[None]:
    yield
    os._exit(6)
