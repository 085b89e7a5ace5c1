"""Keys: calls of one key are never on two workers at once, and at most so many of them run at once.

A key belongs to a worker by rendezvous hashing: to the one of the live workers for which a hash of both is highest. So keys spread
evenly, and when a worker goes or comes, the keys that move are its own alone. While calls of a key are under way it stays where it
is, also with a worker that takes no more calls; then what waits moves on when the last of them has ended.

Waiting calls of one key and one queue make a lane. A lane is listed with its queue, under the worker of its key, while one of its
calls may be sent; the lanes of a list take turns, so ten thousand calls of one key do not hold up the others.

An idle key, of which no call runs or waits, is kept for its next call, with its lanes: to make them anew costs more than the call.
"""

from collections import defaultdict, deque
from collections.abc import Hashable, Iterable
from typing import Any, Final, Generic, Protocol, TypeVar

_WORD: Final = (1 << 64) - 1
_FEW: Final = 64
_KEPT: Final = 1024
"""Above this many keys, idle ones are dropped, unless fewer than half are idle."""


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

    __slots__ = ("is_home", "is_seated", "lanes", "running", "seat")

    def __init__(self, seat: S | None) -> None:
        self.seat = seat
        self.is_seated = self.is_home = seat is not None
        """Whether its worker takes calls; and whether that is the one it belongs to. Else it has begun elsewhere."""
        self.running = 0
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

    __slots__ = ("by_seat", "count")

    def __init__(self) -> None:
        self.by_seat: defaultdict[S, deque[Lane[C, S]]] = defaultdict(deque)
        self.count = 0
        """Calls in all lanes, listed or not; cancelled ones do not count."""


class Keys(Generic[C, S]):
    """All keys of a runner with calls waiting or under way."""

    def __init__(self, limit: int | None) -> None:
        """`limit`: calls of one key that may be under way at once, over all workers."""
        self._limit = _WORD if limit is None else limit
        self._keys: dict[Hashable, Key[C, S]] = {}
        self._kept = _KEPT
        self._seats: list[S] = []

    def __len__(self) -> int:
        """Keys of which something waits or is under way."""
        return sum(not key.is_idle() for key in self._keys.values())

    def _home(self, name: Hashable) -> S | None:
        seats = self._seats
        if len(seats) < 2:
            return seats[0] if seats else None
        key_hash = hash(name)
        return max(seats, key=lambda seat: weight(key_hash, seat.index))

    def _lane(self, name: Hashable, queue: Lanes[C, S]) -> Lane[C, S]:
        """Where calls of this key wait in this queue. It has to be used at once: an idle key may be dropped when user code runs."""
        while True:
            try:
                return self._keys[name].lanes[queue]
            except KeyError:
                self._enter(name, queue)

    def _enter(self, name: Hashable, queue: Lanes[C, S]) -> None:
        key = self._keys.get(name)
        if key is None:
            if len(self._keys) >= self._kept:
                self._drop_idle()
                self._kept = max(_KEPT, 2 * len(self._keys))
            key = self._keys.setdefault(name, Key(self._home(name)))
        key.lanes.setdefault(queue, Lane(key, queue))

    def _drop_idle(self) -> None:
        for name, key in list(self._keys.items()):
            if key.is_idle():
                self._keys.pop(name, None)

    def submitted(self, call: C, queue: Lanes[C, S], places: int) -> S | None:
        """The worker that a new call goes to now, where it is under way from then on. None: it waits.

        Calls of its key that wait in other queues do not hold it up: they may be of another kind. `places`: of a worker, for calls
        of its kind.
        """
        name = call.key
        try:
            key = self._keys[name]
            lane = key.lanes[queue]
        except KeyError:
            lane = self._lane(name, queue)
            key = lane.key
        calls = lane.calls
        may_go = key.is_seated and key.running < self._limit
        if may_go and (not calls or len(calls) == lane.ended) and key.seat.load[call.kind] < places:  # type: ignore[union-attr]
            key.running += 1
            return key.seat
        calls.append(call)
        queue.count += 1
        if may_go and not lane.is_listed:  # as `_list`
            lane.is_listed = True
            queue.by_seat[key.seat].append(lane)  # type: ignore[index]
        return None

    def returned(self, call: C, queue: Lanes[C, S]) -> None:
        """A call that was sent and has not begun waits again, before the others of its key in its queue."""
        lane = self._lane(call.key, queue)
        lane.calls.appendleft(call)
        queue.count += 1
        self._list(lane)

    def _list(self, lane: Lane[C, S]) -> bool:
        """List a lane in which something waits, if it may be sent. Whether it is listed now."""
        key = lane.key
        if not lane.is_listed and key.is_seated and key.running < self._limit:
            lane.is_listed = True
            lane.queue.by_seat[key.seat].append(lane)  # type: ignore[index]  # where it is seated it has a worker
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
        queue.by_seat.pop(seat, None)
        return None

    def cancelled(self, name: Hashable, queue: Lanes[C, S]) -> None:
        """A call that waits was cancelled. It is dropped when its turn comes, or when half of its lane is such."""
        lane = self._keys[name].lanes[queue]
        lane.ended += 1
        queue.count -= 1
        purge(lane)

    def ended(self, name: Hashable) -> Iterable[Lanes[C, S]]:
        """A call of this key is not under way any more. The queues of which a call may be sent by that."""
        key = self._keys[name]
        running = key.running
        key.running = running - 1
        if key.is_home or (key.is_seated and (running > 1 or not key.is_idle())):
            if running < self._limit:  # its lanes are listed already
                return ()
        elif key.is_seated:
            self._keys.pop(name, None)  # its next call finds where it belongs
            return ()
        elif running > 1:
            return ()
        else:
            key.seat = self._home(name)
            key.is_seated = key.is_home = key.seat is not None
        return [lane.queue for lane in key.lanes.values() if lane.calls and self._list(lane)]

    def forget(self, queue: Lanes[C, S]) -> list[C]:
        """Take out everything that waits in this queue, which may be used again."""
        calls: list[C] = []
        for key in list(self._keys.values()):
            lane = key.lanes.pop(queue, None)
            if lane is not None:
                calls += (call for call in lane.calls if not call.done())
        queue.by_seat.clear()
        queue.count = 0
        return calls

    def seated(self, seats: Iterable[S]) -> Iterable[Lanes[C, S]]:
        """The workers that take calls have changed. Keys with nothing under way move. The queues of which a call may be sent."""
        self._seats = list(seats)
        for key in self._keys.values():
            for lane in key.lanes.values():
                lane.queue.by_seat.clear()
                lane.is_listed = False
        self._drop_idle()
        for name, key in self._keys.items():
            home = self._home(name)
            if not key.running:
                key.seat = home
            key.is_seated = key.seat in self._seats
            key.is_home = key.is_seated and key.seat is home
        waiting = [lane for key in self._keys.values() for lane in key.lanes.values() if lane.calls]
        return dict.fromkeys(lane.queue for lane in waiting if self._list(lane))
