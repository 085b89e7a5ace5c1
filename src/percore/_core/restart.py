"""Back-off for replacing dead workers: when a slot gets its next worker, and when it is given up.

Only deaths before a worker began its first call count. They are counted in a row, per slot; a call that begins resets the count.
The first replacement starts at once, the next ones after 0.1 · 2ⁿ seconds, at most 5. The slot is given up after ten such deaths in
a row.
"""

from typing import Final

LIMIT: Final = 10
_FIRST_DELAY: Final = 0.1
LONGEST_DELAY: Final = 5.0


class RestartBudget:
    """The number of early deaths in a row in one slot."""

    __slots__ = ("deaths",)

    def __init__(self) -> None:
        self.deaths = 0

    def began(self) -> None:
        """Reset the count, because the slot's worker has begun a call."""
        self.deaths = 0

    def died(self) -> float | None:
        """Count a worker that died before it began any call.

        Return the seconds until its replacement starts, or None if the slot is given up.
        """
        self.deaths += 1
        if self.deaths >= LIMIT:
            return None
        return 0.0 if self.deaths == 1 else min(LONGEST_DELAY, _FIRST_DELAY * 2.0 ** (self.deaths - 2))
