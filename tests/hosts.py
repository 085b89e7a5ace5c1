"""Runners over nodes: with hosts in the loop of the test itself, so that a test starts no interpreter, and with hosts as processes.

    supervisor ── NodesEngine ── a connection on 127.0.0.1 for each node ── Host ── process engine ── workers

The contract suite passes with hosts in the loop. Everything that a message, a payload or an exit passes is real; only the host's
process is missing. What that adds (its death, a freeze, the program's death) is in tests/e2e/test_nodes.py.
"""

import asyncio
import os
from collections.abc import Callable, Collection
from typing import Any

from percore import Runner
from percore._common.options import RunnerOptions
from percore._engines.nodes.engine import NodesEngine
from percore._engines.nodes.places import NoPlace, Place
from percore._engines.processes.engine import ProcessEngine
from percore._node.host import Host
from percore._places.local import LOCAL, LocalPlaces
from percore._serialization.pickler import MainInfo
from percore._transport.proven import Door


class InnerHost(Host):
    """A host in the program's loop. At its end it counts the payloads that it keeps, and that the program has dropped."""

    surplus = 0

    async def close_engine(self, engine: ProcessEngine) -> None:
        self.surplus = engine.store.in_use - len(self.parcels)
        await engine.aclose()


class InnerPlaces:
    """Implements `Places` with hosts in the loop of the program.

    Attributes:
        hosts: the host of each node, the latest.
    """

    def __init__(self, nodes: int, *weights: int) -> None:
        self.hosts: dict[str, InnerHost] = {}
        self._names = [chr(ord("a") + place) for place in range(nodes)]
        self._weights = weights or (1,) * nodes
        self._tasks: dict[str, asyncio.Task[None]] = {}

    async def place(self, token: bytes, used: Collection[str], _workers: int) -> list[Place | NoPlace]:
        loop = asyncio.get_running_loop()
        placed: list[Place | NoPlace] = []
        for name, weight in zip(self._names, self._weights, strict=True):
            if name not in used:
                door = Door(loop, token, LOCAL)
                self._tasks[name] = loop.create_task(self._serve(name, door))
                placed.append(Place(name, LOCAL, door.port, lambda name=name: self._end(name), weight))  # type: ignore[misc]
        return placed

    async def _serve(self, name: str, door: Door) -> None:
        sock = await door.wait()
        host = self.hosts[name] = InnerHost(asyncio.get_running_loop(), sock, os.getpid())
        await host.ended

    def _end(self, name: str) -> None:
        if name in self.hosts:
            self.hosts[name].leave("the test ended it")
        else:
            self._tasks[name].cancel()

    async def aclose(self) -> None:
        for name in self._tasks:
            self._end(name)
        await asyncio.gather(*self._tasks.values(), return_exceptions=True)
        assert not [host for host in self.hosts.values() if host.surplus], "a store keeps a payload that the program has dropped"


def _factory(places: Callable[[], Any], lost_after: float) -> Any:
    def make(loop: asyncio.AbstractEventLoop, options: RunnerOptions, main: MainInfo) -> NodesEngine:
        return NodesEngine(loop, options, main, places(), lost_after=lost_after)

    return staticmethod(make)


class NodesRunner(Runner):
    """A runner over two nodes whose hosts are in its own loop."""

    _make_engine = _factory(lambda: InnerPlaces(2), 60.0)


class OneNodeRunner(Runner):
    """A runner over one node whose host is in its own loop."""

    _make_engine = _factory(lambda: InnerPlaces(1), 60.0)


def host_runner(nodes: int = 2, lost_after: float = 30.0, **places: Any) -> type[Runner]:
    """Return a class of runners over nodes whose hosts are processes."""

    class HostRunner(Runner):
        _make_engine = _factory(lambda: LocalPlaces(nodes, **places), lost_after)

    return HostRunner


def engine_of(runner: Runner) -> NodesEngine:
    """The engine of a runner over nodes."""
    engine: Any = runner._supervisor.engine
    assert isinstance(engine, NodesEngine)
    return engine


def inner_hosts(engine: NodesEngine) -> list[InnerHost]:
    """The hosts of a NodesRunner."""
    places: Any = engine._places
    return list(places.hosts.values())
