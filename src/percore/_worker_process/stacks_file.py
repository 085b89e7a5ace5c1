"""Who may use the file to which the workers of a runner write their stacks: one process at a time.

The program examines blocked workers with it, and `percore top` and `percore record` sample workers from outside. Two of them at
once would read each other's stacks, or empty the file under each other. So each of them takes the file for as long as it asks one
worker. The program never waits in its loop: it claims the file, so that nobody else takes it again, and tries to take it until it
is free.

These are locks on two bytes of the file by open file descriptions, which go with them: a process that is killed keeps nothing.
Where the system has no such locks it has no /proc by which others could find the file, and nobody has to be kept out.
"""

import fcntl
import os
import struct
from contextlib import suppress
from typing import Final

_SET: Final[int | None] = getattr(fcntl, "F_OFD_SETLK", None)
_GET: Final[int | None] = getattr(fcntl, "F_OFD_GETLK", None)
HAS_LOCKS: Final = _SET is not None
_USE, _CLAIM = range(2)
_FLOCK: Final = "hhqqi"


def claim(fd: int) -> None:
    """Keep others from taking the file, until it is released. For the program."""
    _lock(fd, fcntl.F_WRLCK, _CLAIM)


def take(fd: int) -> bool:
    """Take the file if nobody has it. Return whether this succeeded. For the program."""
    return _lock(fd, fcntl.F_WRLCK, _USE)


def take_unclaimed(fd: int) -> bool:
    """Take the file if nobody has it and the program does not claim it. Return whether this succeeded. For other processes."""
    return not _is_locked(fd, _CLAIM) and take(fd)


def is_taken(fd: int) -> bool:
    """Whether anybody has the file who has opened it by another description than this one."""
    return _is_locked(fd, _USE)


def release(fd: int) -> None:
    """Give the file back, and the claim."""
    for byte in (_USE, _CLAIM):
        _lock(fd, fcntl.F_UNLCK, byte)


def _is_locked(fd: int, byte: int) -> bool:
    if _GET is None:
        return False
    found = fcntl.fcntl(fd, _GET, struct.pack(_FLOCK, fcntl.F_WRLCK, os.SEEK_SET, byte, 1, 0))
    return bool(struct.unpack_from("h", found)[0] != fcntl.F_UNLCK)


def _lock(fd: int, kind: int, byte: int) -> bool:
    if _SET is None:
        return True
    with suppress(BlockingIOError):
        fcntl.fcntl(fd, _SET, struct.pack(_FLOCK, kind, os.SEEK_SET, byte, 1, 0))
        return True
    return False
