"""The same calls on worker processes and on worker threads, side by side, in one run.

    python examples/threads.py

The first row is the program of the article "Combining asyncio with processes and threads": each call waits 20 ms, as for a server,
computes, and gives its argument back. The next rows send payloads there and back. The heading says whether this Python has a GIL:
without one, threads run at once, and nothing is copied. Figures of one machine at one moment: read the ratio in the last column.
"""

import asyncio
import platform
import sys
import time
from collections.abc import Awaitable, Callable
from typing import Any, Final

from rich.console import Console
from rich.table import Table

import percore

PAUSE: Final = 0.02
SECONDS: Final = 1.5
"""How long each row is measured on each engine, in two rounds."""
ENGINES: Final = ("processes", "threads")

Run = Callable[[Any], Awaitable[object]]


async def page(item: int) -> int:
    """The article's call: wait for a server, compute, give the argument back."""
    await asyncio.sleep(PAUSE)
    fib(15)
    return item


async def same(value: Any) -> Any:
    return value


def fib(number: int) -> int:
    return number if number < 2 else fib(number - 1) + fib(number - 2)


ROWS: Final[tuple[tuple[str, int, Callable[..., Any], Any], ...]] = (
    ("the article's call: wait 20 ms, compute", 200, page, 1),
    ("a call that does nothing", 200, same, 1),
    ("a list of 1,000 ints, there and back", 50, same, [*range(1000)]),
    ("a dict of 10,000, there and back", 4, same, {str(number): number for number in range(10_000)}),
    ("10 × 100 kB, there and back", 4, same, [bytes(100_000) for _ in range(10)]),
    ("8 MB, there and back", 1, same, bytes(8 << 20)),
    ("fib(18), a plain function", 8, fib, 18),
)
"""What is called, by how many callers at once, and with which argument."""


async def rate(runner: percore.Runner, callers: int, fn: Callable[..., Any], argument: Any, seconds: float) -> float:
    """Return how many calls a second so many callers get."""
    done = 0

    async def call() -> None:
        nonlocal done
        while True:
            await runner.run(fn, argument)
            done += 1
            if time.perf_counter() > began + seconds:
                return

    await runner.run(fn, argument)
    began = time.perf_counter()
    await asyncio.gather(*(call() for _ in range(callers)))
    return done / (time.perf_counter() - began)


async def start_of(engine: Any) -> float:
    """Return how many seconds the start of a runner takes."""
    runner = percore.Runner(engine=engine)
    began = time.perf_counter()
    await runner.start()
    took = time.perf_counter() - began
    await runner.aclose()
    return took


async def measure(seconds: float = SECONDS) -> list[tuple[str, float, float, str]]:
    """Return the rows: the name, the figures of both engines, and the unit."""
    rows = [("start and end of a runner", await start_of("processes"), await start_of("threads"), "s")]
    async with percore.Runner(engine="processes") as processes, percore.Runner(engine="threads") as threads:
        for name, callers, fn, argument in ROWS:
            figures = [0.0, 0.0]
            for _ in range(2):
                for place, runner in enumerate((processes, threads)):
                    figures[place] += await rate(runner, callers, fn, argument, seconds / 2) / 2
            rows.append((name, figures[0], figures[1], "calls/s"))
    return rows


def heading() -> str:
    has_gil = getattr(sys, "_is_gil_enabled", lambda: True)()
    state = "with a GIL: one thread runs at a time" if has_gil else "without a GIL: threads run at once"
    return f"Python {platform.python_version()}, {state}"


def main(seconds: float = SECONDS) -> None:
    console = Console()
    table = Table("", *ENGINES, "threads / processes", title=heading(), title_justify="left")
    for column in table.columns[1:]:
        column.justify = "right"
    for name, processes, threads, unit in asyncio.run(measure(seconds)):
        shown = "{:,.3f} s".format if unit == "s" else "{:,.0f} calls/s".format
        table.add_row(name, shown(processes), shown(threads), f"{threads / processes:.2f}")
    console.print(table)


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else SECONDS)
