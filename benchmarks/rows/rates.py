"""Rates: how much of its allowance a key uses."""

from __future__ import annotations

import itertools
from functools import partial
from typing import TYPE_CHECKING

import percore
from benchmarks.calls import begun
from benchmarks.contestants import playing, runner
from benchmarks.figures import Target, in_percent
from benchmarks.harness import Row, row
from benchmarks.peers import WORKERS

if TYPE_CHECKING:
    from benchmarks.results import Sample

UNUSED = "unused"
RATES = {
    "20 a second": percore.Rate(20, per=1),
    "100 a second": percore.Rate(100, per=1),
    "100 a second, burst=100": percore.Rate(100, per=1, burst=100),
    "1000 a second": percore.Rate(1000, per=1),
}
_KEYS = itertools.count()


@row(rounds=5, seconds=60, warm_ups=0)
def rates(quick: bool) -> Row:
    """The part of a rate that a key does not use, though it always has calls: no-op coroutines, 2 workers.

    Each window of a second may hold so many starts. A key uses all of them only if each call begins as soon as it may. The figure
    compares the starts of some seconds, counted from the first one, with those that the rate allows.
    """
    seconds = 1 if quick else 4

    async def once(rate: percore.Rate, opened: percore.Runner) -> Sample:
        key, allowed = next(_KEYS), seconds * rate.n
        starts: list[float] = []
        async with opened.options(rate=rate).map(begun, itertools.count(), key=lambda _: key, window=2 * rate.n) as calls:
            async for start in calls:
                if starts and start >= starts[0] + seconds * rate.per:
                    break
                starts.append(start)
        return {UNUSED: max(0.0, 1 - len(starts) / allowed)}

    return Row(
        {name: playing(runner(WORKERS), partial(once, rate)) for name, rate in RATES.items()},
        [Target(name, UNUSED, at_most=0.02) for name in RATES],
        units={UNUSED: in_percent},
    )
