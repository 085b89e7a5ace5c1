"""Calls on the supervisor's side, pickled and ready to send.

`PendingCall` is the one interface of all kinds of calls, and `CallBase` what they have in common:

    Awaited    a call of `run`; `Planned` is one with a policy, and `Limited` one with time limits or a rate
    Call       a call of `submit`, of a broadcast, or of `run` if its end releases something; a future itself
    Job        a call of an executor (in `_executor.jobs`)
    Item       an item of a map, sent singly (in `_calls.items`)
    Batch      several items of a map in one message (in `_calls.items`)
    StreamCall a stream, whose items arrive before its outcome (in `_calls.streams`)

The arguments of a call are pickled once, when it is made. Later changes to them have no effect, and a retry on another worker sends
the same bytes.
"""

import asyncio
from collections.abc import Callable, Hashable
from contextlib import suppress
from math import inf
from typing import Any, ClassVar, Protocol

from percore._calls.functions import Function
from percore._calls.policy import CallPlan, Policy
from percore._common.endings import settle, settle_by
from percore._common.errors import CUT_OFF, RunnerClosed
from percore._common.tracing import Span
from percore._protocol.interfaces import Fate
from percore._protocol.messages import BrokenFrame, Payload
from percore._scheduler.queues import Queue


class Owner(Protocol):
    """The owner of the calls of a runner. A cancelled call notifies it."""

    def cancelled(self, call: Any) -> None: ...


class Outcome(Protocol):
    """The receiver of one outcome: a single call, or one item of a batch."""

    body: Any
    """The body of the message; None for a batch and its items, which hold nothing that has to be released."""

    accepted: int
    """The mark of its meter, if its wait is measured; else 0."""

    forwards: bool
    """Whether its outcome goes to another worker, as the bytes that its worker has sent, by `forward`. Else it ends here."""

    @property
    def plan(self) -> CallPlan | None: ...

    @property
    def function(self) -> Function: ...

    @property
    def call_id(self) -> int:
        """The id of the call, or of the batch that the item is in."""

    def done(self) -> bool:
        """Whether it has ended, was cancelled or was withdrawn."""

    def is_dropped(self) -> bool:
        """Whether nobody waits for it, although it is not done: its future is done, and its task is about to withdraw it."""

    def drop(self) -> None:
        """Count it as done, because it is dropped. Its task then withdraws nothing."""

    def set_result(self, value: Any) -> None:
        """End with this result, a scalar."""

    def deliver(self, value: Any, size: int) -> None:
        """End with this result, whose pickle had `size` bytes."""

    def forward(self, data: memoryview | bytes, /, *, is_error: bool) -> None:
        """End with this pickle of the result, or of the exception. Only if `forwards`."""

    def set_exception(self, error: BaseException, /) -> None:
        """End with this error."""

    def failed_late(self, error: BaseException, /) -> None:
        """Take the error of a call that was done before: it was cancelled, or abandoned."""

    def cut_off(self) -> None:
        """End with RunnerClosed, because the runner is closing."""

    def retry_plan(self) -> CallPlan | None:
        """Return the plan that decides about another attempt; None if there is none."""

    def renewed(self) -> "PendingCall":
        """Return the call for its next attempt. An item of a batch is then a call of its own."""

    def leave(self, member: Any) -> None:
        """Give back the place in this worker, which is done with it."""


class PendingCall(Outcome, Protocol):
    """A call, or a batch of calls, that waits or holds one place in a worker.

    A batch is no receiver of an outcome itself: `set_exception` ends its map, and it is never given a result.
    """

    function: Function
    kind: int
    call_id: int
    member: Any
    """The worker that holds the call; None: none does."""

    @property
    def key(self) -> Any: ...

    @property
    def queue(self) -> Queue[Any, Any] | None:
        """The queue of the call's map; None: it belongs to no map."""

    @property
    def size(self) -> int:
        """Number of items; 1 for a call."""

    is_short: bool
    """Whether the shorter ways of `Outcomes` may end it: it is a call, and its outcome ends here."""

    outstanding: int
    """Number of items that have not ended and were not handed back; 1 for a call."""

    begin_by: float | None
    """When it must have begun, as a time of the monotonic clock; None: no limit."""

    @property
    def timeout(self) -> float | None:
        """For how many seconds it may run; None: no limit."""

    hard_by: float | None
    """When to look whether it exceeds its `hard_timeout`, as a time of the monotonic clock; None: it has none."""

    @property
    def wanted(self) -> int | None:
        """Of a batch: how many of its items the map needs, counted from the first. None: it is a call, cancelled as a whole."""

    def message(self) -> Any:
        """Return the body of the message."""

    def target(self, place: int) -> Outcome:
        """Return the receiver of an outcome: the item at this place of a batch, or the call itself for -1.

        Raises:
            BrokenFrame: there is none, or it has had its outcome.
        """

    def refuse(self, refusal: Callable[[], BaseException]) -> None:
        """End with an error from `refusal`. Each item of a batch gets an error of its own."""

    def abandon(self, error: BaseException) -> None:
        """End with this error, although its thread runs on in the worker."""

    def repeated(self) -> None:
        """Note that the call, or the batch it was in, will be attempted again."""

    def left(self) -> None:
        """Note that no worker holds the call any more."""

    def running(self, fate: Fate) -> int:
        """Return how many items had begun and not ended in a worker that has died: 0 or 1 for a call. `fate`: that of the call."""

    def seconds(self) -> float:
        """Return how long the worker will need for it, by measured times; infinity if that is unknown."""


