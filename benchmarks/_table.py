"""What is printed."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks._figures import Limit, Spread, Target, in_words

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from benchmarks._figures import Words
    from benchmarks._harness import Choice, Result
    from benchmarks._verdicts import Verdict


def machine_lines(machine: Mapping[str, str]) -> Iterator[str]:
    for name, value in machine.items():
        yield f"{name:>10}: {value}"


def row_lines(title: str, result: Result, verdicts: Sequence[Verdict], words: Mapping[str, Words]) -> Iterator[str]:
    """A row's title, a line for each contestant and metric, a line for each target. Metrics without `words` are seconds."""
    yield ""
    yield title
    yield f"  {'contestant':<36} {'metric':<12} {'median':>12}   quartiles of {result.rounds} rounds, {result.seconds:.0f} s in all"
    for name, samples in result.samples.items():
        for metric in samples[0]:
            say = words.get(metric, in_words)
            values = Spread.of(result.values(name, metric))
            fewer = f" ({len(samples)} rounds)" if len(samples) < result.rounds else ""
            yield f"  {name:<36} {metric:<12} {say(values.median):>12}   {say(values.low)} to {say(values.high)}{fewer}"
    for name, choice in result.choices.items():
        if name in result.samples:
            yield f"  {name} played with {setting_of(choice)}"
    for name, reason in result.absent.items():
        yield f"  {name:<36} left out: {reason}"
    for verdict in verdicts:
        yield f"  {_verdict_line(verdict, words)}"


def setting_of(choice: Choice) -> str:
    """The setting that played, and what those that were tried gave, as multiples of the best."""
    if not choice.tried:
        return choice.setting
    best = min(choice.tried.values())
    tried = ", ".join(f"{setting} {value / best:.2f}" for setting, value in choice.tried.items())
    return f"{choice.setting} (tried, relative to the best: {tried})"


def _verdict_line(verdict: Verdict, words: Mapping[str, Words]) -> str:
    target, measured = verdict.target, verdict.measured
    say = _ratio if isinstance(target, Target) else words.get(target.metric, in_words)
    question = f"{target.question}: target {_bound(target, say)}"
    if measured is None:
        return f"not measured  {question}"
    answer = "reached" if verdict.is_reached else "MISSED"
    best = f", against {verdict.against}" if isinstance(target, Target) and len(target.rivals) > 1 else ""
    return f"{answer:<12}  {question}{best}, measured {say(measured.median)} ({say(measured.low)} to {say(measured.high)})"


def _bound(target: Target | Limit, say: Words) -> str:
    bound = f"at most {say(target.at_most)}" if isinstance(target, Limit) else target.wording
    return bound if target.towards is None else f"{bound}, then towards {say(target.towards)}"


def _ratio(ratio: float) -> str:
    return f"{ratio:.2f}"
