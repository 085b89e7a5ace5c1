"""Ints, strings and bytes in lists, tuples and dicts to a worker and back, 1 worker, one call at a time.

The container's type alone must not matter, and neither must the number of objects in it: ten of 100 kB are as good as one
of 1 MB, and one that is there ten times travels once. Lists and dicts of 10,000 are bound by pickle, on both sides. See
benchmarks/_payloads.py for how it is done.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

from benchmarks._payloads import Payload, row_of

if TYPE_CHECKING:
    from benchmarks._harness import Row

KB, MB = 1_000, 1_000_000

SMALL, PICKLED, MIDDLE, LARGE = 0.5, 0.95, 0.45, 0.142
"""Times ProcessPoolExecutor's; the last is a seventh."""

OF_BARE = 1.5


def row(*, quick: bool) -> Row:
    few, some, many = (5, 10, 20) if quick else (30, 60, 200)
    payloads = [
        Payload("int", 2, many, lambda: 4711, SMALL),
        Payload("list of 100", 200, many, lambda: list(range(100)), SMALL),
        Payload("dict of 100", KB, many, lambda: _dict(100), SMALL),
        Payload("list of 10,000", 30 * KB, some, lambda: list(range(10_000)), PICKLED),
        Payload("dict of 10,000", 190 * KB, few, lambda: _dict(10_000), PICKLED),
        Payload("10 times the same 100 kB", 100 * KB, some, lambda: 10 * [os.urandom(100 * KB)], MIDDLE, OF_BARE),
        Payload("list of 10 x 100 kB", MB, few, lambda: [os.urandom(100 * KB) for _ in range(10)], LARGE, OF_BARE),
        Payload("dict of 10 x 100 kB", MB, few, lambda: {n: os.urandom(100 * KB) for n in range(10)}, LARGE, OF_BARE),
        Payload("tuple of 1 MB", MB, few, lambda: (os.urandom(MB),), LARGE, OF_BARE),
        Payload("str of 1 MB", MB, few, lambda: "percore " * (MB // 8), LARGE),
    ]
    return row_of(payloads, quick=quick, seconds=6 if quick else 35)


def _dict(entries: int) -> dict[str, int]:
    return {f"{number:b}": number for number in range(entries)}
