"""What a call costs the supervisor with 64 workers, against the same with 2: CPU time of this process by calls.

A pool on a large machine must not pay for its idle workers, nor for the number of them when all are busy. With 2 awaiters
at most two of the 64 have something to do; with 500 all have, on however few CPUs there are. Workers' time is not in it.

Calls that are ready together travel together: of 500 in flight 250 go to each of two workers, and 8 to each of 64. So it is
shown beside what a call costs where as many are in flight for each worker.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import percore
from benchmarks._figures import Target
from benchmarks._harness import Round, Row, Sample
from benchmarks.calls import same

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

FEW, MANY = 2, 64
CALLERS = {"2 awaiters": 2, "500 awaiters": 500}
FOR_EACH = 250


def row(*, quick: bool) -> Row:
    calls = 1000 if quick else 10_000
    return Row(
        contestants={f"percore, {workers} workers": partial(_percore, calls, workers) for workers in (FEW, MANY)},
        targets=[Target(f"percore, {MANY} workers", f"percore, {FEW} workers", metric, at_most=1.2) for metric in CALLERS],
        rounds=3 if quick else 9,
        seconds=8 if quick else 40,
    )


@asynccontextmanager
async def _percore(calls: int, workers: int) -> AsyncIterator[Round]:
    async with percore.Runner(workers=workers) as runner:

        async def once() -> Sample:
            sample = {metric: await _cpu_of_a_call(runner, calls, awaiters) for metric, awaiters in CALLERS.items()}
            return sample | {f"{FOR_EACH} a worker": await _cpu_of_a_call(runner, calls, FOR_EACH * workers)}

        yield once


async def _cpu_of_a_call(runner: percore.Runner, calls: int, awaiters: int) -> float:
    each = max(2, calls // awaiters)
    start = time.process_time()
    await asyncio.gather(*(_awaiter(runner, each) for _ in range(awaiters)))
    return (time.process_time() - start) / (each * awaiters)


async def _awaiter(runner: percore.Runner, calls: int) -> None:
    for number in range(calls):
        if await runner.run(same, number) != number:
            raise RuntimeError("a call gave the result of another one")
