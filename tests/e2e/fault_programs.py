"""Programs for the fault tests to kill and interrupt: python -m tests.e2e.fault_programs STORY ARGUMENTS"""

import asyncio
import contextlib
import faulthandler
import functools
import itertools
import json
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Coroutine
from typing import Any

import percore
from tests.e2e import fault_calls as calls
from tests.internals import channel_of, members_of
from tests.waiting import until

faulthandler.register(signal.SIGUSR1, all_threads=True)


def say(word: str, value: object = None) -> None:
    """A line for the judge, in one write: workers write to the same pipe."""
    os.write(1, (word if value is None else f"{word} {json.dumps(value)}").encode() + b"\n")


def run(loop: str, main: Coroutine[Any, Any, Any]) -> None:
    if loop == "uvloop":
        import uvloop

        uvloop.run(main)
    else:
        asyncio.run(main)


def new_loop(name: str) -> asyncio.AbstractEventLoop:
    if name == "uvloop":
        import uvloop

        return uvloop.new_event_loop()
    return asyncio.new_event_loop()


# Interrupts within callbacks of percore, planned by PERCORE_POINTS


def interrupted_callback(name: str, call: str, wire: str) -> None:
    """Interrupted out of the loop; the same loop runs on.

    "stays": nothing is heard of any worker until the call has begun. Else a worker may first tell that it has read what the
    function is, be killed for that, and the call, not begun, stay elsewhere. "unheard": nothing, until the worker is dead.
    """
    loop = new_loop(name)
    runner = percore.Runner(1 if call == "unheard" else 2)
    loop.run_until_complete(runner.start())
    futures: list[asyncio.Future[Any]] = []

    async def submit_and_wait() -> None:
        channels = [channel_of(member) for member in members_of(runner)]
        for channel in channels if call != "ends" else []:
            loop.remove_reader(channel._bell.fileno())
        futures.append(runner.submit(calls.stay, wire) if call == "stays" else runner.submit(calls.who))
        if call == "stays":
            await asyncio.sleep(0)  # the call is sent
            _wait_for_line(wire)
            for channel in channels:
                loop.add_reader(channel._bell.fileno(), channel._on_bell)
        await asyncio.wait(futures, timeout=10)

    async def pids() -> set[int | None]:
        return {worker.pid for worker in runner.statistics().workers}

    before = loop.run_until_complete(pids())
    story: list[object] = []
    try:
        loop.run_until_complete(submit_and_wait())
    except KeyboardInterrupt:
        story.append("interrupted")
    done, _ = loop.run_until_complete(asyncio.wait(futures, timeout=10))
    story.append(type(futures[0].exception()).__name__ if done else "pending")
    loop.run_until_complete(_works(runner))
    after = loop.run_until_complete(pids())
    story.append(f"{len(before & after)} survived")
    loop.run_until_complete(runner.aclose())
    loop.close()
    say("outcome", story)


def _wait_for_line(wire: str) -> None:
    with open(wire, "rb") as file:
        file.readline()


async def _works(runner: "percore.Runner") -> None:
    async with asyncio.timeout(10):
        assert await runner.map(calls.accept, range(200)) == [1] * 200
        await until(lambda: all(worker.state == "ready" for worker in runner.statistics().workers))


def interrupted_program(name: str) -> None:
    async def main() -> None:
        async with percore.Runner(2) as runner:
            say("started")
            await runner.run(calls.stay, "/dev/null")

    run(name, main())


# To be interrupted on a terminal

_kept: list[Any] = []


def _endless() -> Any:
    number = 0
    while True:
        yield number
        number += 1


def _sizes() -> Any:
    while True:
        yield from (10, 1000, 300_000)


@contextlib.asynccontextmanager
async def telling() -> AsyncIterator[None]:
    _word("entered")
    yield
    _word("left")


@contextlib.asynccontextmanager
async def never_ready() -> AsyncIterator[None]:
    _word("entering")
    await asyncio.Event().wait()
    yield


@contextlib.asynccontextmanager
async def never_left() -> AsyncIterator[None]:
    yield
    _word("leaving")
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()


def _word(word: str) -> None:
    os.write(1, f"{word} {os.getpid()}\n".encode())


_begun: list[int] = []


async def endless(number: int) -> None:
    """Tells when it has been cancelled."""
    _begun.append(number)
    try:
        await asyncio.Event().wait()
    finally:
        if number < 10:
            _word("cancelled")


