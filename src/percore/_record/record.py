"""The command `percore record`: samples where a program's workers are, and writes a flame graph."""

import os
import sys
from pathlib import Path

from percore._attach.programs import ProgramGone, why_refused
from percore._record.output import as_html, as_speedscope
from percore._record.outside import outside_samplers
from percore._record.recorder import OnlyThreads, Recording, Unable, record_from_outside
from percore._record.recorder import record as record_with_faulthandler


def record(pid: int, output: str, *, seconds: float, rate: float, sampler: str) -> int:
    """Run the command. Return its exit status: 1 if there is nothing to show or nowhere to write it."""
    path = Path(output)
    if path.suffix not in (".html", ".json"):
        return _failed(f"{output}: the name ends with .html (a page with a flame graph) or .json (for speedscope)")
    if not path.parent.is_dir() or path.is_dir() or not os.access(path if path.exists() else path.parent, os.W_OK):
        return _failed(f"{output} cannot be written")
    try:
        recording = _sample(pid, seconds, rate, sampler)
    except ProgramGone:
        return _failed(f"process {pid} has ended, or it has no runner that can be watched: percore top lists those that can")
    except PermissionError:
        return _failed(f"process {pid} {why_refused(pid)}: percore record samples what the system shows to this user")
    except OnlyThreads:
        return _failed(
            f"the workers of process {pid} are threads, which percore record cannot ask: py-spy (pip install py-spy) can sample "
            "them, and so can profiling.sampling of Python 3.15, where they know the program's version of Python"
        )
    except Unable as error:
        return _failed(f"{sampler} cannot sample process {pid}: {error}. --sampler faulthandler needs no permission")
    if not recording.samples:
        return _failed(f"process {pid} has run no call of percore for {recording.seconds:.0f} seconds: nothing is written")
    try:
        path.write_text(as_html(recording) if path.suffix == ".html" else as_speedscope(recording), encoding="utf-8")
    except OSError as error:  # the disk is full, for example
        return _failed(f"{output} cannot be written: {error.strerror}")
    found = sum(recording.samples.values())
    print(f"{path}: {found} samples in {recording.seconds:.1f} s by {recording.sampler}")
    return 0


def _sample(pid: int, seconds: float, rate: float, sampler: str) -> Recording:
    candidates = [one for one in outside_samplers() if sampler in ("auto", one.name)]
    if not candidates and sampler not in ("auto", "faulthandler"):
        raise Unable("it is not installed (pip install py-spy)" if sampler == "py-spy" else "it comes with Python 3.15")
    for one in candidates:
        try:
            return record_from_outside(pid, seconds, rate, one)
        except Unable as error:
            if sampler == one.name:
                raise
            print(f"percore record: {one.name} cannot sample process {pid}: {error}", file=sys.stderr)
    return record_with_faulthandler(pid, seconds, rate)


def _failed(text: str) -> int:
    print(f"percore record: {text}", file=sys.stderr)
    return 1
