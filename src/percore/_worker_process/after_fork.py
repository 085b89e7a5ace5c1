"""Cleanup in processes that calls fork in a worker (`os.fork`, or multiprocessing's "fork").

Such a process may outlive the worker and is not a worker itself, so it keeps nothing of percore's.

Descriptors  The fork replaces percore's descriptors by the null device under the same numbers. Objects that held a descriptor may
             still close that number, and do not hit another file. (Up to Python 3.12 an mmap duplicates its descriptor under a
             number that Python does not expose. So the fork compares the file of each open descriptor.) The channel closes its
             bells itself.
SIGTERM      A worker drains on SIGTERM, by a handler that writes to a socket of its loop. Forks share that socket, so a SIGTERM to
             the fork would drain the worker and not end the fork. So the fork restores the default action. SIGTERM is blocked
             while the fork is made.
"""

import os
import signal
import threading
from collections.abc import Iterable
from typing import Any, Final

_files: Final[set[tuple[int, int]]] = set()
_numbers: Final[set[int]] = set()
_masks: Final = threading.local()
_handlers: Final[list[Any]] = []


def withhold(files: Iterable[int], others: Iterable[int]) -> None:
    """In forks of this process, replace the descriptors `others`, and every descriptor of the same files as `files`.

    A worker calls this at its start.
    """
    _files.update(map(_identity, files))
    _numbers.update(others)
    os.register_at_fork(before=_hold_back, after_in_parent=_let_through, after_in_child=_leave_behind)


def withhold_more(others: Iterable[int]) -> None:
    """Replace these descriptors in forks, too."""
    _numbers.update(others)


def sigterm_drains() -> None:
    """Reset the current handler of SIGTERM in forks: it belongs to the worker."""
    _handlers.append(signal.getsignal(signal.SIGTERM))


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _hold_back() -> None:
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _let_through() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _leave_behind() -> None:
    if signal.getsignal(signal.SIGTERM) in _handlers:  # otherwise a user's handler, which forks inherit as usual
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.set_wakeup_fd(-1)
    _let_through()
    null = os.open(os.devnull, os.O_RDWR)
    for number in map(int, os.listdir("/dev/fd")):
        if number != null and (number in _numbers or _is_withheld(number)):
            os.dup2(null, number, inheritable=False)
    os.close(null)


def _is_withheld(fd: int) -> bool:
    try:
        return _identity(fd) in _files
    except OSError:  # the descriptor of the listing itself, which is closed by now
        return False
