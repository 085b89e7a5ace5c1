"""Shows the progress of a map while it runs. A timer reads the map's counts, so items pay nothing for it."""

from __future__ import annotations

import logging
from collections import deque
from typing import TYPE_CHECKING, Any, Final, Literal, NamedTuple, TypeAlias

from percore._common.callables import check_plain
from percore._common.log import report
from percore._common.sure_handles import surely_later
from percore._monitor.progress import Progress

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from percore._common.sure_handles import SureHandle
    from percore._map.displays import Display

Wanted: TypeAlias = "bool | Literal['text'] | Callable[[Progress], object] | None"
"""The option `progress` of a map."""

_OFTEN: Final = 0.1
"""Seconds between two calls of a callback."""

_RECENT: Final = 10.0
"""Seconds of the past that count for the rate."""


class Counts(NamedTuple):
    """How far a map has come.

    Attributes:
        state: its state, in words.
        done: items that have ended, including failures.
        failed: items that have ended with an error.
        pulled: items that were pulled from the inputs.
    """

    state: str
    done: int
    failed: int
    pulled: int


class _Callback:
    """The user's function."""

    seconds = _OFTEN

    def __init__(self, callback: Callable[[Progress], object]) -> None:
        self.show: Callable[[Progress], object] = callback


def check(wanted: Any) -> None:
    """Check the option `progress`.

    Raises:
        TypeError, ValueError: it is none of the things that it may be.
    """
    if isinstance(wanted, str) and wanted != "text":
        raise ValueError(
            f'progress must be True, "text" or a function of a percore.Progress, such as progress=print, not {wanted!r}'
        )
    if wanted is None or isinstance(wanted, bool | str):
        return
    if not callable(wanted):
        raise TypeError(
            f'progress must be True, "text" or a function of a percore.Progress, such as progress=print, not {wanted!r}'
        )
    check_plain("progress", wanted)


def display_of(wanted: Wanted) -> Display | None:
    """Return what shows the progress. None: nothing does."""
    if wanted is None or wanted is False:
        return None
    if callable(wanted):
        return _Callback(wanted)  # type: ignore[return-value]  # the user's function may return anything
    from percore._map.displays import automatic, lines

    return automatic() if wanted is True else lines()


class Meter:
    """Measures the rate of a count that is read from time to time."""

    def __init__(self, now: float) -> None:
        """Begin with a count of 0. All times are those of one monotonic clock."""
        self._readings = deque([(now, 0)])

    def rate(self, now: float, count: int) -> float | None:
        """Take a reading and return how much the count has grown per second lately. None: no time has passed.

        The interval begins with the last reading that is at least `_RECENT` seconds old, or with the first one if none is.
        """
        readings = self._readings
        while len(readings) > 1 and now - readings[1][0] >= _RECENT:
            readings.popleft()
        if now > readings[-1][0]:
            readings.append((now, count))
        then, before = readings[0]
        return (count - before) / (now - then) if now > then else None


def seconds_left(done: int, total: int | None, rate: float | None) -> float | None:
    """Return how long the rest will take at this rate. None: that is unknown."""
    if total is None or not rate or done > total:
        return None
    return (total - done) / rate


class Watcher:
    """Reads how far one map is, and has it shown, from its beginning to its end."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        display: Display,
        function: str,
        total: int | None,
        counts: Callable[[], Counts],
        busy: Callable[[], tuple[int, int]],
    ) -> None:
        """`busy` returns how many workers have calls, and how many there are."""
        self._loop = loop
        self._display: Display | None = display
        self._function = function
        self._total = total
        self._counts = counts
        self._busy = busy
        self._began = loop.time()
        self._meter = Meter(self._began)
        self._timer: SureHandle | None = None
        self._tick()

    def _tick(self) -> None:
        self._show(is_over=False)
        if self._display is not None:
            before, self._timer = self._timer, surely_later(self._loop, self._display.seconds, self._tick)
            if before is not None:
                before.cancel()

    def end(self) -> None:
        """Show the end. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
        self._show(is_over=True)
        self._display = None

    def _show(self, *, is_over: bool) -> None:
        """Show how far the map is. If that raises, log it and show nothing more: the map goes on."""
        if self._display is None:
            return
        now, counts = self._loop.time(), self._counts()
        rate = self._meter.rate(now, counts.done)
        eta = seconds_left(counts.done, self._total, rate)
        seen = (self._function, counts.done, counts.failed, counts.pulled, self._total)
        progress = Progress(*seen, now - self._began, rate, eta, *self._busy(), is_over)
        try:
            self._display.show(progress)
        except Exception as error:
            self._display = None
            report(logging.ERROR, "the progress of %s cannot be shown; its map goes on", self._function, exc_info=error)
