"""CPU that a pool of two idle workers takes, of one CPU, over 10 seconds (peers: 5): this process and all it has started.

A pool that looks for work every few milliseconds costs battery and wakes CPUs for nothing. Counted is what the kernel's
scheduler says that each thread has run. Each pool is alone meanwhile.
"""

from __future__ import annotations

import asyncio
import os
import time
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import percore
from benchmarks._figures import Limit, in_percent
from benchmarks._harness import Round, Row, Sample
from benchmarks._processes import cpu_of_all, descendants
from benchmarks.calls import same, same_plainly
from benchmarks.peers import WORKERS, Pair, awaiting

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from benchmarks.peers import Call, OpenCall

SHARE = "of one CPU"
IN_QUICK = ("ProcessPoolExecutor", "aiomultiprocess")
PEERS = (*IN_QUICK, "distex", "loky", "mpire", "wool")


def row(*, quick: bool) -> Row:
    seconds = 2.0 if quick else 10.0
    others = min(seconds, 5.0)
    openings: dict[str, OpenCall] = {"percore": _percore}
    for name, settings in awaiting(Pair(same, same_plainly)).items():
        if name not in (IN_QUICK if quick else PEERS):
            continue
        openings[name] = next(iter(settings.values()))  # no setting changes what it does when idle
    return Row(
        contestants={name: partial(_idle, opening, seconds if name == "percore" else others) for name, opening in openings.items()},
        targets=[Limit("percore", SHARE, at_most=0.0005)],
        rounds=1,
        seconds=8 if quick else 55,
        anew=frozenset(openings),
        warm_ups=1,
        words={SHARE: in_percent},
    )


@asynccontextmanager
async def _percore() -> AsyncIterator[Call]:
    async with percore.Runner(workers=WORKERS) as runner:
        yield partial(runner.run, same)


@asynccontextmanager
async def _idle(opening: OpenCall, seconds: float) -> AsyncIterator[Round]:
    is_warm = False
    async with opening() as call:

        async def once() -> Sample:
            nonlocal is_warm
            if not is_warm:
                is_warm = True
                await asyncio.gather(*map(call, range(10)))
                return {SHARE: 0.0}
            pids = [os.getpid(), *descendants()]  # looked up now: that is work of this process's
            before, start = cpu_of_all(pids), time.perf_counter()
            await asyncio.sleep(seconds)
            return {SHARE: (cpu_of_all(pids) - before) / (time.perf_counter() - start)}

        yield once
