"""The program under test: python -m tests.sweep.program FOLDER LOOP. It does what the judge orders, line by line."""

import asyncio
import contextlib
import faulthandler
import json
import logging
import os
import select
import signal
import sys
import threading
import zlib
from collections import Counter
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any

import percore
from percore._common import fault_points
from percore._engines.processes.fork_servers import servers
from percore._engines.processes.launch import ENTRY
from percore._protocol.messages import Kind
from tests.internals import arena_of, channel_of, members_of, supervisor_of
from tests.sweep import calls

faulthandler.register(signal.SIGUSR1, all_threads=True)

SERVED = 100


def say(word: str, value: object = None) -> None:
    """A line for the judge, in one write."""
    os.write(1, (word if value is None else f"{word} {json.dumps(value)}").encode() + b"\n")


def fds() -> list[str]:
    """What is open, by kind."""
    found = []
    with os.scandir("/proc/self/fd") as entries:
        for entry in entries:
            with contextlib.suppress(OSError):
                found.append(os.readlink(entry.path).partition(":[")[0])
    return [name for name in found if not name.startswith("/proc/")]


class Orders:
    """Lines of a FIFO, as they come."""

    def __init__(self, path: str) -> None:
        self._fd = os.open(path, os.O_RDWR | os.O_NONBLOCK)
        self._buffer = b""
        self._queue: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        asyncio.get_running_loop().add_reader(self._fd, self._read)

    def _read(self) -> None:
        with contextlib.suppress(BlockingIOError):  # a loop that an interrupt has ended finds the same news twice
            self._buffer += os.read(self._fd, 65536)
        *lines, self._buffer = self._buffer.split(b"\n")
        for line in lines:
            self._queue.put_nowait(json.loads(line))

    async def next(self) -> dict[str, Any]:
        return await self._queue.get()

    def close(self) -> None:
        asyncio.get_running_loop().remove_reader(self._fd)
        os.close(self._fd)


