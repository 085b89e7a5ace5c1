"""Endpoints: the listening sockets of one address, for the slots of a pool.

    SplitEndpoint    one socket for each slot; the system divides the connections (SO_REUSEPORT)
    SharedEndpoint   one socket for all slots: a path, a socket of the user, or a system that does not divide

A socket listens in the supervisor, which never accepts. So connections that come while a slot has no worker wait in the backlog of
its socket, and the next worker of the slot accepts them.

A fork of the program closes its copies of all sockets: it would keep the address in use. The end of the interpreter closes them and
removes the files.
"""

import atexit
import os
import socket
from collections.abc import Callable, Collection
from contextlib import suppress
from typing import Final, Protocol

from percore._common.addresses import Address, InternetAddress, UnixAddress, name_of
from percore._common.system import HAS_REUSEPORT
from percore._listening.binding import bind_internet, bind_unix, cannot_listen, check_free, identity_of, listening, remove_file
from percore._listening.steering import steer

_open: Final[set["Endpoint"]] = set()


class Endpoint(Protocol):
    """The sockets of one address. No method but `open` and `of` raises an OSError."""

    @property
    def address(self) -> str:
        """The address, as in `listen`, with the port that the system has chosen. Use it while the endpoint is open."""

    def open(self, slots: int) -> None:
        """Listen, for this many slots.

        Raises:
            OSError: the system refuses it; nothing is left behind.
        """

    def of(self, slot: int) -> socket.socket:
        """Return the socket of a slot, and make it if there is none.

        Raises:
            OSError: the system refuses it.
        """

    def keep(self, slots: Collection[int]) -> None:
        """Close the sockets of all other slots. The system resets the connections that nobody has accepted there."""

    def steer(self, slots: Collection[int]) -> None:
        """Let only these slots get new connections, as far as the system can do that."""

    def close(self) -> None:
        """Close all sockets. Idempotent."""

    def forsake(self) -> None:
        """Close all sockets in a fork of the program, and touch nothing else."""


def endpoint_of(address: Address | socket.socket) -> Endpoint:
    """Return the endpoint of an item of `listen`. It is not open yet."""
    if isinstance(address, InternetAddress):
        return SplitEndpoint(address) if HAS_REUSEPORT else SharedEndpoint(lambda: bind_internet(address, shares_port=False))
    if isinstance(address, UnixAddress):
        return FileEndpoint(address)
    return SharedEndpoint(lambda: _joined(address))


def _joined(given: socket.socket) -> socket.socket:
    """Return a copy of a socket of the user, which listens from now on. The user's own stays open when the copy is closed."""
    try:
        sock = given.dup()
    except OSError as error:
        raise cannot_listen("a socket of yours", error) from None
    try:
        is_listening = bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN))
        if is_listening:
            sock.setblocking(False)
            return sock
        return listening(sock)
    except OSError as error:
        name = name_of(sock)
        sock.close()
        raise cannot_listen(name, error) from None


class SharedEndpoint:
    """One socket for all slots."""

    def __init__(self, bind: Callable[[], socket.socket]) -> None:
        """`bind` returns the socket, which listens."""
        self.address = ""
        self._bind = bind
        self._sock: socket.socket | None = None

    def open(self, slots: int) -> None:
        self._sock = self._bind()
        self.address = name_of(self._sock)
        _open.add(self)

    def of(self, slot: int) -> socket.socket:
        if self._sock is None:
            self.open(1)
        assert self._sock is not None
        return self._sock

    def keep(self, slots: Collection[int]) -> None:
        if not slots:
            self.close()

    def steer(self, slots: Collection[int]) -> None:
        """Do nothing: the worker that accepts first gets the connection."""

    def close(self) -> None:
        self.forsake()

    def forsake(self) -> None:
        _open.discard(self)
        if self._sock is not None:
            _close(self._sock)
            self._sock = None


class FileEndpoint(SharedEndpoint):
    """The socket of a path, and its file."""

    def __init__(self, address: UnixAddress) -> None:
        super().__init__(lambda: bind_unix(address))
        self._path = address.path
        self._identity: tuple[int, int] | None = None

    def open(self, slots: int) -> None:
        super().open(slots)
        with suppress(OSError):  # somebody has removed the file already
            self._identity = identity_of(os.lstat(self._path))

    def close(self) -> None:
        if self._sock is not None and self._identity is not None:
            remove_file(self._path, self._identity)
        super().close()


class SplitEndpoint:
    """One socket for each slot, all with the same port."""

    def __init__(self, address: InternetAddress) -> None:
        self._address = address
        self._socks: dict[int, socket.socket] = {}
        self._order: list[int] = []
        """The slots, by the numbers of their sockets in the kernel."""
        self._steered: list[int] | None = None
        """The numbers of the sockets that get connections. None: all."""

    @property
    def address(self) -> str:
        return str(self._address)

    def open(self, slots: int) -> None:
        if self._address.port:
            check_free(self._address)
        try:
            for slot in range(slots):
                self._add(slot)
        except BaseException:
            self.close()
            raise

    def of(self, slot: int) -> socket.socket:
        sock = self._socks.get(slot)
        if sock is not None:
            return sock
        if self._steered is None and self._order:  # the system would give connections to the new one, too, which has no worker yet
            self._steer([*range(len(self._order))])
        return self._add(slot)

    def _add(self, slot: int) -> socket.socket:
        sock = self._socks[slot] = bind_internet(self._address, shares_port=True)
        self._order.append(slot)
        self._address = self._address.with_port(sock.getsockname()[1])
        _open.add(self)
        return sock

    def keep(self, slots: Collection[int]) -> None:
        for slot in self._socks.keys() - slots:
            sock = self._socks.pop(slot)
            number, last = self._order.index(slot), self._order.pop()
            if number < len(self._order):
                self._order[number] = last  # as the kernel does
            if self._steered is not None:
                self._steered = []  # the numbers have changed: steer again
            _end(sock)  # last: if a Ctrl-C ends this, the numbers are right all the same
        if not self._socks:
            self.close()

    def steer(self, slots: Collection[int]) -> None:
        assert len(self._order) == len(self._socks), "connections would go to other slots than these"
        numbers = [number for number, slot in enumerate(self._order) if slot in slots]
        if numbers and numbers != self._steered and not (self._steered is None and len(numbers) == len(self._order)):
            self._steer(numbers)

    def _steer(self, numbers: list[int]) -> None:
        self._steered = numbers
        steer(self._socks[self._order[0]], numbers)

    def close(self) -> None:
        self.forsake()

    def forsake(self) -> None:
        _open.discard(self)
        for sock in self._socks.values():
            _close(sock)
        self._socks.clear()
        self._order.clear()
        self._steered = None


def _end(sock: socket.socket) -> None:
    """Let a socket listen no more, and close it.

    Closing it is not enough: a fork that is about to become another program, or that a worker has left behind, may have it, too. As
    long as it listens, the system gives it connections, which nobody would accept.
    """
    with suppress(OSError):  # the program has closed its descriptor
        sock.shutdown(socket.SHUT_RDWR)
    _close(sock)


def _close(sock: socket.socket) -> None:
    with suppress(OSError):
        sock.close()


def _forsake_all() -> None:
    for endpoint in list(_open):
        endpoint.forsake()


def _close_all() -> None:
    for endpoint in list(_open):
        endpoint.close()


os.register_at_fork(after_in_child=_forsake_all)
atexit.register(_close_all)
