"""Programs for the fault tests to kill and interrupt: python -m tests.e2e.fault_programs STORY ARGUMENTS"""

import asyncio
import contextlib
import faulthandler
import json
import logging
import os
import random
import re
import signal
import subprocess
import sys
import threading
import zlib
from collections.abc import AsyncIterator, Callable, Coroutine
from functools import partial
from typing import Any

import percore
from tests.e2e import fault_calls as calls

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
        channels = [member.worker.channel for member in runner._supervisor.members]
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


async def _works(runner: percore.Runner) -> None:
    async with asyncio.timeout(10):
        assert await runner.map(calls.accept, range(200)) == [1] * 200
        while any(worker.state != "ready" for worker in runner.statistics().workers):
            await runner.run(calls.who)


def interrupted_program(name: str) -> None:
    async def main() -> None:
        async with percore.Runner(2) as runner:
            say("started")
            await runner.run(calls.stay, "/dev/null")

    run(name, main())


# To be killed


def to_be_killed(state: str, method: str) -> None:
    """Get into that state, tell, and stay there."""
    if state == "thread":
        # The thread that has started the runner ends, its loop with it.
        thread = threading.Thread(target=_start_in_thread, args=(method,))
        thread.start()
        thread.join()
        say("ready", {"fork": None})
        threading.Event().wait()
    asyncio.run(_be_killed(state, method))


def _start_in_thread(method: Any) -> None:
    loop = asyncio.new_event_loop()
    _kept.append(percore.Runner(2, start_method=method))
    loop.run_until_complete(_kept[0].start())
    _kept.append(loop)


_kept: list[Any] = []


async def _be_killed(state: str, method: Any) -> None:
    async with percore.Runner(2, start_method=method) as runner:
        fork = None
        if state == "fork":
            fork = os.fork()
            if fork == 0:
                signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
                while True:
                    signal.pause()
        elif state == "c":
            _kept.extend(runner.submit(stay_in_c) for _ in range(2))
        elif state == "load":
            await _load_for_ever(runner)
        say("ready", {"fork": fork})
        await asyncio.Event().wait()


def stay_in_c() -> None:
    _word("calls")
    re.match(r"(a+)+$", "a" * 60 + "b")


async def _load_for_ever(runner: percore.Runner) -> None:
    told = False
    async for _ in runner.map(calls.pattern, _endless(), _sizes(), ordered=False):
        if not told:
            say("ready", {"fork": None})
            told = True


def _endless() -> Any:
    number = 0
    while True:
        yield number
        number += 1


def _sizes() -> Any:
    while True:
        yield from (10, 1000, 300_000)


# To be interrupted on a terminal


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


async def endless(number: int) -> None:
    """Tells when it has been cancelled."""
    try:
        await asyncio.Event().wait()
    finally:
        if number < 10:
            _word("cancelled")


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
    async with percore.Runner(2, lifespan=telling):
        say("ready")
        await asyncio.Event().wait()


async def loaded() -> None:
    async with percore.Runner(2, lifespan=telling) as runner:
        _kept.extend(runner.submit(endless, number) for number in range(100))
        await runner.map(calls.accept, range(100))
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


async def twice() -> None:
    async with percore.Runner(2, kill_after=60) as runner:
        await runner.run(stubborn)


async def subprocesses() -> None:
    async with percore.Runner(2, kill_after=60) as runner:
        task, thread = await asyncio.gather(runner.run(sleep_in_task), runner.run(sleep_in_thread))
        say("ended", [task, thread])


def on_terminal(story: str, loop: str) -> None:
    run(loop, globals()[story]())


def deaf(story: str, loop: str) -> None:
    """As on_terminal, but the user's own program takes no notice of Ctrl-C."""
    signal.signal(signal.SIGINT, lambda *_: None)
    on_terminal(story, loop)


# Mixed load under kills


