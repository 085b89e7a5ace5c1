"""Servers in every worker: requests a second, and what a killed worker costs, against uvicorn --workers and gunicorn.

Each contestant is a program with two workers that serves on 127.0.0.1, and this process is its clients: the three share the CPUs.
An answer is the pid of its worker. All of them have uvloop and, under uvicorn, httptools.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import subprocess
import sys
import time
from contextlib import asynccontextmanager, suppress
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from benchmarks.contestants import WrongResult, playing
from benchmarks.figures import Target, in_items, in_seconds
from benchmarks.harness import Row, row
from benchmarks.peers import WORKERS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

    from benchmarks.harness import Contestant
    from benchmarks.results import Sample

_ROOT = Path(__file__).parents[2]
_PROGRAM = "benchmarks.programs.serve"
_START = 20.0
"""Seconds that a server may take until it answers."""

CONNECTIONS: Final = 32
CLIENTS: Final = 16
KEPT, NEW = "a request, kept connection", "a request, new connection"
FAILED, REFUSED, SLOWEST = "failed requests a kill", "refused", "slowest request"

Address = tuple[str, int]


@row(rounds=7, shown=7, seconds=30)
def serve_requests(quick: bool) -> Row:
    """Requests over 32 kept connections, then over a new one each, 2 workers: percore, uvicorn --workers, gunicorn.

    Kept connections are new in each round. percore's part ends when they are accepted: under the same server the three should be
    equal, but for how the connections are dealt out to the workers. New ones show the price of accepting, with 16 requests at once.
    percore's workers have a socket each, and those of the others share one and race for each connection: so a connection to percore
    waits for its worker, also while the other one is idle. `one socket` is percore with a shared one.
    """
    return Row(
        _servers(partial(_asking, 0.3 if quick else 0.5)),
        [
            Target(ours, metric, rival, at_least=0.9)
            for metric in (KEPT, NEW)
            for ours, rival in (
                ("percore, uvicorn", "uvicorn --workers"),
                ("percore, uvicorn", "gunicorn, uvicorn"),
                ("percore, uvicorn, one socket", "uvicorn --workers"),
                ("percore, aiohttp", "gunicorn, aiohttp"),
            )
        ],
    )


@row(rounds=1, shown=1, seconds=22, warm_ups=0)
def serve_kills(quick: bool) -> Row:
    """Requests with a new connection each, 16 at once, while one of 2 workers is killed every second, four times.

    A request fails if its connection ends without an answer, and is refused if there is no connection. A worker takes its
    requests along; no server can help that. `slowest request` shows what waits until the worker is replaced.
    """
    kills = 2 if quick else 4
    ours = "percore, uvicorn"
    servers = _servers(partial(_killing, kills))
    return Row(
        {name: servers[name] for name in (ours, "uvicorn --workers", "gunicorn, uvicorn")},
        [Target(ours, REFUSED, at_most=0.0), Target(ours, FAILED, at_most=float(CLIENTS))],
        units={FAILED: lambda count: f"{count:.2f}", REFUSED: in_items, SLOWEST: in_seconds},
    )


def _servers(once: Callable[[Address], Awaitable[Sample]]) -> dict[str, Contestant]:
    quiet = ("--no-access-log", "--log-level", "critical")
    gunicorn = ("gunicorn", "--log-level", "critical", "-w", str(WORKERS), "-b", "{address}")
    commands: dict[str, tuple[str, ...]] = {
        "percore, uvicorn": (_PROGRAM, "uvicorn", str(WORKERS)),
        "percore, uvicorn, one socket": (_PROGRAM, "uvicorn", str(WORKERS), "shared"),
        "percore, aiohttp": (_PROGRAM, "aiohttp", str(WORKERS)),
        "uvicorn --workers": ("uvicorn", "--factory", f"{_PROGRAM}:asgi", "--workers", str(WORKERS), "--port", "{port}", *quiet),
        "gunicorn, uvicorn": (*gunicorn, "-k", "uvicorn_worker.UvicornWorker", f"{_PROGRAM}:asgi()"),
        "gunicorn, aiohttp": (*gunicorn, "-k", "aiohttp.GunicornUVLoopWebWorker", f"{_PROGRAM}:web_app"),
    }
    return {name: playing(partial(_serving, command), once) for name, command in commands.items()}


@asynccontextmanager
async def _serving(command: tuple[str, ...]) -> AsyncIterator[Address]:
    """A server, from its first answer until it has ended."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        address: Address = free.getsockname()
    filled = [word.format(address="{}:{}".format(*address), port=address[1]) for word in command]
    is_ours = command[0] == _PROGRAM
    pipe = subprocess.PIPE if is_ours else subprocess.DEVNULL
    line = [sys.executable, "-m", *filled]
    null = subprocess.DEVNULL
    process = await asyncio.to_thread(subprocess.Popen[bytes], line, cwd=_ROOT, stdin=pipe, stdout=pipe, stderr=null)
    try:
        if process.stdout is not None:
            host, _, port = (await asyncio.to_thread(process.stdout.readline)).decode().strip().rpartition(":")
            address = host, int(port)
        await _answers(process, address)
        yield address
    finally:
        if not is_ours:
            process.terminate()
        await asyncio.to_thread(process.communicate)


