"""A map of plain calls that cost from 1 us to 100 ms of CPU, 2 workers, against a perfect balance.

Nobody can know beforehand which items are the long ones, and a batch that looked short may end with the longest. Each
call spins for so much CPU time of its thread and returns how much it really was. A perfect balance would end all
workers at the same moment: the sum of what the calls of this round have used, by the number of workers. What is judged
is the time from the map's start to its end over that, and so whatever percore adds is in it, too.

The costs are spread evenly over the magnitudes, and the same in every round: as many of about 10 us as of about 10 ms.
Beside the map stand two pools with several chunks, few items in a message being what balances best there, and the costs
dealt out by hand to two processes that do nothing else: so much of the distance is the machine's.
"""

from __future__ import annotations

import asyncio
import random
import time
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import percore
from benchmarks._figures import Limit, in_times
from benchmarks._harness import Contestant, Round, Row, Sample, Settings
from benchmarks.calls import spin, spin_all
from benchmarks.peers import distex, executors

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

    from benchmarks.peers import OpenMap

WORKERS = 2
LEAST, MOST = 1e-6, 0.1
OVER = "over balance"
CHUNKS = (1, 4, 16)
WARMING = [0.001] * 64


def row(*, quick: bool) -> Row:
    costs = costs_of(100 if quick else 600)
    contestants: dict[str, Contestant | Settings] = {
        "percore": partial(_percore, costs),
        "dealt out by hand": partial(_by_hand, costs),
    }
    pools = {
        "ProcessPoolExecutor": partial(executors.mapping, executors.processes, WORKERS),
        "distex": partial(distex.mapping, WORKERS, 2),
    }
    for name, pool in pools.items():
        contestants[name] = {f"chunks of {chunk}": partial(_pool, costs, partial(pool, chunk, spin)) for chunk in CHUNKS}
    return Row(
        contestants=contestants,
        targets=[Limit("percore", OVER, at_most=1.10, towards=1.03)],
        rounds=3 if quick else 9,
        seconds=10 if quick else 85,
        warm_ups=0,
        trials=1,
        words={OVER: in_times},
    )


def costs_of(calls: int) -> list[float]:
    """Seconds, log-uniform, the same every time."""
    dice = random.Random(4)
    return [LEAST * (MOST / LEAST) ** dice.random() for _ in range(calls)]


@asynccontextmanager
async def _percore(costs: Sequence[float]) -> AsyncIterator[Round]:
    async with percore.Runner(workers=WORKERS) as runner:
        await runner.map(spin, WARMING)
        yield partial(_round, costs, lambda: runner.map(spin, costs).collect())


@asynccontextmanager
async def _pool(costs: Sequence[float], open_map: OpenMap) -> AsyncIterator[Round]:
    async with open_map() as run:
        await run(WARMING)
        yield partial(_round, costs, lambda: run(costs))


@asynccontextmanager
async def _by_hand(costs: Sequence[float]) -> AsyncIterator[Round]:
    parts = dealt(costs)
    async with executors.opened(executors.processes, WORKERS) as pool:

        def run() -> list[float]:
            return [used for part in pool.map(spin_all, parts) for used in part]

        await asyncio.to_thread(run)
        yield partial(_round, costs, partial(asyncio.to_thread, run))


def dealt(costs: Sequence[float]) -> list[list[float]]:
    """The costs in as many parts as there are workers: from the highest on, each to the part that has least."""
    parts: list[list[float]] = [[] for _ in range(WORKERS)]
    for cost in sorted(costs, reverse=True):
        min(parts, key=sum).append(cost)
    return parts


async def _round(costs: Sequence[float], run: Callable[[], Awaitable[list[float]]]) -> Sample:
    start = time.perf_counter()
    used = await run()
    seconds = time.perf_counter() - start
    if len(used) != len(costs) or sum(used) < sum(costs):
        raise RuntimeError("not every call has used the CPU time it was to use")
    return {OVER: seconds / (sum(used) / WORKERS), "all calls": seconds}
