"""Which nodes of a Ray cluster have free CPUs. Ray tells nobody when one becomes free: whoever waits for one asks again."""

import asyncio
import sys
from collections.abc import Collection
from typing import Any, Final, NamedTuple

from percore._engines.nodes.places import NoPlace
from percore._monitor.threads import in_thread
from percore._places.ray_connection import THREAD

_AGAIN: Final = 0.1
"""Seconds between two looks for a free CPU."""


class Wanted(NamedTuple):
    """What RayEngine asks of each node."""

    workers_per_node: int | None
    resources: dict[str, float]
    runtime_env: dict[str, Any] | None


class Node(NamedTuple):
    """A node with `cpus` free CPUs for workers."""

    id: str
    name: str
    address: str
    cpus: int


class Nodes:
    """The nodes of the cluster that the program is connected to."""

    def __init__(self, wanted: Wanted, patience: float) -> None:
        """`patience`: seconds for the wait for a free CPU."""
        self._most = wanted.workers_per_node or sys.maxsize
        self._resources = wanted.resources
        self._patience = patience

    async def free(self, used: Collection[str] = ()) -> list[Node]:
        """Return the nodes that have free CPUs and are not used. Wait for one if none is used.

        Raises:
            NoPlace: there was none in time.
        """
        end = asyncio.get_running_loop().time() + self._patience
        while True:
            nodes, total = await in_thread(THREAD, self._look)
            if used or nodes:
                return [node for node in nodes if node.name not in used]
            if asyncio.get_running_loop().time() > end:
                more = f" and {self._resources}" if self._resources else ""
                raise NoPlace(
                    f"no node of the Ray cluster has a free CPU{more}, and none got one in {self._patience:g} s (all its CPUs: "
                    f"{total:g}): see `ray status`, then end other jobs, add nodes, or ask for less"
                )
            await asyncio.sleep(_AGAIN)

    def _look(self) -> tuple[list[Node], float]:
        import ray
        from ray._private.state import available_resources_per_node

        free = available_resources_per_node()
        alive = [node for node in ray.nodes() if node["Alive"]]
        found = []
        for node in alive:
            here = free.get(node["NodeID"], {})
            if here.get("CPU", 0) >= 1 and all(here.get(name, 0) >= amount for name, amount in self._resources.items()):
                name = f"{node['NodeManagerHostname']}-{node['NodeID'][:6]}"
                found.append(Node(node["NodeID"], name, node["NodeManagerAddress"], min(int(here["CPU"]), self._most)))
        return found, sum(node["Resources"].get("CPU", 0) for node in alive)
