"""What `percore top` and the dashboard show: pages, with rates between two readings and what the system says of processes."""

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from percore._monitor.usage import ProcessUsage, ThreadsMeter, ThreadsUsage, UsageMeter

LATE: Final = 2.0
"""Seconds after the time for the next page from which on the program's event loop counts as blocked."""

Page = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Worker:
    """One worker.

    Attributes:
        runner: the number of its runner in the program, from 1.
        figures: its WorkerStatistics, by the names of the attributes, without `functions`: see `Function.workers`.
        node: the name of its node; empty: this machine.
        usage: what the system says of its process, or of its threads; None: nothing.
        calls: calls that have ended in a second; None: not known yet.
        bytes: bytes sent and received in a second; None: not known yet.
    """

    runner: int
    figures: dict[str, Any]
    node: str
    usage: ProcessUsage | ThreadsUsage | None
    calls: float | None
    bytes: float | None


@dataclass(frozen=True, slots=True)
class Share:
    """The part of a function's calls that one worker has.

    Attributes:
        worker: the number of the worker.
        node: the name of its node; empty: this machine.
        figures: the WorkerFunctionStatistics, by the names of the attributes.
        calls: calls that have ended in a second; None: not known yet.
    """

    worker: int
    node: str
    figures: dict[str, Any]
    calls: float | None


@dataclass(frozen=True, slots=True)
class Function:
    """One function of one runner.

    Attributes:
        runner: the number of the runner.
        figures: its FunctionStatistics, by the names of the attributes.
        calls: calls that have ended in a second; None: not known yet.
        workers: its figures by worker. A page has them for the functions that took the most time of each worker.
    """

    runner: int
    figures: dict[str, Any]
    calls: float | None
    workers: Sequence[Share]


@dataclass(frozen=True, slots=True)
class View:
    """One moment of a program.

    Attributes:
        pid: its process id.
        name: its name.
        blocked_for: for how many seconds its event loop has been blocked; 0: it is not, or it is at rest.
        supervisor: what the system says of its process.
        totals: running, queued, done, failed, retried and restarts of all runners.
        calls: calls that have ended in a second; None: not known yet.
        workers: the workers of all runners.
        functions: the functions of all runners.
    """

    pid: int
    name: str
    blocked_for: float
    supervisor: ProcessUsage | None
    totals: dict[str, int]
    calls: float | None
    workers: Sequence[Worker]
    functions: Sequence[Function]


_TOTALS: Final = ("running", "queued", "done", "failed", "retried", "restarts")


