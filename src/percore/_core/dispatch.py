"""Who gets which call: pure decisions about places, turns and recalls.

Places are counted by kind, so a coroutine never waits behind plain calls that want a thread, nor the other way round. A place is
free when a worker can begin the call at once. Where no worker has one, plain calls are queued ahead in workers, so that no thread
waits for a round trip; coroutines are not, since a worker starts one as soon as it reads it. What is queued ahead is sent by the
dozen: not before a worker has room for as many as it has threads. Each message wakes it, and a loop among threads wakes dearly.
A worker that has not read what it was last sent weighs more, the longer the more: its loop is busy, or blocked. After a while it
gets nothing while another has room. But the others do not take all in its place: beyond their share they get more only when they
have read what they were sent. Else a burst of coroutines that take the CPU would go to one worker.
Each map has a queue of its own, and so have the single calls of each kind. They take turns: what waits in one never waits for more
than what the workers hold already and one call or batch of each other queue.
When a worker runs dry while another still holds calls that have not begun, they are asked back.
"""

import sys
from collections import deque
from collections.abc import Hashable, Iterable, Iterator
from operator import itemgetter
from typing import Final, Generic, NamedTuple, Protocol, TypeVar

from percore._core.batches import Batches
from percore._core.keys import Keys, Lanes, purge
from percore._core.names import Names
from percore._messages import Kind

AHEAD: Final = 4
"""Plain calls queued ahead in a worker, per thread. Fewer cost throughput, measured: 0.91 to 0.96 of it at 2."""

BESIDE: Final = 16
"""Calls that a worker may hold beside all others: broadcasts."""

BLOCKED: Final = 5
"""Steps of silence from which on a worker is taken for blocked, not for busy: 80 ms."""

_AHEAD_LAST: Final = 1 << 32
"""What it weighs to be queued ahead: more than any load and silence."""

ROOM_OF_NONE: Final = 1 << 40
"""Added to the load of a worker that may begin no more calls: it has no place then, whatever ends there."""

_FEW: Final = 4
"""Workers of which it takes no longer to look at all than to remember anything."""
_NOWHERE: Final = (-1, sys.maxsize)


class Queued(Protocol):
    """A call or a batch, as far as it matters here."""

    kind: int

    @property
    def key(self) -> Hashable | None: ...

    def done(self) -> bool:
        """Whether it has ended while it waited (was cancelled)."""

    @property
    def size(self) -> int:
        """How many items it is."""


class Seat(Protocol):
    """A ready worker, as far as it matters here."""

    index: int

    load: list[int]
    """Places taken, by kind."""

    tickets: int
    """Calls that it may still begin. While there are none, `load` says that it has no place."""

    @property
    def items(self) -> int:
        """Plain calls sent and not ended, those in batches counted one by one."""

    recalling: bool
    """Whether it has been asked for calls and has not answered."""

    def silence(self) -> int:
        """For how long it has read nothing, while there was something to read, in coarse steps; 0: not worth mentioning."""

    def has_read(self) -> bool:
        """Whether it has read everything. If it has not, the supervisor looks for calls to send once it has."""


C = TypeVar("C", bound=Queued)
S = TypeVar("S", bound=Seat)


class Recall(NamedTuple, Generic[S]):
    """Ask `seat` for up to `wanted` calls that have not begun."""

    seat: S
    wanted: int


class Queue(Lanes[C, S]):
    """What waits of one map, or of the single calls of one kind: calls, calls with keys, and items for batches."""

    __slots__ = ("batches", "calls", "ended", "is_listed", "kind", "lanes_first")

    def __init__(self, kind: int, batches: Batches[C] | None = None) -> None:
        super().__init__()
        self.kind = kind
        self.batches = batches
        self.calls: deque[C] = deque()
        self.ended = 0
        self.is_listed = False
        self.lanes_first = False

    def __len__(self) -> int:
        """What waits here, cancelled or not."""
        return len(self.calls) + self.count + (0 if self.batches is None else len(self.batches))


