"""Samples the stacks of a program's workers: by faulthandler's handler, which each of them has, or by py-spy.

Stacks tell which calls run and where. Calls that await have no stack: the program's page names their functions.
"""

import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

from percore._attach.programs import ProgramGone, read
from percore._attach.stacks import NoStacks, forget_stacks, stacks_of
from percore._record.samples import AWAITING, Frame, Sample, Stack, from_faulthandler, from_py_spy
from percore._record.tree import short_names

_STEP: Final = 0.002
"""Seconds between two looks at stacks that a worker writes."""

_PERIOD: Final = 0.5
"""Seconds between two pages of a program."""

_PATIENCE: Final = 30.0
"""Seconds that py-spy may take longer than it was asked to sample."""


class Unable(Exception):
    """py-spy cannot sample the program; the text says why."""


@dataclass(slots=True)
class Recording:
    """What was sampled.

    Attributes:
        pid: the program.
        name: the program's name.
        sampler: what has sampled: "faulthandler" or "py-spy".
        seconds: for how long.
        rounds: how often each worker was sampled.
        samples: what was found, with how often.
        names: qualified names of functions by what stacks call them.
    """

    pid: int
    name: str
    sampler: str
    seconds: float = 0.0
    rounds: int = 0
    samples: "Counter[tuple[str, Stack]]" = field(default_factory=Counter)
    names: dict[str, str] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Sample]:
        """Yield the samples, with the functions that percore has called by their qualified names."""
        files = {frame.name: frame.file for _, (frame, *_) in self.samples if frame.file}
        for (worker, (first, *rest)), times in self.samples.items():
            name = first.name.rpartition(".")[2]
            called = Frame(self.names.get(name, first.name), first.file or files.get(name, ""))
            yield Sample(worker, (called, *rest), times)


def record(pid: int, seconds: float, rate: float) -> Recording:
    """Sample all workers `rate` times a second, or as often as they answer, one after the other.

    Ends early with the program, or with Ctrl-C. Workers that do not answer have no samples in that round.

    Raises:
        ProgramGone: there is no such program of percore.
        PermissionError: it belongs to another user.
    """
    pages = read(pid)
    recording = Recording(pid, pages[0]["program"], "faulthandler")
    begun = due = time.monotonic()
    pids: set[int] = set()
    try:
        while (now := time.monotonic()) < begun + seconds:
            due = max(due + 1 / rate, now)
            _round(recording, pages, pids)
            recording.rounds += 1
            time.sleep(max(0.0, due - time.monotonic()))
            pages = read(pid)
    except (KeyboardInterrupt, ProgramGone):
        pass  # what was sampled so far is worth having
    finally:
        recording.seconds = time.monotonic() - begun
        for one in pids:
            forget_stacks(one)
    return recording


def _round(recording: Recording, pages: list[dict[str, Any]], pids: set[int]) -> None:
    for label, worker in _workers(pages):
        try:
            stacks = from_faulthandler(stacks_of(worker["pid"], _STEP))
        except NoStacks:
            continue  # it has ended, or is stopped: the next round asks its successor
        pids.add(worker["pid"])
        recording.samples.update((label, stack) for stack in stacks)
        seen = {stack[0].name for stack in stacks}
        waiting = {call["name"] for call in worker["current"] if call["name"].rpartition(".")[2] not in seen}
        recording.samples.update((label, (Frame(name, ""), AWAITING)) for name in waiting)
    recording.names |= short_names(one["name"] for page in pages for one in page["statistics"]["functions"])


def record_with_py_spy(pid: int, seconds: float, rate: float, py_spy: str) -> Recording:
    """Let py-spy sample all workers, which are not stopped for it.

    Raises:
        ProgramGone: there is no such program of percore.
        PermissionError: it belongs to another user.
        Unable: py-spy may not read the workers' memory, or does not know their version of Python.
    """
    pages = read(pid)
    recording = Recording(pid, pages[0]["program"], "py-spy", seconds, round(seconds * rate))
    recording.names = short_names(one["name"] for page in pages for one in page["statistics"]["functions"])
    options = ["--format", "raw", "--nonblocking", "--idle", "--duration", str(max(1, round(seconds))), "--rate", str(round(rate))]
    with tempfile.TemporaryDirectory(prefix="percore-record-") as folder, ExitStack() as running:
        samplers = []
        for label, worker in _workers(pages):
            out = Path(folder, str(worker["pid"]))
            command = [py_spy, "record", *options, "--pid", str(worker["pid"]), "--output", str(out)]
            process = subprocess.Popen(
                command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
            )
            running.enter_context(process)
            running.callback(process.kill)
            samplers.append((label, out, process))
        running_calls = _watch([process for _, _, process in samplers], pid, seconds, rate)
        failures = [_failure(process) for _, _, process in samplers]
        if samplers and all(failures):
            raise Unable(failures[0])
        for label, out, _ in samplers:
            for stack, count in from_py_spy(out.read_text(errors="replace") if out.exists() else ""):
                recording.samples[label, stack] += count
                running_calls[label, stack[0].name] -= count
    for (label, name), count in (+running_calls).items():  # where a function runs and is on no stack, it awaits
        recording.samples[label, (Frame(recording.names.get(name, name), ""), AWAITING)] += count
    return recording


def _watch(samplers: "list[subprocess.Popen[str]]", pid: int, seconds: float, rate: float) -> "Counter[tuple[str, str]]":
    """Wait for py-spy. Return in how many samples each function has run in each worker, as the program's pages say."""
    found: Counter[tuple[str, str]] = Counter()
    latest = time.monotonic() + seconds + _PATIENCE
    for sampler in samplers:
        while sampler.poll() is None and time.monotonic() < latest:
            with suppress(subprocess.TimeoutExpired):
                sampler.wait(_PERIOD)
            with suppress(ProgramGone):
                names = {(label, call["name"]) for label, worker in _workers(read(pid)) for call in worker["current"]}
                for label, name in names:
                    found[label, name.rpartition(".")[2]] += round(_PERIOD * rate)
    return found


def _failure(process: "subprocess.Popen[str]") -> str:
    """Return why py-spy has failed; empty if it has not."""
    if process.poll() is None:
        return "it did not end"
    assert process.stderr is not None
    said = [line.strip() for line in process.stderr.read().splitlines() if line.strip()]
    return "" if not process.returncode else (said or [f"exit code {process.returncode}"])[-1].removeprefix("Error: ")


def find_py_spy() -> str | None:
    """Return the path of py-spy: beside this interpreter, or on PATH; None if it is not installed."""
    return shutil.which("py-spy", path=str(Path(sys.executable).parent)) or shutil.which("py-spy")


def _workers(pages: list[dict[str, Any]]) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the workers that have a process on this machine, with their names."""
    for page in pages:
        runner = f"runner {page['number']}, " if len(pages) > 1 else ""
        for worker in page["statistics"]["workers"]:
            if worker["pid"] is not None and not worker.get("node"):  # pages of earlier versions say nothing of nodes
                yield f"{runner}worker {worker['index']}", worker
