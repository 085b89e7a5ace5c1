"""Calls that are awaited: many at once, and one at a time."""

from __future__ import annotations

import asyncio
import time
from functools import partial
from typing import TYPE_CHECKING

import percore
from benchmarks.bare import bare_ping_pong
from benchmarks.calls import page_of, same, same_plainly, text_of
from benchmarks.contestants import await_all, by_calls, check, percore_call, playing, runner, settings, task_call, timed
from benchmarks.figures import Target, latencies
from benchmarks.harness import Row, row
from benchmarks.machine import Pin
from benchmarks.peers import RESTLESS, WORKERS, Pair, awaiting
from benchmarks.plots import Plot

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from benchmarks.harness import Contestant, Settings
    from benchmarks.peers import Call, Function, OpenCall
    from benchmarks.results import Sample

SAME = Pair(same, same_plainly)

CALLS = 40
"""Calls of each awaiter, one after the other."""

SLOW = {
    "ProcessPoolExecutor": 5,
    "ThreadPoolExecutor": 10,
    "aiomultiprocess": 10,
    "anyio.to_process": 4,
    "loky": 2,
    "mpire": 2,
    "multiprocessing.Pool": 5,
    "wool": 1,
}
"""Calls of each awaiter for peers whose calls take so much longer that fewer of them are timed as precisely."""

SLOW_TRIPS = {"distex": 3000, "aiomultiprocess": 30, "wool": 60}
"""Single calls in a round; 500 for the other peers."""

MANY_AWAITERS = {"loky": 256, "mpire": 256, "wool": 64}
"""Limits for peers whose calls cost so much that more awaiters only wait longer."""

IN_FLIGHT = (1, 4, 16, 64, 256, 1024)
IN_QUICK = ("ProcessPoolExecutor", "distex")
"""The peers of a quick run: the row awaited_int starts all of them."""

UNREACHED = percore.Rate(10**9, per=1, burst=10**9)
"""A rate for which no call waits."""

UNTIMED = 20
"""Trips before the timed ones of a round: the processes have just been moved to their CPUs."""


@row(seconds=90, is_cheap=True)
def awaited_int(quick: bool) -> Row:
    """Awaited no-op coroutines with an int: 500 awaiters x 40 calls, 2 workers.

    The cost of a call without work: the price of `await runner.run(f, i)` in a program that awaits many of them at once, with
    everything that percore does for a call (cancellation, start marks, statistics). Beside the pools are plain asyncio tasks in
    one process: no transport can be cheaper than none. Pools that take no coroutines get a plain function; slow ones make fewer
    calls.
    """
    return Row(
        _awaiters(quick, SAME, int, int),
        [
            Target("percore", "a call", "distex", at_least=1.8, towards=2.2),
            Target("percore", "a call", "ProcessPoolExecutor", at_least=20),
            Target("percore", "a call", "asyncio tasks", at_least=0.7, towards=0.9),
        ],
        anew=RESTLESS,
    )


@row(seconds=40)
def awaited_dict(quick: bool) -> Row:
    """Awaited no-op coroutines with a dict: 500 awaiters x 40 calls, 2 workers.

    Like awaited_int, with an argument that has to be pickled: a small description of a piece of work.
    """
    contestants = _awaiters(quick, SAME, _order, lambda order: order, IN_QUICK)
    return Row(contestants, [Target("percore", "a call", "distex", at_least=1.5, towards=2.0)])


@row(seconds=40)
def awaited_url(quick: bool) -> Row:
    """Awaited coroutines with a URL of 200 bytes that give 1 kB of text: 500 awaiters x 40 calls, 2 workers.

    Like awaited_int, with the sizes of a crawler's call: an address goes, a short text comes back.
    """
    contestants = _awaiters(quick, Pair(page_of, text_of), _url, text_of, IN_QUICK)
    return Row(contestants, [Target("percore", "a call", "distex", at_least=1.5, towards=2.0)])


def _awaiters(
    quick: bool, pair: Pair, argument: Function, answer: Function, peers: Sequence[str] = tuple(awaiting(SAME))
) -> dict[str, Contestant | Settings]:
    """percore, plain tasks and these peers: 500 awaiters, each with CALLS calls or fewer."""

    def contestant(name: str, opening: OpenCall) -> Contestant:
        async def once(call: Call) -> Sample:
            callers = [call] * (200 if quick else 500)
            return {"a call": await by_calls(await_all(callers, SLOW.get(name, CALLS), argument, answer))}

        return playing(opening, once)

    return {
        "percore": contestant("percore", partial(percore_call, pair.coroutine, workers=WORKERS)),
        "asyncio tasks": contestant("asyncio tasks", partial(task_call, pair.coroutine)),
        **settings({name: awaiting(pair)[name] for name in peers}, contestant),
    }


