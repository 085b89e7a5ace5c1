"""What is printed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks._figures import Spread, in_words

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from benchmarks._harness import Result, Verdict


def machine_lines(machine: Mapping[str, str]) -> Iterator[str]:
    for name, value in machine.items():
        yield f"{name:>10}: {value}"


def row_lines(title: str, result: Result, verdicts: Sequence[Verdict]) -> Iterator[str]:
    """A row's title, a line for each contestant and metric, a line for each target."""
    yield ""
    yield title
    yield f"  {'contestant':<36} {'metric':<12} {'median':>8}   quartiles"
    for name, samples in result.samples.items():
        for metric in samples[0]:
            times = Spread.of(result.values(name, metric))
            spread = f"{in_words(times.low)} to {in_words(times.high)}"
            yield f"  {name:<36} {metric:<12} {in_words(times.median):>8}   {spread}"
    for name, reason in result.absent.items():
        yield f"  {name:<36} left out: {reason}"
    for verdict in verdicts:
        yield f"  {_verdict_line(verdict)}"


def _verdict_line(verdict: Verdict) -> str:
    target = verdict.target
    question = f"{target.ours} / {target.theirs}, {target.metric}: target {target.wording}"
    if verdict.ratio is None:
        return f"not measured  {question}"
    ratio = verdict.ratio
    answer = "reached" if verdict.is_reached else "MISSED"
    return f"{answer:<12}  {question}, measured {ratio.median:.2f} ({ratio.low:.2f} to {ratio.high:.2f})"
