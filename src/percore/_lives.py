"""The lives of the workers of a pool, with the deadlines that the life-cycle table gives to their states."""

import asyncio
from collections.abc import Callable

from percore._core.lifecycle import Deadline, Event, State
from percore._member import Member
from percore._patience import Patience


class Lives:
    """Advances the life of each worker, and keeps the deadline of its state."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, seconds: dict[Deadline, float], overdue: Callable[[Member], object]
    ) -> None:
        """`seconds`: how long START and END are. `overdue` is called when a worker has missed its deadline, `member.deadline`."""
        self._loop = loop
        self._seconds = seconds
        self._overdue = overdue
        self.draining: set[Member] = set()
        """Those that drain and have calls: their deadline begins when the last of these has ended."""

    def advance(self, member: Member, event: Event) -> State:
        """Take an event of a worker's life, and return its new state. A life must not go on in any other way.

        Raises:
            IllegalEvent: it cannot happen in this state.
        """
        state = member.life.advance(event)
        self.look(member)
        return state

    def look(self, member: Member) -> None:
        """Let the deadline of a worker follow its state and its calls."""
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
            member.timer = Patience(self._loop, self._seconds[deadline], lambda: self._overdue(member))

    def look_drained(self) -> None:
        """Calls have ended: look whether they were the last ones of draining workers."""
        for member in list(self.draining):
            self.look(member)
