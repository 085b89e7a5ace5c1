"""A map under way: a task pulls and submits while the window has room, items end, results are handed over."""

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Hashable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from percore._core.batches import Batches, Run
from percore._core.dispatch import Queue
from percore._core.flow import Window
from percore._errors import RunnerClosed
from percore._inputs import Inputs, Pulled
from percore._ipc.codec import is_inline, weight_inline
from percore._items import Batch, Item, size_of
from percore._messages import Kind
from percore._policy import DEFAULT, Plan, Policy
from percore._supervisor import Supervisor

if TYPE_CHECKING:
    from percore._calls import Function

_PULL_SECONDS: Final = 0.003
"""How long pulling from an input may hold the loop before it gives way."""

_CHUNK_SECONDS: Final = 0.0005
_MOST_AT_ONCE: Final = 1024
_SMALL: Final = 16_384
"""Bytes of pickled arguments up to which they travel in a batch."""

_MISSING: Final = object()


class _Failure:
    """An error in the place of a result."""

    __slots__ = ("error",)

    def __init__(self, error: BaseException) -> None:
        self.error = error


@dataclass(frozen=True, slots=True)
class Spec:
    """How a map was asked for.

    Attributes:
        ordered: results in the order of the inputs, or as they come.
        window: exactly so many items pulled and not handed over. None: as it fits.
        key: gives the key of a row's arguments.
        return_exceptions: errors in the place of results.
        pairs: (item, result) instead of results.
        star: each item is a tuple of arguments.
        policy: what its calls are run under.
    """

    ordered: bool
    window: int | None
    key: Callable[..., Hashable] | None
    return_exceptions: bool
    pairs: bool
    star: bool
    policy: Policy | None


