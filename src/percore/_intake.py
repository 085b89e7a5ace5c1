"""The intake of single calls: it pickles the arguments, prepares the call's plan, and sends or queues the call.

`Intake.submit` takes the calls of `Runner.submit`, of broadcasts, of the executor and of runners with `max_pending`. `Intake.run`
takes the other calls of `Runner.run`. Maps create their own items.
"""

import asyncio
from asyncio import Future
from typing import TYPE_CHECKING, Any

from percore._calls import Awaited, Call, Planned
from percore._errors import as_error
from percore._functions import Function
from percore._messages import Kind, Payload
from percore._points import POINTS, point
from percore._policy import DEFAULT, Plan, Policy
from percore._shares import Share

if TYPE_CHECKING:
    from percore._member import Member
    from percore._supervisor import Supervisor


class Intake:
    """Accepts the single calls of a runner. Pickling runs user code."""

    def __init__(self, supervisor: "Supervisor") -> None:
        self._supervisor = supervisor
        self._loop: asyncio.AbstractEventLoop = supervisor.loop
        self._dispatch = supervisor.dispatch
        self._functions = supervisor.functions
        self._contexts = supervisor.contexts
        self._shares = supervisor.shares
        self._is_placed = supervisor.store.is_placed
        self._passes = supervisor.store.passes

    def submit(  # noqa: C901  # one function: a call would slow down every call
        self,
        function: Function,
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        policy: Policy | None = None,
        member: "Member | None" = None,
        call: Call | None = None,
    ) -> Call:
        """Accept a call and return its future. A pickling error becomes the future's exception.

        Args:
            function: the function to call.
            args: its positional arguments.
            kwargs: its keyword arguments.
            policy: the call's options; None: the defaults.
            member: the worker that must run the call, outside its limits (a broadcast); None: any worker.
            call: the call object that takes the outcome; None: a new future of this loop.

        Raises:
            RunnerBroken: no worker can be started any more.
            KeyboardInterrupt: pickling raised it; the call was not accepted.
        """
        supervisor = self._supervisor
        if supervisor.phase.broken is not None:
            raise supervisor.phase.refusal()
        call = Call(loop=self._loop) if call is None else call
        call.owner = supervisor
        call.function = function
        call.kind = function.kind if member is None else Kind.BESIDE
        call.member = call.key = call.plan = None
        if function.number and not kwargs and self._passes(args):
            call.body = args
            if self._contexts is not None or member is not None:
                if not self._plan(call, policy, member):
                    return call
            elif policy is not None:  # as `_plan`, but no user code has run, so the runner's state cannot have changed
                call.key = policy.key
                call.plan = Plan(policy) if policy.needs_plan else None
        elif not self._prepare(call, args, kwargs, policy, member):
            return call
        if POINTS:
            point("supervisor.call.stored" if type(call.body) is int and self._is_placed(call.body) else "supervisor.call.pickled")
        if member is not None:
            supervisor.beside.submit(call, member)
            return call
        try:
            member = self._dispatch.submitted(call)
            if member is not None:
                member.send(call)
        except Exception as error:  # an internal error ends this call only
            supervisor.failed_with(call, error)
        return call

    def run(
        self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any], policy: Policy | None = None
    ) -> Awaited | Call:
        """As `submit`, for `Runner.run`.

        Returns:
            Either an `Awaited`, whose `future` the caller awaits and for which it must call `Supervisor.withdraw` if the await is
            cancelled, or a `Call`, which is a future itself.

        Raises:
            RunnerBroken, KeyboardInterrupt: as `submit`.
        """
        if self._contexts is not None or not function.number:
            return self.submit(function, args, kwargs, policy)
        supervisor = self._supervisor
        if supervisor.phase.broken is not None:
            raise supervisor.phase.refusal()
        body: tuple[Any, ...] | Payload = args
        if kwargs or not self._passes(args):
            try:
                body, met = self._functions.pickle(function, args, kwargs)
            except BaseException as error:
                refused = self._call(function)
                self._unpicklable(refused, error)
                return refused
            is_refused = not supervisor.phase.accepts  # the user code that pickling ran did this
            if is_refused or met or type(body) is int:
                return self._run_laden(function, body, met, policy)
        if policy is None:
            call = Awaited()
        else:
            call = Planned()
            call.policy = policy
            call.key = policy.key
            call.plan = None if policy.timeout is None else Plan(policy)
        call.future = Future(loop=self._loop)
        call.function = function
        call.kind = function.kind
        call.body = body
        call.member = None
        call.is_over = False
        if POINTS:
            point("supervisor.call.pickled")
        try:
            member = self._dispatch.submitted(call)
            if member is not None:
                member.send(call)
        except Exception as error:  # an internal error ends this call only
            supervisor.failed_with(call, error)
        return call

    def _call(self, function: Function) -> Call:
        """Return a new call without arguments."""
        call = Call(loop=self._loop)
        call.owner = self._supervisor
        call.function = function
        call.kind = function.kind
        call.body = ()
        call.member = call.key = call.plan = None
        return call

    def _run_laden(self, function: Function, body: Payload, met: list[Share], policy: Policy | None) -> Call:
        """Accept a call of `run` that holds a slot or shared objects until it ends, or that is refused now."""
        call = self._call(function)
        call.body = body
        if met:
            self._shares.hold(call, met)
        if self._plan(call, policy, None):
            if POINTS:
                point("supervisor.call.stored" if type(body) is int and self._is_placed(body) else "supervisor.call.pickled")
            self._supervisor.accept(call)
        else:
            self._supervisor.release(call)
        return call

    def _plan(self, call: Call, policy: Policy | None, member: "Member | None") -> bool:
        """Set the call's key and plan. Return False if the call has ended instead."""
        if policy is not None:
            call.key = policy.key
        try:
            context = None if self._contexts is None else self._contexts.capture()
        except BaseException as error:
            self._unpicklable(call, error)
            return False
        if context is not None or member is not None or (policy is not None and policy.needs_plan):
            call.plan = Plan(policy or DEFAULT, context, is_beside=member is not None)
        # Pickling has run user code, which may have closed the runner or ended the worker that the call is for.
        if not self._supervisor.phase.accepts:
            self._supervisor.refuse(call)
            return False
        if member is not None and member not in self._dispatch.seats:
            self._supervisor.unanswered(member, call)
            return False
        return True

    def _prepare(
        self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any], policy: Policy | None, member: "Member | None"
    ) -> bool:
        """Pickle the call's arguments and set its plan. Return False if the call has ended instead."""
        call.body = ()
        try:
            call.body, met = self._functions.pickle(call.function, args, kwargs)
        except BaseException as error:
            self._unpicklable(call, error)
            return False
        if met:
            self._shares.hold(call, met)
        if not self._plan(call, policy, member):
            self._supervisor.release(call)
            return False
        return True

    def _unpicklable(self, call: Call, error: BaseException) -> None:
        if issubclass(type(error), KeyboardInterrupt):  # it may be the user's Ctrl-C: raise it, and do not accept the call
            raise error
        call.set_exception(as_error(error, "pickling"))
