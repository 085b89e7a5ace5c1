"""Log messages about workers that start and end in order: how long that took, and how many calls they have done."""

import logging
from collections.abc import Sequence

from percore._common.log import report
from percore._supervisor.pool_worker import PoolWorker
from percore._supervisor.worker_slot import WorkerSlot


def worker_starts(member: PoolWorker) -> None:
    """Log that a worker starts. Its pid is often not known yet."""
    report(logging.DEBUG, "%s starts, as number %d of its slot", member.name, member.generation, of=member)


def worker_is_ready(member: PoolWorker, seconds: float, *, replaces_dead: bool) -> None:
    """Log that a worker is ready, `seconds` after its start: at INFO if it replaces one that has died, else at DEBUG."""
    level = logging.INFO if replaces_dead else logging.DEBUG
    took = f"{seconds:.2f}"
    report(level, "%s is ready after %s s, as number %d of its slot", member.name, took, member.generation, of=member)


def worker_has_ended(member: PoolWorker, seconds: float) -> None:
    """Log that a worker that was asked to end has ended, `seconds` after its start."""
    figures = f"{seconds:.1f}", member.done, member.failed
    report(logging.DEBUG, "%s has ended after %s s; calls done: %d, failed: %d", member.name, *figures, of=member)


def workers_are_ready(workers: int, seconds: float) -> None:
    """Log that a runner is open, `seconds` after its start began."""
    report(logging.INFO, "the workers (%d) are ready after %s s", workers, f"{seconds:.2f}")


def workers_have_ended(slots: Sequence[WorkerSlot], seconds: float) -> None:
    """Log that the last worker of a runner has ended, `seconds` after all were ready. `slots`: all that the runner has had."""
    done, failed, retried = (sum(counts) for counts in zip(*(slot.past[:3] for slot in slots), strict=True))
    restarts = sum(slot.restarts for slot in slots)
    report(
        logging.INFO,
        "the workers have ended after %s s; calls done: %d, failed: %d, retried: %d; workers replaced: %d",
        f"{seconds:.1f}",
        done,
        failed,
        retried,
        restarts,
    )