class SubmittedCall(PendingCall, Protocol):
    """A call of one outcome whose attributes `Submission.enter` sets."""

    @property
    def span(self) -> "Span | None":
        """What is traced of the call; None: nothing."""

    owner: Owner
    key: Any
    plan: CallPlan | None


class CallBase:
    """The common part of the kinds of calls: the behaviour of a single call. A batch overrides most of it."""

    __slots__ = ()

    size: int = 1
    outstanding: int = 1
    wanted: int | None = None
    forwards: bool = False
    is_short: bool = True
    span: "Span | None" = None

    @property
    def begin_by(self: Outcome) -> float | None:
        return None if self.plan is None else self.plan.begin_by

    @begin_by.setter
    def begin_by(self: Outcome, when: float | None) -> None:
        assert self.plan is not None
        self.plan.begin_by = when

    @property
    def timeout(self: Outcome) -> float | None:
        return None if self.plan is None else self.plan.policy.timeout

    @property
    def hard_by(self: Outcome) -> float | None:
        return None if self.plan is None else self.plan.hard_by

    @hard_by.setter
    def hard_by(self: Outcome, when: float | None) -> None:
        assert self.plan is not None
        self.plan.hard_by = when

    def is_dropped(self) -> bool:
        return False

    def drop(self) -> None:
        """Only a call of `run` can be dropped."""

    def forward(self, _data: memoryview | bytes, /, *, is_error: bool) -> None:
        raise NotImplementedError

    def message(self: PendingCall) -> Any:
        return self.body

    def target(self: PendingCall, place: int) -> Outcome:
        if place >= 0:
            raise BrokenFrame(f"an outcome of an item of {self.call_id}, which is no batch")
        return self

    def renewed(self: PendingCall) -> PendingCall:
        return self

    def retry_plan(self: Outcome) -> CallPlan | None:
        return self.plan

    def leave(self: PendingCall, member: Any) -> None:
        member.take(self.call_id)

    def refuse(self: PendingCall, refusal: Callable[[], BaseException]) -> None:
        self.set_exception(refusal())

    def cut_off(self: Outcome) -> None:
        self.set_exception(RunnerClosed(CUT_OFF))

    def abandon(self: PendingCall, error: BaseException) -> None:
        self.set_exception(error)

    def failed_late(self, error: BaseException) -> None:
        """Drop the error. Only a stream passes it on."""

    def repeated(self) -> None:
        """Only a map has to know."""

    def left(self) -> None:
        """Only a map has to know."""

    def running(self, fate: Fate) -> int:
        return int(fate.begun is not False)

    def seconds(self) -> float:
        return inf


class Call(CallBase, asyncio.Future[Any]):
    """One call: the future that the caller awaits, with everything needed to run the call."""

    __slots__ = ("accepted", "body", "call_id", "function", "key", "kind", "member", "owner", "plan")

    queue: ClassVar[None] = None

    # `Submission` sets these when it makes the call, and `PoolWorker` sets `call_id` when it sends the call. With an `__init__`,
    # making a call would cost a third more.
    owner: Owner
    function: "Function"
    kind: int
    key: Hashable | None
    plan: CallPlan | None
    body: tuple[Any, ...] | Payload
    member: Any
    call_id: int
    accepted: int

    @property
    def future(self) -> "Call":
        """The future to await, as `Awaited` has one."""
        return self

    def __repr__(self) -> str:
        """Return the repr of a future with the name of the function added, and where the call is while it is pending.

        asyncio shows it, too, when it reports an exception that was never retrieved.
        """
        text = super().__repr__()
        function = getattr(self, "function", None)  # not set yet while the call is being made
        if function is None:
            return text
        text = text.replace("<Call ", f"<Call of {function.name} ", 1)
        return text if self.done() else text.replace(" pending", f" pending ({_whereabouts(self)})", 1)

    def cancel(self, msg: Any = None) -> bool:
        """Cancel the future, and withdraw the call or cancel it in its worker. A result that still arrives is dropped."""
        if super().cancel(msg):
            self.owner.cancelled(self)
            return True
        return False

    def deliver(self, value: Any, size: int) -> None:
        """End with this result, whose pickle had `size` bytes."""
        try:  # noqa: SIM105 - entering a context manager costs as much as the rest of this
            self.set_result(value)
        except asyncio.InvalidStateError:  # its user has cancelled it since it was asked: see `endings`
            pass

    def set_exception(self, error: BaseException) -> None:  # type: ignore[override]  # no class
        """End with this error, unless its user has cancelled it."""
        with suppress(asyncio.InvalidStateError):
            super().set_exception(error)

    def cut_off(self) -> None:
        """End with RunnerClosed, because the runner is closing. asyncio does not report this error if it is never retrieved."""
        self.set_exception(RunnerClosed(CUT_OFF))
        if not self.cancelled():
            self.exception()


