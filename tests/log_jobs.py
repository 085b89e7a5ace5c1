"""What tests of logging have workers do. Light to import, as `jobs`."""

import asyncio
import atexit
import gc
import logging
import os
import select
import sys
import threading
import warnings
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import NoReturn

import percore

log = logging.getLogger("app.jobs")
lock = threading.Lock()
nothing: dict[str, int] = {}


class Unspeakable:
    """What must not be looked at."""

    def __str__(self) -> str:
        raise AssertionError("a record that nobody wants was formatted")


class Odd:
    """Neither a number nor a text."""

    def __str__(self) -> str:
        return "odd, but a text"


async def say(text: str, level: int = logging.WARNING, name: str = "app.jobs") -> None:
    logging.getLogger(name).log(level, "%s", text)


def say_in_thread(text: str) -> None:
    log.warning("%s", text)


async def say_unspeakable() -> str:
    """Log what is not wanted at several levels, and one record that is."""
    log.debug("%s", Unspeakable())
    logging.getLogger("app.quiet").error("%s", Unspeakable())
    logging.getLogger("app.disabled").critical("%s", Unspeakable())
    log.info("wanted")
    return "said"


async def fail_and_tell() -> int:
    try:
        del nothing["missing"]
    except KeyError:
        log.exception("it failed for %s", "a reason", stack_info=True, extra={"shop": 7, "odd": Odd()})
    return os.getpid()


async def count(name: str, n: int) -> None:
    for i in range(n):
        log.warning("%s %d", name, i)


def count_in_thread(name: str, n: int) -> None:
    for i in range(n):
        log.warning("%s %d", name, i)


async def count_until(gate: str) -> int:
    """Log, and let the loop do nothing else, until the gate is open. Return how many records that were."""
    return count_in_thread_until(gate)


def count_in_thread_until(gate: str) -> int:
    poll = select.poll()
    fd = os.open(gate, os.O_RDONLY | os.O_NONBLOCK)
    poll.register(fd, select.POLLIN)
    count = 0
    try:
        while count % 100 or not poll.poll(0):
            log.warning("flood %d", count)
            count += 1
    finally:
        os.close(fd)
    return count


def count_under_lock(n: int) -> None:
    with lock:
        count_in_thread("locked", n)


async def take_lock() -> str:
    """Block the loop until the lock is free, as careless code does."""
    with lock:
        return "had it"


async def warn() -> None:
    warnings.warn("careful", UserWarning, stacklevel=1)


async def warn_strictly() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        warnings.warn("too careful", UserWarning, stacklevel=1)


async def lose_task() -> None:
    async def fail() -> NoReturn:
        raise LookupError("nobody asked this task")

    _ = asyncio.ensure_future(fail())
    del _
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    gc.collect()


async def lose_task_in_a_cycle() -> None:
    """A failed task that only a collection finds, after the last call."""

    async def fail() -> NoReturn:
        raise LookupError("nobody asked this task either")

    gc.disable()
    task = asyncio.ensure_future(fail())
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    cycle: list[object] = [task]
    cycle.append(cycle)


def lose_thread(name: str = "lost") -> None:
    def fail() -> NoReturn:
        raise LookupError("this thread had more to do")

    thread = threading.Thread(target=fail, name=name)
    thread.start()
    thread.join()


def lose_thread_with_own_hook() -> list[str]:
    told: list[str] = []
    before, threading.excepthook = threading.excepthook, lambda args: told.append(str(args.exc_value))
    try:
        lose_thread()
    finally:
        threading.excepthook = before
    return told


def end_thread_by_exit() -> None:
    thread = threading.Thread(target=sys.exit)
    thread.start()
    thread.join()


@asynccontextmanager
async def talkative() -> AsyncIterator[None]:
    log.warning("entering")
    atexit.register(log.warning, "atexit")
    yield
    log.warning("leaving")


@asynccontextmanager
async def very_talkative() -> AsyncIterator[None]:
    yield
    count_in_thread("leaving", 3000)
    atexit.register(count_in_thread, "atexit", 3000)


@asynccontextmanager
async def stubborn() -> AsyncIterator[None]:
    yield
    raise LookupError("it does not want to be left")


def talkative_loop() -> asyncio.AbstractEventLoop:
    log.warning("making a loop")
    return asyncio.new_event_loop()


async def say_and_die(n: int) -> NoReturn:
    for i in range(n):
        log.warning("last words %d", i)
    os._exit(3)


async def configure_and_say(text: str, *, force: bool) -> None:
    logging.basicConfig(format="the worker's own: %(message)s", force=force)
    log.warning("%s", text)


def say_in_fork(text: str) -> int:
    """A process that user code forks in a worker logs, and warns, for itself."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
    if pid == 0:
        log.warning("%s", text)
        warnings.warn(text, UserWarning, stacklevel=1)
        sys.stderr.flush()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class Reporter:
    """Logs when it goes."""

    def __del__(self) -> None:
        log.warning("a __del__")


class Cyclic:
    """As a text: while that is made, something is collected that logs."""

    def __str__(self) -> str:
        Reporter()
        log.warning("a __str__")
        return "cyclic"


async def say_within() -> None:
    log.warning("%s", Cyclic())


async def say_badly(monkey: str = "too", *more: object) -> str:
    log.warning("%d of %s", monkey, "many", *more)
    return "said"


async def who() -> percore.CurrentWorker:
    return percore.current_worker()


async def write_nonsense() -> None:
    """Break this worker's records, and wait for what comes of it."""
    (handler,) = logging.getLogger().handlers
    handler._write(b"nonsense")  # type: ignore[attr-defined]
    await asyncio.Event().wait()
