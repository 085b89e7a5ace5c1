"""The time as the supervisor reads it: that of an iteration of the loop, and timers for deadlines.

An exception such as a Ctrl-C may come when the loop has taken a callback and not yet begun it. Then nobody calls that callback. A
part that waits for it, such as one with a single timer, would do nothing any more. So each such part has a method `catch_up`, and
`Publication` has the supervisor call all of them twice a second while calls are under way.
"""

import asyncio
from collections.abc import Callable
from typing import Final

LATENESS: Final = 1.0
"""Seconds of lateness of a timer from which on this process must have been stopped, or user code has blocked its loop. The workers
were probably stopped, too."""


SOONEST: Final = 0.001
"""Seconds of the shortest timer for which `is_lost` knows whether it is late."""


def is_lost(timer: asyncio.TimerHandle | None, loop: asyncio.AbstractEventLoop) -> bool:
    """Whether the loop has taken a timer and not called it, or is very late. Cancel it before it is replaced.

    One of uvloop for less than half a millisecond is a plain handle. The next iteration of the loop calls it, so it counts as lost.
    """
    if timer is None:
        return False
    when = getattr(timer, "when", None)
    return when is None or loop.time() - when() >= LATENESS


class Turn:
    """The time of the current iteration of the loop: read once, then the same until the iteration ends.

    The loop reads the workers' messages between iterations only, so a long iteration must not make workers look silent.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._time: float | None = None

    def time(self) -> float:
        """Return `loop.time()` as of the first request in this iteration."""
        if self._time is None:
            self._time = self.loop.time()
            self.loop.call_soon(self._end)
        return self._time

    def _end(self) -> None:
        self._time = None

    def catch_up(self) -> None:
        """Let the time go on, if the loop has lost the end of an iteration."""
        self._time = None


class DeadlineTimer:
    """A timer for a deadline after which a worker is killed. Time in which this process itself did not run does not count.

    Calls `callback` once after `seconds`, unless it is cancelled before.

    If the loop runs the timer late, the worker was probably stopped as well, or the loop has not read the worker's messages yet.
    The timer then starts again with the same time, once.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, callback: Callable[[], object]) -> None:
        self._loop = loop
        self._seconds = seconds = max(SOONEST, seconds)
        self._callback = callback
        self._timer: asyncio.TimerHandle | None = loop.call_later(seconds, self._look)

    def cancel(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        if is_lost(self._timer, self._loop):
            self._start_again()
        else:
            self._end()

    def _start_again(self) -> None:
        self._timer = self._loop.call_later(self._seconds, self._end)

    def _end(self) -> None:
        self._timer = None
        self._callback()

    def catch_up(self) -> None:
        """Start again with the same time, if the loop has lost the timer."""
        if is_lost(self._timer, self._loop):
            self.cancel()
            self._start_again()
