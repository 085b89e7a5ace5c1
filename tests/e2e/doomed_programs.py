"""Supervisors for a judge to kill, each in a state of its own: python -m tests.e2e.doomed_programs WIRE

The program itself only forks supervisors, one after the other: an interpreter for each would be most of the work of 200 kills. The
judge asks for one by a line on the wire, `STATE METHOD FOLDER` (for temporary files), and "end" ends the program.
When that one is dead and reaped, the program says `over`.
A supervisor says `ready` with its pid, workers say `calls` when they do what the state is about.
"""

import asyncio
import contextlib
import importlib
import json
import logging
import os
import re
import signal
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any, NoReturn

import percore

MARK = "PERCORE_TEST_FAMILY"
FIRST, LAST = 0, 999
_kept: list[Any] = []


def say(word: str, value: object = None) -> None:
    """A line for the judge, in one write: workers write to the same pipe."""
    os.write(1, f"{word} {json.dumps(value)}\n".encode())


def ready(fork: int | None = None) -> None:
    say("ready", {"pid": os.getpid(), "fork": fork})


# What workers do


async def stay() -> None:
    await asyncio.Event().wait()


async def stay_one_of_many(number: int) -> None:
    if number in (FIRST, LAST):
        say("calls")
    await asyncio.Event().wait()


def sleep_in_thread() -> None:
    say("calls")
    time.sleep(1000)


async def block_the_loop() -> None:
    say("calls")
    time.sleep(1000)  # noqa: ASYNC251  # what this state is


def stay_in_c() -> None:
    """In C code that keeps the GIL, for longer than anybody waits."""
    say("calls")
    re.match(r"(a+)+$", "a" * 60 + "b")


async def ignore_everything() -> None:
    """No signal that can be refused, no exception."""
    signal.pthread_sigmask(signal.SIG_BLOCK, signal.valid_signals())
    say("calls")
    while True:
        with contextlib.suppress(BaseException):
            await asyncio.Event().wait()


def end() -> NoReturn:
    os._exit(1)


def pattern(size: int) -> bytes:
    return b"x" * size


@contextlib.asynccontextmanager
async def never_entered() -> AsyncIterator[None]:
    say("calls")
    await asyncio.Event().wait()
    yield


@contextlib.asynccontextmanager
async def never_left() -> AsyncIterator[None]:
    yield
    say("calls")
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()


async def nest(depth: int, method: Any) -> None:
    if not depth:
        say("calls")
        await stay()
    async with percore.Runner(1, start_method=method) as runner:
        await runner.run(nest, depth - 1, method)


# States of a supervisor


async def idle(method: Any) -> None:
    async with percore.Runner(2, start_method=method):
        ready()
        await stay()


async def in_flight(method: Any) -> None:
    async with percore.Runner(2, start_method=method, concurrency=500) as runner:
        _kept.extend(runner.submit(stay_one_of_many, number) for number in range(LAST + 1))
        ready()
        await stay()


async def load(method: Any) -> None:
    async with percore.Runner(2, start_method=method) as runner:
        results = aiter(runner.map(pattern, _sizes(), ordered=False))
        await anext(results)
        ready()
        async for _ in results:
            pass


def _sizes() -> Iterator[int]:
    while True:
        yield from (10, 1000, 300_000)


async def mid_spawn(method: Any) -> None:
    """There is always a worker that is only coming up: each call ends one."""
    logging.getLogger("percore").setLevel(logging.ERROR)
    async with percore.Runner(2, start_method=method) as runner:
        told = False
        while True:
            await asyncio.gather(*(runner.submit(end) for _ in range(2)), return_exceptions=True)
            if not told:
                told = True
                ready()


async def unarmed(method: Any) -> None:
    """Interpreters are held up before they get to any code of percore."""
    ready()
    async with percore.Runner(2, start_method=method):
        pass


async def lifespan(method: Any) -> None:
    ready()
    async with percore.Runner(2, start_method=method, lifespan=never_entered):
        pass


async def close(method: Any) -> None:
    async with percore.Runner(2, start_method=method, lifespan=never_left, kill_after=1000):
        ready()


async def nested(method: Any) -> None:
    async with percore.Runner(1, start_method=method) as runner:
        ready()
        await runner.run(nest, 2, method)


async def _two_calls(function: Any, method: Any) -> None:
    async with percore.Runner(2, start_method=method) as runner:
        _kept.extend(runner.submit(function) for _ in range(2))
        ready()
        await stay()


async def sleep(method: Any) -> None:
    await _two_calls(sleep_in_thread, method)


async def c(method: Any) -> None:
    await _two_calls(stay_in_c, method)


async def blocked(method: Any) -> None:
    await _two_calls(block_the_loop, method)


async def ignoring(method: Any) -> None:
    await _two_calls(ignore_everything, method)


async def fork(method: Any) -> None:
    """A fork that the user made lives on, with all that a fork inherits."""
    async with percore.Runner(2, start_method=method):
        pid = os.fork()
        if pid == 0:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
            while True:
                signal.pause()
        ready(pid)
        await stay()


def thread(method: Any) -> NoReturn:
    """The thread that has started the runner ends, and its loop runs no more."""

    def start() -> None:
        loop = asyncio.new_event_loop()
        runner = percore.Runner(2, start_method=method)
        loop.run_until_complete(runner.start())
        _kept.extend((loop, runner))

    starter = threading.Thread(target=start)
    starter.start()
    starter.join()
    ready()
    while True:
        signal.pause()


def supervise(state: str, method: str, folder: str) -> NoReturn:
    os.environ[MARK] += f"-{os.getpid()}"
    os.environ["TMPDIR"] = folder
    if state == "thread":
        thread(method)
    asyncio.run({**globals(), "stopped": idle}[state](method))
    raise AssertionError("it was to be killed")


AHEAD = ("percore._runner.assembly", "percore._supervisor.supervisor", "percore._engines.processes.engine")
"""What a runner imports when it starts. Imported here, each supervisor has it; none of it starts anything."""


def main(wire: str) -> None:
    for module in AHEAD:
        importlib.import_module(module)
    with open(wire, encoding="utf-8") as lines:
        for line in lines:
            if line == "end\n":
                break
            pid = os.fork()
            if pid == 0:
                supervise(*line.split())
            os.waitpid(pid, 0)
            say("over")


if __name__ == "__main__":
    main(*sys.argv[1:])
