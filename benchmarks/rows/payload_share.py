"""How many copies of a shared array of 800 MB there are with 8 workers that all read it: one.

PSS, the proportional share of what a process has in memory, added up over this process and all that percore started: a
page that nine processes have counts once. Measured before `share()`, when every worker has added all of the array up, and
after `close()`. The array itself, which is here before, is not counted.
"""

from __future__ import annotations

import time
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import percore
from benchmarks._figures import Limit, in_times
from benchmarks._harness import Round, Row, Sample
from benchmarks._processes import descendants, own_and

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

WORKERS = 8
SIZE = 800_000_000
COPIES, LEFT = "copies", "copies after close"


def row(*, quick: bool) -> Row:
    return Row(
        contestants={"percore": partial(_percore, SIZE // 10 if quick else SIZE)},
        targets=[Limit("percore", COPIES, at_most=1.02), Limit("percore", LEFT, at_most=0.02)],
        rounds=1 if quick else 5,
        seconds=5 if quick else 20,
        words={COPIES: in_times, LEFT: in_times},
    )


@asynccontextmanager
async def _percore(size: int) -> AsyncIterator[Round]:
    array = np.arange(size // 8, dtype=np.float64)
    before = descendants()
    async with percore.Runner(workers=WORKERS) as runner:
        pids = own_and(descendants() - before)
        yield partial(_round, runner, array, pids)


async def _round(runner: percore.Runner, array: Any, pids: Iterable[int]) -> Sample:
    before = _pss_of_all(pids)
    start = time.perf_counter()
    shared = await runner.share(array)
    sums = await runner.broadcast(_sum, shared)
    seconds = time.perf_counter() - start
    if sums != [array.sum()] * WORKERS:
        raise RuntimeError("a worker has another array")
    there = _pss_of_all(pids)
    shared.close()
    await runner.broadcast(_nothing)  # what was sent before has been read
    left = _pss_of_all(pids)
    return {"shared and read": seconds, COPIES: (there - before) / array.nbytes, LEFT: (left - before) / array.nbytes}


def _sum(shared: percore.Shared[Any]) -> Any:
    return shared.value.sum()


def _nothing() -> None:
    pass


def _pss_of_all(pids: Iterable[int]) -> int:
    return sum(_pss_of(pid) for pid in pids)


def _pss_of(pid: int) -> int:
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) << 10
    raise RuntimeError(f"the system does not tell the memory of process {pid}")
