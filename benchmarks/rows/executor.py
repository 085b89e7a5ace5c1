"""LoopPoolExecutor against ProcessPoolExecutor: tiny plain functions, through the interface of concurrent.futures."""

from __future__ import annotations

import asyncio
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING

import percore
from benchmarks.calls import same_plainly
from benchmarks.contestants import await_all, by_calls, check, playing
from benchmarks.figures import Target
from benchmarks.harness import Row, row
from benchmarks.peers import WORKERS, executors

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable
    from concurrent.futures import Executor

    from benchmarks.harness import Contestant
    from benchmarks.results import Sample

POOL = "ProcessPoolExecutor"


@row(seconds=50)
def executor_submit(quick: bool) -> Row:
    """LoopPoolExecutor: `submit` from one thread and from 16, 2 workers, against ProcessPoolExecutor.

    Each result is waited for. The price of a call through concurrent.futures: a future, a hand-over to another thread, the trip
    to a process and back, and the wake-up of the waiting thread. Every result is compared with its argument.
    """
    calls = 1600 if quick else 8000
    kinds = {"1 thread": 1, "16 threads": 16}
    return Row(
        {
            f"{name}, {kind}": contestant
            for kind, threads in kinds.items()
            for name, contestant in _executors(partial(_submit, threads, calls)).items()
        },
        [Target(f"percore, {kind}", "a call", f"{POOL}, {kind}", at_least=3.0) for kind in kinds],
    )


@row(seconds=50)
def executor_map(quick: bool) -> Row:
    """LoopPoolExecutor: `map` over tiny plain functions with chunksize 1 and 1000, 2 workers, against ProcessPoolExecutor.

    With chunksize 1 each item is a call of its own; with 1000 a call is a list of items, which a worker works through. The
    results are compared with the items.
    """
    chunksizes = {1: 2000, 1000: 20_000} if quick else {1: 8000, 1000: 400_000}
    at_least = {1: 3.0, 1000: 1.0}
    return Row(
        {
            f"{name}, chunksize {size}": contestant
            for size, items in chunksizes.items()
            for name, contestant in _executors(partial(_map, size, items)).items()
        },
        [
            Target(f"percore, chunksize {size}", "a call", f"{POOL}, chunksize {size}", at_least=bound)
            for size, bound in at_least.items()
        ],
    )


@row(seconds=40)
def executor_awaited(quick: bool) -> Row:
    """LoopPoolExecutor: `loop.run_in_executor` under 500 awaiters x 10 calls, 2 workers, against ProcessPoolExecutor.

    The way an asyncio program uses an executor. Each result crosses into the loop by a callback of its own, which is asyncio's,
    and the same for both.
    """
    contestants = _executors(partial(_await, 50 if quick else 500))
    return Row(contestants, [Target("percore", "a call", POOL, at_least=3.0)])


def _executors(work: Callable[[Executor], Awaitable[int]]) -> dict[str, Contestant]:
    """Each executor, opened alike; `work` makes calls and returns their number."""
    makers: dict[str, executors.Make] = {
        "percore": percore.LoopPoolExecutor,
        "percore, max_threads=1": lambda workers: percore.LoopPoolExecutor(workers, max_threads=1),
        POOL: executors.processes,
    }

    async def once(executor: Executor) -> Sample:
        return {"a call": await by_calls(work(executor))}

    async def warm(executor: Executor) -> None:
        await _map(1, 200, executor)

    return {name: playing(partial(executors.opened, make, WORKERS), once, warm) for name, make in makers.items()}


async def _submit(threads: int, calls: int, executor: Executor) -> int:
    right: list[bool] = []
    numbers = range(calls // threads)

    def submit() -> None:
        futures = [executor.submit(same_plainly, number) for number in numbers]
        right.append([future.result() for future in futures] == list(numbers))

    def in_threads() -> None:
        started = [Thread(target=submit) for _ in range(threads)]
        for thread in started:
            thread.start()
        for thread in started:
            thread.join()

    await asyncio.to_thread(in_threads)
    check(right, [True] * threads)
    return calls


async def _map(chunksize: int, items: int, executor: Executor) -> int:
    results = await asyncio.to_thread(lambda: list(executor.map(same_plainly, range(items), chunksize=chunksize)))
    check(results, list(range(items)))
    return items


async def _await(awaiters: int, executor: Executor) -> int:
    loop = asyncio.get_running_loop()
    return await await_all([lambda number: loop.run_in_executor(executor, same_plainly, number)] * awaiters, 10)
