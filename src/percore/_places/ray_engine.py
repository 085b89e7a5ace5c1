"""RayEngine, the choice of workers on the nodes of a Ray cluster."""

import asyncio
from importlib.util import find_spec
from typing import Any, Final

from percore._common.engines import EngineChoice, Maker
from percore._common.options import MOST_WORKERS, RunnerOptions, seconds_of, whole
from percore._common.worker_errors import StartupFailed
from percore._engines.nodes.engine import LOST_AFTER, NO_HARDENING, NO_SOCKETS, NodesEngine
from percore._engines.nodes.places import NoPlace
from percore._places.ray import RayPlaces
from percore._places.ray_connection import RayConnection
from percore._places.ray_nodes import Wanted

_PATIENCE: Final = 0.8
"""The part of `start_timeout` for the cluster, so that its own reason is told."""


class RayEngine(EngineChoice):
    """Workers on the nodes of a Ray cluster, for `percore.Runner(engine=percore.RayEngine())` in a program on one of them.

    Ray places one actor on each node and ends it. The actor starts a host, and the host starts percore's own workers there. Calls
    pass over one TCP connection to each host, and never through Ray. All verbs and options of a runner are as on one machine, but
    for `listen`. `workers=None` means as many as Ray has free CPUs. Otherwise the workers are dealt to the nodes in turn, to each
    up to its free CPUs; if there are too few, nodes have more workers than CPUs. Each host takes the CPUs of its workers from Ray.
    A node that joins the cluster later is used from the next `runner.resize` on that adds workers.

    One object may be given to any number of runners.

    Args:
        address: the address of the cluster, such as "10.0.0.1:6379". Default: the cluster of this machine, or RAY_ADDRESS. If the
            program is connected to Ray already, percore uses that connection and leaves it open.
        workers_per_node: how many workers at most a node gets while other nodes have free CPUs.
        resources: what each host takes from Ray beside its CPUs, such as {"GPU": 1}. Only nodes that have it get a host.
        runtime_env: the environment of the hosts and their workers, as for Ray: {"working_dir": ".", "pip": [...]}.
        lost_after: after how many seconds without a sign of life a node counts as lost. Its workers end before.
        namespace: the namespace in which the program connects to Ray.

    Raises:
        ImportError: Ray is not installed.
        TypeError, ValueError: an argument is invalid.
    """

    def __init__(
        self,
        address: str = "auto",
        *,
        workers_per_node: int | None = None,
        resources: dict[str, float] | None = None,
        runtime_env: dict[str, Any] | None = None,
        lost_after: float = LOST_AFTER,
        namespace: str | None = None,
    ) -> None:
        for name, text in (("address", address), ("namespace", "" if namespace is None else namespace)):
            if not isinstance(text, str):
                raise TypeError(f"{name} must be a text, not {text!r}")
        if address.startswith("ray://"):
            raise ValueError(
                f"RayEngine cannot use a Ray client ({address}): its program must run on a node of the cluster, which its workers' "
                'nodes can reach. Start it there, for example with `ray job submit`, and with address="auto"'
            )
        if runtime_env is not None and not isinstance(runtime_env, dict):
            raise TypeError(f'runtime_env must be a dict, such as {{"working_dir": "."}}, not {runtime_env!r}')
        if workers_per_node is not None:
            whole("workers_per_node", workers_per_node, 1, MOST_WORKERS)
        self._wanted = Wanted(workers_per_node, _resources(resources), runtime_env)
        self._address = address
        self._namespace = namespace
        self._lost_after = seconds_of("lost_after", lost_after)
        if find_spec("ray") is None:
            raise ImportError('RayEngine needs Ray: pip install "percore[ray]"')

    def __repr__(self) -> str:
        return f"percore.RayEngine({self._address!r})"

    def _check(self, given: dict[str, Any]) -> None:
        if given["listen"]:
            raise ValueError(NO_SOCKETS)
        if given["harden"]:
            raise ValueError(NO_HARDENING)

    def _maker(self) -> "RayMaker":
        return RayMaker(RayConnection(self._address, self._namespace), self._wanted, self._address, self._lost_after)


class RayMaker(Maker):
    """Makes the engine of one runner."""

    def __init__(self, connection: RayConnection, wanted: Wanted, address: str, lost_after: float) -> None:
        self._connection = connection
        self._wanted = wanted
        self._address = address
        self._lost_after = lost_after
        self._places: RayPlaces

    async def open(self, options: RunnerOptions) -> RunnerOptions:
        patience = _PATIENCE * options.start_timeout
        try:
            async with asyncio.timeout(patience):
                await self._connection.open()
        except TimeoutError:
            raise StartupFailed(
                f"Ray at {self._address} did not answer within {patience:g} s: see whether its head runs (`ray status`), and lets "
                "this machine reach all its ports"
            ) from None
        except (OSError, RuntimeError, ValueError) as error:
            raise StartupFailed(
                f"Ray at {self._address} cannot be used: {type(error).__name__}: {error}. A program with RayEngine runs on "
                "a node of the cluster, with the Ray and the Python of the cluster, and outside its tasks and actors"
            ) from error
        self._places = RayPlaces(self._connection, self._wanted, patience)
        if not options.is_counted:
            return options
        try:
            nodes = await self._places.free()
        except NoPlace as error:
            raise StartupFailed(str(error)) from None
        return options._replace(workers=min(MOST_WORKERS, sum(node.cpus for node in nodes)))

    def make(self, loop: asyncio.AbstractEventLoop, options: RunnerOptions, main: Any, /) -> NodesEngine:
        return NodesEngine(loop, options, main, self._places, lost_after=self._lost_after)

    async def abandon(self) -> None:
        await self._connection.aclose()


def _resources(given: object) -> dict[str, float]:
    if given is None:
        return {}
    if not isinstance(given, dict):
        raise TypeError(f'resources must be a dict, such as {{"GPU": 1}}, not {given!r}')
    for name, amount in given.items():
        if not isinstance(name, str) or isinstance(amount, bool) or not isinstance(amount, int | float) or not amount > 0:
            raise ValueError(f'resources must be positive numbers by name, such as {{"GPU": 1}}, not {{{name!r}: {amount!r}}}')
    if "CPU" in given:
        raise ValueError("resources cannot contain CPU: each host takes as many CPUs as it has workers; see workers_per_node")
    return dict(given)
