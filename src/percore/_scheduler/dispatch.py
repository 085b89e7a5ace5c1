"""Decides which worker gets which call, and when. Pure decisions: the supervisor sends the calls and receives the outcomes.

Places are counted by kind, so a coroutine never waits behind plain calls that need a thread, and a plain call never waits behind
coroutines. A worker has a free place when it can begin the call at once.

If no worker has a free place, plain calls are queued ahead in the workers, so that no thread waits for a round trip. Coroutines are
not queued ahead, since a worker starts a coroutine as soon as it reads the message. Calls are queued ahead in groups: a worker gets
more only when it has room for as many as it has threads. Every message wakes the worker's loop, which is expensive while its
threads compete for the interpreter.

Each map has a queue, and the single calls of each kind have one. The queues take turns: a queue waits at most for the calls that
the workers already hold and for one call or batch of every other queue.

`choice` chooses the worker of a call without a key, `keys` that of a call with one. `recalls` asks workers to return calls that
were queued ahead.
"""

import sys
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from operator import methodcaller
from typing import Final, Generic

from percore._protocol.messages import Kind
from percore._scheduler.choice import Choice
from percore._scheduler.key_names import Names
from percore._scheduler.keys import Keys
from percore._scheduler.lanes import Gate, Lanes, move, purge
from percore._scheduler.levels import DEEPEST, Levels
from percore._scheduler.places import AHEAD, room_of
from percore._scheduler.queues import C, Queue, S
from percore._scheduler.recalls import Recall, Recalls

_DONE: Final = methodcaller("done")