class Host:
    """The runner under test and its load."""

    def __init__(self, folder: str) -> None:
        self.folder = folder
        self.ledger = f"{folder}/ledger"
        self.outcomes = open(f"{folder}/outcomes", "w", encoding="ascii", buffering=1)  # noqa: SIM115  # as long as the program
        self.last = 0
        self.pending: set[asyncio.Future[Any]] = set()
        self.deaf: list[Any] = []
        self.background: list[asyncio.Task[None]] = []
        self.runner: percore.Runner
        self.fds: list[str] = []
        self.strikes = 0
        self.complaints: list[str] = []

    # Orders

    async def open(self, workers: int, method: Any) -> None:
        """A new runner."""
        servers.warm_up(ENTRY.partition(":")[0])  # a strike may have left none
        self.fds = fds()
        self.runner = percore.Runner(
            workers,
            lifespan=calls.observed,
            concurrency=16,
            threads=2,
            max_message=2**36,
            start_method=method,
            kill_after=2.0,
        )
        try:
            await self.runner.start()
        except percore.StartupFailed as error:
            await asyncio.sleep(0)
            say("opened", {"error": str(error), "left": self._left()})
            return
        fault_points.observe = self.observe
        with contextlib.suppress(percore.WorkerDied):
            await self.runner.broadcast(calls.nothing)  # each has passed the last place of its birth
        say("opened", {"error": ""})

    async def fill(self, how: str) -> None:
        """Bring about the state: rings full, or slots taken, as far as this side can see to it."""
        kind, _, side = how.partition(" of ")
        supervisor = supervisor_of(self.runner)
        seats = list(supervisor.dispatch.seats)
        size = {"busy": 0, "full": calls.INLINE, "slots": calls.STORED}[kind]
        if kind == "busy":
            self._until(3, seats, partial(self._hold, calls.hold))
        elif side == "worker":
            self._be_deaf()
            self._until(12, seats, partial(self._submit, calls.task, 0, size))
        else:
            for _ in range(3 * len(seats)):  # what threads say is heard although their loop stands
                self._submit(calls.thread, 0.03, calls.STORED, calls.STORED)
            self._until(1, seats, partial(self._hold, calls.block))
            await asyncio.sleep(0)
            self._until(12, seats, partial(self._submit, calls.task, 0, 0, size))
            for _ in range(8 if kind == "slots" else 0):  # they get the slots when they are sent, or wait for one
                self._submit(calls.task, 0, 0, size)
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        say("filled")

    async def fill_and_release(self) -> None:
        """Have workers, whose loops stand, fill their rings by threads, with a slot's release waiting for the loop to go on."""
        seats = list(supervisor_of(self.runner).dispatch.seats)
        for _ in seats:
            self._submit(calls.thread, 0, calls.STORED)
        first = set(self.pending)
        for _ in range(9 * len(seats)):
            self._submit(calls.thread, 0.03, calls.INLINE)
        self._until(1, seats, partial(self._hold, calls.block))
        await asyncio.wait(first)
        self._be_deaf()
        say("filled")

    def _be_deaf(self) -> None:
        """Nothing is heard of any worker until "on"."""
        self.deaf = [channel_of(member) for member in members_of(self.runner)]
        for channel in self.deaf:
            asyncio.get_running_loop().remove_reader(channel._bell.fileno())

    def _until(self, count: int, seats: list[Any], submit: Callable[[], None]) -> None:
        """Submit until every worker holds so many coroutines: more than it has room for, but fewer than it has places."""
        for _ in range(16 * len(seats)):
            if any(seat.load[Kind.TASK] < count for seat in seats):
                submit()

    def _hold(self, fn: Callable[..., Any]) -> None:
        self._record(self.runner.submit(fn, self.ledger, self._next(), f"{self.folder}/stay"))

    async def wave(self, how: str) -> None:
        """Calls of every kind; or, if `how` begins with "nested", calls that make calls."""
        if how.startswith("nested"):
            await self._wave_of_callers(how)
            return
        kinds: list[Callable[[], None]] = [
            partial(self._submit, fn, seconds, *sizes)
            for seconds, *sizes in [(0,), (0, 0, 10), (0, calls.STORED), (0, 0, calls.STORED), (0, calls.ERROR)]
            for fn in (calls.task, calls.thread)
        ]
        kinds += [
            partial(self._stream, fn, size) for size in (0, 10, calls.STORED) for fn in (calls.stream_task, calls.stream_thread)
        ]
        if how == "one by one":
            self.background.append(asyncio.create_task(self._one_by_one(kinds)))
            return
        for submit in kinds:
            submit()
        for seconds in (0.002, 0):
            for fn in (calls.task, calls.thread):
                self._submit(fn, seconds)
        self.background.append(asyncio.create_task(self._map(12)))
        await asyncio.sleep(0)

    async def change(self, how: str) -> None:
        """Reload, or use one worker more or one less. A worker that dies in its start ends that, and then nothing has changed."""
        self.background.append(asyncio.create_task(self._change(how)))
        await asyncio.sleep(0)

    async def _change(self, how: str) -> None:
        before = [worker.generation for worker in self.runner.statistics().workers]
        workers = len(before) + {"reload": 0, "grow": 1, "shrink": -1}[how]
        try:
            await (self.runner.reload() if how == "reload" else self.runner.resize(workers))
        except percore.StartupFailed:
            workers = len(before)
        else:
            after = [worker.generation for worker in self.runner.statistics().workers]
            if how == "reload" and not all(new > old for old, new in zip(before, after, strict=True)):
                self.complaints.append(f"a reload has left generations {after} after {before}")
        if len(self.runner.statistics().workers) != workers:
            self.complaints.append(f"{how} has left {len(self.runner.statistics().workers)} workers, after {len(before)}")

    async def _wave_of_callers(self, how: str) -> None:
        kinds: list[Callable[[], None]] = [
            partial(self._submit, fn, 0, size) for size in (0, 10, calls.STORED) for fn in (calls.nest_task, calls.nest_thread)
        ]
        kinds += [
            partial(self._submit, fn, 0, size) for size in (0, calls.STORED) for fn in (calls.consume_task, calls.consume_thread)
        ]
        if how == "nested one by one":
            self.background.append(asyncio.create_task(self._one_by_one(kinds)))
            return
        for submit in kinds:
            submit()
        await asyncio.sleep(0)

    async def tell(self) -> None:
        """Who the workers are."""
        say("pids", self.pids())

    async def on(self) -> None:
        """Hear again what workers say."""
        loop = asyncio.get_running_loop()
        for channel in self.deaf:
            if channel.is_open:
                loop.add_reader(channel._bell.fileno(), channel._on_bell)
        self.deaf = []

    async def end(self) -> None:
        """Wait until everything has ended and all workers are ready."""
        await asyncio.gather(*self.background)
        self.background = []
        while self.pending:
            await asyncio.wait(self.pending)
        await self._become_whole()
        say("ended")

    async def _become_whole(self) -> None:
        while not self._is_whole():
            with contextlib.suppress(percore.WorkerDied):  # the strike may still be to come
                await self.runner.run(calls.nothing)

    def _is_whole(self) -> bool:
        """Whether every worker is ready, none of them is about to be killed since its channel is lost, and none drains."""
        workers, members = self.runner.statistics().workers, members_of(self.runner)
        if len(members) != len(workers):
            return False
        return all(worker.state == "ready" for worker in workers) and all(channel_of(member).is_open for member in members)

    async def serve(self) -> None:
        """Show that it is whole again."""
        await self._map(SERVED)
        while True:
            try:
                await self.runner.broadcast(calls.nothing)
                break
            except percore.WorkerDied as death:  # of a fork server that had died, which was heard of when its worker was ready
                if death.started or death.exitcode is not None:
                    raise
                await self._become_whole()
        supervisor = supervisor_of(self.runner)
        arena = arena_of(self.runner)
        say(
            "served",
            {
                "last": self.last,
                "pids": self.pids(),
                "held": sum(len(member.calls) + len(member.parked) for member in supervisor.members) + supervisor.calls.waiting(),
                "arena": arena.in_use,
                "complaints": self.complaints,
                "restarts": self.runner.statistics().restarts,
            },
        )

    async def close(self) -> None:
        """Close the runner, over whatever is under way."""
        await self.runner.aclose()
        await asyncio.gather(*self.background)
        self.background = []
        fault_points.observe = str
        await asyncio.sleep(0)
        say("closed", {"last": self.last, "pending": len(self.pending), "left": self._left(), "complaints": self.complaints})

    def _left(self) -> list[str]:
        more = Counter(fds()) - Counter(self.fds)
        threads = [thread.name for thread in threading.enumerate() if thread is not threading.main_thread()]
        return sorted(more.elements()) + threads

    # Calls

    def _next(self) -> int:
        self.last += 1
        return self.last

    def _submit(self, fn: Callable[..., Any], seconds: float, size: int = 0, argument: int | None = None) -> None:
        uuid = self._next()
        data = () if argument is None else ([calls.pattern(uuid, argument)],)
        self._record(self.runner.submit(fn, self.ledger, uuid, seconds, size, *data), uuid)

    def _stream(self, fn: Callable[..., Any], size: int) -> None:
        uuid = self._next()
        self._record(asyncio.ensure_future(self._consume(fn, uuid, size)), uuid)

    async def _consume(self, fn: Callable[..., Any], uuid: int, size: int) -> int:
        """Take a stream to its end. Its items are right, in order, and whatever ends it comes after the last of them."""
        taken = 0
        async for item in self.runner.options(prefetch=4).stream(fn, self.ledger, uuid, size):
            assert item == calls.part(uuid, taken, size), f"item {taken} of a stream is another one"
            taken += 1
        assert taken == calls.ITEMS, f"a stream ended after {taken} items"
        return calls.answer(uuid)

    def _record(self, future: asyncio.Future[Any], uuid: int | None = None) -> None:
        future.add_done_callback(partial(self._done, uuid or self.last))
        self.pending.add(future)

    def _done(self, uuid: int, future: asyncio.Future[Any]) -> None:
        self.pending.discard(future)
        error = future.exception()
        self._write(uuid, future.result() if error is None else error)

    def _write(self, uuid: int, outcome: object) -> None:
        self.outcomes.write(f"{uuid} {in_words(outcome)}\n")

    async def _one_by_one(self, kinds: list[Callable[[], None]]) -> None:
        for submit in kinds:
            submit()
            while self.pending:
                await asyncio.wait(self.pending)

    async def _map(self, count: int) -> None:
        uuids = [self._next() for _ in range(count)]
        results: list[Any]
        try:
            results = await self.runner.map(calls.item, [self.ledger] * count, uuids, return_exceptions=True)
        except percore.RunnerClosed as error:
            results = [error] * count
        for uuid, result in zip(uuids, results, strict=True):
            self._write(uuid, result)

    # States and strikes

    def pids(self) -> list[int]:
        return [worker.pid for worker in self.runner.statistics().workers if worker.pid is not None]

    def observe(self) -> str:
        """For the places in this process."""
        supervisor = supervisor_of(self.runner)
        held = sum(len(member.calls) for member in supervisor.members)
        full = [channel_of(member).full_count for member in supervisor.members if channel_of(member)._frame is not None]
        arena = arena_of(self.runner)
        words = ["busy" if held > 1 else "idle"]
        if full:
            words.append("full")
        if arena.in_use == arena.count:
            words.append("slots")
        return " ".join([*words, f"full_count={max(full, default=0)}", f"slots={arena.in_use}/{arena.count}"])

    def strike(self, signum: int) -> None:
        """While this process stands at a place, a worker is sent a signal; if that is its death, until it is dead."""
        pids = self.pids()
        if not pids:
            return
        self.strikes += 1
        pid = pids[self.strikes % len(pids)]
        try:
            pidfd = os.pidfd_open(pid)
        except ProcessLookupError:  # the very one whose death is being dealt with
            return
        try:
            signal.pidfd_send_signal(pidfd, signum)
            if signum == signal.SIGKILL:
                select.select([pidfd], [], [])
        finally:
            os.close(pidfd)
        with open(f"{self.folder}/hits", "wb", buffering=0) as hits:
            hits.write(f"struck {signum} {pid}\n".encode())


