"""Ray and Dask (distributed), on this machine alone. Each raises ModuleNotFoundError if it is not installed.

They are not in the dependency group of the benchmarks: `python -m pip install ray distributed`.
"""

from __future__ import annotations

import asyncio
import importlib
import logging
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from benchmarks.peers import Call, Function


@asynccontextmanager
async def ray_calling(workers: int, function: Function) -> AsyncIterator[Call]:
    """Plain functions, as tasks of Ray."""
    ray: Any = importlib.import_module("ray")
    ray.init(
        num_cpus=workers, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR, _node_ip_address="127.0.0.1"
    )
    try:
        task = ray.remote(function)
        yield lambda argument: asyncio.wrap_future(task.remote(argument).future())
    finally:
        await asyncio.to_thread(ray.shutdown)


@asynccontextmanager
async def dask_calling(workers: int, function: Function) -> AsyncIterator[Call]:
    """Plain functions, as tasks of Dask, on processes with one thread each."""
    distributed: Any = importlib.import_module("distributed")
    options = {"n_workers": workers, "threads_per_worker": 1, "dashboard_address": None, "host": "127.0.0.1"}
    async with (
        distributed.LocalCluster(asynchronous=True, **options) as cluster,
        distributed.Client(cluster, asynchronous=True) as client,
    ):
        yield lambda argument: client.submit(function, argument, pure=False).result()