def _order(number: int) -> dict[str, object]:
    return {"number": number, "name": "a customer", "prices": [1.5, 2.5], "is_paid": True}


def _url(number: int) -> str:
    return f"https://www.example.com/documents/{number}/".ljust(200, "x")


@row(rounds=15, seconds=25)
def options(quick: bool) -> Row:
    """The cost of options of a call, `key`, `rate` and `retries=3`, for a no-op coroutine: 500 awaiters x 40 calls, 2 workers.

    The calls of awaited_int: without options, with a key for each awaiter (500 keys, spread over the workers by percore), with a
    key and a rate for which no call waits, and with retries that never have to happen. A view is made once and then called; for
    comparison, a view is made for every call, as in `runner.options(key=host).run(fetch, url)`. Calls with keys cannot move to the
    other worker when theirs gets less CPU; the CPU time of this process is without that, and without the workers'.
    """
    cpu = "CPU, a call"
    variants: dict[str, Callable[[percore.Runner, int], Call]] = {
        "plain": lambda runner, _: partial(runner.run, same),
        "key": lambda runner, awaiter: partial(runner.options(key=awaiter).run, same),
        "key, a view for each call": lambda runner, awaiter: lambda number: runner.options(key=awaiter).run(same, number),
        "key and rate": lambda runner, awaiter: partial(runner.options(key=awaiter, rate=UNREACHED).run, same),
        "retries=3": lambda runner, _: partial(runner.options(retries=3).run, same),
    }

    async def once(variant: Callable[[percore.Runner, int], Call], opened: percore.Runner) -> Sample:
        callers = [variant(opened, awaiter) for awaiter in range(50 if quick else 500)]
        began = time.process_time()
        seconds = await by_calls(await_all(callers, CALLS))
        return {"a call": seconds, cpu: (time.process_time() - began) / (len(callers) * CALLS)}

    return Row(
        {name: playing(runner(WORKERS), partial(once, variant)) for name, variant in variants.items()},
        [
            Target(name, metric, against, at_most=1.1)
            for name, against in (("key", "plain"), ("retries=3", "plain"), ("key and rate", "key"))
            for metric in ("a call", cpu)
        ],
    )


@row(rounds=15, seconds=25)
def time_limits(quick: bool) -> Row:
    """The cost of time limits that are never over, for a no-op coroutine: CPU time of this process, by calls.

    The calls of awaited_int, with and without an option: 500 awaiters x 40 calls, 2 workers. The workers' time is not included.
    """
    variants: dict[str, Callable[[percore.Runner], Call]] = {
        "plain": lambda runner: partial(runner.run, same),
        "timeout=60": lambda runner: partial(runner.options(timeout=60).run, same),
        "hard_timeout=60": lambda runner: partial(runner.options(hard_timeout=60).run, same),
        "queue_timeout=60": lambda runner: partial(runner.options(queue_timeout=60).run, same),
    }

    async def once(variant: Callable[[percore.Runner], Call], opened: percore.Runner) -> Sample:
        callers = [variant(opened)] * (50 if quick else 500)
        return {"a call": await by_calls(await_all(callers, CALLS), time.process_time)}

    return Row(
        {name: playing(runner(WORKERS), partial(once, variant)) for name, variant in variants.items()},
        [Target(name, "a call", "plain", at_most=1.1) for name in variants if name != "plain"],
    )


