"""Awaited no-op coroutines with a dict: 500 awaiters x 40 calls, 2 workers.

As awaited_int, with an argument that has to be pickled: what a program hands over when it describes a piece of work.
"""

from __future__ import annotations

from benchmarks._awaited import Task, contestants
from benchmarks._figures import Target
from benchmarks._harness import Row
from benchmarks.calls import same, same_plainly
from benchmarks.peers import Pair


def row(*, quick: bool) -> Row:
    task = Task(Pair(same, same_plainly), argument=_order, answer=lambda order: order)
    return Row(
        contestants=contestants(task, awaiters=200 if quick else 500, only=("distex", "ProcessPoolExecutor")),
        targets=[Target("percore", "distex", "a call", at_least=1.5, towards=2.0)],
        rounds=3 if quick else 9,
        seconds=8 if quick else 40,
        trials=1,
    )


def _order(number: int) -> dict[str, object]:
    return {"number": number, "name": "a customer", "prices": [1.5, 2.5], "is_paid": True}
