"""An experiment: the number of calls at once in a loop, found while they run, against the best fixed one."""

from __future__ import annotations

import asyncio
import json
import subprocess
import sys
from functools import partial
from typing import TYPE_CHECKING

from benchmarks.contestants import always
from benchmarks.figures import Target, in_items, in_seconds, in_times
from benchmarks.harness import Row, row

if TYPE_CHECKING:
    from benchmarks.results import Sample

MOST = 3000
"""The bound of politeness."""

LOADS = {
    "the article": (0.02, 0.0008),
    "sites of 5 ms": (0.005, 0.0002),
    "sites of 50 ms": (0.05, 0.0002),
    "sites of 500 ms": (0.5, 0.0002),
    "50 ms, 0.05 ms of CPU": (0.05, 0.00005),
    "50 ms, 0.5 ms of CPU": (0.05, 0.0005),
    "50 ms, 2 ms of CPU": (0.05, 0.002),
    "50 ms, 5 ms of CPU": (0.05, 0.005),
}
"""Seconds that a call waits, and those that it computes."""

RATIO, LATE, AFTER = "auto over the best fixed one", "auto, p99 of lateness", "auto, seconds to its level"


@row(rounds=1, seconds=80, warm_ups=0, is_extra=True)
def auto_concurrency(quick: bool) -> Row:
    """An experiment: calls at once in one loop, set while they run, against the best of three fixed numbers.

    The rule of `benchmarks.level` starts with 10 calls, and has ten seconds. It would be an option of percore if it reached, for
    all loads, 0.95 of the best throughput with callbacks at most 50 ms late.
    """
    settle, measure, found = (0.1, 0.2, 0.5) if quick else (1.0, 2.0, 10.0)

    async def once(wait: float, compute: float) -> Sample:
        enough = 1 + int(wait / compute)
        fixed = [await _played(wait, compute, str(min(MOST, times * enough)), settle, measure) for times in (1, 2, 4)]
        seconds, late, level, after = await _played(wait, compute, f"auto:{MOST}", found, measure)
        best = min(one[0] for one in fixed)
        return {RATIO: seconds / best, LATE: late, AFTER: after, "auto, level": level, "the best fixed one": best}

    return Row(
        {name: always(partial(once, *load)) for name, load in LOADS.items()},
        [target for name in LOADS for target in (Target(name, RATIO, at_most=1.05), Target(name, LATE, at_most=0.05))],
        units={RATIO: in_times, "auto, level": in_items, AFTER: in_seconds},
    )


async def _played(wait: float, compute: float, at_once: str, settle: float, measure: float) -> tuple[float, float, float, float]:
    words = [f"{number}" for number in (wait, compute)], [at_once], [f"{number}" for number in (settle + 2 * wait, measure)]
    command = [sys.executable, "-m", "benchmarks.programs.levels", *(word for part in words for word in part)]
    ended = await asyncio.to_thread(subprocess.run, command, capture_output=True, text=True, check=True)
    seconds, late, level, after = json.loads(ended.stdout)
    return seconds, late, level, after
