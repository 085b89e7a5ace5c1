"""The items of a map that wait to be sent in batches: contiguous runs, cut where a batch begins and put back where one ends."""

from collections import deque
from collections.abc import Callable
from typing import Any, Final, Generic, NamedTuple, TypeVar

from percore._core.flow import Cost

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
    """

    start: int
    bodies: list[Any]
    is_bare: bool
    weight: int


class Batches(Generic[B]):
    """What waits of one map. A batch is cut when a worker takes it, not before: by then its items' cost is known best."""

    def __init__(self, make: Callable[[Run], B], cost: Cost | None = None) -> None:
        """`make` makes a batch of a run. `cost` is what is known of the function already."""
        self._make = make
        self._runs: deque[Run] = deque()
        self._count = 0
        self.cost = cost or Cost()

    def __len__(self) -> int:
        return self._count

    def append(self, run: Run) -> None:
        """More items, after all others."""
        self._count += len(run.bodies)
        if self._runs:
            last = self._runs[-1]
            if last.is_bare == run.is_bare and last.start + len(last.bodies) == run.start and len(last.bodies) < _MERGED:
                last.bodies.extend(run.bodies)
                self._runs[-1] = last._replace(weight=max(last.weight, run.weight))
                return
        self._runs.append(run)

    def put_back(self, run: Run) -> None:
        """Items that were taken and have not begun, before all later ones."""
        self._count += len(run.bodies)
        place = 0
        while place < len(self._runs) and self._runs[place].start < run.start:
            place += 1
        self._runs.insert(place, run)

    def pop(self, workers: int) -> B:
        """The next batch, for one of so many workers. There must be items."""
        run = self._runs[0]
        count = min(self.cost.batch(self._count, workers), max(1, _BYTES // max(1, run.weight)))
        if count >= len(run.bodies):
            self._runs.popleft()
        else:
            self._runs[0] = run._replace(start=run.start + count, bodies=run.bodies[count:])
            run = run._replace(bodies=run.bodies[:count])
        self._count -= len(run.bodies)
        return self._make(run)

    def drop_from(self, number: int) -> None:
        """Drop the items of this number and above."""
        kept: deque[Run] = deque()
        for run in self._runs:
            keep = min(len(run.bodies), max(0, number - run.start))
            if keep:
                kept.append(run._replace(bodies=run.bodies[:keep]))
        self._runs = kept
        self._count = sum(len(run.bodies) for run in kept)
