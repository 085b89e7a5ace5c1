"""Samples the stacks of a program's workers: by faulthandler's handler, which each of them has, or by a program from outside.

Stacks tell which calls run and where. Calls that await have no stack: the program's page names their functions.
"""

import re
import subprocess
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from typing import Any, Final

from percore._attach.programs import ProgramGone, read
from percore._attach.stacks import NoStacks, forget_stacks, stacks_of
from percore._record.calls import Calls, Seen, attributed, begun_by, calls_in
from percore._record.outside import Outside
from percore._record.samples import AWAITING, Frame, Sample, Stack, from_faulthandler
from percore._record.tree import short_names

_STEP: Final = 0.002
"""Seconds between two looks at stacks that a worker writes."""

_PERIOD: Final = 0.5
"""Seconds between two pages of a program."""

_PATIENCE: Final = 30.0
"""Seconds that a program from outside may take longer than it was asked to sample."""

_ROUGHLY: Final = 0.05
"""The part of all rounds by which what pages say may differ from what was sampled: the two have not begun at once."""

_PROGRAM: Final = ""
"""In place of a worker: the program itself, whose threads its workers are."""

Pages = list[dict[str, Any]]


class Unable(Exception):
    """A program from outside cannot sample the workers; the text says why."""


class OnlyThreads(Exception):
    """The workers are threads of the program, which write no stacks when they are asked."""


@dataclass(slots=True)
class Recording:
    """What was sampled.

    Attributes:
        pid: the program.
        name: the program's name.
        sampler: what has sampled: "faulthandler" or the name of a program from outside.
        start: when it began, by the monotonic clock.
        seconds: for how long.
        rounds: how often each worker was sampled.
        samples: what was found, with how often.
        by_call: the same by worker, call and stack. Each call that awaited counts for itself.
        names: qualified names of functions by what stacks call them.
    """

    pid: int
    name: str
    sampler: str
    start: float = 0.0
    seconds: float = 0.0
    rounds: int = 0
    samples: "Counter[tuple[str, Stack]]" = field(default_factory=Counter)
    by_call: "Counter[tuple[str, str, Stack]]" = field(default_factory=Counter)
    names: dict[str, str] = field(default_factory=dict)

    def __iter__(self) -> Iterator[Sample]:
        """Yield the samples, with the functions that percore has called by their qualified names."""
        files = self._files()
        for (worker, stack), times in self.samples.items():
            yield Sample(worker, self._named(stack, files), times)

    def calls(self) -> Iterator[Sample]:
        """Yield the same by call."""
        files = self._files()
        for (worker, call, stack), times in self.by_call.items():
            yield Sample(worker, self._named(stack, files), times, call)

    def add(self, found: Iterable[tuple[str, str, Stack, int]]) -> None:
        """Add what was found by call."""
        for worker, call, stack, times in found:
            self.by_call[worker, call, stack] += times

    def _files(self) -> dict[str, str]:
        return {frame.name: frame.file for _, (frame, *_) in self.samples if frame.file}

    def _named(self, stack: Stack, files: dict[str, str]) -> Stack:
        first, *rest = stack
        name = first.name.rpartition(".")[2]
        return (Frame(self.names.get(name, first.name), first.file or files.get(name, "")), *rest)


def record(pid: int, seconds: float, rate: float) -> Recording:
    """Sample all workers `rate` times a second, or as often as they answer, one after the other.

    Ends early with the program, or with Ctrl-C. Workers that do not answer have no samples in that round.

    Raises:
        ProgramGone: there is no such program of percore.
        PermissionError: it belongs to another user.
        OnlyThreads: its workers are threads.
    """
    pages = read(pid)
    if _threads(pages) and not any(worker["pid"] for _, _, worker in _workers(pages)):
        raise OnlyThreads
    begun = due = time.monotonic()
    rounds = _Rounds(Recording(pid, pages[0]["program"], "faulthandler", begun))
    try:
        while (now := time.monotonic()) < begun + seconds:
            due = max(due + 1 / rate, now)
            rounds.take(pages)
            time.sleep(max(0.0, due - time.monotonic()))
            pages = read(pid)
    except (KeyboardInterrupt, ProgramGone):
        pass  # what was sampled so far is worth having
    finally:
        rounds.finish()
        rounds.recording.seconds = time.monotonic() - begun
        for one in rounds.pids:
            forget_stacks(one)
    return rounds.recording


