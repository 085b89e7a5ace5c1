"""The command: `python -m benchmarks [row ...]`. Without rows: all. `--help` tells the rest."""

from __future__ import annotations

import argparse
import json
import os
import signal
import sys
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import _docs, _machine, _plan, _table
from benchmarks._regression import changes, other_machine, settings_of
from benchmarks._results import from_json, to_text
from benchmarks._runs import Request, RowFailed, row_names, row_of, run_row, title_of
from benchmarks._verdicts import judge

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from benchmarks._harness import Result, Row
    from benchmarks._results import Json

MINUTES, QUICK_MINUTES = 30.0, 5.0
CHECK_SECONDS = 60.0
CHECK_LIMIT = 240.0
"""Of a check in all, however slow the machine: rows that it does not come to are not compared."""
CHECK_ROUNDS = 4
"""At least, however slow the machine: fewer have no quartiles to speak of."""


def main() -> int:
    arguments = parsed_arguments()
    signal.signal(signal.SIGTERM, lambda number, _frame: sys.exit(128 + number))  # as Ctrl-C: a row under way is ended first
    if arguments.list:
        show(map(title_of, arguments.row))
    elif arguments.docs:
        show([_docs.write(read(_docs.RECORD), read(_docs.SUPPLEMENT))])
    elif arguments.check:
        return check(read(_docs.RECORD))
    else:
        return run_all(arguments)
    return 0


def run_all(arguments: argparse.Namespace) -> int:
    """Runs the rows, prints them, and writes what was asked for; 1 where a row failed."""
    began = time.monotonic()
    machine = _machine.describe()
    show(_table.machine_lines(machine))
    if _machine.is_busy():
        show(["", "This machine is busy with something else: the figures will say little."])
    made = [(name, row_of(name, quick=arguments.quick)) for name in arguments.row]
    figures: dict[str, Json] = {}
    failed: dict[str, str] = {}
    for number, (name, row) in enumerate(made):
        left = began + arguments.minutes * 60 - time.monotonic()
        share = _plan.share_of([one.seconds for _, one in made[number:]], left)
        if share is None:
            failed[name] = f"the {arguments.minutes:g} minutes were over before its turn"
            continue
        try:
            figures[name] = run_row(name, Request(share.seconds, share.limit, quick=arguments.quick))
        except RowFailed as error:
            failed[name] = str(error)
            show(["", title_of(name), f"  FAILED: {error}"])
        else:
            show(lines_of(name, row, from_json(figures[name]), quick=arguments.quick))
    seconds = time.monotonic() - began
    show(["", f"{len(figures)} rows in {seconds / 60:.1f} minutes", *(f"{name} failed: {why}" for name, why in failed.items())])
    whole = {"machine": machine, "seconds": round(seconds, 1), "rows": figures, "failed": failed}
    if arguments.json:
        arguments.json.parent.mkdir(parents=True, exist_ok=True)
        arguments.json.write_text(to_text(whole))
    if arguments.plots:
        show(draw_all(made, figures, arguments.plots))
    return 1 if failed else 0


def lines_of(name: str, row: Row, result: Result, *, quick: bool) -> Iterable[str]:
    title = f"{title_of(name)} (--quick: fewer calls, no figures to rely on)" if quick else title_of(name)
    return _table.row_lines(title, result, judge(row.targets, result), row.words)


def draw_all(made: Sequence[tuple[str, Row]], figures: Mapping[str, Json], folder: Path) -> Iterable[str]:
    folder.mkdir(parents=True, exist_ok=True)
    for name, row in made:
        if row.draw is not None and name in figures:
            yield draw(row, from_json(figures[name]), folder / f"{name}.png")


def draw(row: Row, result: Result, path: Path) -> str:
    """Make the row's plot, where there is matplotlib; a line that tells."""
    if row.draw is None:
        return "no plot: this row has none"
    try:
        row.draw(result, path)
    except ModuleNotFoundError as error:
        return f"no plot: {error}"
    return f"plot: {path}"


def check(record: Json | None) -> int:
    """Runs the cheap rows and compares them with the record: 1 where one is worse, twice in a row, beyond both spreads."""
    if record is None:
        show([f"No run is on record yet ({_docs.RECORD.name}): nothing to compare with. `make bench-record` makes one."])
        return 0
    differing = other_machine(record["machine"], _machine.describe())
    if _machine.is_busy():
        differing.append("it is busy with something else")
    show(f"not the machine as it was for the record, so only ratios count: {line}" for line in differing)
    rows = {name: row_of(name, quick=False) for name in row_names() if name in record["rows"]}
    rows = {name: row for name, row in rows.items() if row.is_cheap and (row.has_ratios or not differing)}
    worse = 0
    end = time.monotonic() + CHECK_LIMIT
    for name, row in rows.items():
        seconds = CHECK_SECONDS * row.seconds / sum(one.seconds for one in rows.values())
        compared = partial(_compared, name, row, record["rows"][name], seconds, end, ratios_only=bool(differing))
        found = compared()
        if found:  # what only happened once happened to the machine
            found &= compared()
        worse += len(found)
    show([f"{worse} figures are worse than on record" if worse else f"{len(rows)} rows: no figure is worse than on record"])
    return 1 if worse else 0


def _compared(name: str, row: Row, before: Json, seconds: float, end: float, *, ratios_only: bool) -> set[str]:
    """Runs those contestants of a row that its targets name, with the settings on record; the questions that came out worse."""
    left = end - time.monotonic()
    if left < seconds:
        show([f"not compared: {name}, the {CHECK_LIMIT:.0f} s of a check are over"])
        return set()
    limit = min(left, 5 * seconds + 30)
    request = Request(seconds, limit, rounds=CHECK_ROUNDS, only=tuple(sorted(row.judged)), settings=settings_of(before))
    try:
        now = run_row(name, request)
    except RowFailed as error:
        show([f"FAILED     {name}: {error}"])
        return {name}
    found = changes(before, now, ratios_only=ratios_only)
    show(f"{name}: {change.line}" for change in found)
    return {change.question for change in found if change.is_worse}


def read(path: Path) -> Json | None:
    return json.loads(path.read_text()) if path.exists() else None


def show(lines: Iterable[str]) -> None:
    for line in lines:
        print(line, flush=True)


def parsed_arguments() -> argparse.Namespace:
    names = row_names()
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="percore against what people use today")
    parser.add_argument("row", nargs="*", help=f"any of: {', '.join(names)} (default: all)")
    parser.add_argument("--list", action="store_true", help="tell what the rows measure, and run none")
    parser.add_argument(
        "--quick",
        action="store_true",
        default=bool(os.environ.get("QUICK")),
        help="smaller rounds, no settings tried: does it run, not how fast (also: QUICK=1 in the environment)",
    )
    parser.add_argument("--minutes", type=float, help=f"the whole run's time (default {MINUTES:g}, with --quick {QUICK_MINUTES:g})")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every sample there")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="also draw there what a row has to draw")
    parser.add_argument("--check", action="store_true", help="run the cheap rows and compare them with the run on record")
    parser.add_argument("--docs", action="store_true", help="fill the tables of the pages on speed from the runs on record")
    arguments = parser.parse_args()
    unknown = set(arguments.row) - set(names)
    if unknown:
        parser.error(f"no such row: {', '.join(sorted(unknown))} (there are {', '.join(names)})")
    arguments.row = arguments.row or names
    arguments.minutes = arguments.minutes or (QUICK_MINUTES if arguments.quick else MINUTES)
    return arguments


if __name__ == "__main__":
    sys.exit(main())
