"""The file descriptors that the supervisor holds for its workers. None of them may leak into a fork of the supervisor.

A process that the user forks from the supervisor closes all *held* descriptors at once (see `hold`). Otherwise the fork
would keep the write end of a lifeline open, and the worker would stay alive after the supervisor has ended.
"""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import os
import socket
import threading
from typing import TYPE_CHECKING, Protocol, TypeVar

from percore._transport.memory import anonymous_file as new_file

if TYPE_CHECKING:
    from collections.abc import Iterator


class Closable(Protocol):
    def close(self) -> None: ...
    def fileno(self) -> int: ...


C = TypeVar("C", bound=Closable)

_held: set[Closable] = set()
_keeping = threading.local()
"""Whether this thread is in `kept_in_forks`. Another thread may fork meanwhile, and that fork must keep nothing."""


def hold(thing: C) -> C:
    """Keep this open until `let_go`. Forks of this process close it at once, and the interpreter does so silently when it ends."""
    _held.add(thing)
    return thing


def let_go(*things: Closable) -> None:
    """Close these. Idempotent."""
    for thing in things:
        _held.discard(thing)
        thing.close()


@contextlib.contextmanager
def kept_in_forks() -> Iterator[None]:
    """Let forks by this thread keep what is held: they are about to run another program, which gets some of it."""
    _keeping.is_on = True
    try:
        yield
    finally:
        _keeping.is_on = False


def _let_go_of_all() -> None:
    while _held:
        _held.pop().close()


def _forked() -> None:
    if not getattr(_keeping, "is_on", False):  # of the thread that has forked
        _let_go_of_all()


os.register_at_fork(after_in_child=_forked)
atexit.register(_let_go_of_all)


class Fd:
    """A file descriptor with one owner."""

    __slots__ = ("number",)

    def __init__(self, number: int) -> None:
        self.number = number

    def fileno(self) -> int:
        return self.number

    def close(self) -> None:
        number, self.number = self.number, -1
        if number >= 0:
            os.close(number)


def above_streams(fd: int) -> int:
    """Return a descriptor above 2 for the same file: `fd` itself, or a copy that is not inheritable. A lower `fd` is closed.

    If the supervisor runs with a closed standard stream, a new file gets the number of that stream. A lifeline as fd 1
    would kill its worker with the first print, and the numbers 0 to 2 cannot be passed to a process that gets its own
    standard streams.
    """
    if fd > 2:
        return fd
    try:
        return fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)
    finally:
        os.close(fd)


def open_file(path: str, flags: int) -> Fd:
    return hold(Fd(above_streams(os.open(path, flags | os.O_CLOEXEC))))


def duplicate(fd: int) -> Fd:
    return hold(Fd(fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, 3)))


def _all_above_streams(fds: list[int]) -> list[int]:
    """Apply `above_streams` to all of them, in reverse order. On an error, close all of them."""
    moved: list[int] = []
    try:
        while fds:
            moved.append(above_streams(fds.pop()))
    except BaseException:
        for fd in (*fds, *moved):
            os.close(fd)
        raise
    return moved


def pipe() -> tuple[Fd, Fd]:
    """Create a lifeline. Returns the read end, for the child, and the write end, which stays here."""
    write_end, read_end = _all_above_streams(list(os.pipe()))
    return hold(Fd(read_end)), hold(Fd(write_end))


def packet_pair() -> tuple[socket.socket, socket.socket]:
    """Create two connected sockets that preserve message boundaries. The first is non-blocking."""
    pair = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    numbers = _all_above_streams([end.detach() for end in pair])
    ours, theirs = (socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, number) for number in numbers)
    ours.setblocking(False)
    return hold(ours), hold(theirs)


def anonymous_file(data: bytes, label: str = "percore") -> Fd:
    """Create a file without a name that contains `data`, positioned at its beginning. `label`: as of the transport's files."""
    file = hold(Fd(above_streams(new_file(label))))
    try:
        view = memoryview(data)
        while view:
            view = view[os.write(file.number, view) :]
        os.lseek(file.number, 0, os.SEEK_SET)
    except BaseException:
        let_go(file)
        raise
    return file
