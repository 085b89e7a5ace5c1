"""Awaited no-op coroutines with an int: 500 awaiters x 40 calls, 2 workers.

What a call costs when its own work is nothing: the price of `await runner.run(f, i)` in a program that awaits many of
them at once, with everything that percore does for a call (cancellation, start marks, statistics). Beside the pools
stands the same in one process, as plain asyncio tasks: no transport can be cheaper than none. Pools that take no
coroutines get the same as a plain function; slow ones make fewer calls.
"""

from __future__ import annotations

from benchmarks._awaited import Task, contestants
from benchmarks._figures import Target
from benchmarks._harness import Row
from benchmarks.calls import same, same_plainly
from benchmarks.peers import RESTLESS, Pair


def row(*, quick: bool) -> Row:
    task = Task(Pair(same, same_plainly), argument=int, answer=int)
    return Row(
        contestants=contestants(task, awaiters=200 if quick else 500),
        targets=[
            Target("percore", "distex", "a call", at_least=1.8, towards=2.2),
            Target("percore", "ProcessPoolExecutor", "a call", at_least=20),
            Target("percore", "asyncio tasks", "a call", at_least=0.7, towards=0.9),
        ],
        rounds=3 if quick else 9,
        seconds=15 if quick else 90,
        trials=1,
        anew=RESTLESS,
        is_cheap=True,
    )
