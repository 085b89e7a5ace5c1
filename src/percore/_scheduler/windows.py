"""Flow control of a map: how many items may be under way (`Window`), and how many make a batch (`Cost`)."""

from typing import Final

LEAST: Final = 64
MOST: Final = 131_072
MOST_OF_ONE: Final = 16_384
"""Items that a map may hold per worker. With 8,192, the throughput measured with two workers was 0.93 of that with 16,384."""
BYTES: Final = 64 << 20
"""Limit for the bytes of a map's pickled arguments under way; and, separately, for those of its waiting and expected results."""

AHEAD_SECONDS: Final = 0.05
"""A window holds as many items as end within this time, so that short calls never wait for the next input."""

BATCH_SECONDS: Final = 0.001
_RECENT: Final = 64
_SHORTEST: Final = 1e-9
_DELAY: Final = 0.01
"""How long a thread usually waits for a CPU at most, in seconds."""


def most_of(workers: int) -> int:
    """Return how many items a map may hold at most with this number of workers."""
    return min(MOST, MOST_OF_ONE * workers)


class Window:
    """How many items of one map may be pulled and not yet handed over.

    If the user sets no window, its size depends on the calls. It is 64 at first. With the first results it becomes twice the number
    of calls that the workers can hold. It grows beyond that if more items than this end within `AHEAD_SECONDS`. Limits on memory
    apply as well, but one item may always be under way.
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
        """Make a window.

        Args:
            exact: the size that the user has set; None: it depends on the calls.
            room: calls that all workers together may hold.
            most: upper limit for the size.
        """
        self._is_exact = exact is not None
        self._most = most
        self.limit = min(most, LEAST if exact is None else exact)
        self._base = min(most, max(LEAST, 2 * room))
        self.pulled = self.ended = self.handed_over = 0
        self.is_rated = False
        self.batch = 1
        """Number of items in a whole batch. The feeder waits for this much space, or for a quarter of the window if less."""
        self._argument_bytes = 0
        self._result_bytes = 0.0
        self._mean = 0.0
        self._rated_at: float | None = None
        self._rated_ended = 0

    def resize(self, room: int, most: int) -> None:
        """Follow a change of the number of workers. `room` and `most` as in the making. A size set by the user stays."""
        if self._is_exact:
            return
        base, self._base, self._most = self._base, min(most, max(LEAST, 2 * room)), most
        if self._rated_at is None:  # there are no results yet
            self.limit = min(most, LEAST)
        else:
            self.limit = self._base if self.limit == base else max(self._base, min(most, self.limit))

    def space(self) -> int:
        """Return how many more items may be pulled now."""
        outstanding = self.pulled - self.handed_over
        space = self.limit - outstanding
        if self._is_exact or space <= 0:
            return max(0, space)
        if self._argument_bytes >= BYTES:
            space = 0
        elif self._mean:
            expected = self._result_bytes + (self.pulled - self.ended) * self._mean
            # A byte at least: the mean of results without bytes falls until nothing can be divided by it.
            space = min(space, int((BYTES - expected) / max(1.0, self._mean)))
        return max(0 if outstanding else 1, space)

    def is_worth_a_pull(self) -> bool:
        """Whether there is enough space to wake the feeder. Waiting for more space lets it pull many short calls at once."""
        space = self.space()
        most = min(self.limit, BYTES / self._mean) if self._mean else self.limit
        step = max(most / 8, min(self.batch, most / 4))
        return space > 0 and (self._is_exact or space >= step or self.pulled == self.ended)

    def pull(self, count: int, size: int) -> None:
        """Count `count` items as pulled. Their pickled arguments take `size` bytes together."""
        self.pulled += count
        self._argument_bytes += size

    def end(self, count: int, argument_size: int, result_size: int, now: float) -> None:
        """Count `count` items as ended. Their results, of `result_size` bytes together, wait to be handed over."""
        self.ended += count
        self._argument_bytes -= argument_size
        self._result_bytes += result_size
        if result_size or self._mean:
            self._mean += (result_size / count - self._mean) * min(1.0, count / min(self.ended, _RECENT))
        if not self._is_exact:
            self._rate(now)

    def expect(self, items: int) -> None:
        """Use `items` as the window until the rate of this map is known.

        `items`: how many end within `AHEAD_SECONDS` if each takes as long as workers have measured.
        """
        if not self._is_exact and not self.is_rated and self._rated_at is not None:
            self.limit = max(self._base, min(self._most, items))

    def hand_over(self, size: float, count: int = 1) -> None:
        """Count `count` results, of `size` bytes together, as handed over to the user."""
        self.handed_over += count
        self._result_bytes -= size

    def wake_at(self) -> int:
        """Return the value of `handed_over` below which handing over results cannot make `is_worth_a_pull` true."""
        if self._is_exact or self.pulled - self.handed_over < self.limit:
            return self.handed_over + 1
        return self.pulled - self.limit + max(1, self.limit // 8)

    def _rate(self, now: float) -> None:
        if self._rated_at is None:
            self._rated_at, self._rated_ended = now, self.ended
            self.limit = self._base
            return
        ended, seconds = self.ended - self._rated_ended, now - self._rated_at
        if seconds < AHEAD_SECONDS:  # calls that began together end together, so a shorter time gives no rate
            return
        self._rated_at, self._rated_ended = now, self.ended
        self.is_rated = True
        self.limit = max(self._base, min(self._most, int(ended / seconds * AHEAD_SECONDS)))


class Cost:
    """How long an item of a map takes, as measured on the worker's thread, and how many items make a batch."""

    __slots__ = ("_is_rising", "seconds")

    def __init__(self) -> None:
        self.seconds: float | None = None
        self._is_rising = False

    def measured(self, count: int, seconds: float) -> None:
        """Take a measurement: `count` items took `seconds` together.

        The estimate follows a rise at once, by up to a factor of 8, and a fall by up to one half. If 64 or more items took only a
        few milliseconds longer than expected, the thread may just have waited for a CPU. The estimate then rises by no more than a
        quarter, unless the measurement before it was a rise, too.
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
        """Return the size of a whole batch: a millisecond of work, but small enough that each worker can have two.

        Without a measurement it is 1.
        """
        if self.seconds is None:
            return 1
        workers = max(1, workers)
        return min(max(LEAST, most_of(workers) // (2 * workers)), max(1, int(BATCH_SECONDS / self.seconds)))

    def batch(self, waiting: int, workers: int) -> int:
        """Return how many of the `waiting` items make the next batch."""
        whole = self.whole(workers)
        if self.seconds is None or waiting >= whole:
            return whole
        # Fewer items than a whole batch: each worker gets a part, unless the part is not worth another message.
        return max(-(-waiting // max(1, workers)), min(waiting, int(BATCH_SECONDS / self.seconds / 4)), 1)
