"""Decides when a worker is asked to hand back calls that it has not begun, so that an idle worker can run them.

A recall costs two messages. So a worker that will soon be done with all it holds, by measured times, is not asked at once.
"""

import asyncio
from typing import TYPE_CHECKING, Any, Final

from percore._protocol.messages import Kind

if TYPE_CHECKING:
    from percore._scheduler.dispatch import Dispatch
    from percore._supervisor.pool_worker import PoolWorker

ANSWERS: Final = 0.01
"""Seconds after a recall until the next look. A worker that has not answered by then counts as silent, and others are asked."""

BRIEF: Final = 0.003
"""Seconds of work below which a recall does not pay: the work ends before the calls could begin in another worker."""


class Rebalancing:
    """Recalls calls from full workers while others are idle.

    Each look is deferred to the next iteration of the loop, because open maps may pull more inputs until then. In that case no
    recall is needed.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, dispatch: "Dispatch[Any, PoolWorker]") -> None:
        self._loop = loop
        self._dispatch = dispatch
        self._next: asyncio.Handle | None = None
        self._seen: tuple[PoolWorker, int] | None = None
        """The worker that was not asked because it has little to do, and its count of ended calls at that time."""
        self._again: asyncio.Handle | None = None
        self._is_over = False

    def look(self) -> None:
        """Schedule a look, if nothing waits while workers hold calls queued ahead. To be called when calls have ended or begun."""
        if self._next is None and not self._is_over and self._dispatch.is_dry():
            self._next = self._loop.call_soon(self._look)

    def stop(self) -> None:
        """Ask no worker from now on. Idempotent."""
        self._is_over = True
        self._seen = None
        for handle in (self._next, self._again):
            if handle is not None:
                handle.cancel()
        self._next = self._again = None

    def catch_up(self) -> None:
        """Look now, instead of soon: the loop may have lost the look."""
        if self._next is not None:
            self._next.cancel()
            self._look()
        if self._again is not None:
            self._again.cancel()
            self._look_again()

    def _look(self) -> None:
        self._next = None
        recall = self._dispatch.recall()
        if recall is None:
            self._seen = None
            return
        seen = (recall.seat, recall.seat.done)
        if seen != self._seen and _seconds(recall.seat) < BRIEF:
            # The measured times may be wrong: if the worker has ended no call after BRIEF seconds, it is asked after all.
            self._seen = seen
            self._next = self._loop.call_later(BRIEF, self._look)
            return
        self._seen = None
        recall.seat.ask_back(recall.wanted, self._dispatch.times_ahead)
        if self._again is None:
            self._again = self._loop.call_later(ANSWERS, self._look_again)

    def _look_again(self) -> None:
        self._again = None
        self.look()


def _seconds(member: "PoolWorker") -> float:
    """Return how long the worker's plain calls will take in total, by measured times; infinity if a time is unknown."""
    return sum(call.seconds() for call in list(member.calls.values()) if call.kind == Kind.THREAD)
