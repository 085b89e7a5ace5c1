"""Programs that run out of something: python -m tests.e2e.limit_programs STORY ARGUMENTS"""

import asyncio
import contextlib
import faulthandler
import gc
import json
import logging
import os
import random
import resource
import signal
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import percore
from percore._monitor.page import PAGE_NAME
from tests.e2e import limit_calls as calls
from tests.e2e.fault_programs import fds, run, say
from tests.internals import channel_of, current_member, members_of, slots_used, supervisor_of

faulthandler.register(signal.SIGUSR1, all_threads=True)
# What percore warns of is told by the story, if it is part of it: standard error is to stay empty.
logging.getLogger("percore").addHandler(logging.NullHandler())

MEGABYTE = 1 << 20
PADDING = "so that some thousand calls fill a ring, as an address of a page does " * 2


async def serves(runner: "percore.Runner", count: int = 100) -> bool:
    return await runner.map(calls.has_letters_in_task, [bytearray(b"pp")] * count, [3] * count) == [False] * count


def kinds() -> "Counter[str]":
    """What is open, by kind. A runner's page, which comes half a second after its start, does not count."""
    return Counter(name.partition(":[")[0] for name in fds() if PAGE_NAME not in name)


async def outcome_of(future: "asyncio.Future[Any]") -> str:
    """What a call has ended with: its value as text, or the name of its error."""
    await asyncio.wait([future])
    error = future.exception()
    return str(future.result()) if error is None else type(error).__name__


# T3: recycling, with deaths and closing mixed in


def recycled(loop: str, folder: str, seed: str, shapes: str) -> None:
    run(loop, _recycled(folder, seed, json.loads(shapes)))


async def _recycled(folder: str, seed: str, shapes: list[Any]) -> None:
    from percore._engines.processes.fork_server_launcher import ForkServerLauncher  # its workers do without

    launcher = ForkServerLauncher.open()  # one for all of them: starting one takes longer than most of these
    async with percore.Runner(1):
        pass
    for shape in shapes:
        story = Recycling(folder, seed, *shape)
        say("shape", await story.told())
    await launcher.aclose()
    say("left", fds())


