"""Keys: calls of one key are never on two workers at once, and at most so many of them run at once.

A key belongs to a worker by rendezvous hashing: to the one of the live workers for which a hash of both is highest. So keys spread
evenly, and when a worker goes or comes, the keys that move are its own alone. While calls of a key are under way it stays where it
is, also with a worker that takes no more calls; then what waits moves on when the last of them has ended.

Waiting calls of one key and one queue make a lane. A lane is listed with its queue, under the worker of its key, while one of its
calls may be sent; the lanes of a list take turns, so ten thousand calls of one key do not hold up the others.
"""

from collections import deque
from collections.abc import Hashable, Iterable
from typing import Any, Final, Generic, Protocol, TypeVar

_WORD: Final = (1 << 64) - 1
_FEW: Final = 64
_REMEMBERED: Final = 4096
"""Keys whose worker is remembered while nothing of them is under way, since to find it costs more than a call."""


class Keyed(Protocol):
    """A call with a key, as far as it matters here."""

    def done(self) -> bool: ...


class Place(Protocol):
    """A worker, as far as it matters here."""

    index: int


C = TypeVar("C", bound=Keyed)
S = TypeVar("S", bound=Place)


def weight(key_hash: int, index: int) -> int:
    """How much a key wants to be in a slot: evenly spread over 64 bits (the finaliser of splitmix64, Steele et al. 2014)."""
    z = (key_hash + (index + 1) * 0x9E3779B97F4A7C15) & _WORD
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & _WORD
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & _WORD
    return z ^ (z >> 31)


class Key(Generic[C, S]):
    """A key that has calls waiting or under way."""

    __slots__ = ("is_seated", "lanes", "name", "running", "seat")

    def __init__(self, name: Hashable, seat: S | None) -> None:
        self.name = name
        self.seat = seat
        self.is_seated = seat is not None
        """Whether its worker takes calls."""
        self.running = 0
        self.lanes: dict[Any, Lane[C, S]] = {}


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
        self.by_seat: dict[S, deque[Lane[C, S]]] = {}
        self.count = 0
        """Calls in all lanes, listed or not; cancelled ones do not count."""


