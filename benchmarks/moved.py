"""What has moved between the run on record and the one before it: a table for the page of the record.

`make bench-record` keeps the figures of the record that it replaces. A figure has moved if the spreads of both runs are apart.
People write what did it, in a section of the page where a paragraph begins with the row's name. The table says which rows lack one.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks.results import changes

if TYPE_CHECKING:
    from collections.abc import Callable, Collection, Iterator

    from benchmarks.figures import Unit
    from benchmarks.results import Change, Json

PREVIOUS = Path(__file__).with_name("previous.json")
"""The figures of the record before the present one."""

HEADING = "### Moved since the record before"
UNSAID = "**not said yet**"


def outline(record: Json) -> Json:
    """The part of a record that is kept when the next one takes its place."""
    return {"machine": record["machine"], "rows": {name: {"targets": row["targets"]} for name, row in record["rows"].items()}}


def moved(before: Json, now: Json) -> dict[str, list[Change]]:
    """The figures that have moved, by row. Limits count only if both runs are of one machine and interpreter."""
    same = all(before["machine"].get(what) == now["machine"].get(what) for what in ("python", "processor", "CPUs"))
    found = {
        name: [change for change in changes(before["rows"][name], row, ratios_only=not same) if change.has_moved]
        for name, row in now["rows"].items()
        if name in before["rows"]
    }
    return {name: those for name, those in found.items() if those}


def lines(before: Json, now: Json, explained: Collection[str], say: Callable[[str, Change], Unit]) -> Iterator[str]:
    """The table of what has moved. `explained`: the rows of which the page says what did it; `say` writes a figure of a row."""
    old = before["machine"]
    yield f"Against the run of {old.get('date', 'an unknown day')[:10]}, commit {old.get('commit', 'unknown')}."
    yield from ("", "| row | what | before | now | | what did it |", "|---|---|---|---|---|---|")
    for name, those in moved(before, now).items():
        why = "[said below](#what-moved-them)" if name in explained else UNSAID
        for change in those:
            was, has = (
                f"{write(median)} ({write(low)} to {write(high)})"
                for write, (low, median, high) in ((say(name, change), change.before), (say(name, change), change.now))
            )
            yield f"| `{name}` | {change.question} | {was} | {has} | {'better' if change.is_better else '**worse**'} | {why} |"
    for what, names in (("New", now["rows"].keys() - before["rows"]), ("No more", before["rows"].keys() - now["rows"])):
        if names:
            yield f"\n{what}: {', '.join(f'`{name}`' for name in sorted(names))}."
