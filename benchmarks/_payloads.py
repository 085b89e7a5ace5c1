"""Payloads there and back, one call at a time, one worker: what the rows payload_* share.

The function is the identity, so that nothing is left but the way there and back. percore runs it as a coroutine, and beside
that as the plain function that the pools get. The bare echo is the least that two loops in two processes can do with so many
bytes: copy them into shared memory that is mapped and warm, ring an eventfd, and the same back. What arrives as bytes is
copied out on either side; an array is looked at where it lies. One memcpy, from warm memory to warm memory, is the
line that nothing can be below. This process is on one CPU, and all others are on a second one.
"""

from __future__ import annotations

import asyncio
import mmap
import operator
import os
import subprocess
import sys
import time
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import percore
from benchmarks._figures import Target
from benchmarks._harness import Contestant, Result, Round, Row, Sample
from benchmarks._pinning import Pin
from benchmarks._plots import Lines
from benchmarks.calls import same, same_plainly
from benchmarks.peers import executors

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence

    from benchmarks.peers import Call, OpenCall

BARE, MEMCPY = "bare echo", "one memcpy"
POOL, INTERPRETERS = "ProcessPoolExecutor", "InterpreterPoolExecutor"

LARGE = 100_000
"""Bytes from which on interpreters, which share this process's memory, have to be no faster either."""

_PROGRAM = Path(__file__).with_name("_payload_program.py")


@dataclass(frozen=True, slots=True)
class Payload:
    """Something that is sent there and back `calls` times in a round: about `size` bytes, made by `make` when it is needed.

    percore's time is to be at most `of_pool` times ProcessPoolExecutor's, and `of_bare` times that of a bare echo of as many
    bytes.
    """

    name: str
    size: int
    calls: int
    make: Callable[[], Any]
    of_pool: float | None = None
    of_bare: float | None = None
    is_same: Callable[[Any, Any], bool] = operator.eq


@cache
def value_of(payload: Payload) -> Any:
    """The same object for all contestants."""
    return payload.make()


