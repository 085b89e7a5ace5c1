"""Ends that come at any point of the program.

Finalisers run in any thread. `Endings` lets them only queue a callback, which the loop runs.

Futures that tasks of the user await may be cancelled between any two steps of Python code: the handler of a signal runs there, and
so does a `__del__` that a garbage collection runs. Either may cancel a task, and with it the future that the task awaits, as the
handler of `asyncio.run` for Ctrl-C does. `settle` ends such a future also if it is cancelled after it was asked whether it is done.
"""

import asyncio
import contextlib
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Final, TypeVar

T = TypeVar("T")

Ended = Callable[[], None]

_LOST: Final = 1.0
"""Seconds after which the loop is asked again."""


class Endings:
    """Runs the callbacks of finalisers in the loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._loop = loop
        self._ended: deque[Ended] = deque()
        self._is_due = False
        self._asked_at = 0.0

    def add(self, ended: Ended) -> None:
        """Have the loop call `ended`. If the loop is closed, it is never called. Any thread may call this."""
        self._ended.append(ended)
        # The loop has lost `_run` if an exception such as a Ctrl-C came just before it.
        if not self._is_due or monotonic() - self._asked_at > _LOST:
            self._schedule()

    def _schedule(self) -> None:
        # Whatever is raised here, such as a Ctrl-C, the next ending schedules `_run`. If it is scheduled twice, that does no harm.
        self._asked_at = monotonic()
        with contextlib.suppress(RuntimeError):  # the loop is closed
            if asyncio._get_running_loop() is self._loop:
                self._loop.call_soon(self._run)
                self._is_due = True  # only now: no other thread runs `_run`
                return
            try:
                self._is_due = True  # first: the loop's thread may run `_run` at once
                self._loop.call_soon_threadsafe(self._run)
            except BaseException:
                self._is_due = False
                raise

    def _run(self) -> None:
        self._is_due = False
        try:
            while self._ended:
                self._ended.popleft()()
        finally:
            if self._ended:  # one has raised, which the loop reports: the others must not wait for the next finaliser
                self._schedule()


def settle(future: "asyncio.Future[T]", value: T) -> bool:
    """End a future with this result. Return False if it has ended before: it was cancelled."""
    if future.done():
        return False
    try:
        future.set_result(value)
    except asyncio.InvalidStateError:  # since it was asked
        return False
    return True


def settle_by(future: "asyncio.Future[T]", error: BaseException) -> bool:
    """As `settle`, with this error."""
    if future.done():
        return False
    try:
        future.set_exception(error)
    except asyncio.InvalidStateError:
        return False
    return True


def wake(waiter: "asyncio.Future[None] | None") -> None:
    """End a future that has no result, if there is one: wake the task that awaits it."""
    if waiter is not None:
        settle(waiter, None)
