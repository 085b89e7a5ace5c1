"""The items of a map under way: from the submission of an input to the hand-over of its result."""

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final

from percore._calls.items import Batch, Item, size_of
from percore._calls.policy import DEFAULT, CallPlan
from percore._calls.shared_objects import Share
from percore._common.endings import wake
from percore._common.errors import RunnerClosed, as_error
from percore._common.log import Faults
from percore._map.results import Failure, Results
from percore._map.rows import Spec
from percore._protocol.messages import Kind
from percore._scheduler.batching import Batches, Run
from percore._scheduler.key_names import Name
from percore._scheduler.map_life import MapEvent, MapLife
from percore._scheduler.queues import Queue
from percore._scheduler.windows import AHEAD_SECONDS, BATCH_SECONDS, Window, most_of
from percore._supervisor.supervisor import Supervisor

if TYPE_CHECKING:
    import asyncio

    from percore._calls.functions import Function

_FEW: Final = 64

_LONG: Final = 2 * BATCH_SECONDS
_MEASURED: Final = 8
"""Among this many single items that take longer than `_LONG`, one is sent as a batch, to be measured."""


class InFlight:
    """The items of one map. It implements `Taker` for the rows, and `RunningMap` for the items.

    Invariants:
        `window`: handed_over <= ended <= pulled.
        Each item that is pulled and has not ended is in exactly one place: in `batches` while it waits to be sent in a batch, in
        `_alive`, in a batch in `_sent`, or with the supervisor, which handles a dead worker's items and retries.
        `admitted` is the number of items that entered admission and have not left it.
        After `close`, `batches`, `_alive` and `_sent` are empty and `admitted` is 0.
    """

    def __init__(
        self, supervisor: Supervisor, function: "Function", spec: Spec, context: Any, results: Results, life: MapLife
    ) -> None:
        self.owner = supervisor.calls
        self.supervisor = supervisor
        self.store = supervisor.store
        self.names = supervisor.dispatch.names
        self.function = function
        self.life = life
        self.failures = 0
        """Items that have ended with an error."""
        self.admitted = 0
        """Items of this map that count as pending for `max_pending`."""
        self.given: dict[int, Any] = {}
        """The inputs of items that have not ended, by number, if the map yields pairs."""
        self.space_waiter: asyncio.Future[None] | None = None
        self.wake_at = 0
        """The value of `window.handed_over` below which handing over results need not wake the feeder."""
        self._result_waiter: asyncio.Future[None] | None = None
        self._loop = supervisor.loop
        self._spec = spec
        self._policy = policy = spec.policy or supervisor.policy
        self._context = context
        self._results = results
        self._alive: dict[int, Item] = {}
        """Items under way outside batches, by number."""
        self._sent: dict[Batch, None] = {}
        """Batches that a worker holds."""
        self._leaving: list[Item] = []
        """Items that have ended for the map while their calls may still run. They need the function for that long."""
        self._most_leaving = _FEW
        self._unmeasured = 0
        is_batched = function.kind == Kind.THREAD and bool(function.number) and spec.key is None
        is_batched &= policy is None or policy.is_plain
        self.batches: Batches[Batch | Item] | None = None
        if is_batched:
            self.batches = Batches(self._make_batch, self.store.heaviest_batch, function.cost)
        self.queue: Queue[Any, Any] = Queue(function.kind, self.batches)
        self.window = Window(spec.window, *self._bounds())

    def _bounds(self) -> tuple[int, int]:
        """Return how many calls the workers may hold together, and the upper limit for the window."""
        workers, admission = len(self.supervisor.slots), self.supervisor.admission
        most = sys.maxsize if admission is None else admission.limit
        if self._spec.window is None:
            most = min(most, most_of(workers))
        return self.supervisor.dispatch.room_for(self.function.kind) * workers, most

    def resized(self) -> None:
        """Have the window follow the number of workers, which has changed."""
        self.window.resize(*self._bounds())
        self.wake_at = self.window.wake_at()
        if self.space_waiter is not None and self.window.is_worth_a_pull():
            wake(self.space_waiter)

    # For the feeder and the user of the results

    async def wait(self) -> None:
        """Wait until results are ready or the map has advanced."""
        waiter = self._result_waiter = self._loop.create_future()
        if not self.is_over():  # asked again: since the caller has asked, a garbage collection may have closed the map
            await waiter

    def wake(self) -> None:
        """Wake the task that waits for results."""
        wake(self._result_waiter)

    def is_over(self) -> bool:
        """Whether no more items will end for the map: it was stopped, or all items have ended and no more will come."""
        life, window = self.life, self.window
        return not life.pulls and (not life.gives or window.ended == window.pulled)

    def hand_over(self, count: int, size: float) -> None:
        """Count `count` results, of `size` bytes each, as handed over to the user."""
        window = self.window
        window.hand_over(count * size, count)
        if window.handed_over >= self.wake_at and self.space_waiter is not None and window.is_worth_a_pull():
            wake(self.space_waiter)

    def leave(self, count: int) -> None:
        """Make room for `count` other calls under `max_pending`."""
        admission = self.supervisor.admission
        if admission is not None:
            assert count <= self.admitted
            self.admitted -= count
            admission.leave(count)

    def close(self, faults: Faults) -> None:
        """Cancel and forget all items, and the results that are left. Call this once the map is closed."""
        owner = self.owner
        with faults:
            self.cancel_from(0)
        with faults:
            owner.dispatch.close(self.queue)
        with faults:
            self.leave(self.admitted)
        calls: list[Item | Batch] = [*self._leaving, *self._sent]
        self._leaving, self._sent, self.given = [], {}, {}
        with faults:
            self.supervisor.functions.retire(self.function, calls)
        with faults:  # it may run user code
            self._results.drop()

    # Submitting

    def is_done(self) -> bool:
        """Implement `Taker`."""
        return not self.life.pulls or not self.owner.phase.begins

    def take_run(self, run: Run, size: int) -> None:
        """Implement `Taker`."""
        assert self.batches is not None
        try:
            self.window.pull(len(run.bodies), size)
            self.batches.append(run._replace(mark=self.function.meter.mark_run()))
        except BaseException as error:  # they count as pulled, and may wait nowhere
            self.broke(error)
            raise

    def take_item(self, body: Any, size: int, key: Name | None, shares: Sequence[Share]) -> None:
        """Implement `Taker`."""
        try:
            self._accept(Item(self, self.window.pulled, body, size, self.plan(), key), size, shares)
        except BaseException as error:  # as in `take_run`
            self.broke(error)
            raise

    def _accept(self, item: Item, size: int, shares: Sequence[Share]) -> None:
        self.window.pull(1, size)
        if shares:
            self.owner.shares.hold(item, shares)
        if self._policy is not None and self._policy.is_limited:
            self.owner.limits.limit(item, self._policy)
        if self._policy is not None and self._policy.rate is not None:
            self.owner.rates.limit(item, self._policy)
        self.owner.accept(item)
        # Known only now: user code that a garbage collection runs cannot cancel it while it is neither in a queue nor in a worker.
        if not item.done():
            self._alive[item.number] = item
            if self.life.is_closed:
                self.cancel_from(0)

    def take_failure(self, error: BaseException) -> None:
        """Implement `Taker`."""
        number = self.window.pulled
        self.window.pull(1, 0)
        self.failed(number, error, 0)

    def plan(self) -> CallPlan | None:
        """Return the plan for the first attempt of an item; None if it needs none."""
        if self._context is None and (self._policy is None or not self._policy.needs_plan):
            return None
        return CallPlan(self._policy or DEFAULT, self._context)

    def _make_batch(self, run: Run) -> Batch | Item:
        try:
            return self._batch_of(run)
        except BaseException as error:  # end the map: the items wait again, and would fail again
            self.broke(error)
            raise

    def _batch_of(self, run: Run) -> Batch | Item:
        if len(run.bodies) == 1 and self._goes_alone():
            body = (run.bodies[0],) if run.is_bare else run.bodies[0]
            item = Item(self, run.start, body, 0 if run.is_bare else size_of(body), self.plan())
            item.accepted = run.mark
            self._alive[run.start] = item
            return item
        batch = Batch(self, run, CallPlan(DEFAULT, self._context) if self._context is not None else None)
        self._sent[batch] = None
        return batch

    def _goes_alone(self) -> bool:
        """Whether to send a single item as a plain call, which costs less than a batch of one.

        Some single items are sent as batches all the same, since only batches are measured.
        """
        assert self.batches is not None
        seconds = self.batches.cost.seconds
        if seconds is None or seconds < _LONG:
            return False
        self._unmeasured = (self._unmeasured + 1) % _MEASURED
        return self._unmeasured > 0

    # Under way

    def runs_alone(self, item: Item) -> None:
        """Implement `RunningMap`."""
        self._alive[item.number] = item

    def runs_on(self, item: Item) -> None:
        """Implement `RunningMap`."""
        if self.function.users:
            if len(self._leaving) >= self._most_leaving:
                self._leaving = [item for item in self._leaving if item.member is not None]
                self._most_leaving = max(_FEW, 2 * len(self._leaving))
            self._leaving.append(item)

    def left(self, batch: Batch) -> None:
        """Implement `RunningMap`."""
        self._sent.pop(batch, None)

    def cancel_from(self, number: int) -> None:
        """Cancel the items from this number on, the last ones first.

        In the other order: 1. a worker reads that its running call is cancelled  2. it begins the next call  3. it reads that this
        one is cancelled, too.
        """
        if self.batches is not None:
            self.batches.drop_from(number)
        alive = self._alive.copy()  # a garbage collection may run user code that ends calls
        for item in [item for place, item in reversed(alive.items()) if place >= number]:
            self._alive.pop(item.number, None)
            item.cancel()
            if item.member is not None:
                self.runs_on(item)
        for batch in reversed(list(self._sent)):
            batch.cancel_from(number)

    # Ending

    def ended(self, number: int, results: list[Any], arguments: int, size: int) -> None:
        """Implement `RunningMap`."""
        try:
            if self.life.is_closed:
                return
            alive = self._alive
            if alive:
                alive.pop(number, None)
            if self._spec.pairs:
                results = [(self.given.pop(place), result) for place, result in enumerate(results, number)]
            self._results.put(number, results, size)
            self._has_ended(len(results), arguments, size)
        except BaseException as error:
            self.broke(error)
            if not isinstance(error, Exception):
                raise

    def failed(self, number: int, error: BaseException, arguments: int) -> None:
        """Implement `RunningMap`."""
        try:
            self._failed(number, error, arguments)
        except BaseException as fault:
            self.broke(fault)
            if not isinstance(fault, Exception):
                raise

    def _failed(self, number: int, error: BaseException, arguments: int) -> None:
        life, results = self.life, self._results
        if life.is_closed:
            return
        self._alive.pop(number, None)
        self.failures += 1
        if self._spec.return_exceptions and not (isinstance(error, RunnerClosed) and self.owner.phase.is_closing):
            results.put(number, [(self.given.pop(number), error) if self._spec.pairs else error], 0)
        elif results.is_list or not self._spec.ordered:  # raise the error at once
            life.stop(error)
            wake(self.space_waiter)
        else:
            life.advance(MapEvent.EXHAUST)
            wake(self.space_waiter)
            results.put(number, [Failure(error)], 0)
            self.cancel_from(number + 1)
        self._has_ended(1, arguments, 0)

    def broke(self, error: BaseException) -> None:
        """Implement `RunningMap`."""
        self.life.stop(as_error(error, "percore"))
        wake(self.space_waiter)
        wake(self._result_waiter)

    def _has_ended(self, count: int, arguments: int, size: int) -> None:
        window, batches = self.window, self.batches
        window.end(count, arguments, size, self._loop.time())
        if batches is not None and (seconds := batches.cost.seconds) is not None:
            workers = len(self.supervisor.slots)
            window.batch = batches.cost.whole(workers)
            if not window.is_rated:
                window.expect(int(workers * AHEAD_SECONDS / seconds))
        if self.admitted:
            self.leave(count)
        is_list = self._results.is_list
        if is_list:
            window.hand_over(size, count)
        if self.space_waiter is not None and window.is_worth_a_pull():
            wake(self.space_waiter)
        if not is_list or self.is_over():  # `collect` waits for the whole list
            wake(self._result_waiter)
