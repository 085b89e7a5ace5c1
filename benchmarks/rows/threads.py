"""Workers that are threads of this process, against processes and against loops on threads that are written by hand.

All three play in one interpreter. Threads run at once only in a Python without a GIL: `make python3.14t PGO=1`, and then
`make bench VENV=.venvs/3.14t-pgo PYTHON=build/python3.14t-pgo/bin/python3 BENCH_ARGS="threads threads_start"`. With the GIL the
targets of these rows do not hold, and are not asked for.
"""

from __future__ import annotations

import asyncio
import operator
import os
import sys
import time
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import percore
from benchmarks.calls import same, same_plainly, steps_for, work, work_in_loop
from benchmarks.contestants import always, await_all, by_calls, percore_call, playing, timed
from benchmarks.figures import Target, in_mebibytes, in_times, quantile
from benchmarks.harness import Row, row
from benchmarks.machine import cpu_of_all, descendants, usable_cpus, uss_of
from benchmarks.peers import WORKERS, executors
from benchmarks.peers import threads as by_hand
from benchmarks.peers.interpreters import InterpretersRunner
from benchmarks.rows.payloads import INTERPRETERS, KB, array_of, is_same_array

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from benchmarks.harness import Contestant
    from benchmarks.peers import Call, Function
    from benchmarks.results import Sample

PROCESSES, THREADS, BY_HAND = "percore, processes", "percore, threads", "call_soon_threadsafe"
MANY = 16

HAS_GIL = getattr(sys, "_is_gil_enabled", lambda: True)()


@asynccontextmanager
async def _calling(engine: str, function: Function) -> AsyncIterator[Call]:
    async with percore_call(function, workers=WORKERS, engine=engine) as call:
        yield call


def _contestants(once: Callable[[Sequence[Call]], Any], *functions: Function) -> dict[str, Contestant]:
    openings: dict[str, Callable[[Function], Any]] = {
        PROCESSES: partial(_calling, "processes"),
        THREADS: partial(_calling, "threads"),
        BY_HAND: partial(by_hand.calling, WORKERS),
    }

    @asynccontextmanager
    async def opened(opening: Callable[[Function], Any]) -> AsyncIterator[list[Call]]:
        async with opening(functions[0]) as first, opening(functions[-1]) as last:
            yield [first, last]

    return {name: playing(partial(opened, opening), once) for name, opening in openings.items()}


