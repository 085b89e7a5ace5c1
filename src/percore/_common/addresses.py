"""The addresses that workers listen on: how they are written, and the checks of a runner's `listen`."""

from collections.abc import Iterable
from contextlib import suppress
from socket import AF_INET, AF_INET6, AF_UNIX, AI_NUMERICHOST, SO_TYPE, SOCK_STREAM, SOL_SOCKET, gaierror, getaddrinfo, socket
from typing import Any, Final, NamedTuple, TypeAlias

MOST_ADDRESSES: Final = 64
LONGEST_PATH: Final = 107
"""Bytes of the longest path of a socket on Linux. (On macOS the system refuses those above 103.)"""

_UNIX: Final = "unix:"


class InternetAddress(NamedTuple):
    """A TCP address.

    Attributes:
        family: its address family.
        name: the address as the functions of `socket` take it.
    """

    family: int
    name: tuple[Any, ...]

    @property
    def port(self) -> int:
        return int(self.name[1])

    def with_port(self, port: int) -> "InternetAddress":
        """Return this address with another port."""
        host, _, *more = self.name
        return self._replace(name=(host, port, *more))

    def __str__(self) -> str:
        host = self.name[0]
        return f"[{host}]:{self.port}" if ":" in host else f"{host}:{self.port}"


class UnixAddress(NamedTuple):
    """The path of a unix socket."""

    path: str

    def __str__(self) -> str:
        return _UNIX + self.path


Address: TypeAlias = InternetAddress | UnixAddress


def listen_of(value: object) -> tuple[Address | socket, ...]:
    """Return the addresses and sockets of a runner's `listen`, in its order.

    Raises:
        TypeError, ValueError: the value is not a list of addresses and of bound stream sockets, or has one of them twice.
    """
    if isinstance(value, str | bytes) or not isinstance(value, Iterable):
        raise TypeError(f'listen must be a list, such as listen=["127.0.0.1:8080"], not {value!r}')
    found = tuple(_one(item) for item in value)
    if len(found) > MOST_ADDRESSES:
        raise ValueError(f"listen may have {MOST_ADDRESSES} addresses, not {len(found)}")
    for number, item in enumerate(found):
        # Each port 0 is a port of its own.
        if item in found[:number] and not (isinstance(item, InternetAddress) and not item.port):
            raise ValueError(f"listen has {name_of(item) if isinstance(item, socket) else item} twice")
    return found


def _one(item: object) -> Address | socket:
    if isinstance(item, socket):
        return _checked_socket(item)
    if not isinstance(item, str):
        raise TypeError(f'listen takes addresses, such as "127.0.0.1:8080", and sockets, not {item!r}')
    return address_of(item)


def address_of(text: str) -> Address:
    """Return the address that is written like this: "127.0.0.1:8080", "[::1]:8080" or "unix:/run/app.sock".

    Raises:
        ValueError: it is no such address.
    """
    if text.startswith(_UNIX):
        return _unix_address(text)
    host, colon, port = text.rpartition(":")
    if not colon or not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise ValueError(f'listen: {text!r} has no port: write "127.0.0.1:8080", "[::1]:8080" or "unix:/run/app.sock"')
    if host in {"", "*"}:
        raise ValueError(
            f'listen: {text!r} names no address: write "127.0.0.1:{port}" for this machine alone, or "0.0.0.0:{port}" for all who '
            "can reach it"
        )
    is_bracketed = host.startswith("[") and host.endswith("]")
    bare = host[1:-1] if is_bracketed else host
    found: list[tuple[Any, ...]] = []
    with suppress(gaierror, UnicodeError):
        found += getaddrinfo(bare, int(port), AF_INET6 if is_bracketed else AF_INET, SOCK_STREAM, flags=AI_NUMERICHOST)
    if not found:
        raise ValueError(
            f'listen: {text!r} has no IP address, and percore looks up no names: write "127.0.0.1:{port}" or "[::1]:{port}"'
        )
    return InternetAddress(found[0][0], found[0][4])


def _unix_address(text: str) -> UnixAddress:
    path = text.removeprefix(_UNIX)
    if not path.startswith("/") or "\0" in path or len(path.encode(errors="surrogateescape")) > LONGEST_PATH:
        raise ValueError(
            f'listen: {text!r} must have an absolute path of at most {LONGEST_PATH} bytes, such as "unix:/run/app.sock"'
        )
    return UnixAddress(path)


def _checked_socket(sock: socket) -> socket:
    if sock.fileno() < 0:
        raise ValueError("listen has a socket that is closed")
    if sock.getsockopt(SOL_SOCKET, SO_TYPE) != SOCK_STREAM:
        raise ValueError(f"listen takes stream sockets, not {sock!r}")
    if is_unbound(sock.getsockname()):
        raise ValueError(f"listen takes bound sockets: call bind() of {sock!r} first")
    return sock


def is_unbound(name: object) -> bool:
    """Whether a socket with this name has no address yet."""
    return not name or (isinstance(name, tuple) and name[1:2] == (0,))


def name_of(sock: socket) -> str:
    """Return the address of a bound socket, written as in `listen`."""
    name = sock.getsockname()
    if sock.family in {AF_INET, AF_INET6}:
        return str(InternetAddress(sock.family, name))
    if sock.family == AF_UNIX:
        return _UNIX + (name if isinstance(name, str) else "@" + name[1:].decode(errors="backslashreplace"))
    return str(name)
