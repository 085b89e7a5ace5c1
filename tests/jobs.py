"""What tests have workers do. Light to import: a worker needs the standard library and percore's own half alone.

Nothing here waits for time. A call waits at a *gate* and tells a *log*, both named pipes of the test (see contract.pipes).
"""

import asyncio
import os
import select
import struct
import sys
import threading
from collections.abc import AsyncIterator, Callable, Coroutine, Generator, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from types import FrameType
from typing import Any, NoReturn

import percore

# Gates and logs


def say(log: str, text: object) -> None:
    """Write one line into a log: whole, also between other writers."""
    fd = os.open(log, os.O_WRONLY)
    try:
        os.write(fd, f"{text}\n".encode())
    finally:
        os.close(fd)


def pass_gate(gate: str) -> None:
    """Block the thread until the gate is open."""
    fd = os.open(gate, os.O_RDONLY | os.O_NONBLOCK)
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        poll.poll()
    finally:
        os.close(fd)


async def apass_gate(gate: str) -> None:
    """Wait until the gate is open."""
    loop = asyncio.get_running_loop()
    fd = os.open(gate, os.O_RDONLY | os.O_NONBLOCK)
    is_open = loop.create_future()
    loop.add_reader(fd, _set, is_open)
    try:
        await is_open
    finally:
        loop.remove_reader(fd)
        os.close(fd)


def _set(waiter: "asyncio.Future[None]") -> None:
    if not waiter.done():
        waiter.set_result(None)


# Simple calls


def echo(value: Any = None) -> Any:
    return value


async def aecho(value: Any = None) -> Any:
    return value


def add(left: Any, right: Any = 0, *, scale: int = 1) -> Any:
    return (left + right) * scale


async def aadd(left: Any, right: Any = 0, *, scale: int = 1) -> Any:
    return (left + right) * scale


def append(items: list[Any], item: Any) -> list[Any]:
    items.append(item)
    return items


async def aappend(items: list[Any], item: Any) -> list[Any]:
    items.append(item)
    return items


def length(data: bytes) -> int:
    return len(data)


async def alength(data: bytes) -> int:
    return len(data)


