"""Map: one function over many inputs, as a list or as a stream."""

import asyncio
import warnings
from collections import deque
from collections.abc import AsyncGenerator, AsyncIterable, AsyncIterator, Callable, Generator, Iterable, Iterator, Sized
from inspect import isasyncgen, isgenerator
from types import TracebackType
from typing import Any, Final, Generic, Self, TypeVar
from weakref import ref

from percore._calls import Call, Function, kind_of
from percore._core.flow import default_window
from percore._errors import RunnerClosed
from percore._supervisor import Supervisor

T = TypeVar("T")

_PULL_SECONDS: Final = 0.003
"""How long pulling from a sync input may hold the loop before it gives way."""


class Inputs:
    """Several sync or async iterables, pulled in step until the shortest ends."""

    def __init__(self, iterables: tuple[Iterable[Any] | AsyncIterable[Any], ...]) -> None:
        self._sources = iterables
        self._iterators: list[Iterator[Any] | AsyncIterator[Any]] = []
        self.is_async = any(isinstance(source, AsyncIterable) for source in iterables)

    def open(self) -> None:
        """Begin to iterate: user code."""
        for source in self._sources:
            self._iterators.append(aiter(source) if isinstance(source, AsyncIterable) else iter(source))

    def pull_now(self) -> tuple[Any, ...] | None:
        """One item of each, of sync iterables alone; None at the end."""
        row = []
        for iterator in self._iterators:
            try:
                row.append(next(iterator))  # type: ignore[arg-type]
            except StopIteration:
                return None
        return tuple(row)

    async def pull(self) -> tuple[Any, ...] | None:
        """One item of each; None at the end."""
        row = []
        for iterator in self._iterators:
            try:
                row.append(await anext(iterator) if isinstance(iterator, AsyncIterator) else next(iterator))
            except (StopIteration, StopAsyncIteration):
                return None
        return tuple(row)

    async def close(self) -> None:
        """Close the generators among the inputs; never a file or a list of the user's."""
        iterators, self._iterators = self._iterators, []
        for iterator in iterators:
            if isasyncgen(iterator):
                await iterator.aclose()
            elif isgenerator(iterator):
                iterator.close()

    def close_now(self) -> None:
        """As `close`, from where nothing can be awaited: async generators stay for `close`, or for the loop's hooks."""
        iterators, self._iterators = self._iterators, [iterator for iterator in self._iterators if isasyncgen(iterator)]
        for iterator in iterators:
            if isgenerator(iterator):
                iterator.close()

    def __len__(self) -> int:
        sizes = [len(source) for source in self._sources if isinstance(source, Sized)]
        if not sizes:
            raise TypeError("this map has no len(): none of its inputs has one")
        return min(sizes)


