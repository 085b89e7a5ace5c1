"""A numpy array of 800 MB to a worker and back, 1 worker: two copies, against two copies in this process.

Nobody keeps so much memory warm: the limit is `array.copy()` into fresh memory, once for each way. Where less than 8 GB are
free, the array has 80 MB, as with --quick. See benchmarks/_payloads.py for how it is done.
"""

from __future__ import annotations

import time
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from statistics import fmean
from typing import TYPE_CHECKING, Any

import psutil

from benchmarks._figures import Target
from benchmarks._payloads import MEMCPY, POOL, Payload, array_of, is_same_array, memcpy, row_of, value_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from benchmarks._harness import Round, Row

COPIES = "two copies into fresh memory"
CALLS = 3
"""One where it takes long: ProcessPoolExecutor's."""

NEEDED = 8_000_000_000
"""Bytes that ProcessPoolExecutor takes for it, and some."""


def row(*, quick: bool) -> Row:
    size = 80_000_000 if quick or psutil.virtual_memory().available < NEEDED else 800_000_000
    payload = Payload(f"{size // 1_000_000} MB", size, CALLS, partial(array_of, size), is_same=is_same_array)
    made = row_of([payload], quick=quick, seconds=6 if quick else 70)
    once = row_of([replace(payload, calls=1)], quick=quick, seconds=made.seconds)
    return replace(
        made,
        contestants={
            MEMCPY: partial(memcpy, [payload]),
            COPIES: partial(_copies, payload),
            "percore": made.contestants["percore"],
            POOL: once.contestants[POOL],
        },
        targets=[
            Target("percore", COPIES, payload.name, at_most=1.5),
            Target("percore", POOL, payload.name, at_most=0.142),
        ],
        warm_ups=0,
    )


@asynccontextmanager
async def _copies(payload: Payload) -> AsyncIterator[Round]:
    array = value_of(payload)

    async def once() -> dict[str, float]:
        return {payload.name: fmean([_seconds_of(array) for _ in range(payload.calls)])}

    yield once


def _seconds_of(array: Any) -> float:
    start = time.perf_counter()
    copies = array.copy(), array.copy()
    seconds = time.perf_counter() - start
    del copies  # not in that time
    return seconds
