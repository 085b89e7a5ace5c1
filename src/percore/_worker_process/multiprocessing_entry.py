"""The entry point of a worker process that multiprocessing has started, for an executor with an `mp_context`.

By then multiprocessing has set up `sys.path`, the working directory and `__main__`, or has forked all of it. The executor ends its
workers itself, so it starts the process as a daemon. In the worker the daemon flag is cleared, so that calls may start processes.
"""

import atexit
import logging
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

from percore._protocol.worker_start import Given
from percore._worker_process import main
from percore._worker_process.world import HELD_BACK, die_with, take_signals


class Duplicate(Protocol):
    """A descriptor in transit, as multiprocessing sends it."""

    def detach(self) -> int: ...


def received(duplicates: Sequence[Duplicate]) -> list[int]:
    """Return the descriptors that came with the process."""
    return [duplicate.detach() for duplicate in duplicates]


def begin(boot: bytes, fds: Sequence[int], given: Given, is_fork: bool) -> NoReturn:
    """Run a worker. `fds`: the lifeline, then those that `main.run` takes."""
    lifeline, *own = fds
    for fd in fds:
        os.set_inheritable(fd, False)
    die_with(lifeline)
    multiprocessing: Any = sys.modules["multiprocessing.process"]
    multiprocessing.current_process()._config["daemon"] = False
    if is_fork:
        _leave_the_parent()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_BACK)
    take_signals()
    main.run(boot, own, given)


def _leave_the_parent() -> None:
    """Drop the parent's exit functions and log handlers, which a fork inherits: otherwise both processes would run them."""
    util: Any = sys.modules["multiprocessing.util"]
    atexit._clear()
    atexit.register(util._exit_function)
    # The worker forwards its records to the parent, and the parent's handlers handle them there.
    loggers = [logging.getLogger(), *logging.getLogger().manager.loggerDict.values()]
    for logger in loggers:
        if isinstance(logger, logging.Logger):
            logger.handlers.clear()
            logger.propagate = True
