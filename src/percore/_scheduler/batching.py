"""The items of a map that wait to be sent in batches.

They are kept as runs of consecutive items. A batch is cut from the first run, and items that return are put back in their place.
"""

import sys
from collections import deque
from collections.abc import Callable
from typing import Any, Final, Generic, NamedTuple, TypeVar

from percore._scheduler.windows import Cost

_FEW: Final = 64
_MERGED: Final = 4096

B = TypeVar("B")


class Run(NamedTuple):
    """Items with consecutive numbers.

    Attributes:
        start: the number of the first item in its map.
        bodies: the bodies of the items.
        is_bare: whether each body is the only argument of its call, instead of a tuple of arguments or a payload.
        weight: the weight of the heaviest body.
        data: all bodies encoded, each in `weight` bytes; empty if they are not encoded.
    """

    start: int
    bodies: list[Any]
    is_bare: bool
    weight: int
    data: bytes = b""

    def part(self, first: int, end: int) -> "Run":
        """Return the items at the places from `first` up to but not including `end`."""
        data = self.data[first * self.weight : end * self.weight] if self.data else b""
        return Run(self.start + first, self.bodies[first:end], self.is_bare, self.weight, data)

    def joined(self, other: "Run") -> "Run":
        """Return one run of both, where `other` follows this run."""
        data = self.data + other.data if self.data and other.data else b""
        return Run(self.start, self.bodies + other.bodies, self.is_bare, max(self.weight, other.weight), data)

    def precedes(self, other: "Run") -> bool:
        """Whether `other` may follow this run in one batch."""
        return self.is_bare == other.is_bare and self.start + len(self.bodies) == other.start


class Batches(Generic[B]):
    """The waiting items of one map.

    A batch is cut only when a worker takes it, because the cost of the items is known best by then. Each item is copied only once,
    into its batch: cutting does not copy the rest of the first run, it only advances an index.
    """

    def __init__(self, make: Callable[[Run], B], heaviest: int, cost: Cost | None = None) -> None:
        """`make` makes a batch of a run.

        `heaviest` is about how much the items of a batch may weigh. `cost` is the measured cost of the function, if it was called
        before.
        """
        self._make = make
        self._heaviest = heaviest
        self._runs: deque[Run] = deque()
        self._at = 0
        """Number of items already taken from the first run."""
        self._count = 0
        self.cost = cost or Cost()

    def __len__(self) -> int:
        return self._count

    def append(self, run: Run) -> None:
        """Append a run of items after all others."""
        self._count += len(run.bodies)
        # Merge a short run into the last one, so that single items do not become runs. A long run would be copied once more.
        if self._runs and len(run.bodies) < _FEW and not (self._at and len(self._runs) == 1):
            last = self._runs[-1]
            if last.precedes(run) and len(last.bodies) < _MERGED:
                last.bodies.extend(run.bodies)
                self._runs[-1] = last._replace(weight=max(last.weight, run.weight), data=b"")
                return
        self._runs.append(run)

    def put_back(self, run: Run) -> None:
        """Put back items that were taken and have not begun, before all later items."""
        self._trim()
        self._count += len(run.bodies)
        place = 0
        while place < len(self._runs) and self._runs[place].start < run.start:
            place += 1
        self._runs.insert(place, run)

    def pop(self, workers: int, limit: int = sys.maxsize) -> B:
        """Cut the next batch. At least one item must wait. After an error all items wait again.

        Args:
            workers: the number of workers.
            limit: how many calls the worker that takes the batch may still begin.
        """
        most = min(self.cost.batch(self._count, workers), limit)
        batch = self._cut(most, 0)
        cut = [batch]
        try:
            while len(batch.bodies) < most and self._runs and batch.precedes(self._runs[0]):
                more = self._cut(most - len(batch.bodies), batch.weight, len(batch.bodies))
                if not more.bodies:
                    break
                cut.append(more)
                batch = batch.joined(more)
            return self._make(batch)
        except BaseException:
            for run in cut:
                self.put_back(run)
            raise

    def _cut(self, most: int, weight: int, beside: int = 0) -> Run:
        """Take up to `most` items from the first run, for a batch that has `beside` other items of up to `weight`."""
        run, at = self._runs[0], self._at
        weight = max(run.weight, weight)
        count = min(most, max(0 if beside else 1, self._heaviest // max(1, weight) - beside))
        end = min(at + count, len(run.bodies))
        is_whole = end - at == len(run.bodies)
        # Mark the items as taken before copying them: a garbage collection may run user code that takes items, too.
        self._count -= end - at
        if end < len(run.bodies):
            self._at = end
        else:
            self._runs.popleft()
            self._at = 0
        return run if is_whole else run.part(at, end)

    def _trim(self) -> None:
        """Remove the items that were taken from the first run."""
        if self._at:
            run = self._runs[0]
            self._runs[0] = run.part(self._at, len(run.bodies))
            self._at = 0

    def drop_from(self, number: int) -> None:
        """Drop the items from this number on."""
        self._trim()
        kept: deque[Run] = deque()
        for run in self._runs:
            keep = min(len(run.bodies), max(0, number - run.start))
            if keep:
                kept.append(run.part(0, keep))
        self._runs = kept
        self._count = sum(len(run.bodies) for run in kept)
