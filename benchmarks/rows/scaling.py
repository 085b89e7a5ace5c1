"""Scaling over workers: a map of calls that compute for 1 ms, on 1 to twice as many workers as there are CPUs.

With a worker for each CPU such a map should be as many times as fast as with one; further workers bring nothing, and
should cost nothing. There is no target; the plot (`--plots FOLDER`) shows calls in a second over the workers.
"""

from __future__ import annotations

import time
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import percore
from benchmarks._harness import Round, Row, Sample
from benchmarks._machine import usable_cpus
from benchmarks._plots import Lines
from benchmarks.calls import steps_for, work
from benchmarks.peers import distex, executors

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable

    from benchmarks.peers import MapAll, OpenMap

COMPUTING = 0.001
CHUNK = 10
"""For the pools: as much as keeps two messages a worker ahead, and still divides well."""


def row(*, quick: bool) -> Row:
    calls = 50 if quick else 1000
    cpus = usable_cpus()
    sizes = [1, 2] if quick else sorted({1, 2, cpus // 2 or 1, cpus, cpus + 1, 2 * cpus})
    steps = steps_for(COMPUTING)
    openings: dict[str, Callable[[int], OpenMap]] = {
        "percore": lambda workers: partial(_percore, workers),
        "ProcessPoolExecutor": lambda workers: partial(executors.mapping, executors.processes, workers, CHUNK, work),
        "loky": lambda workers: partial(executors.mapping, executors.loky, workers, CHUNK, work),
        "InterpreterPoolExecutor": lambda workers: partial(executors.mapping, executors.interpreters, workers, CHUNK, work),
        "distex": lambda workers: partial(distex.mapping, workers, 2, CHUNK, work),
        "ThreadPoolExecutor": lambda workers: partial(executors.mapping, executors.threads, workers, 1, work),
    }
    plot = Lines(
        f"A map of calls of 1 ms, {cpus} CPUs",
        x="workers",
        y="calls in a second",
        height=lambda _, seconds: 1 / seconds,
        x_scale="linear",
        y_scale="linear",
    )
    return Row(
        contestants={name: partial(_all_sizes, opening, sizes, calls, steps) for name, opening in openings.items()},
        targets=[],
        rounds=3,
        seconds=8 if quick else 40,
        warm_ups=0,
        draw=plot.draw,
    )


@asynccontextmanager
async def _percore(workers: int) -> AsyncIterator[MapAll]:
    async with percore.Runner(workers=workers) as runner:
        yield lambda items: runner.map(work, items).collect()


@asynccontextmanager
async def _all_sizes(opening: Callable[[int], OpenMap], sizes: list[int], calls: int, steps: int) -> AsyncIterator[Round]:
    expected = [work(steps)] * calls

    async def once() -> Sample:
        return {str(workers): await _a_call(opening(workers), [steps] * calls, expected) for workers in sizes}

    yield once


async def _a_call(opening: OpenMap, items: list[int], expected: list[int]) -> float:
    async with opening() as run:
        await run(items[: len(items) // 5])
        start = time.perf_counter()
        results = await run(items)
        seconds = time.perf_counter() - start
    if results != expected:
        raise RuntimeError("the results are not those of these items")
    return seconds / len(items)
