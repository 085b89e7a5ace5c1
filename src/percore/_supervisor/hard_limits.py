"""The `hard_timeout` of calls. The supervisor keeps the clock, since the worker may be blocked. One timer serves all calls.

The start mark tells when a call began. The supervisor looks at it when the limit has passed since the call was accepted, and again
when the rest has passed. So a call that ends in time costs no message. Where the engine cannot read the marks of a living worker,
the worker announces the start instead (STARTED).
"""

from __future__ import annotations

from functools import partial
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, Protocol

from percore._common.log import Faults
from percore._protocol.messages import CANCEL
from percore._scheduler.deadlines import Deadlines, Pieces, end_of_pause, grain, rounded_up
from percore._scheduler.overruns import Overruns, Step, steps, waits
from percore._supervisor.timing import LATENESS, is_lost

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Callable

    from percore._calls.calls import PendingCall
    from percore._scheduler.dispatch import Dispatch
    from percore._scheduler.phase import RunnerPhase
    from percore._supervisor.pool_worker import PoolWorker
    from percore._supervisor.retries import Retries

_SOONEST: Final = 0.001

_LATE: Final = 0.02
"""Seconds of lateness of the timer from which on calls may have ended whose outcomes were not read yet."""


class Owner(Protocol):
    """The registry of the calls."""

    loop: asyncio.AbstractEventLoop
    phase: RunnerPhase
    retries: Retries
    dispatch: Dispatch[Any, PoolWorker]

    def pending(self) -> list[PendingCall]:
        """Return all calls that have not ended, and maybe some that have."""


class Killer(Protocol):
    """The pool."""

    def supersede(self, member: PoolWorker) -> None:
        """Let a worker drain, and start its replacement."""

    def kill_one(self, member: PoolWorker, why: str) -> None:
        """Kill a worker."""


