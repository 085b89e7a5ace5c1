"""A whole run's time, shared between its rows. Pure: time is an argument."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence

_SHARED = 0.85
"""Of the time that is left: what one row takes beyond its share is not taken from another one's."""

_AT_LEAST = 3.0
"""Seconds without which a row is not begun: it could hardly start its contestants."""


@dataclass(frozen=True, slots=True)
class Share:
    """What a row gets: after `seconds` it plays no further round, after `limit` seconds it is killed."""

    seconds: float
    limit: float


def share_of(wishes: Sequence[float], left: float) -> Share | None:
    """The share of the first of the rows that are to come, by what each wishes; None: there is no time for it.

    Nobody gets more than he wishes. All get less, in proportion, where the time that is left is not enough.
    """
    if left < _AT_LEAST:
        return None
    factor = min(1.0, left * _SHARED / sum(wishes))
    seconds = wishes[0] * factor
    return Share(seconds, min(left, 2 * seconds + 20))
