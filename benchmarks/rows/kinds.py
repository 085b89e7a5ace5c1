"""Four kinds of work, each in three loads: four tasks at once, on several executors.

The sizes follow a published comparison of executors; the base is one task on one thread. Memory is the sum of each process's
peak, this one included; CPU time is that of this process and all that the executor started. Efficiency is the speed-up, and
utilisation the CPU time by the duration, both by the four workers of that comparison, whatever number a library plays with: on
two CPUs, computing reaches one half at most, and waiting reaches all.
"""

from __future__ import annotations

import asyncio
import subprocess
import sys
import time
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from os import getpid
from pathlib import Path
from typing import TYPE_CHECKING, Any

from benchmarks.calls import ask, ask_async, http, multiply, sum_of_list, write_and_read
from benchmarks.contestants import WrongResult, percore_call
from benchmarks.figures import Target, in_mebibytes, in_percent
from benchmarks.harness import Row, row
from benchmarks.machine import cpu_of_all, descendants, forget_peaks, peak_of_all
from benchmarks.peers import executors
from benchmarks.plots import Plot

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence

    from benchmarks.figures import Unit
    from benchmarks.harness import Contestant, Round
    from benchmarks.peers import OpenCall
    from benchmarks.results import Result, Sample

TASKS = 4
LOADS = ("low", "medium", "high")
BASE = "one task, one thread"

_SERVER = Path(__file__).parents[1] / "programs" / "server.py"


@dataclass(frozen=True, slots=True)
class Kind:
    """A function of a number, and that number for a low, a medium and a high load; `unit` says what it counts.

    `serve` is open while a contestant works, and yields a URL: the function then takes it and the number as a tuple.
    """

    name: str
    unit: str
    function: Callable[..., Any]
    loads: Sequence[int]
    in_percore: OpenCall
    serve: Callable[[], AbstractAsyncContextManager[str]] | None = None


@row(rounds=7, shown=7, seconds=65, warm_ups=0)
def kind_cpu(quick: bool) -> Row:
    """Four tasks of CPU work at once: 0.5, 2 and 8 million multiplications each.

    The sizes of the comparison that this follows, divided by ten.
    """
    scale = 100_000 if quick else 500_000
    kind = Kind("CPU", "multiplications", multiply, [scale, 4 * scale, 16 * scale], partial(percore_call, multiply))
    return _row(kind)


@row(rounds=7, shown=7, seconds=40, warm_ups=0)
def kind_memory(quick: bool) -> Row:
    """Four tasks of memory work at once: a list of 0.5, 1 and 3 million ints each, and its sum.

    The sizes of the comparison that this follows, divided by ten.
    """
    scale = 100_000 if quick else 500_000
    kind = Kind("Memory", "ints", sum_of_list, [scale, 2 * scale, 6 * scale], partial(percore_call, sum_of_list))
    return _row(kind)


@row(rounds=7, shown=7, seconds=45, warm_ups=0)
def kind_file(quick: bool) -> Row:
    """Four tasks of file work at once: a temporary file of 10, 50 and 200 MiB each, written and read.

    The sizes of the comparison that this follows. The files fit into the system's cache, so this is copying and not the disk.
    """
    scale = 2 << 20 if quick else 10 << 20
    kind = Kind("Files", "bytes", write_and_read, [scale, 5 * scale, 20 * scale], partial(percore_call, write_and_read))
    return _row(kind)


@row(rounds=7, shown=7, seconds=40, warm_ups=0)
def kind_network(quick: bool) -> Row:
    """Four tasks of network work at once: 1, 3 and 5 HTTP requests in a row each, to a local server that takes 50 ms.

    The executors run a plain function, percore a coroutine with the worker's session, as one would write it for each.
    """
    return _row(Kind("Network", "requests", ask, [1, 3, 5], partial(percore_call, ask_async, lifespan=http), _server))


