"""A row's result as JSON, and back. Pure."""

from __future__ import annotations

import json
import re
from typing import TYPE_CHECKING, Any

from benchmarks._figures import Limit, Target
from benchmarks._harness import Choice, Result

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from benchmarks._harness import Sample
    from benchmarks._verdicts import Verdict

Json = dict[str, Any]

_DIGITS = 5


def as_json(result: Result, verdicts: Sequence[Verdict]) -> Json:
    """A row's raw samples and its verdicts, for a later reader's own arithmetic."""
    return {
        "rounds": result.rounds,
        "seconds": _rounded(result.seconds),
        "samples": {name: _columns(samples) for name, samples in result.samples.items()},
        "settings": {name: {"chosen": one.setting, "tried": _rounded_all(one.tried)} for name, one in result.choices.items()},
        "left out": result.absent,
        "targets": [_verdict(verdict) for verdict in verdicts],
    }


def from_json(row: Json) -> Result:
    """The result that `as_json` was given, to so many digits."""
    return Result(
        samples={name: _rows(columns) for name, columns in row["samples"].items()},
        absent=dict(row["left out"]),
        choices={name: Choice(one["chosen"], one["tried"]) for name, one in row["settings"].items()},
        seconds=row["seconds"],
    )


def to_text(value: Json) -> str:
    """JSON with a line for each metric: its numbers beside each other."""
    text = json.dumps(value, indent=1, ensure_ascii=False)
    return re.sub(r"\[[-+0-9.eE,\s]*\]", lambda numbers: re.sub(r"\s+", " ", numbers[0]), text) + "\n"


def _verdict(verdict: Verdict) -> Json:
    target, measured = verdict.target, verdict.measured
    return {
        "question": target.question,
        "metric": target.metric,
        "kind": kind_of(target),
        "reach": target.at_least if isinstance(target, Target) and target.at_least is not None else target.at_most,
        "towards": target.towards,
        "against": verdict.against,
        "measured": None if measured is None else [_rounded(x) for x in (measured.low, measured.median, measured.high)],
        "reached": None if measured is None else verdict.is_reached,
    }


def kind_of(target: Target | Limit) -> str:
    """How the figure is meant: "limit" (in the metric's own unit), "times as much" or "times as fast"."""
    if isinstance(target, Limit):
        return "limit"
    return "times as fast" if target.at_least is not None else "times as much"


def _columns(samples: Sequence[Sample]) -> dict[str, list[float]]:
    return {metric: [_rounded(sample[metric]) for sample in samples] for metric in samples[0]} if samples else {}


def _rows(columns: Mapping[str, list[float]]) -> list[Sample]:
    return [dict(zip(columns, values, strict=True)) for values in zip(*columns.values(), strict=True)]


def _rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS}g}")


def _rounded_all(values: Mapping[str, float]) -> dict[str, float]:
    return {name: _rounded(value) for name, value in values.items()}
