"""What `async for` over a map of a million ints adds to the supervisor's memory, 2 workers, when it is warm.

A map holds its window and nothing else: neither the million items nor their results. Measured is what this process has
for itself alone (USS, by psutil), before the map, a hundred times on its way, and when it has ended. The warm-up round
is a map of the same length: what percore keeps for the next map is its working memory, and no growth.
"""

from __future__ import annotations

import gc
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import psutil

import percore
from benchmarks._figures import Limit, in_mebibytes
from benchmarks._harness import Round, Row, Sample
from benchmarks.calls import same_plainly

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

WORKERS = 2
LOOKS = 100


def row(*, quick: bool) -> Row:
    return Row(
        contestants={"percore": partial(_percore, 50_000 if quick else 1_000_000)},
        targets=[Limit("percore", metric, at_most=2 << 20) for metric in ("at most", "afterwards")],
        rounds=3 if quick else 5,
        seconds=6 if quick else 25,
        words={"at most": in_mebibytes, "afterwards": in_mebibytes},
    )


@asynccontextmanager
async def _percore(calls: int) -> AsyncIterator[Round]:
    async with percore.Runner(workers=WORKERS) as runner:
        yield partial(_round, calls, runner)


async def _round(calls: int, runner: percore.Runner) -> Sample:
    process = psutil.Process()
    gc.collect()
    before = highest = process.memory_full_info().uss
    wanted = 0
    async for result in runner.map(same_plainly, range(calls)):
        if result != wanted:
            raise RuntimeError("the results are not those of these items")
        wanted += 1
        if wanted % (calls // LOOKS) == 0:
            highest = max(highest, process.memory_full_info().uss)
    gc.collect()
    return {"at most": highest - before, "afterwards": process.memory_full_info().uss - before}
