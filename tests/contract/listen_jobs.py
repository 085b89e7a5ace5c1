"""Servers in the lifespans of workers: they answer lines, and leave in order.

who            the worker's index and generation
wait GATE      the same, when the gate is open
"""

import asyncio
import os
import socket
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import percore
from tests.jobs import apass_gate, say


def has_ipv6() -> bool:
    """Whether this machine has the address ::1."""
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


@asynccontextmanager
async def serve(log: str = "") -> AsyncIterator[None]:
    """Serve on all sockets of the worker. At the end accept what waits there, and answer all that was accepted."""
    loop, worker = asyncio.get_running_loop(), percore.current_worker()
    answers: set[asyncio.Task[None]] = set()

    def accept(sock: socket.socket) -> None:
        while True:
            try:
                connection, _ = sock.accept()
            except BlockingIOError:
                return
            answer = loop.create_task(_answer(connection, worker, log))
            answers.add(answer)
            answer.add_done_callback(answers.discard)

    for sock in worker.sockets:
        loop.add_reader(sock.fileno(), accept, sock)
    try:
        yield
        for sock in worker.sockets:
            accept(sock)
    finally:
        for sock in worker.sockets:
            if sock.fileno() >= 0:
                loop.remove_reader(sock.fileno())
                sock.close()
    if answers:
        await asyncio.wait(answers)


async def _answer(connection: socket.socket, worker: percore.CurrentWorker, log: str) -> None:
    loop = asyncio.get_running_loop()
    with connection:
        connection.setblocking(False)
        verb, _, gate = (await loop.sock_recv(connection, 1000)).decode().partition(" ")
        if verb == "wait":
            say(log, f"holds {worker.index} {worker.generation}")
            await apass_gate(gate)
        await loop.sock_sendall(connection, f"{worker.index} {worker.generation}".encode())


@asynccontextmanager
async def serve_late(gate: str, log: str) -> AsyncIterator[None]:
    """Serve, where the replacement of worker 0 is not ready before the gate is open."""
    if percore.current_worker().index == 0 and percore.current_worker().generation > 1:
        say(log, "starts")
        await apass_gate(gate)
    async with serve():
        yield


@asynccontextmanager
async def serve_once() -> AsyncIterator[None]:
    """Serve, where worker 0 cannot be replaced."""
    if percore.current_worker().index == 0 and percore.current_worker().generation > 1:
        raise ConnectionError("no server")
    async with serve():
        yield


@asynccontextmanager
async def fails() -> AsyncIterator[None]:
    raise ConnectionError(str(len(percore.current_worker().sockets)))
    yield


async def sockets() -> list[dict[str, Any]]:
    """What the worker's sockets are."""
    return [
        {
            "name": sock.getsockname(),
            "listens": bool(sock.getsockopt(socket.SOL_SOCKET, socket.SO_ACCEPTCONN)),
            "blocks": sock.getblocking(),
            "is inherited": sock.get_inheritable(),
            "inode": os.fstat(sock.fileno()).st_ino,
        }
        for sock in percore.current_worker().sockets
    ]


def sockets_in_fork() -> int:
    """How many of the worker's sockets a fork of the worker has."""
    numbers = [sock.fileno() for sock in percore.current_worker().sockets]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # 3.12 on: this process has threads
        child = os.fork()
    if child == 0:
        os._exit(sum(os.path.realpath(f"/dev/fd/{number}") != os.devnull for number in numbers))
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