async def count_begun() -> int:
    """How many endless calls this worker has begun."""
    return len(_begun)


async def stubborn() -> None:
    _word("stubborn")
    while True:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.Event().wait()
        _word("refused")


async def sleep_in_task() -> int:
    process = await asyncio.create_subprocess_exec("sleep", "1000")
    os.write(1, f"sleeps {process.pid}\n".encode())
    return await process.wait()


def sleep_in_thread() -> int:
    with subprocess.Popen(["sleep", "1000"]) as process:
        os.write(1, f"sleeps {process.pid}\n".encode())
        return process.wait()


async def plain() -> None:
    """What asyncio does without percore."""
    say("ready")
    await asyncio.Event().wait()


async def idle() -> None:
    async with percore.Runner(2, lifespan=telling, kill_after=60):
        say("ready")
        await asyncio.Event().wait()


async def loaded() -> None:
    async with percore.Runner(2, lifespan=telling, kill_after=60) as runner:
        _kept.extend(runner.submit(endless, number) for number in range(100))
        for call in _kept:  # what becomes of it is looked at, and so not reported
            call.add_done_callback(lambda call: call.cancelled() or call.exception())
        while sum(await runner.broadcast(count_begun)) < len(_kept):
            """One that has not begun is cancelled without a word, and a slow machine may be late with some."""
        say("ready")
        await runner.map(calls.pattern, _endless(), _sizes()).collect()


async def starting() -> None:
    async with percore.Runner(2, lifespan=never_ready, kill_after=60):
        say("started")


async def booting() -> None:
    say("ready")
    async with percore.Runner(2):
        say("started")
        await asyncio.Event().wait()


async def closing() -> None:
    async with percore.Runner(2, lifespan=never_left, kill_after=60):
        pass
    say("closed")


@contextlib.asynccontextmanager
async def left_behind(gate: str) -> AsyncIterator[None]:
    yield
    _word("leaving")
    await asyncio.to_thread(_wait_for_byte, gate)
    _word("left")


def _wait_for_byte(gate: str) -> None:
    with open(gate, "rb", buffering=0) as file:
        file.read(1)


async def closing_slowly(gate: str) -> None:
    async with percore.Runner(2, lifespan=functools.partial(left_behind, gate), kill_after=2):
        pass
    say("closed")


async def twice() -> None:
    async with percore.Runner(2, kill_after=60) as runner:
        await runner.run(stubborn)


async def subprocesses() -> None:
    async with percore.Runner(2, kill_after=60) as runner:
        task, thread = await asyncio.gather(runner.run(sleep_in_task), runner.run(sleep_in_thread))
        say("ended", [task, thread])


async def counting(ledger: str, enough: str) -> None:
    """Tells of every 500th result and goes on until there is that file. Whatever is done to it meanwhile, each call runs once."""
    numbers = itertools.takewhile(lambda _: not os.path.exists(enough), itertools.count())
    async with percore.Runner(2) as runner:
        before = [worker.pid for worker in runner.statistics().workers]
        results = []
        async for result in runner.map(_count, itertools.repeat(ledger), numbers, window=100):
            results.append(result)
            if len(results) % 500 == 0:
                say("at", len(results))
        statistics = runner.statistics()
        same = [worker.pid for worker in statistics.workers] == before
        say("counted", [len(results), results == list(range(len(results))), same, statistics.failed])


async def _count(ledger: str, number: int) -> int:
    calls.append(ledger, str(number))
    return number


def on_terminal(story: str, loop: str, *arguments: str) -> None:
    run(loop, globals()[story](*arguments))


def deaf(story: str, loop: str, *arguments: str) -> None:
    """As on_terminal, but the user's own program takes no notice of Ctrl-C."""
    signal.signal(signal.SIGINT, lambda *_: None)
    on_terminal(story, loop, *arguments)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Python's own end restores what a signal does, unless it is ignored


# For programs of other modules


def fds() -> list[str]:
    listing = os.open("/proc/self/fd", os.O_RDONLY)
    try:
        numbers = [number for number in os.listdir(listing) if int(number) != listing]
    finally:
        os.close(listing)
    found = []
    for number in numbers:
        with contextlib.suppress(OSError):
            found.append(os.readlink(f"/proc/self/fd/{number}"))
    return sorted(found)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
