"""Workers on a Ray cluster of two nodes, against Ray's own actors and against workers of this program in the same rounds.

Both nodes are on this machine, so the network is its loopback. `make bench-ray` runs these rows.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from contextlib import asynccontextmanager
from functools import partial
from itertools import cycle
from typing import TYPE_CHECKING, Any

import percore
from benchmarks.calls import pid_after, same, sleep_long
from benchmarks.contestants import always, far_calls, playing
from benchmarks.figures import Target, in_mebibytes, quantile
from benchmarks.harness import Row, row
from benchmarks.machine import uss_of
from benchmarks.peers import WORKERS
from benchmarks.peers.ray_cluster import Clusters, at_rest, host_of, kill_raylet, ray_actors, ray_runner, remove_node

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from benchmarks.harness import Contestant, Round
    from benchmarks.peers import Call
    from benchmarks.results import Sample

HERE, THERE, PEER = "percore", "percore, Ray", "Ray"
MANY = 8


@asynccontextmanager
async def _here() -> AsyncIterator[Call]:
    async with percore.Runner(WORKERS) as opened:
        yield partial(opened.run, same)


@asynccontextmanager
async def _there() -> AsyncIterator[Call]:
    async with ray_runner(WORKERS) as opened:
        yield partial(opened.run, same)


@asynccontextmanager
async def _actors() -> AsyncIterator[Call]:
    async with ray_actors(WORKERS) as actors:
        turns = cycle(actors)

        async def call(value: Any) -> Any:
            return await next(turns).same.remote(value)

        yield call


@row(rounds=5, seconds=30, is_extra=True)
def ray(quick: bool) -> Row:
    """Calls to two workers on two nodes of a Ray cluster, against awaited calls of Ray's actors there, and two workers here.

    "a call" has 500 awaiters. "driver CPU" is this process's CPU time of such a call. The round trip and 1 MB of bytes there and
    back are one call at a time, as medians.
    """

    async def once(call: Call) -> Sample:
        return await far_calls(call, 8, quick=quick)

    return Row(
        {HERE: playing(_here, once), THERE: playing(_there, once), PEER: playing(_actors, once)},
        [
            Target(THERE, "a call", PEER, at_least=40),
            Target(THERE, "a call", HERE, at_most=2.5),
            Target(THERE, "round trip", PEER, at_most=0.2),
            Target(THERE, "1 MB there and back", PEER, at_most=0.4),
            Target(THERE, "driver CPU", HERE, at_most=2.0),
        ],
    )


@row(rounds=3, seconds=60, warm_ups=0, is_extra=True)
def ray_deaths(quick: bool) -> Row:
    """From a kill by SIGKILL to the error of the call: of a worker, a node's host, its raylet, and one of Ray's actors."""
    times = 2 if quick else 10

    async def percores() -> Sample:
        logging.getLogger("percore").setLevel(logging.CRITICAL)
        with Clusters.one() as cluster:
            node = cluster.add_node(num_cpus=1)
            async with ray_runner(3) as opened:
                worker = quantile([await _told(opened, 0, lambda pid: os.kill(pid, signal.SIGKILL)) for _ in range(times)], 0.5)
                index = next(one.index for one in opened.statistics().workers if node.node_id.startswith(str(one.node)[-6:]))
                kill = kill_raylet(cluster, node)
                raylet = await _told(opened, index, lambda _: kill())
                host = await _told(opened, 0, lambda pid: os.kill(host_of(pid), signal.SIGKILL))
            remove_node(cluster, node)
        return {"worker": worker, "host": host, "raylet": raylet}

    async def rays() -> Sample:
        async with ray_actors(1) as (actor,):
            pid = await actor.pid.remote()
            call = asyncio.ensure_future(_awaited(actor.sleep.remote()))
            await actor.pid.remote()
            start = time.perf_counter()
            os.kill(pid, signal.SIGKILL)
            await asyncio.wait([call])
            took = time.perf_counter() - start
            call.exception()
        return {"worker": took}

    targets = [
        Target(THERE, "worker", at_most=0.020),
        Target(THERE, "host", at_most=0.100),
        Target(THERE, "raylet", at_most=0.500),
    ]
    return Row({THERE: _on_cluster(percores), PEER: _on_cluster(rays)}, targets)


def _on_cluster(once: Round) -> Contestant:
    """A contestant whose rounds have the cluster, which is not started anew for each."""

    @asynccontextmanager
    async def contestant() -> AsyncIterator[Round]:
        with Clusters.one():
            yield once

    return contestant


async def _awaited(reference: Any) -> Any:
    return await reference


async def _told(opened: percore.Runner, index: int, kill: Callable[[int], None]) -> float:
    """Kill with the worker of this slot in the middle of a call. Return when the call ends, in seconds."""
    while not all(worker.state == "ready" for worker in opened.statistics().workers):
        await opened.run(same, 0)
    pid = opened.statistics().workers[index].pid
    assert pid is not None
    calls = asyncio.ensure_future(opened.broadcast(sleep_long))
    await opened.run(same, 0)
    start = time.perf_counter()
    kill(pid)
    try:
        await calls
    except percore.WorkerDied:
        return time.perf_counter() - start
    raise RuntimeError("nothing died")


@row(rounds=5, seconds=60, warm_ups=0, is_extra=True)
def ray_start(quick: bool) -> Row:
    """Eight workers on a running Ray cluster of two nodes: from the start of the runner to its first answers, and their memory.

    Each start waits until the cluster is at rest, since Ray starts processes ahead of time, which take seconds of CPU time. "USS a
    worker" is the memory that all eight have for themselves, without the hosts.
    """

    async def once(workers: Callable[[], Any]) -> Sample:
        at_rest()
        start = time.perf_counter()
        async with workers() as opened:
            await asyncio.gather(*(opened.run(pid_after, 0.001) for _ in range(MANY)))
            took = time.perf_counter() - start
            pids = [worker.pid for worker in opened.statistics().workers if worker.pid is not None]
            return {"start": took, "USS a worker": sum(map(uss_of, pids)) / len(pids)}

    async def actors() -> Sample:
        at_rest()
        start = time.perf_counter()
        async with ray_actors(MANY) as those:
            took = time.perf_counter() - start
            pids = [await actor.pid.remote() for actor in those]
            return {"start": took, "USS a worker": sum(map(uss_of, pids)) / len(pids)}

    async def on_ray() -> Sample:
        return await once(partial(ray_runner, MANY))

    return Row(
        {HERE: always(partial(once, partial(percore.Runner, MANY))), THERE: _on_cluster(on_ray), PEER: _on_cluster(actors)},
        [Target(THERE, "start", at_most=1.5), Target(THERE, "USS a worker", at_most=8 * 2**20)],
        units={"USS a worker": in_mebibytes},
    )