class Map(Generic[T]):
    """What `runner.map` gives: await it for a list, or iterate it with `async for`, once.

    It is lazy: nothing is pulled from the inputs before it is used. Iterating holds at most the window's items, pulled and not yet
    handed over. Leaving `async with`, `aclose()`, and dropping it cancel what is under way and close generators among the inputs.
    """

    def __init__(  # noqa: PLR0913  # what `Runner.map` was given, and where that was
        self,
        supervisor: Supervisor,
        fn: Callable[..., Any],
        iterables: tuple[Iterable[Any] | AsyncIterable[Any], ...],
        *,
        ordered: bool,
        window: int | None,
        return_exceptions: bool,
        check: Callable[[], None],
    ) -> None:
        """`check` raises where the map may not be used: in another loop or thread, after the runner was closed."""
        kind = kind_of(fn)
        if not iterables:
            raise TypeError("map needs at least one iterable")
        for source in iterables:
            if not isinstance(source, Iterable | AsyncIterable) and not hasattr(source, "__getitem__"):
                raise TypeError(f"map needs iterables, not {source!r}")
        if window is not None and (isinstance(window, bool) or not isinstance(window, int)):
            raise TypeError(f"window must be a whole number, not {window!r}")
        if window is not None and window < 1:
            raise ValueError(f"window must be at least 1, not {window}")
        self._supervisor = supervisor
        self._check = check
        self._fn = fn
        self._inputs = Inputs(iterables)
        room = supervisor.dispatch.room_for(kind) * len(supervisor.slots)
        self._window = default_window(room) if window is None else window
        self._ordered = ordered
        self._return_exceptions = return_exceptions
        self._results: ref[AsyncGenerator[T]] | None = None
        self._is_used = False
        self._pending: dict[Call, None] = {}
        self._function: Function | None = None

    # Using it

    def __await__(self) -> Generator[Any, None, list[T]]:
        return self.collect().__await__()

    async def collect(self) -> list[T]:
        """All results as a list, in the order of the inputs (with ordered=False: as they came).

        Cancelled: what is under way is cancelled too.

        Raises:
            RuntimeError: the map was used before, or this is another loop or thread than the runner's.
            RunnerClosed: the runner is closed, or was while inputs were left.
            Exception: the first error of a call that happens, unless return_exceptions; or that of an input.
        """
        self._use()
        stream = self._stream(ordered=False)
        try:
            results = {index: result async for index, result in stream}
        finally:
            await stream.aclose()
        return list(results.values()) if not self._ordered else [results[index] for index in range(len(results))]

    def __aiter__(self) -> AsyncIterator[T]:
        self._use()
        results = self._values()
        self._results = ref(results)  # weak: dropping the iterator has to end it
        return results

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def aclose(self) -> None:
        """Cancel what is under way, close generators among the inputs, and give nothing more. Idempotent."""
        self._is_used = True
        results = None if self._results is None else self._results()
        if results is not None:
            await results.aclose()
        self._cancel()

    def __len__(self) -> int:
        return len(self._inputs)

    def __bool__(self) -> bool:
        return True

    def __iter__(self) -> Iterator[T]:
        raise TypeError("a map is asynchronous: iterate it with `async for`, or `await` it for a list")

    def __del__(self) -> None:
        if not getattr(self, "_is_used", True):
            warnings.warn(
                "a map was made and never used: `await` it, or iterate it with `async for`",
                RuntimeWarning,
                stacklevel=2,
            )
        elif getattr(self, "_pending", None) or getattr(self, "_function", None):
            self._cancel()

    def _use(self) -> None:
        if self._is_used:
            raise RuntimeError("a map is used once; call runner.map(...) again for another round")
        self._is_used = True
        self._check()

    # Running it

    async def _values(self) -> AsyncGenerator[T]:
        stream = self._stream(ordered=self._ordered)
        try:
            async for _, result in stream:
                yield result
        finally:
            await stream.aclose()

    async def _stream(self, *, ordered: bool) -> AsyncGenerator[tuple[int, T]]:
        """(index, result) pairs: the heart of all forms."""
        flow = _Flow(self._supervisor, self._pending, self._window, ordered=ordered, stops_at_errors=not self._return_exceptions)
        calls: AsyncGenerator[tuple[int, Call]] | None = None
        try:
            self._function = self._supervisor.functions.hold(self._fn)
            self._inputs.open()
            calls = flow.calls(self._inputs, self._function)
            async for index, call in calls:
                yield index, self._outcome(call)
        finally:
            if calls is not None:
                await calls.aclose()
            self._cancel()
            await self._inputs.close()

    def _outcome(self, call: Call) -> Any:
        error = call.exception()
        if error is None:
            return call.result()
        if self._return_exceptions and not (isinstance(error, RunnerClosed) and self._supervisor.is_closing):
            return error
        raise error

    def _cancel(self) -> None:
        pending, self._pending = list(self._pending), {}
        supervisor = self._supervisor
        for call in pending:
            if not call.cancel() and not call.cancelled():
                call.exception()  # nobody will read it: it is not "never retrieved"
        function, self._function = self._function, None
        if function is not None:
            supervisor.forget(function)
        self._inputs.close_now()


