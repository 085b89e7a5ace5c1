"""Payloads there and back, one call at a time, one worker; and one payload that all workers share.

The function is the identity, so that only the way there and back is measured. percore runs it as a coroutine, and for
comparison as the plain function that the pools get. The bare echo is the least that two loops in two processes can do with as
many bytes: copy them into shared memory that is mapped and warm, ring an eventfd, and the same back. Bytes are copied out on
either side; an array stays where it lies. One memcpy, from warm memory to warm memory, is below everything else. This process
is on one CPU, and all others are on a second one.
"""

from __future__ import annotations

import operator
import os
import time
from dataclasses import dataclass
from functools import cache, partial
from importlib.util import find_spec
from statistics import fmean
from typing import TYPE_CHECKING, Any

import psutil

from benchmarks.bare import bare_echo
from benchmarks.calls import nothing, same, same_plainly, sum_of
from benchmarks.contestants import WrongResult, always, percore_call, playing, runner, timed
from benchmarks.figures import Target, in_mebibytes, in_seconds, in_times
from benchmarks.harness import Row, row
from benchmarks.machine import Pin, descendants, pss_of_all
from benchmarks.peers import executors
from benchmarks.plots import Plot

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    import percore
    from benchmarks.harness import Contestant
    from benchmarks.peers import Call
    from benchmarks.results import Sample

KB, MB = 1_000, 1_000_000
SIZES = {"1 kB": KB, "10 kB": 10 * KB, "100 kB": 100 * KB, "1 MB": MB, "10 MB": 10 * MB, "50 MB": 50 * MB}
ARRAYS = {"80 kB": 80 * KB, "800 kB": 800 * KB, "8 MB": 8 * MB, "80 MB": 80 * MB}

BARE, MEMCPY, POOL, INTERPRETERS = "bare echo", "one memcpy", "ProcessPoolExecutor", "InterpreterPoolExecutor"
COPIES = "two copies into fresh memory"

SEVENTH, OF_BARE = 0.142, 1.5

SHARED = 100_000
"""Bytes from which on interpreters, which share this process's memory, should be no faster either."""


@dataclass(frozen=True, slots=True)
class Payload:
    """An object of about `size` bytes, sent there and back `calls` times in a round. `make` makes it when it is needed.

    Two targets: percore's time is at most `of_pool` times ProcessPoolExecutor's, and `of_bare` times that of a bare echo.
    """

    name: str
    size: int
    calls: int
    make: Callable[[], Any]
    of_pool: float | None = None
    of_bare: float | None = None
    is_same: Callable[[Any, Any], bool] = operator.eq


@row(rounds=15, seconds=20)
def bytes_1mb(quick: bool) -> Row:
    """1 MB of bytes to a worker and back, 1 worker, one call at a time.

    The identity, as a coroutine and as a plain function, so that only the way there and back is measured.
    """

    async def once(call: Call) -> Sample:
        payload = os.urandom(MB)
        return {"a call": fmean([await timed(call, payload) for _ in range(20 if quick else 200)])}

    ours = {"percore, coroutine": same, "percore, plain function": same_plainly}
    return Row(
        {
            POOL: playing(partial(executors.calling, executors.processes, 1, same_plainly), once),
            **{name: playing(partial(percore_call, function, workers=1), once) for name, function in ours.items()},
        },
        [Target(name, "a call", POOL, at_least=7) for name in ours],
    )


