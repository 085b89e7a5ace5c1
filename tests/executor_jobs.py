"""What tests have executors do, besides tests.jobs."""

import asyncio
import gc
import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, ClassVar, NoReturn

import percore
from tests import jobs

_state: dict[str, Any] = {}
_local = threading.local()


def initialize(name: str, value: Any) -> None:
    _state[name] = (*_state.get(name, ()), value)


def initialized(name: str) -> Any:
    return _state.get(name)


class Garbage:
    """Garbage that only a collection finds."""

    collected: ClassVar[list[int]] = []
    """The processes that have collected some."""

    def __init__(self) -> None:
        self._itself = self

    def __del__(self) -> None:
        self.collected.append(os.getpid())


def leave_garbage() -> None:
    Garbage()


def garbage_collected() -> list[int]:
    return Garbage.collected


def tell_of_collections(path: str) -> None:
    """From now on, leave a file at the first collection of all garbage in this process."""

    def tell(phase: str, info: dict[str, int]) -> None:
        if (phase, info["generation"]) == ("start", 2):
            with open(path, "wb"):
                pass

    gc.callbacks.append(tell)


def initialize_thread(log: str, name: str) -> None:
    _local.name = name
    jobs.say(log, name)


def of_thread() -> str:
    return str(_local.name)


def fail_to_initialize(*_: Any) -> NoReturn:
    raise LookupError("the initializer's own")


class Heavy:
    """An object of 16 MB that can be watched."""

    def __init__(self) -> None:
        self.data = bytes(16 << 20)


def heavy() -> Heavy:
    return Heavy()


def put(value: Any) -> None:
    _state["queue"][0].put(value)


def pid() -> int:
    return os.getpid()


def exit_now(code: int) -> NoReturn:
    os._exit(code)


class TooLate(Exception):
    """Raised by a signal handler."""


def _raise(signum: int, _frame: object) -> NoReturn:
    raise TooLate(signal.Signals(signum).name)


def raise_by_signal() -> tuple[str, bool]:
    """Run a signal handler in this call."""
    before = signal.signal(signal.SIGUSR1, _raise)
    try:
        signal.raise_signal(signal.SIGUSR1)
    except TooLate as error:
        return str(error), threading.current_thread() is threading.main_thread()
    finally:
        signal.signal(signal.SIGUSR1, before)
    return "", False


async def araise_by_signal() -> tuple[str, bool]:
    return raise_by_signal()


def leave_a_handler() -> int:
    """Leave a signal handler behind that raises, and return the pid."""
    signal.signal(signal.SIGUSR1, _raise)
    return os.getpid()


def take_sigterm(log: str) -> int:
    """Handle SIGTERM from now on, and return the pid."""
    signal.signal(signal.SIGTERM, lambda _signum, _frame: jobs.say(log, "handled"))
    return os.getpid()


def take_the_wakeup_fd() -> int:
    signal.set_wakeup_fd(-1)
    return os.getpid()


def run_a_loop() -> Any:
    return asyncio.run(jobs.aecho("from its own loop"))


@asynccontextmanager
async def fragile() -> AsyncIterator[asyncio.Event]:
    """A lifespan that fails once the event is set."""
    async with asyncio.TaskGroup() as group:
        event = asyncio.Event()

        async def fail() -> NoReturn:
            await event.wait()
            raise LookupError("the lifespan's own")

        task = group.create_task(fail())
        yield event
        task.cancel()


async def end_the_lifespan() -> None:
    percore.state(asyncio.Event).set()


def kill_itself(signum: int) -> None:
    os.kill(os.getpid(), signum)
    time.sleep(60)  # until it hits


def raise_it(error: BaseException) -> NoReturn:
    raise error


def overlap(log: str, gate: str) -> int:
    """How many of these ran at once when this one began."""
    _state["running"] = _state.get("running", 0) + 1
    try:
        number: int = _state["running"]
        jobs.say(log, number)
        jobs.pass_gate(gate)
        return number
    finally:
        _state["running"] -= 1


@contextmanager
def session() -> Iterator[str]:
    yield "session"


@asynccontextmanager
async def slow_to_leave(log: str, gate: str) -> AsyncIterator[None]:
    yield
    jobs.say(log, "leaving")
    await jobs.apass_gate(gate)


def session_state() -> Any:
    return percore.state(str)


async def asession_state() -> Any:
    return percore.state(str)


def numbers() -> Iterator[int]:
    yield 1


class DiesWhenLoaded:
    """Cannot be unpickled: that ends the process."""

    def __reduce__(self) -> Any:
        return os._exit, (3,)


class FailsWhenLoaded:
    """Cannot be unpickled: that raises."""

    def __reduce__(self) -> Any:
        return raise_it, (LookupError("not to be loaded"),)


def fails_when_loaded() -> FailsWhenLoaded:
    return FailsWhenLoaded()


SIGKILL = int(signal.SIGKILL)