class Flow:
    """The items of one map that are under way."""

    def __init__(self, supervisor: Supervisor, fn: Callable[..., Any], inputs: Inputs, spec: Spec, context: Any) -> None:
        self.owner = supervisor
        self._loop = supervisor.loop
        self._inputs = inputs
        self._spec = spec
        self._policy = spec.policy or supervisor.policy
        self._context = context
        self.function: Function = supervisor.functions.hold(fn)
        kind = self.function.kind
        is_batched = kind == Kind.THREAD and bool(self.function.number) and spec.key is None
        is_batched &= self._policy is None or self._policy.is_plain
        self._batches = Batches(self._make_batch) if is_batched else None
        self.queue: Queue[Any, Any] = Queue(kind, self._batches)
        window = spec.window
        if supervisor.admission is not None:
            window = min(supervisor.admission.limit, window or _MOST_AT_ONCE)
        self._window = Window(window, supervisor.dispatch.room_for(kind) * len(supervisor.slots))
        self._admitted = 0
        self._alive: dict[int, Item] = {}
        self._given: dict[int, Any] = {}
        self._results: dict[int, Any] = {}
        self._sizes: dict[int, int] = {}
        self._finished: deque[int] = deque()
        self._is_list = False
        self._is_fed = self._is_closed = False
        self._error: BaseException | None = None
        self._failure: BaseException | None = None
        self._feeder: asyncio.Task[None] | None = None
        self._result_waiter: asyncio.Future[None] | None = None
        self._space_waiter: asyncio.Future[None] | None = None

    # Using it

    async def collect(self) -> list[Any]:
        """All results.

        Raises:
            BaseException: the first error, or that of an input.
        """
        self._is_list = True
        self._begin()
        try:
            while self._error is None and not (self._is_fed and self._window.ended == self._window.pulled):
                if self._is_closed:
                    break
                await self._wait()
            if self._error is not None:
                raise self._error
            if self._failure is not None:
                raise self._failure
            results = self._results
            numbers = range(self._window.pulled) if self._spec.ordered else results
            return [self._outcome(number, results[number]) for number in numbers] if not self._is_closed else []
        finally:
            await self.close()

    async def stream(self) -> AsyncGenerator[Any]:
        """Results, one by one."""
        self._begin()
        results, finished, window, sizes = self._results, self._finished, self._window, self._sizes
        ordered = self._spec.ordered
        number = 0
        try:
            while not self._is_closed:
                if not ordered:
                    number = finished.popleft() if finished else -1
                value = results.pop(number, _MISSING)
                if value is _MISSING:
                    if self._error is not None:
                        raise self._error
                    if self._is_fed and window.handed_over == window.pulled:
                        break
                    await self._wait()
                    continue
                window.hand_over(1, sizes.pop(number, 0) if sizes else 0)
                if self._space_waiter is not None and window.is_worth_a_pull():
                    _wake(self._space_waiter)
                yield self._outcome(number, value)
                number += 1
            if self._failure is not None and not self._is_closed:
                raise self._failure
        finally:
            await self.close()

    def _outcome(self, number: int, value: Any) -> Any:
        if type(value) is _Failure:
            if self._is_fatal(value.error):
                raise value.error
            value = value.error
        return (self._given.pop(number), value) if self._spec.pairs else value

    async def _wait(self) -> None:
        self._result_waiter = self._loop.create_future()
        await self._result_waiter

    def _is_fatal(self, error: BaseException) -> bool:
        return not self._spec.return_exceptions or (isinstance(error, RunnerClosed) and self.owner.is_closing)

    async def close(self) -> None:
        """Cancel what is under way, close generators among the inputs, and give nothing more. Idempotent."""
        if self._is_closed:
            return
        self._is_closed = self._is_fed = True
        _wake(self._result_waiter)
        owner = self.owner
        owner.enders.discard(self._end)
        self.cancel_from(0)
        owner.dispatch.close(self.queue)
        self._results.clear()
        if owner.admission is not None and self._admitted:
            owner.admission.leave(self._admitted)
            self._admitted = 0
        owner.forget(self.function)
        feeder = self._feeder
        if feeder is not None and not feeder.done():
            feeder.cancel()
            await asyncio.wait([feeder])
        await self._inputs.close()

    # Feeding it

    def _begin(self) -> None:
        try:
            self._inputs.open()
        except BaseException:
            self.owner.forget(self.function)
            raise
        self.owner.dispatch.open(self.queue)
        self.owner.enders.add(self._end)
        self._feeder = self._loop.create_task(self._feed(), name="percore-map")

    def _end(self) -> None:
        """No more calls are taken: pull no more."""
        if not self._is_fed:
            self._failure = self.owner.refusal()
            if self._feeder is not None:
                self._feeder.cancel()  # it may wait for an input that never comes

    async def _feed(self) -> None:
        chunk = 1
        begun = self._loop.time()
        try:
            while not self._is_fed:
                space = self._window.space()
                if space <= 0:
                    self._space_waiter = self._loop.create_future()
                    await self._space_waiter
                    self._space_waiter = None
                    begun = self._loop.time()
                    continue
                if self.owner.is_closing or self.owner.broken is not None:
                    self._failure = self.owner.refusal()
                    break
                at = self._loop.time()
                pulled = await self._pull(min(space, chunk))
                if self._is_fed:  # a call has failed while the input was waited for
                    break
                self._submit(pulled.rows)
                if pulled.is_end:
                    self._failure = pulled.error
                    break
                now = self._loop.time()
                # The rows of one chunk wait for the last of it, so it takes half a millisecond at most.
                chunk = min(_MOST_AT_ONCE, chunk * 2) if now - at < _CHUNK_SECONDS else max(1, chunk // 2)
                if now - begun > _PULL_SECONDS:  # an async input may never suspend either
                    await asyncio.sleep(0)
                    begun = self._loop.time()
        except asyncio.CancelledError as error:
            # Raised by the input, or by whoever ends the map: then there is a failure already, or nobody who looks.
            if self._failure is None:
                self._failure = RuntimeError(f"the input raised {error!r}")
                self._failure.__cause__ = error
        except Exception as error:  # no fault of the input, whose errors come with what was pulled
            self._error = error
        finally:
            self._is_fed = True
            _wake(self._result_waiter)

    async def _pull(self, most: int) -> Pulled:
        admission = self.owner.admission
        if admission is not None:
            most = await admission.enter(1 if self._inputs.is_async else most)
            self._admitted += most
        pulled = await self._inputs.pull() if self._inputs.is_async else self._inputs.pull_now(most)
        if admission is not None and len(pulled.rows) < most and not self._is_closed:
            self._leave(most - len(pulled.rows))
        return pulled

    def _leave(self, count: int) -> None:
        admission = self.owner.admission
        if admission is not None:
            self._admitted -= count
            admission.leave(count)

    # Submitting

    def _submit(self, rows: list[Any]) -> None:
        if not rows:
            return
        number = self._window.pulled
        if self._spec.pairs:
            self._given.update(enumerate(rows, number))
        if self._batches is None:
            for row in rows:
                self._submit_alone(self._args(row))
            return
        weight = weight_inline(rows) if self._inputs.is_single and not self._spec.star else None
        if weight is not None:
            self._window.pull(len(rows), 0)
            self._batches.append(Run(number, rows, True, weight))
        else:
            for row in rows:
                self._submit_for_batch(self._args(row))
        self.owner.dispatch.appended(self.queue)
        self.owner.send_waiting(Kind.THREAD)

    def _args(self, row: Any) -> Any:
        """The arguments of a row; a _Failure where they are none."""
        if self._spec.star:
            try:
                return tuple(row)
            except Exception as error:  # the row is the user's: it may be no iterable, or a failing one
                return _Failure(error)
        return (row,) if self._inputs.is_single else row

    def _submit_for_batch(self, args: Any) -> None:
        """Append a row to the batches that wait; one that is large goes alone."""
        number = self._window.pulled
        if type(args) is tuple and is_inline(args):
            body: Any = args
            size, weight = 0, 4 * sum(len(value) for value in args if type(value) in (str, bytes)) + 16
        else:
            body = self._pickled(args)
            if body is None:
                return
            size = weight = size_of(body)
            if type(body) is int or size > _SMALL:
                self._send_alone(number, body, None)
                return
        assert self._batches is not None
        self._window.pull(1, size)
        self._batches.append(Run(number, [body], False, weight))

    def _submit_alone(self, args: Any) -> None:
        key = None
        if self._spec.key is not None and type(args) is tuple:
            try:
                key = self._spec.key(*args)
                hash(key)
            except Exception as error:  # user code: its failure is this item's
                args = _Failure(error)
        body: Any = args
        if not (type(args) is tuple and self.function.number and is_inline(args)):
            body = self._pickled(args)
            if body is None:
                return
        self._send_alone(self._window.pulled, body, key)

    def _pickled(self, args: Any) -> Any:
        """The arguments, pickled; None: that failed, and so has the item."""
        if type(args) is tuple:
            try:
                return self.owner.functions.pickle(self.function, args, {})
            except KeyboardInterrupt:  # taken for the terminal's
                raise
            except BaseException as error:
                is_error = isinstance(error, Exception) and not isinstance(error, StopIteration)
                args = _Failure(error if is_error else RuntimeError(f"pickling raised {error!r}"))
        number = self._window.pulled
        self._window.pull(1, 0)
        self.failed(number, args.error, 0)
        return None

    def _send_alone(self, number: int, body: Any, key: Hashable | None) -> None:
        size = size_of(body)
        plan = self.plan()
        if key is not None and plan is None:
            plan = Plan(DEFAULT)
        item = Item(self, number, body, size, plan, key)
        self._window.pull(1, size)
        self._alive[number] = item
        self.owner.accept(item)

    def _make_batch(self, run: Run) -> Batch:
        return Batch(self, run, Plan(DEFAULT, self._context) if self._context is not None else None)

    def plan(self) -> Plan | None:
        """What an item is run under, that has not been attempted yet."""
        if self._policy is None and self._context is None:
            return None
        return Plan(self._policy or DEFAULT, self._context)

    # Ending

    def ended(self, number: int, results: list[Any], arguments: int, size: int) -> None:
        """Items from this number on have ended with these results: bytes of their pickled arguments, and of the results."""
        count = len(results)
        if self._is_closed:
            return
        if count == 1:
            self._alive.pop(number, None)
            self._results[number] = results[0]
            if size:
                self._sizes[number] = size
        else:
            numbers = range(number, number + count)
            self._results.update(zip(numbers, results, strict=True))
            if size:
                self._sizes.update(dict.fromkeys(numbers, size // count))
        if not self._spec.ordered:
            self._finished.extend(range(number, number + count))
        self._has_ended(number, count, arguments, size)

    def failed(self, number: int, error: BaseException, arguments: int) -> None:
        """An item has ended with this error."""
        if self._is_closed:
            return
        self._alive.pop(number, None)
        self._results[number] = _Failure(error)
        is_fatal = self._is_fatal(error)
        if not self._spec.ordered:
            # An error is told as soon as it happens, before results that nobody has asked for yet.
            (self._finished.appendleft if is_fatal else self._finished.append)(number)
        if is_fatal:
            self._is_fed = True
            _wake(self._space_waiter)
            if self._is_list:
                self._error = self._error or error
            elif self._spec.ordered:
                self.cancel_from(number + 1)
        self._has_ended(number, 1, arguments, 0)

    def _has_ended(self, number: int, count: int, arguments: int, size: int) -> None:
        window = self._window
        window.end(count, arguments, size, self._loop.time())
        if self._admitted:
            self._leave(min(count, self._admitted))
        if self._is_list:
            window.hand_over(count, size)
            if self._space_waiter is not None and window.is_worth_a_pull():
                _wake(self._space_waiter)
        _wake(self._result_waiter)

    def cancel_from(self, number: int) -> None:
        """Cancel the items from this number on."""
        if self._batches is not None:
            self._batches.drop_from(number)
        for item in [item for place, item in self._alive.items() if place >= number]:
            self._alive.pop(item.number, None)
            item.cancel()
        for member in self.owner.members:
            for call in list(member.calls.values()):
                if type(call) is Batch and call.flow is self:
                    call.cancel_from(number)


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
