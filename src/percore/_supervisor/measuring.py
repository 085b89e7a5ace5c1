"""Takes the figures that workers measure of their calls, and adds those that the supervisor measures when calls end."""

from collections.abc import Callable
from time import monotonic_ns
from typing import Any

from percore._calls.calls import Outcome
from percore._calls.meters import Meters
from percore._protocol.messages import MEASURED, BrokenFrame
from percore._supervisor.pool_worker import PoolWorker


def measure_wait(member: PoolWorker, call: Outcome, calls: int = 1) -> None:
    """Measure how long a call has waited that has ended in this worker and still has its place there, so that its mark is its own.

    The call has a mark. It may be a batch of so many calls. An attempt that follows another one is not measured; nor is
    anything where nobody can tell when a call began.
    """
    if call.plan is None or not call.plan.failed:
        age = member.worker.fate(call.call_id).age
        if age is not None:
            call.function.meter.waited(call.accepted, monotonic_ns() - int(age * 1e9), calls)


class Measurements:
    """Takes what workers have measured."""

    def __init__(self, meters: Meters) -> None:
        self._meters = meters

    def handlers(self, member: PoolWorker) -> dict[int, Callable[[int, Any], None]]:
        """Return the handlers of the messages of one worker, by op."""
        return {MEASURED: lambda _, body: self._measured(member, body)}

    def _measured(self, member: PoolWorker, body: Any) -> None:
        try:
            name, run, total, *pickled = body
            meter = self._meters.named(name)
            member.run_times.merge(run, total)
            meter.run.merge(run, total)
            meter.at(member.index).run.merge(run, total)
            meter.measured(*pickled)
        except (TypeError, ValueError) as error:
            raise BrokenFrame(f"measured figures that are none: {body!r}") from error
