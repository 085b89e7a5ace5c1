"""The article's figure: seconds for 1,000 of its calls against threads and processes, for each executor.

The calls of the row article (20 ms waiting, about 0.8 ms of arithmetic), with so many of them at once, in threads of one
process, in processes, and in threads or coroutines of 2 processes. There is no target; the plot (`--plots FOLDER`) shows
where each stops to become faster: threads when one CPU is full, the others when all are.
"""

from __future__ import annotations

import time
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from benchmarks._harness import Round, Row, Sample
from benchmarks._plots import Lines
from benchmarks.calls import page, steps_for
from benchmarks.peers import executors
from benchmarks.peers.split import hand_split
from benchmarks.rows.article import COMPUTING, PROCESSES, percore_coroutines, percore_threads, split_coroutines, split_threads

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Mapping
    from concurrent.futures import Executor

    from benchmarks.peers import OpenMap

AT_ONCE = (10, 20, 40, 60, 80)
PROCESSES_AT_ONCE = (10, 20, 40)
"""Not more: so many interpreters start, and wait, on two CPUs."""


def row(*, quick: bool) -> Row:
    calls = 100 if quick else 1000
    steps = steps_for(COMPUTING)
    sizes = AT_ONCE[1:2] if quick else AT_ONCE
    pool = partial(_executor, steps)
    few = [size for size in PROCESSES_AT_ONCE if size in sizes]
    lines: Mapping[str, dict[int, OpenMap]] = {
        "ThreadPoolExecutor": {size: pool(executors.threads, size) for size in sizes},
        "ProcessPoolExecutor": {size: pool(executors.processes, size) for size in few},
        "InterpreterPoolExecutor": {size: pool(executors.interpreters, size) for size in few},
        "loky": {size: pool(executors.loky, size) for size in few},
        "hand split, threads": _divided(sizes, lambda share: partial(hand_split, partial(split_threads, steps, share), PROCESSES)),
        "hand split, coroutines": _divided(
            sizes, lambda share: partial(hand_split, partial(split_coroutines, steps, share), PROCESSES)
        ),
        "percore, threads": _divided(sizes, lambda share: partial(percore_threads, steps, share)),
        "percore, coroutines": _divided(sizes, lambda share: partial(percore_coroutines, steps, share, None)),
    }
    plot = Lines(f"{calls:,} calls: 20 ms of waiting, 0.8 ms of arithmetic", "calls at once", "seconds", x_scale="linear")
    return Row(
        contestants={name: partial(_line, openings, calls) for name, openings in lines.items()},
        targets=[],
        rounds=1 if quick else 2,
        seconds=10 if quick else 60,
        warm_ups=0,
        draw=plot.draw,
    )


def _executor(steps: int, make: Callable[[int], Executor], size: int) -> OpenMap:
    return partial(executors.mapping, make, size, 1, partial(page, steps=steps))


def _divided(sizes: tuple[int, ...], opening: Callable[[int], OpenMap]) -> dict[int, OpenMap]:
    """So many at once over all processes."""
    return {size: opening(size // PROCESSES) for size in sizes}


@asynccontextmanager
async def _line(openings: Mapping[int, OpenMap], calls: int) -> AsyncIterator[Round]:
    """A round is all sizes, one after the other; each is open for that alone: idle processes cost memory, not time."""

    async def once() -> Sample:
        return {str(size): await _seconds(opening, size, calls) for size, opening in openings.items()}

    yield once


async def _seconds(opening: OpenMap, size: int, calls: int) -> float:
    async with opening() as run:
        await run(range(2 * size))  # starts what starts with the first calls
        start = time.perf_counter()
        results = await run(range(calls))
        seconds = time.perf_counter() - start
    if results != list(range(calls)):
        raise RuntimeError("the results are not those of these items")
    return seconds
