"""How many items a map holds, by how long its calls take: 1 us to 1 s, plain and as coroutines, 2 workers.

A map's window follows its calls: twice what the workers can run at once when calls are long, more when they are short,
so that no worker waits for its next item, and never more than 16,384. It is looked at from outside: the input counts
the items that were pulled from it, the `async for` those handed over, and the figure is the most that ever lay between
them. Each map runs for a moment, or for some calls' time, and is then left.

There is no target; the plot (`--plots FOLDER`) shows the window over the duration.
"""

from __future__ import annotations

import time
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import percore
from benchmarks._figures import in_items, in_words
from benchmarks._harness import Result, Round, Row, Sample, median_of
from benchmarks.calls import last, last_async

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Callable, Iterator, Sequence
    from pathlib import Path

WORKERS = 2
DURATIONS = (1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.1, 1.0)
MOMENT = 0.5
"""Seconds a map runs, or as long as two of its calls take one after the other."""


def row(*, quick: bool) -> Row:
    durations = DURATIONS[:-2] if quick else DURATIONS
    moment = 0.1 if quick else MOMENT
    return Row(
        contestants={
            "plain calls": partial(_percore, last, durations, moment),
            "coroutines": partial(_percore, last_async, durations, moment),
        },
        targets=[],
        rounds=3,
        seconds=6 if quick else 35,
        warm_ups=0,
        words={in_words(seconds): in_items for seconds in durations},
        draw=_draw,
    )


@asynccontextmanager
async def _percore(function: Callable[[float], object], durations: Sequence[float], moment: float) -> AsyncIterator[Round]:
    async with percore.Runner(workers=WORKERS) as runner:

        async def once() -> Sample:
            return {in_words(seconds): await _window(runner, function, seconds, moment) for seconds in durations}

        yield once


async def _window(runner: percore.Runner, function: Callable[[float], object], seconds: float, moment: float) -> int:
    pulled = handed_over = most = 0

    def items() -> Iterator[float]:
        nonlocal pulled, most
        while True:
            pulled += 1
            most = max(most, pulled - handed_over)
            yield seconds

    end = time.perf_counter() + max(moment, 2 * seconds)
    async with runner.map(function, items()) as results:
        async for _ in results:
            handed_over += 1
            if time.perf_counter() > end:
                break
    return most


def _draw(result: Result, path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7, 4), layout="constrained")
    axes = figure.subplots()
    for name, samples in result.samples.items():
        measured = [seconds for seconds in DURATIONS if in_words(seconds) in samples[0]]
        windows = [median_of(result, name, in_words(seconds)) for seconds in measured]
        axes.plot(measured, windows, marker="o", label=name)
    axes.set(xscale="log", yscale="log", xlabel="a call takes (seconds)", ylabel="items pulled and not handed over")
    axes.set_title(f"The default window of a map, {WORKERS} workers")
    axes.grid(visible=True, which="major", alpha=0.3)
    axes.legend()
    figure.savefig(path, dpi=120)
