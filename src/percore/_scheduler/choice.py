"""The choice of a worker for a call without a key.

A worker that has not read its latest messages is busy or blocked. The longer it reads nothing, the less it is preferred; after a
while it gets no calls as long as another worker has room. The other workers do not take over its whole share: beyond their own
share, they get another call only after they have read everything sent to them. Otherwise a burst of CPU-bound coroutines would go
to one worker.
"""

from collections.abc import Callable
from heapq import heappop, heappush, heapreplace
from itertools import count
from sys import maxsize
from typing import Final, Generic, TypeVar

from percore._scheduler.queues import Seat

BLOCKED: Final = 5
"""Steps of silence after which a worker counts as blocked instead of busy: 80 ms."""

_FEW: Final = 4
"""Up to this many workers, comparing all of them for each call is as fast as ranking them."""

_NO_PLACE: Final = 1 << 32
"""Added to the weight of a worker without a free place: more than any load and silence together."""
_NO_ROOM: Final = 2 * _NO_PLACE
"""Added to the weight of a worker without room."""

_MOST: Final = 256
"""Calls that are planned at once."""

S = TypeVar("S", bound=Seat)


class _Ranking(Generic[S]):
    """The workers in the order in which calls of one kind prefer them. A worker is known by its place in the list of workers.

    A rank is the weight of a worker, times the number of workers, plus its place. So the least rank is that of the best worker, and
    among equals that of the first. A rank is never too high: what lowers a weight is noted at once (`lower`) or looked for in the
    next turn (`late`). It may be too low, because a call that is sent is not noted. So a rank is compared with its worker before it
    counts.
    """

    __slots__ = ("heap", "late", "ranks", "seats", "turn")

    def __init__(self, seats: tuple[S, ...], kind: int) -> None:
        self.seats = seats
        self.ranks = [2 * seat.load[kind] * len(seats) + place for place, seat in enumerate(seats)]
        """The rank of each worker."""
        self.heap = sorted(self.ranks)
        """All ranks, and some that are no worker's any more."""
        self.late: set[int] = set()
        """The places of workers whose rank may include silence, which can end without a message."""
        self.turn = 0.0
        """The turn of these silences."""

    def top(self, kind: int) -> S | None:
        """Return the worker of the least rank if nothing but its calls adds to its weight, and it was sent none since.

        Then it is the best one. Often it is: a worker that has just ended a call.
        """
        heap, seats = self.heap, self.seats
        rank, size = heap[0], len(seats)
        place = rank % size
        seat = seats[place]
        load = seat.load
        is_best = rank == 2 * load[kind] * size + place == self.ranks[place] and not load[1 - kind] and not seat.silence()
        return seat if is_best else None

    def lower(self, place: int, rank: int) -> None:
        """Note that the worker of this place may have this rank, which is less than the one it had."""
        heappush(self.heap, rank)
        self.ranks[place] = rank
        if len(self.heap) > 4 * len(self.ranks):
            self.heap = sorted(self.ranks)


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
        self._place_of: dict[S, int] = {}
        self._rankings: tuple[_Ranking[S], ...] = ()
        """By kind. Empty if the workers have changed, and while one of the two is compared with the workers."""
        self._times_lowered = 0
        self._plans: tuple[list[tuple[S, int]], list[tuple[S, int]]] = ([], [])
        """By kind: who gets the next calls, the last one first, each with the load that it must have by then. A plan holds for its
        turn, while no load falls and no call of the other kind is sent."""
        self._planned_in = [0.0, 0.0]
        """By kind: the turn of the plan."""
        self._looks = 0
        """How often the least rank was looked for since a load has fallen; from the second time on in the turn of the plan."""
        self._beyond: dict[S, int] = {}
        """Calls that a worker got in place of a blocked one since it last had read everything."""

    def pick(self) -> Callable[[int], S | None]:
        """Return the function that chooses a worker for a call of a kind, as long as the number of workers stays."""
        return self.of_many if len(self._seats) > _FEW else self.of_few

    def lowered(self, seat: S | None = None) -> None:
        """Note that the load of a worker has fallen. None: perhaps of several, or the workers have changed."""
        self._looks = 0
        if seat is None:
            self._times_lowered += 1
            self._plans[0].clear()
            self._plans[1].clear()
            self._rankings = ()
            self._place_of = {}
        elif (place := self._place_of.get(seat)) is not None:  # not one that drains
            self._times_lowered += 1
            load, size = seat.load, len(self._place_of)
            for kind, ranking in enumerate(self._rankings):
                self._plans[kind].clear()
                rank = 2 * load[kind] * size + place  # as if nothing else added to its weight
                if rank < ranking.ranks[place]:
                    ranking.lower(place, rank)

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
        least: float = maxsize
        step = 0
        for seat in self._seats:
            load = seat.load[kind]
            if load < room and load < least:
                weight: float = load
                silence = seat.silence()
                if silence:
                    weight += silence
                if seat.load[1 - kind]:
                    weight += 0.5
                elif not load and not silence:  # no other worker can be better
                    return seat
                if load >= places:
                    weight += _NO_PLACE
                if weight < least:
                    best, least, step = seat, weight, silence
        return best if best is None or step < BLOCKED else self._beside(best, kind)

    def of_many(self, kind: int) -> S | None:
        """As `of_few`, but rank the workers, and plan the next calls of this turn."""
        plan = self._plans[kind]
        if plan and self._planned_in[kind] == self._turn():
            seat, load = plan.pop()
            if seat.load[kind] == load:
                return seat
        plan.clear()
        self._plans[1 - kind].clear()
        if self._rankings and (quick := self._rankings[kind].top(kind)) is not None and quick.load[kind] < self._places[kind]:
            return quick
        rankings, times_lowered = self._rankings or self._ranked(), self._times_lowered
        self._rankings = ()  # an error must not leave one that lacks a worker
        best = self._first(rankings[kind], kind)
        if times_lowered == self._times_lowered:
            self._rankings = rankings
        else:  # a garbage collection has run user code that has cancelled calls
            plan.clear()
        return best

    def _ranked(self) -> tuple[_Ranking[S], ...]:
        seats = tuple(self._seats)
        self._place_of = {seat: place for place, seat in enumerate(seats)}
        return _Ranking(seats, 0), _Ranking(seats, 1)

    def _first(self, ranking: _Ranking[S], kind: int) -> S | None:
        """Return the worker for a call, and plan those of the next calls."""
        if ranking.late:
            self._look_again(ranking, kind)
        weight = self._raise(ranking, kind)
        if weight >= _NO_ROOM:
            return None
        heap, seats, size = ranking.heap, ranking.seats, len(ranking.seats)
        best = seats[heap[0] % size]
        if self._is_blocked(ranking):
            return self._beside(best, kind)
        self._looks += 1
        if self._looks > 1 and weight < _NO_PLACE:
            self._look_ahead(ranking, kind, weight)
        return best

    def _look_ahead(self, ranking: _Ranking[S], kind: int, weight: int) -> None:
        """Plan the next calls for the workers of this weight, the least one: the more calls, the more looks this turn has had."""
        heap, seats, size = ranking.heap, ranking.seats, len(ranking.seats)
        turn = self._turn()
        if turn != self._planned_in[kind]:
            self._planned_in[kind], self._looks = turn, 1
            return
        most = min(8 ** (min(self._looks, 4) - 1), _MOST)
        equals = [heappop(heap)]
        while self._raise(ranking, kind) == weight and len(equals) < most and not self._is_blocked(ranking):
            equals.append(heappop(heap))
        self._plan([seats[rank % size] for rank in equals], kind, heap[0] // size - weight if heap else 2 * most, most)
        for rank in equals:
            heappush(heap, rank)

    def _raise(self, ranking: _Ranking[S], kind: int) -> int:
        """Correct the least rank until it is that of the best worker. Return the weight of that one."""
        heap, ranks, seats = ranking.heap, ranking.ranks, ranking.seats
        size = len(seats)
        while heap:
            rank = heap[0]
            place = rank % size
            if rank != ranks[place]:  # it is no worker's any more
                heappop(heap)
                continue
            load = seats[place].load
            weight = 2 * load[kind]
            if weight * size + place <= rank:  # else the calls sent since then are enough to make another one better
                silence = seats[place].silence()
                weight += 2 * silence + (load[1 - kind] > 0)
                if load[kind] >= self._places[kind]:
                    weight += _NO_PLACE if load[kind] < self._room[kind] else _NO_ROOM
                if silence:
                    self._note_late(ranking, place)
                if weight * size + place <= rank:
                    return weight
            ranks[place] = weight * size + place
            heapreplace(heap, ranks[place])
        return _NO_ROOM

    def _plan(self, equals: list[S], kind: int, gap: int, most: int) -> None:
        """Plan the next calls: these workers of equal weight take turns. `gap`: what the next worker's weight has beyond theirs."""
        free = self._places[kind] - max(seat.load[kind] for seat in equals)
        rounds = min(max(1, (gap + 1) // 2), free, -(-most // len(equals)))
        plan = [(seat, seat.load[kind] + times) for times in range(rounds) for seat in equals]
        plan.reverse()
        plan.pop()  # the first one gets the call at hand
        self._plans[kind][:] = plan

    def _is_blocked(self, ranking: _Ranking[S]) -> bool:
        """Return whether the worker of the least rank is blocked."""
        place = ranking.heap[0] % len(ranking.seats)
        return place in ranking.late and ranking.seats[place].silence() >= BLOCKED

    def _note_late(self, ranking: _Ranking[S], place: int) -> None:
        if not ranking.late:
            ranking.turn = self._turn()
        ranking.late.add(place)

    def _look_again(self, ranking: _Ranking[S], kind: int) -> None:
        """In a new turn, let the workers be compared again that were silent."""
        if ranking.turn != self._turn():
            for place in ranking.late:
                rank = 2 * ranking.seats[place].load[kind] * len(ranking.seats) + place
                if rank < ranking.ranks[place]:
                    ranking.lower(place, rank)
            ranking.late.clear()

    def _beside(self, blocked: S, kind: int) -> S | None:
        """Return another worker in place of a blocked one, or the blocked one itself if no other has room.

        If the blocked worker has a free place, other workers are considered only for their free places, not for queueing ahead.
        Each gets only a few calls in its place (a quarter of its own load) until it has read everything. If none may take the
        call yet, the call waits: None.
        """
        places, room = self._places[kind], self._room[kind]
        level = places if blocked.load[kind] < places else room
        others = [seat for seat in self._seats if seat.load[kind] < level and seat.silence() < BLOCKED]
        for seat in sorted(others, key=lambda seat: seat.load[kind] + seat.silence()):
            beyond = 0 if seat.has_read() else self._beyond.get(seat, 0)
            if beyond <= seat.load[kind] // 4:
                self._beyond[seat] = beyond + 1
                return seat
        return None if others else blocked
