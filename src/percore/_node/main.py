"""A host as a process of its own: `python -c` runs `serve` with the program's `sys.path`.

It reads 32 bytes, the token, from its standard input, and writes the port on which it listens to a pipe. When the input ends, its
owner is gone: then it kills its workers and ends. Its standard output and error are those of its workers.
"""

import asyncio
import logging
import os
import socket
import sys
import threading
from contextlib import suppress
from typing import Final, NoReturn

from percore._common.endings import wake
from percore._common.system import new_loop
from percore._engines.processes.engine import ProcessEngine
from percore._node.host import Host
from percore._node.main_source import remove_source
from percore._protocol.host_orders import HostOrders
from percore._transport.certificates import Certificates
from percore._transport.connection import Connection
from percore._transport.log_records import pack
from percore._transport.proven import Door
from percore._transport.wire import OF_HOST, Kind
from percore._transport.wire_proof import TOKEN_SIZE

_SOCKET_GONE: Final = 75  # EX_TEMPFAIL


class Records(logging.Handler):
    """Sends percore's own log records of this process to the program, while that is connected."""

    def __init__(self, loop: asyncio.AbstractEventLoop, connection: Connection) -> None:
        super().__init__()
        self._loop = loop
        self._connection = connection
        self._thread = threading.get_ident()

    def emit(self, record: logging.LogRecord) -> None:
        if not self._connection.is_open:
            assert logging.lastResort is not None
            logging.lastResort.handle(record)
        elif threading.get_ident() == self._thread:
            self._send(pack(record))
        else:
            self._loop.call_soon_threadsafe(self._send, pack(record))

    def _send(self, data: bytes) -> None:
        self._connection.send(Kind.LOG, OF_HOST, data)


class ProcessHost(Host):
    """A host in a process of its own: its workers take over what this process has."""

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket, pid: int) -> None:
        super().__init__(loop, sock, pid)
        logging.getLogger("percore").addHandler(Records(loop, self.connection))

    def take_over(self, orders: HostOrders) -> None:
        sys.argv[:] = orders.argv
        sys.path += [entry for entry in orders.path if entry not in sys.path and os.path.exists(entry)]

    async def close_engine(self, engine: ProcessEngine) -> None:
        await super().close_engine(engine)
        remove_source()  # before the program hears of the end, and may kill this process


def serve(address: str, told: int, *certificates: str) -> NoReturn:
    """Be a host that listens on this address of the machine, until its program or its owner is gone.

    `told`: the descriptor of the pipe for the port. `certificates`: the files of Certificates, for TLS.
    """
    os.set_inheritable(told, False)
    loop = new_loop()
    asyncio.set_event_loop(loop)
    loop.run_until_complete(_serve(loop, address, told, Certificates(*certificates) if certificates else None))
    loop.close()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


async def _serve(loop: asyncio.AbstractEventLoop, address: str, told: int, certificates: Certificates | None) -> None:
    token = await loop.run_in_executor(None, _read_token)
    door = Door(loop, token, address, certificates)
    os.write(told, f"{door.port}\n".encode())
    os.close(told)
    gone = loop.create_future()
    loop.add_reader(0, lambda: _owner_gone(loop, gone))
    waiting = loop.create_task(door.wait())
    await asyncio.wait({waiting, gone}, return_when=asyncio.FIRST_COMPLETED)
    if not waiting.done():
        waiting.cancel()
        with suppress(asyncio.CancelledError):
            await waiting
        return
    host = ProcessHost(loop, waiting.result(), os.getpid())
    await asyncio.wait({host.ended, gone}, return_when=asyncio.FIRST_COMPLETED)
    host.leave("the process that started this host is gone")
    await host.ended


def _read_token() -> bytes:
    token = b""
    while len(token) < TOKEN_SIZE:
        more = os.read(0, TOKEN_SIZE - len(token))
        if not more:
            os._exit(_SOCKET_GONE)
        token += more
    return token


def _owner_gone(loop: asyncio.AbstractEventLoop, gone: "asyncio.Future[None]") -> None:
    if not os.read(0, 1):
        loop.remove_reader(0)
        wake(gone)
