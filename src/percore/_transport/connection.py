"""A connection between the program and a host: frames over one socket, in order, each exactly once, until it breaks.

The loop reads and writes. `beat` may be called from another thread, so that a loop that is blocked for seconds does not look like a
machine that is gone: it also writes what waits.

A garbage collection may begin anywhere here, and run a `__del__` of the user's that submits or cancels a call, and so sends a frame
in the middle of another one. So the lock is reentrant, all pieces of a frame are put at once, and only the outermost `_write_some`
writes. A BaseException between a system call and its counting, such as Ctrl-C, breaks the connection: bytes would be missing, or
come twice, and a large payload has no check that would show it.

A slow link takes no memory without end. Large payloads wait as views of the slots in which they lie, and a slot is free when the
socket has taken its payload: so those who fill slots wait. Beside that at most the messages of calls under way wait, each of which
has at most INLINE_LIMIT bytes. While more than FULL bytes wait, the connection is full: what has no slot yet should wait, because
it can still be withdrawn.
"""

import asyncio
import os
import socket
import ssl
import struct
import threading
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import islice
from time import monotonic
from typing import Any, Final
from weakref import WeakSet

from percore._common.errors import shown
from percore._common.sure_handles import surely_soon
from percore._transport.wire import Decoder, Frame, Kind, head

FULL: Final = 4 << 20
"""Bytes that wait to be written from which on the connection is full."""
_GATHERED: Final = 64
"""Pieces that one system call writes."""
_TURN: Final = 16
"""Reads at a time: then the loop may do other things."""
_LARGE: Final = 32 << 10
"""Bytes of data from which on it is not copied to join its head."""
_BEAT: Final = struct.Struct("<d")
_WAIT: Final = (BlockingIOError, InterruptedError, ssl.SSLWantReadError, ssl.SSLWantWriteError)

Tag = Callable[[], None]
_Piece = tuple[memoryview | bytes, Tag | None, Tag | None]
"""Bytes, what to call when they are not needed any more, and what to call if none of them was ever written."""


def time_of(beat: memoryview | bytearray) -> float:
    """Return when a BEAT was sent, by the clock of its sender."""
    return float(_BEAT.unpack(beat)[0]) if len(beat) == _BEAT.size else float("inf")