class Dispatch(Generic[C, S]):
    """The waiting calls, and the workers that may take them."""

    def __init__(self, concurrency: int, threads: int, per_key: int | None = None, turn: Callable[[], float] | None = None) -> None:
        """`turn` is the one of `Choice`."""
        self._places = (concurrency, threads)
        self._room = (concurrency, threads * (1 + AHEAD))
        self._low = (concurrency - 1, threads * AHEAD)
        """By kind: calls that a worker may still hold when `fill` sends it more."""
        self.room = room_of(concurrency, threads)
        self.singles: tuple[Queue[C, S], Queue[C, S]] = (Queue(Kind.TASK), Queue(Kind.THREAD))
        self._turns: tuple[deque[Queue[C, S]], deque[Queue[C, S]]] = (deque(), deque())
        self._maps: dict[Queue[C, S], None] = {}
        self.keys: Keys[C, S] = Keys(per_key)
        self.keys.on_listed = self._list
        self.left = self.keys.left
        """Notes that a call with a key has ended, or left its worker, after it was sent."""
        self.names = Names()
        """Maps users' keys to names, which are the keys of calls here."""
        self.seats: list[S] = []
        self._resting: set[S] = set()
        self._choice = Choice(self.seats, self._places, self._room, turn)
        self._pick = self._choice.pick()
        self.lowered = self._choice.lowered
        """Notes that the load of a worker has fallen."""
        self.recalls = Recalls(self.seats, threads, self._has_plain)
        self._note_ahead = self.recalls.note_ahead
        self._levels: Levels[Queue[C, S]] = Levels(self._places)
        self._strained = [False, False]
        """By kind: whether nested calls go first."""

    # Workers

    def seat(self, seat: S) -> None:
        """Add a worker, which takes calls from now on."""
        self.seats.append(seat)
        self._seated()

    def unseat(self, seat: S) -> None:
        """Remove a worker, which takes no more calls. Does nothing if the worker was not added or is already removed."""
        if seat in self.seats:
            self.seats.remove(seat)
            self._resting.discard(seat)
            self._choice.forget(seat)
            self.recalls.barren.pop(seat, None)
            self._seated()

    def expel(self, seat: S) -> None:
        """Remove a worker after `unseat` has failed halfway."""
        while seat in self.seats:
            self.seats.remove(seat)
        self._resting.discard(seat)
        self._seated()

    def rest(self, seat: S, *, is_resting: bool) -> None:
        """Note that a worker takes no calls for now, or takes them again. Keys move away from it that have no calls under way."""
        if seat in self.seats and is_resting is not (seat in self._resting):
            (self._resting.add if is_resting else self._resting.discard)(seat)
            self._seated()

    def _seated(self) -> None:
        self.lowered()
        self._pick = self._choice.pick()
        for queue in self.keys.seated([seat for seat in self.seats if seat not in self._resting], self._resting):
            self._list(queue)

    def is_settled(self) -> bool:
        """Whether all calls with keys have moved to their workers since the workers last changed. If not, call `settle`."""
        return self.keys.is_settled()

    def settle(self) -> None:
        """Move some of the calls with keys to their workers, in less than a millisecond."""
        for queue in self.keys.settle():
            self._list(queue)

    def room_for(self, kind: int) -> int:
        """Return how many calls of this kind one worker may hold at once, including those queued ahead."""
        return self._room[kind]

    def has_place(self, kind: int) -> bool:
        """Return whether some worker can begin a call of this kind at once."""
        places = self._places[kind]
        return any(seat.load[kind] < places for seat in self.seats)

    # Queues

    def open(self, queue: Queue[C, S]) -> None:
        """Add the queue of a map."""
        self._maps[queue] = None

    def close(self, queue: Queue[C, S]) -> None:
        """Remove the queue of a map, with all calls in it. The map must have ended these calls before."""
        self._maps.pop(queue, None)
        if queue.is_listed:
            queue.is_listed = False
            self._turns[queue.kind].remove(queue)
        self.keys.forget(queue, [])

    def waiting(self) -> int:
        """Return the number of waiting calls, without cancelled ones."""
        return sum(len(queue) - queue.ended for queue in (*self.singles, *self._maps))

    # Nested calls

    def level(self, depth: int, kind: int) -> Queue[C, S]:
        """Return the queue of the nested calls of this depth and kind."""
        queue = self._levels.get(depth, kind)
        if queue is None:
            queue = Queue(kind, depth=min(depth, DEEPEST))
            self._levels.add(kind, queue)
            self.open(queue)
        return queue

    def moved(self, kind: int, count: int) -> None:
        """Note that calls of this kind have stepped aside, or, if `count` is negative, have come back."""
        self.lowered()
        self._levels.moved(kind, count)
        self._strained[kind] = self._levels.is_strained(kind, len(self.seats))
        if any(self._strained):
            self.submitted = self._submitted_later  # type: ignore[method-assign]
        else:
            vars(self).pop("submitted", None)

    def _goes_back(self, kind: int) -> bool:
        """Whether calls of this kind that are not nested must wait, because nested calls wait for places."""
        return self._strained[kind] and self._levels.is_awaited()

    def _submitted_later(self, call: C, queue: Queue[C, S] | None = None) -> S | None:
        """As `submitted`, while nested calls go first."""
        if (queue is None or not queue.depth) and self._goes_back(call.kind):
            home = self.singles[call.kind] if queue is None else queue
            if call.key is None:
                home.calls.append(call)
            else:
                self.keys.submitted(call, home, 0)  # with no places at all, it waits
            self._list(home)
            return None
        return Dispatch.submitted(self, call, queue)

    def _list(self, queue: Lanes[C, S]) -> None:
        if isinstance(queue, Queue) and not queue.is_listed:
            queue.is_listed = True
            self._turns[queue.kind].append(queue)

    # Calls

    def submitted(self, call: C, queue: Queue[C, S] | None = None) -> S | None:
        """Take a new call. Return the worker to send it to now, or None if the call waits.

        Args:
            call: the new call.
            queue: the queue of the call's map; None for a single call.
        """
        kind = call.kind
        home = self.singles[kind] if queue is None else queue
        if call.key is not None:
            seat = self.keys.submitted(call, home, self._places[kind])
            if seat is None and not home.is_listed and home.by_seat:
                self._list(home)
            return seat
        if not home.calls:
            turns = self._turns[kind]
            # Calls with keys do not hold this call up: they may wait for one worker while others have room.
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

    def appended(self, queue: Queue[C, S]) -> None:
        """Let a queue take turns after items for batches were appended to it."""
        self._list(queue)

    def returned(self, calls: Iterable[tuple[C, Queue[C, S] | None]]) -> None:
        """Put calls that were sent and have not begun back at the head of their queues, in the given order."""
        for call, queue in reversed(list(calls)):
            home = self.singles[call.kind] if queue is None else queue
            if call.key is None:
                home.calls.appendleft(call)
                self._list(home)
            else:
                self.keys.returned(call, home)
                if home.by_seat:
                    self._list(home)

    def untaken(self, call: C, queue: Queue[C, S] | None) -> None:
        """Put back a call that was taken and not sent, because its worker refused it or an error followed."""
        self.returned([(call, queue)])
        if call.key is not None:
            self.unsent(call)

    def ended(self, call: C, queue: Queue[C, S] | None = None) -> None:
        """Note that a waiting call was cancelled. It is dropped on its turn, or earlier if `purge` finds many cancelled calls."""
        home = self.singles[call.kind] if queue is None else queue
        if call.key is None:
            home.ended += 1
            purge(home)
        else:
            self.keys.cancelled(call.key, home)

    def remove(self, call: C, queue: Queue[C, S] | None = None) -> None:
        """Remove a call from its queue, if it waits there. Slow (it searches the queue); used after errors of percore itself."""
        home = self.singles[call.kind] if queue is None else queue
        if call.key is not None:
            self.keys.remove(call, home)
        elif call in home.calls:
            home.calls.remove(call)

    def unsent(self, call: C) -> None:
        """Note that a call with a key was not sent to the worker that it was given."""
        for queue in self.keys.ended(call, was_sent=False):
            self._list(queue)

    def guard(self, name: Hashable, gate: Gate[C, S] | None) -> None:
        """Let the calls of a key pass this gate from now on; None: they have no rate."""
        self.keys.guard(name, gate)

    def opened(self, name: Hashable) -> None:
        """Note that the gate of a key is not shut any more."""
        for queue in self.keys.opened(name):
            self._list(queue)

    def gave_nothing(self, seat: S, asked_at: int) -> None:
        """Note that a worker had no calls to return. It is not asked again until more calls are queued ahead.

        Args:
            seat: the worker.
            asked_at: `times_ahead` when it was asked. Its answer does not cover calls queued ahead since then.
        """
        self.recalls.gave_nothing(seat, asked_at)

    @property
    def times_ahead(self) -> int:
        """How often calls were queued ahead."""
        return self.recalls.times_ahead

    def is_quiet(self) -> bool:
        """Whether there is nothing to decide: no call waits that could be sent, and none is queued ahead."""
        return not (self._turns[0] or self._turns[1] or self.recalls.is_ahead or self.keys.strays)

    def fill(self, kind: int) -> Iterator[tuple[C, S]]:
        """Yield the calls of this kind that can be sent now, in order, each with its worker.

        The caller must send each call before it asks for the next one.
        """
        turns = self._turns[kind]
        low = self._low[kind]
        if not turns or all(seat.load[kind] > low for seat in self.seats):
            return
        if len(listed := tuple(turns)) == 1 and not self._strained[kind]:  # one queue: no other takes turns with it
            queue = listed[0]
            if queue.by_seat:
                if not queue.calls and not queue.batches:
                    yield from self.keys.fill(queue, kind, self._places[kind])
            elif (seat := self._only(kind)) is not None:  # usually after an outcome
                calls, load, places = queue.calls, seat.load, self._places[kind]
                while calls and load[kind] < places:
                    if not queue.ended:
                        call = calls[0]
                        del calls[0]  # no `popleft`: see `lanes`
                        yield call, seat
                    elif (found := self._from_calls(queue, seat)) is not None:
                        yield found
        while (following := self.next(kind)) is not None:
            yield following

    def _only(self, kind: int) -> S | None:
        """Return the only worker with a free place; None if there are several or none."""
        places = self._places[kind]
        free = [seat for seat in self.seats if seat.load[kind] < places]
        return free[0] if len(free) == 1 else None

    def next(self, kind: int) -> tuple[C, S] | None:
        """Return the next call of this kind that can be sent, and its worker; None if there is none."""
        turns = self._turns[kind]
        if not turns:
            return None
        seat = self._pick(kind)
        if seat is None and not any(queue.by_seat for queue in tuple(turns)):
            return None
        if self._goes_back(kind):
            return self._next_nested(kind, seat)
        for _ in range(len(turns)):
            if not turns:
                break
            found = self._take_turn(turns[0], seat, kind)
            if found is not None:
                return found
        return None

    def _next_nested(self, kind: int, seat: S | None) -> tuple[C, S] | None:
        """As `next`, while only nested calls may begin: the deepest first."""
        for queue in list(self._levels.listed(kind)):
            found = self._take_turn(queue, seat, kind)
            if found is not None:
                return found
        return None

    def _take_turn(self, queue: Queue[C, S], seat: S | None, kind: int) -> tuple[C, S] | None:
        """Take a call from a listed queue, whose next turn then comes after those of the others."""
        if not queue.is_listed:  # a garbage collection has run user code that has taken its last call
            return None
        found = None
        try:
            # Mark it removed and remove it in one step, which ends with a call: after that a garbage collection may run user code
            # that takes a turn, too, or closes the map of this queue.
            queue.is_listed = False
            self._turns[kind].remove(queue)
            try:
                found = self._from(queue, seat)
            finally:
                if queue.calls or queue.batches or queue.by_seat:
                    self._list(queue)
            if found is not None and found[1].load[kind] >= self._places[kind]:
                self._note_ahead()
        except BaseException:
            self._list(queue)
            if found is not None:
                self.untaken(found[0], queue)
            raise
        return found

    def _from(self, queue: Queue[C, S], seat: S | None) -> tuple[C, S] | None:
        """Take one call from this queue, alternating between calls with keys and other calls.

        `seat` is the worker for a call without a key; None: no worker has room for one.
        """
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
        purge(queue)  # before a call is taken, which an error would lose
        while calls:
            call = calls[0]
            is_over = call.done()
            if not calls or calls[0] is not call:
                continue  # a garbage collection has run user code that has taken it
            del calls[0]  # no `popleft`: see `lanes`
            if not is_over:
                return call, seat
            queue.ended -= 1
        if queue.batches:
            recalls = self.recalls
            batch = queue.batches.pop(len(self.seats), seat.tickets)
            if batch is None:
                return None
            if batch.size > 1:  # as `_note_ahead`, whose error would lose the batch
                recalls.is_ahead = True
                recalls.times_ahead += 1
            return batch, seat
        return None

    def _from_lanes(self, queue: Queue[C, S]) -> tuple[C, S] | None:
        kind = queue.kind
        for seat in list(queue.by_seat):
            if seat.load[kind] < self._room[kind]:
                call = self.keys.take(queue, seat)
                if call is not None:
                    if seat in queue.by_seat:  # let the workers take turns, too
                        lanes = queue.by_seat[seat]
                        del queue.by_seat[seat]  # no `pop`: see `lanes`
                        queue.by_seat[seat] = lanes
                    return call, seat
        return None

    def withdraw(self, into: list[C], most: int = sys.maxsize) -> bool:
        """Move all waiting calls to `into`, until it has `most`, and cancelled ones with them. Return whether more may wait.

        After an error, too, each call either is in `into` or waits. Call this again to move the rest.
        """
        for queue in (*self.singles, *self._maps):
            move(queue, into, most - len(into))
            self.keys.forget(queue, into, most)
            while len(into) < most and queue.batches and (batch := queue.batches.pop(1)) is not None:
                into.append(batch)
        return len(into) >= most or any(queue.calls or queue.lanes for queue in (*self.singles, *self._maps))

    def calls(self) -> list[C]:
        """Return all waiting calls, and cancelled ones with them, but no items that wait to be sent in batches."""
        found: list[C] = []
        for queue in (*self.singles, *self._maps):
            found += queue.calls  # at once: a garbage collection may run user code that makes or cancels calls
            for lane in list(queue.lanes.values()):
                found += lane.calls
        return found

    def recount(self, under_way: Mapping[Hashable, int]) -> None:
        """Go on after an interrupted step. `under_way`: how many calls of each key are in workers."""
        for queue in self.keys.recount(under_way):
            self._list(queue)
        self.catch_up()

    def catch_up(self) -> None:
        """Let queues take turns, and count nothing in empty ones, in case a step that was to do so was interrupted."""
        for queue in (*self.singles, *self._maps):
            if queue.calls or queue.batches or queue.by_seat:
                self._list(queue)
            if not queue.calls:
                queue.ended = 0
            if queue.count and _has_no_calls(queue):
                queue.count = 0

    def check_counts(self) -> None:
        """Check that each queue and lane counts its cancelled calls. Slow: for the audit.

        Raises:
            AssertionError: a count is wrong, so that a runner that closes would wait for a call that is not there, or for none.
        """
        for queue in (*self.singles, *self._maps):
            lanes = list(queue.lanes.values())
            counts = [(queue.ended, list(queue.calls)), *((lane.ended, list(lane.calls)) for lane in lanes)]
            found = [(ended, sum(map(_DONE, calls))) for ended, calls in counts]
            assert all(counted == ended for counted, ended in found), f"cancelled calls as counted, and as found: {found}"
            live = sum(len(lane.calls) - lane.ended for lane in lanes)
            assert queue.count == live, f"{queue.count} calls with keys wait, and there are {live}"

    def _has_plain(self) -> bool:
        """Whether a plain call waits that any worker may take."""
        return any(queue.calls or queue.batches for queue in tuple(self._turns[Kind.THREAD]))

    def is_dry(self) -> bool:
        """Whether plain calls are queued ahead and none waits here."""
        return self.recalls.is_dry()

    def recall(self) -> Recall[S] | None:
        """Decide which worker to ask for plain calls that have not begun; None: none."""
        return self.recalls.recall()


def _has_no_calls(queue: Queue[C, S]) -> bool:
    """Whether no call with a key waits. Without a copy of the lanes: there may be a million."""
    try:
        return not any(lane.calls for lane in queue.lanes.values())
    except RuntimeError:  # a garbage collection has run user code that has changed them: ask again the next time
        return False
