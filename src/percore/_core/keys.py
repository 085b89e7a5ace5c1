"""Keys: calls of one key are never on two workers at once, and at most so many of them run at once.

A key belongs to a worker by rendezvous hashing: to the one of the live workers for which a hash of both is highest. So keys spread
evenly, and when a worker goes or comes, the keys that move are its own alone. While calls of a key are under way it stays where it
is, also with a worker that takes no more calls; then what waits moves on when the last of them has ended.

Waiting calls of one key and one queue make a lane. A lane is listed with its queue, under the worker of its key, while one of its
calls may be sent; the lanes of a list take turns, so ten thousand calls of one key do not hold up the others.

When the workers change, every key may belong elsewhere. A key that is used finds out at once. Lanes that were listed are listed
anew in pieces, so that fifty thousand waiting keys do not hold the loop: `settle` does one piece.

An idle key, of which no call runs or waits, is kept for its next call, with its lanes: to make them anew costs more than the call.
At most `KEPT` idle keys are kept, or as many as there are others.
"""

from collections import defaultdict, deque
from collections.abc import Hashable, Iterable
from typing import Any, Final, Generic, Protocol, TypeVar

_WORD: Final = (1 << 64) - 1
_FEW: Final = 64
KEPT: Final = 1024
"""Idle keys that are kept in any case."""

PIECE: Final = 256
"""Lanes that are listed anew at once: less than a millisecond of work."""


class Keyed(Protocol):
    """A call with a key, as far as it matters here."""

    kind: int

    @property
    def key(self) -> Any: ...

    def done(self) -> bool: ...


class Place(Protocol):
    """A worker, as far as it matters here."""

    index: int

    load: list[int]
    """Places taken, by kind."""


C = TypeVar("C", bound=Keyed)
S = TypeVar("S", bound=Place)


def weight(key_hash: int, index: int) -> int:
    """How much a key wants to be in a slot: evenly spread over 64 bits (the finaliser of splitmix64, Steele et al. 2014)."""
    z = (key_hash + (index + 1) * 0x9E3779B97F4A7C15) & _WORD
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _WORD
    return z ^ (z >> 31)


class Key(Generic[C, S]):
    """A key that has calls waiting or under way, or had."""

    __slots__ = ("is_home", "is_noted", "is_seated", "lanes", "name", "round", "running", "seat")

    def __init__(self, name: Hashable, seat: S | None, at: int) -> None:
        self.name = name
        self.seat = seat
        self.is_seated = self.is_home = seat is not None
        """Whether its worker takes calls; and whether that is the one it belongs to. Else it has begun elsewhere."""
        self.round = at
        """How often the workers had changed when that was found out."""
        self.running = 0
        self.is_noted = False
        """Whether it is looked at when idle keys are dropped."""
        self.lanes: dict[Any, Lane[C, S]] = {}

    def is_idle(self) -> bool:
        """Whether nothing of it is under way, nor waits."""
        return not self.running and not any(lane.calls for lane in self.lanes.values())


class Waiting(Protocol[C]):
    """Where calls wait, cancelled ones among them."""

    calls: deque[C]
    ended: int


def purge(waiting: Waiting[C]) -> None:
    """Drop cancelled calls once half of them are such.

    In place: a garbage collection may begin behind any call, and a `__del__` that it runs submit or cancel something.
    """
    if waiting.ended <= _FEW or waiting.ended * 2 <= len(waiting.calls):
        return
    for _ in range(len(waiting.calls)):
        if not waiting.calls:
            break
        call = waiting.calls.popleft()
        if call.done():
            waiting.ended -= 1
        else:
            waiting.calls.append(call)


class Lane(Generic[C, S]):
    """The calls of one key that wait in one queue."""

    __slots__ = ("calls", "ended", "is_listed", "key", "queue")

    def __init__(self, key: Key[C, S], queue: "Lanes[C, S]") -> None:
        self.key = key
        self.queue = queue
        self.calls: deque[C] = deque()
        self.ended = 0
        self.is_listed = False


class Lanes(Generic[C, S]):
    """The lanes of one queue: by worker, those of which a call may be sent."""

    __slots__ = ("by_seat", "count", "lanes")

    def __init__(self) -> None:
        self.by_seat: defaultdict[S, deque[Lane[C, S]]] = defaultdict(deque)
        self.count = 0
        """Calls in all lanes, listed or not; cancelled ones do not count."""
        self.lanes: dict[Hashable, Lane[C, S]] = {}


