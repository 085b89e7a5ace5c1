"""When a slot gets its next worker, and when it gets none any more.

Only deaths before a worker began its first call count, in a row per slot; a begun call resets them. The first replacement comes
at once, then after 0.1 · 2ⁿ seconds, 5 at most; ten in a row and the slot is given up.
"""

from typing import Final

LIMIT: Final = 10
_FIRST_DELAY: Final = 0.1
LONGEST_DELAY: Final = 5.0


class RestartBudget:
    """The deaths in a row of one slot."""

    __slots__ = ("deaths",)

    def __init__(self) -> None:
        self.deaths = 0

    def began(self) -> None:
        """The slot's worker has begun a call: all is well."""
        self.deaths = 0

    def died(self) -> float | None:
        """The worker died before it began any call: seconds until the next start, or None when there is none."""
        self.deaths += 1
        if self.deaths >= LIMIT:
            return None
        return 0.0 if self.deaths == 1 else min(LONGEST_DELAY, _FIRST_DELAY * 2.0 ** (self.deaths - 2))
