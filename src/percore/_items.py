"""The inputs of a map on their way: one alone, or several in a batch.

They are no futures: nobody awaits one of them. Whatever ends one tells its map at once.
"""

import marshal
from collections.abc import Callable, Hashable
from typing import Any, ClassVar, Final, Protocol

from percore._calls import Function, Owner
from percore._core.batches import Run
from percore._core.dispatch import Queue
from percore._errors import RunnerClosed
from percore._ipc.codec import list_small
from percore._ipc.ring import BrokenFrame
from percore._messages import SLOT_BITS
from percore._policy import Plan

_MARSHAL: Final = 2
_CUT: Final = "the runner was closed before this call could end"


class Flow(Protocol):
    """A map, as its items see it. Never raises; runs no user code."""

    function: Function
    queue: Queue[Any, Any]

    @property
    def owner(self) -> Owner: ...

    def ended(self, number: int, results: list[Any], arguments: int, size: int) -> None:
        """Items from this number on have ended with these results: bytes of their pickled arguments, and of the results."""

    def failed(self, number: int, error: BaseException, arguments: int) -> None:
        """An item has ended with this error."""

    def broke(self, error: BaseException) -> None:
        """percore has failed to go on with some of the items, which are lost: the map ends with this error."""

    def plan(self) -> Plan | None:
        """What an item is run under, that has not been attempted yet."""

    def runs_alone(self, item: "Item") -> None:
        """An item is under way, in no batch, or no more: from now on it is cancelled by itself."""

    def runs_on(self, item: "Item") -> None:
        """An item ends for the map, but its call runs on in a worker."""

    def left(self, batch: "Batch") -> None:
        """A batch is no worker's any more."""


def size_of(body: object) -> int:
    """Bytes of a body, pickled: 0 for scalars that travel as they are."""
    if type(body) is bytes:
        return len(body)
    return body >> SLOT_BITS if type(body) is int else 0


class Item:
    """One input of a map, sent alone."""

    __slots__ = ("_is_done", "_size", "body", "call_id", "flow", "function", "key", "kind", "member", "number", "plan", "queue")

    size: ClassVar[int] = 1
    call_id: int

    def __init__(  # set at once, since there are a hundred thousand a second
        self, flow: Flow, number: int, body: Any, size: int, plan: Plan | None, key: Hashable | None = None
    ) -> None:
        self.flow = flow
        self.number = number
        self.body = body
        self.plan = plan
        self.key = key
        self.function = function = flow.function
        self.kind = function.kind
        self.queue = flow.queue
        self.member: Any = None
        self._size = size
        self._is_done = False

    def done(self) -> bool:
        """Whether it has ended, or was cancelled."""
        return self._is_done

    def cancel(self) -> None:
        """Its map has no use for it any more, and will hear nothing of it."""
        if not self._is_done:
            self._is_done = True
            self.flow.owner.cancelled(self)

    def set_result(self, value: Any) -> None:
        """End with this result, a scalar."""
        self.deliver(value, len(value) if type(value) is str or type(value) is bytes else 0)

    def deliver(self, value: Any, size: int) -> None:
        """End with this result, whose pickle had `size` bytes."""
        self._is_done = True
        self.flow.ended(self.number, [value], self._size, size)

    def set_exception(self, error: BaseException) -> None:
        """End with this error."""
        self._is_done = True
        self.flow.failed(self.number, error, self._size)

    def cut_off(self) -> None:
        """End by the closing of the runner."""
        self.set_exception(RunnerClosed(_CUT))


