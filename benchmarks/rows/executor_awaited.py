"""LoopPoolExecutor: `loop.run_in_executor` under 500 awaiters x 10 calls, 2 workers, against ProcessPoolExecutor.

How a program of asyncio uses an executor. The calls are tiny; each result crosses into the loop by a callback of its own, which
is asyncio's, and the same for both.
"""

from __future__ import annotations

import asyncio
from functools import partial
from typing import TYPE_CHECKING

from benchmarks._executors import contestants
from benchmarks._figures import Target
from benchmarks._harness import Row
from benchmarks.calls import same_plainly

if TYPE_CHECKING:
    from concurrent.futures import Executor

CALLS = 10


def row(*, quick: bool) -> Row:
    return Row(
        contestants=contestants(partial(_await_all, 50 if quick else 500)),
        targets=[Target("percore", "ProcessPoolExecutor", "a call", at_least=3.0)],
        rounds=1 if quick else 9,
        seconds=10 if quick else 40,
    )


async def _await_all(awaiters: int, executor: Executor) -> int:
    loop = asyncio.get_running_loop()

    async def one(number: int) -> None:
        for _ in range(CALLS):
            if await loop.run_in_executor(executor, same_plainly, number) != number:
                raise RuntimeError("a call gave the result of another one")

    await asyncio.gather(*(one(number) for number in range(awaiters)))
    return awaiters * CALLS
