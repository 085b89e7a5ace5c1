"""Frozen snapshots of a runner's counters."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerStatistics:
    """One slot of the pool, by its worker of now.

    Attributes:
        index: the slot, from 0.
        generation: how many workers the slot has had.
        pid: of its worker; None where it has none, or not yet.
        state: "starting", "ready", "draining", "finishing", "gone" (a replacement is awaited) or "failed" (its start has
            failed, or percore has given the slot up).
        running: calls that run there. What a worker has not begun, since a coroutine blocks its loop, is queued.
        queued: calls queued ahead there.
        done: calls that have ended in this slot, failures included.
        failed: those of them that raised or died.
        retried: attempts that failed here and were followed by another.
        started_at: the loop's time at which the worker was started; None where there is none.
        loop_lag: seconds from the last ring of its bell to the news that it has read what was rung for, or until now where it
            has not: how late its loop is. None where there is no worker.
        bytes_in: bytes of frames sent to the worker.
        bytes_out: bytes of frames that came from it.
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
    """A runner's counters at one moment: counted by percore, no system is asked.

    Attributes:
        running: calls that run in workers.
        queued: calls that wait, in the supervisor or ahead in workers.
        done: calls that have ended in workers, failures included.
        failed: those of them that raised or died.
        retried: attempts that failed and were followed by another.
        restarts: replacements started.
        workers: a record a slot, by index.
    """

    running: int
    queued: int
    done: int
    failed: int
    retried: int
    restarts: int
    workers: tuple[WorkerStatistics, ...]
