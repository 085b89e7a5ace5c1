"""The rates of keys: each key that has one has a gate, which counts the starts of its calls. One timer serves all gates.

A call passes its gate when a worker is chosen for it, so a call that waits for its rate holds no place. How the gate learns when
the call began:

1. The call is sent. Until the gate knows more, the call counts as one that may begin at any moment.
2. Its worker sets the call's start mark, with the time, just before it begins the call.
3. The gate looks at the mark when it has to know: before it turns another call away, when its timer ends, and when the call has
   left its worker. Where the engine cannot read the marks of a living worker, the worker announces the start (STARTED).

A call that has left its worker without a mark has not begun, and is not counted. If the worker has died, the mark tells, too. Of a
worker whose node was lost nobody can tell: its calls count.
"""

from __future__ import annotations

from functools import partial
from math import inf
from time import monotonic
from typing import TYPE_CHECKING, Any, Final, Protocol

from percore._calls.policy import DEFAULT, CallPlan
from percore._common.log import Faults
from percore._scheduler.buckets import Bucket
from percore._scheduler.deadlines import Deadlines
from percore._supervisor.timing import is_lost

if TYPE_CHECKING:
    import asyncio

    from percore._calls.calls import PendingCall
    from percore._calls.policy import Policy
    from percore._common.rates import Rate
    from percore._scheduler.dispatch import Dispatch
    from percore._scheduler.key_names import Name
    from percore._supervisor.pool_worker import PoolWorker

_PLENTY: Final = 64
"""If so many calls may begin now, and as a burst, the gate lets a quarter of them pass without looking at a clock or at marks."""

_SOONEST: Final = 0.001
"""Seconds until the timer, at least: a loop whose clock has coarse ticks would run it again and again until its time has come."""

_LATEST: Final = 86_400.0
"""Seconds until the timer, at most: event loops have limits of their own. It is then set again."""

_FEW: Final = 64


class Progress(Protocol):
    """The supervisor."""

    def advance(self) -> None:
        """Send all calls that can be sent now."""


class Gate:
    """The gate of one key. It implements `percore._scheduler.lanes.Gate`."""

    __slots__ = ("_rates", "asked", "bucket", "due", "ended", "held", "is_shut", "name", "own", "passes", "wakes_at")

    def __init__(self, rates: Rates, name: Name) -> None:
        self.name = name
        self.bucket = Bucket(None)
        self.asked: Rate | None = None
        """The rate in the options of the last call that had one."""
        self.own: Rate | None = None
        """The rate that `set_rate` has set. It goes before `asked`."""
        self.held: dict[PendingCall, PoolWorker] = {}
        """Calls that were given to a worker and have not left it. Not those whose start is counted."""
        self.ended = 0
        """Calls that have left their workers and are not in `bucket` yet."""
        self.passes = 0
        """How many calls may pass without a look at the clock."""
        self.is_shut = False
        self.due = 0.0
        """When the gate will be opened, if it is shut."""
        self.wakes_at = inf
        """When the timer will look at the gate; infinity: never."""
        self._rates = rates

    def take(self, call: PendingCall, member: PoolWorker) -> bool:
        """Count a call that this worker gets now, if it may begin now."""
        if not self.passes and not self._rates.may_pass(self):
            return False
        self.passes -= 1
        if self._rates.announces:
            _announce(call)
        self.held[call] = member
        return True

    def left(self, call: PendingCall) -> None:
        """Note that a call has left its worker."""
        member = self.held.pop(call, None)
        if member is None:  # its start is counted
            return
        if self.passes:
            self.ended += 1
        elif (at := _began(call, member)) is not None:
            self.bucket.began(at)
        else:
            self._rates.reopen(self)

    def unsent(self, call: PendingCall) -> None:
        """Note that a call was not sent."""
        if self.held.pop(call, None) is not None:
            self._rates.reopen(self)

    def look(self) -> None:
        """Count the calls that have begun."""
        for call, member in self.held.copy().items():
            if member.calls.get(getattr(call, "call_id", 0)) is not call or call.call_id in member.parked:
                continue  # it is about to be sent, or waits for a slot
            begun, age, _ = member.fate(call)
            if begun and age is not None:
                self.began(call, monotonic() - age)

    def began(self, call: PendingCall, at: float) -> None:
        """Note when a call began."""
        if self.held.pop(call, None) is not None:
            self.bucket.began(at)

    def open(self) -> None:
        """Open the gate, which is shut."""
        self.is_shut = False
        self.look()  # first: `due` was the earliest time, as long as their starts were not known
        self.bucket.opened(monotonic())

    def settle(self, now: float) -> None:
        """Enter the calls that have ended into the bucket."""
        if self.ended:
            self.bucket.began(now, self.ended)
            self.ended = 0

    def change(self, now: float) -> bool:
        """Use the rate that holds now. Return whether it is another one."""
        rate = self.own or self.asked
        if rate == self.bucket.rate:
            return False
        self.settle(now)
        self.bucket.change(rate, now)
        self.passes = 0
        return True


