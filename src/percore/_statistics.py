"""Statistics and WorkerStatistics: the frozen snapshots that `Runner.statistics` returns."""

from __future__ import annotations

import sys
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

    from percore._pool import Slot
    from percore._supervisor import Supervisor

_has_gil: Callable[[], bool] = getattr(sys, "_is_gil_enabled", lambda: True)


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
        bytes_in: bytes of the frames sent to the current worker.
        bytes_out: bytes of the frames received from the current worker.
        restarts: replacements started in this slot.
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
    bytes_in: int
    bytes_out: int
    restarts: int


@dataclass(frozen=True, slots=True)
class Statistics:
    """A runner's counters at one moment. percore counts them itself and makes no system calls for them.

    Attributes:
        running: calls that run in workers.
        queued: calls that wait, in the supervisor or in workers.
        done: calls that have ended in workers, including failures.
        failed: calls that have ended with an exception or with the death of their worker. `done` includes them.
        retried: failed attempts that were followed by another attempt.
        restarts: replacements started.
        workers: one record per slot, by index.
    """

    running: int
    queued: int
    done: int
    failed: int
    retried: int
    restarts: int
    workers: tuple[WorkerStatistics, ...]


def snapshot(supervisor: Supervisor, *, is_here: bool) -> Statistics:
    """Return the statistics of a runner. `is_here`: whether this is the thread of its loop; any thread may call this."""
    may_look = is_here or _has_gil()
    workers = tuple(_of_slot(supervisor, slot, may_look) for slot in supervisor.slots)
    return Statistics(
        running=sum(worker.running for worker in workers),
        queued=sum(worker.queued for worker in workers) + supervisor.waiting(),
        done=sum(worker.done for worker in workers),
        failed=sum(worker.failed for worker in workers),
        retried=sum(worker.retried for worker in workers),
        restarts=sum(worker.restarts for worker in workers),
        workers=workers,
    )


def _of_slot(supervisor: Supervisor, slot: Slot, may_look: bool) -> WorkerStatistics:
    # The loop's thread may bury a worker meanwhile. It adds the worker's counts to slot.past before it removes the worker from the
    # members; so read both again until slot.past is unchanged.
    past, members = slot.past, tuple(supervisor.members)
    while past is not slot.past:
        past, members = slot.past, tuple(supervisor.members)
    member = slot.current
    # A worker that drains counts together with its replacement.
    members = tuple(other for other in members if other.index == slot.index and other.generation != past.generation)
    counts = [other.statistics(supervisor.options.threads, may_look=may_look) for other in members]
    channel = None if member is None else member.worker.channel
    return WorkerStatistics(
        index=slot.index,
        generation=slot.generation,
        pid=None if member is None else member.pid,
        state="failed" if slot.is_failed else "gone" if member is None else member.life.state.value,
        running=sum(running for running, _ in counts),
        queued=sum(queued for _, queued in counts),
        done=past.done + sum(other.done for other in members),
        failed=past.failed + sum(other.failed for other in members),
        retried=past.retried + sum(other.retried for other in members),
        started_at=None if member is None else member.started_at,
        loop_lag=None if channel is None else channel.lag(),
        bytes_in=0 if channel is None else channel.tx.written,
        bytes_out=0 if channel is None else channel.rx.read,
        restarts=slot.restarts,
    )
