"""TLS for a connection between a program and a host: each side has a certificate of one authority, and verifies the other's."""

import asyncio
import socket
import ssl
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

from percore._common.endings import wake

T = TypeVar("T")


class Certificates(NamedTuple):
    """The files of one side.

    Attributes:
        certificate: its certificate. That of a host is valid for the address of its node.
        key: the private key.
        authority: the certificate of the authority that has signed those of both sides.
    """

    certificate: str
    key: str
    authority: str

    def context(self, *, is_host: bool) -> ssl.SSLContext:
        """Return the settings of one side.

        Raises:
            OSError: a file cannot be read, or has something else.
        """
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER if is_host else ssl.PROTOCOL_TLS_CLIENT)
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_cert_chain(self.certificate, self.key)
        context.load_verify_locations(self.authority)
        return context


def wrapped(sock: socket.socket, context: ssl.SSLContext, host: str | None = None) -> ssl.SSLSocket:
    """Return the connected socket with TLS; `shake` comes next. `host`: the address of the host. None: this is the host."""
    return context.wrap_socket(sock, server_side=host is None, do_handshake_on_connect=False, server_hostname=host)


async def shake(loop: asyncio.AbstractEventLoop, sock: ssl.SSLSocket) -> None:
    """Make the handshake. If the host refuses the program's certificate, the program may hear of it with its next read.

    Raises:
        OSError: a side has refused the other's certificate, or the connection was lost.
    """
    await _step(loop, sock, sock.do_handshake)


async def receive(loop: asyncio.AbstractEventLoop, sock: socket.socket, size: int) -> bytes:
    """As `loop.sock_recv`, which takes no socket with TLS."""
    if not isinstance(sock, ssl.SSLSocket):
        return await loop.sock_recv(sock, size)
    return await _step(loop, sock, lambda: sock.recv(size))


async def send(loop: asyncio.AbstractEventLoop, sock: socket.socket, data: bytes) -> None:
    """As `loop.sock_sendall`, for a few bytes."""
    if not isinstance(sock, ssl.SSLSocket):
        await loop.sock_sendall(sock, data)
        return
    while data:
        data = data[await _step(loop, sock, partial(sock.send, data)) :]


async def _step(loop: asyncio.AbstractEventLoop, sock: ssl.SSLSocket, step: Callable[[], T]) -> T:
    while True:
        try:
            return step()
        except ssl.SSLWantReadError:
            await _ready(loop, sock, loop.add_reader, loop.remove_reader)
        except ssl.SSLWantWriteError:
            await _ready(loop, sock, loop.add_writer, loop.remove_writer)


async def _ready(loop: asyncio.AbstractEventLoop, sock: ssl.SSLSocket, add: Callable[..., Any], remove: Callable[..., Any]) -> None:
    ready: asyncio.Future[None] = loop.create_future()
    add(sock, wake, ready)
    try:
        await ready
    finally:
        remove(sock)
