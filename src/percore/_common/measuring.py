"""Figures of many calls in little memory: histograms, and gauges that measure every n-th call. The same on both sides."""

from collections.abc import Callable, Iterable
from math import ceil
from typing import Final

_BITS: Final = 3
_PARTS: Final = 1 << _BITS
"""Buckets between a number and its double. So each is an eighth to a sixteenth wide, and its middle is wrong by 6 % at most."""

NEVER: Final = 1 << 62
"""More calls than there are."""

QUICK_NS: Final = 200_000
"""Nanoseconds up to which measuring each call would cost too large a part of it."""

TINY_NS: Final = 20_000

MOST_SKIPPED: Final = 32
"""Of quick calls every so-manieth is measured."""

MOST_TINY_SKIPPED: Final = 256
"""Of calls of at most `TINY_NS` every so-manieth is measured."""


class Histogram:
    """How often which values occurred: non-negative integers, in buckets that widen with the value."""

    __slots__ = ("count", "counts", "total")

    def __init__(self) -> None:
        self.counts: dict[int, int] = {}
        """By bucket. Only buckets in use are there: about fifty in practice."""
        self.count = 0
        self.total = 0
        """The sum of the values."""

    def add(self, value: int, weight: int = 1) -> None:
        """Count a value, which stands for `weight` of them."""
        bucket = bucket_of(value)
        self.counts[bucket] = self.counts.get(bucket, 0) + weight
        self.count += weight
        self.total += value * weight

    def merge(self, counts: Iterable[tuple[int, int]], total: int) -> None:
        """Add the counts of another histogram, by bucket, and the sum of its values."""
        for bucket, count in counts:
            self.counts[bucket] = self.counts.get(bucket, 0) + count
            self.count += count
        self.total += total

    def percentiles(self, *shares: float) -> list[float]:
        """Return for each of these shares, from 0 to 1 and ascending, the value that this share of all values does not exceed.

        Any thread may call this while another one counts. Without values all are 0.
        """
        counts = sorted(self.counts.copy().items())
        whole, values = sum(count for _, count in counts), []
        passed, places = 0, iter(counts)
        bucket = 0
        for share in shares:
            while passed < ceil(share * whole):
                bucket, count = next(places)
                passed += count
            values.append(middle_of(bucket))
        return values


def count_in(histograms: Iterable[Histogram], value: int, weight: int) -> None:
    """Count a value in all of these histograms. Finding its bucket once saves half of the time."""
    bucket, total = bucket_of(value), value * weight
    for one in histograms:
        one.counts[bucket] = one.counts.get(bucket, 0) + weight
        one.count += weight
        one.total += total


def merged(histograms: Iterable[Histogram]) -> Histogram:
    """Return a new histogram of the values of all of these. Another thread may count in them meanwhile."""
    whole = Histogram()
    for one in histograms:
        whole.merge(one.counts.copy().items(), one.total)
    return whole


def bucket_of(value: int) -> int:
    """Return the bucket of a value. The first 16 buckets have one value each."""
    shift = value.bit_length() - _BITS - 1
    return value if shift <= 0 else (shift << _BITS) + (value >> shift)


def middle_of(bucket: int) -> float:
    """Return the middle of the values of a bucket."""
    shift = (bucket >> _BITS) - 1
    if shift <= 0:
        return bucket
    low = (_PARTS + (bucket & (_PARTS - 1))) << shift
    return low + ((1 << shift) - 1) / 2


class Gauge:
    """Measures calls of one function: each call that takes long, and of quick calls ever fewer, down to every 256th.

    The caller counts `left` down before each call, which is cheaper than a method, and measures the call if `left` is then
    below 0. Threads may do so at once: a race makes a sample more or less.
    """

    __slots__ = ("_take", "left", "skips")

    def __init__(self, take: Callable[[int, int], object] | None) -> None:
        """`take` takes each sample: nanoseconds, and how many calls it stands for. None: measure nothing."""
        self._take = take
        self.left = NEVER if take is None else 0
        self.skips = 1

    def took(self, nanoseconds: int) -> None:
        """Take the duration of the call that was due."""
        if self._take is None:
            return
        self._take(nanoseconds, self.skips)
        most = MOST_TINY_SKIPPED if nanoseconds <= TINY_NS else MOST_SKIPPED
        self.skips = 1 if nanoseconds > QUICK_NS else min(2 * self.skips, most)
        self.left = self.skips - 1
