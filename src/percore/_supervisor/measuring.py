"""What workers measure of their calls, and what the supervisor measures when calls end."""

from collections.abc import Callable
from time import monotonic_ns
from typing import Any

from percore._calls.calls import Outcome
from percore._calls.meters import Meter, Meters
from percore._protocol.messages import MEASURED, BrokenFrame
from percore._supervisor.pool_worker import PoolWorker


def measure_wait(member: PoolWorker, call: Outcome, meter: Meter) -> None:
    """Measure how long a call has waited that has ended in this worker and still has its place there, so that its mark is its own.

    An attempt that follows another one, or that has no time of acceptance, is not measured; nor is anything where nobody can tell
    when a call began.
    """
    now, accepted_at = monotonic_ns(), call.accepted_at
    wait: int | None = None
    if accepted_at and (call.plan is None or not call.plan.failed):
        age = member.worker.fate(call.call_id).age
        wait = None if age is None else now - int(age * 1e9) - accepted_at
    meter.waited(wait, now)


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
            meter.measured(*pickled)
        except (TypeError, ValueError) as error:
            raise BrokenFrame(f"measured figures that are none: {body!r}") from error
