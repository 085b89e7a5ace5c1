"""How much of a map may be on its way: the window, and how many items make a batch."""

from typing import Final

LEAST: Final = 64
MOST: Final = 131_072
MOST_OF_ONE: Final = 16_384
"""Items of one worker. Fewer cost throughput, measured with two: 0.93 of it at 8,192."""
BYTES: Final = 64 << 20
"""Bytes of pickled arguments that a map may have on its way; and of results, those that wait and those expected."""

AHEAD_SECONDS: Final = 0.05
"""A window holds as many items as end in this time, so that short calls never wait for the next input."""

BATCH_SECONDS: Final = 0.001
_RECENT: Final = 64
_SHORTEST: Final = 1e-9
_DELAY: Final = 0.01
"""Seconds that a thread waits for a CPU at most, mostly."""


def most_of(workers: int) -> int:
    """Items that a map may hold at most, with so many workers."""
    return min(MOST, MOST_OF_ONE * workers)


class Window:
    """How many items of one map may be pulled and not yet handed over.

    Where the user does not say, it follows the calls: 64 at first; with the first results twice what the workers can hold; beyond
    that while so many of them end in a moment. And it keeps bounds on memory, whatever the items are: one item always passes.
    """

    __slots__ = (
        "_argument_bytes",
        "_base",
        "_is_exact",
        "_mean",
        "_most",
        "_rated_at",
        "_rated_ended",
        "_result_bytes",
        "batch",
        "ended",
        "handed_over",
        "is_rated",
        "limit",
        "pulled",
    )

    def __init__(self, exact: int | None, room: int, most: int = MOST) -> None:
        """`exact`: what the user says. `room`: calls that all workers together may hold. `most`: no window is larger."""
        self._is_exact = exact is not None
        self._most = most
        self.limit = min(most, LEAST if exact is None else exact)
        self._base = min(most, max(LEAST, 2 * room))
        self.pulled = self.ended = self.handed_over = 0
        self.is_rated = False
        self.batch = 1
        """Items that make a batch: so many are pulled together, where the window has room for some."""
        self._argument_bytes = 0
        self._result_bytes = 0.0
        self._mean = 0.0
        self._rated_at: float | None = None
        self._rated_ended = 0

    def space(self) -> int:
        """How many more items may be pulled now."""
        outstanding = self.pulled - self.handed_over
        space = self.limit - outstanding
        if self._is_exact or space <= 0:
            return max(0, space)
        if self._argument_bytes >= BYTES:
            space = 0
        elif self._mean:
            expected = self._result_bytes + (self.pulled - self.ended) * self._mean
            space = min(space, int((BYTES - expected) / self._mean))
        return max(0 if outstanding else 1, space)

    def is_worth_a_pull(self) -> bool:
        """Whether there is so much space that whoever pulls should be woken: short calls are then pulled by the hundred."""
        space = self.space()
        most = min(self.limit, BYTES / self._mean) if self._mean else self.limit
        step = max(most / 8, min(self.batch, most / 4))
        return space > 0 and (self._is_exact or space >= step or self.pulled == self.ended)

    def pull(self, count: int, size: int) -> None:
        """So many items were pulled; their pickled arguments take `size` bytes."""
        self.pulled += count
        self._argument_bytes += size

    def end(self, count: int, argument_size: int, result_size: int, now: float) -> None:
        """So many items have ended; their results wait, `result_size` bytes of them."""
        self.ended += count
        self._argument_bytes -= argument_size
        self._result_bytes += result_size
        if result_size or self._mean:
            self._mean += (result_size / count - self._mean) * min(1.0, count / min(self.ended, _RECENT))
        if not self._is_exact:
            self._rate(now)

    def expect(self, items: int) -> None:
        """So many items end in `AHEAD_SECONDS` if they take as long as was measured in workers: until their own rate is known."""
        if not self._is_exact and not self.is_rated and self._rated_at is not None:
            self.limit = max(self._base, min(self._most, items))

    def hand_over(self, size: float, count: int = 1) -> None:
        """So many results, of `size` bytes together, are the user's now."""
        self.handed_over += count
        self._result_bytes -= size

    def wake_at(self) -> int:
        """How many items must have been handed over before `is_worth_a_pull` can be true by that."""
        if self._is_exact or self.pulled - self.handed_over < self.limit:
            return self.handed_over + 1
        return self.pulled - self.limit + max(1, self.limit // 8)

    def _rate(self, now: float) -> None:
        if self._rated_at is None:
            self._rated_at, self._rated_ended = now, self.ended
            self.limit = self._base
            return
        ended, seconds = self.ended - self._rated_ended, now - self._rated_at
        if seconds < AHEAD_SECONDS:  # calls that began together end together: within less, that is no rate
            return
        self._rated_at, self._rated_ended = now, self.ended
        self.is_rated = True
        self.limit = max(self._base, min(self._most, int(ended / seconds * AHEAD_SECONDS)))


class Cost:
    """What an item of a map takes on a thread, as measured there, and so how many make a batch."""

    __slots__ = ("_is_rising", "seconds")

    def __init__(self) -> None:
        self.seconds: float | None = None
        self._is_rising = False

    def measured(self, count: int, seconds: float) -> None:
        """`count` items have taken so long. Believed at once when it is more, by and by when it is less.

        That many items have taken a few milliseconds more may be nothing but a thread that had to wait for a CPU: only when it
        happens twice in a row that is believed, too.
        """
        mean = max(_SHORTEST, seconds / count)
        before = self.seconds
        if before is None:
            self.seconds = mean
        elif mean > before:
            may_be_delay = count >= LEAST and seconds - count * before < _DELAY and not self._is_rising
            self.seconds = min(mean, (1.25 if may_be_delay else 8) * before)
        else:
            self.seconds = max(mean, before / 2)
        self._is_rising = before is not None and mean > 1.25 * before

    def whole(self, workers: int) -> int:
        """How many items make a batch: a millisecond's work, and so many at most that each worker may have two."""
        if self.seconds is None:
            return 1
        workers = max(1, workers)
        return min(max(LEAST, most_of(workers) // (2 * workers)), max(1, int(BATCH_SECONDS / self.seconds)))

    def batch(self, waiting: int, workers: int) -> int:
        """How many of the `waiting` items make the next batch."""
        whole = self.whole(workers)
        if self.seconds is None or waiting >= whole:
            return whole
        # Less than one batch: a part for each worker, unless that is not worth another message.
        return max(-(-waiting // max(1, workers)), min(waiting, int(BATCH_SECONDS / self.seconds / 4)), 1)
