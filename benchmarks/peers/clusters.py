"""Ray and Dask (distributed), on this machine alone. Each raises ModuleNotFoundError if it is not installed.

They are not in the dependency group of the benchmarks: `python -m pip install ray distributed`.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
from contextlib import asynccontextmanager
from itertools import cycle
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from benchmarks.peers import Call, Function


@asynccontextmanager
async def _ray(workers: int) -> AsyncIterator[Any]:
    ray: Any = importlib.import_module("ray")
    if ray.is_initialized():  # a process has one Ray at most; who has started it closes it after this
        yield ray
        return
    ray.init(
        num_cpus=workers, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR, _node_ip_address="127.0.0.1"
    )
    try:
        yield ray
    finally:
        await asyncio.to_thread(ray.shutdown)


@asynccontextmanager
async def ray_calling(workers: int, function: Function) -> AsyncIterator[Call]:
    """Plain functions, as tasks of Ray."""
    async with _ray(workers) as ray:
        task = ray.remote(function)
        yield lambda argument: asyncio.wrap_future(task.remote(argument).future())


@asynccontextmanager
async def ray_actor_calling(workers: int, function: Function) -> AsyncIterator[Call]:
    """Coroutines, as calls of an async actor for each worker, by turns."""
    async with _ray(workers) as ray:
        actors = cycle([ray.remote(Actor).options(max_concurrency=1000).remote(function) for _ in range(workers)])
        yield lambda argument: asyncio.wrap_future(next(actors).call.remote(argument).future())


class Actor:
    """An actor of Ray."""

    def __init__(self, function: Function) -> None:
        self._function = function

    async def call(self, argument: object) -> object:
        return await self._function(argument)


class PlainActor(Actor):
    """An actor of Dask, which runs its plain methods on the worker's thread."""

    def call(self, argument: object) -> object:  # type: ignore[override]
        return self._function(argument)


@asynccontextmanager
async def _dask(workers: int) -> AsyncIterator[Any]:
    distributed: Any = importlib.import_module("distributed")
    options = {"n_workers": workers, "threads_per_worker": 1, "dashboard_address": None, "host": "127.0.0.1"}
    async with (
        distributed.LocalCluster(asynchronous=True, **options) as cluster,
        distributed.Client(cluster, asynchronous=True) as client,
    ):
        yield client


@asynccontextmanager
async def dask_calling(workers: int, function: Function) -> AsyncIterator[Call]:
    """Plain functions, as tasks of Dask, on processes with one thread each."""
    async with _dask(workers) as client:
        yield lambda argument: client.submit(function, argument, pure=False).result()


@asynccontextmanager
async def dask_actor_calling(workers: int, function: Function) -> AsyncIterator[Call]:
    """Plain functions, as calls of an actor for each worker, by turns."""
    async with _dask(workers) as client:
        addresses = (await client.scheduler.identity())["workers"]
        actors = cycle([await client.submit(PlainActor, function, actor=True, workers=[each], pure=False) for each in addresses])

        async def call(argument: object) -> object:
            return await next(actors).call(argument)

        yield call
