"""Objects that misbehave while they are pickled, unpickled or collected, and calls that take, give and raise them.

Light to import, as `tests.jobs`. What a maker makes does in any process the same; whether it is an argument, a result or an
exception is the test's choice.
"""

import gc
import os
import signal
import sys
import threading
from collections.abc import Callable
from functools import cache
from types import ModuleType
from typing import Any, NoReturn

import percore
from percore._transport.slots import INLINE_LIMIT, SlotWriter
from percore._worker.server import Server
from tests import jobs

LARGE = jobs.pattern(INLINE_LIMIT + 50_000)
"""Needs a slot. What is pickled behind it fails with the slot in hand."""


# What cannot be pickled


class BadWords(Exception):
    """An error that cannot be told."""

    def __str__(self) -> str:
        raise RuntimeError("no words")

    __repr__ = __str__


class BadWordsAtAll(BaseException):
    """As BadWords, and worse."""

    def __repr__(self) -> str:
        raise SystemExit("no words")

    __str__ = __repr__


class Raises:
    """Raises when it is pickled."""

    def __init__(self, error: type[BaseException]) -> None:
        self.error = error

    def __reduce__(self) -> NoReturn:
        raise self.error("not to be pickled")


@cache
def deep() -> list[Any]:
    """Nested deeper than anyone can recurse. Made once, since that takes its time."""
    nested: list[Any] = []
    for _ in range(100_000):
        nested = [nested]
    return nested


UNPICKLABLE: dict[str, Callable[[], Any]] = {
    "lock": threading.Lock,
    "raises": lambda: Raises(ValueError),
    "exits": lambda: Raises(SystemExit),
    "stops": lambda: Raises(StopIteration),
    "recurses": lambda: Raises(RecursionError),
    "lacks memory": lambda: Raises(MemoryError),
    "cannot be told": lambda: Raises(BadWords),
    "cannot be told at all": lambda: Raises(BadWordsAtAll),
    "deep": deep,
}


# What can be pickled, and not be read


class Reads:
    """Calls this when it is unpickled."""

    def __init__(self, fn: Callable[..., Any], *args: Any) -> None:
        self.call = fn, args

    def __reduce__(self) -> tuple[Any, ...]:
        return self.call


def throw(error: type[BaseException]) -> NoReturn:
    raise error("not to be read")


def foreign() -> Any:
    """An object of a module that no other process can import."""
    name = f"made_in_{os.getpid()}"
    module = sys.modules.get(name)
    if module is None:
        module = sys.modules[name] = ModuleType(name)
        module.Thing = type("Thing", (), {"__module__": name})  # type: ignore[attr-defined]
    return module.Thing()


UNREADABLE: dict[str, Callable[[], Any]] = {
    "raises": lambda: Reads(throw, ValueError),
    "exits": lambda: Reads(throw, SystemExit),
    "stops": lambda: Reads(throw, StopIteration),
    "cannot be told": lambda: Reads(throw, BadWords),
    "cannot be told at all": lambda: Reads(throw, BadWordsAtAll),
    "is of no module": foreign,
}


# What kills


def segv() -> NoReturn:
    import faulthandler

    faulthandler.disable()  # would report what is meant
    signal.pthread_kill(threading.get_ident(), signal.SIGSEGV)  # sent to the process, it would arrive some steps later
    raise AssertionError("it is dead")


def exit_3() -> NoReturn:
    os._exit(3)


DEADLY: dict[str, Callable[[], NoReturn]] = {"exits": exit_3, "crashes": segv}


class Kills:
    """Ends the process that pickles it."""

    def __init__(self, how: str) -> None:
        self.how = how

    def __reduce__(self) -> NoReturn:
        DEADLY[self.how]()


# Exceptions


class TwoArguments(Exception):
    def __init__(self, url: str, status: int) -> None:
        super().__init__(f"{url}: {status}")
        self.url = url
        self.status = status


class ReducesToNumber(Exception):
    def __reduce__(self) -> tuple[Any, ...]:
        return id, (42,)


class ReduceRaises(Exception):
    def __reduce__(self) -> NoReturn:
        raise SystemExit("not to be pickled")


class Unreadable(Exception):
    def __reduce__(self) -> tuple[Any, ...]:
        return throw, (SystemExit,)


def _no_class(_: object) -> NoReturn:
    raise RuntimeError("no class")


class OfNoClass(Exception):
    """Even isinstance() fails on it."""

    __class__ = property(_no_class)


class _Nameless(type):
    def __getattribute__(cls, name: str) -> Any:
        if name in ("__module__", "__qualname__", "__name__"):
            raise RuntimeError(f"no {name}")
        return super().__getattribute__(name)


class Nameless(Exception, metaclass=_Nameless):
    """Its class has no name."""


def nameless() -> BaseException:
    """A class without a name cannot be sent by it."""
    return Nameless("the message")


def own_cause() -> BaseException:
    error = ValueError("the message")
    error.__cause__ = error
    return error


def with_lock() -> BaseException:
    error = ValueError("the message")
    error.lock = threading.Lock()  # type: ignore[attr-defined]
    return error


