"""The first start of a pool: it ends when every worker is ready, or when one could not start. Nothing is attempted twice."""

import asyncio
from collections.abc import Callable, Collection, Coroutine, Sequence
from typing import TYPE_CHECKING, Any

from percore._common.endings import settle_by, wake
from percore._common.worker_errors import StartupFailed, frozen_hint, how
from percore._serialization.exception_state import text_of
from percore._supervisor.pool_worker import PoolWorker
from percore._supervisor.timing import DeadlineTimer

if TYPE_CHECKING:
    from percore._supervisor.worker_slot import WorkerSlot


class Placeless:
    """Limits how long a runner may be without any worker because there is no place for one, after its first start."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        slots: "Sequence[WorkerSlot]",
        members: Collection[PoolWorker],
        seconds: float,
        over: Callable[[], None],
    ) -> None:
        """`slots`: those in use. `members`: all workers that have not ended. `over` is called after so many seconds without any."""
        self._loop = loop
        self._slots = slots
        self._members = members
        self._seconds = seconds
        self._over = over
        self._timer: DeadlineTimer | None = None

    def look(self, *, is_limited: bool = True) -> None:
        """Start or stop the timer. To be called when a worker starts, or none could. `is_limited`: whether the limit holds now."""
        if is_limited and not self._members and any(slot.lacks_place for slot in self._slots):
            self._timer = self._timer or DeadlineTimer(self._loop, self._seconds, self._over)
        elif self._timer is not None:
            self._timer.cancel()
            self._timer = None


class FirstStart:
    """Waits until every slot has a ready worker. As a context manager it is on from its entry until then, or until its exit."""

    def __init__(self, loop: asyncio.AbstractEventLoop, slots: "Sequence[WorkerSlot]", seconds: float) -> None:
        """`slots`: those in use. `seconds`: how long a worker may wait for a place. (Later a slot may wait for ever.)"""
        self._loop = loop
        self._slots = slots
        self._seconds = seconds
        self.is_on = False
        """Whether workers start for the first time, and not all of them were ready."""
        self._ended: asyncio.Future[None] | None = None
        self._place_timer: DeadlineTimer | None = None
        """Runs while a worker waits for a place."""

    def __enter__(self) -> Callable[[], Coroutine[Any, Any, None]]:
        """Begin, and return a function that waits for the end: it raises the error with which the start fails."""
        self._ended = self._loop.create_future()
        self.is_on = True
        return self._wait

    async def _wait(self) -> None:
        ended = self._ended
        try:
            if ended is not None:
                await ended
        finally:
            del ended  # it holds the error, whose traceback holds this frame: a cycle

    def __exit__(self, *_: object) -> None:
        self._ended, self.is_on = None, False
        self.look_place()

    def look_ready(self) -> None:
        """End the start if every worker is ready. To be called when one is."""
        if self._ended is not None and not self._ended.done() and all(s.current and s.current.is_ready for s in self._slots):
            wake(self._ended)
            self._ended, self.is_on = None, False  # now: a worker that dies before the waiting task continues must be replaced

    def fail(self, error: Exception) -> bool:
        """Let the start fail with this error. Return False if no start is on, or if it has failed already."""
        if self._ended is None or self._ended.done():
            return False
        return settle_by(self._ended, error)

    def look_place(self) -> None:
        """Start or stop the timer of a start that waits for places."""
        if self.is_on and any(slot.lacks_place for slot in self._slots):
            self._place_timer = self._place_timer or DeadlineTimer(self._loop, self._seconds, self._no_place_in_time)
        elif self._place_timer is not None:
            self._place_timer.cancel()
            self._place_timer = None

    def _no_place_in_time(self) -> None:
        waiting = ", ".join(str(slot.index) for slot in self._slots if slot.lacks_place)
        self.fail(StartupFailed(f"there was no place for worker {waiting} within start_timeout={self._seconds:g} s"))


def unready(member: PoolWorker) -> StartupFailed:
    """Return the error of a worker that has reported why it could not start."""
    error = member.failure
    assert error is not None
    failure = StartupFailed(f"worker {member.index} could not start: {type(error).__name__}: {text_of(error)}")
    failure.__cause__ = error
    return failure


def not_ready(member: PoolWorker, last_report: str) -> StartupFailed:
    """Return the error of a dead worker that was never ready."""
    if member.killed_why:
        return StartupFailed(f"worker {member.index} was killed: {member.killed_why}")
    reason = f"worker {member.index} died {how(member.end.code, member.end.why)} before it was ready{frozen_hint()}"
    error = StartupFailed(reason, last_report)
    error.__cause__ = member.failure
    return error
