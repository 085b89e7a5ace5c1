"""Programs that read stacks from a worker's memory: py-spy, and profiling.sampling of Python 3.15. The system has to permit it."""

import importlib.util
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final, Protocol, TypeAlias

from percore._record.samples import Stack, from_py_spy, from_sampling, paths_in

Found: TypeAlias = Iterator[tuple[str, Stack, int]]
"""Threads, the user's part of their stacks, and in how many samples these were."""


class Outside(Protocol):
    """A program that samples one worker.

    Attributes:
        name: as the option `--sampler` has it.
    """

    name: str

    def command(self, pid: int, out: Path, seconds: float, rate: float) -> list[str]:
        """Return the command that samples a worker and writes to `out`."""

    def read(self, out: Path) -> Found:
        """Return what was written to `out`."""


class PySpy:
    """py-spy, which is installed beside this interpreter or on PATH."""

    name = "py-spy"

    def __init__(self, path: str) -> None:
        self._path = path

    def command(self, pid: int, out: Path, seconds: float, rate: float) -> list[str]:
        options = ["--format", "raw", "--threads", "--nonblocking", "--idle"]
        times = ["--duration", str(max(1, round(seconds))), "--rate", str(round(rate))]
        return [self._path, "record", *options, *times, "--pid", str(pid), "--output", str(out)]

    def read(self, out: Path) -> Found:
        return from_py_spy(out.read_text(errors="replace"))


class Sampling:
    """profiling.sampling of this interpreter, which reads workers of the same version."""

    name = "profiling.sampling"
    _command: Final = (sys.executable, "-P", "-m", "profiling.sampling")

    def command(self, pid: int, out: Path, seconds: float, rate: float) -> list[str]:
        times = ["--duration", str(max(1, round(seconds))), "--sampling-rate", str(round(rate))]
        return [*self._command, "attach", "--all-threads", *times, "--binary", "--output", str(out), str(pid)]

    def read(self, out: Path) -> Found:
        # Its collapsed stacks have the last parts of paths alone, and its JSON lines whole paths and no stacks.
        paths = paths_in(self._replayed(out, "--jsonl"))
        return from_sampling(self._replayed(out, "--collapsed"), paths)

    def _replayed(self, out: Path, form: str) -> str:
        path = out.with_suffix(form.replace("--", "."))
        command = [*self._command, "replay", form, "--output", str(path), str(out)]
        subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True)
        return path.read_text(errors="replace") if path.exists() else ""  # it writes nothing if it has seen nothing


def find_py_spy() -> str | None:
    """Return the path of py-spy: beside this interpreter, or on PATH; None if it is not installed."""
    return shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which("py-spy")


def outside_samplers() -> list[Outside]:
    """Return those that there are, the best one first."""
    has_sampling = sys.version_info >= (3, 15) and importlib.util.find_spec("profiling.sampling") is not None
    py_spy = find_py_spy()
    found: list[Outside] = [Sampling()] if has_sampling else []
    return [*found, PySpy(py_spy)] if py_spy is not None else found
