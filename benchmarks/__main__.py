"""The command: `python -m benchmarks [row ...]` runs these rows, or all. `--help` lists the options."""

from __future__ import annotations

import argparse
import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import machine, moved, pages, plots, table
from benchmarks.harness import Wanted
from benchmarks.results import changes, from_json, judge, settings_of, to_text
from benchmarks.run import RowFailed, row_names, row_of, run_row, share_of, title_of

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

    from benchmarks.harness import Row
    from benchmarks.results import Json

MINUTES, QUICK_MINUTES = 30.0, 5.0

CHECK_SECONDS = 60.0

CHECK_LIMIT = 240.0
"""Seconds after which a check, on a slow machine, compares no further rows."""

CHECK_ROUNDS = 4
"""The least number of rounds in a check: fewer have no useful quartiles."""


def main() -> int:
    arguments = parsed_arguments()
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))  # like Ctrl-C: first the current row is ended
    if arguments.list:
        show(map(title_of, arguments.row))
    elif arguments.docs:
        show([pages.write(pages.read(pages.RECORD), pages.read(pages.SUPPLEMENT), pages.read(moved.PREVIOUS))])
    elif arguments.keep:
        keep(pages.read(pages.RECORD))
    elif arguments.check:
        return check(pages.read(pages.RECORD))
    else:
        return run_all(arguments)
    return 0


def keep(record: Json | None) -> None:
    """Keeps the figures of the run on record as those of the record before the next one."""
    if record is not None:
        moved.PREVIOUS.write_text(to_text(moved.outline(record)))


def run_all(arguments: argparse.Namespace) -> int:
    """Runs the rows, prints them, and writes the files that were asked for; returns 1 if a row failed."""
    began = time.monotonic()
    described = machine.describe()
    show(f"{name:>10}: {value}" for name, value in described.items())
    if machine.is_busy():
        show(["", "This machine is busy with other work: the figures will mean little."])
    made = {name: row_of(name, quick=arguments.quick) for name in arguments.row}
    wishes = [row.seconds for row in made.values()]
    figures: dict[str, Json] = {}
    failed: dict[str, str] = {}
    for number, (name, row) in enumerate(made.items()):
        share = share_of(wishes[number:], began + arguments.minutes * 60 - time.monotonic())
        if share is None:
            failed[name] = f"the {arguments.minutes:g} minutes were over before its turn"
            continue
        try:
            figures[name] = run_row(name, Wanted(share.seconds, quick=arguments.quick), share.limit)
        except RowFailed as error:
            failed[name] = str(error)
            show(["", title_of(name), f"  FAILED: {error}"])
        else:
            show(lines_of(name, row, figures[name], quick=arguments.quick))
    seconds = time.monotonic() - began
    show(["", f"{len(figures)} rows in {seconds / 60:.1f} minutes", *(f"{name} failed: {why}" for name, why in failed.items())])
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        run = {"machine": described, "seconds": round(seconds, 1), "rows": figures, "failed": failed}
        arguments.json.write_text(to_text(run))
    if arguments.plots:
        arguments.plots.mkdir(parents=True, exist_ok=True)
        for file, svg in plots.drawn({name: row.plot for name, row in made.items()}, figures).items():
            (arguments.plots / file).write_text(svg, encoding="utf-8")
    return 1 if failed else 0


def lines_of(name: str, row: Row, figures: Json, *, quick: bool) -> Iterable[str]:
    title = f"{title_of(name)} (--quick: fewer calls, no reliable figures)" if quick else title_of(name)
    result = from_json(figures)
    return table.row_lines(title, result, judge(row.targets, result), row.units)


def check(record: Json | None) -> int:
    """Runs the cheap rows and compares them with the record; returns 1 if a figure is worse beyond both spreads, twice in a row."""
    if record is None:
        show([f"No run is on record yet ({pages.RECORD.name}): nothing to compare with. `make bench-record` makes one."])
        return 0
    differing = machine.differences(record["machine"], machine.describe())
    if machine.is_busy():
        differing.append("it is busy with other work")
    show(f"The machine differs from the record's, so only ratios count: {line}" for line in differing)
    found = {name: row_of(name, quick=False) for name in row_names() if name in record["rows"]}
    cheap = {name: row for name, row in found.items() if row.is_cheap and (row.has_ratios or not differing)}
    worse = _Check(cheap, record["rows"], ratios_only=bool(differing)).worse()
    show([f"{worse} figures are worse than on record" if worse else f"{len(cheap)} rows: no figure is worse than on record"])
    return 1 if worse else 0


class _Check:
    def __init__(self, rows: Mapping[str, Row], record: Json, *, ratios_only: bool) -> None:
        self._rows = rows
        self._record = record
        self._ratios_only = ratios_only
        self._end = time.monotonic() + CHECK_LIMIT

    def worse(self) -> int:
        """The number of figures that came out worse twice: once can be the machine's fault."""
        worse = 0
        for name in self._rows:
            found = self._compared(name)
            if found:
                found &= self._compared(name)
            worse += len(found)
        return worse

    def _compared(self, name: str) -> set[str]:
        """Runs the judged contestants of a row with the recorded settings; the questions that came out worse."""
        row = self._rows[name]
        seconds = CHECK_SECONDS * row.seconds / sum(one.seconds for one in self._rows.values())
        left = self._end - time.monotonic()
        if left < seconds:
            show([f"not compared: {name}, the {CHECK_LIMIT:.0f} s of a check are over"])
            return set()
        before = self._record[name]
        wanted = Wanted(seconds, CHECK_ROUNDS, only=sorted(row.judged), settings=settings_of(before))
        try:
            now = run_row(name, wanted, min(left, 5 * seconds + 30))
        except RowFailed as error:
            show([f"FAILED     {name}: {error}"])
            return {name}
        found = changes(before, now, ratios_only=self._ratios_only)
        show(f"{name}: {change.line}" for change in found)
        return {change.question for change in found if change.is_worse}


def show(lines: Iterable[str]) -> None:
    for line in lines:
        print(line, flush=True)


def parsed_arguments() -> argparse.Namespace:
    names = row_names()
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="percore against the libraries that people use today")
    add = parser.add_argument
    add("row", nargs="*", help=f"any of: {', '.join(names)} (default: all but the extra ones)")
    add("--list", action="store_true", help="print the title of each row, and run none")
    is_quick = bool(os.environ.get("QUICK"))
    add("--quick", action="store_true", default=is_quick, help="run each row once, small, with no settings tried (also: QUICK=1)")
    add("--minutes", type=float, help=f"the time of the whole run (default {MINUTES:g}, with --quick {QUICK_MINUTES:g})")
    add("--json", type=Path, metavar="FILE", help="also write every sample to this file")
    add("--plots", type=Path, metavar="FOLDER", help="also draw the rows' plots in this folder")
    add("--check", action="store_true", help="run the cheap rows and compare them with the run on record")
    add("--keep", action="store_true", help="keep the figures of the run on record, to tell what the next record has moved")
    add("--docs", action="store_true", help="write the tables and plots of the pages on speed from the runs on record")
    arguments = parser.parse_args()
    unknown = set(arguments.row) - set(names)
    if unknown:
        parser.error(f"no such row: {', '.join(sorted(unknown))} (there are {', '.join(names)})")
    arguments.row = arguments.row or [name for name in names if arguments.list or not row_of(name, quick=is_quick).is_extra]
    arguments.minutes = arguments.minutes or (QUICK_MINUTES if arguments.quick else MINUTES)
    return arguments


if __name__ == "__main__":
    sys.exit(main())
