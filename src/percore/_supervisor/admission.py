"""The limit on pending calls: `max_pending`."""

import asyncio
from collections import OrderedDict
from collections.abc import Callable

from percore._common.endings import settle, settle_by
from percore._common.errors import RunnerFull


class Admission:
    """Admits calls while fewer than `limit` are pending. Waiting calls are admitted in the order they came."""

    def __init__(self, loop: asyncio.AbstractEventLoop, limit: int) -> None:
        self.limit = limit
        self._loop = loop
        self._inside = 0
        # An ordered dict, because removing one waiter must be fast: thousands may be cancelled together.
        self._waiters: OrderedDict[asyncio.Future[None], None] = OrderedDict()

    def enter_now(self) -> None:
        """Admit one call without waiting.

        Raises:
            RunnerFull: there is no room, or other calls wait for room.
        """
        if self._waiters or self._inside >= self.limit:
            raise RunnerFull(self.limit)
        self._inside += 1

    async def enter(self, most: int = 1) -> int:
        """Wait until there is room, admit up to `most` calls, and return how many. If cancelled, admit none.

        Raises:
            Exception: the error passed by `refuse`.
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
                    self.leave()  # 1. it is admitted  2. it is cancelled before it resumes: pass its room on
                raise
            finally:
                del waiter  # it may hold an error, whose traceback holds this frame: a cycle
            most -= 1
            count = 1
        else:
            count = 0
        more = max(0, min(most, self.limit - self._inside))  # 0 while other calls wait, since all room is taken then
        self._inside += more
        return count + more

    def leave(self, count: int = 1) -> None:
        """Note that `count` calls are done, and admit waiting calls in their place."""
        assert 0 <= count <= self._inside
        self._inside -= count
        while self._waiters and self._inside < self.limit:
            waiter, _ = self._waiters.popitem(last=False)
            self._inside += 1  # first: its task may go on in this step
            if not settle(waiter, None):
                self._inside -= 1

    def refuse(self, error: Callable[[], Exception]) -> None:
        """Refuse all waiting calls. Each raises a new error, made by `error`."""
        waiters, self._waiters = self._waiters, OrderedDict()
        for waiter in waiters:
            settle_by(waiter, error())

    def left(self, _call: object) -> None:
        """As `leave()`, in the form of a done callback of a future."""
        self.leave()
