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
        mark: that of the function's meter, if their wait is measured; else 0.
    """

    start: int
    bodies: list[Any]
    is_bare: bool
    weight: int
    data: bytes = b""
    mark: int = 0

    def part(self, first: int, end: int) -> "Run":
        """Return the items at the places from `first` up to but not including `end`."""
        data = self.data[first * self.weight : end * self.weight] if self.data else b""
        return Run(self.start + first, self.bodies[first:end], self.is_bare, self.weight, data, self.mark)

    def joined(self, other: "Run") -> "Run":
        """Return one run of both, where `other` follows this run."""
        data = self.data + other.data if self.data and other.data else b""
        return Run(self.start, self.bodies + other.bodies, self.is_bare, max(self.weight, other.weight), data, self.mark)

    def precedes(self, other: "Run") -> bool:
        """Whether `other` may follow this run in one batch."""
        return self.is_bare == other.is_bare and self.start + len(self.bodies) == other.start


class _Waiting:
    """The items of one run that wait: those at the places from `first` up to but not including `end`."""

    __slots__ = ("end", "first", "run")

    def __init__(self, run: Run) -> None:
        self.run = run
        self.first = 0
        self.end = len(run.bodies)

    @property
    def start(self) -> int:
        """The number of the first waiting item."""
        return self.run.start + self.first


class Batches(Generic[B]):
    """The waiting items of one map.

    A batch is cut only when a worker takes it, because the cost of the items is known best by then. Each item is copied only once,
    into its batch: cutting does not copy the rest of the first run, it only advances `first`.

    Invariants:
        The waiting items are in the order of their numbers, and no item is there twice.
        `len()` is their number. The runs without waiting items are removed.
        Copying may raise, or start a garbage collection whose user code takes items too. So a cut first copies, then checks that
        nothing has changed meanwhile, and then marks the items as taken, with nothing between that runs other code.
    """

    def __init__(self, make: Callable[[Run], B], heaviest: int, cost: Cost | None = None) -> None:
        """`make` makes a batch of a run.

        `heaviest` is about how much the items of a batch may weigh. `cost` is the measured cost of the function, if it was called
        before.
        """
        self._make = make
        self._heaviest = heaviest
        self._runs: deque[_Waiting] = deque()
        self._count = 0
        self.cost = cost or Cost()

    def __len__(self) -> int:
        return self._count

    def append(self, run: Run) -> None:
        """Append a run of items after all others."""
        # Merge a short run into the last one, so that single items do not become runs. A long run would be copied once more.
        if self._runs and len(run.bodies) < _FEW:
            last = self._runs[-1]
            before = last.run
            is_untouched = not last.first and last.end == len(before.bodies)
            if is_untouched and before.precedes(run) and last.end < _MERGED:
                last.run = before._replace(weight=max(before.weight, run.weight), data=b"")
                before.bodies.extend(run.bodies)
                last.end = len(before.bodies)
                self._count += len(run.bodies)
                return
        self._runs.append(_Waiting(run))
        self._count += len(run.bodies)

    def put_back(self, run: Run) -> None:
        """Put back items that were taken and have not begun, before all later items."""
        waiting = _Waiting(run)
        place = 0
        while place < len(self._runs) and self._runs[place].start < run.start:
            place += 1
        self._runs.insert(place, waiting)
        self._count += len(run.bodies)

    def pop(self, workers: int, limit: int = sys.maxsize) -> B | None:
        """Cut the next batch. Return None if nothing waits, or `limit` allows none. After an error all items wait again.

        Args:
            workers: the number of workers.
            limit: how many calls the worker that takes the batch may still begin.
        """
        most = min(self.cost.batch(self._count, workers), limit)
        batch: Run | None = None
        cut: list[Run] = []
        try:
            while batch is None or len(batch.bodies) < most:
                part = self._cut(most, batch)
                if part is None:
                    break
                cut.append(part)
                batch = part if batch is None else batch.joined(part)
            return None if batch is None else self._make(batch)
        except BaseException:
            for run in cut:
                self.put_back(run)
            raise

    def _cut(self, most: int, batch: Run | None) -> Run | None:
        """Take items from the first run, for a batch of up to `most` items that may have some already. None: none fits."""
        while self._runs:
            waiting = self._runs[0]
            run, first = waiting.run, waiting.first
            if batch is None:
                count = min(most, max(1, self._heaviest // max(1, run.weight)))
            elif batch.start + len(batch.bodies) == waiting.start and batch.is_bare == run.is_bare:
                beside = len(batch.bodies)
                count = min(most - beside, self._heaviest // max(1, run.weight, batch.weight) - beside)
            else:
                return None
            if count <= 0:
                return None
            end = min(first + count, waiting.end)
            part = run if end - first == len(run.bodies) else run.part(first, end)
            if self._runs and self._runs[0] is waiting and waiting.run is run and waiting.first == first and waiting.end >= end:
                self._count -= end - first
                if end < waiting.end:
                    waiting.first = end
                else:
                    del self._runs[0]  # no `popleft`: see `lanes`
                return part
        return None

    def drop_from(self, number: int) -> None:
        """Drop the items from this number on."""
        while self._runs:
            last = self._runs[-1]
            keep = max(last.first, min(last.end, number - last.run.start))
            self._count -= last.end - keep
            last.end = keep
            if last.first < keep:
                return
            del self._runs[-1]
