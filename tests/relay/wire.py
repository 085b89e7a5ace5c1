"""Frames over one end of a socket."""

import asyncio
import marshal
import os
import socket
from collections.abc import Callable
from typing import Any, Final, cast
from weakref import WeakSet

MOST: Final = 1 << 18
"""Bytes of the largest frame."""

PART: Final = 64 << 10
"""Bytes of each part of a payload that travels outside of its message."""

_HEAD: Final = 4


class Wire:
    """One end of the connection. A frame is a marshalled tuple: its kind, the number of a worker or payload, and what it says."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, sock: socket.socket, heard: dict[str, Callable[..., None]], lost: Callable[[], None]
    ) -> None:
        """`heard` has the receiver of each kind of frame. `lost` is called when the other end is closed."""
        self._loop = loop
        self._sock = sock
        self._heard = heard | {"part": self._part}
        self._lost = lost
        self._in, self._out = bytearray(), bytearray()
        self.parts: dict[int, bytearray] = {}
        self.on_read: Callable[[], None] = lambda: None
        """Called after all frames that arrived together."""
        self._is_full = False
        self.is_open = True
        _wires.add(self)
        sock.setblocking(False)
        loop.add_reader(sock, self._readable)

    def send(self, kind: str, number: int, *more: object) -> None:
        """Send a frame. If the other end is gone, do nothing: `lost` is called."""
        data = marshal.dumps(cast("Any", (kind, number, *more)), 2)
        assert len(data) <= MOST, f"a frame {kind} of {len(data)} bytes"
        self._out += len(data).to_bytes(_HEAD, "little") + data
        if self.is_open and not self._is_full:
            self._write()

    def send_parts(self, number: int, data: memoryview | bytes) -> None:
        """Send the bytes of a payload. The frame after them says which one it is."""
        for start in range(0, len(data), PART):
            self.send("part", number, bytes(data[start : start + PART]))

    def _write(self) -> None:
        try:
            sent = self._sock.send(self._out)
        except BlockingIOError:
            sent = 0
        except OSError:  # the end of the connection, which is also read
            sent = len(self._out)
        del self._out[:sent]
        if bool(self._out) != self._is_full:
            self._is_full = not self._is_full
            if self._is_full:
                self._loop.add_writer(self._sock, self._write)
            else:
                self._loop.remove_writer(self._sock)

    def _readable(self) -> None:
        try:
            data = self._sock.recv(MOST)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if data:
            self._in += data
            self._deliver()
        else:
            self.close()
            self._lost()

    def _deliver(self) -> None:
        """Hand over all frames that have arrived. An error costs the frame that it was raised for."""
        received = self._in
        try:
            while self.is_open and len(received) >= (end := _HEAD + int.from_bytes(received[:_HEAD], "little")) > _HEAD:
                kind, *more = marshal.loads(bytes(received[_HEAD:end]))
                del received[:end]
                self._heard[kind](*more)
            self.on_read()
        except BaseException:
            if self.is_open:
                self._loop.call_soon(self._deliver)
            raise

    def _part(self, number: int, data: bytes) -> None:
        self.parts.setdefault(number, bytearray()).extend(data)

    def cut(self) -> None:
        """Break the connection. Both ends notice."""
        self._sock.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Idempotent."""
        if self.is_open:
            self.is_open = False
            if not self._loop.is_closed():
                self._loop.remove_reader(self._sock)
                self._loop.remove_writer(self._sock)
            self._sock.close()

    def disown(self) -> None:
        """Close this copy in a forked child, whose loop would take the descriptor out of the parent's epoll."""
        self.is_open = False
        self._sock.close()


_wires: Final[WeakSet[Wire]] = WeakSet()


def _disown_all() -> None:
    for wire in list(_wires):
        wire.disown()


os.register_at_fork(after_in_child=_disown_all)
