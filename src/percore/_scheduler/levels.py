"""Nested calls, which calls in workers make: who waits for whom, and which of them go first.

A call that waits for its nested calls steps aside: it gives its place back, so that its nested calls find one even if there is one
place in all. Without a limit, further calls would begin in the places given back and step aside in turn, until a worker held any
number of begun calls (for plain functions, of threads). So nested calls wait in queues of their own, one for each kind and depth.
While few calls are aside, these queues take turns with all others. While many are (`MOST_ASIDE`), the deepest nested calls go
first, and no other call begins as long as any nested call waits. A call then begins only if no deeper one waits: in all workers
together, at most as many calls of one depth can be aside as there are places.
"""

from collections.abc import Iterator
from typing import Final, Generic, Protocol, TypeVar

LEAST_ASIDE: Final = 8
"""Calls of one kind that may be aside in each worker before nested calls go first, if it has fewer places of that kind."""

DEEPEST: Final = 64
"""The depth from which on all nested calls of a kind share a queue."""

MOST_ASIDE: Final = 4000
"""How many calls of one worker may be aside at once. A worker has that many additional start marks."""


class Level(Protocol):
    """A queue of nested calls."""

    depth: int
    ended: int

    @property
    def is_listed(self) -> bool: ...

    def __len__(self) -> int: ...


Q = TypeVar("Q", bound=Level)


class Levels(Generic[Q]):
    """The queues of nested calls, and the calls that are aside, by kind."""

    def __init__(self, places: tuple[int, int]) -> None:
        """`places`: by kind, how many places each worker has."""
        self._most = tuple(max(LEAST_ASIDE, some) for some in places)
        self._aside = [0, 0]
        self._queues: dict[tuple[int, int], Q] = {}
        self._deepest: list[tuple[int, int]] = []

    def get(self, depth: int, kind: int) -> Q | None:
        """Return the queue of this depth and kind; None if there is none yet."""
        return self._queues.get((min(depth, DEEPEST), kind))

    def add(self, kind: int, queue: Q) -> None:
        """Add a queue."""
        self._queues[queue.depth, kind] = queue
        self._deepest = sorted(self._queues, reverse=True)

    def moved(self, kind: int, count: int) -> None:
        """Note that `count` calls of this kind have stepped aside, or, if it is negative, have come back."""
        self._aside[kind] += count

    def is_strained(self, kind: int, seats: int) -> bool:
        """Whether nested calls go first. `seats`: the number of workers that take calls."""
        return self._aside[kind] >= self._most[kind] * max(1, seats)

    def is_awaited(self) -> bool:
        """Whether a nested call waits for a place."""
        return any(len(queue) > queue.ended for queue in self._queues.values())

    def listed(self, kind: int) -> Iterator[Q]:
        """Yield the queues of this kind that have a call to send, the deepest first."""
        for name in self._deepest:
            queue = self._queues[name]
            if name[1] == kind and queue.is_listed:
                yield queue


class Family:
    """A call and its nested calls, by their numbers: whether it is aside, and when it may come back.

    A coroutine call gets the answer that leaves it without nested calls only once it has its place again (`held`), so that no more
    than `concurrency` coroutine calls run. The thread of a plain call waits for its turn in the worker itself.
    """

    __slots__ = ("children", "held", "is_aside", "waits_for_place")

    def __init__(self, *, waits_for_place: bool) -> None:
        self.children: set[int] = set()
        """Nested calls that have not been answered."""
        self.held: int | None = None
        """The nested call whose answer waits for the place."""
        self.is_aside = False
        self.waits_for_place = waits_for_place

    def asks(self, number: int) -> int | None:
        """Add a nested call. Return the number of a held answer, which is now due: the call waits for another one."""
        held, self.held = self.held, None
        self.children.add(number)
        return held

    def answered(self, number: int, *, has_place: bool) -> bool:
        """Remove a nested call that has ended. Return whether its answer is due; else it is `held`."""
        self.children.discard(number)
        if self.children or has_place or not self.waits_for_place:
            return True
        self.held = number
        return False

    def dropped(self, number: int) -> bool:
        """Remove a nested call that its caller does not want any more. Return whether it was there, or its answer held."""
        if self.held == number:
            self.held = None
            return True
        if number in self.children:
            self.children.discard(number)
            return True
        return False

    @property
    def is_over(self) -> bool:
        """Whether the call has no nested call, and no answer is held."""
        return not self.children and self.held is None
