"""Overruns: the steps after a call has exceeded its `hard_timeout`, and which workers pause for them. Pure decisions.

    cancelled ──still runs──▶ replaced ──still runs──▶ killed
        └──────has ended──────────┴────────▶ over

1. The call is cancelled. Its worker pauses: it is sent no more calls, and hands back those that it has not begun.
2. If the call goes on, the worker drains, and its replacement starts. The worker's other calls may end until the last step.
3. If the call still goes on, the worker is killed.

A worker whose overruns are over before step 2 goes on: nothing is wrong with it, and a new worker would lack its caches.
"""

from enum import Enum
from typing import Final, Generic, NamedTuple, TypeVar

OBEYS: Final = 1.0
"""The most seconds that a cancelled call may take before its worker is replaced."""


class Step(Enum):
    """The steps after the cancellation."""

    REPLACE = "replace"
    KILL = "kill"


class Due(NamedTuple):
    """A step that is due.

    Attributes:
        step: the step.
        seconds: how long after the cancellation.
    """

    step: Step
    seconds: float


def steps(kill_after: float) -> tuple[Due, Due]:
    """Return the steps after a cancellation. The replacement has at least half of `kill_after` to get ready."""
    return Due(Step.REPLACE, min(OBEYS, kill_after / 2)), Due(Step.KILL, kill_after)


def waits(limit: float, *, begun: bool, age: float | None) -> float:
    """Return for how many more seconds a call with this limit cannot exceed it; 0 if it has.

    A call that has not begun has all of its time left. `age`: seconds since it began; None: unknown, as if it began now.
    """
    return max(0.0, limit - age) if begun and age is not None else limit


W = TypeVar("W")


class Overruns(Generic[W]):
    """The calls that have exceeded their limit and still run, by worker."""

    def __init__(self) -> None:
        self.calls: dict[W, set[int]] = {}
        """The ids of the calls. A worker without any has no entry."""

    def began(self, worker: W, call_id: int) -> bool:
        """Note an overrun. Return whether the worker has to pause, because this is its first one."""
        is_first = worker not in self.calls
        self.calls.setdefault(worker, set()).add(call_id)
        return is_first

    def has(self, worker: W, call_id: int) -> bool:
        """Whether this call is among them."""
        return call_id in self.calls.get(worker, ())

    def workers(self) -> list[tuple[W, set[int]]]:
        """Return the workers with overruns, and the ids of these calls."""
        return list(self.calls.items())

    def ended(self, worker: W, call_ids: set[int]) -> bool:
        """Note that overruns have ended. Return whether the worker may go on, because they were its last ones."""
        left = self.calls[worker] = self.calls[worker] - call_ids
        if left:
            return False
        del self.calls[worker]
        return True
