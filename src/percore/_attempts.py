"""Further attempts: whether a call that failed is worth one, and the time between two."""

from typing import TYPE_CHECKING

from percore._calls import Awaited, Call, Planned, is_dropped
from percore._errors import as_error
from percore._faults import Faults
from percore._items import BatchItem, Item
from percore._policy import Plan

if TYPE_CHECKING:
    from percore._supervisor import Supervisor


class Attempts:
    """Between two attempts a call belongs to nobody else, and holds no place."""

    def __init__(self, supervisor: "Supervisor") -> None:
        self._supervisor = supervisor
        self.delayed: set[Awaited | Call | Item] = set()

    def next(self, call: Awaited | Call | Item | BatchItem, error: BaseException) -> tuple[float | None, BaseException]:
        """Seconds to the next attempt after this error; None: there is none, and the call ends with the error given back.

        Runs user code: afterwards the call may have ended.
        """
        plan = call.plan
        if plan is None and isinstance(call, Planned):
            plan = call.plan = Plan(call.policy)
        if plan is None or plan.failed >= plan.policy.retries or self._supervisor.is_over or is_dropped(call):
            return None, error
        try:
            delay = plan.policy.delay(plan.failed + 1) if plan.policy.is_worth_it(error) else None
        except BaseException as raised:  # the user's own retry_on or backoff failed: that is the call's outcome
            raised.__context__ = error
            return None, as_error(raised, "retry_on or backoff")
        if (delay and self._supervisor.is_closing) or is_dropped(call):  # whoever waits for it ends when the runner closes
            delay = None
        return delay, error

    def again(self, call: Awaited | Call | Item, delay: float) -> None:
        """Attempt a call once more, after so many seconds. It has left its worker; its bytes are the original ones."""
        plan = call.plan
        assert plan is not None
        plan.failed += 1
        plan.late = None
        if isinstance(call, Item):
            call.flow.runs_alone(call)
        supervisor = self._supervisor
        if supervisor.is_over or (delay and supervisor.is_closing) or is_dropped(call):
            # It was worth another attempt before that, and its thread has only ended now; or user code has cancelled it.
            supervisor.refuse(call)
        elif delay:
            self.delayed.add(call)
            plan.timer = supervisor.loop.call_later(delay, self._attempt, call)
        else:
            supervisor.accept(call)

    def _attempt(self, call: Awaited | Call | Item) -> None:
        if is_dropped(call):
            self._supervisor.withdraw(call)
            return
        self.drop(call)
        self._supervisor.accept(call)

    def drop(self, call: Awaited | Call | Item) -> None:
        """There will be no further attempt."""
        self.delayed.discard(call)
        plan = call.plan
        if plan is not None and plan.timer is not None:
            plan.timer.cancel()
            plan.timer = None

    def end(self) -> None:
        """Calls between two attempts end now: the runner closes."""
        faults = Faults("calls between two attempts were ended")
        for call in list(self.delayed):
            with faults:
                self.drop(call)
                self._supervisor.refuse(call)
            if faults.last is not None:
                self._supervisor.give_up(call, faults.last, faults)
        faults.finish()
