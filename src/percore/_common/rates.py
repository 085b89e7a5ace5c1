"""Rates: how many calls of one key begin in how much time."""

from dataclasses import dataclass
from typing import Final

from percore._common.options import seconds_of, whole

_MOST: Final = 1_000_000_000


@dataclass(frozen=True, slots=True)
class Rate:
    """A limit on the starts of calls: at most `n` calls of a key begin within any `per` seconds, over all workers.

        runner.options(key=host, rate=percore.Rate(10, per=1)).run(fetch, url)

    With `burst=1` the calls begin `per / n` seconds apart. After a pause, up to `burst` of them begin together, and the following
    ones `per / n` seconds apart, as long as no `per` seconds hold more than `n` starts.

    A call that begins late, because its worker or this process was busy, does not delay those that follow it: while calls wait,
    percore makes up for 100 ms. The starts are then closer together, and no `per` seconds hold more than `n` of them even so.

    Args:
        n: a whole number of calls, 1 or more. For less than one call a second, choose a longer time: `Rate(1, per=30)`.
        per: seconds.
        burst: how many calls may begin together, from 1 to `n`.

    Raises:
        TypeError, ValueError: an argument is invalid.
    """

    n: int
    per: float
    burst: int = 1

    def __post_init__(self) -> None:
        if isinstance(self.n, float) and self.n > 0:
            raise TypeError(
                f"n must be a whole number of calls, not {self.n!r}: for fractions choose another time, as in Rate(1, per=2)"
            )
        whole("n", self.n, 1, _MOST)
        object.__setattr__(self, "per", seconds_of("per", self.per))
        whole("burst", self.burst, 1, self.n)
