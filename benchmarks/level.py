"""An experiment: how many calls should run at once in one loop, found while they run.

A loop that runs too few calls waits; one that runs too many has all its CPU in use, and each call waits for its turn. Between them
the throughput no longer grows. The rule looks from time to time, at least as long as calls take, so that what it has changed shows:

1. A loop whose callbacks are late by more than `LATE` has too many calls: fewer by a fifth.
2. A loop that uses nearly all of its CPU has enough.
3. Otherwise more calls can run, as many as the unused CPU allows, and twice as many at most.
4. If the last raise did not raise the throughput, something else is full, such as the server: back to where it was, for some looks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

LATE: Final = 0.03
"""Seconds by which callbacks may be late, in the 95th percentile of one look."""

FULL: Final = 0.97
"""The part of a CPU from which on a loop counts as full."""

PATIENCE: Final = 8
"""Looks after a raise in vain until the next one."""


@dataclass(slots=True)
class Level:
    """The number of calls at once, from 1 to `most`: a bound of politeness, or of memory."""

    most: int
    level: int = 10
    _before: tuple[int, float] | None = None
    """The level before the last raise, and the throughput there."""
    _rest: int = 0

    def pause(self, throughput: float) -> float:
        """Seconds until the next look, at a throughput in calls a second: half as long again as a call takes, by Little's law."""
        return min(2.0, max(0.1, 1.5 * self.level / throughput if throughput else 0.5))

    def look(self, throughput: float, busy: float, late: float) -> None:
        """Set the level, after a time with this throughput, this part of a CPU in use, and callbacks so late."""
        before, self._before = self._before, None
        if late > LATE:
            self.level = max(1, self.level * 4 // 5)
            self._rest = 1
        elif before is not None and busy < FULL and throughput < before[1] * (1 + 0.2 * (self.level / before[0] - 1)):
            self.level, self._rest = before[0], PATIENCE
        elif self._rest:
            self._rest -= 1
        elif busy < FULL and self.level < self.most:
            self._before = self.level, throughput
            self.level = min(self.most, max(self.level + 1, int(self.level * min(2.0, 1 / max(busy, 0.01)))))
