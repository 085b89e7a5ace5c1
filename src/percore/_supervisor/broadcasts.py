"""The calls of broadcasts: each is for one particular worker, and runs there in addition to the calls that its places limit.

A worker holds at most `MOST_BROADCASTS` such calls. A worker that does not answer (it is stopped, or its loop is blocked) keeps
them even after their callers have cancelled. So further calls for it wait here, in order, until the worker answers or takes no more
calls.
"""

from collections.abc import Container, Iterable, Iterator

from percore._calls.calls import PendingCall
from percore._protocol.messages import Kind
from percore._scheduler.places import MOST_BROADCASTS
from percore._supervisor.pool_worker import PoolWorker


class Broadcasts:
    """Holds the calls of broadcasts that wait for a place in their worker."""

    def __init__(self) -> None:
        self.waiting: dict[PoolWorker, dict[PendingCall, None]] = {}
        """The waiting calls by worker, in order. A worker without waiting calls has no entry."""
        self._homes: dict[PendingCall, PoolWorker] = {}

    def __len__(self) -> int:
        """Return the number of waiting calls."""
        return len(self._homes)

    def has_place(self, member: PoolWorker) -> bool:
        """Return whether a new call for this worker can be sent at once."""
        return member.load[Kind.BROADCAST] < MOST_BROADCASTS and member not in self.waiting

    def add(self, call: PendingCall, member: PoolWorker) -> None:
        """Queue a call until its worker has a place."""
        self.waiting.setdefault(member, {})[call] = None
        self._homes[call] = member

    def remove(self, call: PendingCall) -> None:
        """Remove a call from those that wait. It may be one that does not wait."""
        member = self._homes.pop(call, None)
        if member is not None:
            calls = self.waiting[member]
            del calls[call]
            if not calls and self.waiting.get(member) is calls:  # else a garbage collection has removed the others meanwhile
                del self.waiting[member]

    def fill(self, seats: Container[PoolWorker]) -> Iterator[tuple[PendingCall, PoolWorker, bool]]:
        """Remove the calls that wait no longer. Return each with its worker, and with True if it can be sent to it now.

        False: the worker is not among `seats`, so it takes no more calls. The caller sends or ends each call before it asks for the
        next one.
        """
        for member in list(self.waiting):
            is_seated = member in seats
            while member in self.waiting and (not is_seated or member.load[Kind.BROADCAST] < MOST_BROADCASTS):
                call = next(iter(self.waiting[member]))
                self.remove(call)
                yield call, member, is_seated

    def calls(self) -> Iterable[PendingCall]:
        """Return the waiting calls."""
        return self._homes.keys()

    def withdraw(self) -> list[PendingCall]:
        """Remove and return all waiting calls."""
        calls = list(self._homes)
        self._homes.clear()
        self.waiting.clear()
        return calls
