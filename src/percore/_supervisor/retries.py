"""Retries: whether a failed call gets another attempt, and the delay before it."""

from typing import TYPE_CHECKING

from percore._calls.calls import Outcome, PendingCall
from percore._common.errors import as_error
from percore._common.log import Faults

if TYPE_CHECKING:
    from percore._supervisor.supervisor import Supervisor


class Retries:
    """Decides about retries and holds the calls that wait for their next attempt.

    A call in `delayed` is in no queue and in no worker, so it takes no place.
    """

    def __init__(self, supervisor: "Supervisor") -> None:
        self._supervisor = supervisor
        self.delayed: set[PendingCall] = set()

    def next(self, call: Outcome, error: BaseException) -> tuple[float | None, BaseException]:
        """Decide what follows a failed attempt, with retry_on and backoff.

        Runs user code, which may have ended the call on return.

        Returns:
            The seconds before the next attempt and `error`; or None and the error that the call must end with. That is `error`,
            or the exception that retry_on or backoff raised.
        """
        plan = call.retry_plan()
        if plan is None or plan.failed >= plan.policy.retries or not self._supervisor.phase.begins or call.is_dropped():
            return None, error
        try:
            delay = plan.policy.delay(plan.failed + 1) if plan.policy.is_worth_it(error) else None
        except BaseException as raised:  # the user's retry_on or backoff failed: this becomes the call's outcome
            raised.__context__ = error
            return None, as_error(raised, "retry_on or backoff")
        if (delay and not self._supervisor.phase.delays) or call.is_dropped():  # a closing runner ends calls between two attempts
            delay = None
        return delay, error

    def again(self, call: PendingCall, delay: float) -> None:
        """Attempt a call once more after `delay` seconds. The call has left its worker, and keeps its pickled arguments."""
        plan = call.plan
        assert plan is not None
        plan.failed += 1
        plan.late = None
        call.repeated()
        supervisor = self._supervisor
        if not supervisor.phase.begins or (delay and not supervisor.phase.delays) or call.is_dropped():
            # The attempt was decided on earlier, and the call's thread has only ended now; or user code has cancelled the call.
            supervisor.refuse(call)
        elif delay:
            self.delayed.add(call)
            plan.timer = supervisor.loop.call_later(delay, self._attempt, call)
        else:
            supervisor.accept(call)

    def _attempt(self, call: PendingCall) -> None:
        if call.is_dropped():
            call.drop()
            self._supervisor.cancelled(call)
            return
        self.drop(call)
        self._supervisor.accept(call)

    def drop(self, call: PendingCall) -> None:
        """Remove a call from those that wait for an attempt, and cancel its timer. It may be one that does not wait."""
        self.delayed.discard(call)
        plan = call.plan
        if plan is not None and plan.timer is not None:
            plan.timer.cancel()
            plan.timer = None

    def end(self) -> None:
        """End all calls that wait for their next attempt, because the runner closes or is broken."""
        faults = Faults("calls between two attempts were ended")
        for call in list(self.delayed):
            with faults:
                self.drop(call)
                self._supervisor.refuse(call)
            if faults.last is not None:
                self._supervisor.give_up(call, faults.last, faults)
        faults.finish()
