"""examples/serve.py and examples/serve_asgi.py as programs: killed workers under load, both kinds of addresses, and SIGTERM."""

import asyncio
import errno
import json
import os
import select
import signal
import socket
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from tests.counts import times
from tests.faults import LIMIT

pytest.importorskip("aiohttp")
pytest.importorskip("uvicorn")

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
CLIENTS = 8


class Server:
    """The program, and clients of it."""

    def __init__(self, process: asyncio.subprocess.Process, addresses: list[str]) -> None:
        self.process = process
        self.addresses = addresses

    async def ask(self, address: str) -> int:
        """The pid of the worker that answers a request over a connection of its own.

        Raises:
            ConnectionRefusedError: nobody listens.
            EOFError: the connection has ended before the end of an answer.
        """
        if address.startswith("unix:"):
            reader, writer = await asyncio.open_unix_connection(address.removeprefix("unix:"))
        else:
            host, _, port = address.rpartition(":")
            reader, writer = await asyncio.open_connection(host, int(port))
        try:
            writer.write(b"GET /page HTTP/1.1\r\nHost: here\r\nConnection: close\r\n\r\n")
            answer = await reader.read()
        except (BrokenPipeError, ConnectionResetError):
            answer = b""
        finally:
            writer.close()
        head, _, body = answer.partition(b"\r\n\r\n")
        if not body.endswith(b"}"):
            raise EOFError
        assert head.startswith(b"HTTP/1.1 200 "), answer
        told = json.loads(body)
        assert told["hello"] == "/page"
        return int(told["worker"])


@asynccontextmanager
async def running(example: str, *addresses: str) -> AsyncIterator[Server]:
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(sys.executable, str(EXAMPLES / example), *addresses, stdout=pipe, stderr=pipe)
    try:
        async with asyncio.timeout(4 * LIMIT):
            assert process.stdout is not None
            words = (await process.stdout.readline()).decode().split()
            assert words[:2] == ["serving", "on"], (await process.stderr.read()).decode() if process.stderr else ""
            yield Server(process, words[2:])
    finally:
        if process.returncode is None:
            process.kill()
        await process.communicate()


class Load:
    """Clients that ask all the time. No request fails during whose life no worker was killed, and none is refused."""

    def __init__(self, server: Server) -> None:
        self._server = server
        self._begun = self._ended = 0
        """Kills that have begun, and those of workers that are gone."""
        self.answered = self.failed = 0
        self.pids: set[int] = set()

    async def run(self, address: str) -> None:
        while True:
            ended = self._ended
            try:
                self.pids.add(await self._server.ask(address))
            except EOFError:
                assert self._begun > ended, "a request failed, and no worker was killed meanwhile"
                self.failed += 1
            else:
                self.answered += 1

    async def kill(self, pid: int) -> None:
        """Kill a worker, and wait until it is gone."""
        pidfd = os.pidfd_open(pid)
        try:
            self._begun += 1
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            await asyncio.to_thread(select.select, [pidfd], [], [])
            self._ended += 1
        finally:
            os.close(pidfd)

    async def newcomer(self, known: set[int]) -> int:
        """The pid of another worker than these, as soon as one answers."""
        while (pid := await self._server.ask(self._server.addresses[0])) in known:
            """Ask on."""
        return pid


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="the test kills by pidfds")
@pytest.mark.long
@pytest.mark.timeout(300)
@pytest.mark.parametrize("example", ["serve.py", "serve_asgi.py"])
async def test_a_service_outlives_its_workers_and_ends_in_order(example: str, tmp_path: Path) -> None:
    kills = times(2, 60)
    async with running(example, "127.0.0.1:0", f"unix:{tmp_path}/s") as server:
        load = Load(server)
        async with asyncio.TaskGroup() as group:
            clients = [group.create_task(load.run(server.addresses[number % 2])) for number in range(CLIENTS)]
            victim = await server.ask(server.addresses[0])
            for _ in range(kills):
                known = load.pids | {victim}
                await load.kill(victim)
                victim = await load.newcomer(known)
            for client in clients:
                client.cancel()
        assert load.answered > kills
        assert load.failed <= kills * CLIENTS
        server.process.terminate()
        assert server.process.stderr is not None
        log = (await server.process.stderr.read()).decode().splitlines()
        assert await server.process.wait() == 0
        assert [line for line in log if "died by SIGKILL" not in line] == []
        assert len(log) == kills
        for address in server.addresses:
            with pytest.raises((ConnectionRefusedError, FileNotFoundError)):
                await server.ask(address)


async def test_a_port_in_use_is_told() -> None:
    with socket.create_server(("127.0.0.1", 0), reuse_port=True) as other:
        address = "{}:{}".format(*other.getsockname())
        pipe = asyncio.subprocess.PIPE
        command = [sys.executable, str(EXAMPLES / "serve.py"), address]
        process = await asyncio.create_subprocess_exec(*command, stdout=pipe, stderr=pipe)
        out, err = await process.communicate()
        assert (process.returncode, out) == (1, b"")
        assert f"percore cannot listen on {address}: {os.strerror(errno.EADDRINUSE)}".encode() in err