def pattern(size: int) -> bytes:
    """Bytes of which no two neighbouring pages are alike."""
    return (b"%09d" % size * (size // 9 + 1))[:size]


async def apattern(size: int) -> bytes:
    return pattern(size)


def later(value: Any) -> Coroutine[Any, Any, Any]:
    """A plain function that returns an awaitable."""
    return aecho(value)


def where() -> percore.CurrentWorker:
    return percore.current_worker()


async def awhere() -> percore.CurrentWorker:
    return percore.current_worker()


# Calls that tell and wait


def wait(log: str, gate: str, value: Any = None) -> Any:
    """Say `value`, wait at the gate, return it."""
    say(log, value)
    pass_gate(gate)
    return value


async def await_(log: str, gate: str, value: Any = None) -> Any:
    """As `wait`; says "cancelled ..." when it is."""
    say(log, value)
    try:
        await apass_gate(gate)
    except asyncio.CancelledError:
        say(log, f"cancelled {value}")
        raise
    return value


async def await_pattern(log: str, gate: str, size: int) -> bytes:
    """As `await_`, for large results."""
    await await_(log, gate, size)
    return pattern(size)


async def block_loop(log: str, gate: str) -> None:
    """Hold the worker's loop until the gate is open."""
    say(log, "blocked")
    pass_gate(gate)


async def block_loop_in_task(log: str, gate: str) -> None:
    """Hold the worker's loop by a task of its own."""
    await asyncio.create_task(block_loop(log, gate))


async def block_until(path: str) -> None:
    """Hold the loop until somebody writes to this pipe."""
    with open(path) as pipe:  # noqa: ASYNC230  # a worker's loop that is blocked is what is told
        pipe.read()


def hold_gil(log: str, gate: str) -> None:
    """Hold the GIL for ever, as a C function can."""
    import ctypes  # seldom needed, and not cheap to import

    read_end, _ = os.pipe()
    say(log, gate)
    ctypes.PyDLL(None).read(read_end, ctypes.create_string_buffer(1), 1)


def hold_gil_until(log: str, gate: str) -> None:
    """Hold the GIL, in C code, until the gate is open."""
    import ctypes

    libc = ctypes.PyDLL(None)  # its functions keep the GIL
    fd, log_fd = os.open(gate, os.O_RDONLY | os.O_NONBLOCK), os.open(log, os.O_WRONLY)
    waiting = ctypes.create_string_buffer(struct.pack("ihh", fd, select.POLLIN, 0))
    sys.setswitchinterval(1000)  # no other thread runs between the next two calls
    libc.write(log_fd, b"holding\n", 8)
    while libc.poll(waiting, 1, -1) < 0:  # a signal has interrupted it
        pass
    sys.setswitchinterval(0.005)
    os.close(fd)
    os.close(log_fd)


async def first_returns(log: str, gate: str, place: int) -> int:
    return 0 if place == 0 else int(await await_(log, gate, place))


def inverse(value: int) -> int:
    return 1 // value


def refuse_some(number: int) -> int:
    if number % 50 == 49:
        raise ValueError(number)
    return number


async def await_unless_first(gate: str, place: int) -> int:
    if place:
        await apass_gate(gate)
    return place


async def clean_up(log: str, gate: str, clean_gate: str) -> None:
    """Wait; when cancelled, clean up for as long as `clean_gate` is shut."""
    say(log, "began")
    try:
        await apass_gate(gate)
    finally:
        say(log, "cleaning")
        await apass_gate(clean_gate)
        say(log, "clean")


async def ignore_cancel(log: str, gate: str, answer_gate: str) -> str:
    """Wait, swallow the cancellation, wait again, and return all the same."""
    say(log, "began")
    try:
        await apass_gate(gate)
    except asyncio.CancelledError:
        say(log, "ignored")
        await apass_gate(answer_gate)
    return "answer"


async def fail_when_cancelled(log: str, gate: str) -> None:
    say(log, "began")
    try:
        await apass_gate(gate)
    except asyncio.CancelledError:
        raise ValueError("raised instead") from None


async def wait_or_fail(log: str, gate: str, other_gate: str, place: int, fails_at: int) -> int:
    """Before `fails_at`: wait at `gate`. There: fail. After it: wait at `other_gate`."""
    if place == fails_at:
        raise ValueError(f"failed at {place}")
    return await await_(log, gate if place < fails_at else other_gate, place)  # type: ignore[no-any-return]


def die() -> NoReturn:
    os._exit(3)


# How many at once


@dataclass
class Counter:
    """How many calls of one worker run at once, and the most there ever were."""

    now: int = 0
    most: int = 0
    lock: Any = field(default_factory=threading.Lock)

    def __enter__(self) -> "Counter":
        with self.lock:
            self.now += 1
            self.most = max(self.most, self.now)
        return self

    def __exit__(self, *_: object) -> None:
        with self.lock:
            self.now -= 1


@contextmanager
def counter() -> Iterator[Counter]:
    yield Counter()


def count(log: str, gate: str) -> int:
    """The most calls at once, this one included, up to its end."""
    with percore.state(Counter) as counted:
        wait(log, gate, "counted")
        return counted.most


async def acount(log: str, gate: str) -> int:
    with percore.state(Counter) as counted:
        await await_(log, gate, "counted")
        return counted.most


# Callables of every kind


class Adder:
    """Has a method, a class method, a static one, and can be called."""

    def __init__(self, base: int) -> None:
        self.base = base

    def add(self, value: int) -> int:
        return self.base + value

    async def aadd(self, value: int) -> int:
        return self.base + value

    @classmethod
    def make(cls, base: int) -> int:
        return cls(base).base

    @staticmethod
    def double(value: int) -> int:
        return 2 * value

    def __call__(self, value: int) -> int:
        return self.base + value

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Adder) and other.base == self.base

    __hash__ = None  # type: ignore[assignment]


class OtherAdder(Adder):
    """Its class method is the same function."""

    def __init__(self, base: int) -> None:
        super().__init__(base + 1)


class AsyncAdder(Adder):
    async def __call__(self, value: int) -> int:  # type: ignore[override]
        return self.base + value


def numbers() -> Generator[int]:
    yield 1


async def anumbers() -> AsyncIterator[int]:
    yield 1


# Lifespans


@dataclass(frozen=True)
class Resource:
    name: str


@asynccontextmanager
async def resource(log: str, name: str = "resource") -> AsyncIterator[Resource]:
    say(log, "enter")
    yield Resource(name)
    say(log, "exit")


@contextmanager
def plain_resource(log: str, name: str = "resource") -> Iterator[Resource]:
    say(log, "enter")
    yield Resource(name)
    say(log, "exit")


@asynccontextmanager
async def resource_behind(log: str, gate: str) -> AsyncIterator[None]:
    """Can be entered when the gate is open."""
    await await_(log, gate, "entering")
    yield None


@asynccontextmanager
async def no_resource() -> AsyncIterator[None]:
    raise LookupError("there is no database")
    yield None


@asynccontextmanager
async def no_exit() -> AsyncIterator[None]:
    yield None
    raise LookupError("the database does not let go")


@contextmanager
def deadly() -> Iterator[None]:
    os._exit(3)
    yield None


def no_manager() -> int:
    return 5


def state(*kind: type) -> Any:
    return percore.state(*kind)


async def astate(*kind: type) -> Any:
    return percore.state(*kind)


# Tasks left behind

_left: set[asyncio.Task[None]] = set()


async def leave_task(log: str, gate: str) -> None:
    """Start a task and end before it does."""
    _leave(await_(log, gate, "left"))


async def leave_failing_task(log: str, gate: str) -> None:
    """As `leave_task`; the task fails when it is cancelled."""
    _leave(fail_when_cancelled(log, gate))


def _leave(coroutine: Coroutine[Any, Any, Any]) -> None:
    task = asyncio.create_task(coroutine)
    _left.add(task)
    task.add_done_callback(_left.discard)


# Errors


class PageError(Exception):
    """An error as programs have them: with two arguments and more attributes."""

    def __init__(self, url: str, status: int) -> None:
        super().__init__(url, status)
        self.url = url
        self.status = status


@dataclass(frozen=True)
class FrozenError(Exception):
    """An error that refuses to set any attribute, `__cause__` included."""

    text: str


class Unpicklable(Exception):
    def __init__(self) -> None:
        super().__init__("it holds a lock")
        self.lock = threading.Lock()


class Unreadable(Exception):
    """Pickles, and cannot be read back."""

    def __reduce__(self) -> tuple[Any, ...]:
        return refuse, ()


class BadText(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no text")

    __repr__ = __str__


def fail(error: BaseException | type[BaseException]) -> NoReturn:
    raise error


async def afail(error: BaseException | type[BaseException]) -> NoReturn:
    raise error


def fail_with(make: Callable[[], BaseException]) -> NoReturn:
    raise make()


def fail_from() -> NoReturn:
    try:
        raise KeyError("inner")
    except KeyError as error:
        raise PageError("http://x", 503) from error


def fail_with_note() -> NoReturn:
    error = PageError("http://x", 500)
    error.add_note("seen at night")
    error.seen = 3  # type: ignore[attr-defined]
    raise error


def fail_with_group() -> NoReturn:
    raise ExceptionGroup("two", [ValueError(1), PageError("http://x", 404)])


def fail_large(size: int) -> NoReturn:
    raise ValueError(b"x" * size)


async def foreign_cancel() -> NoReturn:
    """Raise a CancelledError that nobody asked for."""
    raise asyncio.CancelledError("not yours")


async def cancel_itself() -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)


class RefusesPickle:
    def __reduce__(self) -> NoReturn:
        raise ValueError("do not pickle me")


class RefusesUnpickle:
    """Pickles; reading it raises."""

    def __reduce__(self) -> tuple[Any, ...]:
        return refuse, ()


def refuse() -> NoReturn:
    raise ValueError("do not read me")


def give(what: str) -> Any:
    """Something that cannot travel."""
    makers: dict[str, Callable[[], Any]] = {
        "lock": threading.Lock,
        "generator": numbers,
        "refuses": RefusesPickle,
        "unreadable": RefusesUnpickle,
        "nested": lambda: {"deep": [threading.Lock()]},
    }
    return makers[what]()


async def agive_coroutine() -> Any:
    coroutine = aecho(1)
    try:
        return coroutine
    finally:
        coroutine.close()


# Busy


HOARDS: dict[int, list[bytes]] = {}
"""What `hoard` keeps, by the pid of the worker. The fake engine reads it too."""


def hoard(size: int) -> percore.CurrentWorker:
    """Take memory and never give it back."""
    worker = percore.current_worker()
    HOARDS.setdefault(worker.pid, []).append(b"x" * size)
    return worker


def hoard_and_wait(size: int, log: str, gate: str) -> percore.CurrentWorker:
    worker = hoard(size)
    wait(log, gate)
    return worker


@contextmanager
def hoarding(size: int) -> Iterator[None]:
    """A lifespan that takes memory."""
    hoard(size)
    yield


def burn(steps: int) -> None:
    """Hold the GIL for a while, as arithmetic does."""
    total = 0
    for step in range(steps):
        total += step * step


# Items of maps


class Place(int):
    """A number that is no exact int: it travels pickled."""


def tell(log: str, place: int) -> int:
    """Say that this item runs, and give it back."""
    say(log, place)
    return place


async def atell(log: str, place: int) -> int:
    return tell(log, place)


def wait_at(log: str, gate: str, at: int, place: int) -> int:
    """As `tell`; one item waits at the gate."""
    say(log, place)
    if place == at:
        pass_gate(gate)
    return place


def fail_and_wait(log: str, gate: str, at: int, place: int) -> int:
    """As `tell`; one item fails, and the one after it waits at the gate."""
    if place == at:
        raise ValueError(f"failed at {place}")
    return wait_at(log, gate, at + 1, place)


def die_at(log: str, at: int, place: int) -> int:
    """As `tell`; one item ends the worker."""
    say(log, place)
    if place == at:
        os._exit(3)
    return place


def odd(error: type[Exception], place: int) -> int:
    """Even places as they are; odd ones fail."""
    if place % 2:
        raise error(place)
    return place


def give_at(what: Callable[[int], Any], at: int, place: int) -> Any:
    """Places as they are, and at one of them something else."""
    return what(place) if place == at else place


def large(place: int) -> bytes:
    """More than fits beside others into one message."""
    return pattern(20_000 + place)


def huge(place: int) -> bytes:
    """What needs a slot of its own."""
    return pattern(200_000 + place)


def several(place: int) -> dict[str, Any]:
    return {"place": place, "list": [place, [place]]}


def lock(_: int) -> Any:
    """What cannot be pickled."""
    return threading.Lock()


def unreadable(_: int) -> RefusesUnpickle:
    """What can be pickled, and not be read."""
    return RefusesUnpickle()


async def _await_at(log: str, gate: str, at: int, place: int) -> int:
    say(log, place)
    try:
        if place == at:
            await apass_gate(gate)
    except asyncio.CancelledError:
        say(log, f"cancelled {place}")
        raise
    return place


def later_at(log: str, gate: str, at: int, place: int) -> Coroutine[Any, Any, int]:
    """Plain, and returns an awaitable; that of one item waits at the gate."""
    return _await_at(log, gate, at, place)


# Keys, attempts, time


async def hold(log: str, gate: str, key: Any, place: int = 0) -> int:
    """Say that a call of this key begins and ends here, and wait at the gate between."""
    pid = percore.current_worker().pid
    say(log, f"in {key} {pid} {place}")
    try:
        await apass_gate(gate)
    finally:
        say(log, f"out {key} {pid} {place}")
    return pid


def hold_thread(log: str, gate: str, key: Any, place: int = 0) -> int:
    """As `hold`, in a thread."""
    pid = percore.current_worker().pid
    say(log, f"in {key} {pid} {place}")
    pass_gate(gate)
    say(log, f"out {key} {pid} {place}")
    return pid


def fail_first(folder: str, times: int, error: type[Exception], place: int) -> int:
    """Fail so many times, whichever worker it is, and then give the place back."""
    for attempt in range(times):
        try:
            os.close(os.open(f"{folder}/{place} {attempt}", os.O_CREAT | os.O_EXCL))
        except FileExistsError:
            continue
        raise error(f"attempt {attempt + 1}")
    return place


async def afail_first(folder: str, times: int, error: type[Exception], place: int) -> int:
    return fail_first(folder, times, error, place)


def die_first(folder: str, log: str, at: int, place: int) -> int:
    """As `die_at`, once."""
    say(log, place)
    if place == at and not os.path.exists(f"{folder}/died"):
        os.close(os.open(f"{folder}/died", os.O_CREAT))
        os._exit(3)
    return place


async def change_and_wait(log: str, gate: str, items: Any) -> int:
    """Say how long it is, change it, wait."""
    say(log, len(items))
    items.append(0)
    await apass_gate(gate)
    return len(items)


def change_and_die(folder: str, items: Any) -> int:
    """As `change_and_wait`; the first attempt ends the worker."""
    length = len(items)
    items.append(0)
    if not os.path.exists(f"{folder}/died"):
        os.close(os.open(f"{folder}/died", os.O_CREAT))
        os._exit(3)
    return length


async def _later_wait(log: str, gate: str) -> None:
    await await_(log, gate, "later")


def await_and_fail_at(log: str, gate: str, fail_gate: str, at: int, place: int) -> Any:
    """Plain. The first three items are awaitables; one of these fails at a gate of its own."""
    if place > 2:
        return place
    return _fail_at_gate(fail_gate, place) if place == at else await_(log, gate, place)


async def _fail_at_gate(gate: str, place: int) -> NoReturn:
    await apass_gate(gate)
    raise ValueError(f"failed at {place}")


def later_wait(log: str, gate: str) -> Coroutine[Any, Any, None]:
    """Plain, and returns an awaitable that waits at the gate."""
    return _later_wait(log, gate)


# What a worker's generation decides


@asynccontextmanager
async def first_generation_alone(log: str) -> AsyncIterator[None]:
    """No replacement can be started."""
    generation = percore.current_worker().generation
    say(log, f"enter {generation}")
    if generation > 1:
        raise LookupError("there is one database")
    yield None


@asynccontextmanager
async def others_behind(log: str, gate: str) -> AsyncIterator[None]:
    """Replacements can be entered when the gate is open."""
    generation = percore.current_worker().generation
    say(log, f"enter {generation}")
    if generation > 1:
        await apass_gate(gate)
    yield None
    say(log, f"exit {generation}")


async def awhere_of(_: Any) -> percore.CurrentWorker:
    return percore.current_worker()


async def change_and_fail(items: bytearray) -> NoReturn:
    """Fail with the length, and change it."""
    length = len(items)
    items.append(0)
    raise ValueError(length)


async def wait_and_fail(log: str, gate: str) -> NoReturn:
    await await_(log, gate, "waits")
    raise ValueError("after the gate")


def plain_then(gate: str, result: Any) -> Any:
    """Block the thread until the gate is open."""
    pass_gate(gate)
    return result


def later_wait_for(log: str, gate: str, value: Any) -> Coroutine[Any, Any, Any]:
    """As `await_`, by a plain function."""
    return await_(log, gate, value)


def wait_then_later(log: str, gate: str, other_gate: str) -> Coroutine[Any, Any, None]:
    """Block the thread until the gate is open; then return an awaitable that waits at the other."""
    say(log, "waits")
    pass_gate(gate)
    return _later_wait(log, other_gate)


def wait_then_fail(gate: str) -> NoReturn:
    pass_gate(gate)
    raise ValueError("at last")


def wait_then_fail_with(log: str, gate: str, value: Any) -> NoReturn:
    wait(log, gate, value)
    raise ValueError("at last")


async def wait_or_fail_at(log: str, gate: str, index: int) -> None:
    """Fail in one worker, when the others have begun to wait."""
    here = percore.current_worker().index
    if here == index:
        raise ValueError(f"worker {here}")
    await await_(log, gate, here)


async def tell_async(log: str, value: Any) -> Any:
    say(log, value)
    return value


# Threads

_of_thread = threading.local()


def say_thread(log: str) -> None:
    say(log, f"initialized {threading.current_thread().name}")


def wait_in_thread(log: str, gate: str) -> str:
    name = threading.current_thread().name
    say(log, f"runs {name}")
    pass_gate(gate)
    return name


def fail_after_the_call() -> None:
    """Let an exception end this thread before it has answered the call, as a timeout does that is raised in it too late."""

    def strike(frame: FrameType, event: str, _argument: object) -> None:
        if event == "call" and frame.f_code.co_name == "_send_result":
            raise TimeoutError("too late")

    sys.setprofile(strike)


def debug() -> None:
    breakpoint()


async def adebug() -> None:
    breakpoint()


def open_connection() -> None:
    assert not hasattr(_of_thread, "connection")
    _of_thread.connection = "open"


def connection(_: int) -> str:
    return str(_of_thread.connection)


@asynccontextmanager
async def loop_of_its_own() -> AsyncIterator[asyncio.Event]:
    """Something that works in the loop alone in which it was first waited for."""
    event = asyncio.Event()
    asyncio.get_running_loop().call_soon(event.set)
    await event.wait()
    event.clear()
    yield event


async def is_in_the_loop_of_the_lifespan(_: int) -> bool:
    event = percore.state(asyncio.Event)
    asyncio.get_running_loop().call_soon(event.set)
    return await event.wait()
