"""When a worker is asked to hand back what it has not begun: as soon as it is worth two messages, and no sooner."""

import asyncio
from typing import TYPE_CHECKING, Any, Final

from percore._items import Batch
from percore._messages import Kind

if TYPE_CHECKING:
    from percore._core.dispatch import Dispatch
    from percore._member import Member

ANSWERS: Final = 0.01
"""Seconds in which a worker answers, or counts as silent: others are asked then."""

BRIEF: Final = 0.003
"""Seconds of work that are over before what is handed back could begin elsewhere."""


class Recalls:
    """Looks whom to ask, after the maps have had their chance to pull: then nobody need be asked."""

    def __init__(self, loop: asyncio.AbstractEventLoop, dispatch: "Dispatch[Any, Member]") -> None:
        self._loop = loop
        self._dispatch = dispatch
        self._next: asyncio.Handle | None = None
        self._seen: tuple[Member, int] | None = None
        """Who was left alone, and how much it had done by then."""
        self._again: asyncio.Handle | None = None
        self._is_over = False

    def look(self) -> None:
        """Something has ended or begun."""
        if self._next is None and not self._is_over and self._dispatch.is_dry():
            self._next = self._loop.call_soon(self._look)

    def stop(self) -> None:
        """Nobody is to be asked any more, whatever still ends. Idempotent."""
        self._is_over = True
        self._seen = None
        for handle in (self._next, self._again):
            if handle is not None:
                handle.cancel()
        self._next = self._again = None

    def _look(self) -> None:
        self._next = None
        recall = self._dispatch.recall()
        if recall is None:
            self._seen = None
            return
        seen = (recall.seat, recall.seat.done)
        if seen != self._seen and _seconds(recall.seat) < BRIEF:
            # What was measured may be wrong: whoever has done nothing by then is asked after all.
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


def _seconds(member: "Member") -> float:
    """What it has been sent will keep it busy for so long, as far as that has been measured; infinity: it has not."""
    seconds = 0.0
    for call in list(member.calls.values()):
        if call.kind != Kind.THREAD:
            continue
        if not isinstance(call, Batch):
            return float("inf")
        batches = call.queue.batches
        if batches is None or batches.cost.seconds is None:
            return float("inf")
        seconds += call.outstanding * batches.cost.seconds
    return seconds
