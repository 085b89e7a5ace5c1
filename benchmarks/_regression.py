"""A run against the one on record. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from benchmarks._results import Json

_SLACK = 0.03
"""Of the median on record: a spread of few rounds may be narrower than what one run differs from the next by."""


@dataclass(frozen=True, slots=True)
class Change:
    """One figure, on record and now: quartiles and median of each, and whether it became worse by more than both spreads."""

    question: str
    kind: str
    before: tuple[float, float, float]
    now: tuple[float, float, float]

    @property
    def is_worse(self) -> bool:
        """Whether the better quartile of now is beyond the worse quartile on record, and by more than the slack."""
        (low, median, high), (now_low, _, now_high) = self.before, self.now
        if self.kind == "times as fast":
            return now_high < low - _SLACK * median
        return now_low > high + _SLACK * median

    @property
    def line(self) -> str:
        before, now = (f"{median:.4g} ({low:.4g} to {high:.4g})" for low, median, high in (self.before, self.now))
        return f"{'WORSE' if self.is_worse else 'as before':<10} {self.question}, {self.kind}: {now}, on record {before}"


def changes(before: Json, now: Json, *, ratios_only: bool = False) -> list[Change]:
    """The figures of a row that are in both runs of it. Limits in seconds or bytes say nothing between two machines."""
    known = dict(_figures(before))
    figures = ((key, figure) for key, figure in _figures(now) if key in known)
    found = (Change(question, kind, known[question, kind], figure) for (question, kind), figure in figures)
    return [change for change in found if change.kind != "limit" or not ratios_only]


def _figures(row: Json) -> Iterator[tuple[tuple[str, str], tuple[float, float, float]]]:
    for target in row["targets"]:
        if target["measured"] is not None:
            low, median, high = target["measured"]
            yield (target["question"], target["kind"]), (low, median, high)


def settings_of(row: Json) -> Mapping[str, str]:
    """The settings with which the peers played."""
    return {name: one["chosen"] for name, one in row["settings"].items()}


def other_machine(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """What of the machine is not as it was when the record was made, in words."""
    differing = (name for name in ("python", "processor", "CPUs") if before.get(name) != now[name])
    return [f"{name}: {now[name]}, on record {before.get(name)}" for name in differing]
