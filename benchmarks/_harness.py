"""What a row is, and how it is run: all contestants open at once, warmed up, then interleaved rounds."""

from __future__ import annotations

import gc
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from benchmarks._figures import Limit, Spread, Target

if TYPE_CHECKING:
    from pathlib import Path

Sample = Mapping[str, float]
"""What one round of one contestant gave, by the name of the metric: seconds, unless the row says otherwise."""

Round = Callable[[], Awaitable[Sample]]
"""Does the work once and tells how long it took. It checks its results: a wrong one raises, it is never only slow."""

Contestant = Callable[[], AbstractAsyncContextManager[Round]]
"""Starts what it needs, yields its round, and ends and reaps what it started."""


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement.

    The contestants are opened in the order given and closed in the reverse one. The first of their metrics is the one
    that matters most. `words` tells how a metric is written that is not in seconds; `draw` makes a plot of the result
    in a file, with matplotlib.
    """

    contestants: Mapping[str, Contestant]
    targets: Sequence[Target | Limit]
    rounds: int = 9
    warm_ups: int = 1
    words: Mapping[str, Callable[[float], str]] = field(default_factory=dict)
    draw: Callable[[Result, Path], None] | None = None


@dataclass(slots=True)
class Result:
    """The samples of a row, by contestant, one a round, and why a contestant was left out."""

    samples: dict[str, list[Sample]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)

    def values(self, contestant: str, metric: str) -> list[float]:
        return [sample[metric] for sample in self.samples[contestant]]


@dataclass(frozen=True, slots=True)
class Verdict:
    """A target and what was measured: None where a contestant was left out, else ratios, or a limit's own values."""

    target: Target | Limit
    measured: Spread | None

    @property
    def is_reached(self) -> bool:
        return self.measured is not None and self.target.is_reached(self.measured.median)


def judge(targets: Sequence[Target | Limit], result: Result) -> list[Verdict]:
    """Each target with the spread of its paired ratios, each limit with that of its metric."""
    return [Verdict(target, _measured(target, result)) for target in targets]


def _measured(target: Target | Limit, result: Result) -> Spread | None:
    names = [target.contestant] if isinstance(target, Limit) else [target.ours, target.theirs]
    if not all(name in result.samples for name in names):
        return None
    values = [result.values(name, target.metric) for name in names]
    return Spread.of(values[0] if isinstance(target, Limit) else target.ratios(*values))


def rotated(names: Sequence[str], by: int) -> list[str]:
    """The order of a round: nobody always follows the same neighbour's garbage and warm caches."""
    start = by % len(names) if names else 0
    return [*names[start:], *names[:start]]


async def measure(row: Row) -> Result:
    """Runs the row. A contestant whose library is not installed is left out; any other failure is raised.

    Whatever was started has ended when it returns, raises or is cancelled.
    """
    result = Result()
    async with AsyncExitStack() as stack:
        rounds: dict[str, Round] = {}
        for name, contestant in row.contestants.items():
            try:
                rounds[name] = await stack.enter_async_context(contestant())
            except ModuleNotFoundError as error:
                result.absent[name] = str(error)
        for _ in range(row.warm_ups):
            for once in rounds.values():
                await once()
        result.samples = {name: [] for name in rounds}
        for number in range(row.rounds):
            for name in rotated(list(rounds), number):
                gc.collect()  # or the garbage of one contestant is collected in the time of the next
                result.samples[name].append(await rounds[name]())
    return result
