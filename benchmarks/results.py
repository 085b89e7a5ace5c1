"""A row's result: judged by its targets, as JSON and back, and compared with the run on record. Pure."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from benchmarks.figures import Spread, quantile

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from benchmarks.figures import Target

Json = dict[str, Any]

Sample = Mapping[str, float]
"""One round of one contestant, by metric: in seconds unless the row names another unit. Less is better."""

_DIGITS = 5

_SLACK = 0.03
"""Share of the recorded median by which a figure may be worse: a few rounds can have a narrower spread than two runs."""


@dataclass(frozen=True, slots=True)
class Choice:
    """The setting that a contestant plays with, and the result of each trial in the metric that decides."""

    setting: str
    tried: Mapping[str, float]


@dataclass(slots=True)
class Result:
    """The samples by contestant, one per round; why a contestant was left out; the chosen settings; the duration."""

    samples: dict[str, list[Sample]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    choices: dict[str, Choice] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def rounds(self) -> int:
        return max(map(len, self.samples.values()), default=0)

    def values(self, contestant: str, metric: str) -> list[float]:
        return [sample[metric] for sample in self.samples[contestant]]

    def median(self, contestant: str, metric: str) -> float:
        return quantile(self.values(contestant, metric), 0.5)


@dataclass(frozen=True, slots=True)
class Verdict:
    """A target, and its measured value: None if a contestant was left out. `against` is the rival that counted."""

    target: Target
    measured: Spread | None = None
    against: str | None = None

    @property
    def is_reached(self) -> bool:
        return self.measured is not None and self.target.is_reached(self.measured.median)


def judge(targets: Sequence[Target], result: Result) -> list[Verdict]:
    """Each target with the spread of its paired ratios, or of its own metric."""
    return [_verdict(target, result) for target in targets]


def _verdict(target: Target, result: Result) -> Verdict:
    if not result.samples.get(target.ours):
        return Verdict(target)
    ours = result.values(target.ours, target.metric)
    if target.against is None:
        return Verdict(target, Spread.of(ours))
    there = [name for name in target.rivals if result.samples.get(name)]
    if not there:
        return Verdict(target)
    best = min(there, key=lambda name: result.median(name, target.metric))
    return Verdict(target, Spread.of(target.ratios(ours, result.values(best, target.metric))), best)


# As JSON


def as_json(result: Result, verdicts: Sequence[Verdict]) -> Json:
    """A row's raw samples and its verdicts."""
    return {
        "rounds": result.rounds,
        "seconds": _rounded(result.seconds),
        "samples": {name: _columns(samples) for name, samples in result.samples.items()},
        "settings": {
            name: {"chosen": one.setting, "tried": {setting: _rounded(value) for setting, value in one.tried.items()}}
            for name, one in result.choices.items()
        },
        "left out": result.absent,
        "targets": [_verdict_as_json(verdict) for verdict in verdicts],
    }


def from_json(row: Json) -> Result:
    """The result that `as_json` was given, with rounded numbers."""
    return Result(
        samples={name: _rows(columns) for name, columns in row["samples"].items()},
        absent=dict(row["left out"]),
        choices={name: Choice(one["chosen"], one["tried"]) for name, one in row["settings"].items()},
        seconds=row["seconds"],
    )


def to_text(value: Json) -> str:
    """JSON with one line per list of numbers."""
    text = json.dumps(value, indent=1, ensure_ascii=False)
    return re.sub(r"\[[-+0-9.eE,\s]*\]", lambda numbers: re.sub(r"\s+", " ", numbers[0]), text) + "\n"


def _verdict_as_json(verdict: Verdict) -> Json:
    target, measured = verdict.target, verdict.measured
    return {
        "question": target.question,
        "metric": target.metric,
        "kind": target.kind,
        "reach": target.reach,
        "towards": target.towards,
        "against": verdict.against,
        "measured": None if measured is None else [_rounded(x) for x in (measured.low, measured.median, measured.high)],
        "reached": None if measured is None else verdict.is_reached,
    }


def _columns(samples: Sequence[Sample]) -> dict[str, list[float]]:
    return {metric: [_rounded(sample[metric]) for sample in samples] for metric in samples[0]} if samples else {}


def _rows(columns: Mapping[str, list[float]]) -> list[Sample]:
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


# Against the record


@dataclass(frozen=True, slots=True)
class Change:
    """One figure, on record and now: low quartile, median and high quartile."""

    question: str
    kind: str
    before: tuple[float, float, float]
    now: tuple[float, float, float]
    metric: str = ""

    @property
    def _is_less(self) -> bool:
        """Whether even the upper quartile of now is below the lower quartile on record, by more than the slack."""
        low, median, _ = self.before
        return self.now[2] < low - _SLACK * median

    @property
    def _is_more(self) -> bool:
        _, median, high = self.before
        return self.now[0] > high + _SLACK * median

    @property
    def is_worse(self) -> bool:
        """Whether even the better quartile of now is worse than the worse quartile on record, by more than the slack."""
        return self._is_less if self.kind == "times as fast" else self._is_more

    @property
    def is_better(self) -> bool:
        """Whether even the worse quartile of now is better than the better quartile on record, by more than the slack."""
        return self._is_more if self.kind == "times as fast" else self._is_less

    @property
    def has_moved(self) -> bool:
        return self._is_less or self._is_more

    @property
    def line(self) -> str:
        before, now = (f"{median:.4g} ({low:.4g} to {high:.4g})" for low, median, high in (self.before, self.now))
        return f"{'WORSE' if self.is_worse else 'as before':<10} {self.question}, {self.kind}: {now}, on record {before}"


def changes(before: Json, now: Json, *, ratios_only: bool = False) -> list[Change]:
    """The figures that both runs of a row have. Limits in seconds or bytes are not comparable between two machines."""
    known, metrics = dict(_figures(before)), {target["question"]: target["metric"] for target in now["targets"]}
    found = [
        Change(question, kind, known[question, kind], now, metrics[question])
        for (question, kind), now in _figures(now)
        if (question, kind) in known
    ]
    return [change for change in found if change.kind != "limit" or not ratios_only]


def _figures(row: Json) -> Iterator[tuple[tuple[str, str], tuple[float, float, float]]]:
    for target in row["targets"]:
        if target["measured"] is not None:
            low, median, high = target["measured"]
            yield (target["question"], target["kind"]), (low, median, high)


def settings_of(row: Json) -> dict[str, str]:
    """The settings with which the peers played."""
    return {name: one["chosen"] for name, one in row["settings"].items()}
