"""Timers for deadlines after which a worker is killed. Time in which this process itself did not run does not count."""

import asyncio
from collections.abc import Callable
from typing import Final

_LATENESS: Final = 1.0
"""Seconds of lateness from which on the loop must have been stopped, or blocked by user code."""


class Patience:
    """Calls `callback` once after `seconds`, unless it is cancelled before.

    If the loop runs the timer late, the worker was probably stopped as well, or the loop has not read the worker's messages yet.
    The timer then starts again with the same time, once.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, callback: Callable[[], object]) -> None:
        self._loop = loop
        self._seconds = seconds
        self._callback = callback
        self._timer = loop.call_later(seconds, self._look)

    def cancel(self) -> None:
        self._timer.cancel()

    def _look(self) -> None:
        if self._loop.time() - self._timer.when() < _LATENESS:
            self._callback()
        else:
            self._timer = self._loop.call_later(self._seconds, self._callback)
