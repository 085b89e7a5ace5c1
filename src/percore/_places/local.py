"""Hosts as child processes on this machine: for tests, and to try what several nodes do."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import Collection
from functools import partial
from typing import Final

from percore._engines.nodes.places import NoPlace, Place
from percore._monitor.threads import in_thread
from percore._places.host_process import HostProcess

LOCAL: Final = "127.0.0.1"


_PATIENCE: Final = 5.0
"""Seconds that a host has for its end."""


class LocalPlaces:
    """Implements `Places` with nodes that are processes of this machine, called a, b, c and so on.

    Attributes:
        hosts: the process of each node's host, the latest.
    """

    def __init__(self, nodes: int = 2, *, python: str | None = None) -> None:
        """`python`: the interpreter of the hosts. Default: that of this program."""
        self.hosts: dict[str, subprocess.Popen[bytes]] = {}
        self._names = [chr(ord("a") + place) for place in range(nodes)]
        self._python = python or sys.executable
        self._hosts: dict[str, HostProcess] = {}
        self._starts: dict[asyncio.Future[Place | NoPlace], HostProcess] = {}
        """The hosts that have not said where they listen, also those for which nobody waits any more."""

    async def place(self, token: bytes, used: Collection[str], _workers: int) -> list[Place | NoPlace]:
        starts = [self._start(name, token) for name in self._names if name not in used]
        return await asyncio.gather(*map(asyncio.shield, starts))

    def _start(self, name: str, token: bytes) -> "asyncio.Future[Place | NoPlace]":
        before = self._hosts.get(name)
        host = self._hosts[name] = HostProcess(self._python, LOCAL)
        self.hosts[name] = host.process
        start = asyncio.ensure_future(in_thread("percore-host", partial(_placed, name, host, token, before)))
        self._starts[start] = host
        start.add_done_callback(self._starts.pop)
        return start

    async def aclose(self) -> None:
        """Let the hosts end, and wait until they have. One that has not said where it listens may hang, and is killed."""
        starts, hosts = dict(self._starts), list(self._hosts.values())
        self._hosts.clear()
        self.hosts.clear()
        for host in starts.values():
            _end(host)
        try:
            await asyncio.gather(*starts, return_exceptions=True)
        finally:
            await in_thread("percore-host", partial(_close, hosts))


def _placed(name: str, host: HostProcess, token: bytes, before: HostProcess | None) -> Place | NoPlace:
    """Wait until a host listens. `before`: that of before, which was lost."""
    if before is not None:
        _end(before)
        _close([before])
    port = host.port(token)
    if port is None:
        return NoPlace(f"the host of node {name} ended with exit code {host.process.wait()} before it listened: see standard error")
    return Place(name, LOCAL, port, partial(_end, host))


def _end(host: HostProcess) -> None:
    if host.process.poll() is None:
        os.kill(host.process.pid, signal.SIGKILL)


def _close(hosts: Collection[HostProcess]) -> None:
    for host in hosts:
        host.close()
    for host in hosts:
        try:
            host.process.wait(_PATIENCE)
        except subprocess.TimeoutExpired:  # it was stopped, for example
            _end(host)
            host.process.wait()
