"""percore over nodes whose hosts are processes of this machine."""

from __future__ import annotations

from typing import TYPE_CHECKING

import percore
from percore._engines.nodes.engine import NodesEngine
from percore._places.local import LocalPlaces

if TYPE_CHECKING:
    import asyncio

    from percore._common.options import RunnerOptions
    from percore._serialization.pickler import MainInfo

NODES = 2


def _engine(loop: asyncio.AbstractEventLoop, options: RunnerOptions, main: MainInfo) -> NodesEngine:
    return NodesEngine(loop, options, main, LocalPlaces(NODES))


class NodesRunner(percore.Runner):
    """A runner over two nodes."""

    _make_engine = staticmethod(_engine)

    @property
    def hosts(self) -> dict[str, int]:
        """The process of each node's host."""
        places = self._supervisor.engine._places  # type: ignore[attr-defined]
        return {name: host.pid for name, host in places.hosts.items()}
