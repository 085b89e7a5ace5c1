"""Workers on other nodes, against workers of the program's own engine in the same rounds.

The nodes are two processes of this machine, so the network is its loopback: the rows show the cost of hosts and connections, and
not that of a wire.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import percore
from benchmarks.calls import pid_after, same, sleep_long
from benchmarks.contestants import always, far_calls, playing
from benchmarks.figures import Target, in_mebibytes, quantile
from benchmarks.harness import Row, row
from benchmarks.machine import descendants, uss_of
from benchmarks.peers import WORKERS
from benchmarks.peers.nodes import NodesRunner

if TYPE_CHECKING:
    from collections.abc import Callable

    from benchmarks.harness import Contestant
    from benchmarks.results import Sample

HERE, THERE = "percore", "percore, nodes"
MANY = 8

Make = "Callable[[], percore.Runner]"


def _both(workers: int, once: Callable[[percore.Runner], Any]) -> dict[str, Contestant]:
    makers: dict[str, Any] = {HERE: partial(percore.Runner, workers), THERE: partial(NodesRunner, workers)}
    return {name: playing(make, once) for name, make in makers.items()}


@row(rounds=9, seconds=20)
def nodes(quick: bool) -> Row:
    """Calls to two workers on two nodes, against two workers of the process engine.

    "a call" is that of awaited_int: 500 awaiters x 40 calls. "driver CPU" is this process's CPU time of such a call. The round trip
    and 1 MB of bytes there and back are one call at a time, as medians.
    """

    async def once(opened: percore.Runner) -> Sample:
        return await far_calls(partial(opened.run, same), 40, quick=quick)

    return Row(
        _both(WORKERS, once),
        [
            Target(THERE, "a call", HERE, at_most=2.5),
            Target(THERE, "round trip", HERE, at_most=2.5),
            Target(THERE, "1 MB there and back", HERE, at_most=2.5),
            Target(THERE, "driver CPU", HERE, at_most=2.0),
        ],
    )


@row(rounds=9, seconds=12)
def node_deaths(quick: bool) -> Row:
    """From the kill of a worker, or of a node's host, to the error of the call that ran there, 2 workers.

    Both are killed with SIGKILL. A worker's death is told with its signal.
    """
    times = 2 if quick else 10

    async def once(opened: percore.Runner) -> Sample:
        logging.getLogger("percore").setLevel(logging.CRITICAL)
        sample = {"worker": quantile([await _told(opened, _kill_worker) for _ in range(times)], 0.5)}
        if isinstance(opened, NodesRunner):
            sample["host"] = await _told(opened, _kill_host)
            await opened.resize(WORKERS)  # puts another host on the node
        return sample

    return Row(_both(WORKERS, once), [Target(THERE, "worker", at_most=0.020), Target(THERE, "host", at_most=0.100)])


async def _told(opened: percore.Runner, kill: Callable[[percore.Runner, percore.CurrentWorker], int | None]) -> float:
    while sum(worker.state == "ready" for worker in opened.statistics().workers) < WORKERS:
        await opened.run(same, 0)
    victim = await opened.run(percore.current_worker)
    calls = [asyncio.ensure_future(opened.broadcast(sleep_long))]
    await opened.run(same, 0)
    start = time.perf_counter()
    code = kill(opened, victim)
    try:
        await calls[0]
    except percore.WorkerDied as died:
        told = time.perf_counter() - start
        if died.exitcode != code:
            raise RuntimeError(f"it was told as {died}") from died
    return told


def _kill_worker(_: percore.Runner, victim: percore.CurrentWorker) -> int | None:
    os.kill(victim.pid, signal.SIGKILL)
    return -signal.SIGKILL


def _kill_host(opened: percore.Runner, victim: percore.CurrentWorker) -> int | None:
    assert isinstance(opened, NodesRunner)
    assert victim.node is not None
    os.kill(opened.hosts[victim.node], signal.SIGKILL)
    return None


@row(rounds=5, seconds=12, warm_ups=0)
def node_start(quick: bool) -> Row:
    """Eight workers on two nodes that have none yet: from the start of the runner to its first answers, and their memory.

    "start" includes that of the two hosts. "USS a worker" is the memory that all eight have for themselves, without the hosts.
    """

    async def once(make: Callable[[], percore.Runner]) -> Sample:
        before, start = descendants(), time.perf_counter()
        async with make() as opened:
            await asyncio.gather(*(opened.run(pid_after, 0.001) for _ in range(MANY)))
            took = time.perf_counter() - start
            pids = [worker.pid for worker in opened.statistics().workers if worker.pid is not None]
            all_of_it = sum(map(uss_of, pids)) / len(pids)
            beside = sum(map(uss_of, descendants() - before - set(pids)))
        return {"start": took, "USS a worker": all_of_it, "USS of hosts and fork servers": beside}

    makers: dict[str, Any] = {HERE: partial(percore.Runner, MANY), THERE: partial(NodesRunner, MANY)}
    return Row(
        {name: always(partial(once, make)) for name, make in makers.items()},
        [Target(THERE, "start", at_most=1.5), Target(THERE, "USS a worker", at_most=8 * 2**20)],
        units={"USS a worker": in_mebibytes, "USS of hosts and fork servers": in_mebibytes},
    )
