"""Token buckets: how many calls of one key may begin now, by the key's rate. The time is an argument.

Two counts limit the starts:

- The bucket holds at most `burst` tokens and gets `n` of them in `per` seconds. A call that begins takes one. So calls begin at an
  even pace.
- Each of the `n` permits comes back `per` seconds after the start of the call that took it. So no `per` seconds, wherever they
  begin, hold more than `n` starts. A bucket alone would allow almost `n + burst` of them.

A call that was sent to a worker begins at some moment that nobody knows beforehand: the worker may be busy or stopped. Until its
start is known it counts as one that may begin at any moment: it holds a token and a permit, and both come back only after its
start.
"""

from collections import deque
from math import inf
from typing import Final

from percore._common.rates import Rate

LATENESS: Final = 0.1
"""While calls wait, the bucket holds the tokens of so many seconds beyond its burst. So a call that begins late, since a timer or a
worker was late, does not delay those that follow it."""

_GRAIN: Final = 1024
"""Starts within `per / _GRAIN` seconds share an entry. So the memory of a key has a bound, and a thousandth of the rate is lost."""

_SHORTEST: Final = 1e-12
_ROUNDING: Final = 1e-6
_UNLIMITED: Final = 1 << 40


class _Starts:
    """Some starts that were close together."""

    __slots__ = ("count", "first", "last")

    def __init__(self, at: float, count: int) -> None:
        self.first = self.last = at
        self.count = count


class Bucket:
    """The starts of one key."""

    __slots__ = ("_base", "_behind_until", "_counted", "_due", "_full_at", "_interval", "_log", "_reserved", "paused_until", "rate")

    def __init__(self, rate: Rate | None) -> None:
        """None: no limit, except a pause."""
        self.paused_until = -inf
        """No call begins before."""
        self._full_at = -inf
        """When the bucket will be full, if nothing begins until then."""
        self._behind_until = -inf
        """Until when it may make up for calls that begin late."""
        self._base = self._due = -inf
        """When it was last `shut`: from when on its tokens count, and when the first waiting call was due."""
        self._reserved = 0
        """The held calls then. Their tokens are part of the time until `_due`."""
        self._log: deque[_Starts] = deque()
        """The starts of the last `per` seconds."""
        self._counted = 0
        """The starts in the log."""
        self._set(rate)

    def _set(self, rate: Rate | None) -> None:
        self.rate = rate
        self._interval = 0.0 if rate is None else max(rate.per / rate.n, _SHORTEST)

    def shut(self, now: float, held: int) -> float:
        """Note that calls wait from now on, until `opened`. Return when the first one is `due`."""
        self._base = max(self._full_at, now - self._credit(now))
        self._reserved = held
        self._due = self.due(now, held)
        return self._due

    def opened(self, now: float) -> None:
        """Note that waiting calls may begin now: from the time at which they were due, the bucket gets tokens beyond its burst.

        The tokens of calls that were held when they began to wait are still theirs: such a call takes one when it begins.
        """
        self._full_at = max(self._full_at, min(max(self._base, self._due - self._reserved * self._interval), now))
        self._behind_until = now + 2 * LATENESS

    def _credit(self, at: float) -> float:
        """Return for how many seconds it may make up then."""
        return LATENESS if at <= self._behind_until else 0.0

    def free(self, now: float, held: int) -> int:
        """Return how many calls may begin now. `held`: calls whose start is not known. Zero or less: none."""
        if now < self.paused_until:
            return 0
        if self.rate is None:
            return _UNLIMITED
        self._expire(now)
        tokens = self.rate.burst + min(now - self._full_at, self._credit(now)) / self._interval
        return min(int(tokens + _ROUNDING), self.rate.n - self._counted) - held

    def due(self, now: float, held: int) -> float:
        """Return when the next call may begin, if the `held` ones begin now and no other does. If they begin later, it is later."""
        if self.rate is None:
            return max(now, self.paused_until)
        full_at = max(self._full_at, now - self._credit(now)) + held * self._interval
        paced = full_at - (self.rate.burst - 1) * self._interval
        return max(now, paced, self._permitted(now, held), self.paused_until)

    def _permitted(self, now: float, held: int) -> float:
        """Return when a permit is free."""
        assert self.rate is not None
        missing = self._counted + held + 1 - self.rate.n
        if missing <= 0:
            return now
        for starts in self._log:
            missing -= starts.count
            if missing <= 0:
                return starts.last + self.rate.per
        return now + self.rate.per

    def began(self, at: float, count: int = 1) -> None:
        """Note that `count` calls have begun, at this time or before. They are `held` no longer."""
        if self.rate is None:
            return
        self._full_at = max(self._full_at, at - self._credit(at)) + count * self._interval
        self._counted += count
        latest = self._log[-1] if self._log else None
        if latest is not None and at < latest.first + self.rate.per / _GRAIN:
            latest.last = max(latest.last, at)  # one that comes before the last one counts as late as that
            latest.count += count
        else:
            self._log.append(_Starts(at, count))

    def is_full(self, now: float) -> bool:
        """Whether nothing is left of earlier starts and pauses: a new bucket would decide the same."""
        self._expire(now)
        return self._full_at <= now and not self._log and self.paused_until <= now

    def change(self, rate: Rate | None, now: float) -> None:
        """Count by another rate from now on. The starts that the bucket still knows count under the new rate, too."""
        missing = max(0.0, self._full_at - now) / self._interval if self._interval else 0.0
        self._set(rate)
        if rate is None:
            self._full_at = -inf
            self._log.clear()
            self._counted = 0
        else:
            self._full_at = now + min(missing, rate.burst) * self._interval
            self._expire(now)

    def _expire(self, now: float) -> None:
        """Give back the permits of the starts that are `per` seconds old."""
        log = self._log
        per = 0.0 if self.rate is None else self.rate.per
        while log and log[0].last + per <= now:
            self._counted -= log.popleft().count