def room_of(concurrency: int, threads: int) -> int:
    """Calls that one worker may hold at once, of all kinds."""
    return concurrency + threads * (1 + AHEAD) + BESIDE


def places_for(room: int) -> int:
    """Start marks of a worker with room for so many calls: a power of two, so that a call's id names its place.

    More than the room: a `__del__`, run by a garbage collection between the choice of a worker and the sending, may take the place.
    """
    return 1 << room.bit_length()


class Dispatch(Generic[C, S]):
    """The calls that wait, and the workers that may take them."""

    def __init__(self, concurrency: int, threads: int, per_key: int | None = None) -> None:
        self._places = (concurrency, threads)
        self._room = (concurrency, threads * (1 + AHEAD))
        self._low = (concurrency - 1, threads * AHEAD)
        """Calls that one worker may still hold when it is sent more."""
        self.room = room_of(concurrency, threads)
        self.singles: tuple[Queue[C, S], Queue[C, S]] = (Queue(Kind.TASK), Queue(Kind.THREAD))
        self._turns: tuple[deque[Queue[C, S]], deque[Queue[C, S]]] = (deque(), deque())
        self._maps: dict[Queue[C, S], None] = {}
        self._is_ahead = False
        self.times_ahead = 0
        """How often something was queued ahead: who asks for it back notes when."""
        self.keys: Keys[C, S] = Keys(per_key)
        self.names = Names()
        """Gives the keys of calls: users' keys are not handled here."""
        self._barren: dict[S, int] = {}
        """Workers that had nothing to give back: `times_ahead` when each was asked."""
        self.seats: list[S] = []
        self._least = [_NOWHERE, _NOWHERE]
        """By kind: the load of the least loaded worker, and from where on in `seats` to look for such. Loads rise by what is sent,
        one worker after the other; so until one is `lowered` the next choice is found without looking at all of them again."""
        self._is_one_behind = False
        """Whether, when all were looked at last, one that had room was behind."""
        self._beyond: dict[S, int] = {}
        """Calls that a worker was sent in place of a blocked one, since it had read everything."""
        self._pick = self._pick_of_few

    # Workers

    def seat(self, seat: S) -> None:
        """This worker takes calls from now on."""
        self.seats.append(seat)
        self._seated()

    def lowered(self) -> None:
        """Some worker's load has become less."""
        least = self._least
        least[0] = least[1] = _NOWHERE

    def unseat(self, seat: S) -> None:
        """This worker takes no more calls. It may be one that did not."""
        if seat in self.seats:
            self.seats.remove(seat)
            self._beyond.pop(seat, None)
            self._barren.pop(seat, None)
            self._seated()

    def expel(self, seat: S) -> None:
        """As `unseat`, after that has failed halfway."""
        while seat in self.seats:
            self.seats.remove(seat)
        self._seated()

    def _seated(self) -> None:
        self.lowered()
        self._pick = self._pick_of_many if len(self.seats) > _FEW else self._pick_of_few
        for queue in self.keys.seated(self.seats):
            self._list(queue)

    def is_settled(self) -> bool:
        """Whether all calls with keys are where they belong since the workers have changed. If not, `settle` is to be called."""
        return self.keys.is_settled()

    def settle(self) -> None:
        """Move some of them to where they belong: a piece of work, less than a millisecond."""
        for queue in self.keys.settle():
            self._list(queue)

    def room_for(self, kind: int) -> int:
        """Calls of that kind that one worker may hold at once, those queued ahead included."""
        return self._room[kind]

    # Queues

    def open(self, queue: Queue[C, S]) -> None:
        """A map begins."""
        self._maps[queue] = None

    def close(self, queue: Queue[C, S]) -> None:
        """A map ends. What waits of it is dropped: its owner has seen to that."""
        self._maps.pop(queue, None)
        self.keys.forget(queue)
        if queue.is_listed:
            queue.is_listed = False
            self._turns[queue.kind].remove(queue)

    def waiting(self) -> int:
        """Calls that wait here."""
        return sum(len(queue) - queue.ended for queue in (*self.singles, *self._maps))

    def _list(self, queue: Lanes[C, S]) -> None:
        if isinstance(queue, Queue) and not queue.is_listed:
            queue.is_listed = True
            self._turns[queue.kind].append(queue)

    # Calls

    def submitted(self, call: C, queue: Queue[C, S] | None = None) -> S | None:
        """A new call: the worker to send it to now, or None: it waits. `queue`: of its map; None: it is a single one."""
        kind = call.kind
        home = self.singles[kind] if queue is None else queue
        if call.key is not None:
            return self._submitted_keyed(call, home)
        if not home.calls:
            turns = self._turns[kind]
            # Lanes are nobody before it: they may wait for one worker while others have room.
            if not turns or not any(waiting.calls or waiting.batches for waiting in tuple(turns)):
                seats = self.seats
                if len(seats) == 1 and seats[0].load[kind] < self._places[kind]:
                    return seats[0]
                seat = self._pick(kind)
                if seat is not None:
                    if seat.load[kind] >= self._places[kind]:
                        self._note_ahead()
                    return seat
        home.calls.append(call)
        if not home.is_listed:
            self._list(home)
        return None

    def _submitted_keyed(self, call: C, queue: Queue[C, S]) -> S | None:
        seat = self.keys.submitted(call, queue, self._places[call.kind])
        if seat is None and queue.by_seat and not queue.is_listed:
            self._list(queue)
        return seat

    def appended(self, queue: Queue[C, S]) -> None:
        """Items for batches have been appended to a queue: they take their turns."""
        self._list(queue)

    def returned(self, calls: Iterable[tuple[C, Queue[C, S] | None]]) -> None:
        """Calls that were sent and have not begun come back to the head of their queues, in the order given."""
        for call, queue in reversed(list(calls)):
            home = self.singles[call.kind] if queue is None else queue
            if call.key is None:
                home.calls.appendleft(call)
                self._list(home)
            else:
                self.keys.returned(call, home)
                if home.by_seat:
                    self._list(home)

    def ended(self, call: C, queue: Queue[C, S] | None = None) -> None:
        """A call that waits here was cancelled. It is dropped when its turn comes, or when half of its queue is such."""
        home = self.singles[call.kind] if queue is None else queue
        if call.key is None:
            home.ended += 1
            purge(home)
        else:
            self.keys.cancelled(call.key, home)

    def remove(self, call: C, queue: Queue[C, S] | None = None) -> None:
        """Take a call out that may wait here. It looks at all that wait, and is for calls that percore has failed with."""
        home = self.singles[call.kind] if queue is None else queue
        if call.key is not None:
            self.keys.remove(call, home)
        elif call in home.calls:
            home.calls.remove(call)

    def left(self, call: C) -> None:
        """A call with a key, that was sent, is not under way any more."""
        for queue in self.keys.ended(call.key):
            self._list(queue)

    def gave_nothing(self, seat: S, asked_at: int) -> None:
        """This worker had nothing to give back: it is not asked again until something is queued ahead; others may have something.

        `asked_at`: `times_ahead` when it was asked; what was queued ahead since then it has not heard of.
        """
        if seat in self.seats:
            self._barren[seat] = asked_at

    def _note_ahead(self) -> None:
        self._is_ahead = True
        self.times_ahead += 1

    def is_quiet(self) -> bool:
        """Whether nothing waits that could be sent and nothing is queued ahead: there is nothing to decide."""
        return not (self._turns[0] or self._turns[1] or self._is_ahead or self.keys.strays)

    def fill(self, kind: int) -> Iterator[tuple[C, S]]:
        """The calls of that kind that can be sent, and where to, in order. Each must be sent before the next is asked for."""
        turns = self._turns[kind]
        low = self._low[kind]
        if not turns or all(seat.load[kind] > low for seat in self.seats):
            return
        if len(turns) == 1:  # no turns to take
            queue = turns[0]
            if queue.by_seat:
                if not queue.calls and not queue.batches:
                    yield from self._fill_lanes(queue, kind)
            elif (seat := self._only(kind)) is not None:  # after an outcome, mostly
                calls, load, places = queue.calls, seat.load, self._places[kind]
                while calls and load[kind] < places:
                    call = calls.popleft()
                    if queue.ended and call.done():
                        queue.ended -= 1
                    else:
                        yield call, seat
        while (following := self.next(kind)) is not None:
            yield following

    def _only(self, kind: int) -> S | None:
        """The one worker that has a place: there is nothing to choose."""
        places = self._places[kind]
        free = [seat for seat in self.seats if seat.load[kind] < places]
        return free[0] if len(free) == 1 else None

    def _fill_lanes(self, queue: Queue[C, S], kind: int) -> Iterator[tuple[C, S]]:
        """All free places of the workers that calls with keys wait for: there is nothing to choose."""
        places = self._places[kind]
        take = self.keys.take
        for seat in list(queue.by_seat):
            load = seat.load
            while load[kind] < places and (call := take(queue, seat)) is not None:
                yield call, seat

    def next(self, kind: int) -> tuple[C, S] | None:
        """The next call of that kind that can be sent, and where to."""
        turns = self._turns[kind]
        if not turns:
            return None
        seat = self._pick(kind)
        if seat is None and not any(queue.by_seat for queue in tuple(turns)):
            return None
        for _ in range(len(turns)):
            if not turns:
                break
            # Out of the list and marked so in one step: a collection that begins in the midst of this may take a turn, too.
            queue = turns.popleft()
            queue.is_listed = False
            try:
                found = self._from(queue, seat)
            finally:
                if queue.calls or queue.batches or queue.by_seat:
                    self._list(queue)
            if found is not None:
                if found[1].load[kind] >= self._places[kind]:
                    self._note_ahead()
                return found
        return None

    def _from(self, queue: Queue[C, S], seat: S | None) -> tuple[C, S] | None:
        """What this queue's turn brings: by turns one of its lanes and one of its other calls, which go to this worker if any."""
        found = None
        if seat is None:
            found = self._from_lanes(queue)
            queue.lanes_first &= found is None
            return found
        if queue.by_seat and queue.lanes_first:
            found = self._from_lanes(queue)
            queue.lanes_first = False
        if found is None:
            found = self._from_calls(queue, seat)
            queue.lanes_first = True
        if found is None and queue.by_seat:
            found = self._from_lanes(queue)
        return found

    def _from_calls(self, queue: Queue[C, S], seat: S) -> tuple[C, S] | None:
        calls = queue.calls
        while calls:
            call = calls.popleft()
            if not call.done():
                purge(queue)
                return call, seat
            queue.ended -= 1
        if queue.batches:
            batch = queue.batches.pop(len(self.seats), seat.tickets)
            if batch.size > 1:
                self._note_ahead()
            return batch, seat
        return None

    def _from_lanes(self, queue: Queue[C, S]) -> tuple[C, S] | None:
        kind = queue.kind
        for seat in list(queue.by_seat):
            if seat.load[kind] < self._room[kind]:
                call = self.keys.take(queue, seat)
                if call is not None:
                    if seat in queue.by_seat:  # the workers take turns, too
                        queue.by_seat[seat] = queue.by_seat.pop(seat)
                    return call, seat
        return None

    def withdraw(self) -> list[C]:
        """Take everything that waits out."""
        calls: list[C] = []
        for queue in (*self.singles, *self._maps):
            while queue.calls:
                call = queue.calls.popleft()
                if call.done():
                    queue.ended -= 1
                else:
                    calls.append(call)
            calls += self.keys.forget(queue)
            while queue.batches:
                calls.append(queue.batches.pop(1))
        return calls

    def is_dry(self) -> bool:
        """Whether nothing waits here while something is queued ahead."""
        return self._is_ahead and not any(queue.calls or queue.batches for queue in tuple(self._turns[Kind.THREAD]))

    def recall(self) -> Recall[S] | None:
        """Whom to ask for plain calls that have not begun, when a worker has a free thread and nothing waits here."""
        kind = Kind.THREAD
        if not self._is_ahead or not self.seats or any(queue.calls or queue.batches for queue in tuple(self._turns[kind])):
            return None
        threads = self._places[kind]
        free = sum(threads - seat.load[kind] for seat in self.seats if seat.load[kind] < threads)
        fullest = self._fullest(threads)
        if free <= 0 or fullest is None:
            return None
        surplus = fullest.items - min(threads, fullest.load[kind])
        return Recall(fullest, -(-surplus // 2) if fullest.items > fullest.load[kind] else min(free, -(-surplus // 2)))

    def _fullest(self, threads: int) -> S | None:
        """The fullest worker that may have something to give back; None: there is none, or one is about to answer.

        Who is silent does not answer soon: others are asked first, and also while it has been asked.
        """
        loads = [(seat, seat.items) for seat in self.seats]
        full = [
            (seat, items)
            for seat, items in loads
            if items > min(threads, seat.load[Kind.THREAD]) and self._barren.get(seat) != self.times_ahead
        ]
        self._is_ahead = bool(full)
        awake = [(seat, items) for seat, items in full if not seat.silence()]
        if any(seat.recalling for seat, _ in awake):
            return None
        rest = awake or [(seat, items) for seat, items in full if not seat.recalling]
        return max(rest, key=itemgetter(1))[0] if rest else None

    def _pick_of_few(self, kind: int) -> S | None:
        """The least loaded worker with a free place, else with room ahead; None: there is none, or it is better to wait.

        Each step of a worker's silence weighs as much as a call. A coroutine that takes the CPU keeps its worker silent, so the
        load tells more than the silence does.
        """
        places, room = self._places[kind], self._room[kind]
        best: S | None = None
        least, step = sys.maxsize, 0
        is_one_behind = False
        for seat in self.seats:
            load = seat.load[kind]
            if load < room and load < least:
                weight = load
                silence = seat.silence()
                if silence:
                    is_one_behind = True
                    weight += silence
                elif not load:  # there is no better one
                    return seat
                if load >= places:
                    weight += _AHEAD_LAST
                if weight < least:
                    best, least, step = seat, weight, silence
        self._is_one_behind = is_one_behind
        return best if step < BLOCKED else self._pick_beside(best, kind)

    def _pick_beside(self, blocked: S | None, kind: int) -> S | None:
        """Another worker in place of a blocked one, which is chosen only if no other has room.

        It still counts: the others get no more than it would leave to them, and a few beyond that, until they have read.
        """
        places, room = self._places[kind], self._room[kind]
        level = places if blocked is not None and blocked.load[kind] < places else room
        others = [seat for seat in self.seats if seat.load[kind] < level and seat.silence() < BLOCKED]
        for seat in sorted(others, key=lambda seat: seat.load[kind] + seat.silence()):
            beyond = 0 if seat.has_read() else self._beyond.get(seat, 0)
            if beyond <= seat.load[kind] // 4:
                self._beyond[seat] = beyond + 1
                return seat
        return None if others else blocked

    def _pick_of_many(self, kind: int) -> S | None:
        """As `_pick_of_few`, remembering whom."""
        seats = self.seats
        least, start = self._least[kind]
        for index in range(start, len(seats)):
            seat = seats[index]
            if seat.load[kind] == least:
                if seat.silence():
                    break
                self._least[kind] = least, index
                return seat
        best = self._pick_of_few(kind)
        # One that is behind may have less to do, and read again at any moment.
        is_known = best is not None and (not best.load[kind] or not self._is_one_behind)
        self._least[kind] = (best.load[kind], 0) if is_known else _NOWHERE  # type: ignore[union-attr]
        return best