@cache
def array_of(size: int) -> Any:
    """A numpy array of so many bytes, always the same one."""
    import numpy as np

    return np.arange(size // 8, dtype=np.float64)


def is_same_array(one: Any, other: Any) -> bool:
    import numpy as np

    return bool(one.dtype == other.dtype and np.array_equal(one, other))


def targets_of(payloads: Sequence[Payload]) -> list[Target]:
    targets = [Target("percore", POOL, one.name, at_most=one.of_pool) for one in payloads if one.of_pool is not None]
    targets += [Target("percore", BARE, one.name, at_most=one.of_bare) for one in payloads if one.of_bare is not None]
    return targets + [Target("percore", INTERPRETERS, one.name, at_most=1.0) for one in payloads if one.size >= LARGE]


def row_of(payloads: Sequence[Payload], *, quick: bool, seconds: float, views: bool = False) -> Row:
    """`views`: the bare echo looks at what arrives where it lies."""
    bare = [one for one in payloads if one.of_bare is not None]
    pools = {POOL: executors.processes, INTERPRETERS: executors.interpreters} | ({} if quick else {"loky": executors.loky})
    contestants: dict[str, Contestant] = {BARE: partial(_bare, bare, views)} if bare else {}
    contestants |= {
        "percore": partial(_echoing, payloads, partial(_percore, same)),
        "percore, plain function": partial(_echoing, payloads, partial(_percore, same_plainly)),
    }
    for name, make in pools.items():
        contestants[name] = partial(_echoing, payloads, partial(executors.calling, make, 1, same_plainly))
    return Row(
        contestants=contestants,
        targets=targets_of(payloads),
        rounds=1 if quick else 15,
        seconds=seconds,
        pin=Pin.APART,
    )


@asynccontextmanager
async def _percore(function: Callable[[Any], Any]) -> AsyncIterator[Call]:
    async with percore.Runner(workers=1) as runner:
        yield partial(runner.run, function)


@asynccontextmanager
async def _echoing(payloads: Sequence[Payload], opening: OpenCall) -> AsyncIterator[Round]:
    async with opening() as call:
        yield partial(_round, payloads, call)


async def _round(payloads: Sequence[Payload], call: Call) -> Sample:
    return {one.name: await _mean(call, one, value_of(one), one.is_same) for one in payloads}


async def _mean(call: Call, payload: Payload, value: Any, is_same: Callable[[Any, Any], bool]) -> float:
    for _ in range(payload.calls // 10):
        await call(value)  # untimed: the processes have just been moved to their CPUs
    return fmean([await _timed(call, value, is_same) for _ in range(payload.calls)])


async def _timed(call: Call, value: Any, is_same: Callable[[Any, Any], bool]) -> float:
    start = time.perf_counter()
    answer = await call(value)
    seconds = time.perf_counter() - start
    if not is_same(answer, value):
        raise RuntimeError("something else came back")
    return seconds


# What needs no library


@asynccontextmanager
async def _bare(payloads: Sequence[Payload], views: bool) -> AsyncIterator[Round]:
    sent = {one: os.urandom(one.size) for one in payloads}
    async with bare_echo(max(map(len, sent.values())), views=views) as call:

        async def once() -> Sample:
            return {one.name: await _mean(call, one, data, operator.eq) for one, data in sent.items()}

        yield once


@asynccontextmanager
async def bare_echo(size: int, *, views: bool) -> AsyncIterator[Callable[[bytes], Awaitable[bytes | memoryview]]]:
    """What to await for up to `size` bytes, at least one: they come back as bytes, or with `views` where they lie."""
    loop = asyncio.get_running_loop()
    waiting: asyncio.Future[int] = loop.create_future()
    there, back = (os.memfd_create("payload", os.MFD_CLOEXEC) for _ in range(2))
    ping, pong = (os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(2))
    passed = (there, back, ping, pong)
    for fd in (there, back):
        os.ftruncate(fd, size)
    target, source = (memoryview(mmap.mmap(fd, size)) for fd in (there, back))
    command = [sys.executable, str(_PROGRAM), *map(str, passed), str(int(views))]
    process = await asyncio.to_thread(subprocess.Popen, command, pass_fds=passed, stdin=subprocess.PIPE)

    async def echo(data: bytes) -> bytes | memoryview:
        nonlocal waiting
        waiting = loop.create_future()
        target[: len(data)] = data
        os.eventfd_write(ping, len(data))
        answer = source[: await waiting]
        return answer if views else bytes(answer)

    loop.add_reader(pong, lambda: waiting.set_result(os.eventfd_read(pong)))
    try:
        yield echo
    finally:
        loop.remove_reader(pong)
        await asyncio.to_thread(process.communicate)  # closes its standard input, which ends it, and reaps it
        for fd in passed:
            os.close(fd)


@asynccontextmanager
async def memcpy(payloads: Sequence[Payload]) -> AsyncIterator[Round]:
    """The contestant that only copies so many bytes, once."""

    async def once() -> Sample:
        return {one.name: _copies(one) for one in payloads}

    yield once


def _copies(payload: Payload) -> float:
    source, target = b"s" * payload.size, memoryview(bytearray(b"t") * payload.size)
    return fmean([_copy(source, target) for _ in range(payload.calls)])


def _copy(source: bytes, target: memoryview) -> float:
    start = time.perf_counter()
    target[:] = source
    return time.perf_counter() - start


# The plot


def plot(title: str, sizes: Mapping[str, int]) -> Callable[[Result, Path], None]:
    """Time against size, of those metrics that have a size."""

    def draw(result: Result, path: Path) -> None:
        placed: dict[str, list[Sample]] = {
            name: [{str(sizes[metric]): value for metric, value in sample.items() if metric in sizes} for sample in samples]
            for name, samples in result.samples.items()
        }
        Lines(title, "bytes", "seconds there and back").draw(Result(placed), path)

    return draw
