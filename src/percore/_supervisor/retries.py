"""Retries: whether a failed call gets another attempt, and the delay before it."""

from percore._calls.calls import Outcome, PendingCall
from percore._common.errors import as_error
from percore._scheduler.phase import RunnerPhase
from percore._serialization.exception_state import CONTEXT


class Retries:
    """Decides about retries and holds the calls that wait for their next attempt.

    A call in `delayed` is in no queue and in no worker, so it takes no place.
    """

    def __init__(self, phase: RunnerPhase) -> None:
        self._phase = phase
        self.delayed: set[PendingCall] = set()

    def next(self, call: Outcome, error: BaseException) -> tuple[float | None, BaseException]:
        """Decide what follows a failed attempt, with retry_on and backoff.

        Runs user code, which may have ended the call on return.

        Returns:
            The seconds before the next attempt and `error`; or None and the error that the call must end with. That is `error`,
            or the exception that retry_on or backoff raised.
        """
        plan = call.retry_plan()
        if plan is None or plan.failed >= plan.policy.retries or not self._phase.begins or call.is_dropped():
            return None, error
        try:
            delay = plan.policy.delay(plan.failed + 1) if plan.policy.is_worth_it(error) else None
        except BaseException as raised:  # the user's retry_on or backoff failed: this becomes the call's outcome
            CONTEXT.__set__(raised, error)  # as an assignment, but without running code of the user's class
            return None, as_error(raised, "retry_on or backoff")
        if (delay and not self._phase.delays) or call.is_dropped():  # a closing runner ends calls between two attempts
            delay = None
        return delay, error

    def drop(self, call: PendingCall) -> None:
        """Remove a call from those that wait for an attempt, and cancel its timer. It may be one that does not wait."""
        self.delayed.discard(call)
        plan = call.plan
        if plan is not None and plan.timer is not None:
            plan.timer.cancel()
            plan.timer = None
