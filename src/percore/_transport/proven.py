"""Connections to a host that both sides have proven (`wire_proof`): `dial` makes one, and a Door lets one program in."""

import asyncio
import errno
import logging
import socket
from typing import Any, Final, NoReturn

from percore._transport.certificates import Certificates, receive, send, shake, wrapped
from percore._transport.wire_proof import ANSWER_SIZE, FIRST_SIZE, LAST_SIZE, HostProof, NotProven, ProgramProof

_PATIENCE: Final = 10.0
"""Seconds that a peer has for its proof."""
_MOST: Final = 32
"""Peers that may be at it at a time."""

_OF_A_PEER: Final = frozenset(
    getattr(errno, name, errno.ECONNABORTED)
    for name in ("ECONNABORTED", "ECONNRESET", "EPROTO", "ENETDOWN", "ENETUNREACH", "EHOSTDOWN", "EHOSTUNREACH", "ENONET")
)
"""Errors of accept(2) that are those of one connection, which was lost before it was accepted."""

logger: Final = logging.getLogger("percore")


async def _receive(loop: asyncio.AbstractEventLoop, sock: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size:
        more = await receive(loop, sock, size - len(data))
        if not more:
            raise NotProven("it has closed the connection")
        data += more
    return data


async def _resolved(loop: asyncio.AbstractEventLoop, address: tuple[str, int]) -> list[Any]:
    try:  # an address in figures needs no thread, which the loop's executor may not have
        return socket.getaddrinfo(*address, type=socket.SOCK_STREAM, flags=socket.AI_NUMERICHOST | socket.AI_NUMERICSERV)
    except socket.gaierror:
        return await loop.getaddrinfo(*address, type=socket.SOCK_STREAM)


async def dial(
    loop: asyncio.AbstractEventLoop, address: tuple[str, int], token: bytes, certificates: Certificates | None = None
) -> socket.socket:
    """Connect to a host, and let both sides prove the token. With certificates, by TLS.

    Raises:
        OSError: the address cannot be reached, or a side has refused the other's certificate.
        NotProven: what listens there does not know the token.
    """
    (family, kind, protocol, _, target), *_ = await _resolved(loop, address)
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setblocking(False)
        await loop.sock_connect(sock, target)
        if certificates is not None:
            sock = secure = wrapped(sock, certificates.context(is_host=False), address[0])
            await shake(loop, secure)
        proof = ProgramProof(token)
        await send(loop, sock, proof.first)
        await send(loop, sock, proof.last(await _receive(loop, sock, ANSWER_SIZE)))
    except BaseException:
        sock.close()
        raise
    return sock


class Door:
    """Listens until one program has proven the token. Other connections are dropped and logged, and so is a second program."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, token: bytes, address: str, certificates: Certificates | None = None
    ) -> None:
        """Listen on a free port of this address of the machine. With certificates, by TLS.

        Raises:
            OSError: the machine has no such address, or a certificate cannot be read.
        """
        self._loop = loop
        self._token = token
        self._context = None if certificates is None else certificates.context(is_host=True)
        info, *_ = socket.getaddrinfo(address, 0, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        self._listening = socket.socket(info[0], info[1], info[2])
        try:
            self._listening.bind(info[4])
            self._listening.listen(_MOST)
            self._listening.setblocking(False)
        except BaseException:
            self._listening.close()
            raise
        self.port: int = self._listening.getsockname()[1]

    async def wait(self) -> socket.socket:
        """Return the connection to the first program that has proven the token. Then nobody listens any more.

        Raises:
            OSError: the system has no descriptor or memory for another connection.
        """
        proven: asyncio.Future[socket.socket] = self._loop.create_future()
        tasks: set[asyncio.Task[None]] = set()
        accepting: asyncio.Task[NoReturn] = self._loop.create_task(self._accept(proven, tasks))
        try:
            await asyncio.wait((proven, accepting), return_when=asyncio.FIRST_COMPLETED)
            return proven.result() if proven.done() else accepting.result()
        finally:
            accepting.cancel()
            for task in tasks:
                task.cancel()
            await asyncio.gather(accepting, *tasks, return_exceptions=True)
            self._listening.close()

    async def _accept(self, proven: asyncio.Future[socket.socket], tasks: set[asyncio.Task[None]]) -> NoReturn:
        while True:
            try:
                sock, peer = await self._loop.sock_accept(self._listening)
            except OSError as error:
                if error.errno in _OF_A_PEER:
                    continue
                raise
            sock.setblocking(False)
            if len(tasks) >= _MOST:
                sock.close()
                continue
            task = self._loop.create_task(self._prove(sock, str(peer[0]), proven))
            tasks.add(task)
            task.add_done_callback(tasks.discard)

    async def _prove(self, sock: socket.socket, peer: str, proven: asyncio.Future[socket.socket]) -> None:
        try:
            async with asyncio.timeout(_PATIENCE):
                if self._context is not None:
                    sock = secure = wrapped(sock, self._context)
                    await shake(self._loop, secure)
                proof = HostProof(self._token)
                await send(self._loop, sock, proof.answer(await _receive(self._loop, sock, FIRST_SIZE)))
                proof.check(await _receive(self._loop, sock, LAST_SIZE))
        except (NotProven, OSError, TimeoutError) as error:
            why = "it has not proven the token in time" if isinstance(error, TimeoutError) else error
            logger.warning("percore: a peer at %s was dropped: %s", peer, why)
            sock.close()
        except BaseException:
            sock.close()
            raise
        else:
            if proven.done():
                logger.warning("percore: a peer at %s was dropped: another one was proven before", peer)
                sock.close()
            else:
                proven.set_result(sock)
