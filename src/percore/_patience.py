"""Deadlines after which somebody is killed: time in which this process did not run itself does not count against others."""

import asyncio
from collections.abc import Callable
from typing import Final

_LATENESS: Final = 1.0
"""Seconds by which only a loop that was stopped, or held up by its user, is late."""


class Patience:
    """Calls back after so many seconds, once, unless it is cancelled before.

    If that moment itself comes late, then whoever is waited for was probably stopped as well, or their news have not been read
    yet: they are given the same time again, once.
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
