"""A map of a million tiny plain calls, 2 workers, nothing tuned, against the pools at several chunksizes each.

What a call of a map costs when its own work is nothing. The pools put so many items into a message as their user tells
them to, and are as good as he guesses: each is tried with several chunksizes, distex also with more messages kept at each
worker, and plays with the best. percore is told nothing: it measures the calls while they run and makes batches by that.
The results come as a list, in order, and are compared with the items. Those to whom a call costs tens of microseconds
get fewer items. The hand-written split and the plain loop show what no pool can reach: such calls need none.
"""

from __future__ import annotations

from contextlib import asynccontextmanager, contextmanager
from functools import partial
from typing import TYPE_CHECKING

import percore
from benchmarks._figures import Target
from benchmarks._harness import Contestant, Row, Settings
from benchmarks.calls import same, same_plainly
from benchmarks.peers import RESTLESS, WORKERS, Pair, mapping, timed_map
from benchmarks.peers.split import hand_split

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Iterator, Sequence

    from benchmarks.peers import MapAll
    from benchmarks.peers.split import Half

CHUNKS = (10_000, 3000, 30_000)
FEWER = {"ThreadPoolExecutor": 50, "aiomultiprocess": 200, "mpire": 20}


def row(*, quick: bool) -> Row:
    items = range(200_000 if quick else 1_000_000)
    contestants: dict[str, Contestant | Settings] = {
        "percore": partial(timed_map, _percore, items),
        "hand split": partial(timed_map, partial(hand_split, loop_half, WORKERS), items),
        "a plain loop": partial(timed_map, _plain_loop, items),
    }
    for name, settings in mapping(Pair(same, same_plainly), CHUNKS).items():
        some = range(len(items) // FEWER.get(name, 1))
        contestants[name] = {setting: partial(timed_map, opening, some) for setting, opening in settings.items()}
    return Row(
        contestants=contestants,
        targets=[
            Target("percore", "ProcessPoolExecutor", "a call", at_least=1.2),
            Target("percore", "distex", "a call", at_least=1.0, towards=1.5),
        ],
        rounds=3 if quick else 7,
        seconds=10 if quick else 80,
        trials=1,
        anew=RESTLESS & contestants.keys(),
        is_cheap=True,
    )


@asynccontextmanager
async def _percore() -> AsyncIterator[MapAll]:
    async with percore.Runner(workers=WORKERS) as runner:
        yield lambda items: runner.map(same_plainly, items).collect()


@asynccontextmanager
async def _plain_loop() -> AsyncIterator[MapAll]:
    async def run(items: Sequence[int]) -> list[int]:
        return [same_plainly(item) for item in items]

    yield run


@contextmanager
def loop_half() -> Iterator[Half]:
    """In a process of the hand split: its half, in a loop."""
    yield lambda items: [same_plainly(item) for item in items]
