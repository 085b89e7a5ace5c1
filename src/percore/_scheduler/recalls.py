"""The decision which worker is asked to return calls that it has not begun.

When a worker runs out of calls while another still holds some that have not begun, the supervisor asks the other to return them.
"""

from collections.abc import Callable
from operator import itemgetter
from typing import Generic, NamedTuple, TypeVar

from percore._protocol.messages import Kind
from percore._scheduler.queues import Seat

S = TypeVar("S", bound=Seat)


class Recall(NamedTuple, Generic[S]):
    """Ask `seat` for up to `wanted` calls that have not begun."""

    seat: S
    wanted: int


class Recalls(Generic[S]):
    """Knows which workers may hold calls that were queued ahead."""

    def __init__(self, seats: list[S], threads: int, waits: Callable[[], bool]) -> None:
        """`threads`: those of each worker. `waits`: whether a plain call waits that any worker may take."""
        self._seats = seats
        self._threads = threads
        self._waits = waits
        self.is_ahead = False
        """Whether calls may be queued ahead."""
        self.times_ahead = 0
        """How often calls were queued ahead. A recall stores this count to tell whether more were queued ahead since."""
        self.barren: dict[S, int] = {}
        """Workers that had no calls to return: the value of `times_ahead` when each was asked."""

    def note_ahead(self) -> None:
        """Note that a call was queued ahead."""
        self.is_ahead = True
        self.times_ahead += 1

    def gave_nothing(self, seat: S, asked_at: int) -> None:
        """Implement `Dispatch.gave_nothing`."""
        if seat in self._seats:
            self.barren[seat] = asked_at

    def is_dry(self) -> bool:
        """Whether plain calls are queued ahead and none waits."""
        return self.is_ahead and not self._waits()

    def recall(self) -> Recall[S] | None:
        """Decide which worker to ask for plain calls that have not begun.

        None unless a worker has a free thread, no plain call waits here, and a worker may hold surplus calls.
        """
        kind = Kind.THREAD
        if not self.is_ahead or not self._seats or self._waits():
            return None
        free = sum(max(0, self._begins(seat) - seat.load[kind]) for seat in self._seats)
        fullest = self._fullest()
        if free <= 0 or fullest is None:
            return None
        surplus = fullest.items - min(self._begins(fullest), fullest.load[kind])
        return Recall(fullest, -(-surplus // 2) if fullest.items > fullest.load[kind] else min(free, -(-surplus // 2)))

    def _begins(self, seat: S) -> int:
        """Return how many plain calls a worker runs at once: one of those that it holds, or as many as it has threads."""
        return 1 if seat.is_holding and seat.load[Kind.THREAD] else self._threads

    def _fullest(self) -> S | None:
        """Return the fullest worker that may have calls to return; None if there is none, or if one is about to answer.

        A silent worker does not answer soon, so the others are asked first, even while its answer is outstanding.
        """
        loads = [(seat, seat.items) for seat in self._seats]
        full = [
            (seat, items)
            for seat, items in loads
            if items > min(self._begins(seat), seat.load[Kind.THREAD]) and self.barren.get(seat) != self.times_ahead
        ]
        self.is_ahead = bool(full)
        awake = [(seat, items) for seat, items in full if not seat.silence()]
        if any(seat.recalling for seat, _ in awake):
            return None
        rest = awake or [(seat, items) for seat, items in full if not seat.recalling]
        return max(rest, key=itemgetter(1))[0] if rest else None
