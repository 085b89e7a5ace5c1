"""Workers that begin so many calls and no more (`max_tasks_per_worker`).

A call is counted when it is sent, and not any more when the worker has handed it back. Where the limit is reached the worker has no
free place, by its load, so nothing else is sent to it. Broadcasts, which are for every worker, are not counted.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from percore._core.dispatch import ROOM_OF_NONE
from percore._member import Member, Turn, Unit
from percore._messages import Kind

if TYPE_CHECKING:
    from percore._core.dispatch import Dispatch

_EIGHTH: Final = 8


class Limited(Member):
    """A worker with a limit on the calls that it begins."""

    def __init__(  # noqa: PLR0913, PLR0917  # those of a member, and what a limit needs
        self,
        index: int,
        generation: int,
        dispatch: "Dispatch[Any, Member]",
        turn: Turn,
        limit: int,
        low: Callable[["Limited"], object],
        refused: Callable[[Unit], object],
    ) -> None:
        """`low` is called when few calls are left, and when none is. `refused` takes back a call for which there is no place."""
        super().__init__(index, generation, dispatch, turn)
        self.tickets = limit
        # Its replacement starts before the last ones: as many as can be sent at once, but after most of its life.
        self._few = min(max(1, limit // _EIGHTH), dispatch.room)
        self._low = low
        self._refused = refused

    @property
    def is_spent(self) -> bool:
        return not self.tickets

    def send(self, call: Unit) -> None:
        """As there. A call for which no place is left is taken back: a `__del__` may have taken the last one in this moment."""
        if call.kind == Kind.BESIDE:
            super().send(call)
            return
        size = call.size
        if size > self.tickets:
            self._refused(call)
            return
        self._count(size)
        super().send(call)
        if self.tickets <= self._few:
            self._low(self)

    def unbegun(self, calls: int) -> None:
        """So many calls came back."""
        self._count(-calls)
        self._lowered()

    def _count(self, calls: int) -> None:
        was_spent = self.is_spent
        self.tickets -= calls
        if self.is_spent != was_spent:
            taken = -ROOM_OF_NONE if was_spent else ROOM_OF_NONE
            self.load[Kind.TASK] += taken
            self.load[Kind.THREAD] += taken

    @property
    def items(self) -> int:
        return self._held()[1] + self._batched

    def _held(self) -> tuple[int, int]:
        # The remainder, and no look at the tickets: another thread may ask while these and the load change.
        tasks, plain = super()._held()
        return tasks % ROOM_OF_NONE, plain % ROOM_OF_NONE
