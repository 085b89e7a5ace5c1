"""Calls from inside a call: what they cost, against the same calls from the program."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

from benchmarks.calls import (
    give_numbers_in_loop,
    nested_items,
    nested_many,
    nested_results,
    nested_trips,
    same,
    sync_items,
    sync_results,
    sync_trips,
)
from benchmarks.contestants import await_all, by_calls, check, playing, runner
from benchmarks.figures import Target, in_seconds
from benchmarks.harness import Row, row
from benchmarks.peers import WORKERS

if TYPE_CHECKING:
    import percore
    from benchmarks.results import Sample

TRIP = "a call, one at a time"
MANY = "a call, 100 at once"
RESULT = "a result of a map"
ITEM = "an item of a stream"

AWAITERS = 100
PREFETCH = 64


@row(rounds=9, seconds=40)
def nested(quick: bool) -> Row:
    """No-op coroutines that a call makes from inside, in a coroutine and on a thread, against calls of the program. 2 workers.

    A call from inside a call passes through the supervisor, so it takes four messages instead of two, and two processes besides
    the caller's wake up for it. Its function travels with it, since the supervisor cannot pickle it once. A map inside a call makes
    a call for each item, and the program's map sends tiny plain functions in batches; here it maps a coroutine function, which
    never travels in batches. Items of a stream pass through the supervisor as they arrive.
    """
    trips, items = (200, 2_000) if quick else (1_000, 20_000)

    async def program(opened: percore.Runner) -> Sample:
        began = time.perf_counter()
        for number in range(trips):
            check(await opened.run(same, number), number)
        a_trip = (time.perf_counter() - began) / trips
        many = await by_calls(await_all([partial(opened.run, same)] * AWAITERS, trips // 10))
        began = time.perf_counter()
        check(sum([result async for result in opened.map(same, range(items))]), sum(range(items)))
        a_result = (time.perf_counter() - began) / items
        began = time.perf_counter()
        stream = opened.options(prefetch=PREFETCH).stream(give_numbers_in_loop, items)
        check(sum([item async for item in stream]), sum(range(items)))
        return {TRIP: a_trip, MANY: many, RESULT: a_result, ITEM: (time.perf_counter() - began) / items}

    async def inside(functions: dict[str, Any], opened: percore.Runner) -> Sample:
        counts = {TRIP: (trips,), MANY: (AWAITERS, trips // 10), RESULT: (items,), ITEM: (items, PREFETCH)}
        return {metric: await opened.run(fn, *counts[metric]) for metric, fn in functions.items()}

    coroutine = {TRIP: nested_trips, MANY: nested_many, RESULT: nested_results, ITEM: nested_items}
    thread = {TRIP: sync_trips, RESULT: sync_results, ITEM: sync_items}
    return Row(
        {
            "program": playing(runner(WORKERS), program),
            "coroutine in a worker": playing(runner(WORKERS), partial(inside, coroutine)),
            "thread in a worker": playing(runner(WORKERS), partial(inside, thread)),
        },
        [
            Target("coroutine in a worker", TRIP, "program", at_most=6),
            Target("thread in a worker", TRIP, "program", at_most=6),
        ],
        units=dict.fromkeys((TRIP, MANY, RESULT, ITEM), in_seconds),
    )