def _whereabouts(call: Call) -> str:
    """Return in words where a pending call is. Its age counts from the start mark, so no call pays for it."""
    member = getattr(call, "member", None)
    if member is None:
        return "waits for a worker"
    try:
        fate = member.fate(call)
    except ValueError:  # the worker is dead, and its memory closed
        return f"in worker {member.index}"
    if fate.begun is None:
        return f"in worker {member.index}"
    if not fate.begun:
        return f"waits in worker {member.index}"
    return f"runs in worker {member.index}" + ("" if fate.age is None else f", for {fate.age:.3g} s")


class TracedCall(Call):
    """A call whose span ends with it."""

    __slots__ = ("span",)

    span: Span

    def set_result(self, value: Any) -> None:
        """End with this result."""
        super().set_result(value)
        self._ended(None)

    def set_exception(self, error: BaseException) -> None:  # type: ignore[override]  # no class
        """As `Call.set_exception`."""
        super().set_exception(error)
        if not self.cancelled():
            self._ended(error)

    def cancel(self, msg: Any = None) -> bool:
        """As `Call.cancel`."""
        is_cancelled = super().cancel(msg)
        if is_cancelled:
            self._ended(asyncio.CancelledError())
        return is_cancelled

    def _ended(self, error: BaseException | None) -> None:
        plan = getattr(self, "plan", None)  # not set if its arguments could not be pickled
        self.span.ended(error, 1 if plan is None else plan.failed + 1)


class Awaited(CallBase):
    """A call of `run` without a policy (`Planned` has one). Only `run` refers to it, and its end leaves nothing to release.

    `run` awaits a plain future, because a task takes twice as long to wait for an instance of a subclass. A plain future does not
    report its cancellation. `run` notices it when its task resumes, and then withdraws the call.
    """

    __slots__ = ("accepted", "body", "call_id", "function", "future", "is_over", "kind", "member")

    key: Hashable | None = None
    plan: CallPlan | None = None
    timeout: float | None = None
    queue: ClassVar[None] = None

    # As in `Call`.
    future: asyncio.Future[Any]
    function: "Function"
    kind: int
    body: tuple[Any, ...] | Payload
    member: Any
    call_id: int
    accepted: int
    is_over: bool
    """Whether the call has ended or was withdrawn."""

    def done(self) -> bool:
        """Whether the call has ended or was withdrawn."""
        return self.is_over

    def is_dropped(self) -> bool:
        return self.future.done()

    def drop(self) -> None:
        self.is_over = True

    def set_result(self, value: Any) -> None:
        """End with this result."""
        self.is_over = True
        settle(self.future, value)

    def deliver(self, value: Any, size: int) -> None:
        """End with this result, whose pickle had `size` bytes."""
        self.set_result(value)

    def set_exception(self, error: BaseException) -> None:
        """End with this error."""
        self.is_over = True
        settle_by(self.future, error)


class Planned(Awaited):
    """A call of `run` with a policy that sets no time limit and no rate.

    The worker need not know about retries, and one message tells it the timeout of many calls. So a policy gets its plan only when
    an attempt has failed.
    """

    __slots__ = ("key", "plan", "policy")

    policy: Policy

    def retry_plan(self) -> CallPlan | None:
        if self.plan is None:
            self.plan = CallPlan(self.policy)
        return self.plan


class Limited(Planned):
    """A call of `run` with any policy. Its limits are its own, since most of these calls need no plan."""

    __slots__ = ("begin_by", "hard_by", "timeout")

    begin_by: float | None
    hard_by: float | None
