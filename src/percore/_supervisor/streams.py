"""The streams of a runner, from the request of the first item on: they wait for admission, are submitted, and end with the runner.

`Runner.stream` makes a call with `make`, and iterates over `StreamCall.items`, which calls `begin`.
"""

import asyncio
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

from percore._calls.functions import Function
from percore._calls.policy import DEFAULT, CallPlan, Policy
from percore._calls.streams import StreamCall
from percore._scheduler.streaming import PATIENCE

if TYPE_CHECKING:
    from percore._calls.context_variables import Contexts
    from percore._supervisor.admission import Admission
    from percore._supervisor.closing import Closing
    from percore._supervisor.submission import Submission


class Streams:
    """Begins the streams of one runner."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        submission: "Submission",
        contexts: "Contexts | None",
        admission: "Admission | None",
        closing: "Closing",
    ) -> None:
        self._loop = loop
        self._submission = submission
        self._contexts = contexts
        self._admission = admission
        self._closing = closing

    def make(self, function: Function, policy: Policy | None) -> StreamCall:
        """Return a call of this function that is not begun. It gets the values that the context variables have now.

        Raises:
            PayloadTooLarge: the values of the context variables are too large.
            BaseException: any error of pickling them.
        """
        policy = DEFAULT if policy is None else policy
        contexts, span = self._contexts, None
        if contexts is not None and contexts.tracing is not None:
            span = contexts.tracing.begin(function.fn, policy.key_value)
        context = None if contexts is None else contexts.capture(span)
        plan = CallPlan(policy, context, prefetch=policy.prefetch, patience=PATIENCE)
        return StreamCall(self._loop, policy.prefetch, plan, policy.key, span)

    async def begin(
        self, check: Callable[[], None], function: Function, args: tuple[Any, ...], kwargs: dict[str, Any], call: StreamCall
    ) -> None:
        """Submit a call that `make` has made, after waiting for room under `max_pending`. A pickling error ends the call.

        `check` raises if the runner does not accept calls.

        Raises:
            RunnerClosed, RunnerBroken, RuntimeError: the call cannot be accepted.
            KeyboardInterrupt: pickling raised it; the call was not accepted.
        """
        check()
        admission, is_registered = self._admission, False
        end, enders = partial(call.cut, self._closing.refusal), self._closing.enders

        def done() -> None:
            if enders.pop(end, self) is None and admission is not None:  # once
                admission.leave()

        if admission is not None:
            await admission.enter()
        try:  # at once, and without a call before `is_registered`: after a Ctrl-C one of the two leaves, this step or `done`
            if admission is not None:
                check()
            if not call.done():  # else another task has closed the stream meanwhile
                enders[end] = None
                call.on_done = done
                is_registered = True
                if call.done():  # since it was asked, a garbage collection has run user code that has closed it
                    done()
                self._submission.stream(call, function, args, kwargs)
        except BaseException:
            call.close()  # a Ctrl-C may have come after it was sent
            raise
        finally:
            if admission is not None and not is_registered:
                admission.leave()
