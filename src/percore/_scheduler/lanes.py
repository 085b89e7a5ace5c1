"""Lanes: the waiting calls of one key in one queue.

A Ctrl-C may come when any function returns, also a built-in one. The call that `deque.popleft` has just returned would then be
nowhere. So here, and in `dispatch` and `keys`, a call is removed by `del calls[0]`, a statement that calls no function.
"""

from collections import defaultdict, deque
from collections.abc import Hashable
from operator import attrgetter
from typing import Any, Final, Generic, Protocol, TypeVar

_FEW: Final = 64

_CALLS: Final = attrgetter("calls")


class Keyed(Protocol):
    """A call with a key, as `Keys` sees it."""

    kind: int

    @property
    def key(self) -> Any: ...

    def done(self) -> bool: ...


class Place(Protocol):
    """A worker, as `Keys` sees it."""

    index: int

    load: list[int]
    """Places taken, by kind."""


C = TypeVar("C", bound=Keyed)
S = TypeVar("S", bound=Place)
C_contra = TypeVar("C_contra", contravariant=True)
S_contra = TypeVar("S_contra", contravariant=True)


class Gate(Protocol[C_contra, S_contra]):
    """The rate of one key, as `Keys` sees it."""

    is_shut: bool
    """Whether `take` has returned False, and `Keys.opened` will be called once it may return True."""

    def take(self, call: C_contra, seat: S_contra, /) -> bool:
        """Count a call that this worker gets now, if it may begin now. If not, the gate is shut."""

    def left(self, call: C_contra, /) -> None:
        """Note that a call is no longer under way. If it has not begun, it is not counted, and the gate is open."""

    def unsent(self, call: C_contra, /) -> None:
        """Note that a call that `take` has counted was not sent."""


class Key(Generic[C, S]):
    """A key that has, or had, calls waiting or under way."""

    __slots__ = ("calm", "gate", "is_home", "is_noted", "is_over", "is_seated", "lanes", "name", "round", "running", "seat")

    def __init__(self, name: Hashable, seat: S | None, at: int) -> None:
        self.name = name
        self.seat = seat
        self.is_seated = self.is_home = seat is not None
        """`is_seated`: the key's worker takes calls. `is_home`: that worker is the one the hash assigns. If the key is not at
        home, its calls under way had begun before the workers changed."""
        self.round = at
        """The number of changes of the workers at the time `is_seated` and `is_home` were set."""
        self.calm = -1
        """The same number, if the key was at home then and neither a rate nor a limit holds its calls back; else -1."""
        self.running = 0
        self.is_noted = False
        """Whether the key is in the list from which idle keys are dropped, or is lent and not to be dropped."""
        self.is_over = False
        """Whether no call will use the key any more: it is dropped as soon as it is idle."""
        self.gate: Gate[C, S] | None = None
        """Counts the starts of the key's calls, if the key has a rate."""
        self.lanes: dict[Any, Lane[C, S]] = {}

    def is_idle(self) -> bool:
        """Whether no call of this key is under way and none waits."""
        return not self.running and not any(map(_CALLS, list(self.lanes.values())))


class Waiting(Protocol[C]):
    """A queue or a lane: its waiting calls, and how many of them are cancelled (`ended`)."""

    calls: deque[C]
    ended: int


def purge(waiting: Waiting[C]) -> None:
    """Drop the cancelled calls once they are more than half of all waiting calls, and more than 64.

    The deque is changed in place: dropping a call may start a garbage collection, and a `__del__` may submit or cancel calls.
    """
    if waiting.ended <= _FEW or waiting.ended * 2 <= len(waiting.calls):
        return
    calls = waiting.calls
    for _ in range(len(calls)):
        if not calls:
            break
        call = calls[0]
        is_over = call.done()
        if not calls or calls[0] is not call:
            continue
        if is_over:
            del calls[0]
            waiting.ended -= 1
        else:
            calls.rotate(-1)


def move(waiting: Waiting[C], into: list[C], room: int) -> int:
    """Move up to `room` calls to `into`, and cancelled ones with them. Return how many of them were not cancelled.

    After an error, each call either is in `into` or waits.
    """
    calls, live = waiting.calls, 0
    while calls and room > 0:
        call = calls[0]
        del calls[0]
        into.append(call)
        room -= 1
        if waiting.ended and call.done():
            waiting.ended -= 1
        else:
            live += 1
    if not calls:
        waiting.ended = 0
    return live


class Lane(Generic[C, S]):
    """The waiting calls of one key in one queue."""

    __slots__ = ("calls", "ended", "is_listed", "key", "queue")

    def __init__(self, key: Key[C, S], queue: "Lanes[C, S]") -> None:
        self.key = key
        self.queue = queue
        self.calls: deque[C] = deque()
        self.ended = 0
        self.is_listed = False


class Lanes(Generic[C, S]):
    """The lanes of one queue. `by_seat` lists, for each worker, the lanes from which a call may be sent."""

    __slots__ = ("by_seat", "count", "lanes")

    def __init__(self) -> None:
        self.by_seat: defaultdict[S, deque[Lane[C, S]]] = defaultdict(deque)
        self.count = 0
        """Calls in all lanes, listed or not, without cancelled calls."""
        self.lanes: dict[Hashable, Lane[C, S]] = {}
