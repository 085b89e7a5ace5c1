"""The rows there are, and how one is run: in a process of its own, killed with all that it started when it takes too long."""

from __future__ import annotations

import importlib
import json
import os
import pkgutil
import signal
import subprocess
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from benchmarks import rows

if TYPE_CHECKING:
    from collections.abc import Mapping

    from benchmarks._harness import Row
    from benchmarks._results import Json

_ROOT = Path(__file__).parents[1]
_LAST_WORDS = 12
"""Lines of a failed row's standard error that are shown."""


class RowFailed(Exception):
    """The row gave no result; the sentence says why."""


@dataclass(frozen=True, slots=True)
class Request:
    """What to run of a row. After `seconds` it begins no round beyond `rounds`, after `limit` seconds it is killed."""

    seconds: float
    limit: float
    rounds: int = 1
    quick: bool = False
    only: tuple[str, ...] | None = None
    settings: Mapping[str, str] = field(default_factory=dict)

    def to_json(self) -> str:
        # A quick run tries no settings: it takes the first of each.
        asked = {
            "seconds": self.seconds,
            "rounds": self.rounds,
            "quick": self.quick,
            "only": self.only,
            "settings": dict(self.settings),
        }
        return json.dumps({**asked, "untried": self.quick})


def row_names() -> list[str]:
    return sorted(module.name for module in pkgutil.iter_modules(rows.__path__))


def row_of(name: str, *, quick: bool) -> Row:
    row: Row = importlib.import_module(f"benchmarks.rows.{name}").row(quick=quick)
    return row


def title_of(name: str) -> str:
    """The name and the first line of the row's docstring."""
    words = importlib.import_module(f"benchmarks.rows.{name}").__doc__ or ""
    return f"{name}: {words.splitlines()[0]}"


def run_row(name: str, request: Request) -> Json:
    """Runs a row, and returns its result as JSON. Nothing that it started is left, however it ends.

    Raises RowFailed.
    """
    with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryFile("w+") as errors:
        output = Path(folder) / "row.json"
        command = [sys.executable, "-m", "benchmarks._one_row", name, request.to_json(), str(output)]
        process = subprocess.Popen(command, cwd=_ROOT, stdin=subprocess.DEVNULL, stderr=errors, process_group=0)
        try:
            process.wait(request.limit)
        except subprocess.TimeoutExpired:
            raise RowFailed(f"it was stopped after {request.limit:.0f} s") from None
        finally:
            with suppress(ProcessLookupError):  # all of its group have ended
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        if process.returncode:
            errors.seek(0)
            said = "".join(errors.readlines()[-_LAST_WORDS:])
            raise RowFailed(f"it ended with status {process.returncode}:\n{said}")
        result: Json = json.loads(output.read_text())
        return result
