"""Keys: the calls of one key are never on two workers at once, and only a limited number of them run at once.

Rendezvous hashing assigns each key to a worker: of the live workers, the one whose hash together with the key is highest. Keys
therefore spread evenly, and when a worker leaves or joins, only its own keys move. A key stays with its worker while calls of the
key are under way, even if that worker takes no more calls. The waiting calls of the key move to another worker once the last call
under way has ended.

The waiting calls of one key in one queue form a lane. Each queue lists the lanes from which a call may be sent, by the worker of
the key. The lanes of one list take turns, so ten thousand calls of one key do not delay the calls of other keys.

When the workers change, any key may have a new worker. A key that is used is assigned again at once. Listed lanes are listed again
in pieces, so that fifty thousand waiting keys do not block the event loop: each call of `settle` does one piece.

An idle key has no running and no waiting calls. It is kept for its next call, with its lanes, because creating both again costs
more than a call. At most `KEPT` idle keys are kept, or as many as there are other keys, whichever is more.
"""

import sys
from collections import deque
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from itertools import islice
from typing import Final, Generic

from percore._scheduler.key_names import Name
from percore._scheduler.lanes import C, Gate, Key, Lane, Lanes, S, move, purge

_WORD: Final = (1 << 64) - 1
KEPT: Final = 1024
"""Number of idle keys that are always kept."""

PIECE: Final = 256
"""Lanes that one call of `settle` lists again: less than a millisecond of work."""


def weight(key_hash: int, index: int) -> int:
    """Return the rendezvous weight of a key and a worker's index.

    The weights are spread evenly over 64 bits (the finaliser of splitmix64, Steele et al. 2014).
    """
    z = (key_hash + (index + 1) * 0x9E3779B97F4A7C15) & _WORD
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _WORD
    return z ^ (z >> 31)


