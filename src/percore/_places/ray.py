"""Hosts on the nodes of a Ray cluster: one actor a node starts a host there, and the host ends with it.

Ray says which nodes there are, carries the token, and ends the actors. No call of the user's passes it.
"""

import asyncio
import sys
import threading
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Final

from percore._engines.nodes.places import NoPlace, Place
from percore._places.host_process import start_host

if TYPE_CHECKING:
    import subprocess

_AGAIN: Final = 0.2
"""Seconds between two looks for a node, while there is none."""
_SECONDS: Final = 50.0
"""For the start of an actor on a node."""


class Keeper:
    """The actor of a node. Its host ends when this process does."""

    def __init__(self) -> None:
        self._host: subprocess.Popen[bytes] | None = None

    def start(self, token: bytes) -> tuple[str, int | None]:
        """Start the host. Return the node's address, and the port; None: the host has ended."""
        import ray.util

        address = ray.util.get_node_ip_address()
        self._host, port = start_host(sys.executable, address, token)
        return address, port


class RayPlaces:
    """Implements `Places` with the nodes of a Ray cluster."""

    def __init__(
        self,
        address: str = "auto",
        *,
        workers_per_node: int | None = None,
        resources: dict[str, float] | None = None,
        runtime_env: dict[str, Any] | None = None,
        namespace: str | None = None,
    ) -> None:
        """`workers_per_node`: the CPUs that each host takes; None: all of its node. `resources`: more that it takes, as for Ray.

        The others are those of `ray.init`.
        """
        self._address = address
        self._cpus = workers_per_node
        self._resources = resources or {}
        self._init = {"runtime_env": runtime_env, "namespace": namespace}
        self._keepers: list[Any] = []
        self._is_ours = False
        self._closed = threading.Event()

    async def place(self, token: bytes, used: Collection[str]) -> list[Place]:
        return await asyncio.to_thread(self._place, token, frozenset(used))

    def _place(self, token: bytes, used: Collection[str]) -> list[Place]:
        import ray

        if not ray.is_initialized():
            ray.init(address=self._address, log_to_driver=True, **self._init)
            self._is_ours = True
        while not (nodes := [node for node in ray.nodes() if node["Alive"] and _name(node) not in used]):
            if used or self._closed.wait(_AGAIN):
                return []
        started = [(node, *self._start(node, token)) for node in nodes]
        return [self._placed(_name(node), keeper, told) for node, keeper, told in started]

    def _start(self, node: dict[str, Any], token: bytes) -> tuple[Any, Any]:
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        keeper = (
            ray.remote(Keeper)
            .options(
                num_cpus=self._cpus or node["Resources"].get("CPU", 0),
                resources=self._resources,
                max_restarts=0,
                max_task_retries=0,
                scheduling_strategy=NodeAffinitySchedulingStrategy(node["NodeID"], soft=False),
            )
            .remote()
        )
        self._keepers.append(keeper)
        return keeper, keeper.start.remote(token)

    def _placed(self, name: str, keeper: Any, told: Any) -> Place:
        import ray

        try:
            address, port = ray.get(told, timeout=_SECONDS)
        except ray.exceptions.RayError as error:
            ray.kill(keeper)
            raise NoPlace(f"node {name} could not start a host: {type(error).__name__}: {error}") from None
        if port is None:
            raise NoPlace(f"the host of node {name} ended before it listened: see the actor's log")
        return Place(name, address, port, lambda: ray.kill(keeper))

    async def aclose(self) -> None:
        self._closed.set()
        keepers, self._keepers = self._keepers, []
        await asyncio.to_thread(self._end, keepers)

    def _end(self, keepers: list[Any]) -> None:
        import ray

        for keeper in keepers:
            ray.kill(keeper)
        if self._is_ours:
            ray.shutdown()


def _name(node: dict[str, Any]) -> str:
    return f"{node['NodeManagerHostname']}-{node['NodeID'][:6]}"
