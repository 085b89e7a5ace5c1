"""How many copies of a shared array of 800 MB there are with 8 workers that all read it: one.

PSS, the proportional share of what a process has in memory, added up over this process and all that percore started: a
page that nine processes have counts once. Measured when every worker has added all of the array up, and after `close()`,
as what there is more than before the first `share()`. The array itself is there before. At most 64 MiB stay when it is
closed: percore keeps so much warm for the next large payload.
"""

from __future__ import annotations

import time
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

import percore
from benchmarks._figures import Limit, in_mebibytes, in_times
from benchmarks._harness import Round, Row, Sample
from benchmarks._processes import descendants, own_and

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterable

WORKERS = 8
SIZE = 800_000_000
COPIES, LEFT = "copies", "after close"


def row(*, quick: bool) -> Row:
    return Row(
        contestants={"percore": partial(_percore, SIZE // 10 if quick else SIZE)},
        targets=[Limit("percore", COPIES, at_most=1.02), Limit("percore", LEFT, at_most=80 << 20)],
        rounds=1 if quick else 5,
        seconds=5 if quick else 20,
        words={COPIES: in_times, LEFT: in_mebibytes},
    )


@asynccontextmanager
async def _percore(size: int) -> AsyncIterator[Round]:
    array = np.arange(size // 8, dtype=np.float64)
    before = descendants()
    async with percore.Runner(workers=WORKERS) as runner:
        pids = own_and(descendants() - before)
        await _shared(runner, array[:1], pids)  # every worker has imported numpy
        yield partial(_round, runner, array, pids, _pss_of_all(pids))


async def _round(runner: percore.Runner, array: Any, pids: Iterable[int], before: int) -> Sample:
    seconds, there, left = await _shared(runner, array, pids)
    return {"shared and read": seconds, COPIES: (there - before) / array.nbytes, LEFT: left - before}


async def _shared(runner: percore.Runner, array: Any, pids: Iterable[int]) -> tuple[float, int, int]:
    """Seconds until every worker has read all of it; the PSS then, and when it is closed."""
    start = time.perf_counter()
    shared = await runner.share(array)
    sums = await runner.broadcast(_sum, shared)
    seconds = time.perf_counter() - start
    if sums != [array.sum()] * WORKERS:
        raise RuntimeError("a worker has another array")
    there = _pss_of_all(pids)
    shared.close()
    await runner.broadcast(_nothing)  # what was sent before has been read
    return seconds, there, _pss_of_all(pids)


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
