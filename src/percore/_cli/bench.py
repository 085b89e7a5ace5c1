"""`percore bench`: a short comparison with the standard library, on this machine.

It is there to see what to expect here. The project's own benchmarks compare more, more carefully: see the page Speed.
"""

import asyncio
import json
import statistics
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from time import perf_counter
from typing import Final

import percore
from percore._cli.rows import Contestant, Pools, Row, standard_pool
from percore._common.options import MOST_WORKERS, usable_cpus, whole

_ROUNDS: Final = 3
_SECONDS: Final = 0.4
"""Seconds that a round of each contestant should take."""

_MOST: Final = 200_000

_FULL: Final = "█"
_PARTS: Final = " ▏▎▍▌▋▊▉"
"""A bar of text, and what may stand at its end."""


@dataclass(frozen=True, slots=True)
class Result:
    """The figures of one row.

    Attributes:
        title: what each item was.
        unit: what is counted per second.
        rates: items per second by contestant, percore's first: the median of the rounds.
    """

    title: str
    unit: str
    rates: dict[str, float]

    @property
    def ratio(self) -> float:
        """How many times percore's rate is that of the best other one."""
        ours, *others = self.rates.values()
        return ours / max(others)


def bench(*, workers: int | None, as_json: bool) -> int:
    """Run the rows and write the figures to standard output. Return the exit status."""
    try:
        count = usable_cpus() if workers is None else whole("--workers", workers, 1, MOST_WORKERS)
    except ValueError as error:
        print(f"percore bench: {error}", file=sys.stderr)
        return 2
    results = asyncio.run(_run(count, shows=not as_json))
    if as_json:
        listed = [asdict(result) | {"ratio": result.ratio} for result in results]
        print(json.dumps({"percore": percore.__version__, "workers": count, "rows": listed}, indent=2))
    return 0


async def _run(workers: int, *, shows: bool) -> list[Result]:
    if shows:
        python = ".".join(map(str, sys.version_info[:3]))
        print(f"percore {percore.__version__}, Python {python}, {workers} workers. Longer bars are better.")
    results = []
    # The pool comes first: its workers are forked, before this process has threads.
    with standard_pool(workers) as pool:
        async with percore.Runner(workers) as runner:
            for row in Pools(runner, pool, workers).rows():
                results.append(await measure(row))
                if shows:
                    print(f"\n{shown(results[-1])}", flush=True)
    return results


async def measure(row: Row, rounds: int = _ROUNDS, seconds: float = _SECONDS) -> Result:
    """Run a row: a first round tells how many items fit into `seconds`, then the contestants take turns."""
    counts = {one: await _count(one, row.first, seconds) for one in row.contestants}
    rates: dict[Contestant, list[float]] = {one: [] for one in row.contestants}
    for _ in range(rounds):
        for one, count in counts.items():
            rates[one].append(count / await _took(one, count))
    return Result(row.title, row.unit, {one.name: statistics.median(found) for one, found in rates.items()})


async def _count(one: Contestant, first: int, seconds: float) -> int:
    await _took(one, first)  # imports, caches, connections
    return max(1, min(_MOST, round(first * seconds / await _took(one, first))))


async def _took(one: Contestant, count: int) -> float:
    began = perf_counter()
    await one.work(count)
    return max(perf_counter() - began, 1e-9)


def shown(result: Result) -> str:
    """Return a row as text: its title with the ratio, and a bar for each contestant."""
    rows = [(name, rate, f"{_figure(rate)} {result.unit}/s") for name, rate in result.rates.items()]
    head = f"{result.title}: percore is {result.ratio:.2g} times as fast"
    return "\n".join([head, *(f"  {line}" for line in bars(rows))])


def _figure(rate: float) -> str:
    return f"{rate:,.0f}" if rate >= 10 else f"{rate:.1f}"


def bars(rows: Sequence[tuple[str, float, str]], width: int = 40) -> list[str]:
    """Return a line for each row: its name, a bar as long as its value, and its figure. The longest bar has `width` columns.

    `rows`: name, value (not negative) and figure as text.
    """
    most = max((value for _, value, _ in rows), default=0.0)
    names = max((len(name) for name, _, _ in rows), default=0)
    return [
        f"{name.ljust(names)}  {_bar(value / most * width if most else 0.0).ljust(width)}  {figure}" for name, value, figure in rows
    ]


def _bar(length: float) -> str:
    eighths = round(length * 8)
    full, part = divmod(eighths, 8)
    return _FULL * full + (_PARTS[part] if part else "")