class _Rounds:
    """Takes the samples of faulthandler. Those of one page wait for the next one, which tells which calls have run on."""

    def __init__(self, recording: Recording) -> None:
        self.recording = recording
        self.pids: set[int] = set()
        """The workers that have written stacks."""
        self._waiting: list[list[Seen]] = []
        self._calls: Calls = {}
        self._numbers = count(1)
        self._at: list[float] = []

    def take(self, pages: Pages) -> None:
        """Sample all workers once."""
        self.settle(pages)
        seen: list[Seen] = []
        for label, _, worker in _workers(pages):
            if worker["pid"] is None:
                continue
            try:
                found = from_faulthandler(stacks_of(worker["pid"], _STEP))
            except NoStacks:
                continue  # it has ended, or is stopped: the next round asks its successor
            self.pids.add(worker["pid"])
            seen += [Seen(label, thread, stack) for thread, stack in found]
            names = {stack[0].name for _, stack in found}
            waiting = {call["name"] for call in worker["current"] if call["name"].rpartition(".")[2] not in names}
            self.recording.samples.update((label, (Frame(name, ""), AWAITING)) for name in waiting)
        self.recording.samples.update((one.worker, one.stack) for one in seen)
        self.recording.names |= short_names(one["name"] for page in pages for one in page["statistics"]["functions"])
        self.recording.rounds += 1
        self._waiting.append(seen)

    def settle(self, pages: Pages) -> None:
        """If these pages are new, find out to which calls the samples belong that wait for them."""
        at = [page["at"] for page in pages]
        if at == self._at:
            return
        calls = calls_in(_workers(pages), self._calls, self._numbers)
        for seen in self._waiting:
            self.recording.add(attributed(seen, self._calls, calls, self.recording.start))
        self._waiting, self._calls, self._at = [], calls, at

    def finish(self) -> None:
        """Do so for the last samples. Calls that were not short when the last page was written are taken to have run on."""
        long = begun_by(self._calls, max(self._at, default=0.0) - _PERIOD)
        for seen in self._waiting:
            self.recording.add(attributed(seen, self._calls, long, self.recording.start))


def record_from_outside(pid: int, seconds: float, rate: float, sampler: Outside) -> Recording:
    """Let a program sample all workers, which are not stopped for it.

    Raises:
        ProgramGone: there is no such program of percore.
        PermissionError: it belongs to another user.
        Unable: it may not read the workers' memory, or does not know their version of Python.
    """
    pages = read(pid)
    recording = Recording(pid, pages[0]["program"], sampler.name, time.monotonic(), seconds, round(seconds * rate))
    recording.names = short_names(one["name"] for page in pages for one in page["statistics"]["functions"])
    try:
        found, running_calls, last = _sampled(pages, seconds, rate, sampler)
    except OSError as error:  # it cannot be started, or the disk is full
        raise Unable(str(error)) from error
    threads = _threads(pages) | _threads(last)  # a pool has started some meanwhile
    seen = [one for one in (_of_worker(one, threads) for one in found) if one is not None]
    for one in seen:
        recording.samples[one.worker, one.stack] += one.times
        running_calls[one.worker, one.stack[0].name.rpartition(".")[2]] -= one.times
    for (label, name), times in running_calls.items():  # where a function runs and is on no stack, it awaits
        if times > _ROUGHLY * recording.rounds:
            recording.samples[label, (Frame(recording.names.get(name, name), ""), AWAITING)] += times
    numbers = count(1)
    before = calls_in(_workers(pages), {}, numbers)
    after = calls_in(_workers(last), before, numbers)
    recording.add(attributed(seen, before, after, recording.start, recording.rounds))
    return recording


