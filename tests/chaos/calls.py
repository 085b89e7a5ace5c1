"""What runs in the workers. Imported by all sides, so it is light.

Every call has a number of its own. First of all it enters itself in the ledger, with one write, and last of all its end, with
another; what it gives is a function of its number, so that no result can pass for another's.
"""

import asyncio
import contextlib
import ctypes
import faulthandler
import fcntl
import gc
import os
import signal
import threading
import time
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextvars import ContextVar
from functools import wraps
from inspect import isasyncgenfunction, iscoroutinefunction, isgeneratorfunction
from typing import Any, Final, NoReturn, TypeVar

import percore
from tests.marks import began

_ENTRY: Final = 64
"""Bytes of an entry in the ledger, of which a page holds a whole number."""

ENDED: Final = "ended"
"""The last word of an entry about the end of a call."""

RETRIES: Final = 3

NUMBER: ContextVar[int] = ContextVar("NUMBER")
"""The number of a call, once more, where the runner takes context variables along."""

EXIT, LIBC_EXIT = signal.SIGRTMIN, signal.SIGRTMIN + 1
"""Signals at which a worker leaves at once: with os._exit(0), and with exit(0) of the C library."""


def answer(uuid: int) -> int:
    """What a call of that number has to give."""
    return zlib.crc32(uuid.to_bytes(8, "little"))


def large_size(uuid: int) -> int:
    """Bytes of a large result or argument: always in a slot."""
    return 300_000 + uuid * 7919 % 900_000


