"""Hosts as child processes on this machine: for tests, and to try what several nodes do."""

import asyncio
import os
import signal
import sys
from collections.abc import Callable, Collection
from functools import partial
from typing import TYPE_CHECKING, Final

from percore._engines.nodes.places import NoPlace, Place
from percore._monitor.threads import in_thread
from percore._places.host_process import close_hosts, start_host

if TYPE_CHECKING:
    import subprocess

LOCAL: Final = "127.0.0.1"


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
        self._starts: set[asyncio.Future[Place]] = set()
        """Of the hosts that are being started, also those for which nobody waits any more."""

    async def place(self, token: bytes, used: Collection[str], _workers: int) -> list[Place | NoPlace]:
        free = [name for name in self._names if name not in used]
        starts = [asyncio.ensure_future(in_thread("percore-host", partial(self._start, name, token))) for name in free]
        self._starts.update(starts)
        for start in starts:
            start.add_done_callback(self._starts.discard)
        return await asyncio.gather(*map(asyncio.shield, starts))

    def _start(self, name: str, token: bytes) -> Place:
        if name in self.hosts:
            self._end_of(name)()
            close_hosts([self.hosts[name]])
        process, port = start_host(self._python, LOCAL, token)
        self.hosts[name] = process
        if port is None:
            raise NoPlace(f"the host of node {name} ended with exit code {process.wait()} before it listened: see standard error")
        return Place(name, LOCAL, port, self._end_of(name))

    def _end_of(self, name: str) -> Callable[[], None]:
        process = self.hosts.get(name)

        def end() -> None:
            if process is not None and process.poll() is None:
                os.kill(process.pid, signal.SIGKILL)

        return end

    async def aclose(self) -> None:
        await asyncio.gather(*self._starts, return_exceptions=True)
        hosts = list(self.hosts.values())
        self.hosts.clear()
        await in_thread("percore-host", partial(close_hosts, hosts))
