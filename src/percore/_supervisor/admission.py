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
            waiter = next(iter(self._waiters))
            del self._waiters[waiter]  # no `popitem`: a Ctrl-C may come when a function returns, also a built-in one
            self._inside += 1  # first: its task may go on in this step
            try:
                if not settle(waiter, None):
                    self._inside -= 1
            except BaseException:
                if not waiter.done():
                    self._inside -= 1
                    self._waiters[waiter] = None
                    self._waiters.move_to_end(waiter, last=False)
                raise

    def refuse(self, error: Callable[[], Exception]) -> None:
        """Refuse all waiting calls. Each raises a new error, made by `error`. After an exception, call this again."""
        while self._waiters:
            waiter = next(iter(self._waiters))
            settle_by(waiter, error())
            self._waiters.pop(waiter, None)

    def left(self, _call: object) -> None:
        """As `leave()`, in the form of a done callback of a future."""
        self.leave()
