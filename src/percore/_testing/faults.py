"""Changes what happens to calls and to starts of workers, for tests of programs.

A call is changed where it runs: its function travels inside a `Changed`, which waits, raises or dies. How many attempts were
changed is counted in a file, which all workers of this machine find, and which is there as long as the block that changes them.

A start is changed in the engine: it has no place for the worker for a while, or raises.
"""

import asyncio
import os
import signal
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Protocol

from percore._common.callables import full_name, is_coroutine_call, qualified_name
from percore._protocol.interfaces import Engine, Exit, Worker
from percore._testing.engine import worker_of_pid
from percore._worker.context import current_context


@dataclass(frozen=True, slots=True)
class Plan:
    """What happens to the attempts of calls.

    Attributes:
        path: a file that is there during the block.
        times: how many attempts are changed; None: all.
        delay: seconds that each of them waits before it begins.
        error: what each of them raises instead of calling the function.
        loses: whether the worker dies when the function has returned.
    """

    path: str
    times: int | None
    delay: float = 0.0
    error: BaseException | type[BaseException] | None = None
    loses: bool = False

    def is_due(self) -> bool:
        """Whether this attempt is one of those that are changed. Each attempt that asks counts, in whatever process."""
        try:
            fd = os.open(self.path, os.O_WRONLY | os.O_APPEND)
        except FileNotFoundError:  # the block has ended
            return False
        try:
            if self.times is None:
                return True
            os.write(fd, b".")  # the system appends, and moves the position behind it, as one step
            return os.lseek(fd, 0, os.SEEK_CUR) <= self.times
        finally:
            os.close(fd)


class Changed:
    """A function with a plan. It has the name of the function, for statistics and errors."""

    def __init__(self, fn: Callable[..., Any], plan: Plan) -> None:
        self.fn = fn
        self.plan = plan
        self.__qualname__ = name = qualified_name(fn)
        self.__module__ = full_name(fn).removesuffix(name).removesuffix(".")


class ChangedPlain(Changed):
    """A plain function with a plan."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.plan.is_due():
            return self.fn(*args, **kwargs)
        time.sleep(self.plan.delay)
        if self.plan.error is not None:
            raise self.plan.error
        result = self.fn(*args, **kwargs)
        if self.plan.loses:
            strike_own_worker()
        return result


class ChangedCoroutine(Changed):
    """A coroutine function with a plan."""

    async def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.plan.is_due():
            return await self.fn(*args, **kwargs)
        await asyncio.sleep(self.plan.delay)
        if self.plan.error is not None:
            raise self.plan.error
        result = await self.fn(*args, **kwargs)
        if self.plan.loses:
            strike_own_worker()
        return result


class Changeable(Protocol):
    """The functions of a runner, as this module sees them."""

    def change(self, *changes: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        """From now on call what these return, one after the other, in place of each function."""


@contextmanager
def changed_calls(
    functions: Changeable, changes: list[Callable[..., Any]], fn: Callable[..., Any] | None, times: int | None, **plan: Any
) -> Iterator[None]:
    """Change attempts of calls of `fn` that begin during the block, or of all calls. `changes`: those of the runner, in order."""
    handle, path = tempfile.mkstemp(prefix="percore-testing-")
    os.close(handle)
    how = Plan(path, times, **plan)

    def change(given: Callable[..., Any]) -> Callable[..., Any]:
        inner = given
        while isinstance(inner, Changed):
            inner = inner.fn
        if fn is not None and inner != fn:
            return given
        return ChangedCoroutine(given, how) if is_coroutine_call(given) else ChangedPlain(given, how)

    changes.append(change)
    functions.change(*changes)
    try:
        yield
    finally:
        os.unlink(path)
        changes.remove(change)
        functions.change(*changes)


def strike_own_worker() -> None:
    """Kill the worker of the call that runs this."""
    found = current_context("current_worker")
    strike, loop = found.strike, None
    if fake := worker_of_pid(found.worker.pid):
        strike, loop = fake.strike, fake.loop
    if strike is None:
        os.kill(os.getpid(), signal.SIGKILL)
        return
    strike()
    if (running := asyncio._get_running_loop()) is not None and loop in (None, running):
        raise asyncio.CancelledError


class Starts:
    """Changes the starts of an engine, from `begin` to `end`."""

    def __init__(self, times: int | None, delay: float | None) -> None:
        """`times`: how many starts are changed; None: all. `delay`: seconds that each of them is late; None: it fails."""
        self._left = times
        self._delay = delay
        self._engine: Engine | None = None
        self._late: dict[int, float] = {}
        """Until when there is no place for the worker of a slot."""
        self._timers: list[asyncio.TimerHandle] = []

    def begin(self, engine: Engine, loop: asyncio.AbstractEventLoop) -> None:
        """Change the starts of this engine."""
        self._engine, self._loop, self._start = engine, loop, engine.start
        engine.start = self._changed  # type: ignore[method-assign]

    def end(self) -> None:
        """Change no further start. Late ones may begin."""
        for timer in self._timers:
            timer.cancel()
        if self._engine is not None:
            self._engine.start = self._start  # type: ignore[method-assign]
            if self._late:
                self._engine.on_place()

    def _changed(self, index: int, generation: int, on_exit: Callable[[Exit], None], sockets: Sequence[Any]) -> Worker | None:
        if index in self._late:
            if self._loop.time() < self._late[index]:
                return None
            del self._late[index]
        elif self._is_due():
            if self._delay is None:
                raise OSError("this start failed on purpose, by percore.testing")
            assert self._engine is not None
            self._late[index] = self._loop.time() + self._delay
            self._timers.append(self._loop.call_at(self._late[index], self._engine.on_place))
            return None
        return self._start(index, generation, on_exit, sockets)

    def _is_due(self) -> bool:
        if self._left is None:
            return True
        self._left -= 1
        return self._left >= 0
