"""A fork server that tests share: to start one takes more CPU than most of them.

The tests of tests/contract that have one, and those with the mark `warm_fork_server`, find it there and leave it. It is ended
before any other test, and at the end. A test of a fork server's start or end has its own, and so has one with points, which a
fork server reads when it starts.

`warm_fork_server(imports="numpy")` is for modules whose every worker would import that library, which takes many times as long
as their calls. Workers of the other engines import it themselves.
"""

import asyncio
from typing import TYPE_CHECKING

import pytest

from percore import Runner
from percore._common.system import default_start_method
from percore._engines.processes.launch import ENTRY
from tests import rows

if TYPE_CHECKING:
    from percore._engines.processes.fork_server_launcher import ForkServerLauncher

_launchers: "dict[str, ForkServerLauncher]" = {}
"""At most one, by what it imports besides: it holds a share in the fork server."""


def prepare(item: pytest.Item) -> None:
    """Start or end the shared fork server, as this test needs it."""
    if default_start_method() != "forkserver":
        return
    if item.get_closest_marker("own_fork_server"):
        end()
        return
    engine = rows.engine_of(item)
    mark = item.get_closest_marker("warm_fork_server")
    has_points = "points" in getattr(item, "fixturenames", ())
    if engine in {"forkserver", "nodes"} or (mark and not has_points):
        start(mark.kwargs.get("imports", "") if mark else "")
    elif engine is None:
        end()


def start(imports: str = "") -> None:
    """Start it, unless it is there already. `imports`: a module that it imports besides percore's own."""
    from percore._engines.processes.fork_server_launcher import ForkServerLauncher

    if imports not in _launchers:
        end()
        _launchers[imports] = ForkServerLauncher.open(f"tests.warm_{imports}:" if imports else ENTRY)
    launcher = _launchers[imports]
    if not launcher.helpers():  # or a test has killed it
        launcher.warm_up()
        asyncio.run(_start_and_stop())


async def _start_and_stop() -> None:
    async with Runner(1, start_method="forkserver"):
        pass


def end() -> None:
    """End it, if there is one."""
    while _launchers:
        asyncio.run(_launchers.popitem()[1].aclose())