class Rates:
    """The gates of one runner."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, dispatch: Dispatch[Any, PoolWorker], progress: Progress, *, sees_starts: bool
    ) -> None:
        """`sees_starts`: as `Engine.sees_starts`."""
        self._loop = loop
        self._dispatch = dispatch
        self._progress = progress
        self.announces = not sees_starts
        """Whether workers have to announce the starts of calls."""
        self._gates: dict[Name, Gate] = {}
        self._enough = _FEW
        self._wakes: Deadlines[Gate] = Deadlines()
        self._timer: asyncio.TimerHandle | None = None
        self._due = 0.0
        self._is_advancing = False

    def __len__(self) -> int:
        """Number of keys that have a gate."""
        return len(self._gates)

    def limit(self, call: PendingCall, policy: Policy) -> None:
        """Let the key of a call that is about to be accepted have the rate of its options. A call without a key has none."""
        name = call.key
        if name is None:
            return
        gate = self._gates.get(name)
        if gate is None or gate.asked is not policy.rate:
            self._ask(gate or self._add(name), policy.rate)

    def _ask(self, gate: Gate, rate: Rate | None) -> None:
        gate.asked = rate
        if gate.own is None and gate.change(monotonic()):
            self._open(gate)
            self._advance_soon()

    def set(self, name: Name, rate: Rate | None, after: float) -> None:
        """Give a key this rate, from `after` seconds on; until then no call of it begins. None: the rate that its calls ask for."""
        gate = self._gates.get(name)
        if gate is None:
            if rate is None and not after:
                return
            gate = self._add(name)
        now = monotonic()
        gate.own = rate
        gate.change(now)
        gate.bucket.paused_until = now + after
        gate.settle(now)
        gate.passes = 0
        self._open(gate)
        self._advance_soon()

    def began(self, call: PendingCall) -> None:
        """Note that a worker has announced the start of a call."""
        gate = self._gates.get(call.key)
        if gate is not None:
            gate.began(call, monotonic())

    def may_pass(self, gate: Gate) -> bool:
        """Whether a call may begin now: then the gate lets one or more pass. If not, the gate is shut."""
        now, bucket = monotonic(), gate.bucket
        gate.settle(now)
        free = bucket.free(now, len(gate.held))
        if free <= 0 and gate.held:
            gate.look()
            free = bucket.free(now, len(gate.held))
        if free > 0:
            # Those that pass later, without a look, may all begin at once: no more than a part of the burst.
            most = free if bucket.rate is None else min(free, bucket.rate.burst)
            gate.passes = most // 4 if most >= _PLENTY else 1
            return True
        gate.is_shut = True
        gate.due = bucket.shut(now, len(gate.held))
        self._wake_at(gate)
        return False

    def _wake_at(self, gate: Gate) -> None:
        """Let the timer look at a gate when it is due."""
        if gate.due < gate.wakes_at:
            self._wakes.sweep(_needs_no_timer)
            self._wakes.add(gate.due, gate)
            gate.wakes_at = gate.due
            self._set_timer()

    def reopen(self, gate: Gate) -> None:
        """Open a gate, if it is shut, because a call that it had counted has not begun. The caller lists the key's calls."""
        if gate.is_shut:
            gate.open()
            self._advance_soon()

    def _advance_soon(self) -> None:
        """Let the supervisor send calls, but not now: the caller may be handling a call, or about to queue one."""
        if not self._is_advancing:
            self._is_advancing = True
            self._loop.call_soon(self._advance)

    def _advance(self) -> None:
        self._is_advancing = False
        self._progress.advance()

    def stop(self) -> None:
        """Stop the timer, since all calls have ended. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def catch_up(self) -> None:
        """Set the timer again if the loop has lost it, and let calls begin."""
        if is_lost(self._timer, self._loop):
            self.stop()
            self._set_timer()
        if self._is_advancing:
            self._advance()

    def _set_timer(self) -> None:
        when = self._wakes.next()
        if when is not None and (self._timer is None or when < self._due):
            self.stop()
            self._due = when
            self._timer = self._loop.call_later(min(max(_SOONEST, when - monotonic()), _LATEST), self._wake)

    def _wake(self) -> None:
        self._timer = None
        now = monotonic()
        due = self._wakes.due(now)
        for gate in due:
            gate.wakes_at = inf
        steps = [partial(self._open if gate.due <= now else self._wake_at, gate) for gate in due if gate.is_shut]
        Faults("keys could begin calls by their rates").run(*steps, self._set_timer, self._progress.advance)

    def _open(self, gate: Gate) -> None:
        if gate.is_shut:
            try:
                gate.open()
            finally:  # whatever the look at marks raises, such as a Ctrl-C: nothing else would list the calls
                self._dispatch.opened(gate.name)

    def _add(self, name: Name) -> Gate:
        """Make a gate for a key that has none. Now and then drop those of idle keys that count nothing any more."""
        if len(self._gates) >= self._enough:
            now = monotonic()
            for gate in list(self._gates.values()):
                self._drop_idle(gate, now)
            self._enough = max(_FEW, 2 * len(self._gates))
        gate = self._gates[name] = Gate(self, name)
        self._dispatch.guard(name, gate)
        return gate

    def _drop_idle(self, gate: Gate, now: float) -> None:
        gate.settle(now)
        is_idle = not gate.held and self._dispatch.keys.is_idle(gate.name)
        if is_idle and gate.own is None and gate.bucket.is_full(now):
            self._dispatch.guard(gate.name, None)
            del self._gates[gate.name]


def _needs_no_timer(gate: Gate) -> bool:
    """Whether a gate that is about to be swept from the timer's list is open. It is listed again when it is next shut."""
    if gate.is_shut:
        return False
    gate.wakes_at = inf
    return True


def _announce(call: PendingCall) -> None:
    """Let the worker announce the start of a call that is about to be sent, whether its own options have a rate or not."""
    plan = call.retry_plan()
    if plan is None:
        plan = call.plan = CallPlan(DEFAULT)  # type: ignore[misc]  # a call with a key is no batch: its plan can be set
    plan.announce()


def _began(call: PendingCall, member: PoolWorker) -> float | None:
    """Return when a call that has left its worker began, or a later time; None if it has not begun."""
    begun, age, _ = member.fate(call)
    if begun is None and call.plan is not None and call.plan.announces and not member.life.is_gone:
        begun = False  # its worker would have announced the start; that of one whose node was lost may be lost, too
    return None if begun is False else monotonic() - (age or 0.0)
