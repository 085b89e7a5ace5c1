"""The command: `python -m benchmarks [row ...] [--list] [--quick] [--json FILE] [--plots FOLDER]`. Without rows: all."""

from __future__ import annotations

import argparse
import asyncio
import importlib
import json
import pkgutil
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from benchmarks import _machine, _table, rows
from benchmarks._harness import Result, Row, Verdict, judge, measure

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping
    from types import ModuleType


def row_names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(rows.__path__))


def row_module(name: str) -> ModuleType:
    return importlib.import_module(f"benchmarks.rows.{name}")


def title_of(name: str) -> str:
    """The name and the first line of the row's docstring."""
    return f"{name}: {(row_module(name).__doc__ or '').splitlines()[0]}"


def as_json(result: Result, verdicts: list[Verdict]) -> dict[str, object]:
    """A row's raw samples and its verdicts, for a later reader's own arithmetic."""
    return {
        "samples": {name: [dict(sample) for sample in samples] for name, samples in result.samples.items()},
        "left out": result.absent,
        "targets": [{**asdict(verdict), "reached": verdict.is_reached} for verdict in verdicts],
    }


def write_json(path: Path, machine: Mapping[str, str], figures: Mapping[str, object]) -> None:
    path.write_text(json.dumps({"machine": machine, "rows": figures}, indent=1) + "\n")


def draw(row: Row, result: Result, path: Path) -> str:
    """Make the row's plot, where there is matplotlib; a line that tells."""
    if row.draw is None:
        return "  no plot: this row has none"
    try:
        row.draw(result, path)
    except ModuleNotFoundError as error:
        return f"  no plot: {error}"
    return f"  plot: {path}"


async def measured(name: str, *, quick: bool, plots: Path | None) -> dict[str, object]:
    """Runs one row and prints it; returns what the JSON file has of it."""
    row: Row = row_module(name).row(quick=quick)
    result = await measure(row)
    verdicts = judge(row.targets, result)
    title = f"{title_of(name)} (--quick: fewer calls, no figures to rely on)" if quick else title_of(name)
    show(_table.row_lines(title, result, verdicts, row.words))
    if plots is not None:
        show([draw(row, result, plots / f"{name}.png")])
    return as_json(result, verdicts)


def show(lines: Iterable[str]) -> None:
    for line in lines:
        print(line, flush=True)


def parsed_arguments() -> argparse.Namespace:
    names = row_names()
    parser = argparse.ArgumentParser(prog="python -m benchmarks", description="percore against what people use today")
    parser.add_argument("row", nargs="*", help=f"any of: {', '.join(names)} (default: all)")
    parser.add_argument("--list", action="store_true", help="tell what the rows measure, and run none")
    parser.add_argument("--quick", action="store_true", help="fewer and smaller rounds: does it run, not how fast")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write every sample there")
    parser.add_argument("--plots", type=Path, metavar="FOLDER", help="also draw there what a row has to draw")
    arguments = parser.parse_args()
    unknown = set(arguments.row) - set(names)
    if unknown:
        parser.error(f"no such row: {', '.join(sorted(unknown))} (there are {', '.join(names)})")
    arguments.row = arguments.row or names
    return arguments


def main() -> None:
    arguments = parsed_arguments()
    if arguments.list:
        show(map(title_of, arguments.row))
        return
    if arguments.plots:
        arguments.plots.mkdir(parents=True, exist_ok=True)
    machine = _machine.describe()
    show(_table.machine_lines(machine))
    figures = {}
    for name in arguments.row:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            figures[name] = runner.run(measured(name, quick=arguments.quick, plots=arguments.plots))
    if arguments.json:
        write_json(arguments.json, machine, figures)


if __name__ == "__main__":
    main()
