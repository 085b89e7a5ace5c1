"""What percore is measured against, started outside the timing and reaped afterwards.

Peers' processes are always spawned, never forked: a fork of this process would hold the sockets of the other
contestants open, and their ends would not be noticed. How they were started makes no difference once they are warm.
"""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import sys
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import AbstractContextManager, asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, TypeVar

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

T = TypeVar("T")
R = TypeVar("R")

_SPAWN = multiprocessing.get_context("spawn")


@asynccontextmanager
async def process_pool(workers: int) -> AsyncIterator[ProcessPoolExecutor]:
    """The standard library's pool; its processes start with the first call."""
    pool = ProcessPoolExecutor(workers, mp_context=_SPAWN)
    try:
        yield pool
    finally:
        await asyncio.to_thread(pool.shutdown)


def on_pool(pool: ProcessPoolExecutor, function: Callable[[T], R]) -> Callable[[T], Awaitable[R]]:
    """The function as something to await that runs in the pool."""
    loop = asyncio.get_running_loop()
    return lambda argument: loop.run_in_executor(pool, function, argument)


class DistexPool(Protocol):
    """The verbs of distex's pool that have a counterpart in percore; distex itself is not typed."""

    def run_async(self, function: Callable[[T], Awaitable[R]], argument: T, /) -> Awaitable[R]: ...

    def map_async(self, function: Callable[[T], R], items: Iterable[T], /, *, chunksize: int) -> AsyncIterator[R]: ...


@asynccontextmanager
async def distex_pool(workers: int, *, queued: int) -> AsyncIterator[DistexPool]:
    """A distex pool that keeps `queued` calls at each worker. Raises ModuleNotFoundError where it is not installed."""
    from distex import Pool

    with _distex_environment(), _loop_of_thread():
        pool = Pool(num_workers=workers, qsize=queued, lazy_create=True)
        await pool.create()
    try:
        yield pool
    finally:
        # Its shutdown closes the process transports at once, after which uvloop no longer reaps what they stood for.
        # So let the processes end by the end of their connections, and wait for that, first.
        for worker in pool._workers:
            worker.stop()
        await asyncio.gather(*(transport._wait() for transport, _ in pool._procs))
        with _loop_of_thread():
            await pool.shutdown_async(wait=False)


@contextmanager
def _loop_of_thread() -> Iterator[None]:
    """distex asks for the loop of the thread instead of the running one, when it starts and when it ends."""
    asyncio.set_event_loop(asyncio.get_running_loop())
    try:
        yield
    finally:
        asyncio.set_event_loop(None)


@contextmanager
def _distex_environment() -> Iterator[None]:
    """Lets distex find its worker script beside this interpreter, and that script this package."""
    root = str(Path(__file__).parents[1])
    added = {"PATH": str(Path(sys.executable).parent), "PYTHONPATH": root}
    before = {name: os.environ.get(name) for name in added}
    os.environ.update({name: os.pathsep.join(filter(None, (added[name], before[name]))) for name in added})
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


Half = Callable[[range, int], list[int]]
"""Does the calls for these items, each with so many steps of work, and gives their results in order."""

SplitRun = Callable[[int, int], Awaitable[list[int]]]
"""Does so many calls with so many steps, split over the processes, and gives all results in order."""


@asynccontextmanager
async def hand_split(open_half: Callable[[], AbstractContextManager[Half]], processes: int) -> AsyncIterator[SplitRun]:
    """Multiprocessing by hand: each process gets an equal part of the items over a pipe and sends its results back."""
    pipes = [_SPAWN.Pipe() for _ in range(processes)]
    children = [_SPAWN.Process(target=_serve_half, args=(theirs, open_half), daemon=True) for _, theirs in pipes]
    for child in children:
        child.start()
    for _, theirs in pipes:
        theirs.close()

    async def run(calls: int, steps: int) -> list[int]:
        share = -(-calls // processes)
        for number, (ours, _) in enumerate(pipes):
            ours.send((range(number * share, min(calls, (number + 1) * share)), steps))
        parts: list[list[int]] = await asyncio.gather(*(asyncio.to_thread(ours.recv) for ours, _ in pipes))
        return [result for part in parts for result in part]

    try:
        yield run
    finally:
        for ours, _ in pipes:
            ours.close()
        for child in children:
            await asyncio.to_thread(child.join)


def _serve_half(pipe: Connection[list[int], tuple[range, int]], open_half: Callable[[], AbstractContextManager[Half]]) -> None:
    with open_half() as half:
        while True:
            try:
                items, steps = pipe.recv()
            except EOFError:  # the other side has closed its end, or is dead
                return
            pipe.send(half(items, steps))