class Keys(Generic[C, S]):
    """All keys of a runner with calls waiting or under way."""

    def __init__(self, limit: int | None) -> None:
        """`limit`: calls of one key that may be under way at once, over all workers."""
        self._limit = _WORD if limit is None else limit
        self._keys: dict[Hashable, Key[C, S]] = {}
        self._seats: list[S] = []
        self._homes: dict[Hashable, S] = {}

    def __len__(self) -> int:
        return len(self._keys)

    def _home(self, name: Hashable) -> S | None:
        seats = self._seats
        if len(seats) < 2:
            return seats[0] if seats else None
        home = self._homes.get(name)
        if home is None:
            if len(self._homes) >= _REMEMBERED:
                self._homes.clear()
            key_hash = hash(name)
            home = self._homes[name] = max(seats, key=lambda seat: weight(key_hash, seat.index))
        return home

    def _key(self, name: Hashable) -> Key[C, S]:
        key = self._keys.get(name)
        if key is None:
            key = self._keys[name] = Key(name, self._home(name))
        return key

    def enter(self, name: Hashable, queue: Lanes[C, S]) -> S | None:
        """The worker to which a new call of this key may go now, if that has a place for it; None: the call has to wait.

        Calls of its key that wait in other queues do not hold it up: they may be of another kind. `sent` must follow when it goes.
        """
        key = self._keys.get(name)
        if key is None:
            return self._home(name)
        if key.running >= self._limit or not key.is_seated:
            return None
        lane = key.lanes.get(queue) if key.lanes else None
        return key.seat if lane is None or len(lane.calls) == lane.ended else None

    def sent(self, name: Hashable, seat: S) -> None:
        """A call of this key is under way."""
        key = self._keys.get(name)
        if key is None:
            key = self._keys[name] = Key(name, seat)
        key.running += 1

    def wait(self, name: Hashable, call: C, queue: Lanes[C, S], *, first: bool = False) -> bool:
        """A call waits, behind those of its key in its queue, or `first` of them. Whether one of them may be sent now."""
        key = self._key(name)
        lane = key.lanes.get(queue)
        if lane is None:
            lane = key.lanes[queue] = Lane(key, queue)
        if first:
            lane.calls.appendleft(call)
        else:
            lane.calls.append(call)
        queue.count += 1
        return self._list(lane)

    def _list(self, lane: Lane[C, S]) -> bool:
        key = lane.key
        if not lane.is_listed and key.is_seated and key.running < self._limit:
            lane.is_listed = True
            by_seat = lane.queue.by_seat
            lanes = by_seat.get(key.seat)  # type: ignore[arg-type]  # where it is seated it has a worker
            if lanes is None:
                lanes = by_seat[key.seat] = deque()  # type: ignore[index]
            lanes.append(lane)
        return lane.is_listed

    def take(self, queue: Lanes[C, S], seat: S) -> C | None:
        """The next call of the queue for this worker, which is under way from now on; None: there is none."""
        lanes = queue.by_seat.get(seat)
        while lanes:
            lane = lanes.popleft()
            key, calls = lane.key, lane.calls
            while calls and calls[0].done():
                calls.popleft()
                lane.ended -= 1
            if not calls:
                lane.is_listed = False
                self._drop_lane(lane)
            elif key.running >= self._limit:
                lane.is_listed = False
            else:
                call = calls.popleft()
                queue.count -= 1
                key.running += 1
                if not calls:
                    lane.is_listed = False
                    self._drop_lane(lane)
                elif key.running < self._limit:
                    lanes.append(lane)
                else:
                    lane.is_listed = False
                return call
        queue.by_seat.pop(seat, None)
        return None

    def cancelled(self, name: Hashable, queue: Lanes[C, S]) -> None:
        """A call that waits was cancelled. It is dropped when its turn comes, or when half of its lane is such."""
        lane = self._keys[name].lanes[queue]
        lane.ended += 1
        queue.count -= 1
        purge(lane)

    def _drop_lane(self, lane: Lane[C, S]) -> None:
        key = lane.key
        del key.lanes[lane.queue]
        if not key.lanes and not key.running:
            del self._keys[key.name]

    def ended(self, name: Hashable) -> Iterable[Lanes[C, S]]:
        """A call of this key is not under way any more. The queues of which a call may be sent by that."""
        key = self._keys[name]
        key.running = running = key.running - 1
        if not key.lanes:
            if not running:
                del self._keys[name]
            return ()
        if not key.is_seated:
            if running:
                return ()
            key.seat = self._home(name)
            key.is_seated = key.seat is not None
        elif running + 1 < self._limit:  # its lanes are listed already
            return ()
        return [lane.queue for lane in key.lanes.values() if self._list(lane)]

    def forget(self, queue: Lanes[C, S]) -> list[C]:
        """Take out everything that waits in this queue."""
        calls: list[C] = []
        for key in list(self._keys.values()):
            lane = key.lanes.get(queue)
            if lane is not None:
                calls += (call for call in lane.calls if not call.done())
                lane.calls.clear()
                lane.is_listed = False
                self._drop_lane(lane)
        queue.by_seat.clear()
        queue.count = 0
        return calls

    def seated(self, seats: Iterable[S]) -> Iterable[Lanes[C, S]]:
        """The workers that take calls have changed. Keys with nothing under way move. The queues of which a call may be sent."""
        self._seats = list(seats)
        self._homes.clear()
        for key in self._keys.values():
            if not key.running:
                key.seat = self._home(key.name)
            key.is_seated = key.seat in self._seats
            for lane in key.lanes.values():
                lane.queue.by_seat.clear()
                lane.is_listed = False
        return dict.fromkeys(lane.queue for key in self._keys.values() for lane in key.lanes.values() if self._list(lane))
