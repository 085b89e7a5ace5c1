"""The life cycles of a pool's workers, and the timers for the deadlines that the life-cycle table gives to their states."""

import asyncio
from collections.abc import Callable

from percore._scheduler.lifecycle import Deadline, Event, State
from percore._supervisor.pool_worker import PoolWorker
from percore._supervisor.timing import DeadlineTimer


class Lifecycles:
    """Advances the life cycle of each worker, and runs the timer for the deadline of its state."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, seconds: dict[Deadline, float], overdue: Callable[[PoolWorker], object]
    ) -> None:
        """`seconds`: the lengths of START and END. `overdue` is called with a worker that has missed `member.deadline`."""
        self._loop = loop
        self._seconds = seconds
        self._overdue = overdue
        self.draining: set[PoolWorker] = set()
        """Draining workers that still have calls. Their deadline begins when the last of these calls has ended."""

    def advance(self, member: PoolWorker, event: Event) -> State:
        """Apply an event to a worker's life cycle and return the new state. Nothing else may call `Life.advance`.

        Raises:
            IllegalEvent: the event cannot happen in this state.
        """
        state = member.life.advance(event)
        self.look(member)
        return state

    def look(self, member: PoolWorker) -> None:
        """Start, replace or stop a worker's timer, by its state and its calls."""
        has_calls = bool(member.calls)
        if has_calls and member.life.state is State.DRAINING:
            self.draining.add(member)
        else:
            self.draining.discard(member)
        deadline = member.life.deadline(has_calls=has_calls)
        if deadline is member.deadline:
            return
        member.stop_timer()
        member.deadline = deadline
        if deadline is not None:
            member.timer = DeadlineTimer(self._loop, self._seconds[deadline], lambda: self._overdue(member))

    def look_drained(self) -> None:
        """Check whether draining workers have no calls left, and start their deadlines. To be called when calls have ended."""
        for member in list(self.draining):
            self.look(member)
