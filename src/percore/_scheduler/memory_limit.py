"""The decision when a worker that has too much memory is replaced (`max_memory_per_worker`).

A worker over the limit is replaced once no earlier worker of its slot is left: one that drains has memory, too, and a slot must not
gather such workers. If a worker is over the limit at one of its first two samples, as its predecessor was, replacing it does not
help: then at least 2, 4, 8 … seconds, at most 60, lie between two replacements of the slot. The same applies if a replacement could
not start.
"""

from enum import Enum, auto
from typing import Final

LONGEST_WAIT: Final = 60.0
_EARLY: Final = 2
"""A worker that is over the limit by this number of samples, counted from its start, is over it early."""


class Verdict(Enum):
    """What to do about the worker of a slot."""

    KEEP = auto()
    RENEW = auto()
    RENEW_AND_ADVISE = auto()
    """Replace it, and tell the user that this will not help."""


class MemoryLimit:
    """Decides for one slot. The times are those of one monotonic clock."""

    def __init__(self, limit: int) -> None:
        """`limit`: how many bytes a worker may have."""
        self._limit = limit
        self._generation = 0
        self._samples = 0
        self._is_counted = False
        """Whether `_futile` counts the worker of this generation."""
        self._was_renewed = False
        """Whether the worker of this generation is being replaced, or was to be."""
        self._futile = 0
        """Workers in a row that were over the limit early, and replacements that could not start."""
        self._renewed_at = 0.0

    def sampled(self, generation: int, memory: int, now: float, *, is_free: bool) -> Verdict:
        """Note a sample of the slot's current worker, and return what to do.

        Args:
            generation: that of the worker.
            memory: how many bytes it has.
            now: the time of the sample.
            is_free: whether the slot can be renewed now, and has no other worker.
        """
        if generation != self._generation:
            self._generation, self._samples = generation, 0
            self._is_counted = self._was_renewed = False
        self._samples += 1
        if memory <= self._limit:
            if self._samples >= _EARLY:
                self._futile = 0
            return Verdict.KEEP
        if not self._is_counted:
            self._is_counted = True
            self._futile = self._futile + 1 if self._samples <= _EARLY else 0
        if not is_free:
            return Verdict.KEEP
        if self._was_renewed:  # and the slot still has this worker alone
            self._was_renewed = False
            self._futile += 1
        if self._futile > 1 and now - self._renewed_at < self._wait():
            return Verdict.KEEP
        self._was_renewed, self._renewed_at = True, now
        return Verdict.RENEW_AND_ADVISE if self._futile > 1 else Verdict.RENEW

    def _wait(self) -> float:
        """Return the seconds that must lie between the last replacement and the next one."""
        return min(LONGEST_WAIT, 2.0 ** min(self._futile - 1, 10))
