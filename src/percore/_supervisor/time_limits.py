"""The `queue_timeout` of calls. One timer serves all of them.

A caller must not be told that its call never ran if the call runs. While the call waits here, nothing can begin it. Once it
was sent, its worker may begin it at any moment, may be blocked or stopped, and may not answer. So the worker knows the deadline,
too:

1. The worker sets the call's start mark.
2. The worker looks at the clock. After the deadline it clears the mark, hands the call back, and runs nothing of it.

The supervisor looks at the mark after the deadline. If it is not set by then, step 2 comes later than the deadline: the call will
never begin, and its caller is told at once. If the mark is set, the call has begun, or its worker hands it back as soon as it can.
Where the engine cannot read the marks of a living worker, the worker is asked to hand the call back, and its answer decides.
"""

from __future__ import annotations

from time import monotonic
from typing import TYPE_CHECKING, Final, Protocol
from weakref import ref

from percore._protocol.messages import CANCEL, WITHDRAW
from percore._scheduler.deadlines import Deadlines, grain, rounded_up

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from percore._calls.calls import PendingCall
    from percore._calls.policy import Policy
    from percore._scheduler.phase import RunnerPhase
    from percore._supervisor.hard_limits import HardLimits
    from percore._supervisor.pool_worker import PoolWorker

SETTLED: Final = 0.002
"""Seconds after which a start mark that was set is seen here. The caches of two CPUs agree in microseconds."""


class Owner(Protocol):
    """The registry of the calls."""

    loop: asyncio.AbstractEventLoop
    phase: RunnerPhase

    def expire(self, call: PendingCall) -> None:
        """End a call that was not sent, because its time to begin is over."""


class TimeLimits:
    """Keeps the deadlines of the calls of one runner."""

    def __init__(self, calls: Owner, members: set[PoolWorker]) -> None:
        """`members`: all workers that have not ended."""
        self._calls = calls
        self.members = members
        self._loop = calls.loop
        self._begins: Deadlines[ref[PendingCall]] = Deadlines()
        self.hard: HardLimits
        """The supervisor sets it."""
        self._timer: asyncio.TimerHandle | None = None
        self._seconds = self._begin_by = self._due = 0.0
        self._append: Callable[[ref[PendingCall]], None]
        self.is_in_use = False
        """Whether any call had a `queue_timeout`. Only then workers are told by when calls must begin."""

    def limit(self, call: PendingCall, policy: Policy) -> None:
        """Start the clock of a call that is about to be accepted."""
        if policy.hard_timeout is not None:
            self.hard.limit(call, policy.hard_timeout)
        seconds = policy.queue_left
        if seconds is None:
            return
        when = monotonic() + seconds
        # Most calls share the deadline of the call before: then this is all that they cost.
        if seconds != self._seconds or when >= self._begin_by:
            self._open(seconds, rounded_up(when, grain(seconds)))
        call.begin_by = self._begin_by
        self._append(ref(call))

    def _open(self, seconds: float, begin_by: float) -> None:
        """Let the next calls have this deadline."""
        if not self.is_in_use:
            self.is_in_use = True
            for member in self.members:
                member.limit()
        self._begins.sweep(_is_over)
        self._seconds, self._begin_by = seconds, begin_by
        self._append = self._begins.at(begin_by + SETTLED).append
        self._set_timer()

    def _close(self) -> None:
        """Let the next call open a deadline of its own: lists of calls may have been dropped."""
        self._begin_by = 0.0

    def _set_timer(self) -> None:
        when = self._begins.next()
        if when is not None and (self._timer is None or when < self._due):
            self.stop()
            self._due = when
            # Never at once: a loop whose clock has coarse ticks would run the timer again and again until its time has come.
            self._timer = self._loop.call_later(max(SETTLED, when - monotonic()), self._look)

    def _look(self) -> None:
        self._timer = None
        self._close()
        try:
            for one in self._begins.due(monotonic()):
                call = one()
                if call is not None and not _is_over(one):
                    self._expire(call)
        finally:
            self._set_timer()

    def _expire(self, call: PendingCall) -> None:
        """End a call whose time to begin is over, if it has not begun."""
        member: PoolWorker | None = call.member
        if self._calls.phase.is_cut:
            return
        if member is None or call.call_id in member.parked:
            self._calls.expire(call)
            return
        begun = member.fate(call).begun
        if begun is None:
            member.tell(WITHDRAW, call.call_id, None)
        elif not begun:
            call.abandon(late(call))
            member.tell(CANCEL, call.call_id, None)

    def stop(self) -> None:
        """Stop the timer. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def _is_over(one: ref[PendingCall]) -> bool:
    call = one()
    return call is None or call.done() or call.is_dropped() or call.begin_by is None


def is_late(call: PendingCall) -> bool:
    """Whether the call has not begun in time. To be asked when its worker has handed it back."""
    begin_by = call.begin_by
    return begin_by is not None and monotonic() >= begin_by


def late(call: PendingCall) -> TimeoutError:
    """Return the error of a call that has not begun in time."""
    plan = call.retry_plan()
    assert plan is not None
    return TimeoutError(f"{call.function.name} did not begin within queue_timeout={plan.policy.queue_timeout:g} s, and never runs")
