"""A fork server that tests share: to start one takes more CPU than most of them.

The tests of tests/contract that have one, and those with the mark `warm_fork_server`, find it there and leave it. It is ended
before any other test, and at the end. A test of a fork server's start or end has its own, and so has one with points, which a
fork server reads when it starts.
"""

import asyncio
from typing import TYPE_CHECKING

import pytest

from percore import Runner
from percore._common.system import default_start_method
from tests import rows

if TYPE_CHECKING:
    from percore._engines.processes.fork_server_launcher import ForkServerLauncher

_launchers: "list[ForkServerLauncher]" = []
"""At most one: it holds a share in the fork server."""


def prepare(item: pytest.Item) -> None:
    """Start or end the shared fork server, as this test needs it."""
    if default_start_method() != "forkserver":
        return
    if item.get_closest_marker("own_fork_server"):
        end()
        return
    engine = rows.engine_of(item)
    has_points = "points" in getattr(item, "fixturenames", ())
    if engine in {"forkserver", "relay"} or (item.get_closest_marker("warm_fork_server") and not has_points):
        start()
    elif engine is None:
        end()


def start() -> None:
    from percore._engines.processes.fork_server_launcher import ForkServerLauncher

    if not _launchers:
        _launchers.append(ForkServerLauncher.open())
    if not _launchers[0].helpers():  # or a test has killed it
        asyncio.run(_start_and_stop())


async def _start_and_stop() -> None:
    async with Runner(1, start_method="forkserver"):
        pass


def end() -> None:
    """End it, if there is one."""
    while _launchers:
        asyncio.run(_launchers.pop().aclose())
