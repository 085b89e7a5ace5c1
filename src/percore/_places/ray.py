"""Hosts on the nodes of a Ray cluster: an actor on each node starts a host there, and the host ends with it.

Ray says which nodes there are, carries the token, and ends the actors. No call of the user's passes it.
"""

import asyncio
import threading
from collections.abc import Collection
from contextlib import suppress
from typing import Any, Final

import percore
from percore._engines.nodes.places import NoPlace, Place, dealt
from percore._monitor.threads import in_thread
from percore._places.ray_connection import THREAD, RayConnection, certificates
from percore._places.ray_keeper import Keeper
from percore._places.ray_nodes import Node, Nodes, Wanted

_ARGUMENTS: Final = {"GPU": "num_gpus", "memory": "memory"}
"""Resources that Ray takes as arguments of their own."""
_CLOSE: Final = 5.0
"""Seconds for the ends of the actors."""
_AT_LEAST: Final = 0.05
"""The part of `patience` that actors have for their start, however long the wait for a free CPU was."""


class RayPlaces:
    """Implements `Places` over an open connection, which it closes."""

    def __init__(self, connection: RayConnection, wanted: Wanted, patience: float) -> None:
        """`patience`: seconds for the wait for a free CPU and the starts of actors. A node that takes longer costs no other one."""
        self._connection = connection
        self._patience = patience
        self._nodes = Nodes(wanted, patience)
        resources = wanted.resources
        self._options: dict[str, Any] = {_ARGUMENTS[name]: amount for name, amount in resources.items() if name in _ARGUMENTS}
        self._options["resources"] = {name: amount for name, amount in resources.items() if name not in _ARGUMENTS}
        self._options["runtime_env"] = wanted.runtime_env
        self._keepers: list[Any] = []
        self._ended: set[str] = set()
        """The nodes whose host has ended."""
        self._lock = threading.Lock()

    async def free(self) -> list[Node]:
        """Return the nodes that have free CPUs. Raises NoPlace: there was none in time."""
        return await self._nodes.free()

    async def place(self, token: bytes, used: Collection[str], workers: int) -> list[Place | NoPlace]:
        clock = asyncio.get_running_loop().time
        end = clock() + self._patience
        nodes = await self._nodes.free(used) if workers > 0 else []
        nodes = [node for node in nodes if node.id not in self._ended] or nodes  # Ray hears of a death later
        shares = zip(nodes, dealt(workers, [node.cpus for node in nodes]), strict=True)
        wanted = [(node, share) for node, share in shares if share]
        keepers: list[Any] = []
        try:
            answers = await in_thread(THREAD, lambda: self._keep(wanted, token, keepers))
            end = max(end, clock() + _AT_LEAST * self._patience)
            placed = (self._placed(*one, end) for one in zip(wanted, answers, keepers, strict=True))
            return await asyncio.gather(*placed)
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

    async def _placed(self, wanted: tuple[Node, int], answer: Any, keeper: Any, end_of_wait: float) -> Place | NoPlace:
        import ray

        node, share = wanted
        try:
            async with asyncio.timeout_at(end_of_wait):
                port = await asyncio.wrap_future(answer.future())
        except TimeoutError:
            self._end([keeper])
            return NoPlace(
                f"node {node.name} ({node.address}) could not start a host within {self._patience:g} s: see its actor in "
                "`ray list actors`"
            )
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
        threading.Thread(target=self._kill, args=(keepers,), name=THREAD, daemon=True).start()

    def _kill(self, keepers: list[Any]) -> None:
        import ray

        with self._lock:  # those that are being started too
            for keeper in keepers:
                if keeper in self._keepers:
                    self._keepers.remove(keeper)
                    ray.kill(keeper)

    async def aclose(self) -> None:
        try:
            with suppress(TimeoutError):  # Ray ends them when this program disconnects
                async with asyncio.timeout(_CLOSE):
                    await in_thread(THREAD, lambda: self._kill(self._keepers[:]))
        finally:
            await self._connection.aclose()
