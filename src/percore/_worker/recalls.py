"""Recalls: a worker hands back plain calls that have not begun, so that other workers can run them.

When the supervisor recalls calls, the worker hands back waiting calls first, then parts of batches that take too long.
"""

import time
from collections.abc import Collection
from typing import TYPE_CHECKING, Any, Final

from percore._protocol.messages import RETURNED, Body
from percore._worker.answers import WorkerFunction
from percore._worker.batches import WorkerBatch
from percore._worker.streams import TaskStream, ThreadStream
from percore._worker.terms import Terms
from percore._worker.threads import Threads

if TYPE_CHECKING:
    from percore._protocol.interfaces import WorkerChannel

SPLIT_AFTER: Final = 0.002
"""Seconds that a batch may run before a recall takes items from it. Batches are sized to take one millisecond."""

Item = tuple[WorkerFunction | None, Body, Terms | None]
Streams = dict[int, TaskStream | ThreadStream]


class Recalls:
    """Hands back plain calls that have not begun. Only the loop calls the methods, unless their docstring says otherwise."""

    def __init__(
        self, channel: "WorkerChannel", threads: Threads, batches: dict[int, WorkerBatch], streams: Streams, mask: int
    ) -> None:
        """`batches` and `streams`: those that have not ended. A call that is handed back leaves them.

        `mask`: the bits of a call's id that are its place.
        """
        self._channel = channel
        self._loop = channel.loop
        self._threads = threads
        self._batches = batches
        self._streams = streams
        self._mask = mask
        self.was_asked = False
        """Whether the supervisor has asked since `PlainCalls` last told it that calls are held."""

    def withdraw(self, call_id: int) -> None:
        """Hand back this call if it has not begun."""
        if call_id in self._threads.waiting:
            self.take_back(call_id)

    def recall(self, count: int, stay: Collection[int]) -> None:
        """Hand back about `count` calls that have not begun, except those in the places `stay`, then send RETURNED with id 0."""
        self.was_asked = True
        if self._give_back(count, stay):
            self._channel.send(RETURNED, 0, None)
        else:
            self._split(count)

    def give_back_all(self) -> None:
        """Hand back all calls and items that have not begun."""
        for call_id in reversed(list(self._threads.waiting)):
            self.take_back(call_id)
        for call_id, batch in self._batches.copy().items():
            if count := batch.give_up(batch.end):
                self._channel.send(RETURNED, call_id, count)

    def take_all(self) -> dict[int, int]:
        """Take back all calls and items that have not begun, and tell nobody. No other begins. Any thread may call this.

        Return how many items of each of these calls have begun: 0 for a call that has not begun.
        """
        begun: dict[int, int] = {}
        for call_id in list(self._threads.waiting):
            item = self._threads.take_back(call_id)
            if item is not None:  # else a thread has begun it
                begun[call_id] = 0
                if type(item) is WorkerBatch:
                    self._batches.pop(call_id, None)
        for call_id, batch in self._batches.copy().items():
            batch.give_up(batch.end)
            begun[call_id] = batch.end
        return begun

    def give_rest_back(self, call_id: int) -> None:
        """Hand back the items of a batch that wait behind an item which waits for its nested calls."""
        batch = self._batches.get(call_id)
        if batch is not None and (count := batch.give_up(len(batch.items))):
            self._channel.send(RETURNED, call_id, count)

    def take_back(self, call_id: int) -> int:
        """Hand back a call, or a whole batch. Return how many calls or items that were: 0 if it has begun."""
        item = self._threads.take_back(call_id)
        if item is None:
            return 0
        count = None
        if type(item) is WorkerBatch:
            count = len(item.items)
            del self._batches[call_id]
        self._streams.pop(call_id, None)
        self._channel.send(RETURNED, call_id, count)
        return count or 1

    def _give_back(self, most: int, stay: Collection[int] | None) -> int:
        """Hand back up to `most` waiting calls, except those in the places `stay`. Return how many calls or items that were.

        With `stay=None` hand back batches only: calls that came after the recall may have a key.
        """
        given = 0
        for call_id, item in reversed(self._unbegun()):
            if given >= most:
                break
            if type(item) is WorkerBatch if stay is None else call_id & self._mask not in stay:
                given += self.take_back(call_id)
        return given

    def _unbegun(self) -> list[tuple[int, Any]]:
        """Return the waiting calls but those that free threads are about to begin.

        The supervisor would only send these back here and recall them again.
        """
        free, pacing = self._threads.free(), self._threads.pacing
        waiting = [item for item in self._threads.waiting.copy().items() if not _is_broadcast(item[1])]
        if pacing is None or not pacing.held:
            return waiting[free:]
        unbegun: list[tuple[int, Any]] = []
        for call_id, item in waiting:
            if free > 0 and not pacing.is_held(call_id):
                free -= 1
            else:
                unbegun.append((call_id, item))
        return unbegun

    def _split(self, most: int) -> None:
        """Hand back half of the items that running batches have not begun, once the batches have run for `SPLIT_AFTER`."""
        now, wait, given = time.perf_counter(), 0.0, 0
        for call_id, batch in self._batches.copy().items():
            age = 0.0 if batch.begun_at is None else now - batch.begun_at
            if batch.items and age < SPLIT_AFTER:
                wait = max(wait, SPLIT_AFTER - age)
            elif count := batch.give_up((len(batch.items) + 1) // 2):
                given += count
                self._channel.send(RETURNED, call_id, count)
        if wait and not given:
            self._loop.call_later(wait, self._split_later, most)
        else:
            self._channel.send(RETURNED, 0, None)

    def _split_later(self, most: int) -> None:
        if self._give_back(most, None):
            self._channel.send(RETURNED, 0, None)
        else:
            self._split(most)


def _is_broadcast(item: Item | WorkerBatch) -> bool:
    return type(item) is tuple and item[2] is not None and item[2].is_broadcast
