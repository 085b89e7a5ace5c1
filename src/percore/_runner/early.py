"""The first steps of a start: the fork server's process, before the imports that this process needs.

So the two processes import at the same time on two CPUs. Importing this module is cheap; above all, it does not import asyncio.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from percore._common.options import RunnerOptions
    from percore._engines.processes.fork_server_launcher import ForkServerLauncher

MODULES: Final = (
    "percore._common.worker_errors",
    "percore._transport.channel",
    "percore._serialization.pickler",
    "percore._scheduler.dispatch",
    "percore._worker_process.main",
    "percore._engines.processes.engine",
    "percore._calls.items",
    "percore._supervisor.pool",
    "percore._supervisor.supervisor",
)
"""The modules of an assembly, in the order in which they are imported."""


def warm_up(options: RunnerOptions) -> ForkServerLauncher | None:
    """Begin to start the fork server and return a reference to it, which the caller closes. None if the options need none."""
    if options.start_method != "forkserver":
        return None
    from percore._engines.processes.fork_server_launcher import ForkServerLauncher

    launcher = ForkServerLauncher.open()
    launcher.warm_up()
    return launcher
