"""The choice of a worker for a call without a key.

A worker that has not read its latest messages is busy or blocked. The longer it reads nothing, the less it is preferred; after a
while it gets no calls as long as another worker has room. The other workers do not take over its whole share: beyond their own
share, they get another call only after they have read everything sent to them. Otherwise a burst of CPU-bound coroutines would go
to one worker.
"""

import sys
from collections.abc import Callable
from itertools import count
from typing import Final, Generic, TypeVar

from percore._scheduler.queues import Seat

BLOCKED: Final = 5
"""Steps of silence after which a worker counts as blocked instead of busy: 80 ms."""

_AHEAD_LAST: Final = 1 << 32
"""Added to the weight of a worker without a free place: more than any load and silence together."""

_FEW: Final = 4
"""Up to this many workers, comparing all of them is as fast as remembering the last choice."""
_NOWHERE: Final = (-1, sys.maxsize, False)

_SHARED: Final = 0.5
"""Added to the weight of a worker that holds calls of the other kind, which may keep it busy. It decides between equal loads."""

S = TypeVar("S", bound=Seat)


class Choice(Generic[S]):
    """Chooses among the workers that take calls."""

    def __init__(
        self, seats: list[S], places: tuple[int, int], room: tuple[int, int], turn: Callable[[], float] | None = None
    ) -> None:
        """By kind, each worker has so many places, and room for so many calls including those queued ahead.

        `turn` returns the time of the current turn, in which no worker's silence changes; by default every look is a turn.
        """
        self._seats = seats
        self._places = places
        self._room = room
        self._turn: Callable[[], float] = turn or count().__next__
        self._least = [_NOWHERE, _NOWHERE]
        """By kind: the load of the least loaded worker, the index in `seats` at which to look for workers with that load, and
        whether all workers with that load hold calls of the other kind.

        Sending raises the loads one worker after the other, so the next choice needs no full comparison."""
        self._lowered: tuple[list[S], list[S]] = ([], [])
        """By kind: the workers whose load has fallen to the least one since the last full comparison, or above it since then."""
        self._many: frozenset[S] = frozenset()
        """The workers, if they are more than a few."""
        self._is_one_behind = False
        """Whether the last full comparison met a worker that had room and unread messages."""
        self._is_beside = False
        """Whether `of_many` has chosen in place of a blocked worker. Nothing is remembered of that: each such call is counted."""
        self._known_in: list[float | None] = [None, None]
        """By kind: the turn to the end of which `_least` is known, because a worker may read again; None: it stays known."""
        self._best: list[S | None] = [None, None]
        """By kind: the worker that the last full comparison has found best."""
        self._front: dict[int, tuple[S, float, float]] = {}
        """By kind: a worker that stays the best one in this turn, while its load is below this limit and no load falls."""
        self._beyond: dict[S, int] = {}
        """Calls that a worker got in place of a blocked one since it last had read everything."""

    def pick(self) -> Callable[[int], S | None]:
        """Return the function that chooses a worker for a call of a kind, as long as the number of workers stays."""
        return self.of_many if len(self._seats) > _FEW else self.of_few

    def lowered(self, seat: S | None = None) -> None:
        """Note that the load of a worker has fallen. None: perhaps of several, or the workers have changed."""
        self._front.clear()
        if seat is None:
            self._least[0] = self._least[1] = _NOWHERE
            self._known_in[0] = self._known_in[1] = None
            self._best[0] = self._best[1] = None
            self._lowered[0].clear()
            self._lowered[1].clear()
            self._many = frozenset(self._seats) if len(self._seats) > _FEW else frozenset()
        elif seat in self._many:  # not one that drains
            for kind in (0, 1):
                load, least = seat.load[kind], self._least[kind][0]
                if self._known_in[kind] is not None:  # another one may have read since, and have a smaller load
                    self._least[kind], self._known_in[kind] = _NOWHERE, None
                elif load < least:  # then it alone has the least load
                    self._least[kind] = load, len(self._seats), True
                    self._lowered[kind][:] = [seat]
                elif load == least:
                    self._lowered[kind].append(seat)

    def forget(self, seat: S) -> None:
        """Forget a worker that takes no more calls."""
        self._beyond.pop(seat, None)

    def of_few(self, kind: int) -> S | None:
        """Return the least loaded worker with a free place, or else with room to queue ahead; None if the call should wait.

        Each step of silence weighs as much as one call. A CPU-bound coroutine keeps its worker silent, so the load is the better
        measure and silence only adds to it. Of equally loaded workers, one without calls of the other kind is the first choice: a
        coroutine that was sent in this turn may block the worker's loop.
        """
        places, room = self._places[kind], self._room[kind]
        best: S | None = None
        least: float = sys.maxsize
        step = 0
        is_one_behind = False
        for seat in self._seats:
            load = seat.load[kind]
            if load < room and load < least:
                weight: float = load
                silence = seat.silence()
                if silence:
                    is_one_behind = True
                    weight += silence
                if seat.load[1 - kind]:
                    weight += _SHARED
                elif not load and not silence:  # no other worker can be better
                    return seat
                if load >= places:
                    weight += _AHEAD_LAST
                if weight < least:
                    best, least, step = seat, weight, silence
        self._is_one_behind = is_one_behind
        return best if step < BLOCKED else self._beside(best, kind)

    def _beside(self, blocked: S | None, kind: int) -> S | None:
        """Return another worker in place of a blocked one, or the blocked one itself if no other has room.

        If the blocked worker has a free place, other workers are considered only for their free places, not for queueing ahead.
        Each gets only a few calls in its place (a quarter of its own load) until it has read everything. If none may take the
        call yet, the call waits: None.
        """
        self._is_beside = True
        places, room = self._places[kind], self._room[kind]
        level = places if blocked is not None and blocked.load[kind] < places else room
        others = [seat for seat in self._seats if seat.load[kind] < level and seat.silence() < BLOCKED]
        for seat in sorted(others, key=lambda seat: seat.load[kind] + seat.silence()):
            beyond = 0 if seat.has_read() else self._beyond.get(seat, 0)
            if beyond <= seat.load[kind] // 4:
                self._beyond[seat] = beyond + 1
                return seat
        return None if others else blocked

    def of_many(self, kind: int) -> S | None:
        """As `of_few`, but remember the least load and which workers may have it, or that a worker has by far the least."""
        if kind in self._front:
            best, limit, turn = self._front[kind]
            if best.load[kind] < limit and turn == self._turn():
                return best
            del self._front[kind]
        seats, lowered = self._seats, self._lowered[kind]
        least, start, is_shared = self._least[kind]
        while lowered:
            seat = lowered[-1]
            if seat.load[kind] == least and not seat.silence():
                return seat
            lowered.pop()
        known_in = self._known_in[kind]
        for index in range(start, len(seats) if known_in is None or known_in == self._turn() else 0):
            seat = seats[index]
            if seat.load[kind] == least and (is_shared or not seat.load[1 - kind]):
                if seat.silence():
                    if known_in is None:
                        break
                    continue
                self._least[kind] = least, index, is_shared
                return seat
        lowered.clear()
        self._is_beside = False
        chosen = self.of_few(kind)
        self._remember(chosen, kind)
        return chosen

    def _remember(self, best: S | None, kind: int) -> None:
        """Remember what is known after a full comparison."""
        if best is None or self._is_beside:
            self._least[kind], self._known_in[kind] = _NOWHERE, None
            return
        load, silence, turn = best.load[kind], best.silence(), self._turn()
        # A worker with unread messages may have a smaller load, and may read again in the next turn.
        is_lasting = not load or not self._is_one_behind
        self._known_in[kind] = None if is_lasting else turn
        self._least[kind] = _NOWHERE if silence else (load, 0, best.load[1 - kind] > 0)
        was_best, self._best[kind] = self._best[kind] is best, best
        if was_best and load and silence < BLOCKED:
            second = min((seat.load[kind] for seat in self._seats if seat is not best), default=0)
            if second - silence > load + 1:  # no weight is less than a load
                self._front[kind] = best, min(second - silence, self._places[kind]), turn