class _Flow:
    """The calls of one map that are under way: fed by a task, taken out by the map."""

    def __init__(
        self, supervisor: Supervisor, pending: dict[Call, None], window: int, *, ordered: bool, stops_at_errors: bool
    ) -> None:
        self._supervisor = supervisor
        self._pending = pending
        self._window = window
        self._ordered = ordered
        self._stops_at_errors = stops_at_errors
        self._order: deque[Call] = deque()
        self._finished: deque[Call] = deque()
        self._indices: dict[Call, int] = {}
        self._pulled = 0
        self._handed_over = 0
        self._is_fed = False
        self._failure: Exception | None = None
        self._result_waiter: asyncio.Future[None] | None = None
        self._space_waiter: asyncio.Future[None] | None = None

    async def calls(self, inputs: Inputs, function: Function) -> AsyncGenerator[tuple[int, Call]]:
        """Index and call, as they end or in order."""
        feeder = asyncio.create_task(self._feed(inputs, function), name="percore-map")

        def end() -> None:
            if not self._is_fed:
                self._failure = self._supervisor.refusal()
                feeder.cancel()  # it may wait for an input that never comes

        self._supervisor.enders.add(end)
        try:
            while True:
                call = self._next()
                if call is not None:
                    self._handed_over += 1
                    self._pending.pop(call, None)
                    _wake(self._space_waiter)
                    yield self._indices.pop(call), call
                elif self._is_fed and self._handed_over == self._pulled:
                    break
                else:
                    self._result_waiter = self._supervisor.loop.create_future()
                    await self._result_waiter
        finally:
            self._supervisor.enders.discard(end)
            if not feeder.done():
                feeder.cancel()
                await asyncio.wait([feeder])
        if self._failure is not None:
            raise self._failure

    def _next(self) -> Call | None:
        if not self._ordered:
            return self._finished.popleft() if self._finished else None
        return self._order.popleft() if self._order and self._order[0].done() else None

    async def _feed(self, inputs: Inputs, function: Function) -> None:
        """Pull and submit while the window has room."""
        loop = self._supervisor.loop
        begun = loop.time()
        try:
            while not self._is_fed:
                if self._pulled - self._handed_over >= self._window:
                    self._space_waiter = loop.create_future()
                    await self._space_waiter
                    begun = loop.time()
                    continue
                if self._supervisor.is_closing or self._supervisor.broken is not None:
                    self._failure = self._supervisor.refusal()
                    break
                row = await inputs.pull() if inputs.is_async else inputs.pull_now()
                if row is None or self._is_fed:  # a call has failed while the input was waited for
                    break
                self._submit(function, row)
                if loop.time() - begun > _PULL_SECONDS:  # an async input may never suspend either
                    await asyncio.sleep(0)
                    begun = loop.time()
        except (asyncio.CancelledError, StopAsyncIteration) as error:
            # Not to be taken for the end of the input, nor for a cancellation of whoever uses the map. Where it was the map
            # that cancelled, to close, there is a failure already, or nobody who looks.
            if self._failure is None:
                self._failure = RuntimeError(f"the input raised {error!r}")
                self._failure.__cause__ = error
        except Exception as error:
            self._failure = error
        finally:
            self._is_fed = True
            _wake(self._result_waiter)

    def _submit(self, function: Function, row: tuple[Any, ...]) -> None:
        call = self._supervisor.submit(function, row, {})
        self._indices[call] = self._pulled
        self._pulled += 1
        self._pending[call] = None
        if self._ordered:
            self._order.append(call)
        call.add_done_callback(self._ended)

    def _ended(self, call: Call) -> None:
        """A call has ended. An error ends the feeding, and cancels at once what comes after its place."""
        failed = self._stops_at_errors and not call.cancelled() and call.exception() is not None
        if failed:
            self._is_fed = True
            _wake(self._space_waiter)
            if self._ordered:
                place = self._indices.get(call, self._pulled)
                for later in [other for other in self._order if self._indices.get(other, 0) > place]:
                    later.cancel()
        if not self._ordered and call in self._pending:
            # An error is told as soon as it happens, before results that nobody has asked for yet.
            (self._finished.appendleft if failed else self._finished.append)(call)
        _wake(self._result_waiter)


def _wake(waiter: asyncio.Future[None] | None) -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