async def _answers(process: subprocess.Popen[bytes], address: Address) -> None:
    async with asyncio.timeout(_START):
        while process.poll() is None:
            with suppress(ConnectionError):
                await _ask(address)
                return
            await asyncio.sleep(0.05)
    raise ModuleNotFoundError(f"{process.args!r} has ended")


class _Client(asyncio.Protocol):
    """Makes one request after the other over a connection, and counts the answers."""

    def __init__(self, request: bytes) -> None:
        self.answers = 0
        self.pid = 0
        self.is_over = False
        self.closed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._request = request
        self._received = b""
        self._transport: asyncio.WriteTransport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.WriteTransport", transport)  # uvloop's have no such base class
        self._transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, end, body = self._received.partition(b"\r\n\r\n")
        if not end:
            return
        if not head.startswith(b"HTTP/1.1 200 "):
            raise WrongResult(f"a server answered {head[:100]!r}")
        if len(body) < int(head.lower().partition(b"content-length: ")[2].partition(b"\r\n")[0]):
            return
        self._received = b""
        self.answers += 1
        self.pid = int(body)
        if self.is_over or b"close" in self._request:
            self._transport.close()
        else:
            self._transport.write(self._request)

    def connection_lost(self, error: Exception | None) -> None:
        if not self.closed.done():
            self.closed.set_result(None)


def _request_of(kind: str) -> bytes:
    return f"GET / HTTP/1.1\r\nHost: here\r\nConnection: {kind}\r\n\r\n".encode()


async def _ask(address: Address) -> int:
    """The pid of the worker that answers a request over a connection of its own; 0: none answered."""
    _, client = await asyncio.get_running_loop().create_connection(lambda: _Client(_request_of("close")), *address)
    await client.closed
    return client.pid


async def _asking(seconds: float, address: Address) -> Sample:
    return {KEPT: await _kept_alive(seconds, address), NEW: await _one_each(seconds, address)}


async def _kept_alive(seconds: float, address: Address) -> float:
    """The seconds of a request."""
    connect = partial(asyncio.get_running_loop().create_connection, lambda: _Client(_request_of("keep-alive")), *address)
    start = time.perf_counter()
    clients = [client for _, client in await asyncio.gather(*(connect() for _ in range(CONNECTIONS)))]
    await asyncio.sleep(seconds)
    answers: int = sum(client.answers for client in clients)
    end = time.perf_counter()
    if not all(client.answers for client in clients):
        raise WrongResult("a connection had no answer")
    for client in clients:
        client.is_over = True
    await asyncio.gather(*(client.closed for client in clients))
    return (end - start) / answers


async def _one_each(seconds: float, address: Address) -> float:
    """The seconds of a request."""
    end = time.perf_counter() + seconds
    answers = 0

    async def client() -> None:
        nonlocal answers
        while time.perf_counter() < end:
            if not await _ask(address):
                raise WrongResult("a connection had no answer")
            answers += 1

    start = time.perf_counter()
    await asyncio.gather(*(client() for _ in range(CLIENTS)))
    return (time.perf_counter() - start) / answers


async def _killing(kills: int, address: Address) -> Sample:
    answers = failed = refused = 0
    slowest = 0.0
    pids: list[int] = [await _ask(address)]
    is_over = False

    async def client() -> None:
        nonlocal answers, failed, refused, slowest
        while not is_over:
            start = time.perf_counter()
            try:
                pid = await _ask(address)
            except ConnectionRefusedError:
                refused += 1
                await asyncio.sleep(0.01)
                continue
            if pid:
                answers += 1
                pids.append(pid)
                slowest = max(slowest, time.perf_counter() - start)
            else:
                failed += 1

    start = time.perf_counter()
    clients = [asyncio.create_task(client()) for _ in range(CLIENTS)]
    for _ in range(kills):
        await asyncio.sleep(1)
        with suppress(ProcessLookupError):
            os.kill(pids[-1], signal.SIGKILL)  # it answered a moment ago
    await asyncio.sleep(1)
    is_over = True
    await asyncio.gather(*clients)
    return {NEW: (time.perf_counter() - start) / answers, FAILED: failed / kills, REFUSED: float(refused), SLOWEST: slowest}
