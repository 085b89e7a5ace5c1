"""Who gets which call: pure decisions about places, queues and recalls.

Places are counted by kind, so a coroutine never waits behind plain calls that want a thread, nor the other way round. A place is
free when a worker can begin the call at once. Where no worker has one, plain calls are queued ahead in workers, so that no thread
waits for a round trip; coroutines are not, since a worker starts one as soon as it reads it.
A worker that has not read what it was last sent (its loop may be blocked) gets nothing while another has room.
When a worker runs dry while another still holds calls that have not begun, they are asked back.
"""

from collections import deque
from collections.abc import Iterable, Iterator
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from percore._messages import Kind

AHEAD: Final = 4
"""Plain calls queued ahead in a worker, per thread. Fewer cost throughput, measured: 0.91 to 0.96 of it at 2."""


_FEW: Final = 64


class Queued(Protocol):
    """A call, as far as it matters here."""

    kind: int

    def done(self) -> bool:
        """Whether it has ended while it waited (was cancelled)."""


class Seat(Protocol):
    """A ready worker, as far as it matters here."""

    load: list[int]
    """Calls sent and not ended, by kind."""

    recalling: bool
    """Whether it has been asked for calls and has not answered."""

    def silence(self) -> int:
        """For how long it has read nothing, while there was something to read, in coarse steps; 0: not worth mentioning."""


C = TypeVar("C", bound=Queued)
S = TypeVar("S", bound=Seat)


class Recall(NamedTuple, Generic[S]):
    """Ask `seat` for up to `wanted` calls that have not begun."""

    seat: S
    wanted: int


def room_of(concurrency: int, threads: int) -> int:
    """Calls that one worker may hold at once, of all kinds."""
    return concurrency + threads * (1 + AHEAD)


def places_for(room: int) -> int:
    """Start marks of a worker with room for so many calls: a power of two, so that a call's id names its place."""
    return 1 << max(0, room - 1).bit_length()


class Dispatch(Generic[C, S]):
    """The calls that wait, and the workers that may take them."""

    def __init__(self, concurrency: int, threads: int) -> None:
        self._places = (concurrency, threads)
        self._room = (concurrency, threads * (1 + AHEAD))
        self.room = room_of(concurrency, threads)
        self._queues: tuple[deque[C], deque[C]] = (deque(), deque())
        self._ended = [0, 0]
        self._is_ahead = False
        self.seats: list[S] = []

    def room_for(self, kind: int) -> int:
        """Calls of that kind that one worker may hold at once, those queued ahead included."""
        return self._room[kind]

    def waiting(self) -> int:
        """Calls that wait here."""
        return sum(len(queue) for queue in self._queues) - sum(self._ended)

    def submitted(self, call: C) -> S | None:
        """A new call: the worker to send it to now, or None: it waits."""
        kind = call.kind
        queue = self._queues[kind]
        if not queue:
            seats = self.seats
            if len(seats) == 1 and seats[0].load[kind] < self._places[kind]:
                return seats[0]
            seat = self._pick(kind)
            if seat is not None:
                return seat
        queue.append(call)
        return None

    def returned(self, calls: Iterable[C]) -> None:
        """Calls that were sent and have not begun come back to the head of the queue, in the order given."""
        for call in reversed(list(calls)):
            self._queues[call.kind].appendleft(call)

    def ended(self, call: C) -> None:
        """A call that waits here was cancelled. It is dropped when its turn comes, or when half of its queue is such."""
        self._ended[call.kind] += 1
        self._purge(call.kind)

    def _purge(self, kind: int) -> None:
        ended, queue = self._ended[kind], self._queues[kind]
        if ended > _FEW and ended * 2 > len(queue):
            live = [waiting for waiting in queue if not waiting.done()]
            queue.clear()
            queue.extend(live)
            self._ended[kind] = 0

    def nothing_is_ahead(self) -> None:
        """A worker that was asked had nothing to give back: ask no more until something is queued ahead again."""
        self._is_ahead = False

    def is_quiet(self) -> bool:
        """Whether nothing waits and nothing is queued ahead: there is nothing to decide."""
        return not (self._queues[0] or self._queues[1] or self._is_ahead)

    def next(self, kind: int) -> tuple[C, S] | None:
        """The next call of that kind that can be sent, and where to."""
        queue = self._queues[kind]
        while queue:
            if queue[0].done():
                queue.popleft()
                self._ended[kind] -= 1
                continue
            seat = self._pick(kind)
            if seat is None:
                return None
            call = queue.popleft()
            self._purge(kind)
            return call, seat
        return None

    def fill(self, kind: int) -> Iterator[tuple[C, S]]:
        """The calls of that kind that can be sent, and where to, in order. Each must be sent before the next is asked for."""
        queue = self._queues[kind]
        places = self._places[kind]
        free = [seat for seat in self.seats if seat.load[kind] < places] if queue else []
        if len(free) == 1:  # after an outcome, mostly: there is nothing to choose
            seat = free[0]
            load = seat.load
            while queue and load[kind] < places:
                call = queue.popleft()
                if call.done():
                    self._ended[kind] -= 1
                else:
                    yield call, seat
            self._purge(kind)
        while (following := self.next(kind)) is not None:
            yield following

    def withdraw(self) -> list[C]:
        """Take every waiting call out."""
        calls = [call for queue in self._queues for call in queue if not call.done()]
        for queue in self._queues:
            queue.clear()
        self._ended = [0, 0]
        return calls

    def recall(self) -> Recall[S] | None:
        """Whom to ask for plain calls that have not begun, when a worker has a free thread and nothing waits here."""
        kind = Kind.THREAD
        if not self._is_ahead or len(self.seats) < 2 or self._queues[kind]:
            return None
        threads = self._places[kind]
        free = sum(threads - seat.load[kind] for seat in self.seats if seat.load[kind] < threads)
        fullest = max(self.seats, key=lambda seat: seat.load[kind])
        surplus = fullest.load[kind] - threads
        self._is_ahead = surplus > 0
        if free <= 0 or surplus <= 0 or fullest.recalling:
            return None
        return Recall(fullest, min(free, -(-surplus // 2)))

    def _pick(self, kind: int) -> S | None:
        best = self._least(kind, self._places[kind])
        if best is None and self._room[kind] > self._places[kind]:
            best = self._least(kind, self._room[kind])
            self._is_ahead |= best is not None
        return best

    def _least(self, kind: int, limit: int) -> S | None:
        """The least loaded of those with fewer than `limit` that are not behind; else the one that is so for the shortest time."""
        best: S | None = None
        best_load = limit
        silent: S | None = None
        shortest = (0, 0)
        for seat in self.seats:
            load = seat.load[kind]
            if load < best_load:
                silence = seat.silence()
                if not silence:
                    best, best_load = seat, load
                elif silent is None or (silence, load) < shortest:
                    silent, shortest = seat, (silence, load)
        return best if best is not None else silent