def with_bad_notes() -> BaseException:
    error = ValueError("the message")
    error.__notes__ = [threading.Lock()]  # type: ignore[list-item]
    return error


EXCEPTIONS: dict[str, tuple[Callable[[], BaseException], str]] = {
    # What raises, and as what it arrives.
    "two arguments": (lambda: TwoArguments("the message", 404), "TwoArguments"),
    "large": (lambda: ValueError("the message", LARGE), "ValueError"),
    "without words": (BadWords, "BadWords"),
    "its own cause": (own_cause, "ValueError"),
    "a group": (lambda: ExceptionGroup("the message", [ValueError(1), TwoArguments("x", 2)]), "ExceptionGroup"),
    "stops": (lambda: StopIteration("the message"), "RuntimeError"),
    "reduce raises": (lambda: ReduceRaises("the message"), "RemoteError"),
    "reduces to a number": (lambda: ReducesToNumber("the message"), "RemoteError"),
    "unreadable": (lambda: Unreadable("the message"), "RemoteError"),
    "with a lock": (with_lock, "RemoteError"),
    "with bad notes": (with_bad_notes, "RemoteError"),
    "an interrupt in a group": (lambda: BaseExceptionGroup("the message", [KeyboardInterrupt()]), "RemoteError"),
    "no Exception": (lambda: BaseException("the message"), "RemoteError"),
    "exits": (lambda: SystemExit("the message"), "RemoteError"),
    "of no class": (lambda: OfNoClass("the message"), "RemoteError"),
    "nameless": (nameless, "RemoteError"),
}


# Calls. The last argument is the place, as that of an item of a map


def take(_thing: Any, place: int = 0) -> int:
    return place


async def atake(_thing: Any, place: int = 0) -> int:
    return place


def _made(kind: str, name: str, place: int) -> Any:
    thing = {"unpicklable": UNPICKLABLE, "unreadable": UNREADABLE}[kind][name]()
    return [LARGE, thing] if place % 2 else [thing]


def give(kind: str, name: str, place: int) -> Any:
    """Something that cannot travel; every other one behind large data."""
    return _made(kind, name, place)


async def agive(kind: str, name: str, place: int) -> Any:
    return _made(kind, name, place)


def fail_as(name: str, _place: int = 0) -> NoReturn:
    raise EXCEPTIONS[name][0]()


async def afail_as(name: str, _place: int = 0) -> NoReturn:
    raise EXCEPTIONS[name][0]()


def give_kills(how: str, place: int = 0) -> Any:
    return [LARGE, Kills(how)] if place % 2 else Kills(how)


async def agive_kills(how: str, place: int = 0) -> Any:
    return give_kills(how, place)


def mixed(places: str, kind: str, place: int) -> Any:
    """Of a map: at every third place something that cannot travel, or an exception; else the place."""
    if place % 3:
        return place
    names = places.split("|")
    name = names[place // 3 % len(names)]
    return fail_as(name) if kind == "exception" else _made(kind, name, place)


# What is left


def left_behind() -> dict[str, int]:
    """What this worker holds of calls that have ended, by where it holds it."""
    found = {"slots": 0, "calls": 0}
    for thing in gc.get_objects():
        if type(thing) is SlotWriter:
            found["slots"] += thing.in_use + len(thing._waiters)
        elif type(thing) is Server:
            parts = (
                thing._tasks.by_id,
                thing._tasks._cancelled,
                thing._tasks.handed_over,
                thing._terms.waiting,
                thing._plain._batches,
                thing._threads.waiting,
            )
            found["calls"] += sum(map(len, parts))
    return found


# Objects that call percore from where they are pickled, read or collected


class OfState:
    """Asks percore where it is, whenever it can: in a worker, or in none."""

    seen: list[str]

    def __init__(self) -> None:
        self.seen = [_ask()]

    def __getstate__(self) -> dict[str, Any]:
        return {"seen": [*self.seen, _ask()]}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.seen = [*state["seen"], _ask()]

    def __del__(self) -> None:
        _ask()


def _ask() -> str:
    try:
        return f"worker {percore.current_worker().index}"
    except RuntimeError:
        return "no worker"


def keep_state(thing: OfState) -> OfState:
    return thing


async def akeep_state(thing: OfState) -> OfState:
    return thing


class StartsRunner:
    """Makes a runner where it is read, and uses it without starting it."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _use_runner, ()


def _use_runner() -> str:
    runner = percore.Runner(1)
    try:
        _ = runner.submit(abs, -1)
    except percore.RunnerClosed as error:
        return str(error)
    raise AssertionError("it was not started")


def echo_words(words: str) -> str:
    return words


# Callables


class Heavy:
    """Its methods take it along. Counts how often it was pickled here."""

    def __init__(self) -> None:
        self.data = LARGE
        self.times_pickled = 0

    def __getstate__(self) -> dict[str, Any]:
        self.times_pickled += 1
        return self.__dict__

    def add(self, value: int) -> int:
        return value + min(1, len(self.data))

    async def aadd(self, value: int) -> int:
        return self.add(value)


def give_lambda(number: int) -> Callable[[int], int]:
    return lambda value: value + number