def in_words(outcome: object) -> str:
    """What has become of a call."""
    if isinstance(outcome, percore.WorkerDied):
        return f"died {int(outcome.started)} {outcome.pid} {outcome.exitcode}"
    if isinstance(outcome, LookupError):
        return f"error {outcome.args[0]}"
    if isinstance(outcome, BaseException):
        return f"{type(outcome).__name__} {outcome}".replace("\n", " ").encode("ascii", "replace").decode()
    if isinstance(outcome, bytes):
        return f"bytes {len(outcome)} {zlib.crc32(outcome)}"
    return f"value {outcome}"


async def main(folder: str) -> None:
    asyncio.get_running_loop().slow_callback_duration = 60
    host = Host(folder)
    asyncio.get_running_loop().set_exception_handler(lambda _, context: host.complaints.append(repr(context)))
    fault_points._ACTIONS["strike"] = partial(host.strike, signal.SIGKILL)
    fault_points._ACTIONS["drain"] = partial(host.strike, signal.SIGTERM)
    orders = Orders(f"{folder}/orders")
    servers.join(host)  # the fork server outlives each runner
    async with percore.Runner(1):  # from now on it is there
        pass
    say("ready")
    while (order := await orders.next())["do"] != "leave":
        do: Callable[..., Awaitable[None]] = getattr(host, order.pop("do"))
        await do(**order)
    servers.give_back(servers.leave(host))
    orders.close()
    host.outcomes.close()


def run(folder: str, name: str) -> int:
    """Run it, and on after each KeyboardInterrupt. How many there were."""
    interrupts = 0
    loop: asyncio.AbstractEventLoop
    if name == "uvloop":
        import uvloop

        loop = uvloop.new_event_loop()
    else:
        loop = asyncio.new_event_loop()
    task = loop.create_task(main(folder))
    while not task.done():
        try:
            loop.run_until_complete(task)
        except KeyboardInterrupt:
            interrupts += 1
    loop.close()
    return interrupts


if __name__ == "__main__":
    logging.getLogger("percore").setLevel(logging.CRITICAL)
    say("interrupts", run(*sys.argv[1:]))
