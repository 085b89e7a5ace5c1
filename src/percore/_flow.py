"""A map under way: its `Flow` pulls inputs, submits items and hands results over.

A task, the feeder, pulls and submits while the window has room. Items report their end to the flow. `_map` iterates over the
results.
"""

import asyncio
import sys
from collections.abc import AsyncGenerator, Callable
from typing import TYPE_CHECKING, Any, Final

from percore._core.batches import Batches, Run
from percore._core.dispatch import Queue
from percore._core.flow import AHEAD_SECONDS, BATCH_SECONDS, Window, most_of
from percore._core.names import Name
from percore._errors import RunnerClosed, as_error, shown
from percore._faults import Faults
from percore._inputs import Inputs, Pulled
from percore._items import Batch, Item, size_of
from percore._messages import Kind
from percore._policy import DEFAULT, Plan
from percore._results import AsTheyCome, Failure, Listed, Ordered, Results
from percore._rows import Rows, Spec
from percore._shares import Share
from percore._supervisor import Supervisor

if TYPE_CHECKING:
    from percore._functions import Function

_PULL_SECONDS: Final = 0.003
"""How long pulling from an input may keep the event loop busy before other tasks run."""

_TURNS: Final = 8
"""Iterations of the event loop left to other tasks after a single pull from a sync input took longer than `_PULL_SECONDS`.

Such an input blocks the loop, and events that became ready meanwhile pass through several tasks: the loop sees the descriptor, one
task reads from it, another task waits for the first."""

_CHUNK_SECONDS: Final = 0.0005
_MOST_AT_ONCE: Final = 8192
_STEP: Final = 12

_FEW: Final = 64

_LONG: Final = 2 * BATCH_SECONDS
_MEASURED: Final = 8
"""Among this many single items that take longer than `_LONG`, one is sent as a batch, to be measured."""


