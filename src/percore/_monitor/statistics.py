"""Statistics and WorkerStatistics: the frozen snapshots that `Runner.statistics` returns."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from percore._monitor.functions import (  # noqa: TC001  # for `get_type_hints`
    FunctionStatistics,
    Percentiles,
    RunningCall,
    WorkerFunctionStatistics,
)
from percore._monitor.tables import Table, duration, mebibytes, size

_HEAD: Final = ("worker", "state", "PID", "running", "queued", "done", "failed", "retried", "restarts", "lag")
_WORDS: Final = frozenset({0, 1})
_HEAD_OF_FUNCTIONS: Final = (
    *("function", "running", "done", "failed", "wait p50", "wait p99", "run p50", "run p99", "payload p50"),
)


@dataclass(frozen=True, slots=True)
class WorkerStatistics:
    """The counters of one worker slot: its current worker, and the totals of all workers it has had.

    Attributes:
        index: the number of the slot, from 0.
        generation: how many workers the slot has had.
        pid: process id of the current worker; None if there is none, or its process does not exist yet.
        state: "starting", "ready", "draining", "finishing", "gone" (a replacement has not started yet) or "failed" (the start
            failed, or percore has given up the slot).
        running: calls that run in the worker. Calls that it holds and has not begun, for example because a coroutine blocks its
            event loop, count as queued.
        queued: calls that the worker holds and has not begun.
        done: calls that have ended in this slot, including failures.
        failed: calls that have ended with an exception or with the death of their worker. `done` includes them.
        retried: failed attempts in this slot that were followed by another attempt.
        started_at: when the worker was started, as `loop.time()` of the runner's event loop; None if there is no worker.
        loop_lag: how late the worker's event loop is, in seconds: how long it took to read the last message, or how long it has
            not read it so far. None if there is no worker.
        blocked_for: for how many seconds the worker's event loop has been blocked, once that is at least `blocked_after`; else 0.
        blocked_by: the function that blocks it: module and qualified name, or the name alone if it is no call's. None: nobody can
            tell, or it is not blocked.
        bytes_in: bytes of the frames sent to the current worker; of a worker that is a thread, the number of messages.
        bytes_out: the same of what was received from it.
        restarts: replacements started in this slot.
        restarts_for_memory: those of them whose reason was `max_memory_per_worker`.
        memory: bytes of memory that the current worker had at the last sample, about a second ago, shared memory left out. None
            without `max_memory_per_worker`, and before the first sample.
        current: the calls that run in the current worker, the oldest first; at most 16 of them.
        run: how many seconds the slot's calls have run; None until there are samples.
        node: the name of the current worker's node; None without a worker, or where the workers run on the program's own machine.
        functions: one record per function of which calls have begun in this slot, the one that has run longest in all first.
            Empty with PERCORE_METRICS=0.
        given_up: workers of this slot whose threads were left running, because a thread cannot be killed. 0 for processes.
        thread_ids: the system's ids of the current worker's threads, if it is threads of the program; else empty.
    """

    index: int
    generation: int
    pid: int | None
    state: str
    running: int
    queued: int
    done: int
    failed: int
    retried: int
    started_at: float | None
    loop_lag: float | None
    blocked_for: float
    bytes_in: int
    bytes_out: int
    restarts: int
    restarts_for_memory: int
    memory: int | None
    current: tuple[RunningCall, ...] = ()
    run: Percentiles | None = None
    node: str | None = None
    functions: tuple[WorkerFunctionStatistics, ...] = ()
    given_up: int = 0
    thread_ids: tuple[int, ...] = ()
    blocked_by: str | None = None


@dataclass(frozen=True, slots=True)
class Statistics:
    """A runner's counters at one moment. percore counts them itself and makes no system calls for them.

    `str()` of it is a readable table with a line for each worker and a line of totals. `lag` is `loop_lag`, in milliseconds. With
    `max_memory_per_worker` it has a column `memory`, and with workers on other nodes a column `node`. Only the totals count the
    calls that wait in the supervisor. A second table has a line for each function, and below it stands the advice about functions
    whose pickling takes longer than their work.

    A notebook shows both tables.

    Attributes:
        running: calls that run in workers.
        queued: calls that wait, in the supervisor or in workers.
        done: calls that have ended in workers, including failures.
        failed: calls that have ended with an exception or with the death of their worker. `done` includes them.
        retried: failed attempts that were followed by another attempt.
        restarts: replacements started.
        workers: one record per slot, by index.
        functions: one record per function that has begun, in the order of their first calls. Empty with PERCORE_METRICS=0.
        given_up: workers whose threads were left running, because a thread cannot be killed. 0 for processes.
    """

    running: int
    queued: int
    done: int
    failed: int
    retried: int
    restarts: int
    workers: tuple[WorkerStatistics, ...]
    functions: tuple[FunctionStatistics, ...] = ()
    given_up: int = 0

    def __str__(self) -> str:
        if not self.functions:
            return self._table().text()
        advice = "".join(f"\n{one.name}: {one.advice}" for one in self.functions if one.advice)
        return f"{self._table().text()}\n\n{self._table_of_functions().text()}{advice}"

    def _repr_html_(self) -> str:
        """Return the tables for a notebook."""
        from html import escape  # as in `Table`

        if not self.functions:
            return self._table().html()
        advice = "".join(f"<p>{escape(one.name)}: {escape(one.advice)}</p>" for one in self.functions if one.advice)
        return self._table().html() + self._table_of_functions().html() + advice

    def _table_of_functions(self) -> Table:
        rows = [(one.name, str(one.running), str(one.ended), str(one.failed), *_figures(one)) for one in self.functions]
        return Table(_HEAD_OF_FUNCTIONS, rows, frozenset({0}))

    def _table(self) -> Table:
        head: tuple[str, ...] = _HEAD
        rows: list[tuple[str, ...]] = [
            (str(one.index), one.state, "-" if one.pid is None else str(one.pid), *_counts(one), _lag(one.loop_lag))
            for one in self.workers
        ]
        rows.append(("total", "", "", *_counts(self), ""))
        sizes = [one.memory for one in self.workers]
        if any(size is not None for size in sizes):  # otherwise nothing samples it
            shown = ["-" if size is None else mebibytes(size) for size in (*sizes, sum(size or 0 for size in sizes))]
            head, rows = (*head, "memory"), [(*row, size) for row, size in zip(rows, shown, strict=True)]
        nodes = [one.node for one in self.workers]
        if any(nodes):  # otherwise this machine is the only one
            head, rows = (*head, "node"), [(*row, node or "") for row, node in zip(rows, [*nodes, ""], strict=True)]
        return Table(head, rows, _WORDS | {len(head) - 1} if any(nodes) else _WORDS)


def _counts(of: WorkerStatistics | Statistics) -> tuple[str, ...]:
    return tuple(map(str, (of.running, of.queued, of.done, of.failed, of.retried, of.restarts)))


def _figures(of: FunctionStatistics) -> tuple[str, ...]:
    wait, run = of.wait, of.run
    seconds = (None, None) if wait is None else (wait.p50, wait.p99), (None, None) if run is None else (run.p50, run.p99)
    return (*(duration(one) for pair in seconds for one in pair), size(None if of.payload is None else of.payload.p50))


def _lag(seconds: float | None) -> str:
    return "-" if seconds is None else f"{1000 * seconds:.1f} ms"
