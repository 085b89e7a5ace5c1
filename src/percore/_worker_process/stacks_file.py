"""Who may use the file to which the workers of a runner write their stacks: one process at a time.

The program examines blocked workers with it, and `percore top` and `percore record` sample workers from outside. Two of them at
once would read each other's stacks, or empty the file under each other. So each of them takes the file for as long as it asks one
worker. The program never waits in its loop: it claims the file, so that nobody else takes it again, and tries to take it until it
is free.

A worker that writes between two steps says first whose code its main thread runs. faulthandler cannot.

These are locks on two bytes of the file by open file descriptions, which go with them: a process that is killed keeps nothing.
Where the system has no such locks it has no /proc by which others could find the file, and nobody has to be kept out.
"""

import fcntl
import os
import struct
from contextlib import suppress
from typing import Final

_CALL: Final = "Call: "

_SET: Final[int | None] = getattr(fcntl, "F_OFD_SETLK", None)
_GET: Final[int | None] = getattr(fcntl, "F_OFD_GETLK", None)
HAS_LOCKS: Final = _SET is not None
_USE, _CLAIM = range(2)
_FLOCK: Final = "hhqqi"


def with_call(call: int | None, stacks: str) -> str:
    """Return the text of a worker that was asked between two steps. `call`: the call whose code its main thread runs."""
    return f"{_CALL}{'' if call is None else call}\n\n{stacks}"


def without_call(text: str) -> tuple[str, bool, int | None]:
    """Return the stacks of a text, whether it is one of `with_call`, and the call."""
    if not text.startswith(_CALL):
        return text, False, None
    head, _, stacks = text.removeprefix(_CALL).partition("\n\n")
    return stacks, True, int(head) if head.isdecimal() else None


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