class Connection:
    """One end.

    Attributes:
        is_open: whether it sends and receives.
        heard: how many times something was received.
        on_batch: called after all frames that arrived together.
        on_room: called when the connection is full no longer.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        most: dict[int, int],
        on_frame: Callable[[Frame], None],
        on_lost: Callable[[str], None],
    ) -> None:
        """Receive from `sock`, which is connected and proven.

        `on_frame` gets each frame; an Exception from it breaks the connection. `on_lost` is called once, in the loop, with the
        reason, when the connection broke; not after `close`.
        """
        self._loop = loop
        self._sock = sock
        self._on_frame = on_frame
        self._on_lost = on_lost
        self.decoder = Decoder(most)
        self.on_batch: Callable[[], None] = lambda: None
        self.on_room: Callable[[], None] = lambda: None
        self.is_open = True
        self.heard = 0
        self._lock = threading.RLock()
        self._pieces: deque[_Piece] = deque()
        self._done: deque[Tag] = deque()
        """What is to be called because the socket has taken the data."""
        self._size = 0
        self._is_waiting = self._was_full = self._is_writing = False
        sock.setblocking(False)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._gathers = not isinstance(sock, ssl.SSLSocket)
        _connections.add(self)
        loop.add_reader(sock, self._readable)

    # Sending

    @property
    def is_full(self) -> bool:
        return self._size > FULL

    def send(self, kind: int, number: int, *data: memoryview | bytes, let_go: Tag | None = None, unsent: Tag | None = None) -> None:
        """Send a frame with these pieces of data, after all that was put before. Once the connection has ended, only call the tags.

        `let_go`: called once, in the loop, when the data is not needed any more: the socket has taken it, or the connection has
        ended. `unsent`: called when the connection breaks, if the socket has taken nothing of the frame.
        """
        self.put(kind, number, *data, let_go=let_go, unsent=unsent)
        self.write()

    def put(self, kind: int, number: int, *data: memoryview | bytes, let_go: Tag | None = None, unsent: Tag | None = None) -> None:
        """Like `send`, with the next frame that is sent, or with the next `write`."""
        first = head(kind, number, *data)
        size = len(first) + sum(map(len, data))
        is_large = size >= _LARGE
        parts = [first, *(piece for piece in data if len(piece))] if is_large else [b"".join((first, *data))]
        last = len(parts) - 1
        pieces = [(part, None if place < last else let_go, None if place else unsent) for place, part in enumerate(parts)]
        with self._lock:
            if self.is_open:
                self._size += size
                self._was_full |= self.is_full
                self._pieces.extend(pieces)
                return
        for tag in (unsent, let_go):
            if tag is not None:
                tag()

    def beat(self) -> None:
        """Send a BEAT, and write what waits. From another thread than the loop's."""
        then: Callable[[], None] = self._written
        try:
            self.put(Kind.BEAT, 0, _BEAT.pack(monotonic()))
            with self._lock:
                self._write_some()
                is_behind = bool(self._pieces) != self._is_waiting
        except Exception as error:
            is_behind, then = True, partial(self._break, f"its connection broke: {shown(error)}")
        if self._done or is_behind:
            with suppress(RuntimeError):  # the loop was closed
                self._loop.call_soon_threadsafe(then)

    def beat_here(self) -> None:
        """As `beat`, in the loop."""
        self.send(Kind.BEAT, 0, _BEAT.pack(monotonic()))

    def write(self) -> None:
        """Write what was put, as far as the socket takes it."""
        try:
            with self._lock:
                self._write_some()
            self._watch()
        except BaseException as error:
            self._break(f"its connection broke: {shown(error)}")
            raise
        self._call_done()

    def _written(self) -> None:
        """Look after what another thread has written."""
        self._watch()
        self._call_done()

    def _watch(self) -> None:
        """Have the loop write what the socket has not taken."""
        if self.is_open and bool(self._pieces) != self._is_waiting:
            self._is_waiting = not self._is_waiting
            if self._is_waiting:
                self._loop.add_writer(self._sock, self.write)
            else:
                self._loop.remove_writer(self._sock)

    def _call_done(self) -> None:
        while self._done:
            self._done.popleft()()
        if self._was_full and not self.is_full:
            self._was_full = False
            surely_soon(self._loop, self._has_room)  # not now: what it sends may fill the connection again, and so on

    def _has_room(self) -> None:
        if self.is_full:
            self._was_full = True
        elif self.is_open:
            self.on_room()

    def _write_some(self) -> None:
        """Write what the socket takes. The lock is held.

        Within itself, that is in a `__del__`, it does nothing: the outer one writes what was put there, or `write` when the socket
        takes bytes again.
        """
        if self._is_writing or not self.is_open:
            return
        self._is_writing = True
        try:
            self._write_pieces()
        except BaseException:
            for place in range(min(len(self._pieces), _GATHERED)):  # the socket may have taken these, and nobody has counted them
                piece, let_go, _ = self._pieces[place]
                self._pieces[place] = piece, let_go, None
            raise
        finally:
            self._is_writing = False

    def _write_pieces(self) -> None:
        while self._pieces:
            try:
                if len(self._pieces) == 1 or not self._gathers:
                    sent = self._sock.send(self._pieces[0][0])
                else:
                    sent = self._sock.sendmsg([piece[0] for piece in islice(self._pieces, _GATHERED)])
            except _WAIT:
                break
            except OSError:  # the end of the connection, which is also read
                break
            self._size -= sent
            while self._pieces and sent >= len(self._pieces[0][0]):
                piece, let_go, _ = self._pieces.popleft()
                sent -= len(piece)
                if let_go is not None:
                    self._done.append(let_go)
            if sent and self._pieces:  # else a `__del__` has closed the connection
                piece, let_go, _ = self._pieces[0]
                self._pieces[0] = (memoryview(piece)[sent:], let_go, None)

    # Receiving

    def _readable(self) -> None:
        """Read and deliver. An error of `on_frame` that is no Exception costs the frame that it was raised for."""
        try:
            for _ in range(_TURN):
                if not self.is_open or not self._receive():
                    break
            else:
                if isinstance(self._sock, ssl.SSLSocket) and self._sock.pending():
                    surely_soon(self._loop, self._readable_again)
            if self.is_open:
                self.on_batch()
        except Exception as error:
            self._break(f"its connection broke: {shown(error)}")

    def _readable_again(self) -> None:
        """There is more that TLS has decrypted, which does not make the socket readable."""
        if self.is_open:
            self._readable()

    def _receive(self) -> bool:
        """Read once and deliver the frames. Return whether there may be more to read."""
        room = self.decoder.buffer()
        try:
            with self._lock:
                count = self._sock.recv_into(room)
            self.decoder.filled(count)
        except _WAIT:
            self._deliver()  # what an error has left
            return False
        except OSError as error:
            self._break(f"its connection broke: {error.strerror or error}")
            return False
        except BaseException as error:  # Ctrl-C: whether bytes were read that nobody has counted is unknown
            self._break(f"its connection broke: {shown(error)}")
            raise
        if not count:
            self._break("its connection was closed")
            return False
        self.heard += 1
        self._deliver()
        return count == len(room) or not self._gathers  # what TLS has decrypted does not make the socket readable

    def _deliver(self) -> None:
        try:
            while self.is_open and (frame := self.decoder.next()) is not None:
                self._on_frame(frame)
        except Exception:
            raise
        except BaseException:
            surely_soon(self._loop, self._readable)
            raise

    # The end

    def _break(self, why: str) -> None:
        if self.is_open:
            pieces = self._close()
            for _, _, unsent in pieces:
                if unsent is not None:
                    unsent()
            try:
                self._on_lost(why)
            finally:
                self._let_go(pieces)

    def give_up(self, why: str) -> None:
        """Break the connection: `on_lost` is called."""
        self._break(why)

    def close(self) -> None:
        """Close this end, without a word. Idempotent."""
        if self.is_open:
            self._let_go(self._close())

    def _let_go(self, pieces: list[_Piece]) -> None:
        self._done.extend(let_go for _, let_go, _ in pieces if let_go is not None)
        while self._done:
            self._done.popleft()()

    def _close(self) -> list[_Piece]:
        """Close the socket, and return what was not written."""
        with self._lock:
            self.is_open = False
            self._size = 0
            pieces = list(self._pieces)
            self._pieces.clear()
        if not self._loop.is_closed():
            self._loop.remove_reader(self._sock)
            if self._is_waiting:
                self._loop.remove_writer(self._sock)
        self._sock.close()
        return pieces

    def cut(self) -> None:
        """Break the connection as a lost network does. Both ends notice."""
        self._sock.shutdown(socket.SHUT_RDWR)

    def disown(self) -> None:
        """Close this copy in a forked child, whose loop would take the descriptor out of the parent's epoll."""
        self.is_open = False
        self._lock = threading.RLock()  # the thread that beats may have held the old one at the fork
        self._sock.close()


_connections: Final[WeakSet[Connection]] = WeakSet()


def _disown_all() -> None:
    for connection in list(_connections):
        connection.disown()


os.register_at_fork(after_in_child=_disown_all)


class Pulse:
    """A thread that sends beats on connections, as long as there are any."""

    def __init__(self, seconds: float) -> None:
        """Beat every so many seconds."""
        self._seconds = seconds
        self._connections: set[Any] = set()
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def add(self, connection: Connection) -> None:
        self._connections.add(connection)
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="percore-beats", daemon=True)
            self._thread.start()

    def discard(self, connection: Connection) -> None:
        self._connections.discard(connection)

    def _run(self) -> None:
        while not self._ended.wait(self._seconds):
            for connection in list(self._connections):
                connection.beat()

    def end(self) -> None:
        """End the thread and wait for it: milliseconds."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join()
