"""How many calls may be accepted and not done: `max_pending`."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable

from percore._errors import RunnerFull


class Admission:
    """Lets calls in, first come first served."""

    def __init__(self, loop: asyncio.AbstractEventLoop, limit: int) -> None:
        self.limit = limit
        self._loop = loop
        self._inside = 0
        # Ordered, and any of them can be taken out at once: thousands may be cancelled together.
        self._waiters: OrderedDict[asyncio.Future[None], None] = OrderedDict()

    def enter_now(self) -> None:
        """Let one call in that cannot wait.

        Raises:
            RunnerFull: there is no room, or others wait for it.
        """
        if self._waiters or self._inside >= self.limit:
            raise RunnerFull(self.limit)
        self._inside += 1

    async def enter(self, most: int = 1) -> int:
        """Wait until there is room, and let up to `most` calls in: how many. Cancelled: none.

        Raises:
            Exception: what `refuse` gave.
        """
        if self._waiters or self._inside >= self.limit:
            waiter = self._loop.create_future()
            self._waiters[waiter] = None
            try:
                await waiter
            except BaseException:
                if waiter in self._waiters:
                    del self._waiters[waiter]
                elif not waiter.cancelled() and waiter.exception() is None:
                    self.leave()  # 1. it is let in  2. it is cancelled before it runs: the room is another's
                raise
            most -= 1
            count = 1
        else:
            count = 0
        more = max(0, min(most, self.limit - self._inside))  # none while others wait: then it is full
        self._inside += more
        return count + more

    def leave(self, count: int = 1) -> None:
        """So many calls are done."""
        assert 0 <= count <= self._inside
        self._inside -= count
        while self._waiters and self._inside < self.limit:
            waiter, _ = self._waiters.popitem(last=False)
            if not waiter.done():
                self._inside += 1
                waiter.set_result(None)

    def refuse(self, error: Callable[[], Exception]) -> None:
        """Let in none of those that wait: each gets an error of its own."""
        waiters, self._waiters = self._waiters, OrderedDict()
        for waiter in waiters:
            if not waiter.done():
                waiter.set_exception(error())

    def left(self, _call: object) -> None:
        """As `leave`, as the callback of a future."""
        self.leave()
