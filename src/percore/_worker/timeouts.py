"""The `timeout` of calls that run in a worker. One timer of the loop serves all: a call that ends in time costs little."""

from collections.abc import Callable
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Final

from percore._protocol.messages import MARK_WORDS, StartMarks

if TYPE_CHECKING:
    import asyncio

_SOONEST: Final = 0.0005
"""Seconds until the timer, at least: a loop whose clock has coarse ticks would run it again and again until its time has come."""

_LATEST: Final = 86_400.0
"""Seconds until the timer, at most: event loops have limits of their own. It is then set again."""


class Timeouts:
    """The calls of one kind whose time is limited, from their start to their end."""

    def __init__(self, loop: "asyncio.AbstractEventLoop", marks: StartMarks, expired: Callable[[int, float], object]) -> None:
        """The loop calls `expired` with the id of each call that exceeds its timeout, and with that."""
        self._loop = loop
        self._marks = marks
        self._mask = len(marks) // MARK_WORDS - 1
        self._expired = expired
        self._due: dict[int, tuple[float, float]] = {}
        """When the time of each call is over, as a time of the monotonic clock, and its timeout."""
        self._next = inf
        """When the timer will look at the calls; infinity: never, or it does so now."""
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, call_id: int, seconds: float) -> bool:
        """Limit the time of a call whose start mark is set, from any thread. If this returns True, let the loop `look`."""
        due = self._marks[(call_id & self._mask) * MARK_WORDS + 1] / 1e9 + seconds
        self._due[call_id] = due, seconds
        return due < self._next  # only now: see `look`

    def end(self, call_id: int) -> None:
        """Forget a call that has ended, from any thread. It may have no limit, or have exceeded it."""
        self._due.pop(call_id, None)

    def look(self) -> None:
        """Tell of the calls that have exceeded their timeouts, and set the timer for the next one. In the loop."""
        # First: a thread that adds a call from now on has the loop look again, and a call that was added before is seen below.
        self._next = inf
        self.stop()
        now = monotonic()
        for call_id, (due, seconds) in self._due.copy().items():
            if due <= now and self._due.pop(call_id, None) is not None:
                self._expired(call_id, seconds)
        if self._due:
            self._next = earliest = min((due for due, _ in list(self._due.values())), default=inf)
            self._timer = self._loop.call_later(min(max(_SOONEST, earliest - monotonic()), _LATEST), self.look)

    def stop(self) -> None:
        """Stop the timer. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