def _row(kind: Kind) -> Row:
    """percore as it comes, a worker for each CPU; the pools in three sizes each."""
    pools: dict[str, tuple[executors.Make, str, Sequence[int]]] = {
        "ThreadPoolExecutor": (executors.threads, "threads", (4, 8, 16)),
        "ProcessPoolExecutor": (executors.processes, "processes", (2, 3, 4)),
        "InterpreterPoolExecutor": (executors.interpreters, "interpreters", (2, 3, 4)),
        "loky": (executors.loky, "processes", (2, 3, 4)),
    }

    def pool(make: executors.Make, size: int, tasks: int = TASKS) -> Contestant:
        return partial(_timed, kind, partial(executors.calling, make, size, kind.function), tasks)

    return Row(
        {
            BASE: pool(executors.threads, 1, tasks=1),
            "percore": partial(_timed, kind, kind.in_percore, TASKS),
            **{name: {f"{n} {unit}": pool(make, n) for n in sizes} for name, (make, unit, sizes) in pools.items()},
        },
        [Target("percore", load, tuple(pools), at_most=1.05, towards=1.0) for load in LOADS],
        units={f"{load}: {metric}": unit for load in LOADS for metric, unit in _UNITS.items()},
        derive=derive,
        plot=Plot(
            f"{kind.name}: efficiency of {TASKS} tasks at once, by load",
            x=f"{kind.unit} in a task",
            y="speed-up by tasks",
            places={f"{load}: efficiency": size for load, size in zip(LOADS, kind.loads, strict=True)},
        ),
    )


_UNITS: dict[str, Unit] = {
    "memory": in_mebibytes,
    "tasks/s": "{:.1f}/s".format,
    "speed-up": "{:.2f} x".format,
    "efficiency": in_percent,
    "utilisation": in_percent,
}


@asynccontextmanager
async def _timed(kind: Kind, opening: OpenCall, tasks: int) -> AsyncIterator[Round]:
    async with AsyncExitStack() as stack:
        url = None if kind.serve is None else await stack.enter_async_context(kind.serve())
        before = descendants()
        call = await stack.enter_async_context(opening())

        async def work(size: int) -> list[Any]:
            return await asyncio.gather(*(call(size if url is None else (url, size)) for _ in range(tasks)))

        await work(kind.loads[0])
        pids = [getpid(), *(descendants() - before)]

        async def load(size: int) -> tuple[float, float, float]:
            """The duration, the CPU time and the memory of these tasks."""
            forget_peaks(pids)
            cpu, start = cpu_of_all(pids), time.perf_counter()
            results = await work(size)
            wall = time.perf_counter() - start
            if len(set(results)) != 1 or not results[0]:
                raise WrongResult("equal tasks gave different results, or none")
            return wall, cpu_of_all(pids) - cpu, peak_of_all(pids)

        async def once() -> Sample:
            sample = {"all loads": 0.0}
            for name, size in zip(LOADS, kind.loads, strict=True):
                sample[name], sample[f"{name}: CPU"], sample[f"{name}: memory"] = await load(size)
                sample["all loads"] += sample[name]
            return sample

        yield once


def derive(result: Result) -> None:
    """Tasks in a second, the speed-up over one task on one thread, and by the number of workers that and the CPU time."""
    bases = result.samples[BASE]
    for name, samples in result.samples.items():
        tasks = 1 if name == BASE else TASKS
        result.samples[name] = [dict(sample) | _derived(sample, base, tasks) for sample, base in zip(samples, bases, strict=True)]


def _derived(sample: Sample, base: Sample, tasks: int) -> dict[str, float]:
    more: dict[str, float] = {}
    for load in LOADS:
        speed_up = tasks * base[load] / sample[load]
        more |= {f"{load}: tasks/s": tasks / sample[load], f"{load}: speed-up": speed_up, f"{load}: efficiency": speed_up / tasks}
        more[f"{load}: utilisation"] = sample[f"{load}: CPU"] / (sample[load] * tasks)
    return more


@asynccontextmanager
async def _server() -> AsyncIterator[str]:
    """A local server that takes 50 ms for 10,000 bytes: its URL."""
    command = [sys.executable, str(_SERVER), "0.05", "10000"]
    pipe = subprocess.PIPE
    process = await asyncio.to_thread(subprocess.Popen, command, stdin=pipe, stdout=pipe, text=True)
    assert process.stdout is not None
    try:
        yield (await asyncio.to_thread(process.stdout.readline)).strip()
    finally:
        await asyncio.to_thread(process.communicate)  # closes its standard input, which ends it, and reaps it