class Load:
    """Calls of all kinds, kills among them, and a record of every outcome."""

    def __init__(self, runner: percore.Runner, ledger: str, outcomes: str, seed: int) -> None:
        self.runner = runner
        self.ledger = ledger
        self.outcomes = open(outcomes, "w", encoding="ascii")  # noqa: SIM115  # as long as the program
        self.random = random.Random(seed)
        self.last = 0
        self.ended = 0
        self.room = asyncio.Semaphore(120)
        self.kills = 0
        self.next_kill = 50
        self.pending: set[asyncio.Future[Any]] = set()
        self.wanted = 0

    def submit(self) -> None:
        self.last += 1
        uuid = self.last
        submit = partial(self._submit, uuid)
        kind = self.random.choices(KINDS, WEIGHTS)[0]
        if kind is calls.load_large_argument:
            submit(kind, calls.pattern(uuid, 500_000 + self.random.randrange(1_000_000)))
        else:
            submit(kind)

    def _submit(self, uuid: int, fn: Callable[..., Any], *more: object) -> None:
        future: asyncio.Future[Any] = self.runner.submit(fn, self.ledger, uuid, *more)
        future.add_done_callback(partial(self._done, uuid))
        self.pending.add(future)
        if self.random.random() < 0.08:
            asyncio.get_running_loop().call_later(self.random.random() / 50, future.cancel)

    def _done(self, uuid: int, future: asyncio.Future[Any]) -> None:
        self.pending.discard(future)
        self.outcomes.write(f"{uuid} {outcome(future)}\n")
        self.ended += 1
        self.room.release()
        if self.ended >= self.next_kill and self.kills < self.wanted:
            self.next_kill = self.ended + self.random.randrange(1, 60)
            self._kill()

    def _kill(self) -> None:
        pids = [worker.pid for worker in self.runner.statistics().workers if worker.pid is not None]
        if not pids:
            return
        with contextlib.suppress(ProcessLookupError):
            pidfd = os.pidfd_open(self.random.choice(pids))
            try:
                signal.pidfd_send_signal(pidfd, signal.SIGKILL)
            finally:
                os.close(pidfd)
            self.kills += 1

    async def run(self, kills: int) -> None:
        self.wanted = kills
        while self.kills < kills:
            await self.room.acquire()
            self.submit()
        await asyncio.gather(*self.pending, return_exceptions=True)

    async def end_abruptly(self) -> None:
        """Close over calls of every kind, with a worker dying meanwhile."""
        for _ in range(100):
            self.submit()
        self.wanted += 1
        await asyncio.sleep(0)
        self._kill()
        await self.runner.aclose(grace=0)


KINDS: list[Callable[..., Any]] = [
    calls.load_task,
    calls.load_thread,
    calls.load_large_result,
    calls.load_large_result_in_task,
    calls.load_large_argument,
    calls.load_error,
]
WEIGHTS = [40, 30, 6, 6, 6, 12]


def outcome(future: asyncio.Future[Any]) -> str:
    """What has become of a call, in a few words."""
    if future.cancelled():
        return "cancelled"
    error = future.exception()
    if isinstance(error, percore.WorkerDied):
        return f"died {int(error.started)} {error.pid}"
    if isinstance(error, LookupError):
        return f"error {error.args[0]}"
    if error is not None:
        return f"{type(error).__name__} {error}".replace("\n", " ")
    value = future.result()
    if isinstance(value, bytes):
        return f"bytes {len(value)} {zlib.crc32(value)}"
    return f"value {value}"


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


async def _kill_workers(ledger: str, outcomes: str, seed: int, kills: int, method: Any) -> None:
    asyncio.get_running_loop().slow_callback_duration = 60  # the pickling of megabytes is the load, not a fault
    before = fds()
    runner = percore.Runner(2, threads=4, concurrency=20, lifespan=calls.announced, start_method=method)
    await runner.start()
    say("started")
    load = Load(runner, ledger, outcomes, seed)
    await load.run(kills)
    in_use = runner._shared.arena.in_use
    restarts = runner.statistics().restarts
    await load.end_abruptly()
    load.outcomes.close()
    say(
        "closed",
        {
            "kills": load.kills,
            "calls": load.last,
            "pending": len(load.pending),
            "restarts": restarts,
            "arena slots left": in_use,
            "fds left": [fd for fd in fds() if fd not in before],
            "threads": threading.active_count(),
        },
    )


def kill_workers(ledger: str, outcomes: str, seed: str, kills: str, loop: str, method: str) -> None:
    logging.getLogger("percore").setLevel(logging.ERROR)
    run(loop, _kill_workers(ledger, outcomes, int(seed), int(kills), method))


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
