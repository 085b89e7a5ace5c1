"""What the tests of launch styles, hosts and surroundings share: a way to run real commands, and functions for workers.

Light on purpose: every worker that runs one of the functions imports this module.
"""

import asyncio
import os
import subprocess
import sys
import threading
from collections.abc import AsyncGenerator, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import NamedTuple

TIMEOUT = 40.0
"""Seconds a command may take before it counts as hanging; pytest's own limit is above it."""


class Done(NamedTuple):
    """How a command has ended."""

    code: int
    out: str
    err: str


def execute(
    command: Sequence[str | Path],
    *,
    cwd: Path,
    given: str | None = None,
    environment: Mapping[str, str | Path] | None = None,
) -> Done:
    """Run a command to its end, `given` on its standard input."""
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**os.environ, **{name: str(value) for name, value in (environment or {}).items()}},
        input="" if given is None else given,
        capture_output=True,
        text=True,
        timeout=TIMEOUT,
        check=False,
    )
    return Done(done.returncode, done.stdout, done.stderr)


def python(
    *arguments: str | Path,
    cwd: Path,
    given: str | None = None,
    environment: Mapping[str, str | Path] | None = None,
) -> Done:
    """Run this interpreter with these arguments."""
    return execute([sys.executable, *arguments], cwd=cwd, given=given, environment=environment)


def output_of(script: str, folder: Path, *arguments: str, environment: Mapping[str, str | Path] | None = None) -> str:
    """What a program prints that must end well and complain of nothing."""
    (folder / "program.py").write_text(script)
    done = python("program.py", *arguments, cwd=folder, environment=environment)
    assert (done.code, done.err) == (0, ""), done
    return done.out


# Functions for workers


def pid() -> int:
    return os.getpid()


async def pid_of_task() -> int:
    return os.getpid()


def read_fifo(path: str) -> tuple[int, str]:
    """Wait, in a thread, for what somebody writes there."""
    with open(path) as fifo:
        return os.getpid(), fifo.read()


async def read_fifo_in_task(path: str) -> tuple[int, str]:
    """Wait, in the loop, for what somebody writes there."""
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    try:
        loop.add_reader(fd, readable.set)
        await readable.wait()
        loop.remove_reader(fd)
        return os.getpid(), os.read(fd, 1000).decode()
    finally:
        os.close(fd)


def double(number: int) -> int:
    return 2 * number


async def double_in_task(number: int) -> int:
    await asyncio.sleep(0)
    return 2 * number


def loop_class() -> str:
    raise AssertionError("a plain function runs in a thread, which has no loop")


async def loop_traits() -> tuple[str, bool]:
    loop = asyncio.get_running_loop()
    return type(loop).__module__.partition(".")[0], loop.get_debug()


def thread_name() -> str:
    return threading.current_thread().name


@asynccontextmanager
async def told_lifespan() -> AsyncGenerator[str]:
    yield "told"


@contextmanager
def plain_lifespan() -> Iterator[str]:
    yield "plain"
