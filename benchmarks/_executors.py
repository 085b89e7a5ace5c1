"""What the rows executor_* share: LoopPoolExecutor and ProcessPoolExecutor, opened alike and given the same."""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import percore
from benchmarks.calls import same_plainly
from benchmarks.peers import WORKERS
from benchmarks.peers.executors import opened, processes

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
    from concurrent.futures import Executor

    from benchmarks._harness import Contestant, Round, Sample


def ours(workers: int) -> Executor:
    return percore.LoopPoolExecutor(workers)


def one_at_a_time(workers: int) -> Executor:
    return percore.LoopPoolExecutor(workers, max_threads=1)


MAKERS: Mapping[str, Callable[[int], Executor]] = {
    "percore": ours,
    "percore, max_threads=1": one_at_a_time,
    "ProcessPoolExecutor": processes,
}


def contestants(work: Callable[[Executor], Awaitable[int]], suffix: str = "") -> dict[str, Contestant]:
    """Each of them; `work` makes calls and tells how many."""
    return {f"{name}{suffix}": partial(_timed, make, work) for name, make in MAKERS.items()}


@asynccontextmanager
async def _timed(make: Callable[[int], Executor], work: Callable[[Executor], Awaitable[int]]) -> AsyncIterator[Round]:
    async with opened(make, WORKERS) as executor:
        await asyncio.to_thread(lambda: list(executor.map(same_plainly, range(200))))

        async def once() -> Sample:
            start = time.perf_counter()
            calls = await work(executor)
            return {"a call": (time.perf_counter() - start) / calls}

        yield once