class Keys(Generic[C, S]):
    """All keys of a runner with calls waiting or under way."""

    def __init__(self, limit: int | None) -> None:
        """`limit`: calls of one key that may be under way at once, over all workers."""
        self._limit = _WORD if limit is None else limit
        self._keys: dict[Hashable, Key[C, S]] = {}
        self._noted: deque[Key[C, S]] = deque()
        """All idle keys, and some that were idle for a time."""
        self._seats: list[S] = []
        self._round = 0
        self._queues: dict[Lanes[C, S], None] = {}
        """Those that have lanes."""
        self.strays: deque[Lane[C, S]] = deque()
        """Lanes that have to be listed anew. They count as listed."""

    def __len__(self) -> int:
        """Keys of which something waits or is under way."""
        return sum(not key.is_idle() for key in self._keys.values())

    def _home(self, name: Hashable) -> S | None:
        seats = self._seats
        if len(seats) < 2:
            return seats[0] if seats else None
        key_hash = hash(name)
        return max(seats, key=lambda seat: weight(key_hash, seat.index))

    def _place(self, key: Key[C, S]) -> None:
        """The workers have changed: find out where the key belongs. It moves if nothing of it is under way."""
        home = self._home(key.name)
        if not key.running:
            key.seat = home
        key.is_seated = key.seat in self._seats
        key.is_home = key.is_seated and key.seat is home
        key.round = self._round

    def _lane(self, name: Hashable, queue: Lanes[C, S]) -> Lane[C, S]:
        """Where calls of this key wait in this queue. It has to be used at once: an idle key may be dropped when user code runs."""
        while True:
            try:
                return queue.lanes[name]
            except KeyError:
                self._enter(name, queue)

    def _enter(self, name: Hashable, queue: Lanes[C, S]) -> None:
        key = self._keys.get(name)
        if key is None:
            key = self._keys.setdefault(name, Key(name, self._home(name), self._round))
        queue.lanes[name] = key.lanes.setdefault(queue, Lane(key, queue))
        self._queues[queue] = None

    def _note(self, key: Key[C, S]) -> None:
        """This key may have become idle. Keys that have been so for long are dropped, if there are many."""
        if key.is_noted or not key.is_idle():
            return
        key.is_noted = True
        noted = self._noted
        noted.append(key)
        # For each that is appended about one is taken out, so that this is done in pieces, too.
        while len(noted) > KEPT and 2 * len(noted) > len(self._keys):
            oldest = noted.popleft()
            oldest.is_noted = False
            if oldest.is_idle():
                self._drop(oldest)

    def _drop(self, key: Key[C, S]) -> None:
        self._keys.pop(key.name, None)
        for queue in list(key.lanes):
            queue.lanes.pop(key.name, None)

    def submitted(self, call: C, queue: Lanes[C, S], places: int) -> S | None:
        """The worker that a new call goes to now, where it is under way from then on. None: it waits.

        Calls of its key that wait in other queues do not hold it up: they may be of another kind. `places`: of a worker, for calls
        of its kind.
        """
        name = call.key
        try:
            lane = queue.lanes[name]
        except KeyError:
            lane = self._lane(name, queue)
        if lane.key.round != self._round:
            self._place(lane.key)
            lane = self._lane(name, queue)
        # From here on no user code runs before the key has a call: it could drop the key.
        key = lane.key
        calls = lane.calls
        may_go = key.is_seated and key.running < self._limit
        if may_go and (not calls or len(calls) == lane.ended) and key.seat.load[call.kind] < places:  # type: ignore[union-attr]
            key.running += 1
            return key.seat
        calls.append(call)
        queue.count += 1
        if not lane.is_listed:
            self._list(lane)
        return None

    def returned(self, call: C, queue: Lanes[C, S]) -> None:
        """A call that was sent and has not begun waits again, before the others of its key in its queue."""
        lane = self._lane(call.key, queue)
        lane.calls.appendleft(call)
        queue.count += 1
        if lane.key.round != self._round:
            self._place(lane.key)
        self._list(lane)

    def _list(self, lane: Lane[C, S]) -> bool:
        """List a lane in which something waits, if it may be sent. Whether it is listed now."""
        key = lane.key
        if lane.is_listed or key.running >= self._limit:
            return lane.is_listed
        if key.is_seated:
            lane.is_listed = True
            lane.queue.by_seat[key.seat].append(lane)  # type: ignore[index]  # where it is seated it has a worker
        elif not key.running:  # there is no worker: it is listed when one comes
            lane.is_listed = True
            self.strays.append(lane)
            return False
        return lane.is_listed

    def take(self, queue: Lanes[C, S], seat: S) -> C | None:
        """The next call of the queue for this worker, which is under way from now on; None: there is none."""
        lanes = queue.by_seat.get(seat)
        while lanes:
            lane = lanes.popleft()
            lane.is_listed = False
            key = lane.key
            if key.running >= self._limit:
                continue
            calls = lane.calls
            while calls:
                call = calls.popleft()
                if call.done():
                    lane.ended -= 1
                    continue
                queue.count -= 1
                key.running += 1
                if calls and key.running < self._limit:
                    lane.is_listed = True
                    lanes.append(lane)
                return call
            self._note(key)
        queue.by_seat.pop(seat, None)
        return None

    def cancelled(self, name: Hashable, queue: Lanes[C, S]) -> None:
        """A call that waits was cancelled. It is dropped when its turn comes, or when half of its lane is such."""
        lane = queue.lanes[name]
        lane.ended += 1
        queue.count -= 1
        purge(lane)
        if not lane.calls:
            self._note(lane.key)

    def remove(self, call: C, queue: Lanes[C, S]) -> None:
        """Take out a call that may wait in this queue, or that no longer does."""
        key = self._keys.get(call.key)
        lane = None if key is None else key.lanes.get(queue)
        if lane is not None and call in lane.calls:
            lane.calls.remove(call)
            queue.count -= 1

    def ended(self, name: Hashable) -> Iterable[Lanes[C, S]]:
        """A call of this key is not under way any more. The queues of which a call may be sent by that."""
        key = self._keys[name]
        if key.round != self._round:
            self._place(key)
        running = key.running
        key.running = running - 1
        if key.is_home or (key.is_seated and (running > 1 or not key.is_idle())):
            if running < self._limit:  # its lanes are listed already
                if running == 1 and not key.is_noted:
                    self._note(key)
                return ()
        elif key.is_seated:
            self._drop(key)  # its next call finds where it belongs
            return ()
        elif running > 1:
            return ()
        else:
            key.seat = self._home(name)
            key.is_seated = key.is_home = key.seat is not None
        listed = [lane.queue for lane in list(key.lanes.values()) if lane.calls and self._list(lane)]
        if running == 1:
            self._note(key)
        return listed

    def forget(self, queue: Lanes[C, S]) -> list[C]:
        """Take out everything that waits in this queue, which may be used again."""
        calls: list[C] = []
        lanes = list(queue.lanes.values())
        queue.lanes.clear()
        queue.by_seat.clear()
        queue.count = 0
        self._queues.pop(queue, None)
        for lane in lanes:
            lane.key.lanes.pop(queue, None)
            waiting, lane.calls = lane.calls, deque()
            calls += (call for call in waiting if not call.done())
            self._note(lane.key)
        return calls

    def seated(self, seats: Iterable[S]) -> Iterable[Lanes[C, S]]:
        """The workers that take calls have changed. Keys with nothing under way move. The queues of which a call may be sent.

        Of the lanes that were listed only a piece is listed again by then: call `settle` while there are strays and workers.
        """
        self._seats = list(seats)
        self._round += 1
        for queue in list(self._queues):
            for lanes in list(queue.by_seat.values()):
                self.strays.extend(lanes)
            queue.by_seat.clear()
        return self.settle()

    def is_settled(self) -> bool:
        """Whether `settle` has nothing to do, as long as the workers stay the same."""
        return not (self.strays and self._seats)

    def settle(self) -> Iterable[Lanes[C, S]]:
        """List a piece of the lanes that have to be listed anew. The queues of which a call may be sent by that."""
        listed: dict[Lanes[C, S], None] = {}
        for _ in range(min(PIECE, len(self.strays)) if self._seats else 0):
            if not self.strays:
                break
            lane = self.strays.popleft()
            lane.is_listed = False
            key = lane.key
            if key.round != self._round:
                self._place(key)
            if not lane.calls:
                self._note(key)
            elif self._list(lane):
                listed[lane.queue] = None
        return listed
