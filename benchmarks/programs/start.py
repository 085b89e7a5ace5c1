"""The program of the row start: `python -m benchmarks.programs.start WAY` has two workers answer, and prints when they had.

The time is perf_counter's, which on Linux is one clock for all processes. Each way imports only its own library.
"""

from __future__ import annotations

import asyncio
import sys
import time
from typing import TYPE_CHECKING

from benchmarks.calls import pid_after

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from concurrent.futures import Executor

MOMENT = 0.001
"""Seconds of a call, so that two calls at once go to two workers."""


def main(way: str) -> None:
    name, _, method = way.partition(", ")
    if name == "percore":
        asyncio.run(_percore(method or None))
    elif name == "aiomultiprocess":
        asyncio.run(_aiomultiprocess())
    elif name == "loky":
        import loky

        _executor(loky.ProcessPoolExecutor(2))
    else:
        import multiprocessing
        from concurrent.futures import ProcessPoolExecutor

        _executor(ProcessPoolExecutor(2, mp_context=multiprocessing.get_context(method)))


async def _percore(method: str | None) -> None:
    import percore

    async with percore.Runner(workers=2, start_method=method) as runner:  # type: ignore[arg-type]
        await _until_both(lambda: runner.run(pid_after, MOMENT))


async def _aiomultiprocess() -> None:
    from aiomultiprocess import Pool

    async with Pool(2) as pool:
        await _until_both(lambda: pool.apply(pid_later, (MOMENT,)))


async def pid_later(seconds: float) -> int:
    return pid_after(seconds)


async def _until_both(call: Callable[[], Awaitable[int]]) -> None:
    pids: set[int] = set()
    while len(pids) < 2:
        pids.update(await asyncio.gather(call(), call()))
    print(time.perf_counter())


def _executor(pool: Executor) -> None:
    with pool:
        pids: set[int] = set()
        while len(pids) < 2:
            both = [pool.submit(pid_after, MOMENT) for _ in range(2)]
            pids.update(future.result() for future in both)
        print(time.perf_counter())


if __name__ == "__main__":
    main(sys.argv[1])