def pattern(uuid: int) -> bytes:
    """Bytes that no other number has."""
    size = large_size(uuid)
    block = uuid.to_bytes(8, "little") * 512
    return (block * (size // len(block) + 1))[:size]


def fails(uuid: int) -> bool:
    """Whether the item of that number fails, where some do."""
    return uuid % 13 == 0


# A worker's own


class _Worker:
    """What the lifespan opens."""

    ledger = -1
    rates = -1
    folder = ""
    per_key: int | None = None
    patience = 0.0
    keys: Counter[str]
    locks: dict[str, int]
    lock: threading.Lock
    stamp = ""


@contextlib.contextmanager
def serving(folder: str, per_key: int | None, patience: float = 0.0) -> Iterator[None]:
    """Tell the judge of this worker, and be ready for its signals."""
    asyncio.get_running_loop().slow_callback_duration = 60  # a loaded machine is the point of this load
    faulthandler.disable()
    worker = percore.current_worker()
    host = _parent_of(os.getppid()) if worker.node else 0
    os.write(1, f"born {worker.pid} {worker.index} {worker.generation} {host}\n".encode())
    faulthandler.register(signal.SIGUSR1, all_threads=True)
    signal.signal(EXIT, lambda *_: os._exit(0))
    signal.signal(LIBC_EXIT, lambda *_: ctypes.CDLL(None).exit(0))
    with entering(folder, f"{worker.pid} {worker.generation}", per_key, patience):
        yield


@contextlib.contextmanager
def entering(folder: str, stamp: str, per_key: int | None = None, patience: float = 0.0) -> Iterator[None]:
    """Have the calls of this process enter themselves in the ledger of a folder, with this stamp."""
    _Worker.folder, _Worker.per_key, _Worker.patience = folder, per_key, patience
    _Worker.keys, _Worker.locks, _Worker.lock = Counter(), {}, threading.Lock()
    _Worker.stamp = stamp
    _Worker.ledger = os.open(f"{folder}/ledger", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    _Worker.rates = os.open(f"{folder}/rates", os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
    yield
    os.close(_Worker.ledger)
    os.close(_Worker.rates)


def _parent_of(pid: int) -> int:
    with contextlib.suppress(OSError), open(f"/proc/{pid}/stat", encoding="utf-8") as file:
        return int(file.read().rpartition(")")[2].split()[1])
    return 0


def enter(uuid: int) -> None:
    """The first thing a call does.

    All entries are equally long, so that none crosses the border of two pages: a kill may tear a write there, and nowhere else.
    """
    _write(f"{uuid} {_Worker.stamp} {time.monotonic_ns()}")


def _write(entry: str) -> None:
    os.write(_Worker.ledger, f"{entry.ljust(_ENTRY - 1)}\n".encode())


def _leave(uuid: int) -> None:
    """The last thing a call does, however it ends."""
    _write(f"{uuid} {_Worker.stamp} {time.monotonic_ns()} {ENDED}")


F = TypeVar("F", bound=Callable[..., Any])


def ends(fn: F) -> F:
    """Have a call note its end in the ledger."""
    if isasyncgenfunction(fn):

        @wraps(fn)
        async def agenerate(uuid: int, *args: Any) -> Any:
            try:
                async with contextlib.aclosing(fn(uuid, *args)) as items:
                    async for item in items:
                        yield item
            finally:
                _leave(uuid)

        return agenerate  # type: ignore[return-value]
    if iscoroutinefunction(fn):

        @wraps(fn)
        async def acall(uuid: int, *args: Any) -> Any:
            try:
                return await fn(uuid, *args)
            finally:
                _leave(uuid)

        return acall  # type: ignore[return-value]
    if isgeneratorfunction(fn):

        @wraps(fn)
        def generate(uuid: int, *args: Any) -> Any:
            try:
                yield from fn(uuid, *args)
            finally:
                _leave(uuid)

        return generate  # type: ignore[return-value]

    @wraps(fn)
    def call(uuid: int, *args: Any) -> Any:
        try:
            return fn(uuid, *args)
        finally:
            _leave(uuid)

    return call  # type: ignore[return-value]


def _enter_alone(uuid: int) -> int:
    """Enter a single call; what it has to give, unless it sees another's context."""
    enter(uuid)
    return answer(uuid) if NUMBER.get(uuid) == uuid else -1


# Calls


@ends
async def task(uuid: int, seconds: float) -> int:
    value = _enter_alone(uuid)
    await asyncio.sleep(seconds)
    return value


@ends
def thread(uuid: int, size: int) -> int:
    value = _enter_alone(uuid)
    zlib.crc32(bytes(size))
    return value


@ends
async def stubborn(uuid: int) -> int:
    """Goes on for a while when it is cancelled, as clean-up does."""
    value = _enter_alone(uuid)
    try:
        await asyncio.sleep(0.005)
    finally:
        await asyncio.sleep(0.005)
    return value


@ends
def awaitable(uuid: int) -> Awaitable[int]:
    """A plain function; what it returns is awaited in the worker's loop."""
    return asyncio.sleep(0.001, _enter_alone(uuid))


@ends
def collects(uuid: int) -> int:
    """Leaves cycles behind, and has them collected."""
    value = _enter_alone(uuid)
    for _ in range(100):
        cycle: list[Any] = []
        cycle.append(cycle)
    gc.collect(1)
    return value


@ends
def large_result(uuid: int) -> bytes:
    enter(uuid)
    return pattern(uuid)


@ends
async def large_result_of_task(uuid: int) -> bytes:
    return large_result(uuid)


@ends
def large_argument(uuid: int, data: bytes) -> int:
    value = _enter_alone(uuid)
    return value if data == pattern(uuid) else -1


@ends
async def echo(uuid: int, data: bytearray) -> bytearray:
    enter(uuid)
    return data


@ends
async def failing(uuid: int) -> NoReturn:
    enter(uuid)
    raise LookupError(answer(uuid))


@ends
def exiting(uuid: int) -> NoReturn:
    """Ends nothing but itself."""
    enter(uuid)
    raise SystemExit(3)


@ends
def unpicklable(uuid: int) -> object:
    enter(uuid)
    return threading.Lock()


@ends
def flaky(uuid: int) -> int:
    """Fails at its first attempt."""
    value = _enter_alone(uuid)
    try:
        os.close(os.open(f"{_Worker.folder}/flaky-{uuid}", os.O_CREAT | os.O_EXCL))
    except FileExistsError:
        return value
    raise ConnectionError(answer(uuid))


@ends
async def slow(uuid: int, seconds: float) -> int:
    return await task(uuid, seconds)


@ends
def slow_in_thread(uuid: int, seconds: float) -> int:
    value = _enter_alone(uuid)
    time.sleep(seconds)
    return value


async def stuck(uuid: int) -> NoReturn:
    """Ends with its worker alone."""
    enter(uuid)
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.sleep(60)


def stuck_in_thread(uuid: int) -> NoReturn:
    """As `stuck`."""
    enter(uuid)
    while True:
        time.sleep(60)


@ends
def everywhere(uuid: int) -> int:
    """For broadcast."""
    return _enter_alone(uuid)


# Calls that make calls. These have the two numbers after that of their caller


@ends
async def caller(uuid: int, seconds: float, size: int) -> tuple[int, list[Any]]:
    """Give its value, and the outcomes of its calls."""
    value = _enter_alone(uuid)
    runner = percore.current_runner()
    NUMBER.set(uuid + 1)
    first = runner.submit(task, uuid + 1, seconds)
    NUMBER.set(uuid + 2)
    second = runner.submit(thread, uuid + 2, size)
    return value, list(await asyncio.gather(first, second, return_exceptions=True))


@ends
def caller_in_thread(uuid: int, seconds: float, size: int) -> tuple[int, list[Any]]:
    """As `caller`, one call after the other."""
    value = _enter_alone(uuid)
    runner = percore.current_runner()
    outcomes: list[Any] = []
    nested: list[tuple[Any, float]] = [(task, seconds), (thread, size)]
    for number, (fn, argument) in enumerate(nested, uuid + 1):
        token = NUMBER.set(number)
        try:
            outcomes.append(runner.run_sync(fn, number, argument))
        except percore.PercoreError as error:
            outcomes.append(error)
        finally:
            NUMBER.reset(token)  # the next call of this thread may have the same context
    return value, outcomes


@ends
async def caller_by_maps(uuid: int, seconds: float, size: int) -> tuple[int, list[Any]]:
    """As `caller`, by maps of one item each."""
    value = _enter_alone(uuid)
    runner = percore.current_runner()
    NUMBER.set(uuid + 1)
    first = runner.map(task, [uuid + 1], [seconds], return_exceptions=True)
    NUMBER.set(uuid + 2)
    second = runner.starmap(thread, [(uuid + 2, size)], return_exceptions=True)
    outcomes = await asyncio.gather(first.collect(), second.collect())
    return value, [outcome for (outcome,) in outcomes]


@ends
def caller_by_maps_in_thread(uuid: int, seconds: float, size: int) -> tuple[int, list[Any]]:
    """As `caller_by_maps`, one after the other."""
    value = _enter_alone(uuid)
    runner = percore.current_runner()
    outcomes: list[Any] = []
    nested: list[tuple[Any, float]] = [(task, seconds), (thread, size)]
    for number, (fn, argument) in enumerate(nested, uuid + 1):
        token = NUMBER.set(number)
        try:
            outcomes += list(runner.map(fn, [number], [argument], return_exceptions=True))
        finally:
            NUMBER.reset(token)
    return value, outcomes


@ends
async def caller_with_keys(uuid: int, key: str, rate: str | None) -> tuple[int, list[Any]]:
    """As `caller`: one of its calls has a key and retries, and the other the key of a rate, or that of its caller."""
    value = _enter_alone(uuid)
    runner = percore.current_runner()
    NUMBER.set(uuid + 1)
    first = runner.options(key=key, retries=RETRIES).submit(keyed, uuid + 1, key)
    NUMBER.set(uuid + 2)
    second = runner.submit(thread, uuid + 2, 1000) if rate is None else runner.options(key=rate).submit(rated, uuid + 2, rate)
    return value, list(await asyncio.gather(first, second, return_exceptions=True))


# Calls with a key: while one of them runs no other process may have one of that key


@ends
async def keyed(uuid: int, key: str) -> int:
    value = _enter_alone(uuid)
    with _holding(key) as is_right:
        await asyncio.sleep(0.005)
    return value if is_right else -2


@ends
def keyed_in_thread(uuid: int, key: str) -> int:
    value = _enter_alone(uuid)
    with _holding(key) as is_right:
        time.sleep(0.003)
    return value if is_right else -2


@contextlib.contextmanager
def _holding(key: str) -> Iterator[bool]:
    """Whether no other process holds this key, and not too many calls in this one. A killed process holds nothing any more.

    What runs on a node that is lost may hold a key for some time, which a worker's `patience` allows.
    """
    with _Worker.lock:
        _Worker.keys[key] += 1
        is_right = _Worker.per_key is None or _Worker.keys[key] <= _Worker.per_key
        if _Worker.keys[key] == 1:
            fd = _Worker.locks[key] = os.open(f"{_Worker.folder}/key-{key}", os.O_RDWR | os.O_CREAT, 0o600)
            is_right &= _is_locked(fd)
    try:
        yield is_right
    finally:
        with _Worker.lock:
            _Worker.keys[key] -= 1
            if not _Worker.keys[key]:
                os.close(_Worker.locks.pop(key))


def _is_locked(fd: int) -> bool:
    end = time.monotonic() + _Worker.patience
    while True:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if time.monotonic() > end:
                return False
            time.sleep(0.005)
        else:
            return True


# Calls with a rate: their starts are in a file of their own, as their workers have marked them

RATES: Final = {
    "even": percore.Rate(5, per=0.2),
    "burst": percore.Rate(8, per=0.4, burst=8),
    "both": percore.Rate(6, per=0.3, burst=3),
}
SLOWER: Final = {key: percore.Rate(rate.n // 2, per=rate.per) for key, rate in RATES.items()}
"""What the program makes of them for a while."""


@ends
async def rated(uuid: int, key: str) -> int:
    _note_start(key)
    return _enter_alone(uuid)


@ends
def rated_in_thread(uuid: int, key: str) -> int:
    _note_start(key)
    value = _enter_alone(uuid)
    time.sleep(0.001)
    return value


def _note_start(key: str) -> None:
    os.write(_Worker.rates, f"{f'{key} {began()}'.ljust(_ENTRY - 1)}\n".encode())


# Streams


def part(uuid: int, number: int) -> Any:
    """An item of a stream: a number, or now and then bytes that lie in a slot."""
    return pattern(uuid + number) if (uuid + number) % 11 == 0 else (uuid, number) if number % 2 else uuid + number


@ends
def parts(uuid: int, count: int, seconds: float) -> Iterator[Any]:
    enter(uuid)
    for number in range(count):
        time.sleep(seconds)
        yield part(uuid, number)


@ends
async def parts_of_task(uuid: int, count: int, seconds: float) -> AsyncIterator[Any]:
    enter(uuid)
    try:
        for number in range(count):
            await asyncio.sleep(seconds)
            yield part(uuid, number)
    finally:
        await asyncio.sleep(seconds)  # closing takes its time


def parts_at_a_rate(uuid: int, count: int, seconds: float, key: str) -> Iterator[Any]:
    """As `parts`, of a key with a rate."""
    _note_start(key)
    yield from parts(uuid, count, seconds)


@ends
def parts_passed_on(uuid: int, count: int, seconds: float) -> Iterator[Any]:
    """As `parts`, from another call. If the worker of that one dies, it goes on from there."""
    enter(uuid)
    taken = 0
    while taken < count:
        with contextlib.suppress(percore.WorkerDied):
            for item in percore.current_runner().options(prefetch=2, key=None).stream(_rest_of_parts, uuid, taken, count, seconds):
                taken += 1
                yield item


@ends
async def parts_passed_on_by_task(uuid: int, count: int, seconds: float) -> AsyncIterator[Any]:
    """As `parts_passed_on`."""
    enter(uuid)
    taken = 0
    while taken < count:
        with contextlib.suppress(percore.WorkerDied):
            stream = percore.current_runner().options(prefetch=2, key=None).stream(_rest_of_parts, uuid, taken, count, seconds)
            async for item in stream:
                taken += 1
                yield item


def _rest_of_parts(uuid: int, first: int, count: int, seconds: float) -> Iterator[Any]:
    for number in range(first, count):
        time.sleep(seconds)
        yield part(uuid, number)


# Items of maps


def key_of(uuid: int) -> str:
    return f"map{uuid % 5}"


@ends
def tiny(uuid: int) -> int:
    """Travels in batches."""
    enter(uuid)
    return answer(uuid)


@ends
def tiny_pair(uuid: int, data: bytes) -> tuple[int, int]:
    """As tiny, with arguments and a result that are pickled."""
    enter(uuid)
    return answer(uuid), len(data)


@ends
def tiny_failing(uuid: int) -> int:
    enter(uuid)
    if fails(uuid):
        raise LookupError(answer(uuid))
    return answer(uuid)


@ends
async def item(uuid: int) -> int:
    enter(uuid)
    await asyncio.sleep(uuid % 5 / 2000)
    return answer(uuid)


@ends
def keyed_item(uuid: int) -> int:
    return keyed_in_thread(uuid, key_of(uuid))


def accept(*args: object) -> int:
    """Of no number."""
    return len(args)


# For the figures of a quiet machine


async def hold() -> None:
    """Until its worker is killed."""
    os.write(1, f"holds {os.getpid()}\n".encode())
    await asyncio.Event().wait()


def served() -> int:
    return time.monotonic_ns()
