"""A stream as a pending call: it holds a place in a worker from its start to its end, and its items arrive one after the other."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Awaitable, Callable, Hashable
from typing import Any, ClassVar, Final, Protocol

from percore._calls.calls import CallBase, Owner
from percore._calls.functions import Function
from percore._calls.policy import CallPlan
from percore._common.endings import wake
from percore._common.errors import CUT_OFF, RunnerClosed
from percore._common.sure_handles import SureHandle, surely_later
from percore._common.tracing import Span
from percore._protocol.messages import CREDIT, BrokenFrame, Payload
from percore._scheduler.streaming import PATIENCE, Credits, StreamPhase

_UNHEARD: Final = "a generator failed while its stream was closed, and nothing waited for that"
_STATES: Final = {
    StreamPhase.NEW: "not used",
    StreamPhase.OPEN: "running",
    StreamPhase.ENDING: "closing",
    StreamPhase.OVER: "ended",
}


class StreamOwner(Owner, Protocol):
    """The owner of the calls of a runner, as streams see it."""

    def has_room(self) -> None:
        """Send waiting calls: a stream has given its place back."""


def _nothing() -> None:
    return


class StreamCall(CallBase):
    """A call of a generator function, with the items that have arrived and were not taken.

    The consumer iterates `items` once. The call is done when the consumer needs nothing more of it: when the outcome has arrived,
    or when the consumer has left. In the second case a worker may still close the generator; `gone` waits for that.
    """

    __slots__ = (
        *("_closers", "_failure", "_gone", "_is_aside", "_is_granting", "_loop", "_phase", "_ready", "_waiter", "_watch"),
        *(
            "accepted",
            "body",
            "call_id",
            "credits",
            "error",
            "function",
            "key",
            "kind",
            "member",
            "on_done",
            "owner",
            "plan",
            "span",
        ),
    )

    queue: ClassVar[None] = None
    is_short = False  # a broken worker may answer one that its consumer has left: `take` alone tells those who wait for its end

    # `Submission` sets these, and `PoolWorker` sets `call_id` when it sends the call.
    owner: StreamOwner
    function: Function
    kind: int
    body: tuple[Any, ...] | Payload
    call_id: int
    accepted: int

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        prefetch: int,
        plan: CallPlan,
        key: Hashable | None = None,
        span: Span | None = None,
    ) -> None:
        """`prefetch` is in the terms of `plan`, too. `span` ends when the call is done."""
        self.span = span
        self.plan = plan
        self.key = key
        self.member: Any = None
        self.credits = Credits(prefetch)
        self.error: BaseException | None = None
        """The error to raise after the items that have arrived."""
        self.on_done: Callable[[], None] = _nothing
        """Called once, when the call is done."""
        self._loop = loop
        self._phase = StreamPhase.NEW
        self._ready: deque[Any] = deque()
        self._waiter: asyncio.Future[None] | None = None
        self._gone: asyncio.Future[None] | None = None
        self._closers = 0
        self._is_granting = False
        """Whether the loop is about to call `_grant`."""
        self._is_aside = False
        """Whether it has given its place back, because it waits for its consumer."""
        self._watch: SureHandle | None = None
        """Set while the loop is about to call `_look`."""
        self._failure: BaseException | None = None

    # For the consumer

    async def items(self, begin: Callable[["StreamCall"], Awaitable[None]]) -> AsyncGenerator[Any]:
        """Begin the stream, yield its items, then raise the error that has ended it, if there is one.

        `begin` submits the call. Leaving the generator in any way ends the stream.
        """
        ready, counts = self._ready, self.credits
        try:
            if not self.done():
                await begin(self)
            while True:
                while ready:
                    value = ready.popleft()
                    counts.taken += 1
                    if counts.taken >= counts.due_at:
                        if not ready:
                            self._grant()
                        elif not self._is_granting:
                            # A consumer that takes the rest in this iteration of the loop gives all credits back in one message.
                            self._is_granting = True
                            self._loop.call_soon(self._grant)
                    yield value
                if self.done():
                    break
                await self._more()
            error, self.error = self.error, None
            if error is not None:
                try:
                    raise error
                finally:
                    del error  # its traceback holds this frame: a cycle that would keep the callers' locals alive
        finally:
            self.close()

    async def _more(self) -> None:
        waiter = self._waiter = self._loop.create_future()
        if not self.done():  # asked again: a garbage collection may have closed the stream before it had this waiter
            await waiter

    def close(self) -> None:
        """End the stream, because the consumer needs no more items. Idempotent."""
        self._ready.clear()
        self.error = None
        if not self.done():
            was_submitted = self._phase is not StreamPhase.NEW
            try:
                self._end(None)
            finally:  # also after a Ctrl-C: else its worker would not close the generator
                if was_submitted:
                    self._come_back()
                    self.owner.cancelled(self)

    def _grant(self) -> None:
        self._is_granting = False
        counts = self.credits
        if counts.taken >= counts.due_at and self._phase is StreamPhase.OPEN and self.member is not None:
            self._come_back()
            self.member.tell(CREDIT, self.call_id, counts.grant())

    # The place: the generator gives it back while it waits for its consumer

    def _look(self) -> None:
        """Step aside, if the generator waits for its consumer."""
        self._watch = None
        if self.credits.is_used_up and self._phase is StreamPhase.OPEN and self.member is not None:
            if not self._is_aside:  # else a Ctrl-C has come before the next line
                self._is_aside = self.member.step_aside(self)
            self.owner.has_room()

    def _come_back(self) -> None:
        if self._is_aside:
            self._is_aside = False
            self.member.come_back(self)

    async def gone(self) -> None:
        """Wait until no worker runs the generator any more. Call it when the call is done.

        Raises:
            BaseException: the error by which the generator has failed since the consumer left it.
        """
        self._closers += 1
        try:
            while self.member is not None:
                if self._gone is None:
                    self._gone = self._loop.create_future()
                await asyncio.shield(self._gone)
            failure, self._failure = self._failure, None
            if failure is not None:
                try:
                    raise failure
                finally:
                    del failure
        finally:
            self._closers -= 1
            if self._failure is not None and not self._closers:  # 1. it has failed  2. the last waiter is cancelled, and resumes
                self._report()

    @property
    def state(self) -> str:
        """Its state, in words."""
        return _STATES[self._phase]

    # For the supervisor

    def submitted(self) -> bool:
        """Note that the call is complete and about to be sent or queued. Return False if it has ended already."""
        if self._phase is StreamPhase.NEW:
            self._phase = StreamPhase.OPEN
        return self._phase is StreamPhase.OPEN

    def cut(self, refusal: Callable[[], BaseException]) -> None:
        """End the stream, because the runner closes or is broken. Items that were published are still handed over."""
        if self._phase is StreamPhase.NEW:
            self._end(refusal())
        elif self._phase is StreamPhase.OPEN:
            if self.member is None:
                self._end(refusal())
            else:
                self._phase = StreamPhase.ENDING
                self._come_back()
            self.owner.cancelled(self)

    def arrived(self, values: list[Any]) -> None:
        """Take the next items.

        Raises:
            BrokenFrame: the worker has sent more than it was granted.
        """
        self.credits.arrive(len(values))
        if self._watch is None and self.credits.is_used_up and self._phase is StreamPhase.OPEN:
            self._watch = surely_later(self._loop, PATIENCE, self._look)
        if self._phase is not StreamPhase.OVER:
            self._ready += values
            self._wake()

    def ended(self) -> None:
        """Note that the generator has returned."""
        if not self.done():
            self._end(None)

    def done(self) -> bool:
        """Whether the consumer needs nothing more."""
        return self._phase is StreamPhase.OVER

    def set_result(self, value: Any) -> None:
        """Refuse a result.

        Raises:
            BrokenFrame: always, since no healthy worker sends one.
        """
        raise BrokenFrame(f"a result of {self.function.name}, which is a stream")

    def deliver(self, value: Any, size: int) -> None:
        """As `set_result`."""
        self.set_result(value)

    def set_exception(self, error: BaseException) -> None:
        """End with this error, after the items that have arrived."""
        self._end(error)

    def cut_off(self) -> None:
        """End with RunnerClosed, because the runner is closing."""
        self._end(RunnerClosed(CUT_OFF))

    def abandon(self, error: BaseException) -> None:
        """End with this error, and have the worker close the generator."""
        try:
            self._end(error)
        finally:  # as in `close`
            self._come_back()
            self.owner.cancelled(self)

    def failed_late(self, error: BaseException) -> None:
        """Take an error of the generator that has come after the consumer left. `gone` raises it, or else the loop reports it."""
        if self._closers:
            self._failure = error
        elif not isinstance(error, RunnerClosed):  # else its own calls were cut off with it
            self._failure = error
            self._report()

    def left(self) -> None:
        """Note that no worker holds the call any more."""
        self._is_aside = False
        if self._phase is StreamPhase.ENDING:  # handed back or lost: it must not begin elsewhere while the runner closes
            self._end(RunnerClosed(CUT_OFF))
        if self._gone is not None and not self._gone.done():  # nobody cancels it: see `gone`
            self._gone.set_result(None)

    def _end(self, error: BaseException | None) -> None:
        # Whoever calls this has asked before whether it is done. User code may have closed it since: the pickling of an argument
        # that closes it and then fails, or a garbage collection.
        if self._phase is StreamPhase.OVER:
            return
        self._phase = StreamPhase.OVER
        self.error = error
        try:
            if self._watch is not None:
                self._watch.cancel()
                self._watch = None
            self._wake()
            if self.span is not None:
                self.span.ended(error)
        finally:  # also after a Ctrl-C
            self.on_done()

    def _report(self) -> None:
        failure, self._failure = self._failure, None
        self._loop.call_exception_handler({"message": f"{_UNHEARD}: {self.function.name}", "exception": failure})

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        wake(waiter)
