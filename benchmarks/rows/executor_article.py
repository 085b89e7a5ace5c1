"""LoopPoolExecutor: the article's workload on 2 x 40 threads, as a map of it and as a map of a Runner.

Calls of 20 ms waiting and about 0.8 ms of arithmetic, as in the row article: what the face of concurrent.futures costs where calls
do something. Every result is compared with its input.
"""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import percore
from benchmarks._figures import Target
from benchmarks._harness import Row
from benchmarks.calls import page, steps_for
from benchmarks.peers import timed_map
from benchmarks.rows.article import COMPUTING, PROCESSES, percore_threads, warm

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from benchmarks.peers import MapAll

THREADS = 40


def row(*, quick: bool) -> Row:
    calls = 200 if quick else 10_000
    steps = steps_for(COMPUTING)
    openings = {"percore": partial(_executor, steps), "percore.Runner": partial(percore_threads, steps, THREADS)}
    return Row(
        contestants={name: partial(timed_map, partial(warm, opening), range(calls)) for name, opening in openings.items()},
        targets=[Target("percore", "percore.Runner", "a call", at_most=1.05)],
        rounds=1 if quick else 5,
        seconds=10 if quick else 60,
        warm_ups=0,
    )


@asynccontextmanager
async def _executor(steps: int) -> AsyncIterator[MapAll]:
    with percore.LoopPoolExecutor(PROCESSES, max_threads=THREADS) as executor:
        fn = partial(page, steps=steps)
        yield lambda items: asyncio.to_thread(lambda: list(executor.map(fn, items)))
