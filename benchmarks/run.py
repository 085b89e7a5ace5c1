"""The rows there are, and how one is run: in a process of its own, which is killed with all its children if it takes too long."""

from __future__ import annotations

import asyncio
import importlib
import json
import os
import pkgutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import rows
from benchmarks.harness import ROWS, Row, Wanted, measure
from benchmarks.results import as_json, judge

if TYPE_CHECKING:
    from collections.abc import Sequence

    from benchmarks.results import Json

_ROOT = Path(__file__).parents[1]

_LAST_WORDS = 12
"""Lines of a failed row's standard error that are shown."""

_QUICK = 6
"""A quick run plays one round in a sixth of the time."""

_SHARED = 0.85
"""Part of the remaining time that is shared: a row that takes longer than its share does not shorten another."""

_AT_LEAST = 3.0
"""Seconds without which no row begins: it could hardly start its contestants."""

_PLAY = "import sys; from benchmarks.run import play; play(*sys.argv[1:])"
"""As a command, and not as a module: processes that a peer spawns import the main module again."""


class RowFailed(Exception):
    """The row gave no result; the sentence says why."""


@dataclass(frozen=True, slots=True)
class Share:
    """A row plays no further round after `seconds`, and is killed after `limit` seconds."""

    seconds: float
    limit: float


def share_of(wishes: Sequence[float], left: float) -> Share | None:
    """The share of the first of the remaining rows, by the seconds that each wishes; None: there is no time for it.

    If the remaining time is not enough, all get less in proportion.
    """
    if left < _AT_LEAST:
        return None
    seconds = wishes[0] * min(1.0, left * _SHARED / sum(wishes))
    return Share(seconds, min(left, 2 * seconds + 20))


def row_names() -> list[str]:
    for module in pkgutil.iter_modules(rows.__path__):
        importlib.import_module(f"benchmarks.rows.{module.name}")
    return sorted(ROWS)


@cache
def row_of(name: str, *, quick: bool) -> Row:
    """Made once, because some rows take a second to make. Raises KeyError for a name that no row has."""
    row_names()
    row = ROWS[name](quick)
    return replace(row, rounds=1, seconds=row.seconds / _QUICK) if quick else row


def title_of(name: str) -> str:
    """The name and the first line of the row's docstring."""
    row_names()
    return f"{name}: {(ROWS[name].__doc__ or '').splitlines()[0]}"


def run_row(name: str, wanted: Wanted, limit: float) -> Json:
    """Runs a row for at most `limit` seconds, and returns its result as JSON. None of its processes remains, however it ends.

    Raises RowFailed.
    """
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as errors:
        output = Path(folder) / "row.json"
        command = [sys.executable, "-c", _PLAY, name, json.dumps(asdict(wanted)), str(output)]
        process = subprocess.Popen(command, cwd=_ROOT, stdin=subprocess.DEVNULL, stderr=errors, process_group=0)
        try:
            process.wait(limit)
        except subprocess.TimeoutExpired:
            raise RowFailed(f"it was stopped after {limit:.0f} s") from None
        finally:
            with suppress(ProcessLookupError):  # all processes of its group have ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.returncode:
            errors.seek(0)
            said = "".join(errors.readlines()[-_LAST_WORDS:])
            raise RowFailed(f"it ended with status {process.returncode}:\n{said}")
        result: Json = json.loads(output.read_text())
        return result


def play(name: str, request: str, output: str) -> None:
    """The process of one row."""
    import uvloop

    wanted = Wanted(**json.loads(request))
    row = row_of(name, quick=wanted.quick)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        result = runner.run(measure(row, wanted))
    Path(output).write_text(json.dumps(as_json(result, judge(row.targets, result))))
