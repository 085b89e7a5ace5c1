"""Programs with workers on a Ray cluster: python -m tests.ray.programs STORY ADDRESS"""

import asyncio
import json
import os
import sys
from typing import Any

from ray.cluster_utils import Cluster

import percore
from tests import jobs
from tests.hosts import engine_of
from tests.ray import ray_jobs


async def waits(address: str) -> None:
    """Tell the processes of the hosts and workers, and wait."""
    async with percore.Runner(2, engine=percore.RayEngine(address)) as runner:
        calls = [runner.submit(ray_jobs.for_ever) for _ in range(2)]
        tell(json.dumps([process.pid for process in (await runner.usage()).processes if process.role != "supervisor"]))
        await asyncio.gather(*calls)


async def fails(address: str) -> None:
    """Tell why the runner cannot be started."""
    try:
        await percore.Runner(2, start_timeout=2.0, engine=percore.RayEngine(address)).start()
    except percore.StartupFailed as error:
        tell(str(error))


async def secure(_: str) -> None:
    """Have a cluster of one's own, whose Ray runs with TLS, and tell how calls reach its workers."""
    cluster = Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    try:
        async with percore.Runner(engine=percore.RayEngine(cluster.address)) as runner:
            (link,) = engine_of(runner).links
            sock: Any = link.connection._sock
            tell(json.dumps([await runner.run(jobs.aadd, 1, 2), sock.version(), bool(sock.getpeercert())]))
    finally:
        cluster.shutdown()


OUT = os.dup(1)
"""The standard output of this program. Ray gets the standard error instead: it prints what it hears of the cluster."""


def tell(text: str) -> None:
    os.write(OUT, text.encode() + b"\n")


if __name__ == "__main__":
    os.dup2(2, 1)
    asyncio.run({"waits": waits, "fails": fails, "secure": secure}[sys.argv[1]](sys.argv[2]))
