"""What measuring costs: runners that measure their calls, against runners that do not."""

from __future__ import annotations

import os
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import percore
from benchmarks.calls import same, same_plainly
from benchmarks.contestants import await_all, by_calls, map_seconds, playing
from benchmarks.figures import Target
from benchmarks.harness import Row, row
from benchmarks.peers import WORKERS

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable
    from contextlib import AbstractAsyncContextManager

    from benchmarks.results import Sample

AWAITED, MAPPED = "an awaited call", "an item of a map"


@row(rounds=200, seconds=30)
def metrics(quick: bool) -> Row:
    """The cost of measuring calls (`statistics().functions`): on against off with PERCORE_METRICS=0, 2 workers.

    The calls of awaited_int and of map_tiny, which have no work, in many short rounds by turns. Both runners count calls; the one
    that measures also takes samples of waits and runs, and its workers send them twice a second.
    """
    awaiters, items = (50, range(50_000)) if quick else (200, range(200_000))
    expected = list(items)

    async def once(opened: percore.Runner) -> Sample:
        awaited = await by_calls(await_all([lambda number: opened.run(same, number)] * awaiters, 20))
        mapped = await map_seconds(lambda some: opened.map(same_plainly, some).collect(), items, expected) / len(items)
        return {AWAITED: awaited, MAPPED: mapped}

    return Row(
        {name: playing(opening(is_on=is_on), once) for name, is_on in (("percore, off", False), ("percore, on", True))},
        [Target("percore, on", metric, "percore, off", at_most=1.02) for metric in (AWAITED, MAPPED)],
    )


def opening(*, is_on: bool) -> Callable[[], AbstractAsyncContextManager[percore.Runner]]:
    @asynccontextmanager
    async def opened() -> AsyncIterator[percore.Runner]:
        before = os.environ.pop("PERCORE_METRICS", None)
        if not is_on:
            os.environ["PERCORE_METRICS"] = "0"
        try:
            runner = percore.Runner(workers=WORKERS)
            await runner.start()
        finally:
            os.environ.pop("PERCORE_METRICS", None)
            if before is not None:
                os.environ["PERCORE_METRICS"] = before
        try:
            yield runner
        finally:
            await runner.aclose()

    return opened
