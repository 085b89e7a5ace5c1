"""Progress: how far a map is, and the line of text that says so."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a map is. `map(..., progress=callback)` calls `callback` with it. `str()` of it is one line.

    Attributes:
        function: the name of the function.
        done: items that have ended, including failures.
        failed: items that have ended with an error.
        pulled: items that were pulled from the inputs.
        total: how many items there are: the length of the shortest input that has one; None if none has.
        seconds: seconds since the map began.
        rate: items that ended per second, over the last ten seconds or since the map began; None at its very beginning.
        eta: seconds until all items have ended, at this rate; None if that is unknown.
        busy: workers that have calls, of any kind.
        workers: workers of the runner.
        is_over: whether this is the last report: the map has ended, failed or was closed.
    """

    function: str
    done: int
    failed: int
    pulled: int
    total: int | None
    seconds: float
    rate: float | None
    eta: float | None
    busy: int
    workers: int
    is_over: bool

    def __str__(self) -> str:
        count = f"{self.done}" if self.total is None else f"{self.done} of {self.total}{_share(self.done, self.total)}"
        failed = f", {self.failed} failed" if self.failed else ""
        if self.is_over:
            rate = f", {_figure(self.done / self.seconds)}/s" if self.seconds else ""
            return f"{self.function}: {count} in {duration(self.seconds)}{failed}{rate}"
        rate = "" if self.rate is None else f", {_figure(self.rate)}/s"
        left = "" if self.eta is None else f", {duration(self.eta)} left"
        return f"{self.function}: {count}{failed}{rate}{left}, {self.busy} of {self.workers} workers busy"


def _share(done: int, total: int) -> str:
    return f" ({100 * done // total} %)" if total else ""


def _figure(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 100 else f"{rate:.1f}"


def duration(seconds: float) -> str:
    """Return a duration in words: "0.4 s", "12 s", "3:05 min", "2:00:09 h"."""
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    minutes, rest = divmod(whole, 60)
    if minutes < 60:
        return f"{minutes}:{rest:02} min"
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02} h"