@dataclass(slots=True)
class Model:
    """Turns the pages of one program into views. Rates count from the reading before."""

    pid: int
    _meter: UsageMeter = field(default_factory=UsageMeter)
    _threads_meter: ThreadsMeter = field(default_factory=ThreadsMeter)
    _before: dict[int, Page] = field(default_factory=dict)
    _shown: dict[int, Page] = field(default_factory=dict)

    def view(self, pages: Sequence[Page]) -> View:
        """Return the view of these pages, which were read now."""
        now = time.monotonic()
        before, shown = self._before, self._shown
        self._before, self._shown = {}, {page["number"]: page for page in pages}  # nothing is kept of runners that have closed
        for number, page in self._shown.items():  # a page that has not changed keeps the rates that it had
            last = shown.get(number)
            earlier = last if last is not None and last["at"] != page["at"] else before.get(number)
            if earlier is not None:
                self._before[number] = earlier
        # A process on another node has a pid there, which here is that of any process, or of none.
        local = (one for page in pages for one in page["statistics"]["workers"] if not _node(one))
        pids = {one["pid"]: "" for one in local if one["pid"] is not None}
        usage = {one.pid: one for one in self._meter.measure({self.pid: "", **pids}).processes}
        threads = self._threads(pages)
        workers = [one for page in pages for one in self._workers(page, usage, threads)]
        rates = [one.calls for one in workers if one.calls is not None]
        return View(
            pid=self.pid,
            name=pages[0]["program"] or "python",
            blocked_for=max(_late(page, now) for page in pages),
            supervisor=usage.get(self.pid),
            totals={name: sum(page["statistics"][name] for page in pages) for name in _TOTALS},
            calls=sum(rates) if rates else None,
            workers=workers,
            functions=[one for page in pages for one in self._functions(page)],
        )

    def _threads(self, pages: Sequence[Page]) -> dict[tuple[int, ...], ThreadsUsage | None]:
        """Return the usage of workers that are threads of the program, by the ids of their threads."""
        groups = [found for page in pages for one in page["statistics"]["workers"] if (found := _thread_ids(one))]
        return dict(zip(groups, self._threads_meter.measure(self.pid, groups), strict=True)) if groups else {}

    def _workers(
        self, page: Page, usage: dict[int, ProcessUsage], threads: dict[tuple[int, ...], ThreadsUsage | None]
    ) -> list[Worker]:
        number, seconds, before = self._since(page)
        old = {(one["index"], one["generation"]): one for one in before["workers"]} if before else {}
        ended = {one["index"]: one["done"] for one in before["workers"]} if before else {}
        found = []
        elsewhere = {(one["role"], one["pid"]): ProcessUsage(**one) for one in page.get("elsewhere", ())}
        for one in page["statistics"]["workers"]:
            was = old.get((one["index"], one["generation"]))
            moved = None if was is None else one["bytes_in"] + one["bytes_out"] - was["bytes_in"] - was["bytes_out"]
            done = None if one["index"] not in ended else one["done"] - ended[one["index"]]
            figures = {name: value for name, value in one.items() if name != "functions"}
            used = elsewhere.get(_role(one)) if _node(one) else usage.get(one["pid"]) or threads.get(_thread_ids(one))
            found.append(Worker(number, figures, _node(one), used, _rate(done, seconds), _rate(moved, seconds)))
        return found

    def _functions(self, page: Page) -> list[Function]:
        number, seconds, before = self._since(page)
        old = {one["name"]: one["ended"] for one in before["functions"]} if before else {}
        shares = self._shares(page)
        return [
            Function(
                runner=number,
                figures=one,
                calls=_rate(one["ended"] - old.get(one["name"], 0) if before else None, seconds),
                workers=shares.get(one["name"], ()),
            )
            for one in page["statistics"]["functions"]
        ]

    def _shares(self, page: Page) -> dict[str, list[Share]]:
        """Return the figures of functions by worker, by the name of the function."""
        _, seconds, before = self._since(page)
        old = {(worker["index"], one["name"]): one["ended"] for worker, one in _of_workers(before)} if before else {}
        found: dict[str, list[Share]] = {}
        for worker, one in _of_workers(page["statistics"]):
            was = old.get((worker["index"], one["name"])) if before else None
            calls = _rate(None if was is None else one["ended"] - was, seconds)
            found.setdefault(one["name"], []).append(Share(worker["index"], _node(worker), one, calls))
        return found

    def _since(self, page: Page) -> tuple[int, float, dict[str, Any] | None]:
        """Return the number of the runner, and the statistics before these with how many seconds lie between them."""
        number, before = page["number"], self._before.get(page["number"])
        if before is None:
            return number, 0.0, None
        if page["due"] is None and time.monotonic() - page["at"] > LATE:  # at rest: nothing has ended since
            return number, 1.0, page["statistics"]
        return number, page["at"] - before["at"], before["statistics"]


def _node(worker: dict[str, Any]) -> str:
    """Return the node of a worker, as its page says. Pages of earlier versions say nothing."""
    return worker.get("node") or ""


def _role(worker: dict[str, Any]) -> tuple[str, Any]:
    """Return the role and the process id of a worker, as records of usage have them."""
    return f"worker {worker['index']}", worker["pid"]


def _thread_ids(worker: dict[str, Any]) -> tuple[int, ...]:
    """Return the ids of a worker's threads, as its page says. Pages of earlier versions say nothing."""
    return tuple(worker.get("thread_ids", ()))


def _of_workers(statistics: dict[str, Any]) -> Iterator[tuple[dict[str, Any], dict[str, Any]]]:
    """Yield each worker with the figures of each of its functions. Pages of earlier versions have none."""
    for worker in statistics["workers"]:
        for one in worker.get("functions", ()):
            yield worker, one


def _late(page: Page, now: float) -> float:
    due = page["due"]
    return now - page["at"] if due is not None and now - due > LATE else 0.0


def _rate(count: int | None, seconds: float) -> float | None:
    return None if count is None or seconds <= 0 else max(0, count) / seconds
