"""Pools: aiomultiprocess, anyio.to_process, mpire, multiprocessing.Pool, joblib and wool.

Each raises ModuleNotFoundError if it is not installed.
"""

from __future__ import annotations

import asyncio
import importlib
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any, cast

from benchmarks.peers.executors import FORKSERVER

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Sequence

    from benchmarks.peers import Call, Function, MapAll


@asynccontextmanager
async def _aiomultiprocess(workers: int, concurrency: int) -> AsyncIterator[Any]:
    """Coroutines, on processes with a loop each."""
    import uvloop
    from aiomultiprocess import Pool

    async with Pool(workers, childconcurrency=concurrency, loop_initializer=uvloop.new_event_loop) as pool:
        yield pool


@asynccontextmanager
async def aiomultiprocess_calling(workers: int, concurrency: int, function: Function) -> AsyncIterator[Call]:
    async with _aiomultiprocess(workers, concurrency) as pool:
        yield lambda argument: pool.apply(function, (argument,))


@asynccontextmanager
async def aiomultiprocess_mapping(workers: int, concurrency: int, function: Function) -> AsyncIterator[MapAll]:
    async with _aiomultiprocess(workers, concurrency) as pool:

        async def run(items: Sequence[Any]) -> list[Any]:
            return list(await pool.map(function, items))

        yield run


@asynccontextmanager
async def anyio_calling(workers: int, function: Function) -> AsyncIterator[Call]:
    """Plain functions, one after the other in each process. The processes end with the loop."""
    from anyio import CapacityLimiter, to_process

    limiter = CapacityLimiter(workers)
    yield lambda argument: asyncio.ensure_future(to_process.run_sync(function, argument, limiter=limiter))


@asynccontextmanager
async def _mpire(workers: int) -> AsyncIterator[Any]:
    """Plain functions. Its callbacks run in a thread of its own."""
    from mpire.pool import WorkerPool

    pool = WorkerPool(workers, start_method="forkserver", keep_alive=True)
    try:
        yield pool
    finally:
        await asyncio.to_thread(pool.stop_and_join)


@asynccontextmanager
async def mpire_calling(workers: int, function: Function) -> AsyncIterator[Call]:
    async with _mpire(workers) as pool:
        yield _by_callbacks(pool, function)


def _by_callbacks(pool: Any, function: Function) -> Call:
    """A call of a pool whose `apply_async` calls back in a thread of its own."""
    loop = asyncio.get_running_loop()

    def call(argument: Any) -> Awaitable[Any]:
        future = loop.create_future()
        pool.apply_async(
            function,
            (argument,),
            callback=lambda result: loop.call_soon_threadsafe(future.set_result, result),
            error_callback=lambda error: loop.call_soon_threadsafe(future.set_exception, error),
        )
        return future

    return call


@asynccontextmanager
async def mpire_mapping(workers: int, chunk: int, function: Function) -> AsyncIterator[MapAll]:
    async with _mpire(workers) as pool:
        yield lambda items: asyncio.to_thread(pool.map, function, items, chunk_size=chunk)


@asynccontextmanager
async def _pool(workers: int) -> AsyncIterator[Any]:
    pool = await asyncio.to_thread(FORKSERVER.Pool, workers)
    try:
        yield pool
    finally:
        pool.close()
        await asyncio.to_thread(pool.join)


@asynccontextmanager
async def pool_calling(workers: int, function: Function) -> AsyncIterator[Call]:
    async with _pool(workers) as pool:
        yield _by_callbacks(pool, function)


@asynccontextmanager
async def pool_mapping(workers: int, chunk: int, function: Function) -> AsyncIterator[MapAll]:
    async with _pool(workers) as pool:
        yield lambda items: asyncio.to_thread(pool.map, function, items, chunk)


@asynccontextmanager
async def joblib_mapping(workers: int, batch: object, function: Function) -> AsyncIterator[MapAll]:
    """It has no single calls."""
    joblib: Any = importlib.import_module("joblib")
    parallel = joblib.Parallel(workers, batch_size=batch)
    delayed = joblib.delayed(function)
    with parallel:
        yield lambda items: asyncio.to_thread(parallel, map(delayed, items))


@asynccontextmanager
async def wool_calling(workers: int, function: Function) -> AsyncIterator[Call]:
    """Coroutines, on processes that speak gRPC."""
    wool: Any = importlib.import_module("wool")
    loop = asyncio.get_running_loop()
    before = loop.get_task_factory()
    try:
        async with wool.WorkerPool(spawn=workers):
            # A decorator makes its functions, which must be found by their name where they run.
            routines = importlib.import_module("benchmarks.peers.wool_routines")
            yield cast("Call", getattr(routines, function.__name__))
    finally:
        loop.set_task_factory(before)  # it leaves its own factory behind, which all other tasks would use
