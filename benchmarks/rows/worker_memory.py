"""USS of an idle worker after 100,000 calls, against a bare interpreter with asyncio and uvloop.

What a worker has for itself alone (USS, by psutil): the number that counts when there is one for each of many CPUs. Pages
that it shares with its fork server or the system are not in it. Beyond its target this should go on towards 4 MiB. Beside
it stand the processes of the pools after as many calls, each as its library starts it.
"""

from __future__ import annotations

from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import percore
from benchmarks._figures import Target, in_mebibytes
from benchmarks._harness import Round, Row, Sample
from benchmarks._pong import bare_loop
from benchmarks._processes import descendants, uss_of
from benchmarks.calls import same, same_plainly
from benchmarks.peers import distex, executors

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from benchmarks.peers import OpenMap

USS = "USS"
CHUNK = 1000


def row(*, quick: bool) -> Row:
    calls = 2000 if quick else 100_000
    return Row(
        contestants={
            "bare interpreter": _bare,
            "percore, coroutines": partial(_percore, calls),
            "percore, plain calls": partial(_percore_plain, calls),
            "ProcessPoolExecutor": partial(_pool, partial(executors.mapping, executors.processes, 1, CHUNK, same_plainly), calls),
            "loky": partial(_pool, partial(executors.mapping, executors.loky, 1, CHUNK, same_plainly), calls),
            "distex": partial(_pool, partial(distex.mapping, 1, 2, CHUNK, same_plainly), calls),
        },
        targets=[Target("percore, coroutines", "bare interpreter", USS, at_most=0.6)],
        rounds=3 if quick else 7,
        seconds=8 if quick else 25,
        warm_ups=0,
        words={USS: in_mebibytes},
    )


@asynccontextmanager
async def _bare() -> AsyncIterator[Round]:
    async with bare_loop() as (pid, _, _):

        async def once() -> Sample:
            return {USS: uss_of(pid)}

        yield once


@asynccontextmanager
async def _percore(calls: int) -> AsyncIterator[Round]:
    async with percore.Runner(workers=1) as runner:

        async def once() -> Sample:
            await runner.map(same, range(calls))
            return {USS: uss_of(runner.statistics().workers[0].pid)}

        yield once


@asynccontextmanager
async def _percore_plain(calls: int) -> AsyncIterator[Round]:
    async with percore.Runner(workers=1) as runner:

        async def once() -> Sample:
            await runner.map(same_plainly, range(calls))
            return {USS: uss_of(runner.statistics().workers[0].pid)}

        yield once


@asynccontextmanager
async def _pool(opening: OpenMap, calls: int) -> AsyncIterator[Round]:
    before = descendants()
    async with opening() as run:
        await run(range(10))
        mine = descendants() - before

        async def once() -> Sample:
            await run(range(calls))
            # The largest: beside the worker some start helpers, which are smaller.
            return {USS: max(uss_of(pid) for pid in mine)}

        yield once