class HardLimits:
    """Keeps the hard timeouts of the calls of one runner."""

    def __init__(self, calls: Owner, pool: Killer, kill_after: float, *, sees_starts: bool) -> None:
        """`sees_starts`: as `Engine.sees_starts`."""
        self._calls = calls
        self._loop = calls.loop
        self._pool = pool
        self._kill_after = kill_after
        self._announces = not sees_starts
        self._steps: Deadlines[Callable[[], None]] = Deadlines()
        self.overruns: Overruns[PoolWorker] = Overruns()
        self._timer: asyncio.TimerHandle | None = None
        self._due = self._seconds = self._until = 0.0
        self._round: Pieces[PendingCall] | None = None
        """The calls of the current look that are still to be looked at; None between two looks."""
        self._rests_until = -inf
        """The end of the pause after the last look."""
        self._has_let_read = False
        """Whether the last look was put off, so that the loop reads the workers' messages first."""

    def limit(self, call: PendingCall, seconds: float) -> None:
        """Watch a call that is about to be accepted."""
        if self._announces:
            plan = call.retry_plan()
            assert plan is not None
            plan.announce()
        # Most calls share the time of the call before: then this is all that they cost. It is too early for them, which only means
        # one look more at those that still run then.
        if seconds != self._seconds:
            until = monotonic() + seconds
            self._set_timer(max(until, self._rests_until))
            if self._round is not None:
                self._round.earliest = min(self._round.earliest, until)
            self._seconds, self._until = seconds, until  # only now: the calls that follow rely on the timer
        call.hard_by = self._until

    def _set_timer(self, when: float) -> None:
        if self._timer is None or when < self._due:
            timer = self._loop.call_later(max(_SOONEST, when - monotonic()), self._look)
            if self._timer is not None and self._due <= when:  # that of a call which a garbage collection has made meanwhile
                timer.cancel()
                return
            self._drop_timer()  # only now: if the loop could not make the new one, the old one stays
            self._due, self._timer = when, timer

    def stop(self) -> None:
        """Stop the timer, since all calls have ended. Idempotent."""
        self._drop_timer()
        self._round = None

    def _drop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def catch_up(self) -> None:
        """Look soon if the loop has lost the timer."""
        if is_lost(self._timer, self._loop):
            self._drop_timer()
            self._set_timer(self._due)

    def _look(self) -> None:
        """Look through the next piece of the pending calls. If there are more, the loop does other things before the next one."""
        self._timer = None
        now = monotonic()
        if now - self._due > _LATE and not self._has_let_read:
            # A callback has held the loop up. If it was a reader, uvloop runs timers before other readers: calls may have ended.
            self._has_let_read = True
            self._set_timer(now + _SOONEST)
            return
        self._has_let_read = False
        try:
            if self._round is None:
                self._seconds = 0.0  # the next call sets the timer
                self._round = Pieces(self._calls.pending())
            current = self._round
            limited = [call for call in current.piece() if call.hard_by is not None]
            due = [call for call in limited if call.hard_by <= now]  # type: ignore[operator]
        except BaseException:  # such as a KeyboardInterrupt: look again, or no call would ever exceed its limit
            self._set_timer(now + _SOONEST)
            raise
        try:
            Faults("calls exceeded their hard_timeout").run(
                *(partial(self._look_at, call, now) for call in due), *self._steps.due(now)
            )
        finally:
            earliest = min((when for call in limited if (when := call.hard_by) is not None and when > now), default=inf)
            if current.looked(earliest, monotonic() - now):
                self._set_timer(now)
            else:
                self._round = None
                self._rests_until = end_of_pause(current.seconds, monotonic())
                if current.earliest < inf:
                    self._set_timer(max(current.earliest, self._rests_until))
            if (step := self._steps.next()) is not None:
                self._set_timer(step)

    def _look_at(self, call: PendingCall, now: float) -> None:
        """Look whether a call has exceeded its limit, and set the time of the next look."""
        if _is_over(call):
            return
        plan = call.retry_plan()
        assert plan is not None
        limit = plan.policy.hard_timeout
        assert limit is not None
        member: PoolWorker | None = call.member
        rest = limit
        call.hard_by = now + limit
        if member is not None and call.call_id not in member.parked:
            begun, age, _ = member.fate(call)
            if begun is None and plan.started is not None:
                begun, age = True, now - plan.started
            rest = waits(limit, begun=bool(begun), age=age)
        if member is not None and not rest:
            rest = limit  # for its next attempt
            if not self.overruns.has(member, call.call_id) and not self._calls.phase.is_cut:  # a close cancels and kills by itself
                self._overran(call, member)
        call.hard_by = rounded_up(now + rest, min(grain(limit), _SOONEST))

    def _overran(self, call: PendingCall, member: PoolWorker) -> None:
        """Decide what follows the call when it has ended, then cancel it."""
        plan, call_id, name = call.retry_plan(), call.call_id, call.function.name
        assert plan is not None
        limit = plan.policy.hard_timeout
        why = f"{name} had not ended kill_after={self._kill_after:g} s after its hard_timeout={limit:g} s"
        now = monotonic()
        for due in steps(self._kill_after):
            when = now + due.seconds
            self._steps.add(when, partial(self._step, due.step, member, call_id, why, when))
        if not call.done() and plan.late is None:
            delay, error = self._calls.retries.next(call, TimeoutError(f"{name} ran for longer than hard_timeout={limit:g} s"))
            plan.late, plan.verdict = (0.0, error) if delay is None else (delay, None)
        if member.calls.get(call_id) is not call:  # retry_on or backoff has ended it
            return
        if self.overruns.began(member, call_id):
            member.pause(self._calls.dispatch.times_ahead)
            self._calls.dispatch.rest(member, is_resting=True)
        member.tell(CANCEL, call_id, None)

    def _step(self, step: Step, member: PoolWorker, call_id: int, why: str, when: float) -> None:
        if call_id not in member.calls:
            return
        if step is Step.REPLACE:
            self._pool.supersede(member)
        elif monotonic() - when < LATENESS:
            self._pool.kill_one(member, why)
        else:  # give it the time once more in which this process did not run
            when = monotonic() + self._kill_after
            self._steps.add(when, partial(self._pool_kill, member, call_id, why))

    def _pool_kill(self, member: PoolWorker, call_id: int, why: str) -> None:
        if call_id in member.calls:
            self._pool.kill_one(member, why)

    def look(self) -> None:
        """Let the workers go on whose overruns have ended. To be called when calls have ended."""
        for member, call_ids in self.overruns.workers():
            ended = {call_id for call_id in call_ids if call_id not in member.calls}
            if ended and self.overruns.ended(member, ended):
                member.go_on()
                self._calls.dispatch.rest(member, is_resting=False)


def _is_over(call: PendingCall) -> bool:
    """Whether the call has ended, in its worker too: a call that was cancelled or abandoned may run on there."""
    member: PoolWorker | None = call.member
    return call.done() and (member is None or member.calls.get(call.call_id) is not call)
