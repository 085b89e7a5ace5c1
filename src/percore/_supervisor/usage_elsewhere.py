"""Reads what workers on nodes use, for the page of the runner: those who look at it can read the processes of this machine alone.

A reading is asked for when a page is written, at most once in two seconds. So nothing is read of a runner at rest, and nothing at
all without nodes.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from time import monotonic
from typing import TYPE_CHECKING, Final

from percore._common.log import report

if TYPE_CHECKING:
    from percore._monitor.usage import ProcessUsage

    Read = Callable[[], Awaitable[Sequence[ProcessUsage]]]

_EVERY: Final = 2.0
"""Seconds between two readings: each takes a host about a millisecond a worker."""


class UsageElsewhere:
    """The latest reading of one runner's workers on nodes. Only the thread of the loop may use it."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.found: Sequence[ProcessUsage] = ()
        self._loop = loop
        self._next = 0.0
        self._reading: asyncio.Task[None] | None = None
        self._has_failed = False

    def look(self, read: "Read", on_found: Callable[[], None]) -> None:
        """Begin a reading by `read`, unless the last one is younger than two seconds. `on_found` is called when it has ended."""
        is_reading = self._reading is not None and not self._reading.done()  # an eager task may be done once it is made
        if not is_reading and monotonic() >= self._next:
            self._reading = self._loop.create_task(self._look(read, on_found), name="percore-usage-elsewhere")

    async def _look(self, read: "Read", on_found: Callable[[], None]) -> None:
        try:
            self.found = await read()
        except Exception as error:
            self.found = ()
            if not self._has_failed:
                self._has_failed = True
                report(logging.DEBUG, "percore top cannot show what workers on nodes use: %s", error)
        finally:
            self._reading = None
            self._next = monotonic() + _EVERY
        on_found()

    def close(self) -> None:
        """End a reading that is under way. Idempotent."""
        self._next = float("inf")
        if self._reading is not None:
            self._reading.cancel()
