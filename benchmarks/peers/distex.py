"""distex: coroutines and plain functions on processes with a loop each."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator, Sequence

T = TypeVar("T")
R = TypeVar("R")


_PATIENCE = 5.0
"""Seconds."""

_SCRIPTS = str(Path(__file__).parent / "scripts")
"""With the worker script of distex that works on 3.14 too."""


class DistexPool(Protocol):
    """The verbs of distex's pool that have a counterpart in percore; distex itself is not typed."""

    def run_async(self, function: Callable[[T], Awaitable[R]], argument: T, /) -> Awaitable[R]: ...

    def map_async(self, function: Callable[[T], R], items: Iterable[T], /, *, chunksize: int) -> AsyncIterator[R]: ...


@asynccontextmanager
async def calling(workers: int, queued: int, function: Callable[[T], Awaitable[R]]) -> AsyncIterator[Callable[[T], Awaitable[R]]]:
    async with opened(workers, queued) as pool:
        yield lambda argument: pool.run_async(function, argument)


@asynccontextmanager
async def mapping(
    workers: int, queued: int, chunk: int, function: Callable[[T], R]
) -> AsyncIterator[Callable[[Sequence[T]], Awaitable[list[R]]]]:
    async with opened(workers, queued) as pool:

        async def run(items: Sequence[T]) -> list[R]:
            return [result async for result in pool.map_async(function, items, chunksize=chunk)]

        yield run


@asynccontextmanager
async def opened(workers: int, queued: int) -> AsyncIterator[DistexPool]:
    """A distex pool that keeps `queued` calls at each worker. Raises ModuleNotFoundError where it is not installed."""
    with _distex_environment(), _loop_of_thread():
        from distex import Pool

        pool = Pool(num_workers=workers, qsize=queued, lazy_create=True)
        await pool.create()
    await asyncio.gather(*(worker.run_task((os.getpid, (), {}, True, False)) for worker in pool._workers))
    try:
        yield pool
    finally:
        # Its shutdown closes the process transports at once, after which uvloop no longer reaps what they stood for.
        # So let the processes end by the end of their connections, and wait for that, first.
        for worker in pool._workers:
            worker.stop()
        await asyncio.gather(*(_ended(transport) for transport, _ in pool._procs))
        with _loop_of_thread():
            await pool.shutdown_async(wait=False)


async def _ended(transport: Any) -> None:
    """Its process has ended. One whose connection ended before its loop ran never sees that, and is killed."""
    try:
        async with asyncio.timeout(_PATIENCE):
            await transport._wait()
    except TimeoutError:
        transport.kill()
        await transport._wait()


@contextmanager
def _loop_of_thread() -> Iterator[None]:
    """distex asks for the loop of the thread instead of the running one, when it is imported, when it starts and when it ends."""
    asyncio.set_event_loop(asyncio.get_running_loop())
    try:
        yield
    finally:
        asyncio.set_event_loop(None)


@contextmanager
def _distex_environment() -> Iterator[None]:
    """Lets distex find its worker script, that script this interpreter, and this one this package."""
    root = str(Path(__file__).parents[2])
    added = {"PATH": os.pathsep.join((_SCRIPTS, str(Path(sys.executable).parent))), "PYTHONPATH": root}
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
