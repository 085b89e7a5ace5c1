"""How much of a map may be on its way: the window."""

from typing import Final

_LEAST: Final = 64
_MOST: Final = 16_384


def default_window(room: int) -> int:
    """Items pulled and not yet handed over, when the user does not say: twice what the workers may hold at once."""
    return max(_LEAST, min(_MOST, 2 * room))