class Keys(Generic[C, S]):
    """The keys of a runner: those with calls waiting or under way, and some idle ones."""

    def __init__(self, limit: int | None) -> None:
        """`limit`: how many calls of one key may be under way at once; None: no limit."""
        self._limit = _WORD if limit is None else limit
        self._keys: dict[Hashable, Key[C, S]] = {}
        self._noted: deque[Key[C, S]] = deque()
        """All idle keys, and some that were idle once."""
        self._seats: list[S] = []
        self._resting: frozenset[S] = frozenset()
        """Workers that take no calls for now."""
        self._held_back: dict[Lane[C, S], None] = {}
        """Lanes of keys that are bound to a worker that rests. When it takes calls again, they have to be listed."""
        self.on_listed: Callable[[Lanes[C, S]], None] = lambda queue: None
        """Called with each queue from which a call may be sent now, because one has `left`."""
        self.round = 0
        """How often the workers have changed."""
        self.changes = 0
        """How often the workers have changed, or a call has come back to wait again."""
        self._queues: dict[Lanes[C, S], None] = {}
        """The queues that have lanes."""
        self._gates: dict[Hashable, Gate[C, S]] = {}
        """The gates of the keys that have a rate, idle or not."""
        self.strays: deque[deque[Lane[C, S]]] = deque()
        """Lanes that `settle` has to list again, as the lists in which they were. They count as listed."""

    def __len__(self) -> int:
        """Number of keys with calls waiting or under way."""
        return sum(not key.is_idle() for key in self._keys.values())

    def running(self) -> dict[Hashable, int]:
        """How many calls of each key are under way."""
        return {name: key.running for name, key in self._keys.items()}

    def _home(self, name: Hashable) -> S | None:
        seats = self._seats
        if len(seats) < 2:
            return seats[0] if seats else None
        key_hash = name.key_hash if isinstance(name, Name) else hash(name)
        return max(seats, key=lambda seat: weight(key_hash, seat.index))

    def _place(self, key: Key[C, S]) -> None:
        """Assign the key again after the workers have changed. It moves only if none of its calls is under way."""
        home = self._home(key.name)
        if not key.running:
            key.seat = home
        key.is_seated = key.seat in self._seats
        key.is_home = key.is_seated and key.seat is home
        key.round = self.round
        self._calm(key)

    def _calm(self, key: Key[C, S]) -> None:
        """Note whether calls of this key take the shorter ways."""
        key.calm = key.round if key.is_home and key.gate is None and self._limit == _WORD else -1

    def _lane(self, name: Hashable, queue: Lanes[C, S]) -> Lane[C, S]:
        """Return the lane of this key in this queue. Use it at once: when user code runs, it may drop an idle key."""
        while True:
            try:
                return queue.lanes[name]
            except KeyError:
                self._enter(name, queue)

    def _enter(self, name: Hashable, queue: Lanes[C, S]) -> None:
        key = self._keys.get(name)
        if key is None:
            key = self._keys.setdefault(name, Key(name, self._home(name), self.round))
            key.gate = self._gates.get(name)
            self._calm(key)
        queue.lanes[name] = key.lanes.setdefault(queue, Lane(key, queue))
        self._queues[queue] = None

    def _note(self, key: Key[C, S]) -> None:
        """Note a key that may have become idle. If there are many idle keys, drop those that became idle first."""
        if key.is_noted or not key.is_idle():
            return
        if key.is_over:
            self._drop(key)
            return
        key.is_noted = True
        noted = self._noted
        noted.append(key)
        # About one key is removed for each one appended, so a single call never does much work.
        while len(noted) > KEPT and 2 * len(noted) > len(self._keys):
            oldest = noted.popleft()
            oldest.is_noted = False
            # One that was dropped before, when a worker's list still had its lane, may have been noted again since.
            if oldest.is_idle() and self._keys.get(oldest.name) is oldest:
                self._drop(oldest)

    def _drop(self, key: Key[C, S]) -> None:
        self._keys.pop(key.name, None)
        for queue in list(key.lanes):
            queue.lanes.pop(key.name, None)

    def _tidy(self) -> None:
        """Forget dropped keys among the noted ones, now that one more was dropped: there are soon at most as many as others."""
        noted = self._noted
        for _ in range(2):
            if not noted:
                return
            key = noted.popleft()
            if self._keys.get(key.name) is key:
                noted.append(key)
            else:
                key.is_noted = False

    def is_taken(self, name: Hashable) -> bool:
        """Whether a call with this key would have to wait until one of those that are under way ends."""
        key = self._keys.get(name)
        if key is None or not key.running:
            return False
        return key.running >= self._limit or (key.seat not in self._seats and key.seat not in self._resting)

    def join(self, name: Hashable, seat: S, *, is_lent: bool = False) -> None:
        """Assign a new key to this worker, if it takes calls, as long as the workers stay or calls of the key are under way.

        `is_lent`: whoever has made the name gives it back by `leave`. Until then the key is not dropped.
        """
        if seat in self._seats and name not in self._keys:
            key = self._keys[name] = Key(name, seat, self.round)
            key.is_home = self._home(name) is seat
            key.is_noted = is_lent
            self._calm(key)
            self._note(key)

    def leave(self, name: Hashable) -> None:
        """Note that no further call will have this key. It is dropped now, or when its last call has ended."""
        key = self._keys.get(name)
        if key is not None:
            key.is_over = True
            key.is_noted = False
            self._note(key)

    def guard(self, name: Hashable, gate: Gate[C, S] | None) -> None:
        """Let the calls of a key pass this gate from now on; None: they have no rate."""
        if gate is None:
            self._gates.pop(name, None)
        else:
            self._gates[name] = gate
        if (key := self._keys.get(name)) is not None:
            key.gate = gate
            self._calm(key)

    def opened(self, name: Hashable) -> Iterable[Lanes[C, S]]:
        """Note that the gate of a key is not shut any more. Return the queues from which a call may be sent now."""
        key = self._keys.get(name)
        if key is None:
            return ()
        if key.round != self.round:
            self._place(key)
        return [lane.queue for lane in list(key.lanes.values()) if lane.calls and self._list(lane)]

    def is_idle(self, name: Hashable) -> bool:
        """Whether no call of this key is under way and none waits."""
        key = self._keys.get(name)
        return key is None or key.is_idle()

    def submitted(self, call: C, queue: Lanes[C, S], places: int) -> S | None:
        """Take a new call. Return the worker to send it to now, and count the call as under way; None if the call waits.

        Calls of the same key in other queues do not delay it, since they may be of another kind. `places`: how many calls of this
        kind a worker can run at once.
        """
        name = call.key
        try:
            lane = queue.lanes[name]
        except KeyError:
            lane = self._lane(name, queue)
        key = lane.key
        if key.calm != self.round:
            return self._submitted(call, lane, places)
        # As `_submitted`, for a key that nothing holds back. With the other shorter ways this saves a third of what a key costs.
        calls, seat = lane.calls, key.seat
        if seat.load[call.kind] < places and (not calls or len(calls) == lane.ended):  # type: ignore[union-attr]
            key.running += 1
            return seat
        queue.count += 1  # first: a Ctrl-C may come when `append` returns, and who removes the call counts that
        calls.append(call)
        if not lane.is_listed:
            lane.is_listed = True
            queue.by_seat[seat].append(lane)  # type: ignore[index]
        return None

    def _submitted(self, call: C, lane: Lane[C, S], places: int) -> S | None:
        queue: Lanes[C, S] = lane.queue
        if lane.key.round != self.round:
            self._place(lane.key)
            lane = self._lane(call.key, queue)
        # No user code may run from here until the key has a call: it could drop the key.
        key = lane.key
        calls = lane.calls
        may_go = key.is_seated and key.running < self._limit
        if may_go and (not calls or len(calls) == lane.ended) and key.seat.load[call.kind] < places:  # type: ignore[union-attr]
            if key.gate is None:
                key.running += 1
                return key.seat
            if _passes(key, key.gate, call):
                return key.seat
        queue.count += 1  # first, as in `submitted`
        calls.append(call)
        if not lane.is_listed:
            self._list(lane)
        return None

    def returned(self, call: C, queue: Lanes[C, S]) -> None:
        """Put back a call that was sent and has not begun, before the other calls of its key in its queue."""
        lane = self._lane(call.key, queue)
        queue.count += 1  # first, as in `submitted`
        lane.calls.appendleft(call)
        self.changes += 1
        if lane.key.round != self.round:
            self._place(lane.key)
        self._list(lane)

    def _list(self, lane: Lane[C, S]) -> bool:
        """List a lane with waiting calls, if one of them may be sent. Return whether the lane is listed now."""
        key = lane.key
        if lane.is_listed or key.running >= self._limit:
            return lane.is_listed
        if key.gate is not None and key.gate.is_shut:
            return False
        if key.is_seated:
            lane.is_listed = True
            lane.queue.by_seat[key.seat].append(lane)  # type: ignore[index]  # a seated key has a worker
        elif not key.running:  # there is no worker: the lane is listed when one is added
            lane.is_listed = True
            self._stray(lane)
            return False
        elif key.seat in self._resting:
            self._held_back[lane] = None
        return lane.is_listed

    def fill(self, queue: Lanes[C, S], kind: int, places: int) -> Iterator[tuple[C, S]]:
        """Yield the queue's calls for workers with free places of this kind, each with its worker, and count them as under way."""
        if self._gates or self._limit != _WORD:
            yield from self._fill_by_taking(queue, kind, places)
            return
        for seat in list(queue.by_seat):
            load, lanes = seat.load, queue.by_seat.get(seat)
            while load[kind] < places:
                lane = lanes[0] if lanes else None
                if lane is None or lane.key.calm != self.round or lane.ended or not lane.calls:
                    following = self.take(queue, seat)
                    if following is None:
                        break
                    yield following, seat
                    continue
                calls = lane.calls
                call = calls[0]
                del lanes[0], calls[0]  # type: ignore[index]  # from here to `append` no function is called: see `lanes`
                lane.key.running += 1
                queue.count -= 1
                if not calls:
                    lane.is_listed = False
                else:
                    try:
                        lanes.append(lane)  # type: ignore[union-attr]
                    except BaseException:
                        self._untaken(call, lane, lanes)  # type: ignore[arg-type]
                        raise
                yield call, seat

    def _fill_by_taking(self, queue: Lanes[C, S], kind: int, places: int) -> Iterator[tuple[C, S]]:
        """As `fill`, where rates or a limit hold calls of some keys back."""
        for seat in list(queue.by_seat):
            load = seat.load
            while load[kind] < places and (call := self.take(queue, seat)) is not None:
                yield call, seat

    def take(self, queue: Lanes[C, S], seat: S) -> C | None:
        """Take the queue's next call for this worker and count it as under way. Return None if there is none."""
        lanes = queue.by_seat.get(seat)
        while lanes:
            lane = lanes[0]
            del lanes[0]  # no `popleft`: see `lanes`
            lane.is_listed = False
            call = None
            try:
                call = self._first(lane)
                if call is not None and lane.calls and lane.key.running < self._limit:
                    lane.is_listed = True
                    lanes.append(lane)
            except BaseException:
                self._untaken(call, lane, lanes)
                raise
            if call is not None:
                return call
        queue.by_seat.pop(seat, None)
        return None

    def _first(self, lane: Lane[C, S]) -> C | None:
        """Take the first call of a lane that was not cancelled, and count it as under way. Return None if none may begin now."""
        calls, key = lane.calls, lane.key
        gate = key.gate
        if key.running >= self._limit or (gate is not None and gate.is_shut):
            return None
        while calls:
            call = calls[0]
            is_over = call.done()
            if not calls or calls[0] is not call:
                continue  # a garbage collection has run user code that has taken it
            del calls[0]
            if is_over:
                lane.ended -= 1
                continue
            if gate is None:
                key.running += 1
            else:
                may_begin = False
                try:
                    may_begin = _passes(key, gate, call)
                finally:
                    if not may_begin:
                        calls.appendleft(call)
                if not may_begin:
                    return None
            lane.queue.count -= 1
            return call
        self._note(key)
        return None

    def _untaken(self, call: C | None, lane: Lane[C, S], lanes: deque[Lane[C, S]]) -> None:
        """Put back what was taken of a list, a lane and maybe a call of it, because of an error."""
        lane.is_listed = lane in lanes
        if call is None:
            self._list(lane)
            return
        self.returned(call, lane.queue)
        self.ended(call, was_sent=False)

    def cancelled(self, name: Hashable, queue: Lanes[C, S]) -> None:
        """Note that a waiting call was cancelled. It is dropped on its turn, or earlier if `purge` finds many cancelled calls."""
        lane = queue.lanes.get(name)
        if lane is None:  # since it was cancelled, in the middle of a step, its map was closed with all that waited
            return
        lane.ended += 1
        queue.count -= 1
        purge(lane)
        if not lane.calls:
            self._note(lane.key)

    def remove(self, call: C, queue: Lanes[C, S]) -> None:
        """Remove a call from this queue. Does nothing if it does not wait there."""
        key = self._keys.get(call.key)
        lane = None if key is None else key.lanes.get(queue)
        if lane is not None and call in lane.calls:
            lane.calls.remove(call)
            queue.count -= 1
            self._note(lane.key)

    def left(self, call: C) -> None:
        """As `ended`, for a call that was sent: tell `on_listed`."""
        key = self._keys[call.key]
        running = key.running
        if key.is_noted or running > 1:
            if key.calm == self.round:
                key.running = running - 1  # no lane of this key waits for it
                return
            gate = key.gate
            if gate is not None and not gate.is_shut and key.is_home and key.round == self.round and running < self._limit:
                key.running = running - 1  # neither its gate nor the limit holds a lane back
                gate.left(call)
                return
        for queue in self.ended(call):
            self.on_listed(queue)

    def ended(self, call: C, *, was_sent: bool = True) -> Iterable[Lanes[C, S]]:
        """Note that a call is no longer under way. Return the queues from which a call may be sent now.

        `was_sent`: whether its worker was sent the call.
        """
        key = self._keys[call.key]
        if key.round != self.round:
            self._place(key)
        running = key.running
        key.running = running - 1
        was_shut = key.gate is not None and _came_through(key.gate, call, was_sent=was_sent)
        if key.is_home or (key.is_seated and (running > 1 or not key.is_idle())):
            if running < self._limit and not was_shut:  # its lanes are listed already
                if running == 1 and not key.is_noted:
                    self._note(key)
                return ()
        elif key.is_seated:
            self._drop(key)  # its next call assigns it again
            self._tidy()
            return ()
        elif running > 1:
            if key.seat in self._resting:
                self._held_back.update(dict.fromkeys(key.lanes.values()))
            return ()
        else:
            key.seat = self._home(key.name)
            key.is_seated = key.is_home = key.seat is not None
            self._calm(key)
        listed = [lane.queue for lane in list(key.lanes.values()) if lane.calls and self._list(lane)]
        if running == 1:
            self._note(key)
        return listed

    def recount(self, under_way: Mapping[Hashable, int]) -> Iterable[Lanes[C, S]]:
        """Take over how many calls of each key are under way. Return the queues from which a call may be sent now.

        To be called when an interrupted step may have lost count.
        """
        listed: dict[Lanes[C, S], None] = {}
        for key in list(self._keys.values()):
            key.running = under_way.get(key.name, 0)
            if key.round != self.round or not key.running:
                self._place(key)
            listed.update((lane.queue, None) for lane in list(key.lanes.values()) if lane.calls and self._list(lane))
            self._note(key)
        return listed

    def forget(self, queue: Lanes[C, S], into: list[C], most: int = _WORD) -> None:
        """Move all waiting calls of this queue to `into`, until it has `most`, and cancelled ones with them.

        After that, or an error, each call either is in `into` or waits. Call this again to move the rest. When no call waits any
        more, the queue may be used again.
        """
        queue.by_seat.clear()
        for name, lane in list(islice(queue.lanes.items(), min(most, sys.maxsize))):
            queue.count -= move(lane, into, most - len(into))
            if lane.calls:
                return
            self._note(lane.key)
            lane.key.lanes.pop(queue, None)
            queue.lanes.pop(name, None)
        if not queue.lanes:
            queue.count = 0  # an error may have kept `move` from telling how many it has moved
            self._queues.pop(queue, None)

    def seated(self, seats: Iterable[S], resting: Iterable[S] = ()) -> Iterable[Lanes[C, S]]:
        """Set the workers that take calls, and those that rest. Return the queues from which a call may be sent now.

        Keys without calls under way move to their new workers. Only the first piece of the listed lanes is listed again here: call
        `settle` until `is_settled` is true.
        """
        before = {*self._seats, *self._resting}
        self._seats = list(seats)
        self._resting = frozenset(resting)
        self._let_go(before.difference(self._seats, self._resting))
        self.round += 1
        self.changes += 1
        for queue in list(self._queues):
            # The lists themselves, not their lanes one by one: there may be a million.
            self.strays.extend(lanes for lanes in list(queue.by_seat.values()) if lanes)
            queue.by_seat.clear()
        held_back, self._held_back = self._held_back, {}
        for lane in held_back:
            if lane.calls and not lane.is_listed:
                lane.is_listed = True
                self._stray(lane)
        return self.settle()

    def _stray(self, lane: Lane[C, S]) -> None:
        if self.strays:
            self.strays[-1].append(lane)
        else:
            self.strays.append(deque([lane]))

    def _next_stray(self) -> Lane[C, S] | None:
        while self.strays:
            lanes = self.strays[0]
            if lanes:
                lane = lanes.popleft()
                if not lanes and self.strays and self.strays[0] is lanes:
                    self.strays.popleft()
                return lane
            self.strays.popleft()
        return None

    def _let_go(self, gone: set[S]) -> None:
        """Let idle keys refer to none of these workers. Else each of a thousand keys might keep what is left of a dead one."""
        for key in self._noted if gone else ():
            if key.seat in gone and not key.running:
                key.seat = None
                key.is_seated = key.is_home = False

    def is_settled(self) -> bool:
        """Whether `settle` has nothing to do until the workers change again."""
        return not (self.strays and self._seats)

    def settle(self) -> Iterable[Lanes[C, S]]:
        """List the next piece of the lanes that have to be listed again. Return the queues from which a call may be sent now."""
        listed: dict[Lanes[C, S], None] = {}
        for _ in range(PIECE if self._seats else 0):
            lane = self._next_stray()
            if lane is None:
                break
            lane.is_listed = False
            key = lane.key
            if key.round != self.round:
                self._place(key)
            if not lane.calls:
                self._note(key)
            elif self._list(lane):
                listed[lane.queue] = None
        return listed


def _passes(key: Key[C, S], gate: Gate[C, S], call: C) -> bool:
    """Count a call as under way, if the gate of its key lets it begin now."""
    key.running += 1  # first: `take` may run a garbage collection, and user code could drop an idle key
    may_begin = False
    try:
        may_begin = gate.take(call, key.seat)  # type: ignore[arg-type]  # a key whose calls are sent has a worker
    finally:
        if not may_begin:
            key.running -= 1
    return may_begin


def _came_through(gate: Gate[C, S], call: C, *, was_sent: bool) -> bool:
    """Tell a gate of a call that is no longer under way. Return whether it was shut before."""
    was_shut = gate.is_shut
    if was_sent:
        gate.left(call)
    else:
        gate.unsent(call)
    return was_shut
