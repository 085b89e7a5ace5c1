"""Targets against what was measured. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from benchmarks._figures import Limit, Spread, Target
from benchmarks._harness import median_of

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks._harness import Result


@dataclass(frozen=True, slots=True)
class Verdict:
    """A target and what was measured: None where a contestant was left out, else ratios, or a limit's own values.

    `against` is the contestant that it was measured against: of several the best; None for a limit.
    """

    target: Target | Limit
    measured: Spread | None
    against: str | None = None

    @property
    def is_reached(self) -> bool:
        return self.measured is not None and self.target.is_reached(self.measured.median)


def judge(targets: Sequence[Target | Limit], result: Result) -> list[Verdict]:
    """Each target with the spread of its paired ratios, each limit with that of its metric."""
    return [_limit(target, result) if isinstance(target, Limit) else _target(target, result) for target in targets]


def _limit(limit: Limit, result: Result) -> Verdict:
    if not result.samples.get(limit.contestant):
        return Verdict(limit, None)
    return Verdict(limit, Spread.of(result.values(limit.contestant, limit.metric)))


def _target(target: Target, result: Result) -> Verdict:
    there = [name for name in target.rivals if result.samples.get(name)]
    if not there or not result.samples.get(target.ours):
        return Verdict(target, None)
    best = min(there, key=lambda name: median_of(result, name, target.metric))
    ratios = target.ratios(result.values(target.ours, target.metric), result.values(best, target.metric))
    return Verdict(target, Spread.of(ratios), best)
