"""What a process that a call forks here (`os.fork`, multiprocessing's "fork") takes along of its worker: nothing.

It may outlive the worker, and it is no worker itself.

Descriptors  Those of percore are replaced by the null device under the same numbers: what still exists of the objects that had
             them may close them, and hits nothing else. (Up to Python 3.12 a mapping has a descriptor of its own, with a number
             that nobody is told; hence the look at what each one is.) The channel closes its bells by itself.
SIGTERM      It drains a worker, by a handler that writes to a socket of its loop, and forks share that socket: sent to the fork it
             would drain the worker, and not end the fork. There it is what it was before; and held back while a fork is made.
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
    """Keep these descriptors, and every other one of the same `files`, from forks of this process. For a worker's start."""
    _files.update(map(_identity, files))
    _numbers.update(others)
    os.register_at_fork(before=_hold_back, after_in_parent=_let_through, after_in_child=_leave_behind)


def sigterm_drains() -> None:
    """The handler of SIGTERM that is set now is the worker's alone."""
    _handlers.append(signal.getsignal(signal.SIGTERM))


def _identity(fd: int) -> tuple[int, int]:
    status = os.fstat(fd)
    return status.st_dev, status.st_ino


def _hold_back() -> None:
    _masks.before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})


def _let_through() -> None:
    signal.pthread_sigmask(signal.SIG_SETMASK, _masks.before)


def _leave_behind() -> None:
    if signal.getsignal(signal.SIGTERM) in _handlers:  # else the user's own, to be inherited as in any fork
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
    except OSError:  # that of the listing, closed by now
        return False
