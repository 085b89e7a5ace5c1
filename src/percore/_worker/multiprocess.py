"""Where a worker's process begins that multiprocessing has started, for an executor with an `mp_context`.

By then multiprocessing has seen to `sys.path`, the working directory and `__main__`, or has forked all of it. Its process object is
made a daemon, since an executor ends its workers itself; here it is none any more, so that calls may start processes of their own.
"""

import atexit
import logging
import os
import signal
import sys
from collections.abc import Sequence
from typing import Any, NoReturn, Protocol

from percore._worker import main, manners
from percore._worker.world import HELD_BACK, die_with, take_signals


class Duplicate(Protocol):
    """A descriptor on its way, as multiprocessing sends it."""

    def detach(self) -> int: ...


def received(duplicates: Sequence[Duplicate]) -> list[int]:
    """The descriptors that came with a process."""
    return [duplicate.detach() for duplicate in duplicates]


def begin(boot: bytes, fds: Sequence[int], given: manners.Given, is_fork: bool) -> NoReturn:
    """Be a worker. `fds`: the lifeline, then the worker's own."""
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
    manners.of_process.append(given)
    main.run(boot, own)


def _leave_the_parent() -> None:
    """A fork has everything that its parent had set up: what would now be done twice is not to be done here."""
    util: Any = sys.modules["multiprocessing.util"]
    atexit._clear()
    atexit.register(util._exit_function)
    # Records go to the parent, whose handlers these are.
    loggers = [logging.getLogger(), *logging.getLogger().manager.loggerDict.values()]
    for logger in loggers:
        if isinstance(logger, logging.Logger):
            logger.handlers.clear()
            logger.propagate = True
