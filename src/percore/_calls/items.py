"""The items of a map under way: sent singly (`Item`), or several in one message (`Batch`).

Items are not futures, since no task awaits a single one. The end of an item is reported to its map immediately.
"""

from collections.abc import Callable, Hashable
from math import inf
from typing import Any, ClassVar, Protocol

from percore._calls.calls import CallBase, Owner
from percore._calls.functions import Function
from percore._calls.policy import CallPlan
from percore._common.errors import CUT_OFF, RunnerClosed
from percore._protocol.interfaces import Fate, Store
from percore._protocol.messages import Body, BrokenFrame
from percore._scheduler.batching import Run
from percore._scheduler.queues import Queue


class RunningMap(Protocol):
    """A map under way, as its items see it. Its methods raise no `Exception` and run no user code."""

    function: Function
    queue: Queue[Any, Any]
    store: Store

    @property
    def owner(self) -> Owner: ...

    def ended(self, number: int, results: list[Any], arguments: int, size: int) -> None:
        """Take the results of consecutive items.

        Args:
            number: the number of the first item.
            results: the results of this item and the following ones.
            arguments: bytes of the items' pickled arguments.
            size: bytes of the results.
        """

    def failed(self, number: int, error: BaseException, arguments: int) -> None:
        """Take the error of one item. `arguments`: bytes of its pickled arguments."""

    def broke(self, error: BaseException) -> None:
        """End the map with this error, because percore itself failed and has lost some of the items."""

    def plan(self) -> CallPlan | None:
        """Return the plan for the first attempt of an item; None if it needs none."""

    def runs_alone(self, item: "Item") -> None:
        """Register an item that is under way outside a batch, so that the map cancels it singly from now on."""

    def runs_on(self, item: "Item") -> None:
        """Register an item that has ended for the map while its call still runs in a worker."""

    def left(self, batch: "Batch") -> None:
        """Forget a batch that no worker holds any more."""


def size_of(body: object) -> int:
    """Return the size in bytes of the body of an item of a batch: of its pickle, or 0 if it is sent without pickling."""
    return len(body) if type(body) is bytes else 0


class Item(CallBase):
    """One item of a map, sent as a call."""

    __slots__ = (
        "__weakref__",
        "_is_done",
        "_size",
        "accepted",
        "body",
        "call_id",
        "function",
        "key",
        "kind",
        "map",
        "member",
        "number",
        "plan",
        "queue",
    )

    call_id: int

    def __init__(  # takes everything at once: a hundred thousand items may be made per second
        self, running: RunningMap, number: int, body: Any, size: int, plan: CallPlan | None, key: Hashable | None = None
    ) -> None:
        self.map = running
        self.number = number
        self.body = body
        self.plan = plan
        self.key = key
        self.function = function = running.function
        self.kind = function.kind
        self.queue = running.queue
        self.member: Any = None
        self._size = size
        self._is_done = False
        self.accepted = 0

    def done(self) -> bool:
        """Whether the item has ended or was cancelled."""
        return self._is_done

    def cancel(self) -> None:
        """Cancel the item. Its map is not told when it ends."""
        if not self._is_done:
            self._is_done = True
            self.map.owner.cancelled(self)

    def set_result(self, value: Any) -> None:
        """End with this result, a scalar."""
        self.deliver(value, len(value) if type(value) is str or type(value) is bytes else 0)

    def deliver(self, value: Any, size: int) -> None:
        """End with this result, whose pickle had `size` bytes."""
        self._is_done = True
        try:
            self.map.ended(self.number, [value], self._size, size)
        except BaseException as error:  # a Ctrl-C, as in `Batch.values`
            self.map.broke(error)
            raise

    def set_exception(self, error: BaseException) -> None:
        """End with this error."""
        self._is_done = True
        try:
            self.map.failed(self.number, error, self._size)
        except BaseException as failure:
            self.map.broke(failure)
            raise

    def abandon(self, error: BaseException) -> None:
        self.map.runs_on(self)
        self.set_exception(error)

    def repeated(self) -> None:
        self.map.runs_alone(self)


