"""Hosts on the nodes of a Ray cluster: an actor on each node starts a host there, and the host ends with it.

Ray says which nodes there are, carries the token, and ends the actors. No call of the user's passes it. It tells nobody when a CPU
becomes free: whoever waits for one asks again.
"""

import asyncio
import os
import select
import sys
import threading
from collections.abc import Collection
from contextlib import suppress
from typing import Any, Final, NamedTuple

import percore
from percore._engines.nodes.places import NoPlace, Place, dealt
from percore._monitor.threads import in_thread
from percore._places.host_process import start_host
from percore._places.ray_connection import RayConnection, certificates

_AGAIN: Final = 0.1
"""Seconds between two looks for a free CPU."""
_ARGUMENTS: Final = {"GPU": "num_gpus", "memory": "memory"}
"""Resources that Ray takes as arguments of their own."""
_CLOSE: Final = 5.0
"""Seconds for the ends of the actors."""
_THREAD: Final = "percore-ray"


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


class Keeper:
    """The actor of a node. Its host ends when this process or the raylet does, which Ray notices a second later."""

    def start(self, address: str, token: bytes) -> int | None:
        """Start the host and return its port. None: it has ended."""
        import ray

        theirs = os.path.dirname(ray.__file__)  # Ray puts its own copies of psutil and others first
        path = [part for part in sys.path if not part.startswith(theirs)]
        self._host, port = start_host(sys.executable, address, token, path, certificates())
        threading.Thread(target=self._end_with_the_raylet, name=_THREAD, daemon=True).start()
        return port

    def _end_with_the_raylet(self) -> None:
        with suppress(OSError):  # in a container of its own it has another number
            raylet = os.pidfd_open(int(os.environ.get("RAY_RAYLET_PID") or os.getppid()))
            gone = select.poll()
            gone.register(raylet, select.POLLIN)
            gone.poll()
            assert self._host.stdin is not None
            self._host.stdin.close()


class RayPlaces:
    """Implements `Places` over an open connection, which it closes."""

    def __init__(self, connection: RayConnection, wanted: Wanted, patience: float) -> None:
        """`patience`: seconds for the wait for a free CPU."""
        self._connection = connection
        self._most = wanted.workers_per_node or sys.maxsize
        self._resources = resources = wanted.resources
        self._options: dict[str, Any] = {_ARGUMENTS[name]: amount for name, amount in resources.items() if name in _ARGUMENTS}
        self._options["resources"] = {name: amount for name, amount in resources.items() if name not in _ARGUMENTS}
        self._options["runtime_env"] = wanted.runtime_env
        self._patience = patience
        self._keepers: list[Any] = []
        self._ended: set[str] = set()
        """The nodes whose host has ended."""
        self._lock = threading.Lock()

    async def free(self, used: Collection[str] = ()) -> list[Node]:
        """Return the nodes that have free CPUs and are not used. Wait for one if none is used.

        Raises:
            NoPlace: there was none in time.
        """
        end = asyncio.get_running_loop().time() + self._patience
        while True:
            nodes, total = await in_thread(_THREAD, self._look)
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

    async def place(self, token: bytes, used: Collection[str], workers: int) -> list[Place | NoPlace]:
        nodes = await self.free(used) if workers > 0 else []
        nodes = [node for node in nodes if node.id not in self._ended] or nodes  # Ray hears of a death later
        shares = zip(nodes, dealt(workers, [node.cpus for node in nodes]), strict=True)
        wanted = [(node, share) for node, share in shares if share]
        keepers: list[Any] = []
        try:
            answers = await in_thread(_THREAD, lambda: self._keep(wanted, token, keepers))
            return [await self._placed(*one) for one in zip(wanted, answers, keepers, strict=True)]
        except BaseException:
            self._end(keepers)
            raise

    def _keep(self, wanted: list[tuple[Node, int]], token: bytes, keepers: list[Any]) -> list[Any]:
        """Start actors. Return references to their answers."""
        import ray
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        answers = []
        with self._lock:
            for node, share in wanted:
                strategy = NodeAffinitySchedulingStrategy(node.id, soft=False)
                options = self._options | {"num_cpus": share, "scheduling_strategy": strategy}
                keeper = ray.remote(Keeper).options(max_restarts=0, max_task_retries=0, **options).remote()
                keepers.append(keeper)
                self._keepers.append(keeper)
                answers.append(keeper.start.remote(node.address, token))
        return answers

    async def _placed(self, wanted: tuple[Node, int], answer: Any, keeper: Any) -> Place | NoPlace:
        import ray

        node, share = wanted
        try:
            port = await asyncio.wrap_future(answer.future())
        except ray.exceptions.RayError as error:
            self._end([keeper])
            return NoPlace(
                f"node {node.name} ({node.address}) could not start a host: {error}: it needs percore "
                f"{percore.__version__}, as this program has, for example by runtime_env"
            )
        if port is None:
            self._end([keeper])
            return NoPlace(f"the host of node {node.name} ({node.address}) ended before it listened: see the log of its actor")

        def end() -> None:
            self._ended.add(node.id)
            self._end([keeper])

        return Place(node.name, node.address, port, end, share, certificates())

    def _end(self, keepers: list[Any]) -> None:
        threading.Thread(target=self._kill, args=(keepers,), name=_THREAD, daemon=True).start()

    def _kill(self, keepers: list[Any]) -> None:
        import ray

        with self._lock:  # those that are being started too
            for keeper in keepers:
                if keeper in self._keepers:
                    self._keepers.remove(keeper)
                    ray.kill(keeper)

    async def aclose(self) -> None:
        with suppress(TimeoutError):  # Ray ends them when this program disconnects
            async with asyncio.timeout(_CLOSE):
                await in_thread(_THREAD, lambda: self._kill(self._keepers[:]))
        await self._connection.aclose()
