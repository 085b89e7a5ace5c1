"""What the tests of deaths run in workers, beyond `fault_calls`: results that kill, children that stay, lifespans that fail."""

import asyncio
import contextlib
import json
import multiprocessing
import os
import signal
import struct
import subprocess
import sys
import zlib
from collections.abc import AsyncIterator, Iterator
from typing import Any, NoReturn

import percore
from percore._protocol.messages import MARK_WORDS, VALUE
from percore._transport import codec
from tests.e2e.fault_calls import _channel, append, pattern, tell, who_in_thread

# Children of workers


def fds() -> list[tuple[int, str]]:
    """What is open here, but for the standard streams."""
    found = []
    for name in os.listdir("/proc/self/fd"):
        path = f"/proc/self/fd/{name}"
        if int(name) > 2 and os.path.lexists(path):  # the folder's own is gone by now
            found.append((int(name), os.readlink(path)))
    return found


_LOOK = """
import json, os, signal, sys
paths = [(int(name), f"/proc/self/fd/{name}") for name in os.listdir("/proc/self/fd")]
found = [(name, os.readlink(path)) for name, path in paths if name > 2 and os.path.lexists(path)]
with open(sys.argv[1], "w") as wire:
    wire.write(json.dumps([os.getpid(), found]) + "\\n")
while True:
    signal.pause()
"""


def _look_and_stay(wire: str) -> None:
    append(wire, json.dumps([os.getpid(), fds()]))
    while True:
        signal.pause()


def leave_child(how: str, wire: str) -> NoReturn:
    """Die, and leave a child behind. First this worker's open files are told, then the child's pid and its own."""
    append(wire, json.dumps(fds()))
    if how == "multiprocessing":
        multiprocessing.get_context("fork").Process(target=_look_and_stay, args=(wire,)).start()
    elif how == "subprocess":
        subprocess.Popen([sys.executable, "-S", "-c", _LOOK, wire], close_fds=False)
    elif os.fork() == 0:
        _look_and_stay(wire)
    os._exit(7)


async def leave_child_in_task(how: str, wire: str) -> NoReturn:
    leave_child(how, wire)


def _wait_to_be_ended(up: Any) -> None:
    up.send(None)
    while True:
        signal.pause()


def end_child() -> tuple[int | None, int]:
    """The exit code of a child that was told to end, and this worker's pid."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    child = context.Process(target=_wait_to_be_ended, args=(there,))
    child.start()
    here.recv()
    child.terminate()
    child.join(10)
    code = child.exitcode
    child.kill()
    child.join()
    return code, os.getpid()


async def end_child_in_task() -> tuple[int | None, int]:
    return end_child()


# Results that are written half


class _Strikes:
    """What is in the middle of a result, and strikes the worker that pickles it."""

    def __init__(self, signum: int) -> None:
        self.signum = signum

    def __reduce__(self) -> tuple[Any, ...]:
        os.kill(os.getpid(), self.signum)
        return int, ("0",)


def give_half(size: int, signum: int) -> list[Any]:
    """A result in whose middle this worker is killed, or stopped."""
    return [pattern(1, size), _Strikes(signum), pattern(2, size)]


async def give_half_in_task(size: int, signum: int) -> list[Any]:
    return give_half(size, signum)


async def die_in_a_frame(length: int) -> NoReturn:
    """Die with so many bytes of this call's result in the ring (-1: all), and the bell not rung."""
    channel = _channel()
    call_id = max(channel.on_frame.__self__._marks[::MARK_WORDS])
    data = codec.encode([(VALUE, call_id, 42)])
    frame = struct.pack("<II", len(data), zlib.crc32(data)) + data
    part = frame if length < 0 else frame[:length]
    at = channel.tx.written % channel.tx.size
    channel.tx._view[at : at + len(part)] = part
    os._exit(9)


# Arguments and results that kill when they go


class DiesWhenDropped:
    """Kills the worker that has unpickled it, when that lets go of it: after its call's result was sent."""

    def __init__(self) -> None:
        self.home = 0

    def __setstate__(self, state: dict[str, int]) -> None:
        self.home = os.getpid()

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (), {"home": 0}

    def __del__(self) -> None:
        if self.home == os.getpid():
            os._exit(9)


def take(size: int, _argument: object) -> bytes:
    return pattern(7, size)


async def take_in_task(size: int, _argument: object) -> bytes:
    return pattern(7, size)


class DiesWhenSent(DiesWhenDropped):
    """A result that does so; it arrives as bytes."""

    def __init__(self, size: int) -> None:
        self.home = os.getpid()
        self.size = size

    def __reduce__(self) -> tuple[Any, ...]:
        return bytes, (pattern(7, self.size),)


def give_death(size: int, _argument: object) -> Any:
    return DiesWhenSent(size)


async def give_death_in_task(size: int, _argument: object) -> Any:
    return DiesWhenSent(size)


# Calls that exit, are deaf, kill


async def exit_by_libc_in_task(code: int) -> None:
    import ctypes  # seldom needed, and not cheap to import

    ctypes.CDLL(None).exit(code)


async def be_deaf_to_sigterm(wire: str) -> None:
    """Swallow SIGTERM from now on."""
    asyncio.get_running_loop().remove_signal_handler(signal.SIGTERM)
    signal.signal(signal.SIGTERM, lambda *_: append(wire, "swallowed"))


async def kill_told(folder: str) -> tuple[int, int, int]:
    """Say which worker this is, and kill the process whose pid is told, if any."""
    worker = percore.current_worker()
    path = f"{folder}/{worker.index}"
    tell(f"{folder}/told")
    pid = int(await asyncio.to_thread(_read_line, path))
    if pid:
        os.kill(pid, signal.SIGKILL)
    return who_in_thread()


def _read_line(path: str) -> str:
    with open(path, encoding="ascii") as file:
        return file.readline()


def poison(ledger: str) -> NoReturn:
    tell(ledger)
    os._exit(13)


# Lifespans, with functools.partial


@contextlib.asynccontextmanager
async def held_until(generation: int, wire: str) -> AsyncIterator[None]:
    """Tell of each birth. Only the first generation, and those from this one on, are ever ready."""
    tell(wire)
    if 1 < percore.current_worker().generation < generation:
        await asyncio.Event().wait()
    yield


@contextlib.contextmanager
def failing_if(path: str) -> Iterator[None]:
    """Raise while the file exists."""
    if os.path.exists(path):
        raise LookupError("no such database today")
    yield


@contextlib.asynccontextmanager
async def failing_at_the_end() -> AsyncIterator[None]:
    yield
    raise LookupError("the session was lost")


@contextlib.contextmanager
def counting_births(births: str) -> Iterator[None]:
    tell(births)
    yield