@row(rounds=9, seconds=20)
def threads(quick: bool) -> Row:
    """Calls to two workers that are threads, against two processes and two loops on threads written by hand.

    "no-op" and "1,000 ints" are calls of 500 awaiters that return their argument. "no-op, CPU" is the CPU time that a no-op takes
    of the thread of the program's loop: no call can be faster. A dict of 10,000 entries, 10 bytes objects of 100 kB and an array of
    8 MB go there and back one call at a time, as medians. "CPU" is a call of 2 ms of arithmetic in a coroutine, by 8 awaiters.
    """
    steps = steps_for(0.002)
    answer = work(steps)
    mapping = {f"{number:b}": number for number in range(10_000)}
    pieces = [os.urandom(100 * KB) for _ in range(10)]
    array = array_of(8_000 * KB)
    awaiters = 50 if quick else 500

    async def trip(call: Call, argument: Any, calls: int, is_same: Callable[[Any, Any], bool] = operator.eq) -> float:
        return quantile([await timed(call, argument, is_same) for _ in range(calls // 5 if quick else calls)], 0.5)

    async def once(calls: Sequence[Call]) -> Sample:
        call, computes = calls
        ints = list(range(1000))
        return {
            "no-op": await by_calls(await_all([call] * awaiters, 40)),
            "no-op, CPU": await by_calls(await_all([call] * awaiters, 40), time.thread_time),
            "1,000 ints": await by_calls(await_all([call] * awaiters, 8, lambda _: ints, lambda _: ints)),
            "dict of 10,000": await trip(call, mapping, 50, _is_equal_or_same),
            "10 x 100 kB": await trip(call, pieces, 50, _is_equal_or_same),
            "8 MB array": await trip(call, array, 50, _is_same_or_equal_array),
            "CPU": await by_calls(await_all([computes] * 8, 4 if quick else 25, lambda _: steps, lambda _: answer)),
        }

    targets = [
        Target(THREADS, "no-op", PROCESSES, at_least=1.2),
        Target(THREADS, "no-op", BY_HAND, at_least=1.1),
        Target(THREADS, "1,000 ints", PROCESSES, at_least=2.5),
        Target(THREADS, "dict of 10,000", PROCESSES, at_least=100),
        Target(THREADS, "10 x 100 kB", PROCESSES, at_most=0.35),
        Target(THREADS, "8 MB array", PROCESSES, at_most=0.1),
        Target(THREADS, "CPU", PROCESSES, at_least=0.9),
    ]
    return Row(_contestants(once, same, work_in_loop), [] if HAS_GIL else targets)


def _is_equal_or_same(one: Any, other: Any) -> bool:
    return one is other or bool(one == other)


def _is_same_or_equal_array(one: Any, other: Any) -> bool:
    return one is other or is_same_array(one, other)


@row(rounds=5, seconds=100, warm_ups=0)
def threads_curve(quick: bool) -> Row:
    """Calls to 1, 2, 4, ... workers, up to one for each CPU: threads, processes, and loops on threads by hand.

    "CPU" is a call of 2 ms of arithmetic in a coroutine, by four awaiters a worker, and "speed-up" what that gains over one
    worker. "no-op" is a call of 500 awaiters that returns its argument. Large arguments have no curve: with threads they cost what
    a no-op costs, and with processes the pickling in this process bounds them, with any number of workers. The row `threads` has
    them for two.
    """
    steps = steps_for(0.002)
    answer = work(steps)
    sizes = [1, 2] if quick else [size for size in (1, 2, 4, 8, 16, 32) if size <= max(2, usable_cpus())]
    calls = 5 if quick else 25

    async def measured(opening: Callable[[int, Function], Any], size: int) -> Sample:
        async with opening(size, same) as call, opening(size, work_in_loop) as computes:
            await await_all([call] * 8 * size, 5)
            await await_all([computes] * 4 * size, 2, lambda _: steps, lambda _: answer)
            return {
                "CPU": await by_calls(await_all([computes] * 4 * size, calls, lambda _: steps, lambda _: answer)),
                "no-op": await by_calls(await_all([call] * (50 if quick else 500), calls)),
            }

    async def once(opening: Callable[[int, Function], Any]) -> Sample:
        by_size = {size: await measured(opening, size) for size in sizes}
        sample = {f"{metric}, {size}": found[metric] for metric in by_size[1] for size, found in by_size.items()}
        return sample | {f"speed-up, {size}": sample["CPU, 1"] / sample[f"CPU, {size}"] for size in sizes}

    openings: dict[str, Callable[[int, Function], Any]] = {
        PROCESSES: lambda size, function: percore_call(function, workers=size),
        THREADS: lambda size, function: percore_call(function, workers=size, engine="threads"),
        BY_HAND: by_hand.calling,
    }
    return Row(
        {name: always(partial(once, opening)) for name, opening in openings.items()},
        units={f"speed-up, {size}": in_times for size in sizes},
    )


@row(rounds=9, seconds=8)
def threads_start(quick: bool) -> Row:
    """The start of two workers up to their first answers, and the memory of a worker, as threads and as processes.

    "USS a worker" is what sixteen workers have added to the memory of this process, or have for themselves.
    """

    async def once(engine: Literal["processes", "threads"]) -> Sample:
        start = time.perf_counter()
        async with percore.Runner(WORKERS, engine=engine) as opened:
            await opened.broadcast(_nothing)
            took = time.perf_counter() - start
        before = uss_of()
        async with percore.Runner(MANY, engine=engine) as opened:
            await opened.broadcast(_nothing)
            workers = [worker.pid for worker in opened.statistics().workers if worker.pid is not None]
            size = sum(map(uss_of, workers)) if workers else uss_of() - before
        return {"start": took, "USS a worker": size / MANY}

    return Row(
        {PROCESSES: always(partial(once, "processes")), THREADS: always(partial(once, "threads"))},
        [Target(THREADS, "start", at_most=0.020), Target(THREADS, "USS a worker", at_most=2 << 20)],
        units={"USS a worker": in_mebibytes},
    )


async def _nothing() -> None:
    return


@row(rounds=5, seconds=15)
def interpreters(quick: bool) -> Row:
    """An experiment: two workers that are interpreters with GILs of their own, beside processes, threads and the pool.

    All times are CPU time, of this process and all that it has started, since other work on the machine changes that least: up to
    the first answers, of a no-op call of 500 awaiters, and of 1 MB of bytes there and back.
    """
    makers: dict[str, Any] = {
        PROCESSES: partial(_with_runner, partial(percore.Runner, WORKERS)),
        "percore, interpreters": partial(_with_runner, partial(InterpretersRunner, WORKERS)),
        INTERPRETERS: _with_pool,
        THREADS: partial(_with_runner, partial(percore.Runner, WORKERS, engine="threads")),
    }

    async def once(make: Callable[[], Any]) -> Sample:
        started, before = _cpu(), uss_of()
        async with make() as (call, opened):
            await asyncio.gather(*map(call, range(8)))
            start = _cpu() - started
            pids = [] if opened is None else [worker.pid for worker in opened.statistics().workers if worker.pid is not None]
            size = sum(map(uss_of, pids)) if pids else uss_of() - before
            awaiters = 50 if quick else 500
            a_call = await by_calls(await_all([call] * awaiters, 20), _cpu)
            payload = os.urandom(1000 * KB)

            async def trips() -> int:
                return await await_all([call], 50, lambda _: payload, lambda _: payload)

            return {"start": start, "no-op": a_call, "1 MB": await by_calls(trips(), _cpu), "USS a worker": size / WORKERS}

    return Row(
        {name: always(partial(once, make)) for name, make in makers.items()},
        units={"USS a worker": in_mebibytes},
    )


def _cpu() -> float:
    return cpu_of_all([os.getpid(), *descendants()])


@asynccontextmanager
async def _with_runner(make: Callable[[], percore.Runner]) -> AsyncIterator[tuple[Call, percore.Runner | None]]:
    async with make() as opened:
        yield partial(opened.run, same), opened


@asynccontextmanager
async def _with_pool() -> AsyncIterator[tuple[Call, percore.Runner | None]]:
    async with executors.calling(executors.interpreters, WORKERS, same_plainly) as call:
        yield call, None
