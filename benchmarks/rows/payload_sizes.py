"""Bytes in a list to a worker and back, 1 kB to 50 MB, 1 worker, one call at a time.

What a byte costs, whatever its size: the plot (`--plots FOLDER`) shows the time over it. From 32 MiB on the system gives
Python fresh memory for each such object, which takes longer than copying. See benchmarks/_payloads.py for how it is done.
"""

from __future__ import annotations

import os
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING

from benchmarks._payloads import MEMCPY, Payload, memcpy, plot, row_of

if TYPE_CHECKING:
    from benchmarks._harness import Row

SIZES = {"1 kB": 1_000, "10 kB": 10_000, "100 kB": 100_000, "1 MB": 1_000_000, "10 MB": 10_000_000, "50 MB": 50_000_000}
OF_POOL = {"1 kB": 0.5, "100 kB": 0.45, "1 MB": 0.142, "10 MB": 0.142, "50 MB": 0.35}
"""Times ProcessPoolExecutor's; 0.142 is a seventh."""

OF_BARE = 1.5


def row(*, quick: bool) -> Row:
    payloads = [
        Payload(name, size, calls_of(size, quick=quick), partial(_listed, size), OF_POOL.get(name), OF_BARE)
        for name, size in SIZES.items()
    ]
    made = row_of(payloads, quick=quick, seconds=8 if quick else 45)
    drawn = plot("A list of one bytes object, there and back", SIZES)
    return replace(made, contestants={MEMCPY: partial(memcpy, payloads), **made.contestants}, draw=drawn)


def calls_of(size: int, *, quick: bool) -> int:
    """As many as take about as long as those of the other sizes."""
    return max(2, min(200, 40_000_000 // size) // (10 if quick else 1))


def _listed(size: int) -> list[bytes]:
    return [os.urandom(size)]