class Flow:
    """One map under way: its inputs, its items and its results."""

    function: "Function"
    queue: Queue[Any, Any]
    _batches: Batches[Batch | Item] | None
    _rows: Rows
    _window: Window

    def __init__(self, supervisor: Supervisor, fn: Callable[..., Any], inputs: Inputs, spec: Spec, context: Any) -> None:
        self.owner = supervisor
        self.names = supervisor.dispatch.names
        self._loop = supervisor.loop
        self._fn = fn
        self._inputs = inputs
        self._spec = spec
        self._policy = spec.policy or supervisor.policy
        self._context = context
        self._admitted = 0
        """Items of this map that count as pending for `max_pending`."""
        self._alive: dict[int, Item] = {}
        """Items under way outside batches, by number."""
        self._sent: dict[Batch, None] = {}
        """Batches that a worker holds."""
        self._leaving: list[Item] = []
        """Items that have ended for the map while their calls may still run. They need the function for that long."""
        self._given: dict[int, Any] = {}
        """The inputs of items that have not ended, by number, if the map yields pairs."""
        self._results: Results = Ordered() if spec.ordered else AsTheyCome()
        self._is_list = False
        self._is_feeding = self._is_fed = self._is_closed = False
        """Whether the feeder has begun to run; whether nothing more is pulled; whether `close` was called."""
        self._is_stopped = False
        """The map yields no more results: it was closed, or `_error` is set."""
        self._error: BaseException | None = None
        """An error to raise as soon as possible."""
        self._failure: BaseException | None = None
        """An error to raise after the results of everything that was pulled."""
        self._feeder: asyncio.Task[None] | None = None
        self._result_waiter: asyncio.Future[None] | None = None
        self._space_waiter: asyncio.Future[None] | None = None
        self._wake_at = 0
        self._pulled_at = 0.0
        self._unmeasured = 0
        self._most_leaving = _FEW

    # Results

    async def collect(self) -> list[Any]:
        """Run the map to its end and return all results. A map that is closed meanwhile returns an empty list.

        Raises:
            BaseException: the first error of an item, or the error of an input.
        """
        self._is_list = True
        self._results = results = Listed(ordered=self._spec.ordered)
        self._begin()
        try:
            while not self._is_stopped and not self._is_over():
                await self._wait()
            self._raise()
            return results.values if not self._is_closed else []
        finally:
            await self.close()

    async def stream(self) -> AsyncGenerator[Any]:
        """Yield the results one by one."""
        if self._is_closed:  # closed before the first result was requested
            return
        self._begin()
        ready = self._results.ready
        try:
            while not self._is_stopped:
                if not ready:
                    if self._is_over():
                        break
                    await self._wait()
                    continue
                values, size = ready.popleft()
                # Count each result if the user has set a window, or if results take memory. Otherwise count them by the dozen,
                # with the last result of each dozen.
                step = 1 if self._spec.window is not None or size else _STEP
                kept = 0
                for value in values:
                    kept += 1
                    if kept >= step:
                        self._hand_over(kept, size)
                        kept = 0
                    if type(value) is Failure:
                        raise value.error
                    yield value
                    if self._is_stopped:
                        break
                self._hand_over(kept, size)
            if not self._is_closed:
                self._raise()
        finally:
            await self.close()

    def _hand_over(self, count: int, size: float) -> None:
        window = self._window
        window.hand_over(count * size, count)
        if window.handed_over >= self._wake_at and self._space_waiter is not None and window.is_worth_a_pull():
            _wake(self._space_waiter)

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error
        if self._failure is not None:
            raise self._failure

    def _is_over(self) -> bool:
        return self._is_fed and self._window.ended == self._window.pulled

    async def _wait(self) -> None:
        self._result_waiter = self._loop.create_future()
        await self._result_waiter

    async def close(self) -> None:
        """Cancel the items under way and close the generators among the inputs. The map yields no more results. Idempotent.

        If cancelled, it has cancelled the items all the same and still closes the generators, but the feeder may not have ended.
        """
        if self._is_closed:
            return
        self._is_closed = self._is_fed = self._is_stopped = True
        _wake(self._result_waiter)
        feeder = self._feeder
        if feeder is None:  # the map has not begun
            return
        owner = self.owner
        owner.enders.discard(self._end)
        faults = Faults("a map was closed")
        with faults:
            self.cancel_from(0)
        with faults:
            owner.dispatch.close(self.queue)
        with faults:
            self._leave(self._admitted)
        leaving, self._leaving = self._leaving, []
        with faults:
            owner.functions.retire(self.function, (*leaving, *self._sent))
        faults.finish()
        try:
            if not feeder.done():
                feeder.cancel()
                await asyncio.wait([feeder])
        finally:  # also when this task is cancelled
            await self._inputs.close()

    # Feeding

    def _begin(self) -> None:
        """Hold the function and start the feeder.

        `collect` and `stream` call this when the first result is requested, since from then on they are sure to close the map.
        """
        owner, spec, inputs = self.owner, self._spec, self._inputs
        self.function = function = owner.functions.hold(self._fn)
        try:
            inputs.open()
        except BaseException:
            owner.functions.retire(function, ())
            raise
        if self._is_closed:  # user code run by `hold` or `open` has closed the map
            owner.functions.retire(function, ())
            return
        is_batched = function.kind == Kind.THREAD and bool(function.number) and spec.key is None
        is_batched &= self._policy is None or self._policy.is_plain
        self._batches = Batches(self._make_batch, function.cost) if is_batched else None
        self.queue = Queue(function.kind, self._batches)
        self._rows = Rows(owner.functions, function, spec, self, is_single=inputs.is_single, is_batched=is_batched)
        workers = len(owner.slots)
        most = sys.maxsize if owner.admission is None else owner.admission.limit
        if spec.window is None:
            most = min(most, most_of(workers))
        self._window = Window(spec.window, owner.dispatch.room_for(function.kind) * workers, most)
        owner.dispatch.open(self.queue)
        owner.enders.add(self._end)
        self._feeder = self._loop.create_task(self._feed(), name="percore-map")

    def _end(self) -> None:
        """Stop pulling, because the runner takes no more calls."""
        if not self._is_fed:
            self._failure = self.owner.phase.refusal()
            # The feeder may be waiting for an input that never comes. If it were cancelled before its first step, none of its
            # code would run, so `_is_fed` would stay false.
            if self._feeder is not None and self._is_feeding:
                self._feeder.cancel()

    async def _feed(self) -> None:
        self._is_feeding = True
        try:
            await self._feed_until_end()
            self._send()
        except asyncio.CancelledError as error:
            # The input raised it, or the map is being ended. In the second case `_failure` is set already, or nothing reads it.
            if self._failure is None:
                self._failure = RuntimeError(f"the input raised {shown(error)}")
                self._failure.__cause__ = error
        except Exception as error:  # an error of percore: those of the input arrive in `Pulled`
            self._error = error
            self._is_stopped = True
        except BaseException as error:  # treated as a Ctrl-C: it propagates, and the map reports that the input was cut short
            self._failure = RuntimeError(f"reading the input was interrupted by {shown(error)}")
            self._send()  # the loop may run on, and the map then ends once the items before the error have ended
            raise
        finally:
            self._is_fed = True
            _wake(self._result_waiter)

    async def _feed_until_end(self) -> None:
        chunk = 1
        begun = self._loop.time()
        while not self._is_fed:
            space = self._window.space()
            if space <= 0:
                self._send()
                self._space_waiter = self._loop.create_future()
                self._wake_at = self._window.wake_at()
                await self._space_waiter
                self._space_waiter = None
                begun = self._loop.time()
                continue
            if not self.owner.phase.accepts:
                self._failure = self.owner.phase.refusal()
                return
            pulled = await self._pull(min(space, chunk))
            if self._is_fed:  # an item failed while this task waited for the input
                return
            if not self._submit(pulled.rows):
                return
            if pulled.is_end:
                self._failure = pulled.error
                return
            now = self._loop.time()
            took = now - self._pulled_at
            # The first rows of a chunk wait for its last one, so a chunk should take at most half a millisecond.
            chunk = min(_MOST_AT_ONCE, chunk * 2) if took < _CHUNK_SECONDS else max(1, chunk // 2)
            if now - begun > _PULL_SECONDS:  # even an async input may never suspend
                self._send()
                for _ in range(_TURNS if self._inputs.has_sync and took > _PULL_SECONDS else 1):
                    await asyncio.sleep(0)
                begun = self._loop.time()

    async def _pull(self, most: int) -> Pulled:
        admission = self.owner.admission
        if self._inputs.is_async:
            # Pull the row before entering: it may come from another map, which needs room itself, or take long to come.
            self._pulled_at = self._loop.time()
            pulled = await self._inputs.pull()
            if admission is not None and pulled.rows and not self._is_fed:
                entered = await admission.enter()  # not in the line of `+=`, which would read the count before the wait
                self._admitted += entered
            return pulled
        if admission is not None:
            most = await admission.enter(most)
            self._admitted += most
        self._pulled_at = self._loop.time()
        pulled = self._inputs.pull_now(most)
        if admission is not None and len(pulled.rows) < most and not self._is_closed:
            self._leave(most - len(pulled.rows))
        return pulled

    def _leave(self, count: int) -> None:
        admission = self.owner.admission
        if admission is not None:
            assert count <= self._admitted
            self._admitted -= count
            admission.leave(count)

    # Submitting

    def _submit(self, rows: list[Any]) -> bool:
        """Submit these rows. Return whether all were taken, as items or as failed items.

        If not, the map has ended: `_failure` is set already, or nothing reads it.
        """
        if not rows:
            return True
        number = self._window.pulled
        if self._spec.pairs:
            self._given.update(enumerate(rows, number))
        taken = self._rows.submit(number, rows)
        if self._batches is not None and not self._is_closed:
            self.owner.dispatch.appended(self.queue)
            if self._inputs.is_async or self.owner.admission is not None:  # the next row may take long to come
                self._send()
        if taken < len(rows) and not self._is_closed:
            self._leave(len(rows) - taken)
        return taken == len(rows)

    def _send(self) -> None:
        """Send the waiting batch items. This happens after several chunks, so that batches can be cut from all their items."""
        if self._batches is not None and not self._is_closed:
            self.owner.send_waiting(Kind.THREAD)

    def is_done(self) -> bool:
        """Implement `Taker`."""
        return self._is_fed or not self.owner.phase.begins

    def take_run(self, run: Run, size: int) -> None:
        """Implement `Taker`."""
        assert self._batches is not None
        self._window.pull(len(run.bodies), size)
        self._batches.append(run)

    def take_item(self, body: Any, size: int, key: Name | None, shares: list[Share]) -> None:
        """Implement `Taker`."""
        number = self._window.pulled
        item = Item(self, number, body, size, self.plan(), key)
        self._window.pull(1, size)
        self._alive[number] = item
        if shares:
            self.owner.shares.hold(item, shares)
        self.owner.accept(item)

    def runs_alone(self, item: Item) -> None:
        """Implement `percore._items.Flow`."""
        self._alive[item.number] = item

    def runs_on(self, item: Item) -> None:
        """Implement `percore._items.Flow`."""
        if self.function.users:
            if len(self._leaving) >= self._most_leaving:
                self._leaving = [item for item in self._leaving if item.member is not None]
                self._most_leaving = max(_FEW, 2 * len(self._leaving))
            self._leaving.append(item)

    def left(self, batch: Batch) -> None:
        """Implement `percore._items.Flow`."""
        self._sent.pop(batch, None)

    def take_failure(self, error: BaseException) -> None:
        """Implement `Taker`."""
        number = self._window.pulled
        self._window.pull(1, 0)
        self.failed(number, error, 0)

    def _make_batch(self, run: Run) -> Batch | Item:
        try:
            return self._batch_of(run)
        except BaseException as error:  # these items are lost
            self.broke(error)
            raise

    def _batch_of(self, run: Run) -> Batch | Item:
        if len(run.bodies) == 1 and self._goes_alone():
            body = (run.bodies[0],) if run.is_bare else run.bodies[0]
            item = Item(self, run.start, body, 0 if run.is_bare else size_of(body), self.plan())
            self._alive[run.start] = item
            return item
        batch = Batch(self, run, Plan(DEFAULT, self._context) if self._context is not None else None)
        self._sent[batch] = None
        return batch

    def _goes_alone(self) -> bool:
        """Whether to send a single item as a plain call, which costs less than a batch of one.

        Some single items are sent as batches all the same, since only batches are measured.
        """
        assert self._batches is not None
        seconds = self._batches.cost.seconds
        if seconds is None or seconds < _LONG:
            return False
        self._unmeasured = (self._unmeasured + 1) % _MEASURED
        return self._unmeasured > 0

    def plan(self) -> Plan | None:
        """Return the plan for the first attempt of an item; None if it needs none."""
        if self._context is None and (self._policy is None or not self._policy.needs_plan):
            return None
        return Plan(self._policy or DEFAULT, self._context)

    # Ending

    def ended(self, number: int, results: list[Any], arguments: int, size: int) -> None:
        """Implement `percore._items.Flow`."""
        try:
            if self._is_closed:
                return
            if self._alive:
                self._alive.pop(number, None)
            if self._spec.pairs:
                results = [(self._given.pop(place), result) for place, result in enumerate(results, number)]
            self._results.put(number, results, size)
            self._has_ended(len(results), arguments, size)
        except BaseException as error:
            self.broke(error)
            if not isinstance(error, Exception):
                raise

    def failed(self, number: int, error: BaseException, arguments: int) -> None:
        """Implement `percore._items.Flow`."""
        try:
            self._failed(number, error, arguments)
        except BaseException as fault:
            self.broke(fault)
            if not isinstance(fault, Exception):
                raise

    def _failed(self, number: int, error: BaseException, arguments: int) -> None:
        if self._is_closed:
            return
        self._alive.pop(number, None)
        if self._spec.return_exceptions and not (isinstance(error, RunnerClosed) and self.owner.phase.is_closing):
            self._results.put(number, [(self._given.pop(number), error) if self._spec.pairs else error], 0)
        else:
            self._is_fed = True
            _wake(self._space_waiter)
            if self._is_list or not self._spec.ordered:  # raise the error at once
                self._error = self._error or error
                self._is_stopped = True
            else:
                self._results.put(number, [Failure(error)], 0)
                self.cancel_from(number + 1)
        self._has_ended(1, arguments, 0)

    def broke(self, error: BaseException) -> None:
        """Implement `percore._items.Flow`."""
        self._error = self._error or as_error(error, "percore")
        self._is_fed = self._is_stopped = True
        _wake(self._space_waiter)
        _wake(self._result_waiter)

    def _has_ended(self, count: int, arguments: int, size: int) -> None:
        window = self._window
        window.end(count, arguments, size, self._loop.time())
        if self._batches is not None and (cost := self._batches.cost).seconds is not None:
            window.batch = cost.whole(len(self.owner.slots))
            if not window.is_rated:
                window.expect(int(len(self.owner.slots) * AHEAD_SECONDS / cost.seconds))
        if self._admitted:
            self._leave(count)
        if self._is_list:
            window.hand_over(size, count)
        if self._space_waiter is not None and window.is_worth_a_pull():
            _wake(self._space_waiter)
        if not self._is_list or self._is_stopped or self._is_over():  # `collect` waits for the whole list
            _wake(self._result_waiter)

    def cancel_from(self, number: int) -> None:
        """Cancel the items from this number on, the last ones first.

        In the other order: 1. a worker reads that its running call is cancelled  2. it begins the next call  3. it reads that this
        one is cancelled, too.
        """
        if self._batches is not None:
            self._batches.drop_from(number)
        for item in [item for place, item in reversed(self._alive.items()) if place >= number]:
            self._alive.pop(item.number, None)
            item.cancel()
            if item.member is not None:
                self.runs_on(item)
        for batch in reversed(list(self._sent)):
            batch.cancel_from(number)


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
