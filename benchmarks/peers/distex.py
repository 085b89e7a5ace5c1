"""distex: coroutines and plain functions on processes with a loop each."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from benchmarks.peers import Call, Function, MapAll

_PATIENCE = 5.0
"""Seconds."""

_SCRIPTS = str(Path(__file__).parent / "scripts")
"""Contains the worker script of distex in a version that also works on 3.14."""


@asynccontextmanager
async def calling(workers: int, queued: int, function: Function) -> AsyncIterator[Call]:
    async with _opened(workers, queued) as pool:
        yield lambda argument: pool.run_async(function, argument)


@asynccontextmanager
async def mapping(workers: int, queued: int, chunk: int, function: Function) -> AsyncIterator[MapAll]:
    async with _opened(workers, queued) as pool:

        async def run(items: Sequence[Any]) -> list[Any]:
            return [result async for result in pool.map_async(function, items, chunksize=chunk)]

        yield run


@asynccontextmanager
async def _opened(workers: int, queued: int) -> AsyncIterator[Any]:
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
        # So first let the processes end by the end of their connections, and wait for that.
        for worker in pool._workers:
            worker.stop()
        await asyncio.gather(*(_ended(transport) for transport, _ in pool._procs))
        with _loop_of_thread():
            await pool.shutdown_async(wait=False)


async def _ended(transport: Any) -> None:
    """Waits for the end of its process. A process whose connection ended before its loop ran never sees that, and is killed."""
    try:
        async with asyncio.timeout(_PATIENCE):
            await transport._wait()
    except TimeoutError:
        transport.kill()
        await transport._wait()


@contextmanager
def _loop_of_thread() -> Iterator[None]:
    """distex asks for the thread's loop instead of the running one: on import, at its start and at its end."""
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