def _sampled(pages: Pages, seconds: float, rate: float, sampler: Outside) -> "tuple[list[Seen], Counter[tuple[str, str]], Pages]":
    """Let a program sample all workers. Return what it has seen, and what `_watch` returns.

    Raises:
        Unable: it has sampled no worker.
        OSError: it cannot be started, or there is no room for what it writes.
    """
    sampled = [(label, int(worker["pid"])) for label, _, worker in _workers(pages) if worker["pid"]]
    if _threads(pages):
        sampled.append((_PROGRAM, pages[0]["pid"]))
    begun: list[tuple[str, Path, subprocess.Popen[bytes]]] = []
    with tempfile.TemporaryDirectory(prefix="percore-record-") as folder, ExitStack() as running:
        for label, pid in sampled:
            out = Path(folder, str(pid))
            with _said(out).open("wb") as errors:  # no pipe, which the program would fill before anybody reads it
                command = sampler.command(pid, out, seconds, rate)
                process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=errors)
            running.enter_context(process)
            running.callback(process.kill)
            begun.append((label, out, process))
        running_calls, last = _watch([process for _, _, process in begun], pages, seconds, rate)
        failures = [_failure(process, out) for _, out, process in begun]
        if begun and all(failures):
            raise Unable(failures[0])
        found = [seen for label, out, _ in begun for seen in _read(sampler, label, out)]
    return found, running_calls, last


def _read(sampler: Outside, label: str, out: Path) -> list[Seen]:
    """Return what was seen in a worker: nothing if that was cut short, because it has ended."""
    if out.exists():
        with suppress(subprocess.CalledProcessError, ValueError, LookupError):
            return [Seen(label, *one) for one in sampler.read(out)]
    return []


def _watch(
    samplers: "list[subprocess.Popen[bytes]]", pages: Pages, seconds: float, rate: float
) -> "tuple[Counter[tuple[str, str]], Pages]":
    """Wait for the samplers.

    Return in how many samples each function has run in each worker, as the program's pages say, and the last of these pages.
    """
    found: Counter[tuple[str, str]] = Counter()
    readings = 0
    latest = time.monotonic() + seconds + _PATIENCE
    for sampler in samplers:
        while sampler.poll() is None and time.monotonic() < latest:
            with suppress(subprocess.TimeoutExpired):
                sampler.wait(_PERIOD)
            with suppress(ProgramGone):
                pages = read(pages[0]["pid"])
                names = {(label, call["name"]) for label, _, worker in _workers(pages) for call in worker["current"]}
                found.update({(label, name.rpartition(".")[2]) for label, name in names})
                readings += 1
    return Counter({key: round(times * seconds * rate / readings) for key, times in found.items()}), pages


def _said(out: Path) -> Path:
    """Return the file with the standard error of the program that writes `out`."""
    return out.with_suffix(".errors")


def _failure(process: "subprocess.Popen[bytes]", out: Path) -> str:
    """Return why a program from outside has failed; empty if it has not. `out`: what it writes."""
    if process.poll() is None:
        return "it did not end"
    said = [line.strip() for line in _said(out).read_text(errors="replace").splitlines() if line.strip()]
    return "" if not process.returncode else (said or [f"exit code {process.returncode}"])[-1].removeprefix("Error: ")


def _of_worker(seen: Seen, threads: dict[int, str]) -> Seen | None:
    """Return what was seen in a thread of the program as seen in its worker; None: the thread belongs to no worker."""
    if seen.worker != _PROGRAM:
        return seen
    number = re.search(r"\d+", seen.thread)
    label = threads.get(int(number[0])) if number else None
    return None if label is None else seen._replace(worker=label)


def _threads(pages: Pages) -> dict[int, str]:
    """Return the names of the workers that are threads of the program, by the ids of their threads."""
    return {thread: label for label, _, worker in _workers(pages) for thread in worker.get("thread_ids", ())}


def _workers(pages: Pages) -> Iterator[tuple[str, float, dict[str, Any]]]:
    """Yield the workers on this machine that have begun, with their names and the times of their pages."""
    for page in pages:
        runner = f"runner {page['number']}, " if len(pages) > 1 else ""
        for worker in page["statistics"]["workers"]:
            # Pages of earlier versions say nothing of nodes and threads.
            if (worker["pid"] is not None or worker.get("thread_ids")) and not worker.get("node"):
                yield f"{runner}worker {worker['index']}", page["at"], worker
