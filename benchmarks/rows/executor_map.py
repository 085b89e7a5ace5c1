"""LoopPoolExecutor: `map` over tiny plain functions with chunksize 1 and 1000, 2 workers, against ProcessPoolExecutor.

With chunksize 1 each item is a call of its own, with 1000 a call is a list of items that a worker goes through. The results are
compared with the items.
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

LARGE = 1000


def row(*, quick: bool) -> Row:
    single, many = (2000, 20_000) if quick else (8000, 400_000)
    made = {
        **contestants(partial(_map_all, 1, single), ", chunksize 1"),
        **contestants(partial(_map_all, LARGE, many), f", chunksize {LARGE}"),
    }
    return Row(
        contestants=made,
        targets=[
            Target("percore, chunksize 1", "ProcessPoolExecutor, chunksize 1", "a call", at_least=3.0),
            Target(f"percore, chunksize {LARGE}", f"ProcessPoolExecutor, chunksize {LARGE}", "a call", at_least=1.0),
        ],
        rounds=1 if quick else 9,
        seconds=15 if quick else 50,
    )


async def _map_all(chunksize: int, items: int, executor: Executor) -> int:
    await asyncio.to_thread(_map, executor, chunksize, items)
    return items


def _map(executor: Executor, chunksize: int, items: int) -> None:
    if list(executor.map(same_plainly, range(items), chunksize=chunksize)) != list(range(items)):
        raise RuntimeError("a call gave the result of another one")
