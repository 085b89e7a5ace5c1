"""How fast something grows, by its recent past."""

from collections import deque
from typing import Final

RECENT: Final = 10.0
"""Seconds of the past that count."""


class Meter:
    """Measures the rate of a count that is read from time to time."""

    def __init__(self, now: float) -> None:
        """Begin with a count of 0. All times are those of one monotonic clock."""
        self._readings = deque([(now, 0)])

    def rate(self, now: float, count: int) -> float | None:
        """Take a reading and return how much the count has grown per second lately. None: no time has passed.

        The interval begins with the last reading that is at least `RECENT` seconds old, or with the first one if none is.
        """
        readings = self._readings
        while len(readings) > 1 and now - readings[1][0] >= RECENT:
            readings.popleft()
        if now > readings[-1][0]:
            readings.append((now, count))
        then, before = readings[0]
        return (count - before) / (now - then) if now > then else None


def seconds_left(done: int, total: int | None, rate: float | None) -> float | None:
    """Return how long the rest will take at this rate. None: that is unknown."""
    if total is None or not rate or done > total:
        return None
    return (total - done) / rate
