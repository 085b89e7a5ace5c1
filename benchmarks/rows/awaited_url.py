"""Awaited coroutines with a URL of 200 bytes that give 1 kB of text: 500 awaiters x 40 calls, 2 workers.

As awaited_int, with the sizes of a crawler's call: an address goes, a short text comes back.
"""

from __future__ import annotations

from benchmarks._awaited import Task, contestants
from benchmarks._figures import Target
from benchmarks._harness import Row
from benchmarks.calls import page_of, text_of
from benchmarks.peers import Pair


def row(*, quick: bool) -> Row:
    task = Task(Pair(page_of, text_of), argument=_url, answer=text_of)
    return Row(
        contestants=contestants(task, awaiters=200 if quick else 500, only=("distex", "ProcessPoolExecutor")),
        targets=[Target("percore", "distex", "a call", at_least=1.5, towards=2.0)],
        rounds=3 if quick else 9,
        seconds=8 if quick else 40,
        trials=1,
    )


def _url(number: int) -> str:
    return f"https://www.example.com/documents/{number}/".ljust(200, "x")
