"""Publishes the statistics of a runner in its page, so that `percore top` can show them.

A timer runs only while calls are under way, or once after workers have changed. A page without a time for the next one (`due`) thus
belongs to a runner at rest, and one whose time is over to a program whose event loop is blocked.

While calls are under way, the timer also has the supervisor make up for callbacks that the loop has lost (see `timing`). The watch
of blocked loops makes up for the loss of this timer.
"""

import asyncio
import logging
import sys
from itertools import count
from time import monotonic, thread_time
from typing import TYPE_CHECKING, Final, Protocol
from weakref import ref

import percore
from percore._common.log import report
from percore._common.system import HAS_MEMFD
from percore._supervisor.timing import SOONEST, is_lost

if TYPE_CHECKING:
    from collections.abc import Sequence

    from percore._monitor.page import PageFile
    from percore._monitor.statistics import Statistics
    from percore._monitor.usage import ProcessUsage
    from percore._supervisor.blocked_loops import BlockedLoops
    from percore._supervisor.usage_elsewhere import UsageElsewhere

_PERIOD: Final = 0.5
"""Least seconds between two pages."""

_REST: Final = 50
"""After a page the loop has this many times as long for other work. With hundreds of workers a page takes tens of milliseconds."""

_MOST_FUNCTIONS: Final = 8
"""The page has figures by worker of so many functions, those with the most time, so that writing it takes a bounded time."""

_MODULES: Final = (
    "json",
    "percore._monitor.tables",
    "percore._monitor.functions",
    "percore._monitor.statistics",
    "percore._monitor.page",
    "percore._supervisor.snapshot",
)
"""What the first page needs, in the order in which it is imported: one in each turn of the loop, since all take 12 ms."""

_numbers: Final = count(1)


class Published(Protocol):
    """A runner, as its publication sees it."""

    def statistics(self, most: int | None = None) -> "Statistics":
        """Return its statistics, with so many functions of each worker at most; None: with all."""

    def is_busy(self) -> bool:
        """Whether calls are under way."""

    def catch_up(self) -> None:
        """Make up for callbacks that the loop has lost (see `timing`)."""

    def has_nodes(self) -> bool:
        """Whether workers are on nodes."""

    async def usage_elsewhere(self) -> "Sequence[ProcessUsage]":
        """Return what these workers use."""


class Publication:
    """Publishes for one runner, and arms the watch of blocked loops with itself. Only the thread of the loop may use it."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        published: "Published",
        blocked_loops: "BlockedLoops",
        *,
        is_on: bool,
    ) -> None:
        """`published` is not kept alive by this. `is_on`: whether to publish at all."""
        self.is_armed = False
        """Whether `arm` has nothing to do. Every call that is sent asks."""
        self._loop = loop
        self._published = ref(published)
        self._blocked_loops = blocked_loops
        blocked_loops.on_look, blocked_loops.on_rest = self.touch, self._disarm
        self._is_on = is_on and HAS_MEMFD
        self._number = next(_numbers)
        self._page: PageFile | None = None
        self._elsewhere: UsageElsewhere | None = None
        """Made for the first page of a runner with workers on nodes."""
        self._timer: asyncio.TimerHandle | None = None
        self._period = _PERIOD
        self._is_closed = False

    def arm(self) -> None:
        """Watch and publish for as long as calls are under way. To be called with the first call."""
        self.is_armed = True
        if not self._blocked_loops.is_armed:
            self._blocked_loops.arm()
        self.touch()

    def touch(self) -> None:
        """Publish soon, because something has changed."""
        timer = self._timer
        if timer is not None and is_lost(timer, self._loop):
            timer.cancel()  # it may only be late
            timer = None
        if timer is None and not self._is_closed:
            self._timer = self._loop.call_later(self._period, self._publish)

    def close(self) -> None:
        """Publish nothing more, and take the page away. Idempotent."""
        self._is_closed = True
        if self._elsewhere is not None:
            self._elsewhere.close()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self._take_away()

    def _take_away(self) -> None:
        self._is_on = False
        if self._page is not None:
            self._page.close()
            self._page = None

    def _disarm(self) -> None:
        self.is_armed = False

    def _publish(self) -> None:
        is_late = is_lost(self._timer, self._loop)
        self._timer = None
        if self._is_on and (name := next((name for name in _MODULES if name not in sys.modules), None)) is not None:
            percore._import_uncollected(name)  # now: the first page comes after the start, which need not wait for this
            self._timer = self._loop.call_later(SOONEST, self._publish)
            return
        published = self._published()
        if published is None:
            self.close()
            return
        is_busy = published.is_busy()
        if is_busy:
            self.touch()
            if not is_late:  # else what seems to be lost may be about to be called
                published.catch_up()
        else:
            self.is_armed = False
        if self._is_on:
            self._write(published, is_busy=is_busy)

    def _write(self, published: Published, *, is_busy: bool) -> None:
        from percore._monitor.page import PageFile, encode, page_of

        try:
            if self._page is None:
                self._page = PageFile()
            now, began = monotonic(), thread_time()
            statistics = published.statistics(_MOST_FUNCTIONS)
            due = now + self._period if is_busy else None
            elsewhere = () if self._elsewhere is None else self._elsewhere.found
            self._page.write(encode(page_of(statistics, self._number, now, due, elsewhere)))
        except OSError as error:  # no descriptor or no memory is left; the program's work needs no page
            self._take_away()  # a page that nobody writes any more would look like a blocked program
            report(logging.DEBUG, "percore top cannot show this runner: its page could not be written: %s", error)
        else:
            self._period = max(_PERIOD, _REST * (thread_time() - began))
            if published.has_nodes():
                self._look_elsewhere(published)

    def _look_elsewhere(self, published: Published) -> None:
        if self._elsewhere is None:
            from percore._supervisor.usage_elsewhere import UsageElsewhere

            self._elsewhere = UsageElsewhere(self._loop)
        self._elsewhere.look(published.usage_elsewhere, self.touch)
