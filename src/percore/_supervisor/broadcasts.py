"""The calls of broadcasts: each is for one particular worker, and runs there in addition to the calls that its places limit.

A worker holds at most `MOST_BROADCASTS` such calls. A worker that does not answer (it is stopped, or its loop is blocked) keeps
them even after their callers have cancelled. So further calls for it wait here, in order, until the worker answers or takes no more
calls.
"""

from typing import TYPE_CHECKING

from percore._calls.calls import PendingCall
from percore._protocol.messages import Kind
from percore._scheduler.dispatch import MOST_BROADCASTS
from percore._supervisor.pool_worker import PoolWorker

if TYPE_CHECKING:
    from percore._supervisor.supervisor import Supervisor


class Broadcasts:
    """Sends the calls of broadcasts, and holds those that wait for a place in their worker."""

    def __init__(self, supervisor: "Supervisor") -> None:
        self._supervisor = supervisor
        self.waiting: dict[PoolWorker, dict[PendingCall, None]] = {}
        """The waiting calls by worker, in order. A worker without waiting calls has no entry."""
        self._homes: dict[PendingCall, PoolWorker] = {}

    def __len__(self) -> int:
        """Return the number of waiting calls."""
        return len(self._homes)

    def submit(self, call: PendingCall, member: PoolWorker) -> None:
        """Send a call to its worker, or queue it until the worker has a place."""
        if member.load[Kind.BROADCAST] < MOST_BROADCASTS and member not in self.waiting:
            self._send(call, member)
        else:
            self.waiting.setdefault(member, {})[call] = None
            self._homes[call] = member

    def remove(self, call: PendingCall) -> None:
        """Remove a call from those that wait. It may be one that does not wait."""
        member = self._homes.pop(call, None)
        if member is not None:
            calls = self.waiting[member]
            del calls[call]
            if not calls:
                del self.waiting[member]

    def advance(self) -> None:
        """Send the calls whose workers have a place now, and end those whose workers take no more calls."""
        for member in list(self.waiting):
            is_seated = member in self._supervisor.dispatch.seats
            while member in self.waiting and (not is_seated or member.load[Kind.BROADCAST] < MOST_BROADCASTS):
                call = next(iter(self.waiting[member]))
                self.remove(call)
                if is_seated:
                    self._send(call, member)
                else:
                    self._supervisor.unanswered(member, call)

    def _send(self, call: PendingCall, member: PoolWorker) -> None:
        try:
            member.send(call)
        except BaseException as error:
            self._supervisor.failed_with(call, error, member)

    def withdraw(self) -> list[PendingCall]:
        """Remove and return all waiting calls."""
        calls = list(self._homes)
        self._homes.clear()
        self.waiting.clear()
        return calls
