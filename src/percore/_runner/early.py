"""The first steps of a start: the fork server's process, before the imports that this process needs.

So the two processes import at the same time on two CPUs. Importing this module is cheap; above all, it does not import asyncio.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Final

from percore._common.hardening import close_program

if TYPE_CHECKING:
    from percore._common.options import RunnerOptions
    from percore._engines.processes.fork_server_launcher import ForkServerLauncher

MODULES: Final = (
    "percore._common.worker_errors",
    "percore._transport.channel",
    "percore._serialization.pickler",
    "percore._scheduler.dispatch",
    "percore._engines.processes.engine",
    "percore._calls.items",
    "percore._supervisor.pool",
    "percore._supervisor.supervisor",
)
"""The modules of an assembly, in the order in which they are imported."""

LATER: Final = (
    "percore._calls.context_variables",
    "percore._common.addresses",
    "percore._supervisor.admission",
    "percore._supervisor.hard_limits",
    "percore._supervisor.limited_worker",
    "percore._supervisor.memory_watch",
    "percore._supervisor.rates",
    "percore._supervisor.usage_elsewhere",
)
"""Those of options that few runners have: they are imported for a runner with the option, or for the first call with it."""


def check_start() -> None:
    """As `check_start` of `_worker.context`, which every worker has loaded. A process that has not is none."""
    context = sys.modules.get("percore._worker.context")
    if context is not None:
        context.check_start()


def warm_up(options: RunnerOptions) -> ForkServerLauncher | None:
    """Begin to start the fork server and return a reference to it, which the caller closes. None if the options need none.

    Raises:
        OSError: the options ask to harden this program, and the system refuses it.
    """
    if options.harden:
        close_program()  # first of all: its fork server is closed then, and so are all forks of that
    if options.start_method != "forkserver":
        return None
    from percore._engines.processes.fork_server_launcher import ForkServerLauncher

    launcher = ForkServerLauncher.open()
    launcher.warm_up()
    return launcher


def keep_warm(options: RunnerOptions) -> None:
    """As `warm_up`, and keep the fork server until `cool_down`, for the executors that this program opens later.

    Raises:
        OSError: as in `warm_up`.
    """
    if options.harden:
        close_program()
    if options.start_method == "forkserver":
        from percore._engines.processes.fork_servers import servers
        from percore._engines.processes.launch import ENTRY

        with suppress(OSError, RuntimeError):  # the launch of the workers tries again, and raises if that fails too
            servers.keep(ENTRY.partition(":")[0])


def holds_fork_servers() -> bool:
    """Whether this thread is in the middle of a step of the fork servers, for whose end runners of other threads may wait."""
    fork_servers = sys.modules.get("percore._engines.processes.fork_servers")
    return fork_servers is not None and fork_servers.servers.are_held()


def cool_down() -> None:
    """Undo `keep_warm`. If no runner is open, this ends the fork server and waits until it is dead."""
    fork_servers = sys.modules.get("percore._engines.processes.fork_servers")
    if fork_servers is not None:
        fork_servers.servers.keep_no_longer()
