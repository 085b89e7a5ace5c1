"""What a row is, and how it is run: all contestants open at once, warmed up, then interleaved rounds."""

from __future__ import annotations

import gc
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field

from benchmarks._figures import Spread, Target

Sample = Mapping[str, float]
"""What one round of one contestant gave: seconds by the name of the metric."""

Round = Callable[[], Awaitable[Sample]]
"""Does the work once and tells how long it took. It checks its results: a wrong one raises, it is never only slow."""

Contestant = Callable[[], AbstractAsyncContextManager[Round]]
"""Starts what it needs, yields its round, and ends and reaps what it started."""


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement.

    The contestants are opened in the order given and closed in the reverse one. The first of their metrics is the one
    that matters most.
    """

    contestants: Mapping[str, Contestant]
    targets: Sequence[Target]
    rounds: int = 9
    warm_ups: int = 1


@dataclass(slots=True)
class Result:
    """The samples of a row, by contestant, one a round, and why a contestant was left out."""

    samples: dict[str, list[Sample]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)

    def values(self, contestant: str, metric: str) -> list[float]:
        return [sample[metric] for sample in self.samples[contestant]]


@dataclass(frozen=True, slots=True)
class Verdict:
    """A target and what was measured; `ratio` is None where one of the two contestants was left out."""

    target: Target
    ratio: Spread | None

    @property
    def is_reached(self) -> bool:
        return self.ratio is not None and self.target.is_reached(self.ratio.median)


def judge(targets: Sequence[Target], result: Result) -> list[Verdict]:
    """Each target with the spread of its paired ratios."""
    verdicts = []
    for target in targets:
        ratio = None
        if target.ours in result.samples and target.theirs in result.samples:
            ours = result.values(target.ours, target.metric)
            theirs = result.values(target.theirs, target.metric)
            ratio = Spread.of(target.ratios(ours, theirs))
        verdicts.append(Verdict(target, ratio))
    return verdicts


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
