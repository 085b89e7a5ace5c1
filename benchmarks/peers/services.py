"""Services that run calls in processes of their own: gunicorn's dirty arbiter, and the queues taskiq and streaq on Redis.

Each raises ModuleNotFoundError if something that it needs is not installed. Only gunicorn is in the dependency group of the
benchmarks: `apt install redis-server` and `python -m pip install taskiq taskiq-redis streaq`.
"""

from __future__ import annotations

import asyncio
import importlib
import os
import shutil
import socket
import subprocess
import sys
import tempfile
import time
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest.mock import patch

from benchmarks.programs import queued

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from benchmarks.peers import Call

_ROOT = Path(__file__).parents[2]
_PROGRAM = "benchmarks.programs.queued"
_START = 20.0
"""Seconds a service has for its start."""


@asynccontextmanager
async def dirty_calling(workers: int, threads: int) -> AsyncIterator[Call]:
    """Calls of an application of gunicorn's dirty arbiter, over a connection for each that is under way."""
    client_type: Any = importlib.import_module("gunicorn.dirty").DirtyClient
    arguments = ("gunicorn", "--log-level", "critical", "-w", "1", "-b", "unix:{folder}/http", f"{_PROGRAM}:nothing")
    dirty = ("--dirty-app", f"{_PROGRAM}:Same", "--dirty-workers", str(workers), "--dirty-threads", str(threads))
    async with _process(*arguments, *dirty) as folder:
        path = await asyncio.to_thread(_listening, folder, "*/arbiter.sock")
        free: list[Any] = []

        async def call(argument: int) -> Any:
            client = free.pop() if free else client_type(path)
            try:
                return await client.execute_async(f"{_PROGRAM}:Same", "same_plainly", argument)
            finally:
                free.append(client)

        try:
            yield call
        finally:
            for client in free:
                await client.close_async()


@asynccontextmanager
async def taskiq_calling(workers: int, interval: float) -> AsyncIterator[Call]:
    """Coroutines, as tasks of taskiq. Its client asks Redis for a result again and again, `interval` seconds apart."""
    async with _redis():
        broker, task = queued.of_taskiq()
        async with _process("taskiq", "worker", f"{_PROGRAM}:taskiq_broker", "--workers", str(workers), "--log-level", "CRITICAL"):
            await broker.startup()

            async def call(argument: int) -> Any:
                kicked = await task.kiq(argument)
                return (await kicked.wait_result(check_interval=interval)).return_value

            try:
                yield call
            finally:
                await broker.shutdown()


@asynccontextmanager
async def streaq_calling(workers: int) -> AsyncIterator[Call]:
    """Coroutines, as tasks of streaq, 32 at once: it takes a connection for each, and of many some never get one."""
    async with _redis():
        worker, task = queued.of_streaq()
        connections = asyncio.Semaphore(32)
        async with _process("streaq", "run", f"{_PROGRAM}:streaq_worker", "--workers", str(workers)), worker:

            async def call(argument: int) -> Any:
                async with connections:
                    enqueued = await task.enqueue(argument)
                    return (await enqueued.result()).result

            yield call


@asynccontextmanager
async def _redis() -> AsyncIterator[None]:
    """A Redis of its own, in memory, on a socket in a folder of its own. Its URL is in the environment meanwhile."""
    program = shutil.which("redis-server")
    if program is None:
        raise ModuleNotFoundError("there is no redis-server")
    options = ("--port", "0", "--save", "", "--unixsocket", "{folder}/redis", "--dir", "{folder}")
    async with _process(program, *options) as folder:
        await asyncio.to_thread(_listening, folder, "redis")
        with patch.dict(os.environ, {queued.REDIS: f"unix://{folder}/redis"}):
            yield


@asynccontextmanager
async def _process(program: str, *arguments: str) -> AsyncIterator[Path]:
    """A program, or a module of Python, with a folder for its temporary files, which is yielded."""
    with tempfile.TemporaryDirectory() as name:
        command = [program] if program.startswith("/") else [sys.executable, "-m", program]
        command += [argument.format(folder=name) for argument in arguments]
        process = await asyncio.to_thread(_start, command, {**os.environ, "TMPDIR": name})
        try:
            yield Path(name)
        finally:
            process.terminate()
            await asyncio.to_thread(_ended, process)


def _start(command: list[str], environment: dict[str, str]) -> subprocess.Popen[bytes]:
    null = subprocess.DEVNULL
    return subprocess.Popen(command, env=environment, cwd=_ROOT, stdin=null, stdout=null, stderr=null)


def _ended(process: subprocess.Popen[bytes]) -> None:
    """Wait for the end of a process and of the processes that it has started."""
    import psutil

    with suppress(psutil.NoSuchProcess):
        children = psutil.Process(process.pid).children(recursive=True)
        _, alive = psutil.wait_procs([psutil.Process(process.pid), *children], timeout=5)
        for one in alive:
            with suppress(psutil.NoSuchProcess):
                one.kill()
    process.wait()


def _listening(folder: Path, pattern: str) -> str:
    """The path of a socket there, once a program listens on it."""
    end = time.monotonic() + _START
    while time.monotonic() < end:
        for path in map(str, folder.glob(pattern)):
            with socket.socket(socket.AF_UNIX) as one, suppress(OSError):
                one.connect(path)
                return path
        time.sleep(0.01)
    raise TimeoutError(f"nobody listens on {folder / pattern}")
