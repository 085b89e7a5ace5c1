"""Programs whose workers a judge kills: python -m tests.e2e.death_programs STORY LOOP ARGUMENTS

What calls do they tell themselves, in lines on the program's standard output, so that it is the judge's ledger: who has begun what.
"""

import asyncio
import contextlib
import logging
import multiprocessing
import os
import signal
import sys
import threading
import zlib
from collections import Counter
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Any

import percore
from tests.e2e import death_calls as deadly
from tests.e2e import fault_calls as calls
from tests.e2e.fault_programs import fds, run, say
from tests.waiting import until

SERVED = 100


class Deaths(logging.Handler):
    """Counts what percore tells of deaths, beside the usual output of that."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self._news = asyncio.Event()
        logging.getLogger("percore").addHandler(self)
        last_resort = logging.lastResort
        assert last_resort is not None
        logging.getLogger("percore").addHandler(last_resort)

    def emit(self, record: logging.LogRecord) -> None:
        if " died " in record.getMessage():
            self.count += 1
            self._news.set()

    async def reach(self, count: int) -> None:
        while self.count < count:
            self._news.clear()
            await self._news.wait()


@contextlib.asynccontextmanager
async def opened(workers: int, **options: Any) -> AsyncIterator["percore.Runner"]:
    """A runner; when the story is over it serves as before, is closed, and what it has left is told."""
    complaints: list[str] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: complaints.append(str(context)))
    for _ in range(3):  # by then the loop has seen to its own
        await asyncio.sleep(0)
    before = fds(), threading.active_count(), _registered()
    async with percore.Runner(workers, **options) as runner:
        yield runner
        async with asyncio.timeout(20):
            assert await runner.map(calls.accept, range(SERVED)) == [1] * SERVED
    after = fds(), threading.active_count(), _registered()
    new = list((Counter(after[0]) - Counter(before[0])).elements())
    say("left", [complaints, new, after[1] - before[1], after[2] - before[2], _children()])


def _registered() -> int:
    """How many descriptors the loop waits for."""
    count = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):
            if os.readlink(f"/proc/self/fd/{name}") == "anon_inode:[eventpoll]":
                with open(f"/proc/self/fdinfo/{name}", encoding="ascii") as file:
                    count += sum(line.startswith("tfd:") for line in file)
    return count


def _children() -> int:
    with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:
        return len(file.read().split())


def _pids(runner: "percore.Runner") -> list[int | None]:
    return [worker.pid for worker in runner.statistics().workers]


async def _all_ready(runner: "percore.Runner", generation: int) -> None:
    async with asyncio.timeout(20):
        while any(  # noqa: ASYNC110
            (worker.generation, worker.state) != (generation, "ready") for worker in runner.statistics().workers
        ):
            await asyncio.sleep(0)  # there is no event for it


async def _read_byte(path: str) -> None:
    """Wait until the judge gives one."""
    loop = asyncio.get_running_loop()
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK)
    readable = asyncio.Event()
    loop.add_reader(fd, readable.set)
    try:
        while True:
            with contextlib.suppress(BlockingIOError):
                os.read(fd, 1)
                return
            await readable.wait()
            readable.clear()
    finally:
        loop.remove_reader(fd)
        os.close(fd)


# Idle workers


async def idle(births: str) -> None:
    deaths = Deaths()
    async with opened(3, lifespan=partial(deadly.counting_births, births)) as runner:
        say("ready", _pids(runner))
        await deaths.reach(3)
        await _all_ready(runner, 2)
        statistics = runner.statistics()
        say("replaced", [statistics.restarts, statistics.failed, statistics.done])


# Busy ones


def _begin(number: int) -> None:
    os.write(1, f"begun {number} {os.getpid()}\n".encode())


async def _task(number: int, gate: str) -> int:
    _begin(number)
    await _read_byte(gate)
    return zlib.crc32(b"%d" % number)


def _plain(number: int, gate: str) -> int:
    _begin(number)
    with open(gate, "rb", buffering=0) as file:
        file.read(1)
    return zlib.crc32(b"%d" % number)


def _tell_outcome(number: int, future: "asyncio.Future[int]") -> None:
    error = future.exception()
    if error is None:
        say("outcome", [number, "ok", future.result()])
    elif isinstance(error, percore.WorkerDied):
        say("outcome", [number, "died", error.started, error.attempts, error.signal, error.pid])
    else:
        say("outcome", [number, repr(error)])


async def busy(gate: str) -> None:
    """64 coroutines and two plain calls begin in each of two workers; others wait there and here."""
    async with opened(2, concurrency=64, threads=2) as runner:
        numbers = iter(range(1000))
        kinds: list[tuple[Callable[..., Any], int]] = [(_task, 128), (_plain, 4), (_plain, 20), (_task, 20)]
        futures = []
        for fn, count in kinds:
            for number in [next(numbers) for _ in range(count)]:
                future = runner.submit(fn, number, gate)
                future.add_done_callback(partial(_tell_outcome, number))
                futures.append(future)
        await asyncio.sleep(0)
        say("submitted", [len(futures), _pids(runner)])
        await asyncio.wait(futures)
        await asyncio.sleep(0)
        say("ended")


# What calls raise, and how they exit


class _Own(BaseException):
    pass


_RAISED: dict[str, BaseException] = {
    "sys.exit": SystemExit(0),
    "SystemExit": SystemExit("why"),
    "KeyboardInterrupt": KeyboardInterrupt(),
    "GeneratorExit": GeneratorExit(),
    "StopIteration": StopIteration(1),
    "CancelledError": asyncio.CancelledError(),
    "BaseException": _Own("own"),
}


def _raise(kind: str) -> None:
    if kind == "sys.exit":
        sys.exit(0)
    if kind == "StopIteration":
        next(iter(()))
    if kind == "exit":
        os._exit(0)
    if kind == "libc exit":
        calls.exit_by_libc(0)
    raise _RAISED[kind]


async def _raise_in_task(kind: str) -> None:
    if kind == "cancel itself":
        task = asyncio.current_task()
        assert task is not None
        task.cancel()
        await asyncio.sleep(0)
    await asyncio.sleep(0)
    _raise(kind)


async def grid() -> None:
    deaths = Deaths()
    async with opened(1) as runner:
        for fn in (_raise, _raise_in_task):
            for kind in [*_RAISED, *(["cancel itself"] if fn is _raise_in_task else [])]:
                error = await _error(runner, fn, kind)
                told = getattr(error, "type_name", "")
                say("raised", [fn.__name__, kind, type(error).__name__, told, runner.statistics().restarts])
        for count, (fn, kind) in enumerate((fn, kind) for fn in (_raise, _raise_in_task) for kind in ("exit", "libc exit")):
            error = await _error(runner, fn, kind)
            say("exited", [fn.__name__, kind, type(error).__name__, getattr(error, "exitcode", None)])
            await deaths.reach(count + 1)
        mapped = await runner.map(_raise, _RAISED, return_exceptions=True)
        say("mapped", [type(error).__name__ for error in mapped])


async def _error(runner: "percore.Runner", fn: Callable[[Any], Any], kind: object) -> BaseException | None:
    future = runner.submit(fn, kind)
    await asyncio.wait([future])
    return None if future.cancelled() else future.exception()


# Memory


async def _eat(mebibytes: int) -> int:
    return len([b"\1" * (1 << 20) for _ in range(mebibytes)])


async def hungry(gate: str) -> None:
    await _read_byte(gate)
    async with opened(2) as runner:
        other = runner.submit(calls.stay, "/dev/null")
        error = await _error(runner, _eat, 1024)
        say("eaten", [type(error).__name__, getattr(error, "signal", None), str(error), getattr(error, "memory", None)])
        say("beside", other.done())
        other.cancel()


# All at once


async def all_at_once(gate: str) -> None:
    """The replacements are not ready until the judge lets them. Meanwhile, and afterwards, this program does nothing."""
    deaths = Deaths()
    async with opened(4, lifespan=partial(_ready_by, gate)) as runner:
        before = _registered()
        say("ready", [_pids(runner)])
        await deaths.reach(4)
        say("dead")
        await _read_byte(gate)
        await _all_ready(runner, 2)
        say("back", [before, _registered()])
        await _read_byte(gate)


@contextlib.asynccontextmanager
async def _ready_by(gate: str) -> AsyncIterator[None]:
    if percore.current_worker().generation > 1:
        await _read_byte(gate)
    yield


# Large replies


async def large_replies(kills: str) -> None:
    """Eight lanes, each of which asks for one megabyte after the other, while the judge kills one worker after the other."""
    async with opened(3) as runner:
        told = {"ok": 0, "died": 0, "wrong": 0}
        is_over = False

        async def lane(number: int) -> None:
            fn = calls.pattern if number % 2 else calls.pattern_in_task
            for seed in range(number, 1_000_000_000, 8):
                if is_over:
                    return
                try:
                    result = await runner.run(fn, seed, 1_000_000 + number)
                except percore.WorkerDied as error:
                    told["died" if error.started else "wrong"] += 1
                else:
                    told["ok" if result == calls.pattern(seed, 1_000_000 + number) else "wrong"] += 1

        lanes = [asyncio.create_task(lane(number)) for number in range(8)]
        for kill in range(int(kills)):
            before, ok = runner.statistics().restarts, told["ok"]
            say("kill", [_pids(runner)[kill % 3]])
            async with asyncio.timeout(20):
                await until(lambda old, most: runner.statistics().restarts > old and told["ok"] >= most, before, ok + 8)
                await until(lambda: all(worker.state == "ready" for worker in runner.statistics().workers))
        is_over = True
        async with asyncio.timeout(20):
            await asyncio.gather(*lanes)
        say("told", [told, runner.statistics().restarts])


# Children that wedge


def _start_child(daemon: bool) -> int:
    child = multiprocessing.get_context("fork").Process(target=_stay, daemon=daemon)
    child.start()
    assert child.pid is not None
    return child.pid


def _stay() -> None:
    while True:
        signal.pause()


async def wedged(kind: str, gate: str) -> None:
    """A worker that would wait for its child, and so cannot end in order; or that has to end it first."""
    async with opened(1, kill_after=60 if kind == "daemonic" else 0.5) as runner:
        say("child", await runner.run(_start_child, kind == "daemonic"))
        await _read_byte(gate)


if __name__ == "__main__":
    run(sys.argv[2], globals()[sys.argv[1]](*sys.argv[3:]))