class Batch:
    """Several inputs of a map, of consecutive numbers, sent in one message to one thread.

    They begin in order, and end in order but for those that the worker's loop has to await. `wanted` of them, from the first on,
    are of use to the map; the first `size` are with the worker, the others came back.
    """

    __slots__ = (
        "_ended",
        "_late",
        "call_id",
        "flow",
        "function",
        "is_bare",
        "kind",
        "member",
        "outstanding",
        "plan",
        "queue",
        "run",
        "size",
        "wanted",
    )

    key: ClassVar[None] = None
    body: ClassVar[None] = None
    """It has those of its items."""
    call_id: int

    def __init__(self, flow: Flow, run: Run, plan: Plan | None) -> None:
        self.flow = flow
        self.run = run
        self.plan = plan
        self.function = function = flow.function
        self.kind = function.kind
        self.queue = flow.queue
        self.member: Any = None
        self.size = self.wanted = self.outstanding = len(run.bodies)
        self._ended = 0
        self._late: set[int] = set()
        """Items before `_ended` that have not ended."""

    def done(self) -> bool:
        """Whether nothing of it is wanted any more."""
        return self.wanted <= 0

    def message(self) -> bytes:
        """What the worker is told."""
        run = self.run
        return marshal.dumps((self.function.number, list_small(run.data) if run.data else run.bodies, run.is_bare), _MARSHAL)

    def cancel_from(self, number: int) -> None:
        """The map has no use for its items from this number on, and will hear nothing of them."""
        wanted = max(0, number - self.run.start)
        if wanted < self.wanted:
            self.wanted = wanted
            self.flow.owner.cancelled(self)

    # What its worker says of it

    def values(self, first: int, results: list[Any], size: int, failures: dict[int, Exception]) -> None:
        """Items have ended with these results, or failures in places of them. `size`: bytes of those that were pickled.

        Raises:
            BrokenFrame: they have not begun, or have ended before.
        """
        end = first + len(results)
        if first < self._ended or end > self.size:
            raise BrokenFrame(f"results of items {first} to {end} of a batch of {self.size}")
        if first > self._ended:
            self._late.update(range(self._ended, first))
        self._ended = end
        self.outstanding -= len(results)
        if end > self.wanted:
            del results[max(0, self.wanted - first) :]
        if failures:
            self._part(first, results, failures)
        elif results:
            kind = type(results[0])
            if not size and (kind is str or kind is bytes):
                size = sum(len(value) for value in results if type(value) is kind)
            self.flow.ended(self.run.start + first, results, self._arguments(first, first + len(results)), size)

    def _part(self, first: int, results: list[Any], failures: dict[int, Exception]) -> None:
        for place, result in enumerate(results):
            number, arguments = self.run.start + first + place, self._arguments(first + place, first + place + 1)
            if place in failures:
                self.flow.failed(number, failures[place], arguments)
            else:
                self.flow.ended(number, [result], arguments, 0)

    def item(self, index: int) -> "BatchItem":
        """One of its items, of which the worker says something else.

        Raises:
            BrokenFrame: it has ended before, or does not exist.
        """
        if not 0 <= index < self.size or (index < self._ended and index not in self._late):
            raise BrokenFrame(f"an outcome of item {index} of a batch of {self.size}")
        return BatchItem(self, index)

    def settle(self, index: int) -> None:
        """This item has ended."""
        if index >= self._ended:
            self._late.update(range(self._ended, index))
            self._ended = index + 1
        else:
            self._late.discard(index)
        self.outstanding -= 1

    def gave_back(self, count: int) -> Run | None:
        """The worker has handed back so many of its last items: those of them that are still wanted.

        Raises:
            BrokenFrame: there are not so many.
        """
        size = self.size - count
        if count < 0 or size < self._ended:
            raise BrokenFrame(f"{count} items of a batch of {self.size} came back")
        run = self.run
        back = run.part(size, self.wanted) if self.wanted > size else None
        self.size = size
        self.wanted = min(self.wanted, size)
        self.outstanding -= count
        return back

    def began(self, count: int) -> list[int]:
        """The items that had begun and not ended, when `count` of them had begun."""
        return [*sorted(self._late), *range(self._ended, min(count, self.size))]

    def rest(self, count: int) -> Run | None:
        """The wanted items that had not begun, when `count` of them had."""
        first = max(count, self._ended)
        return self.run.part(first, self.wanted) if first < self.wanted else None

    def refuse(self, refusal: Callable[[], BaseException]) -> None:
        """End what has not ended, each item with an error of its own."""
        for index in self.began(self.size):
            if index < self.wanted:
                self.flow.failed(self.run.start + index, refusal(), self._arguments(index, index + 1))
        self.wanted = 0

    def _arguments(self, first: int, end: int) -> int:
        if self.run.is_bare:
            return 0
        return sum(size_of(body) for body in self.run.bodies[first:end])


class BatchItem:
    """An item of a batch that ends by itself: with an error, or with a result that is no scalar."""

    __slots__ = ("_batch", "_index", "plan")

    def __init__(self, batch: Batch, index: int) -> None:
        self._batch = batch
        self._index = index
        self.plan = batch.flow.plan()

    def done(self) -> bool:
        """Whether nobody wants it."""
        return self._index >= self._batch.wanted

    def set_result(self, value: Any) -> None:
        """End with this result, a scalar."""
        self.deliver(value, 0)

    def deliver(self, value: Any, size: int) -> None:
        """End with this result, whose pickle had `size` bytes."""
        batch = self._batch
        batch.flow.ended(batch.run.start + self._index, [value], self._arguments(), size)

    def set_exception(self, error: BaseException) -> None:
        """End with this error."""
        self._batch.flow.failed(self._batch.run.start + self._index, error, self._arguments())

    def cut_off(self) -> None:
        """End by the closing of the runner."""
        self.set_exception(RunnerClosed(_CUT))

    def renewed(self) -> Item:
        """Itself, to be sent once more, alone."""
        run = self._batch.run
        body = run.bodies[self._index]
        return Item(self._batch.flow, run.start + self._index, (body,) if run.is_bare else body, self._arguments(), self.plan)

    def _arguments(self) -> int:
        return self._batch._arguments(self._index, self._index + 1)
