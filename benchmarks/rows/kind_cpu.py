"""Four tasks of CPU work at once: 0.5, 2 and 8 million multiplications each.

The sizes of the comparison that this follows, by ten; see benchmarks/_kinds.py for what is measured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks._kinds import Kind, row_of
from benchmarks.kinds import multiply

if TYPE_CHECKING:
    from benchmarks._harness import Row


def row(*, quick: bool) -> Row:
    scale = 100_000 if quick else 500_000
    return row_of(Kind("CPU", multiply, [scale, 4 * scale, 16 * scale]), quick=quick, seconds=65)
