"""Throughput against calls in flight: 1 to 1,024 awaiters of a no-op coroutine, 2 workers.

One awaiter is the latency of a call, many are its throughput; where a library's curve ends to rise is what it is limited
by. Every number of awaiters gets the same short time, and the figure is that time by the calls made in it. There is no
target; the plot (`--plots FOLDER`) shows the calls in a second.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

from benchmarks._awaited import percore_call, task_call
from benchmarks._harness import Contestant, Round, Row, Sample, Settings
from benchmarks._plots import Lines
from benchmarks.calls import same, same_plainly
from benchmarks.peers import RESTLESS, Pair, awaiting

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from benchmarks.peers import Call, OpenCall

IN_FLIGHT = (1, 4, 16, 64, 256, 1024)
AT_MOST = {"loky": 256, "mpire": 256, "wool": 64}
"""Awaiters of those to whom a call costs so much that more of them only wait longer."""
IN_QUICK = ("ProcessPoolExecutor", "distex")
"""The peers of a quick run: the row awaited_int starts them all."""


def row(*, quick: bool) -> Row:
    pair = Pair(same, same_plainly)
    timed = partial(_timed, moment=0.02 if quick else 0.1)
    contestants: dict[str, Contestant | Settings] = {
        "asyncio tasks": partial(timed, partial(task_call, pair)),
        "percore": partial(timed, partial(percore_call, pair)),
    }
    for name, settings in awaiting(pair).items():
        if quick and name not in IN_QUICK:
            continue
        at_most = AT_MOST.get(name, IN_FLIGHT[-1])
        contestants[name] = {setting: partial(timed, opening, at_most=at_most) for setting, opening in settings.items()}
    plot = Lines("A no-op call, 2 workers", x="calls in flight", y="calls in a second", height=lambda _, seconds: 1 / seconds)
    return Row(
        contestants=contestants,
        targets=[],
        rounds=3,
        seconds=8 if quick else 60,
        warm_ups=0,  # of all numbers; some calls are made while it opens
        anew=RESTLESS & contestants.keys(),
        trials=1,
        choose_by="64",
        draw=plot.draw,
    )


@asynccontextmanager
async def _timed(opening: OpenCall, *, moment: float, at_most: int = IN_FLIGHT[-1]) -> AsyncIterator[Round]:
    async with opening() as call:
        await _a_call(call, IN_FLIGHT[2], moment)

        async def once() -> Sample:
            return {str(awaiters): await _a_call(call, awaiters, moment) for awaiters in IN_FLIGHT if awaiters <= at_most}

        yield once


async def _a_call(call: Call, awaiters: int, moment: float) -> float:
    """Seconds by calls, of all awaiters together."""
    start = time.perf_counter()
    calls = sum(await asyncio.gather(*(_awaiter(call, start + moment) for _ in range(awaiters))))
    return (time.perf_counter() - start) / calls


async def _awaiter(call: Call, end: float) -> int:
    calls = 0
    while calls == 0 or time.perf_counter() < end:
        if await call(calls) != calls:
            raise RuntimeError("a call gave the result of another one")
        calls += 1
    return calls
