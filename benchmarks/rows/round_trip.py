"""One awaited coroutine at a time, 1 worker, against a bare ping-pong of the same two loops.

The bare side is the least that two event loops in two processes can do: write an eventfd with one byte of state, wake
by add_reader there, answer in the same way, resolve a future that is awaited here. What percore adds to that is what
its call costs in latency. All sides keep this process on one CPU and the other processes on a second one.
"""

from __future__ import annotations

import time
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import percore
from benchmarks._figures import Target, latencies
from benchmarks._harness import Contestant, Round, Row, Sample, Settings
from benchmarks._pinning import Pin
from benchmarks._pong import bare_ping_pong
from benchmarks.calls import same, same_plainly
from benchmarks.peers import RESTLESS, Pair, awaiting

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

    from benchmarks.peers import Call, OpenCall

FEWER = {"aiomultiprocess": 30, "wool": 60}
"""Trips of those that take milliseconds for one."""

IN_QUICK = ("ProcessPoolExecutor", "distex")
"""The peers of a quick run: the row awaited_int starts them all."""

_UNTIMED = 20
"""Trips before the timed ones of a round: the processes have just been moved to their CPUs."""


def row(*, quick: bool) -> Row:
    trips = 200 if quick else 3000
    contestants: dict[str, Contestant | Settings] = {
        "bare ping-pong": partial(_timed, bare_ping_pong, trips),
        "percore": partial(_timed, _percore, trips),
    }
    for name, settings in awaiting(Pair(same, same_plainly), workers=1).items():
        if quick and name not in IN_QUICK:
            continue
        fewer = min(trips, FEWER.get(name, 500))
        several = trips if name == "distex" else fewer
        contestants[name] = {setting: partial(_timed, opening, several) for setting, opening in settings.items()}
    return Row(
        contestants=contestants,
        targets=[
            Target("percore", "bare ping-pong", "p50", at_most=1.35, towards=1.15),
            Target("percore", "bare ping-pong", "p99", at_most=2.0),
            Target("percore", "distex", "p50", at_most=1.0),
        ],
        rounds=3 if quick else 15,
        seconds=8 if quick else 80,
        trials=1,
        anew=RESTLESS & contestants.keys(),
        pin=Pin.APART,
        is_cheap=True,
    )


@asynccontextmanager
async def _percore() -> AsyncIterator[Call]:
    async with percore.Runner(workers=1) as runner:
        yield partial(runner.run, same)


@asynccontextmanager
async def _timed(opening: OpenCall, trips: int) -> AsyncIterator[Round]:
    async with opening() as call:

        async def once() -> Sample:
            for number in range(_UNTIMED):
                await call(_state(number))
            return latencies([await _trip(call, _state(number)) for number in range(trips)])

        yield once


def _state(number: int) -> int:
    return 1 + number % 255  # one byte, never zero: an eventfd says nothing about a zero


async def _trip(call: Call, state: int) -> float:
    start = time.perf_counter()
    answer = await call(state)
    seconds = time.perf_counter() - start
    if answer != state:
        raise RuntimeError("a trip brought back the state of another one")
    return seconds