class Recycling:
    """A runner whose workers are replaced all the time, killed at random, and that is closed in the midst of it."""

    def __init__(self, folder: str, seed: str, limit: int, workers: int, count: int, is_cut: bool) -> None:
        self.name = f"{limit}-{workers}"
        self._ledger = f"{folder}/ledger-{self.name}"
        self._outcomes = f"{folder}/outcomes-{self.name}"
        self._chance = random.Random(f"{seed} {self.name}")
        self._limit, self._workers, self._count, self._is_cut = limit, workers, count, is_cut
        strikes = self._chance.sample(range(count // 10, count * 4 // 10), max(1, count // 100))
        self._strikes = sorted(strikes, reverse=True)
        self._ended = 0
        self._half = asyncio.Event()
        self._runner = percore.Runner(workers, max_tasks_per_worker=limit, concurrency=4, threads=2)

    async def told(self) -> dict[str, Any]:
        async with self._runner as runner:
            fns: list[Any] = [calls.enter, calls.enter_in_task]
            futures = [runner.submit(fns[number % 2], self._ledger, number) for number in range(self._count)]
            for future in futures:
                future.add_done_callback(self._on_end)
            if self._is_cut:
                await self._half.wait()
                await runner.aclose(grace=0)
            else:
                await asyncio.wait(futures)
                while min(worker.generation for worker in runner.statistics().workers) < 3:
                    futures.append(runner.submit(calls.enter_in_task, self._ledger, len(futures)))
                    await asyncio.wait(futures[-1:])
                await serves(runner)
        self._write(futures)
        return {
            "name": self.name,
            "cut": self._is_cut,
            "strikes left": len(self._strikes),
            "members": len(members_of(runner)),
        }

    def _on_end(self, _: object) -> None:
        self._ended += 1
        if self._ended == self._count // 2:
            self._half.set()
        supervisor = supervisor_of(self._runner)
        if self._strikes and self._ended >= self._strikes[-1] and not supervisor.phase.is_closing:
            ready = [member for member in supervisor.members if member.is_ready]
            if ready:
                self._strikes.pop()
                self._chance.choice(ready).worker.kill(self._chance.choice([signal.SIGKILL, signal.SIGKILL, signal.SIGTERM]))

    def _write(self, futures: "list[asyncio.Future[Any]]") -> None:
        lines = [f"{number} {self._told_of(number, future)}\n" for number, future in enumerate(futures)]
        Path(self._outcomes).write_text("".join(lines))

    def _told_of(self, number: int, future: "asyncio.Future[Any]") -> str:
        assert future.done()
        error = future.exception()
        if isinstance(error, percore.WorkerDied):
            return f"WorkerDied {error.started}"
        return type(error).__name__ if error is not None else "value" if future.result() == 7 * number else "wrong"


# R3: a worker that reads nothing


def stopped(loop: str, count: str, max_pending: str) -> None:
    run(loop, _stopped(int(count), int(max_pending) or None))


async def _stopped(count: int, max_pending: int | None) -> None:
    """The judge stops the worker before the calls, and continues it after them."""
    async with percore.Runner(1, concurrency=100_000, max_pending=max_pending) as runner:
        await _judge_has("stop", await runner.run(calls.pid))
        send: Callable[..., Any] = runner.submit if max_pending is None else runner.run
        futures = [asyncio.ensure_future(send(calls.twice_in_task, number, PADDING)) for number in range(count)]
        for _ in range(3):
            await asyncio.sleep(0)
        statistics = runner.statistics()
        member = current_member(runner)
        assert member is not None
        say("submitted", {"accepted": statistics.running + statistics.queued, "full": channel_of(member).full_count})
        results = await asyncio.gather(*futures)
        say("results", results == [2 * number for number in range(count)])
        say("serves", await serves(runner))


async def _judge_has(word: str, value: object) -> None:
    """Tell, and go on when the judge has answered with SIGUSR2."""
    loop = asyncio.get_running_loop()
    heard = asyncio.Event()
    loop.add_signal_handler(signal.SIGUSR2, heard.set)
    say(word, value)
    await heard.wait()
    loop.remove_signal_handler(signal.SIGUSR2)


# M2: a map that is open when its loop closes


def left_open(loop: str) -> None:
    run(loop, _left_open())
    gc.collect()
    say("end")


def _numbers() -> Iterator[int]:
    number = 0
    try:
        while True:
            yield number
            number += 1
    finally:
        say("closed")


async def _left_open() -> None:
    runner = percore.Runner(2)
    await runner.start()
    stream = aiter(runner.map(calls.twice_in_task, _numbers(), window=5))
    say("first", await anext(stream))
    _kept.append(stream)


_kept: list[Any] = []


# R4: less memory than a message needs


def short_of_memory(loop: str, cgroup: str) -> None:
    """Within that memory cgroup, or, without one, within a limit of the address space."""
    if cgroup:
        Path(cgroup, "cgroup.procs").write_text(str(os.getpid()))
        run(loop, _short_of_memory(16 << 30, 10 << 30))
    else:
        resource.setrlimit(resource.RLIMIT_AS, (4 << 30, 4 << 30))
        run(loop, _short_of_memory(1 << 30, 3 << 30))


async def _short_of_memory(max_message: int, size: int) -> None:
    async with percore.Runner(1, max_message=max_message) as runner:
        pid = await runner.run(calls.pid)
        say("up", await outcome_of(runner.submit(calls.zeros, size)))
        try:
            large = calls.zeros(size)
        except MemoryError:
            say("down", "MemoryError")
        else:
            say("down", await outcome_of(runner.submit(calls.length, large)))
        for _ in range(3):  # what fits goes through, again and again
            data = calls.with_letters(20 * MEGABYTE)
            assert await runner.run(calls.has_letters, data, len(data))
            assert calls.has_letters(await runner.run(calls.with_letters, len(data)), len(data))
        say("serves", await serves(runner) and await runner.run(calls.pid) == pid and runner.statistics().restarts == 0)
        say("slots", slots_used(runner))


# R5: systems that give little or nothing


def without(loop: str, *lacks: str) -> None:
    """In a system that lacks these; then what every program does."""
    for lack in lacks:
        _LACKS[lack]()
    run(loop, _usual())


async def _usual() -> None:
    before = fds()
    try:
        async with percore.Runner(2) as runner:
            for size in (0, 1000, 70_000, MEGABYTE, 66 * MEGABYTE):
                data = calls.with_letters(size)
                up, down = runner.submit(calls.with_letters, size), runner.submit(calls.has_letters, data, size)
                await asyncio.wait([up])
                error = up.exception()
                say("size", [size, await outcome_of(down), type(error).__name__ if error else str(up.result() == data)])
            say("serves", await serves(runner))
    except (percore.StartupFailed, OSError) as error:
        say("refused", f"{type(error).__name__}: {error}")
    gc.collect()
    say("left", sorted(set(fds()) - set(before)))


def _in_mounts(*commands: str) -> Callable[[], None]:
    """Mounts of this program's own."""

    def do() -> None:
        import ctypes  # seldom needed, and not cheap to import

        if ctypes.CDLL(None, use_errno=True).unshare(0x00020000):  # CLONE_NEWNS
            raise OSError(ctypes.get_errno(), "unshare")
        for command in ("mount --make-rprivate /", *commands):
            subprocess.run([os.path.expandvars(word) for word in command.split()], check=True)

    return do


def _no_memfd(code: int) -> Callable[[], None]:
    """memfd_create fails so, here and in every process that comes of this one."""
    number = {"x86_64": 319, "aarch64": 279}[os.uname().machine]
    program = [
        (0x20, 0, 0, 0),  # load the number of the system call
        (0x15, 0, 1, number),  # another one: to the last line
        (0x06, 0, 0, 0x00050000 | code),  # fail
        (0x06, 0, 0, 0x7FFF0000),  # allow
    ]

    def do() -> None:
        import ctypes

        lines = ctypes.create_string_buffer(b"".join(struct.pack("=HBBI", *line) for line in program))
        filter_ = struct.pack("HxxxxxxP", len(program), ctypes.addressof(lines))
        libc = ctypes.CDLL(None, use_errno=True)
        if libc.prctl(38, 1, 0, 0, 0) or libc.prctl(22, 2, filter_, 0, 0):  # no new privileges, SECCOMP_MODE_FILTER
            raise OSError(ctypes.get_errno(), "prctl")

    return do


_LACKS = {
    "shm 64k": _in_mounts("mount -t tmpfs -o size=64k none /dev/shm"),
    "shm readonly": _in_mounts("mount -t tmpfs -o ro,size=64k none /dev/shm"),
    "shm noexec": _in_mounts("mount -t tmpfs -o noexec,size=64k none /dev/shm"),
    "shm absent": _in_mounts("umount -l /dev/shm"),
    "tmp 64m": _in_mounts("mount -t tmpfs -o size=64m none $TMPDIR"),
    "tmp 1m": _in_mounts("mount -t tmpfs -o size=1m none $TMPDIR"),
}


def refused(loop: str, code: str, *lacks: str) -> None:
    """As `without`, where memfd_create fails; percore looks for it when it is imported, so another process goes on."""
    for lack in lacks:
        _LACKS[lack]()
    _no_memfd(int(code))()
    os.execv(sys.executable, [sys.executable, "-m", "tests.e2e.limit_programs", "without", loop])


# R6: descriptors


@contextlib.contextmanager
def _descriptors(spare: int) -> Any:
    """Let this process open so many more."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    used = {int(name) for name in os.listdir("/proc/self/fd")}
    free = (number for number in range(limits[0]) if number not in used)
    allowed = 0
    for _ in range(spare + 1):
        allowed = next(free)
    resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def no_descriptors_at_start(loop: str, method: Any, most: str) -> None:
    run(loop, _no_descriptors_at_start(method, int(most)))


async def _no_descriptors_at_start(method: Any, most: int) -> None:
    async with percore.Runner(1, start_method=method):  # what stays open for good is open now
        pass
    before = kinds()
    for spare in range(most):
        runner = percore.Runner(1, start_method=method)
        try:
            with _descriptors(spare):
                await runner.start()
            told = str(await serves(runner))
        except (percore.StartupFailed, OSError) as error:
            told = type(error).__name__
        await runner.aclose()
        say("start", [spare, told, sorted((kinds() - before).elements())])


def no_descriptors_at_respawn(loop: str, method: Any, most: str) -> None:
    run(loop, _no_descriptors_at_respawn(method, int(most)))


class _Warned(logging.Handler):
    """Sets the event with the first warning that names this."""

    def __init__(self, word: str) -> None:
        super().__init__()
        self.word = word
        self.event = asyncio.Event()

    def emit(self, record: logging.LogRecord) -> None:
        if self.word in record.getMessage():
            self.event.set()


async def _no_descriptors_at_respawn(method: Any, most: int) -> None:
    async with percore.Runner(1, start_method=method) as runner:
        before = kinds()
        for spare in range(most):
            warned = _Warned("could not be started")
            logging.getLogger("percore").addHandler(warned)
            hearing = asyncio.ensure_future(warned.event.wait())
            with _descriptors(spare):
                current_member(runner).worker.kill()  # type: ignore[union-attr]
                call: asyncio.Future[Any] = runner.submit(calls.pid)
                either: list[asyncio.Future[Any]] = [call, hearing]
                await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            hearing.cancel()
            logging.getLogger("percore").removeHandler(warned)
            answered, served = (await outcome_of(call)).isdigit(), await serves(runner)
            say("respawn", [spare, warned.event.is_set(), answered, served, sorted((kinds() - before).elements())])


def no_descriptors_for_results(loop: str) -> None:
    run(loop, _no_descriptors_for_results())


async def _no_descriptors_for_results() -> None:
    async with percore.Runner(2) as runner:
        with _descriptors(0):
            for size in (MEGABYTE, 6 * MEGABYTE):
                data = calls.with_letters(size)
                assert await runner.map(calls.has_letters, [data] * 5, [size] * 5) == [True] * 5
                assert await runner.map(calls.with_letters, [size] * 5) == [data] * 5
        say("serves", await serves(runner))


# L3: threads that never end


def hogged(loop: str, wire: str, method: Any) -> None:
    run(loop, _hogged(wire, method))


async def _hogged(wire: str, method: Any) -> None:
    asyncio.get_running_loop().set_default_executor(_full_executor())
    runner = percore.Runner(1, threads=2, kill_after=0.5, start_method=method)
    await runner.start()
    pid = await runner.run(calls.exhaust_default_executor, 40)
    say("plain", await runner.run(calls.pid) == pid)
    hogs: list[asyncio.Future[Any]] = [runner.submit(calls.never, wire) for _ in range(2)]
    say("hogs")
    behind: asyncio.Future[Any] = runner.submit(calls.pid)
    say("coroutines", await runner.map(calls.twice_in_task, range(100)) == [2 * number for number in range(100)])
    cancelled = runner.submit(calls.stay)
    cancelled.cancel()
    say("cancelled", cancelled.cancelled() and await runner.run(calls.pid_of_task) == pid)
    say("usage", len((await runner.usage()).processes))
    say("behind", behind.done())
    await runner.aclose(grace=0)
    say("closed", [await outcome_of(future) for future in (*hogs, behind)])
    os._exit(0)  # the program's own hogs would hold it up


def _full_executor() -> Any:
    from concurrent.futures import ThreadPoolExecutor

    executor = ThreadPoolExecutor(1)
    executor.submit(signal.sigwait, {signal.SIGUSR2})
    return executor


def waiting_for_itself(loop: str, wire: str) -> None:
    run(loop, _waiting_for_itself(wire))


async def _waiting_for_itself(wire: str) -> None:
    """A coroutine waits for a plain call of its own worker, whose threads are all taken."""
    async with percore.Runner(1, threads=1, kill_after=0.5) as runner:
        hog = runner.submit(calls.never, wire)
        say("hogs")
        say("through", await runner.run(calls.by_default_executor, -3))
        await runner.aclose(grace=0)
        say("closed", await outcome_of(hog))


# Peers


def ends(loop: str, how: str) -> None:
    """An ordinary program that ends in order, by an error, or by a kill."""
    run(loop, _ends(how))


async def _ends(how: str) -> None:
    async with percore.Runner(2) as runner:
        data = calls.with_letters(3 * MEGABYTE)
        assert await runner.map(calls.has_letters, [data] * 4, [len(data)] * 4) == [True] * 4
        say("ready")
        if how == "worker":
            current_member(runner).worker.kill()  # type: ignore[union-attr]
            assert await serves(runner)
        elif how == "exit":
            os._exit(3)
        elif how == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif how == "open":
            sys.exit(0)


if __name__ == "__main__":
    globals()[sys.argv[1]](*sys.argv[2:])
