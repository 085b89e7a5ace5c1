"""The submission of single calls: it pickles the arguments, prepares the call's plan, and sends or queues the call.

`Submission.submit` takes the calls of `Runner.submit`, of broadcasts and of runners with `max_pending`, `enter` those of executors,
`run` the other calls of `Runner.run`, and `stream` streams. Maps create their own items.
"""

import asyncio
from asyncio import Future
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from percore._calls.calls import Awaited, Call, Limited, PendingCall, Planned, SubmittedCall, TracedCall
from percore._calls.functions import Function
from percore._calls.policy import DEFAULT, CallPlan, Policy
from percore._calls.shared_objects import Share
from percore._calls.streams import StreamCall
from percore._common.errors import as_error
from percore._common.fault_points import POINTS, point
from percore._protocol.messages import Kind, Payload

if TYPE_CHECKING:
    from percore._calls.context_variables import Contexts
    from percore._calls.functions import Functions
    from percore._supervisor.call_registry import CallRegistry
    from percore._supervisor.pool_worker import PoolWorker


C = TypeVar("C", bound=SubmittedCall)
P = TypeVar("P", bound=PendingCall)


class Submission:
    """Accepts the single calls of a runner. Pickling runs user code."""

    def __init__(self, calls: "CallRegistry", functions: "Functions", contexts: "Contexts | None") -> None:
        self._calls = calls
        self._limits, self._limit = calls.limits, calls.limits.limit
        self._loop: asyncio.AbstractEventLoop = calls.loop
        self._dispatch = calls.dispatch
        self._phase = calls.phase
        self._functions = functions
        self._contexts = contexts
        self._tracing = None if contexts is None else contexts.tracing
        self._shares = calls.shares
        self._is_placed = calls.store.is_placed
        self._passes = calls.store.passes

    def submit(
        self,
        function: Function,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        policy: Policy | None = None,
        member: "PoolWorker | None" = None,
    ) -> Call:
        """Accept a call and return its future, a new one of this loop. As `enter` otherwise."""
        if self._tracing is None:
            return self.enter(Call(loop=self._loop), function, args, kwargs, policy, member)
        call = TracedCall(loop=self._loop)
        call.span = span = self._tracing.begin(function.fn, None if policy is None else policy.key_value)
        try:
            return self.enter(call, function, args, kwargs, policy, member)
        except BaseException as error:
            span.ended(error)
            raise

    def enter(
        self,
        call: C,
        function: Function,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        policy: Policy | None = None,
        member: "PoolWorker | None" = None,
    ) -> C:
        """Accept a call and return it. A pickling error becomes its exception.

        Args:
            call: the new call, which takes the outcome.
            function: the function to call.
            args: its positional arguments.
            kwargs: its keyword arguments.
            policy: the call's options; None: the defaults.
            member: the worker that must run the call, outside its limits (a broadcast); None: any worker.

        Raises:
            RunnerBroken: no worker can be started any more.
            TypeError: the options have a rate and no key.
            KeyboardInterrupt: pickling raised it; the call was not accepted.
        """
        if self._phase.broken is not None or (policy is not None and policy.lacks_key):
            raise self._refusal(policy)
        body: tuple[Any, ...] | Payload = args
        met: Sequence[Share] = ()
        if kwargs or not function.number or not self._passes(args):
            try:
                body, met = self._functions.pickle(function, args, kwargs)
            except BaseException as error:
                return self._unpicklable(call, function, error)
        return self._accept(call, function, body, met, policy, member)

    def run(  # noqa: C901, PLR0912  # every awaited call takes it: each function that it called would cost it a fiftieth
        self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any], policy: Policy | None = None
    ) -> Awaited | Call:
        """As `submit`, for `Runner.run`.

        Returns:
            Either an `Awaited`, whose `future` the caller awaits and for which it must call `CallRegistry.withdraw` if the await is
            cancelled, or a `Call`, which is a future itself: it holds a slot, a context or shared objects until it ends, or has
            ended already.

        Raises:
            RunnerBroken, TypeError, KeyboardInterrupt: as `enter`.
        """
        if self._contexts is not None or not function.number:
            return self.submit(function, args, kwargs, policy)
        if self._phase.broken is not None or (policy is not None and policy.lacks_key):
            raise self._refusal(policy)
        body: tuple[Any, ...] | Payload = args
        if kwargs or not self._passes(args):
            try:
                body, met = self._functions.pickle(function, args, kwargs)
            except BaseException as error:
                return self._unpicklable(Call(loop=self._loop), function, error)
            # Pickling has run user code, which may have closed the runner.
            if met or type(body) is int or not self._phase.accepts:
                return self._accept(Call(loop=self._loop), function, body, met, policy)
        if policy is None:
            call = Awaited()
        elif policy.is_free:
            call = Planned()
            call.policy = policy
            call.key = policy.key
            call.plan = None
        else:
            call = Limited()
            call.policy = policy
            call.key = policy.key
            call.timeout = timeout = policy.timeout
            call.plan = call.begin_by = call.hard_by = None
            if policy.has_clock or (timeout is not None and not self._limits.is_in_use):
                self._limit(call, policy)
            if policy.rate is not None:
                self._calls.rates.limit(call, policy)
        call.future = Future(loop=self._loop)
        call.function = function
        call.kind = function.kind
        call.body = body
        call.member = None
        call.is_over = False
        if POINTS:
            point("supervisor.call.pickled")
        self._calls.accept(call)
        return call

    def stream(self, call: StreamCall, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Accept a stream. A pickling error becomes its error.

        Raises:
            RunnerBroken, KeyboardInterrupt: as `submit`.
        """
        if self._phase.broken is not None:
            raise self._phase.refusal()
        body: tuple[Any, ...] | Payload = args
        met: Sequence[Share] = ()
        if kwargs or not function.number or not self._passes(args):
            try:
                body, met = self._functions.pickle(function, args, kwargs)
            except BaseException as error:
                _ = self._unpicklable(call, function, error)
                return
        self._accept_stream(call, function, body, met)

    def _accept_stream(self, call: StreamCall, function: Function, body: tuple[Any, ...] | Payload, met: Sequence[Share]) -> None:
        """Send or queue a stream whose arguments are ready, or refuse it."""
        call.owner = self._calls
        call.function = function
        call.kind = function.kind
        call.body = body
        if met:
            self._shares.hold(call, met)
        if not self._phase.accepts or call.done():  # pickling has run user code, which may have closed the runner or the stream
            self._calls.refuse(call)
            return
        if POINTS:
            point("supervisor.call.stored" if type(body) is int and self._is_placed(body) else "supervisor.call.pickled")
        self._calls.accept_known(call, call.submitted)

    def _accept(
        self,
        call: C,
        function: Function,
        body: tuple[Any, ...] | Payload,
        met: Sequence[Share],
        policy: Policy | None,
        member: "PoolWorker | None" = None,
    ) -> C:
        """Set up a call whose arguments are ready, and send or queue it, or refuse it. Return the call."""
        call.owner = self._calls
        call.function = function
        call.kind = function.kind if member is None else Kind.BROADCAST
        call.body = body
        call.member = call.key = call.plan = None
        if met:
            self._shares.hold(call, met)
        # A plain call with arguments that pass as they are has nothing to prepare, and no user code has run that could have closed
        # the runner.
        if (
            policy is not None or type(body) is not tuple or self._contexts is not None or member is not None
        ) and not self._prepare(call, policy, member):
            self._calls.release(call)
            return call
        if POINTS:
            point("supervisor.call.stored" if type(body) is int and self._is_placed(body) else "supervisor.call.pickled")
        if member is None:
            self._calls.accept(call)
        else:
            self._calls.broadcast(call, member)
        return call

    def _prepare(self, call: SubmittedCall, policy: Policy | None, member: "PoolWorker | None") -> bool:
        """Set the call's key and plan. Return False if the call has ended instead."""
        if policy is not None:
            call.key = policy.key
        try:
            context = None if self._contexts is None else self._contexts.capture(call.span)
        except BaseException as error:
            self._calls.release(call)
            _ = self._unpicklable(call, call.function, error)
            return False
        if context is not None or member is not None or (policy is not None and policy.needs_plan):
            call.plan = CallPlan(policy or DEFAULT, context, is_broadcast=member is not None)
            if policy is not None and policy.is_limited:
                self._limit(call, policy)
            if policy is not None and policy.rate is not None:
                self._calls.rates.limit(call, policy)
        # Pickling has run user code, which may have closed the runner or ended the worker that the call is for.
        if not self._phase.accepts:
            self._calls.refuse(call)
            return False
        if member is not None and member not in self._dispatch.seats:
            self._calls.unanswered(member, call)
            return False
        return True

    def _refusal(self, policy: Policy | None) -> BaseException:
        """Return the error of a call that cannot be accepted: the runner is broken, or the options have a rate and no key."""
        return self._phase.refusal() if self._phase.broken is not None or policy is None else policy.no_key()

    @staticmethod
    def _unpicklable(call: P, function: Function, error: BaseException) -> P:
        """End the call with an error of pickling. A KeyboardInterrupt may be the user's Ctrl-C: raise it instead."""
        if issubclass(type(error), KeyboardInterrupt):
            raise error
        call.function = function
        call.set_exception(as_error(error, "pickling"))
        return call
