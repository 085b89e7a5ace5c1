"""Writes the generated parts of three pages from the run on record: the table and plots of docs/performance.md, the figures of
docs/comparison.md, and everything on docs/performance-record.md. All numbers on these pages come from here.

A second run with a newer interpreter, the supplement, measures targets that the record's interpreter cannot. They are shown after
those of the record. A target that the supplement reaches is not missed.

People write the text around each block. On the page of the record, a line that begins with a row's name, as in **`round_trip`**,
explains why that row misses a target. The block lists the rows that miss one, and says which of them lack such a line. It does so,
too, with the figures that have moved since the record before (`moved`), whose lines have a section of their own.
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import moved, plots
from benchmarks.figures import in_seconds
from benchmarks.results import from_json
from benchmarks.run import row_names, row_of, title_of
from benchmarks.table import setting_of, spreads

if TYPE_CHECKING:
    from collections.abc import Collection, Iterator, Mapping

    from benchmarks.figures import Unit
    from benchmarks.results import Change, Json

RECORD = Path(__file__).with_name("record.json")
SUPPLEMENT = Path(__file__).with_name("supplement.json")
SUMMARY = Path(__file__).parents[1] / "docs" / "performance.md"
COMPARISON = SUMMARY.with_name("comparison.md")
PAGE = SUMMARY.with_name("performance-record.md")
PLOTS = PAGE.with_name("plots")

HEADLINES = (
    ("awaited_int", "percore / distex, a call", "No-op calls of 500 awaiters", "distex"),
    ("awaited_int", "percore / ProcessPoolExecutor, a call", "... the same", "ProcessPoolExecutor"),
    ("awaited_int", "percore / asyncio tasks, a call", "... the same", "asyncio tasks in one process, the limit"),
    ("round_trip", "percore / distex, p50", "One call at a time (p50)", "distex"),
    ("round_trip", "percore / bare ping-pong, p50", "... the same", "two bare event loops, the limit"),
    ("map_tiny", "percore / distex, a call", "A map of a million tiny calls", "distex"),
    ("map_tiny", "percore / ProcessPoolExecutor, a call", "... the same", "ProcessPoolExecutor"),
    (
        "article",
        "percore, 20 threads / hand split, 20 threads, a call",
        "Calls that wait and compute, 20 threads",
        "a split by hand",
    ),
    ("article", "percore, 30 threads / hand split, 30 threads, a call", "... 30 threads", "a split by hand"),
    ("article", "percore, coroutines / hand split, coroutines, a call", "... coroutines", "a split by hand"),
    ("payload_sizes", "percore / ProcessPoolExecutor, 1 MB", "1 MB of bytes there and back", "ProcessPoolExecutor"),
    ("payload_sizes", "percore / bare echo, 1 MB", "... the same", "an echo in shared memory, the limit"),
    ("payload_arrays", "percore / ProcessPoolExecutor, 8 MB", "A numpy array of 8 MB there and back", "ProcessPoolExecutor"),
    (
        "executor_submit",
        "percore, 1 thread / ProcessPoolExecutor, 1 thread, a call",
        "`LoopPoolExecutor.submit`",
        "ProcessPoolExecutor",
    ),
    ("site_farm", "percore, 2 workers / one process, a page, farm excluded", "A crawl of 64 sites on 2 CPUs", "one process"),
    ("start", "percore / ProcessPoolExecutor, forkserver, to answers", "Start of a runner", "ProcessPoolExecutor"),
    ("replacement", "percore, p50", "Until a killed worker's replacement takes calls (p50)", ""),
    ("worker_memory", "percore, coroutines / bare interpreter, USS", "Memory of a worker (USS)", "a bare interpreter"),
)
"""Row, question, caption and rival of each line of the headline table."""

PEERS = {
    "percore": ("percore", "percore, coroutines"),
    "ProcessPoolExecutor": ("ProcessPoolExecutor", "ProcessPoolExecutor, forkserver"),
    "aiomultiprocess": ("aiomultiprocess",),
    "distex": ("distex",),
    "loky": ("loky",),
    "anyio": ("anyio.to_process",),
}
"""The columns of the comparison, each with the contestants whose figures it shows: of each row the first one that was measured."""

COMPARED = (
    ("round_trip", "p50", "one call at a time"),
    ("awaited_int", "a call", "a call of 500 awaiters"),
    ("map_tiny", "a call", "an item of a map of a million tiny calls"),
    ("payload_sizes", "1 MB", "1 MB of bytes there and back"),
    ("payload_arrays", "8 MB", "a numpy array of 8 MB there and back"),
    ("start", "to answers", "start of a program, until two workers answer"),
    ("close", "close", "close of two idle workers"),
    ("idle_cpu", "of one CPU", "CPU of two idle workers"),
    ("worker_memory", "USS", "memory of a worker (USS)"),
)
"""Row, metric and caption of each line of the comparison."""

BEGIN = "<!-- begin: written by `python -m benchmarks --docs`, do not edit -->"
END = "<!-- end -->"
NO_RECORD = "No run is on record yet. `make bench-record` makes one and fills this part."
MOVED = "### What moved them"
"""The heading of the section on rows that have moved since the record before."""
UNEXPLAINED = "**not explained yet**"
_EXPLANATION = re.compile(r"^\*\*`(\w+)`\*\*", re.MULTILINE)


def read(path: Path) -> Json | None:
    return json.loads(path.read_text()) if path.exists() else None


def write(record: Json | None, supplement: Json | None = None, previous: Json | None = None) -> str:
    """Fill the blocks of the pages, draw their plots, and return a line for the terminal."""
    page, summary = PAGE.read_text(encoding="utf-8"), SUMMARY.read_text(encoding="utf-8")
    compared = COMPARISON.read_text(encoding="utf-8")
    PAGE.write_text(filled(page, block(record, page, supplement, previous)), encoding="utf-8")
    SUMMARY.write_text(filled(summary, headlines(record)), encoding="utf-8")
    COMPARISON.write_text(filled(compared, comparison(record)), encoding="utf-8")
    for name, svg in pictures(record).items():
        (PLOTS / name).write_text(svg, encoding="utf-8")
    names = f"{SUMMARY.name}, {COMPARISON.name}, {PAGE.name}, {PLOTS.name}"
    return f"{names}: {'no run is on record yet' if record is None else 'written from the run on record'}"


def pictures(record: Json | None) -> dict[str, str]:
    """All plots of the pages, by file name."""
    if record is None:
        return {}
    of_rows = {name: row_of(name, quick=False).plot for name in record["rows"] if name in row_names()}
    return {"headlines.svg": plots.ratios(list(_ratios(record)))} | plots.drawn(of_rows, record["rows"])


def filled(page: str, lines: str) -> str:
    """The page with these lines between its two marks. Raises ValueError unless it has exactly one of each."""
    before, begin, rest = page.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end or BEGIN in after or END in after:
        raise ValueError(f"the page has not exactly one {BEGIN} ... {END}")
    return f"{before}{BEGIN}\n\n{lines}\n\n{END}{after}"


# The headlines


def headlines(record: Json | None) -> str:
    """The block of the summary: one line for each headline that was measured."""
    return NO_RECORD if record is None else "\n".join(_headlines(record)).strip()


def _headlines(record: Json) -> Iterator[str]:
    machine = record["machine"]
    if machine:
        where = f"{machine['python']}, {machine['CPUs']} CPUs, {machine['processor']}"
        yield f"{machine['date'][:10]}, {where}, commit {machine['commit']}."
        yield ""
    yield from ("| | against | percore's figure | quartiles |", "|---|---|---|---|")
    for name, target, caption, rival in _measured_headlines(record):
        say = _say(name, target) if target["kind"] == "limit" else "{:.2f}".format
        low, median, high = map(say, target["measured"])
        yield f"| {caption} | {rival} | **{median}{_unit_of(target)}** | {low} to {high} |"


def _measured_headlines(record: Json) -> Iterator[tuple[str, Json, str, str]]:
    for name, question, caption, rival in HEADLINES:
        for target in record["rows"].get(name, {"targets": ()})["targets"]:
            if target["question"] == question and target["measured"] is not None:
                yield name, target, caption, rival


def _unit_of(target: Json) -> str:
    if target["kind"] == "limit":
        return ""
    if target["kind"] == "times as fast":
        return " x the speed"
    return " x the memory" if target["metric"] == "USS" else " x the time"


def _ratios(record: Json) -> Iterator[plots.Ratio]:
    """The headlines that compare two speeds, each as how many times as fast percore is."""
    before = ""
    for _, target, caption, rival in _measured_headlines(record):
        whole = before if caption == "... the same" else caption.replace("... ", "Calls that wait and compute, ").replace("`", "")
        before = whole
        low, median, high = target["measured"]
        if target["kind"] == "times as much" and target["metric"] != "USS":
            low, median, high = 1 / high, 1 / median, 1 / low
        elif target["kind"] != "times as fast":
            continue
        yield plots.Ratio(whole, rival, low, median, high)


# The comparison


def comparison(record: Json | None) -> str:
    """The block of the comparison: a line for each row, a column for each library. A figure that the run lacks stays empty."""
    return NO_RECORD if record is None else "\n".join(_comparison(record)).strip()


def _comparison(record: Json) -> Iterator[str]:
    machine = record["machine"]
    if machine:
        where = f"{machine['python']}, {machine['CPUs']} CPUs, {machine['processor']}"
        yield f"{machine['date'][:10]}, {where}, commit {machine['commit']}."
        yield ""
    yield f"| | {' | '.join(PEERS)} | measured by |"
    yield "|---|" + "---|" * len(PEERS) + "---|"
    for name, metric, caption in COMPARED:
        if name in record["rows"]:
            result, say = from_json(record["rows"][name]), row_of(name, quick=False).units.get(metric, in_seconds)
            found = {who: say(spread.median) for who, what, _, spread in spreads(result) if what == metric}
            cells = (next((found[one] for one in contestants if one in found), "") for contestants in PEERS.values())
            yield f"| {caption} | {' | '.join(cells)} | `python -m benchmarks {name}` |"


# The page of the record


def explained_in(page: str) -> set[str]:
    """The rows of which the page says, after its block, why they miss a target."""
    return set(_EXPLANATION.findall(page.partition(END)[2].partition(MOVED)[0]))


def said_in(page: str) -> set[str]:
    """The rows of which the page says what has moved them since the record before."""
    return set(_EXPLANATION.findall(page.partition(END)[2].partition(MOVED)[2]))


def block(record: Json | None, page: str = "", supplement: Json | None = None, previous: Json | None = None) -> str:
    """The text between the marks of a page, which explains some rows."""
    return NO_RECORD if record is None else "\n".join(_lines(record, page, supplement, previous)).strip()


def _lines(record: Json, page: str, supplement: Json | None, previous: Json | None) -> Iterator[str]:
    rows = {name: row for name, row in record["rows"].items() if name in row_names()}
    yield f"One run, {record['seconds'] / 60:.0f} minutes in all."
    yield ""
    yield from ("| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in record["machine"].items()))
    yield from ("", "### Targets", "")
    yield "`x`: median of the ratios within one round, and their quartiles. Without `x`: the metric itself."
    yield ""
    yield from _targets(rows)
    yield from _not_run(record)
    added = {} if supplement is None else _added(rows, supplement["rows"])
    if supplement is not None and (added or supplement["failed"]):
        yield from ("", "### Targets that need a newer Python", "")
        machine = supplement["machine"]
        yield f"A run of its own, {supplement['seconds'] / 60:.0f} minutes, with {machine['python']}; {machine['libraries']}; "
        yield f"commit {machine['commit']}, {machine['date']}."
        yield ""
        yield from _targets(added)
        yield from _not_run(supplement)
    yield from _misses(rows, added, explained_in(page))
    if previous is not None:
        yield from ("", moved.HEADING, "", *moved.lines(previous, record | {"rows": rows}, said_in(page), _say_change))
    yield from ("", "### Plots", "")
    yield from (f"![{title_of(name)}](plots/{name}.svg)\n" for name in rows if row_of(name, quick=False).plot is not None)
    yield from ("### All figures", "")
    for name, row in rows.items():
        yield from _row(name, row)


def _targets(rows: Mapping[str, Json]) -> Iterator[str]:
    yield "| row | what | reach | then towards | measured | quartiles | rounds | |"
    yield "|---|---|---|---|---|---|---|---|"
    for name, row in rows.items():
        yield from (_target(name, target, row["rounds"]) for target in row["targets"])


def _not_run(run: Json) -> Iterator[str]:
    yield from (f"\nNot run: `{name}`, {why.splitlines()[0]}" for name, why in run["failed"].items())


def _added(rows: Mapping[str, Json], more: Mapping[str, Json]) -> dict[str, Json]:
    """Of the rows of a supplement, the targets that the record has not measured."""
    added = {}
    for name, row in rows.items():
        lacking = {one["question"] for one in row["targets"] if one["measured"] is None}
        targets = [one for one in more.get(name, {"targets": ()})["targets"] if one["question"] in lacking]
        if targets:
            added[name] = more[name] | {"targets": targets}
    return added


def _misses(rows: Mapping[str, Json], added: Mapping[str, Json], explained: Collection[str]) -> Iterator[str]:
    """The rows with a target that was missed or not measured, and whether the page says why."""
    reached = {(name, one["question"]) for name, row in added.items() for one in row["targets"] if one["reached"]}
    missing = {
        name: [one["question"] for one in row["targets"] if not one["reached"] and (name, one["question"]) not in reached]
        for name, row in rows.items()
    }
    missing = {name: questions for name, questions in missing.items() if questions}
    yield from ("", "### Missed", "")
    yield from ("| row | what | |", "|---|---|---|") if missing else ("No target is missed.",)
    for name, questions in missing.items():
        yield f"| `{name}` | {'; '.join(questions)} | {'[explained](#below-the-target)' if name in explained else UNEXPLAINED} |"
    yield from (f"\nReached, but still explained below: `{name}`." for name in sorted({*explained} - {*missing}))


def _target(name: str, target: Json, rounds: int) -> str:
    say = _say(name, target)
    sign = "≥" if target["kind"] == "times as fast" else "≤"
    towards = "" if target["towards"] is None else say(target["towards"])
    what = target["question"] + (f" ({target['against']})" if "the best of" in target["question"] and target["against"] else "")
    asked = f"| `{name}` | {what} | {sign} {say(target['reach'])} | {towards} |"
    if target["measured"] is None:
        return f"{asked} | | | not measured |"
    low, median, high = map(say, target["measured"])
    return f"{asked} {median} | {low} to {high} | {rounds} | {'reached' if target['reached'] else '**missed**'} |"


def _say(name: str, target: Json) -> Unit:
    return row_of(name, quick=False).units.get(target["metric"], in_seconds) if target["kind"] == "limit" else "{:.2f} x".format


def _say_change(name: str, change: Change) -> Unit:
    return _say(name, {"kind": change.kind, "metric": change.metric})


def _row(name: str, row: Json) -> Iterator[str]:
    result = from_json(row)
    units = row_of(name, quick=False).units
    yield f"<details><summary>{title_of(name)} ({row['rounds']} rounds, {row['seconds']:.0f} s)</summary>"
    yield from ("", "| contestant | metric | median | quartiles | rounds |", "|---|---|---|---|---|")
    for contestant, metric, rounds, spread in spreads(result):
        say = units.get(metric, in_seconds)
        yield f"| {contestant} | {metric} | {say(spread.median)} | {say(spread.low)} to {say(spread.high)} | {rounds} |"
    yield ""
    yield from (f"- {name} played with {setting_of(choice)}" for name, choice in result.choices.items() if name in result.samples)
    yield from (f"- {contestant} was left out: {why}" for contestant, why in result.absent.items())
    yield from ("", "</details>", "")