@row(rounds=15, seconds=45, pin=Pin.APART)
def payload_sizes(quick: bool) -> Row:
    """Bytes in a list to a worker and back, 1 kB to 50 MB, 1 worker, one call at a time.

    The cost of a byte, by size. From 32 MiB on the system gives Python fresh memory for each such object, which takes longer
    than copying.
    """
    of_pool = {"1 kB": 0.5, "100 kB": 0.45, "1 MB": SEVENTH, "10 MB": SEVENTH, "50 MB": 0.35}

    def calls(size: int) -> int:
        """As many as take about as long as those of the other sizes."""
        return max(2, min(200, 40 * MB // size) // (10 if quick else 1))

    payloads = [
        Payload(name, size, calls(size), partial(_listed, size), of_pool.get(name), OF_BARE) for name, size in SIZES.items()
    ]
    return Row(
        {MEMCPY: memcpy(payloads), **_echoes(payloads)},
        targets_of(payloads),
        plot=Plot("Bytes there and back, one call at a time", "bytes", "seconds", SIZES, say_y=in_seconds, hidden=MEMCPY),
    )


@row(rounds=15, seconds=35, pin=Pin.APART)
def payload_arrays(quick: bool) -> Row:
    """numpy arrays of 80 kB to 80 MB, a pandas frame and an Arrow table there and back, 1 worker, one call at a time.

    An array needs one copy each way and none on receipt: its limit is a bare echo that copies as often. An array of 800 MB has
    a row of its own.
    """
    calls = {"80 kB": 60, "800 kB": 20, "8 MB": 5, "80 MB": 1}
    of_pool = {"80 kB": 0.45, "8 MB": SEVENTH}
    of_bare = {"80 kB": OF_BARE, "8 MB": OF_BARE}
    arrays = [
        Payload(name, size, calls[name], partial(array_of, size), of_pool.get(name), of_bare.get(name), is_same_array)
        for name, size in ARRAYS.items()
    ]
    tables = {"pandas": ("pandas, 50 MB", _frame), "pyarrow": ("Arrow, 50 MB", _table)}
    payloads = arrays + [
        Payload(name, 50 * MB, 1, make, SEVENTH, is_same=lambda one, other: bool(one.equals(other)))
        for library, (name, make) in tables.items()
        if find_spec(library) is not None
    ]
    return Row(
        {MEMCPY: memcpy(arrays), **_echoes(payloads, views=True)},
        targets_of(payloads),
        plot=Plot("A numpy array there and back, one call at a time", "bytes", "seconds", ARRAYS, say_y=in_seconds, hidden=MEMCPY),
    )


@row(rounds=15, seconds=35, pin=Pin.APART)
def payload_containers(quick: bool) -> Row:
    """Ints, strings and bytes in lists, tuples and dicts to a worker and back, 1 worker, one call at a time.

    The type of the container must not matter, and neither must the number of objects in it: ten of 100 kB are as good as one of
    1 MB, and one that is there ten times travels once. For lists and dicts of 10,000, pickle is the limit, on both sides.
    """
    few, some, many = (5, 10, 20) if quick else (30, 60, 200)
    small, pickled, middle = 0.5, 0.95, 0.45
    payloads = [
        Payload("int", 2, many, lambda: 4711, small),
        Payload("list of 100", 200, many, lambda: list(range(100)), small),
        Payload("dict of 100", KB, many, lambda: _dict(100), small),
        Payload("list of 10,000", 30 * KB, some, lambda: list(range(10_000)), pickled),
        Payload("dict of 10,000", 190 * KB, few, lambda: _dict(10_000), pickled),
        Payload("10 times the same 100 kB", 100 * KB, some, lambda: 10 * [os.urandom(100 * KB)], middle, OF_BARE),
        Payload("list of 10 x 100 kB", MB, few, lambda: [os.urandom(100 * KB) for _ in range(10)], SEVENTH, OF_BARE),
        Payload("dict of 10 x 100 kB", MB, few, lambda: {n: os.urandom(100 * KB) for n in range(10)}, SEVENTH, OF_BARE),
        Payload("tuple of 1 MB", MB, few, lambda: (os.urandom(MB),), SEVENTH, OF_BARE),
        Payload("str of 1 MB", MB, few, lambda: "percore " * (MB // 8), SEVENTH),
    ]
    return Row(_echoes(payloads), targets_of(payloads))


@row(rounds=15, seconds=70, warm_ups=0, pin=Pin.APART)
def payload_largest(quick: bool) -> Row:
    """A numpy array of 800 MB to a worker and back, 1 worker: two copies, against two copies in this process.

    Nobody keeps that much memory warm: the limit is `array.copy()` into fresh memory, once for each way. If less than 8 GB are
    free, the array has 80 MB, as with --quick.
    """
    size = (80 if quick or psutil.virtual_memory().available < 8000 * MB else 800) * MB
    name = f"{size // MB} MB"
    three, one = (Payload(name, size, calls, partial(array_of, size), is_same=is_same_array) for calls in (3, 1))
    return Row(
        {
            MEMCPY: memcpy([three]),
            COPIES: always(partial(_two_copies, three)),
            "percore": _echoes([three])["percore"],
            POOL: _echoes([one])[POOL],  # it takes seconds
        },
        [Target("percore", name, COPIES, at_most=1.5), Target("percore", name, POOL, at_most=SEVENTH)],
    )


@row(rounds=5, seconds=20)
def payload_share(quick: bool) -> Row:
    """The number of copies of a shared array of 800 MB with 8 workers that all read it: one.

    The PSS of this process and all that percore started, added up: a page that nine processes share counts once. It is read
    when every worker has added up the whole array, and after `close()`, as growth since before the first `share()`. The array
    itself exists before. At most 64 MiB stay after the close: percore keeps that much warm for the next large payload.
    """
    workers = 8
    size = (80 if quick else 800) * MB
    before: list[int] = []

    async def warm(opened: percore.Runner) -> None:
        await _shared(opened, array_of(size)[:1])  # every worker has imported numpy
        before.append(pss_of_all([os.getpid(), *descendants()]))

    async def once(opened: percore.Runner) -> Sample:
        array = array_of(size)
        seconds, there, left = await _shared(opened, array)
        return {"shared and read": seconds, "copies": (there - before[0]) / array.nbytes, "after close": left - before[0]}

    return Row(
        {"percore": playing(runner(workers), once, warm)},
        [Target("percore", "copies", at_most=1.02), Target("percore", "after close", at_most=80 << 20)],
        units={"copies": in_times, "after close": in_mebibytes},
    )


async def _shared(opened: percore.Runner, array: Any) -> tuple[float, int, int]:
    """Seconds until every worker has read the whole array; the PSS then, and after the close."""
    pids = [os.getpid(), *descendants()]
    start = time.perf_counter()
    shared = await opened.share(array)
    sums = await opened.broadcast(sum_of, shared)
    seconds = time.perf_counter() - start
    if set(sums) != {array.sum()}:
        raise WrongResult("a worker has another array")
    there = pss_of_all(pids)
    shared.close()
    # 1. A worker reads that it is to forget the array, and the first call  2. it answers that call  3. in the next iteration of its
    # loop it says that nothing refers to the array any more. The answer to the second call comes after that.
    for _ in range(2):
        await opened.broadcast(nothing)
    return seconds, there, pss_of_all(pids)


# Contestants


def _echoes(payloads: Sequence[Payload], *, views: bool = False) -> dict[str, Contestant]:
    """The bare echo for those payloads that are compared with it, percore twice, and the pools."""
    openings = {
        "percore": partial(percore_call, same, workers=1),
        "percore, plain function": partial(percore_call, same_plainly, workers=1),
        POOL: partial(executors.calling, executors.processes, 1, same_plainly),
        INTERPRETERS: partial(executors.calling, executors.interpreters, 1, same_plainly),
        "loky": partial(executors.calling, executors.loky, 1, same_plainly),
    }

    async def once(call: Call) -> Sample:
        return {one.name: await _mean(call, one, value_of(one), one.is_same) for one in payloads}

    bare = [one for one in payloads if one.of_bare is not None]
    return ({BARE: _bare(bare, views=views)} if bare else {}) | {name: playing(opening, once) for name, opening in openings.items()}


def _bare(payloads: Sequence[Payload], *, views: bool) -> Contestant:
    async def once(call: Call) -> Sample:
        return {one.name: await _mean(call, one, bytes_of(one.size)) for one in payloads}

    return playing(partial(bare_echo, max(one.size for one in payloads), views=views), once)


async def _mean(call: Call, payload: Payload, value: Any, is_same: Callable[[Any, Any], bool] = operator.eq) -> float:
    for _ in range(payload.calls // 10):
        await call(value)  # untimed: the processes have just been moved to their CPUs
    return fmean([await timed(call, value, is_same) for _ in range(payload.calls)])


def memcpy(payloads: Sequence[Payload]) -> Contestant:
    """Only copies as many bytes, once."""

    async def once() -> Sample:
        return {one.name: _copies(one) for one in payloads}

    return always(once)


def _copies(payload: Payload) -> float:
    source, target = b"s" * payload.size, memoryview(bytearray(b"t") * payload.size)

    def copy() -> float:
        start = time.perf_counter()
        target[:] = source
        return time.perf_counter() - start

    return fmean([copy() for _ in range(payload.calls)])


async def _two_copies(payload: Payload) -> Sample:
    array = value_of(payload)

    def seconds() -> float:
        start = time.perf_counter()
        copies = array.copy(), array.copy()
        seconds = time.perf_counter() - start
        del copies  # not in that time
        return seconds

    return {payload.name: fmean([seconds() for _ in range(payload.calls)])}


def targets_of(payloads: Sequence[Payload]) -> list[Target]:
    targets = [Target("percore", one.name, POOL, at_most=one.of_pool) for one in payloads if one.of_pool is not None]
    targets += [Target("percore", one.name, BARE, at_most=one.of_bare) for one in payloads if one.of_bare is not None]
    return targets + [Target("percore", one.name, INTERPRETERS, at_most=1.0) for one in payloads if one.size >= SHARED]


# Values, the same for all contestants


@cache
def value_of(payload: Payload) -> Any:
    return payload.make()


@cache
def bytes_of(size: int) -> bytes:
    return os.urandom(size)


@cache
def array_of(size: int) -> Any:
    import numpy as np

    return np.arange(size // 8, dtype=np.float64)


def is_same_array(one: Any, other: Any) -> bool:
    import numpy as np

    return bool(one.dtype == other.dtype and np.array_equal(one, other))


def _listed(size: int) -> list[bytes]:
    return [os.urandom(size)]


def _dict(entries: int) -> dict[str, int]:
    return {f"{number:b}": number for number in range(entries)}


def _frame() -> Any:
    import pandas as pd

    return pd.DataFrame(_columns())


def _table() -> Any:
    import pyarrow as pa

    return pa.table(_columns())


def _columns() -> dict[str, Any]:
    import numpy as np

    numbers = np.arange(50 * MB // 16)
    return {"number": numbers, "root": np.sqrt(numbers)}
