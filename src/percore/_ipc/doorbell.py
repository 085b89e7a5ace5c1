"""Bells that carry positions: how the two sides of a channel wake each other and hand bytes over.

Ringing tells how many bytes were published in one's own ring and how many were consumed of the other's, both since the last ring.
The system call is also the memory barrier: see `ring`.
A worker's bell tells of its log records, too. They have a ring of their own (`_worker.logs`), but one bell keeps the order: who
hears of a message has heard of the records that were written before it.

EventBell   an eventfd a direction. Its counter adds up, so rings coalesce in the kernel, it never fills (the sums are bounded by
            the ring sizes), and what was rung stays readable after the ringer was killed. Reading empties the counter: an exception
            between that and counting loses positions for good, so whoever reads must treat one as the end of the channel.
SocketBell  where there is no eventfd: a datagram pair a direction, with cumulative positions. It can fill up; `ring` then says so,
            and only the newest positions have to be sent once the socket takes some again. One pair for both directions would
            lose the last words of a peer: a datagram to a dead one makes the kernel throw away what it had sent.
"""

import errno
import os
import socket
import struct
from typing import Protocol

from percore._platform import HAS_EVENTFD

# An eventfd's counter, from below: bytes published, bytes consumed, log records. None can run over: no ring holds as much.
_PUBLISHED = (1 << 32) - 1
_CONSUMED_AT, _CONSUMED = 32, (1 << 20) - 1
_LOGGED_AT = 52


class Bell(Protocol):
    """One side's pair of bells."""

    def fileno(self) -> int:
        """What becomes readable when the other side rings."""

    def out_fileno(self) -> int:
        """What becomes writable when `ring` can tell again what it could not."""

    def ring(self, published: int, consumed: int) -> bool:
        """Tell the other side. False: it could not be told everything now; call `ring(0, 0)` when the bell takes writes again."""

    def log(self, count: int) -> bool:
        """Tell the other side of so many log records more. False: not yet; call `log(0)` when the bell takes writes again.

        From any thread, one at a time; another one may ring meanwhile.
        """

    def read(self) -> tuple[int, int, int]:
        """Bytes published and consumed, and log records written by the other side since the last read.

        Raises:
            BlockingIOError: nobody rang.
        """

    def close(self) -> None: ...


class EventBell:
    """One side of a pair of eventfds."""

    __slots__ = ("in_fd", "out_fd")

    def __init__(self, out_fd: int, in_fd: int) -> None:
        self.out_fd = out_fd
        self.in_fd = in_fd

    def fileno(self) -> int:
        return self.in_fd

    def out_fileno(self) -> int:
        return self.out_fd

    def ring(self, published: int, consumed: int) -> bool:
        os.eventfd_write(self.out_fd, published | consumed << _CONSUMED_AT)
        return True

    def log(self, count: int) -> bool:
        os.eventfd_write(self.out_fd, count << _LOGGED_AT)
        return True

    def read(self) -> tuple[int, int, int]:
        value = os.eventfd_read(self.in_fd)
        return value & _PUBLISHED, value >> _CONSUMED_AT & _CONSUMED, value >> _LOGGED_AT

    def close(self) -> None:
        fds, self.out_fd, self.in_fd = (self.out_fd, self.in_fd), -1, -1
        for fd in fds:
            if fd >= 0:
                os.close(fd)


class SocketBell:
    """One side of a datagram socket pair."""

    __slots__ = ("_consumed", "_in", "_logged", "_out", "_peer_consumed", "_peer_logged", "_peer_published", "_published", "_told")

    _RECORD = struct.Struct("<QQ")
    _LOGGED = struct.Struct("<Q")  # on its own: `ring` and `log` are called side by side

    def __init__(self, out_fd: int, in_fd: int) -> None:
        self._out = socket.socket(fileno=out_fd)
        self._in = socket.socket(fileno=in_fd)
        for end in (self._out, self._in):
            end.setblocking(False)
        self._published = self._consumed = self._logged = 0
        self._peer_published = self._peer_consumed = self._peer_logged = 0
        self._told = True

    def fileno(self) -> int:
        return self._in.fileno()

    def out_fileno(self) -> int:
        return self._out.fileno()

    def ring(self, published: int, consumed: int) -> bool:
        self._published += published
        self._consumed += consumed
        if self._told and not (published or consumed):
            return True
        self._told = self._send(self._RECORD.pack(self._published, self._consumed))
        return self._told

    def log(self, count: int) -> bool:
        self._logged += count
        return self._send(self._LOGGED.pack(self._logged))

    def _send(self, record: bytes) -> bool:
        try:
            self._out.send(record)
        except OSError as error:
            # Else the other side is gone. Its death is reported elsewhere; there is nobody left to tell.
            return error.errno not in (errno.EAGAIN, errno.ENOBUFS)
        return True

    def read(self) -> tuple[int, int, int]:
        published, consumed, logged = self._peer_published, self._peer_consumed, self._peer_logged
        try:
            record = self._in.recv(self._RECORD.size)
        except ConnectionResetError:  # how some systems say that the other side has died: its owner hears of that elsewhere
            raise BlockingIOError(errno.EAGAIN, "nobody rang") from None
        while record:
            if len(record) == self._RECORD.size:
                self._peer_published, self._peer_consumed = self._RECORD.unpack(record)
            elif len(record) == self._LOGGED.size:
                (self._peer_logged,) = self._LOGGED.unpack(record)
            try:
                record = self._in.recv(self._RECORD.size)
            except (BlockingIOError, ConnectionResetError):
                break
        return self._peer_published - published, self._peer_consumed - consumed, self._peer_logged - logged

    def close(self) -> None:
        self._out.close()
        self._in.close()


def bell_fds() -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The descriptors of a new pair of bells: those of one side, those of the other.

    Raises:
        OSError: no descriptors left; nothing leaked.
    """
    if not HAS_EVENTFD:
        down = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        try:
            up = socket.socketpair(socket.AF_UNIX, socket.SOCK_DGRAM)
        except OSError:
            for end in down:
                end.close()
            raise
        return (down[0].detach(), up[0].detach()), (up[1].detach(), down[1].detach())
    fds: list[int] = []
    try:
        fds.extend(os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(2))
        fds.extend(os.dup(fd) for fd in (fds[1], fds[0]))
    except OSError:
        for fd in fds:
            os.close(fd)
        raise
    return tuple(fds[:2]), tuple(fds[2:])


def bell_of(fds: tuple[int, ...]) -> Bell:
    """One side's bell over its descriptors, which it takes over."""
    return EventBell(*fds) if HAS_EVENTFD else SocketBell(*fds)