@row(seconds=40)
def many_workers(quick: bool) -> Row:
    """The cost of a call for the supervisor with 64 and 256 workers, against 2: CPU time of this process, by calls.

    A pool on a large machine must not pay for idle workers, nor for their number if all are busy. With 2 awaiters at most two
    of them have work; with 500 all have, on however few CPUs there are. The workers' time is not included.

    Calls that are ready together travel together: of 500 in flight, 250 go to each of two workers, and 8 to each of 64. The
    last metric therefore shows the cost of a call with equally many in flight for each worker.
    """
    few, many, most, each = 2, 64, 256, 250

    async def once(workers: int, call: Call) -> Sample:
        callers = {"2 awaiters": 2, "500 awaiters": 500}
        if workers < most:  # 64,000 tasks would measure their memory
            callers[f"{each} a worker"] = each * workers
        calls = 1000 if quick else 10_000
        return {
            metric: await by_calls(await_all([call] * number, max(2, calls // number)), time.process_time)
            for metric, number in callers.items()
        }

    return Row(
        {f"percore, {n} workers": playing(partial(percore_call, workers=n), partial(once, n)) for n in (few, many, most)},
        [
            Target(f"percore, {many} workers", metric, f"percore, {few} workers", at_most=1.2)
            for metric in ("2 awaiters", "500 awaiters")
        ],
    )


@row(rounds=3, warm_ups=0, choose_by="64")
def in_flight(quick: bool) -> Row:
    """Throughput against calls in flight: 1 to 1,024 awaiters of a no-op coroutine, 2 workers.

    One awaiter shows the latency of a call, many show its throughput. A curve that stops rising has met the library's limit.
    Every number of awaiters gets the same short time; the figure is that time, divided by the calls made in it.
    """
    moment = 0.02 if quick else 0.1

    def contestant(name: str, opening: OpenCall) -> Contestant:
        async def once(call: Call) -> Sample:
            some = [awaiters for awaiters in IN_FLIGHT if awaiters <= MANY_AWAITERS.get(name, IN_FLIGHT[-1])]
            return {str(awaiters): await by_calls(_for_a_moment(call, awaiters, moment)) for awaiters in some}

        return playing(opening, once, lambda call: _for_a_moment(call, IN_FLIGHT[2], moment))

    peers = {name: some for name, some in awaiting(SAME).items() if name in IN_QUICK or not quick}
    return Row(
        {
            "asyncio tasks": contestant("asyncio tasks", partial(task_call, same)),
            "percore": contestant("percore", partial(percore_call, workers=WORKERS)),
            **settings(peers, contestant),
        },
        anew=RESTLESS & peers.keys(),
        plot=Plot(
            "No-op calls, 2 workers: calls in a second against calls in flight",
            x="calls in flight",
            y="calls in a second",
            places={str(awaiters): awaiters for awaiters in IN_FLIGHT},
            rates=True,
        ),
    )


async def _for_a_moment(call: Call, awaiters: int, moment: float) -> int:
    """The number of calls that all awaiters made together."""
    end = time.perf_counter() + moment

    async def awaiter() -> int:
        calls = 0
        while calls == 0 or time.perf_counter() < end:
            check(await call(calls), calls)
            calls += 1
        return calls

    return sum(await asyncio.gather(*(awaiter() for _ in range(awaiters))))


@row(rounds=15, seconds=80, pin=Pin.APART, is_cheap=True)
def round_trip(quick: bool) -> Row:
    """One awaited coroutine at a time, 1 worker, against a bare ping-pong of the same two loops.

    The bare side is the least that two event loops in two processes can do: write an eventfd with one byte of state, wake by
    add_reader there, answer in the same way, and resolve a future that is awaited here. The difference is the latency that
    percore adds. This process runs on one CPU and all others on a second one, for every contestant.
    """
    trips = 200 if quick else 3000

    def contestant(name: str, opening: OpenCall) -> Contestant:
        number = trips if name in ("percore", "bare ping-pong") else min(trips, SLOW_TRIPS.get(name, 500))
        return playing(opening, partial(_trips, number))

    peers = {name: some for name, some in awaiting(SAME, workers=1).items() if name in IN_QUICK or not quick}
    return Row(
        {
            "bare ping-pong": contestant("bare ping-pong", bare_ping_pong),
            "percore": contestant("percore", partial(percore_call, workers=1)),
            **settings(peers, contestant),
        },
        [
            Target("percore", "p50", "bare ping-pong", at_most=1.35, towards=1.15),
            Target("percore", "p99", "bare ping-pong", at_most=2.0),
            Target("percore", "p50", "distex", at_most=1.0),
        ],
        anew=RESTLESS & peers.keys(),
    )


async def _trips(trips: int, call: Call) -> Sample:
    states = [1 + number % 255 for number in range(trips)]  # one byte, never zero: an eventfd ignores a zero
    for state in states[:UNTIMED]:
        await call(state)
    return latencies([await timed(call, state) for state in states])
