"""One awaited coroutine at a time, 1 worker, against a bare ping-pong of the same two loops.

The bare side is the least that two event loops in two processes can do: write an eventfd with one byte of state, wake
by add_reader there, answer in the same way, resolve a future that is awaited here. What percore adds to that is what
its call costs in latency. Both sides keep this process on one CPU and the other process on a second one, because a
round trip takes several times as long across two CPUs as on one, and the kernel would place the two sides as it likes.
"""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from functools import partial
from pathlib import Path

import percore
from benchmarks._figures import Target, quantile
from benchmarks._harness import Round, Row, Sample
from benchmarks.calls import same

_PONG = Path(__file__).parents[1] / "_pong.py"
_UNTIMED = 50
"""Trips before the timed ones of a round: this thread has just moved to its CPU."""

Trip = Callable[[int], Awaitable[int]]


def row(*, quick: bool) -> Row:
    here, there = _two_cpus()
    trips = 200 if quick else 3000
    return Row(
        contestants={
            "bare ping-pong": partial(_bare, trips, here, there),
            "percore": partial(_percore, trips, here, there),
        },
        targets=[
            Target("percore", "bare ping-pong", "p50", at_most=1.4),
            Target("percore", "bare ping-pong", "p99", at_most=1.4),
        ],
        rounds=3 if quick else 15,
    )


def _two_cpus() -> tuple[int, int]:
    usable = sorted(os.sched_getaffinity(0))
    if len(usable) < 2:
        raise SystemExit("round_trip needs two CPUs: a supervisor on the one, a worker on the other")
    return usable[0], usable[1]


@contextmanager
def _pinned(cpu: int) -> Iterator[None]:
    """This thread, and every process that is started meanwhile, on one CPU."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, {cpu})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


@asynccontextmanager
async def _percore(trips: int, here: int, there: int) -> AsyncIterator[Round]:
    runner = percore.Runner(workers=1)
    with _pinned(there):  # the worker takes over where its supervisor stands now
        await runner.start()
    try:
        yield partial(_round, trips, here, partial(runner.run, same))
    finally:
        await runner.aclose()


@asynccontextmanager
async def _bare(trips: int, here: int, there: int) -> AsyncIterator[Round]:
    loop = asyncio.get_running_loop()
    ping, pong = (os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC) for _ in range(2))
    process = _start_pong(ping, pong, there)
    waiting = loop.create_future()

    def trip(state: int) -> Awaitable[int]:
        nonlocal waiting
        waiting = loop.create_future()
        os.eventfd_write(ping, state)
        return waiting

    loop.add_reader(pong, lambda: waiting.set_result(os.eventfd_read(pong)))
    try:
        yield partial(_round, trips, here, trip)
    finally:
        loop.remove_reader(pong)
        await asyncio.to_thread(process.communicate)  # closes its standard input, which ends it, and reaps it
        os.close(ping)
        os.close(pong)


def _start_pong(ping: int, pong: int, cpu: int) -> subprocess.Popen[bytes]:
    command = [sys.executable, str(_PONG), str(ping), str(pong)]
    with _pinned(cpu):
        return subprocess.Popen(command, pass_fds=(ping, pong), stdin=subprocess.PIPE)


async def _round(trips: int, here: int, trip: Trip) -> Sample:
    with _pinned(here):
        for number in range(_UNTIMED):
            await trip(_state(number))
        seconds = [await _timed(trip, _state(number)) for number in range(trips)]
    return {"p50": quantile(seconds, 0.5), "p99": quantile(seconds, 0.99)}


def _state(number: int) -> int:
    return 1 + number % 255  # one byte, never zero: an eventfd says nothing about a zero


async def _timed(trip: Trip, state: int) -> float:
    start = time.perf_counter()
    answer = await trip(state)
    seconds = time.perf_counter() - start
    if answer != state:
        raise RuntimeError("a trip brought back the state of another one")
    return seconds
