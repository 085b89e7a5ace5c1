"""One kind of work in three loads on several executors: what the rows kind_* share.

Four tasks at once, as in the comparison that this follows; the base is one task on one thread. Memory is the sum of what
each process had at most, this one included; CPU time that of this process and all that the executor started. Efficiency
is the speed-up, and utilisation the CPU time in the time it took, by the four workers of that comparison, whatever number
a library plays with: on two CPUs what computes reaches a half at most, and what waits reaches all.
"""

from __future__ import annotations

import asyncio
import time
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import percore
from benchmarks._figures import Target, in_mebibytes, in_percent
from benchmarks._harness import Contestant, Result, Round, Row, Sample, Settings, median_of
from benchmarks._processes import cpu_of_all, descendants, forget_peaks, own_and, peak_of_all
from benchmarks.peers import executors

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Sequence
    from concurrent.futures import Executor
    from contextlib import AbstractAsyncContextManager
    from pathlib import Path

TASKS = 4
LOADS = ("low", "medium", "high")
BASE = "one task, one thread"
SIZES = (2, 3, 4)


@dataclass(frozen=True, slots=True)
class Kind:
    """A function, the arguments that make it a low, a medium and a high load, and how percore is asked for it.

    `serve` is open while a contestant works, and yields what comes before each load's own arguments.
    """

    name: str
    function: Callable[..., Any]
    loads: Sequence[int]
    in_percore: Callable[..., Any] | None = None
    lifespan: Callable[[], AbstractAsyncContextManager[Any]] | None = None
    serve: Callable[[], AbstractAsyncContextManager[tuple[str, ...]]] | None = None


def row_of(kind: Kind, *, quick: bool, seconds: float) -> Row:
    pools = {
        "ThreadPoolExecutor": {f"{n} threads": partial(_executor, executors.threads, n) for n in (4, 8, 16)},
        "ProcessPoolExecutor": {f"{n} processes": partial(_executor, executors.processes, n) for n in SIZES},
        "InterpreterPoolExecutor": {f"{n} interpreters": partial(_executor, executors.interpreters, n) for n in SIZES},
        "loky": {f"{n} processes": partial(_executor, executors.loky, n) for n in SIZES},
    }
    contestants: dict[str, Contestant | Settings] = {
        BASE: partial(_timed, kind, 1, partial(_executor, executors.threads, 1, kind)),
        "percore": partial(_timed, kind, TASKS, partial(_percore, kind)),
    }
    for name, settings in pools.items():
        contestants[name] = {setting: partial(_timed, kind, TASKS, partial(opening, kind)) for setting, opening in settings.items()}
    return Row(
        contestants=contestants,
        targets=[Target("percore", tuple(pools), load, at_most=1.05, towards=1.0) for load in LOADS],
        rounds=3 if quick else 7,
        shown=7,  # the others' speed-up is told by the base's round
        seconds=8 if quick else seconds,
        warm_ups=0,  # of all loads; the low one is made while it opens
        trials=1,
        words=_words(),
        derive=_derive,
        draw=partial(_draw, kind.name),
    )


@asynccontextmanager
async def _executor(make: Callable[[int], Executor], workers: int, kind: Kind) -> AsyncIterator[Any]:
    loop = asyncio.get_running_loop()
    async with executors.opened(make, workers) as pool:
        yield lambda arguments: loop.run_in_executor(pool, kind.function, *arguments)


@asynccontextmanager
async def _percore(kind: Kind) -> AsyncIterator[Any]:
    """As it comes: a worker for each CPU."""
    function = kind.in_percore or kind.function
    async with percore.Runner(lifespan=kind.lifespan) as runner:
        yield lambda arguments: runner.run(function, *arguments)


@asynccontextmanager
async def _timed(kind: Kind, tasks: int, opening: Callable[[], AbstractAsyncContextManager[Any]]) -> AsyncIterator[Round]:
    async with AsyncExitStack() as stack:
        served = await stack.enter_async_context(kind.serve()) if kind.serve is not None else ()
        before = descendants()
        do = await stack.enter_async_context(opening())
        await asyncio.gather(*(do((*served, kind.loads[0])) for _ in range(tasks)))
        pids = own_and(descendants() - before)

        async def once() -> Sample:
            loads = [await _load(do, (*served, load), tasks, pids) for load in kind.loads]
            sample = {"all loads": sum(load["wall"] for load in loads)}
            for name, load in zip(LOADS, loads, strict=True):
                sample |= {name: load["wall"], f"{name}: CPU": load["CPU"], f"{name}: memory": load["memory"]}
            return sample

        yield once


async def _load(do: Any, arguments: tuple[Any, ...], tasks: int, pids: Sequence[int]) -> Sample:
    forget_peaks(pids)
    cpu, start = cpu_of_all(pids), time.perf_counter()
    results = await asyncio.gather(*(do(arguments) for _ in range(tasks)))
    wall = time.perf_counter() - start
    if len(set(results)) != 1 or not results[0]:
        raise RuntimeError("equal tasks gave different results, or none")
    return {"wall": wall, "CPU": cpu_of_all(pids) - cpu, "memory": peak_of_all(pids)}


def _derive(result: Result) -> None:
    """Tasks in a second, speed-up over one task on one thread, that by the number of workers, and the CPU time by it."""
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


def _words() -> dict[str, Callable[[float], str]]:
    words: dict[str, Callable[[float], str]] = {}
    for load in LOADS:
        words |= {f"{load}: memory": in_mebibytes, f"{load}: efficiency": in_percent, f"{load}: utilisation": in_percent}
        words |= {f"{load}: tasks/s": lambda rate: f"{rate:.1f}/s", f"{load}: speed-up": lambda ratio: f"{ratio:.2f} x"}
    return words


def _draw(kind: str, result: Result, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    for axes, metric in zip(figure.subplots(1, 2), ("efficiency", "tasks/s"), strict=True):
        for name in result.samples:
            axes.plot(LOADS, [median_of(result, name, f"{load}: {metric}") for load in LOADS], marker="o", label=name)
        axes.set(title=f"{kind}: {metric}", xlabel="load", yscale="log" if metric == "tasks/s" else "linear")
        axes.grid(visible=True, alpha=0.3)
    axes.legend(fontsize="small")
    figure.savefig(path, dpi=110)