class Batch(CallBase):
    """Several items of a map with consecutive numbers, sent in one message to one thread.

    The items begin in order. They also end in order, except for those whose result the worker's event loop has to await. The worker
    holds the first `size` items; the others were returned. The map still needs the first `wanted` items.
    """

    __slots__ = (
        "_ended",
        "_late",
        "accepted",
        "body",
        "call_id",
        "function",
        "kind",
        "map",
        "member",
        "outstanding",
        "plan",
        "queue",
        "run",
        "size",
        "wanted",
    )

    is_short = False
    key: ClassVar[None] = None
    body: None
    call_id: int
    wanted: int

    def __init__(self, running: RunningMap, run: Run, plan: CallPlan | None) -> None:
        self.map = running
        self.run = run
        self.accepted = run.mark
        self.body = None  # `message` has the bodies of the items
        self.plan = plan
        self.function = function = running.function
        self.kind = function.kind
        self.queue = running.queue
        self.member: Any = None
        self.size = self.wanted = self.outstanding = len(run.bodies)
        self._ended = 0
        self._late: set[int] = set()
        """Indexes below `_ended` of items that have not ended."""

    def done(self) -> bool:
        """Whether the map needs none of the items any more."""
        return self.wanted <= 0

    def message(self) -> Body:
        """Return the body of the BATCH."""
        run = self.run
        return self.map.store.pack_items(self.function.number, run.bodies, run.data, is_bare=run.is_bare)

    def cancel_from(self, number: int) -> None:
        """Cancel the items from this number on. The map is not told when they end."""
        wanted = max(0, number - self.run.start)
        if wanted < self.wanted:
            self.wanted = wanted
            if self.member is not None or not wanted:  # without a worker: it is about to be sent
                self.map.owner.cancelled(self)

    def running(self, fate: Fate) -> int:
        return len(self.began(self.size if fate.begun is None else fate.items))

    def seconds(self) -> float:
        batches = self.queue.batches
        if batches is None or batches.cost.seconds is None:
            return inf
        return self.outstanding * batches.cost.seconds

    def left(self) -> None:
        self.map.left(self)

    # What the worker reports

    def values(self, first: int, results: list[Any], size: int, failures: dict[int, Exception]) -> None:
        """Take the results of consecutive items and pass them on to the map.

        Args:
            first: the index of the first item in this batch.
            results: the results; those at places in `failures` are ignored.
            size: bytes of the pickled results.
            failures: errors of items, by their places in `results`.

        Raises:
            BrokenFrame: an item has ended before, or the worker does not hold it.
        """
        end = first + len(results)
        if first < self._ended or end > self.size:
            raise BrokenFrame(f"results of items {first} to {end} of a batch of {self.size}")
        if first > self._ended:
            self._late.update(range(self._ended, first))
        try:
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
                self.map.ended(self.run.start + first, results, self._arguments(first, first + len(results)), size)
        except BaseException as error:  # a Ctrl-C: they count as ended, so the death of the worker will not tell the map of them
            self.map.broke(error)
            raise

    def _part(self, first: int, results: list[Any], failures: dict[int, Exception]) -> None:
        for place, result in enumerate(results):
            number, arguments = self.run.start + first + place, self._arguments(first + place, first + place + 1)
            if place in failures:
                self.map.failed(number, failures[place], arguments)
            else:
                self.map.ended(number, [result], arguments, 0)

    def set_result(self, value: Any) -> None:
        raise BrokenFrame(f"a result of batch {self.call_id} as a whole")

    def deliver(self, value: Any, size: int) -> None:
        self.set_result(value)

    def set_exception(self, error: BaseException) -> None:
        """End the map, because percore itself failed and has lost some of the items."""
        self.map.broke(error)

    def target(self, index: int) -> "BatchItem":
        """Return one item, for an outcome that the worker reports separately.

        Raises:
            BrokenFrame: the item has ended before, or the worker does not hold it.
        """
        if not 0 <= index < self.size or (index < self._ended and index not in self._late):
            raise BrokenFrame(f"an outcome of item {index} of a batch of {self.size}")
        return BatchItem(self, index)

    def settle(self, index: int) -> None:
        """Mark one item as ended."""
        if index >= self._ended:
            self._late.update(range(self._ended, index))
            self._ended = index + 1
        else:
            self._late.discard(index)
        self.outstanding -= 1

    def gave_back(self, count: int) -> Run | None:
        """Take back the last `count` items from the worker. Return those that the map still needs.

        Raises:
            BrokenFrame: `count` is negative, or so many items include one that has ended.
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
        """Return the indexes of the items that have begun and not ended, given that `count` items have begun."""
        return [*sorted(self._late), *range(self._ended, min(count, self.size))]

    def rest(self, count: int) -> Run | None:
        """Return the items that have not begun and that the map needs, given that `count` items have begun."""
        first = max(count, self._ended)
        return self.run.part(first, self.wanted) if first < self.wanted else None

    def cut_off(self) -> None:
        """End each item that has not ended with RunnerClosed."""
        self.refuse(lambda: RunnerClosed(CUT_OFF))

    def refuse(self, refusal: Callable[[], BaseException]) -> None:
        """End each item that has not ended with a new error from `refusal`."""
        for index in self.began(self.size):
            if index < self.wanted:
                self.map.failed(self.run.start + index, refusal(), self._arguments(index, index + 1))
        self.wanted = 0

    def _arguments(self, first: int, end: int) -> int:
        if self.run.is_bare:
            return 0
        return sum(size_of(body) for body in self.run.bodies[first:end])


class BatchItem(CallBase):
    """An item of a batch whose outcome the worker reports separately: an error, or a result that is not a scalar."""

    __slots__ = ("_batch", "_index", "_is_settled", "function", "plan")

    body: None = None
    accepted: int = 0  # the wait of a batch is measured as a whole

    def __init__(self, batch: Batch, index: int) -> None:
        self._batch = batch
        self.function = batch.function
        self._index = index
        self._is_settled = False
        self.plan = batch.map.plan()

    @property
    def call_id(self) -> int:
        return self._batch.call_id

    def done(self) -> bool:
        """Whether the map does not need the item any more."""
        return self._index >= self._batch.wanted

    def leave(self, member: Any) -> None:
        batch = self._batch
        self._settle()
        member.shrink(1)
        if not batch.outstanding:
            member.take(batch.call_id)

    def set_result(self, value: Any) -> None:
        """End with this result, a scalar."""
        self.deliver(value, 0)

    def deliver(self, value: Any, size: int) -> None:
        """End with this result, whose pickle had `size` bytes."""
        batch = self._batch
        self._tell(lambda: batch.map.ended(batch.run.start + self._index, [value], self._arguments(), size))

    def set_exception(self, error: BaseException) -> None:
        """End with this error."""
        batch = self._batch
        self._tell(lambda: batch.map.failed(batch.run.start + self._index, error, self._arguments()))

    def _tell(self, tell: Callable[[], None]) -> None:
        """Tell the map of the outcome. The item has ended by then, so that the death of the worker tells no other one."""
        try:
            self._settle()
            tell()
        except BaseException as error:  # a Ctrl-C, as in `Batch.values`
            self._batch.map.broke(error)
            raise

    def _settle(self) -> None:
        if not self._is_settled:
            self._is_settled = True
            self._batch.settle(self._index)

    def renewed(self) -> Item:
        """Return a new `Item` for the same input, to send it again outside the batch."""
        run = self._batch.run
        body = run.bodies[self._index]
        return Item(self._batch.map, run.start + self._index, (body,) if run.is_bare else body, self._arguments(), self.plan)

    def _arguments(self) -> int:
        return self._batch._arguments(self._index, self._index + 1)
