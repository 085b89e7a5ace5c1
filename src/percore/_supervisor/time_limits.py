"""The `queue_timeout` of calls. One timer serves all of them: when the earliest deadline is over, it looks through the calls.

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

from functools import partial
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Final, Protocol

from percore._common.log import Faults
from percore._protocol.messages import CANCEL, WITHDRAW
from percore._scheduler.deadlines import Pieces, end_of_pause, grain, rounded_up
from percore._supervisor.timing import is_lost

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

    def pending(self) -> list[PendingCall]:
        """Return all calls that have not ended, and maybe some that have."""

    def expire(self, call: PendingCall) -> None:
        """End a call that was not sent, because its time to begin is over."""


class TimeLimits:
    """Keeps the deadlines of the calls of one runner."""

    def __init__(self, calls: Owner, members: set[PoolWorker]) -> None:
        """`members`: all workers that have not ended."""
        self._calls = calls
        self.members = members
        self._loop = calls.loop
        self.hard: HardLimits | None = None
        """Made for the first call with a `hard_timeout`."""
        self.make_hard: Callable[[], HardLimits]
        """The supervisor sets it."""
        self._timer: asyncio.TimerHandle | None = None
        self._seconds = self._begin_by = self._open_until = self._due = 0.0
        self._looked = -inf
        """The latest deadline at the last look. Earlier ones need no further look."""
        self._round: Pieces[PendingCall] | None = None
        """The calls of the current look that are still to be looked at. Deadlines after `_looked` and up to `_until` are due. None
        between two looks."""
        self._until = 0.0
        self._rests_until = -inf
        """The end of the pause after the last look."""
        self.is_in_use = False
        """Whether any call had a `timeout` or a `queue_timeout`. Only then workers are told of them."""

    def limit(self, call: PendingCall, policy: Policy) -> None:
        """Start the clock of a call that is about to be accepted."""
        if policy.timeout is not None and not self.is_in_use:
            self._use()
        if policy.hard_timeout is not None:
            self.hard = self.hard or self.make_hard()
            self.hard.limit(call, policy.hard_timeout)
        seconds = policy.queue_left
        if seconds is None:
            return
        # Most calls share the deadline of the call before: then this is all that they cost.
        if seconds != self._seconds or monotonic() >= self._open_until:
            self._open(seconds, rounded_up(monotonic() + seconds, grain(seconds)))
        call.begin_by = self._begin_by

    def _open(self, seconds: float, begin_by: float) -> None:
        """Let the calls of the next moments have this deadline."""
        if not self.is_in_use:
            self._use()
        self._set_timer(begin_by + SETTLED)
        if self._round is not None:
            self._round.earliest = min(self._round.earliest, begin_by)
        self._seconds, self._begin_by, self._open_until = seconds, begin_by, begin_by - seconds  # only now: they rely on the timer

    def _use(self) -> None:
        self.is_in_use = True
        for member in self.members:
            member.limit()

    def _set_timer(self, when: float) -> None:
        when = max(when, self._rests_until)
        if self._timer is None or when < self._due:
            # Never at once: a loop whose clock has coarse ticks would run the timer again and again until its time has come.
            timer = self._loop.call_later(max(SETTLED, when - monotonic()), self._look)
            if self._timer is not None and self._due <= when:  # that of a call which a garbage collection has made meanwhile
                timer.cancel()
                return
            self._drop_timer()  # only now: if the loop could not make the new one, the old one stays
            self._due, self._timer = when, timer

    def catch_up(self) -> None:
        """Look soon if the loop has lost the timer."""
        if is_lost(self._timer, self._loop):
            self._drop_timer()
            self._set_timer(self._due)
        if self.hard is not None:
            self.hard.catch_up()

    def _look(self) -> None:
        """Look through the next piece of the pending calls. If there are more, the loop does other things before the next one."""
        self._timer = None
        began = monotonic()
        try:
            if self._round is None:
                self._open_until = 0.0  # the next call opens a deadline, and so sets the timer
                self._until = began - SETTLED
                self._round = Pieces(self._calls.pending())
            current = self._round
            due, earliest = self._found(current.piece())
            has_more = current.looked(earliest, monotonic() - began)
            if has_more:
                self._set_timer(began)
            else:
                self._round = None
                self._rests_until = end_of_pause(current.seconds, monotonic())
                if current.earliest < inf:
                    self._set_timer(current.earliest + SETTLED)
            Faults("calls had waited for their queue_timeout").run(*due)
        except BaseException:  # such as a KeyboardInterrupt: look at all of them again, or no caller would hear
            self._round = None
            self._set_timer(began + SETTLED)
            raise
        if not has_more:
            self._looked = self._until  # only now: nobody looks at these calls again

    def _found(self, calls: list[PendingCall]) -> tuple[list[Callable[[], None]], float]:
        """Return steps that end those of these calls whose deadline is due, and the earliest deadline of the others."""
        due: list[Callable[[], None]] = []
        earliest = inf
        for call in calls:
            begin_by = call.begin_by
            if begin_by is None or begin_by <= self._looked:
                continue
            if begin_by > self._until:
                if begin_by < earliest and not call.done():
                    earliest = begin_by
            else:
                due.append(partial(self._expire, call))
        return due, earliest

    def _expire(self, call: PendingCall) -> None:
        """End a call whose time to begin is over, if it has not begun."""
        member: PoolWorker | None = call.member
        if self._calls.phase.is_cut or call.done() or call.is_dropped():
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
        """Stop the timer, since all calls have ended. Idempotent."""
        self._drop_timer()
        self._round = None

    def _drop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


def is_late(call: PendingCall) -> bool:
    """Whether the call has not begun in time. To be asked when its worker has handed it back."""
    begin_by = call.begin_by
    return begin_by is not None and monotonic() >= begin_by


def late(call: PendingCall) -> TimeoutError:
    """Return the error of a call that has not begun in time."""
    plan = call.retry_plan()
    assert plan is not None
    return TimeoutError(f"{call.function.name} did not begin within queue_timeout={plan.policy.queue_timeout:g} s, and never runs")
