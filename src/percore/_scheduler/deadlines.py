"""Deadlines: items with the time at which something is due. One timer of the shell serves all of them.

Items with the same time share a list, and only the times are in a heap. An item that is over stays until its time comes, unless the
deadlines are crowded with such items. So keep items that keep nothing large alive.

A garbage collection may run code of the user in the middle of any method, and that may add items.

The time limits of calls are not kept so: a list, even of weak references, would cost each call a seventh more. Each call knows its
own deadline, calls that are made together share one, and the shell looks through the pending calls when the earliest is due, some
thousand of them in each step of the loop.
"""

import sys
from collections.abc import Callable
from heapq import heappop, heappush
from math import inf
from typing import Final, Generic, TypeVar

_FEW: Final = 64
PIECE: Final = 2_000
"""Calls that are looked through in one step of the loop, which takes some milliseconds."""
_PAUSE: Final = 9
"""A pause after looking through the calls, as a multiple of how long that took. So it takes a tenth of the time at most."""

T = TypeVar("T")


class Deadlines(Generic[T]):
    """Items by the time at which they are due."""

    __slots__ = ("_enough", "_items", "_times")

    def __init__(self) -> None:
        self._times: list[float] = []
        self._items: dict[float, list[T]] = {}
        self._enough = _FEW

    def __len__(self) -> int:
        """Number of items, including those that are over."""
        return sum(map(len, list(self._items.values())))

    def add(self, when: float, item: T) -> None:
        """Add an item that is due at `when`."""
        while True:
            items = self._items.get(when)
            if items is not None:
                items.append(item)
                if self._items.get(when) is items:  # else a sweep has dropped the list meanwhile
                    return
            else:
                self._items.setdefault(when, [])
                heappush(self._times, when)

    def sweep(self, is_over: Callable[[T], bool]) -> None:
        """Drop the items that are over, if there may be many. The cost per item added is constant."""
        if len(self) <= self._enough:
            return
        self._enough = sys.maxsize  # one sweep at a time
        for when in list(self._items):
            items = self._items[when]
            count = len(items)
            items[:count] = [item for item in items[:count] if not is_over(item)]  # what is added meanwhile comes after these
            if not items:
                for item in self._items.pop(when):  # added just now
                    self.add(when, item)
        while len(self._times) != len(self._items):  # again if a time was added meanwhile
            self._times[:] = sorted(self._items)
        self._enough = max(_FEW, 2 * len(self))

    def next(self) -> float | None:
        """Return the earliest time at which an item is due; None if there is no item."""
        return self._times[0] if self._times else None

    def due(self, now: float) -> list[T]:
        """Remove and return the items that are due, the earliest first."""
        due: list[T] = []
        while self._times and self._times[0] <= now:
            due += self._items.pop(heappop(self._times), ())
        return due


class Pieces(Generic[T]):
    """Items that are looked through piece by piece, with a step of the loop for each.

    Items that come meanwhile are not among them: whoever adds one notes its deadline in `earliest`.
    """

    __slots__ = ("_items", "earliest", "seconds")

    def __init__(self, items: list[T]) -> None:
        self._items = items
        self.earliest = inf
        """The earliest deadline that is to come, of the items that were looked at."""
        self.seconds = 0.0
        """How long looking at them has taken."""

    def piece(self) -> list[T]:
        """Return the next items."""
        return self._items[-PIECE:]

    def looked(self, earliest: float, seconds: float) -> bool:
        """Note what was found among the next items, and drop them. Return whether there are more."""
        self.earliest = min(self.earliest, earliest)
        self.seconds += seconds
        del self._items[-PIECE:]
        return bool(self._items)


def grain(seconds: float) -> float:
    """Return the step to which deadlines of this length are rounded up, so that calls that are made together share one."""
    return min(seconds / 32, 0.05)


def rounded_up(when: float, step: float) -> float:
    """Return the first multiple of `step` after `when`."""
    return (when // step + 1.0) * step


def end_of_pause(seconds: float, ended: float) -> float:
    """Return the time before which nobody looks through the calls again, if that took so many seconds until `ended`."""
    return ended + _PAUSE * seconds
