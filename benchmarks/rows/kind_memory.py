"""Four tasks of memory work at once: a list of 0.5, 1 and 3 million ints each, and its sum.

The sizes of the comparison that this follows, by ten; see benchmarks/_kinds.py for what is measured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks._kinds import Kind, row_of
from benchmarks.kinds import sum_of_list

if TYPE_CHECKING:
    from benchmarks._harness import Row


def row(*, quick: bool) -> Row:
    scale = 100_000 if quick else 500_000
    return row_of(Kind("memory", sum_of_list, [scale, 2 * scale, 6 * scale]), quick=quick, seconds=40)
