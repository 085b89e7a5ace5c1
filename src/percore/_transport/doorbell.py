"""Bells: the two sides of a channel use them to wake each other, and to report the positions of their rings.

A ring of the bell carries two numbers: how many bytes this side has published in its own ring, and how many it has consumed from
the other side's, both since the last ring. The system call is also the memory barrier (see the module `ring`). A worker's bell also
counts its log records. These have a separate ring (`_worker_process.log_forwarding`), but share the bell, which keeps the order: a
supervisor that receives a message has already been told of the records that were written before it.

EventBell   One eventfd per direction. Its counter adds up, so several rings become one in the kernel. It never overflows, since the
            ring sizes bound the sums, and it stays readable after its writer was killed. Reading resets the counter. An exception
            between reading and counting therefore loses positions for good, and the reader must then end the channel.
SocketBell  For systems without eventfd: one datagram socket pair per direction, with cumulative positions. So a later record stands
            for all earlier ones, and the records of two threads may overtake each other. It can fill up. `ring` then returns False,
            and only the newest positions have to be sent once the socket takes data again. A single pair for both directions would
            lose the last messages of a peer: a datagram sent to a dead peer makes the kernel discard the data that the peer had
            sent.
"""

import errno
import os
import socket
import struct
import threading
from typing import Final, Protocol

from percore._common.steps import step
from percore._common.system import HAS_EVENTFD

# The bits of an eventfd's counter, from the lowest: bytes published, bytes consumed, log records. No field can overflow, because no
# ring holds that much.
_PUBLISHED = (1 << 32) - 1
_CONSUMED_AT, _CONSUMED = 32, (1 << 20) - 1
_LOGGED_AT = 52
MOST_BYTES: Final = _CONSUMED
"""Bytes of the largest ring that a bell may serve."""

MOST_RECORDS: Final = (1 << 12) - 1
"""The largest number of log records that a bell may report before it is read."""


class Bell(Protocol):
    """One side's bell: it rings the other side, and reads what the other side rang."""

    def fileno(self) -> int:
        """Return the descriptor that becomes readable when the other side rings."""

    def out_fileno(self) -> int:
        """Return the descriptor that becomes writable when `ring` can send again."""

    def ring(self, published: int, consumed: int) -> bool:
        """Report `published` and `consumed` bytes more to the other side. Threads may ring at once.

        Return False if the bell is full; then call `ring(0, 0)` when it takes writes again.
        """

    def log(self, count: int) -> bool:
        """Report `count` log records more to the other side.

        Return False if the bell is full; then call `log(0)` when it takes writes again. Any thread may call this, but only one at a
        time. Another thread may call `ring` meanwhile.
        """

    def read(self) -> tuple[int, int, int]:
        """Return the numbers of bytes published, bytes consumed and log records that the other side has reported since the last
        read.

        Raises:
            BlockingIOError: the other side has not rung since.
        """

    def close(self) -> None: ...


@step
class EventBell:
    """A bell of two eventfds, one for each direction."""

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


@step
class SocketBell:
    """A bell of two datagram socket pairs, one for each direction."""

    __slots__ = (
        "_consumed",
        "_in",
        "_lock",
        "_logged",
        "_out",
        "_peer_consumed",
        "_peer_logged",
        "_peer_published",
        "_published",
        "_sent",
    )

    _RECORD = struct.Struct("<QQ")
    _LOGGED = struct.Struct("<Q")  # a separate record, because two threads may call `ring` and `log` at once

    def __init__(self, out_fd: int, in_fd: int) -> None:
        self._out = socket.socket(fileno=out_fd)
        self._in = socket.socket(fileno=in_fd)
        for end in (self._out, self._in):
            end.setblocking(False)
        self._lock = threading.RLock()  # for arithmetic alone; re-entrant as the lock of a SlotWriter
        self._published = self._consumed = self._logged = 0
        self._peer_published = self._peer_consumed = self._peer_logged = 0
        self._sent = (0, 0)
        """The newest positions that the socket has taken."""

    def fileno(self) -> int:
        return self._in.fileno()

    def out_fileno(self) -> int:
        return self._out.fileno()

    def ring(self, published: int, consumed: int) -> bool:
        with self._lock:
            self._published += published
            self._consumed += consumed
            positions = self._published, self._consumed
            if positions == self._sent:
                return True
        if not self._send(self._RECORD.pack(*positions)):
            return False
        with self._lock:
            self._sent = max(self._sent, positions)
        return True

    def log(self, count: int) -> bool:
        self._logged += count
        return self._send(self._LOGGED.pack(self._logged))

    def _send(self, record: bytes) -> bool:
        try:
            self._out.send(record)
        except OSError as error:
            # Any other error means that the other side is gone. Its death is reported elsewhere, so ignore the error.
            return error.errno not in (errno.EAGAIN, errno.ENOBUFS)
        return True

    def read(self) -> tuple[int, int, int]:
        published, consumed, logged = self._peer_published, self._peer_consumed, self._peer_logged
        try:
            record = self._in.recv(self._RECORD.size)
        except ConnectionResetError:  # some systems raise this if the other side has died, which is reported elsewhere
            raise BlockingIOError(errno.EAGAIN, "nobody rang") from None
        while record:
            if len(record) == self._RECORD.size:
                found = self._RECORD.unpack(record)
                self._peer_published, self._peer_consumed = max((self._peer_published, self._peer_consumed), found)
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
    """Create the descriptors of a pair of bells. Return those of one side and those of the other.

    Raises:
        OSError: no descriptors are left. Those already opened have been closed.
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
    """Make one side's bell from its descriptors, and take them over."""
    return EventBell(*fds) if HAS_EVENTFD else SocketBell(*fds)


class Haste:
    """A limit on how many peers are rung between two reads of a bell. All channels of a runner share one.

    Ringing wakes a process, which is the most expensive part of sending a message. If no CPU is free to run that process, it is
    cheaper to wake it once, with all messages that this iteration of the loop sends to it.
    """

    __slots__ = ("limit", "rung")

    def __init__(self, limit: int) -> None:
        """`limit` is the number of CPUs."""
        self.limit = limit
        self.rung = 0
