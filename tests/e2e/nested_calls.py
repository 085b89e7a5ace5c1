"""What the programs of `misuse_programs` run in workers: runners within workers, and calls in odd surroundings."""

import asyncio
import os
import sys
from typing import Any

import percore


def word(text: str) -> None:
    """A line for the judge, in one write: every process of the tree has the same standard output."""
    os.write(1, f"{text} {os.getpid()}\n".encode())


async def nest(depth: int) -> None:
    """Run workers within this worker, and so on, and stay there until cancelled."""
    async with percore.Runner(2 if depth > 1 else 1) as runner:
        deeper = [runner.submit(nest, depth - 1), runner.submit(stay_in_thread)] if depth > 1 else [runner.submit(stay)]
        await asyncio.gather(*deeper)


async def stay() -> None:
    word("deepest")
    try:
        await asyncio.Event().wait()
    finally:
        word("cancelled")


def stay_in_thread() -> None:
    """Until somebody kills the process, as a thread does that cannot be cancelled."""
    word("thread")
    while True:
        os.read(os.pipe()[0], 1)


_kept: list[Any] = []


async def leave_open() -> list[int]:
    """Make a runner that nobody closes: the pids of its workers."""
    runner = percore.Runner(2)
    await runner.start()
    _kept.append(runner)
    return [worker.pid or 0 for worker in runner.statistics().workers]


async def twice_in_nested(number: int) -> int:
    """What a nested runner is for."""
    async with percore.Runner(1) as runner:
        return sum(await runner.map(abs, [number, -number]))


def write_to_stderr(size: int) -> int:
    """So much in one piece, and a word through `sys.stderr`."""
    view = memoryview(b"e" * (size - 1) + b"\n")
    while view:
        view = view[os.write(2, view) :]
    sys.stderr.write("and a word\n")
    return size


def read_stdin() -> str:
    return sys.stdin.read()


def streams() -> list[str]:
    """What 0, 1 and 2 are here."""
    return [os.readlink(f"/proc/self/fd/{number}") for number in range(3)]
