"""LoopPoolExecutor: `submit` from one thread and from 16, 2 workers, against ProcessPoolExecutor.

The result of each is waited for. Tiny plain functions, so what is measured is the price of a call through concurrent.futures: a
future, a hand-over to another thread, the trip to a process and back, and the wake-up of whoever waits. Every result is compared
with its argument.
"""

from __future__ import annotations

import asyncio
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING

from benchmarks._executors import contestants
from benchmarks._figures import Target
from benchmarks._harness import Row
from benchmarks.calls import same_plainly

if TYPE_CHECKING:
    from concurrent.futures import Executor

THREADS = 16


def row(*, quick: bool) -> Row:
    calls = 1600 if quick else 8000
    made = {
        **contestants(partial(_submit_all, 1, calls), ", 1 thread"),
        **contestants(partial(_submit_all, THREADS, calls), f", {THREADS} threads"),
    }
    kinds = ["1 thread", f"{THREADS} threads"]
    return Row(
        contestants=made,
        targets=[Target(f"percore, {kind}", f"ProcessPoolExecutor, {kind}", "a call", at_least=3.0) for kind in kinds],
        rounds=1 if quick else 9,
        seconds=15 if quick else 50,
    )


async def _submit_all(threads: int, calls: int, executor: Executor) -> int:
    await asyncio.to_thread(_submit_in_threads, executor, threads, calls // threads)
    return calls


def _submit_in_threads(executor: Executor, threads: int, calls: int) -> None:
    right = []

    def submit() -> None:
        futures = [executor.submit(same_plainly, number) for number in range(calls)]
        right.append([future.result() for future in futures] == list(range(calls)))

    started = [Thread(target=submit) for _ in range(threads)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join()
    if right != [True] * threads:
        raise RuntimeError("a call gave the result of another one")
