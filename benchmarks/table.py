"""A row on the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING

from benchmarks.figures import Spread, in_seconds

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from benchmarks.figures import Unit
    from benchmarks.results import Choice, Result, Verdict


def row_lines(title: str, result: Result, verdicts: Sequence[Verdict], units: Mapping[str, Unit]) -> Iterator[str]:
    """A row's title, a line for each contestant and metric, and a line for each target. Metrics without a unit are seconds."""
    yield ""
    yield title
    yield f"  {'contestant':<36} {'metric':<12} {'median':>12}   quartiles of {result.rounds} rounds, {result.seconds:.0f} s in all"
    for name, metric, rounds, spread in spreads(result):
        say = units.get(metric, in_seconds)
        fewer = f" ({rounds} rounds)" if rounds < result.rounds else ""
        yield f"  {name:<36} {metric:<12} {say(spread.median):>12}   {say(spread.low)} to {say(spread.high)}{fewer}"
    for name, choice in result.choices.items():
        if name in result.samples:
            yield f"  {name} played with {setting_of(choice)}"
    for name, reason in result.absent.items():
        yield f"  {name:<36} left out: {reason}"
    for verdict in verdicts:
        yield f"  {_verdict_line(verdict, units)}"


def spreads(result: Result) -> Iterator[tuple[str, str, int, Spread]]:
    """Contestant, metric, number of rounds and spread, of everything that was measured."""
    for name, samples in result.samples.items():
        for metric in samples[0]:
            yield name, metric, len(samples), Spread.of(result.values(name, metric))


def setting_of(choice: Choice) -> str:
    """The setting that played, and the results of those that were tried, as multiples of the best."""
    if not choice.tried:
        return choice.setting
    best = min(choice.tried.values())
    tried = ", ".join(f"{setting} {value / best:.2f}" for setting, value in choice.tried.items())
    return f"{choice.setting} (tried, relative to the best: {tried})"


def _verdict_line(verdict: Verdict, units: Mapping[str, Unit]) -> str:
    target, measured = verdict.target, verdict.measured
    say = units.get(target.metric, in_seconds) if target.kind == "limit" else "{:.2f} x".format
    sign = "at most" if target.at_least is None else "at least"
    towards = "" if target.towards is None else f", then towards {say(target.towards)}"
    question = f"{target.question}: target {sign} {say(target.reach)}{' as fast' if target.at_least else ''}{towards}"
    if measured is None:
        return f"not measured  {question}"
    answer = "reached" if verdict.is_reached else "MISSED"
    best = f", against {verdict.against}" if len(target.rivals) > 1 else ""
    return f"{answer:<12}  {question}{best}, measured {say(measured.median)} ({say(measured.low)} to {say(measured.high)})"
