"""Workers with a limit on the calls they begin (`max_tasks_per_worker`).

A call counts from when it is sent, and no longer counts if the worker hands it back. When the limit is reached, a large number is
added to the worker's load, so that it has no free place and gets no more calls. Broadcasts go to every worker and do not count.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from percore._calls.calls import PendingCall
from percore._protocol.messages import Kind
from percore._scheduler.places import ROOM_OF_NONE
from percore._supervisor.pool_worker import PoolWorker
from percore._supervisor.timing import Turn

if TYPE_CHECKING:
    from percore._scheduler.dispatch import Dispatch

_EIGHTH: Final = 8


class LimitedWorker(PoolWorker):
    """A worker with a limit on the calls that it begins."""

    def __init__(  # noqa: PLR0913, PLR0917  # the arguments of PoolWorker, and three for the limit
        self,
        index: int,
        generation: int,
        dispatch: "Dispatch[Any, PoolWorker]",
        turn: Turn,
        limit: int,
        low: Callable[["LimitedWorker"], object],
        refused: Callable[[PendingCall], object],
    ) -> None:
        """`low` is called when few calls are left, and when none is. `refused` is called with a call that exceeds the limit."""
        super().__init__(index, generation, dispatch, turn)
        self.tickets = limit
        # The replacement starts when this many calls are left: an eighth of the limit (at least 1), and at most as many as the
        # worker can hold at once.
        self._few = min(max(1, limit // _EIGHTH), dispatch.room)
        self._low = low
        self._refused = refused

    @property
    def is_spent(self) -> bool:
        return not self.tickets

    def send(self, call: PendingCall) -> None:
        """As `PoolWorker.send`, but give a call that exceeds the limit back through `refused`.

        That happens if a `__del__` sends a call between the choice of this worker and the sending.
        """
        if call.kind == Kind.BROADCAST:
            super().send(call)
            return
        size = call.size
        if size > self.tickets:
            self._refused(call)
            return
        self._count(size)
        try:
            if self.tickets <= self._few:
                self._low(self)  # before the sending: after an error, the worker must not have the call
            super().send(call)
        except BaseException:
            self.unbegun(size)
            raise

    def unbegun(self, calls: int) -> None:
        """Uncount the calls that the worker handed back."""
        self._count(-calls)
        self._lowered(self)

    def _count(self, calls: int) -> None:
        was_spent = self.is_spent
        self.tickets -= calls
        if self.is_spent != was_spent:
            taken = -ROOM_OF_NONE if was_spent else ROOM_OF_NONE
            self.load[Kind.TASK] += taken
            self.load[Kind.THREAD] += taken
