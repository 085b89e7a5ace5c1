"""A bare interpreter with a loop, and the ping-pong of two such loops: the least that two processes can do."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

_PROGRAM = Path(__file__).with_name("_pong_program.py")


@asynccontextmanager
async def bare_ping_pong() -> AsyncIterator[Callable[[int], Awaitable[int]]]:
    """One trip: what to await for one byte of state, from 1 to 255."""
    loop = asyncio.get_running_loop()
    waiting = loop.create_future()
    async with bare_loop() as (_, ping, pong):

        def trip(state: int) -> Awaitable[int]:
            nonlocal waiting
            waiting = loop.create_future()
            os.eventfd_write(ping, state)
            return waiting

        loop.add_reader(pong, lambda: waiting.set_result(os.eventfd_read(pong)))
        try:
            yield trip
        finally:
            loop.remove_reader(pong)


@asynccontextmanager
async def bare_loop() -> AsyncIterator[tuple[int, int, int]]:
    """A process that has imported asyncio and uvloop and runs a loop: its pid, and the eventfds to it and from it."""
    ping, pong = (os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(2))
    command = [sys.executable, str(_PROGRAM), str(ping), str(pong)]
    process = await asyncio.to_thread(subprocess.Popen, command, pass_fds=(ping, pong), stdin=subprocess.PIPE)
    try:
        yield process.pid, ping, pong
    finally:
        await asyncio.to_thread(process.communicate)  # closes its standard input, which ends it, and reaps it
        os.close(ping)
        os.close(pong)
