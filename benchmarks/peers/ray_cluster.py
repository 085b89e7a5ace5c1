"""A Ray cluster of two nodes on this machine. Raises ModuleNotFoundError without Ray, and outside a network of loopback alone."""

from __future__ import annotations

import asyncio
import importlib
import os
import signal
import socket
import time
from contextlib import asynccontextmanager, contextmanager
from typing import TYPE_CHECKING, Any

import psutil

import percore
from benchmarks.machine import cpu_of_all, descendants

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator

CPUS = 4
"""Of each node: there are eight workers in one row."""


class Actor:
    """What Ray's own users write."""

    async def same(self, value: Any) -> Any:
        return value

    async def pid(self) -> int:
        return os.getpid()

    async def sleep(self) -> None:
        await asyncio.sleep(1000)


class Clusters:
    """The cluster, while a contestant uses it."""

    users = 0
    cluster: Any = None

    @classmethod
    @contextmanager
    def one(cls) -> Iterator[Any]:
        utilities: Any = importlib.import_module("ray.cluster_utils")
        if {name for _, name in socket.if_nameindex()} != {"lo"}:
            raise ModuleNotFoundError("Ray listens on every interface: `make bench-ray` has a network of loopback alone")
        if not cls.users:
            cls.cluster = utilities.Cluster(initialize_head=True, head_node_args={"num_cpus": CPUS, "include_dashboard": False})
            cls.cluster.add_node(num_cpus=CPUS)
        cls.users += 1
        try:
            yield cls.cluster
        finally:
            cls.users -= 1
            if not cls.users:
                cls.cluster.shutdown()


@asynccontextmanager
async def ray_runner(workers: int) -> AsyncIterator[percore.Runner]:
    """percore over the two nodes."""
    with Clusters.one() as cluster:
        async with percore.Runner(workers, engine=percore.RayEngine(cluster.address)) as runner:
            yield runner


@asynccontextmanager
async def ray_actors(count: int) -> AsyncIterator[list[Any]]:
    """Actors spread over the two nodes, for Ray's own awaited calls."""
    ray: Any = importlib.import_module("ray")
    with Clusters.one() as cluster:
        is_ours = not ray.is_initialized()  # else a runner has connected the program, and closes later
        if is_ours:
            ray.init(cluster.address, log_to_driver=False, configure_logging=False)
        try:
            remote = ray.remote(Actor).options(num_cpus=1, scheduling_strategy="SPREAD", max_concurrency=1000)
            actors = [remote.remote() for _ in range(count)]
            for actor in actors:
                await actor.pid.remote()
            yield actors
            for actor in actors:
                ray.kill(actor)
        finally:
            if is_ours:
                ray.shutdown()


def host_of(worker: int) -> int:
    """The host of a worker: both run on this machine."""
    for process in psutil.Process(worker).parents():
        if any("percore._node.main" in part for part in process.cmdline()) and process.ppid() != 1:
            found = process.pid
    return found


def at_rest() -> None:
    """Wait until the processes of the cluster use less than a tenth of a CPU, for half a minute at most."""
    end = time.monotonic() + 30
    used = cpu_of_all(descendants())
    while time.monotonic() < end:
        time.sleep(1.0)
        before, used = used, cpu_of_all(descendants())
        if used - before < 0.1:
            return


def kill_raylet(cluster: Any, node: Any) -> Callable[[], None]:
    """Return what kills the process that is a node for Ray."""
    (raylet,) = node.all_processes["raylet"]

    def kill() -> None:
        os.kill(raylet.process.pid, signal.SIGKILL)

    return kill


def remove_node(cluster: Any, node: Any) -> None:
    """Remove a node, and wait until Ray says that it is gone: until then hosts may be put there."""
    cluster.remove_node(node, allow_graceful=False)
    while any(one["Alive"] and one["NodeID"] == node.node_id for one in cluster.global_state.node_table()):
        time.sleep(0.05)
