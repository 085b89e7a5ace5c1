"""The items of a map that wait to be sent in batches: contiguous runs, cut where a batch begins and put back where one ends."""

import sys
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Generic, NamedTuple, TypeVar

from percore._core.flow import Cost

_FEW: Final = 64
_MERGED: Final = 4096
_BYTES: Final = 65_536
"""Of a batch, about: it goes in one frame."""

B = TypeVar("B")


class Run(NamedTuple):
    """Items with consecutive numbers.

    Attributes:
        start: number of the first in its map.
        bodies: what each carries.
        is_bare: whether each is the only argument of its call, as it is, instead of a body of its own.
        weight: bytes of the heaviest, about.
        data: the bodies encoded, each in `weight` bytes, if they were looked at that way; else empty.
    """

    start: int
    bodies: list[Any]
    is_bare: bool
    weight: int
    data: bytes = b""

    def part(self, first: int, end: int) -> "Run":
        """Those from this place on, up to another."""
        data = self.data[first * self.weight : end * self.weight] if self.data else b""
        return Run(self.start + first, self.bodies[first:end], self.is_bare, self.weight, data)

    def joined(self, other: "Run") -> "Run":
        """Both, of which the other follows."""
        data = self.data + other.data if self.data and other.data else b""
        return Run(self.start, self.bodies + other.bodies, self.is_bare, max(self.weight, other.weight), data)

    def precedes(self, other: "Run") -> bool:
        """Whether the other may follow in one batch."""
        return self.is_bare == other.is_bare and self.start + len(self.bodies) == other.start


class Batches(Generic[B]):
    """What waits of one map. A batch is cut when a worker takes it, not before: by then its items' cost is known best.

    Each item is copied once on its way, into its batch: of the first run only a place is moved on.
    """

    def __init__(self, make: Callable[[Run], B], cost: Cost | None = None) -> None:
        """`make` makes a batch of a run. `cost` is what is known of the function already."""
        self._make = make
        self._runs: deque[Run] = deque()
        self._at = 0
        """Items of the first run that have been taken."""
        self._count = 0
        self.cost = cost or Cost()

    def __len__(self) -> int:
        return self._count

    def append(self, run: Run) -> None:
        """More items, after all others."""
        self._count += len(run.bodies)
        # Few are merged, so that single ones are no runs of their own; many are not, since that would copy them once more.
        if self._runs and len(run.bodies) < _FEW and not (self._at and len(self._runs) == 1):
            last = self._runs[-1]
            if last.precedes(run) and len(last.bodies) < _MERGED:
                last.bodies.extend(run.bodies)
                self._runs[-1] = last._replace(weight=max(last.weight, run.weight), data=b"")
                return
        self._runs.append(run)

    def put_back(self, run: Run) -> None:
        """Items that were taken and have not begun, before all later ones."""
        self._trim()
        self._count += len(run.bodies)
        place = 0
        while place < len(self._runs) and self._runs[place].start < run.start:
            place += 1
        self._runs.insert(place, run)

    def pop(self, workers: int, limit: int = sys.maxsize) -> B:
        """The next batch, for one of so many workers that may begin so many calls. There must be items."""
        most = min(self.cost.batch(self._count, workers), limit)
        batch = self._cut(most, 0)
        while len(batch.bodies) < most and self._runs and batch.precedes(self._runs[0]):
            more = self._cut(most - len(batch.bodies), batch.weight, len(batch.bodies))
            if not more.bodies:
                break
            batch = batch.joined(more)
        self._count -= len(batch.bodies)
        return self._make(batch)

    def _cut(self, most: int, weight: int, beside: int = 0) -> Run:
        """Up to `most` items of the first run, to be one batch with `beside` others of some weight."""
        run, at = self._runs[0], self._at
        weight = max(run.weight, weight)
        count = min(most, max(0 if beside else 1, _BYTES // max(1, weight) - beside))
        if at + count < len(run.bodies):
            self._at = at + count
            return run.part(at, at + count)
        self._runs.popleft()
        self._at = 0
        return run.part(at, len(run.bodies)) if at else run

    def _trim(self) -> None:
        """Let the first run begin with what has not been taken."""
        if self._at:
            run = self._runs[0]
            self._runs[0] = run.part(self._at, len(run.bodies))
            self._at = 0

    def drop_from(self, number: int) -> None:
        """Drop the items of this number and above."""
        self._trim()
        kept: deque[Run] = deque()
        for run in self._runs:
            keep = min(len(run.bodies), max(0, number - run.start))
            if keep:
                kept.append(run.part(0, keep))
        self._runs = kept
        self._count = sum(len(run.bodies) for run in kept)
