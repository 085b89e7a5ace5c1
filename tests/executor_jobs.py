"""What tests have executors do, besides tests.jobs."""

import os
import signal
import threading
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any, NoReturn

import percore
from tests import jobs

_state: dict[str, Any] = {}
_local = threading.local()


def initialize(name: str, value: Any) -> None:
    _state[name] = (*_state.get(name, ()), value)


def initialized(name: str) -> Any:
    return _state.get(name)


def initialize_thread(log: str, name: str) -> None:
    _local.name = name
    jobs.say(log, name)


def of_thread() -> str:
    return str(_local.name)


def fail_to_initialize(*_: Any) -> NoReturn:
    raise LookupError("the initializer's own")


def put(value: Any) -> None:
    _state["queue"][0].put(value)


def pid() -> int:
    return os.getpid()


def exit_now(code: int) -> NoReturn:
    os._exit(code)


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
