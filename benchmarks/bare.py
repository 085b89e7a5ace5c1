"""The least that two processes can do: a bare loop in another process, rung by an eventfd, with or without shared memory."""

from __future__ import annotations

import asyncio
import mmap
import os
import subprocess
import sys
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable

_PROGRAM = Path(__file__).with_name("programs") / "bare.py"


@asynccontextmanager
async def bare_ping_pong() -> AsyncIterator[Callable[[int], Awaitable[int]]]:
    """One trip there and back with one byte of state, from 1 to 255."""
    async with _bell() as (ping, pong), _process(ping, pong), _answers(pong) as answer:

        def trip(state: int) -> Awaitable[int]:
            waiting = answer()
            os.eventfd_write(ping, state)
            return waiting

        yield trip


@asynccontextmanager
async def bare_loop() -> AsyncIterator[int]:
    """A process that has imported asyncio and uvloop and runs a loop: its pid."""
    async with _bell() as (ping, pong), _process(ping, pong) as pid:
        yield pid


@asynccontextmanager
async def bare_echo(size: int, *, views: bool) -> AsyncIterator[Callable[[bytes], Awaitable[bytes | memoryview]]]:
    """An echo of 1 to `size` bytes through shared memory: they come back as bytes, or with `views` as a view."""
    there, back = (os.memfd_create("payload", os.MFD_CLOEXEC) for _ in range(2))
    try:
        for fd in (there, back):
            os.ftruncate(fd, size)
        target, source = (memoryview(mmap.mmap(fd, size)) for fd in (there, back))
        async with _bell() as (ping, pong), _process(ping, pong, there, back, views=views), _answers(pong) as answer:

            async def echo(data: bytes) -> bytes | memoryview:
                waiting = answer()
                target[: len(data)] = data
                os.eventfd_write(ping, len(data))
                answered = source[: await waiting]
                return answered if views else bytes(answered)

            yield echo
    finally:
        os.close(there)
        os.close(back)


@asynccontextmanager
async def _bell() -> AsyncIterator[tuple[int, int]]:
    """The eventfds there and back."""
    pair = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC), os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
    try:
        yield pair
    finally:
        for fd in pair:
            os.close(fd)


@asynccontextmanager
async def _process(*fds: int, views: bool = False) -> AsyncIterator[int]:
    command = [sys.executable, str(_PROGRAM), *map(str, fds), *(["views"] if views else [])]
    process = await asyncio.to_thread(subprocess.Popen, command, pass_fds=fds, stdin=subprocess.PIPE)
    try:
        yield process.pid
    finally:
        await asyncio.to_thread(process.communicate)  # closes its standard input, which ends it, and reaps it


@asynccontextmanager
async def _answers(pong: int) -> AsyncIterator[Callable[[], Awaitable[int]]]:
    """Makes the future of the next answer."""
    loop = asyncio.get_running_loop()
    waiting = loop.create_future()

    def answer() -> Awaitable[int]:
        nonlocal waiting
        waiting = loop.create_future()
        return waiting

    loop.add_reader(pong, lambda: waiting.set_result(os.eventfd_read(pong)))
    try:
        yield answer
    finally:
        loop.remove_reader(pong)
