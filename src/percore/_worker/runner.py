"""`current_runner()`: calls from inside a call. They go through the supervisor to any worker, this one included."""

import asyncio
import threading
from collections.abc import AsyncIterable, AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, NamedTuple, ParamSpec, TypeAlias, TypeVar, overload

from percore._common.call_options import MAP_ADVICE, CallOptions, checked
from percore._common.callables import is_async_stream, is_coroutine_call, qualified_name
from percore._common.endings import settle, settle_by
from percore._common.inputs import Inputs, check_map
from percore._common.options import PREFETCH, Backoff, RetryOn, advising
from percore._protocol.messages import ID_MASK, Kind
from percore._protocol.nested_calls import NestedRequest, PlainKey, RequestOptions, is_plain_key
from percore._worker.context import current_context, of_id
from percore._worker.families import Child, Family
from percore._worker.nested_maps import MapSource, MapSpec, NestedMap
from percore._worker.nested_streams import NestedStream, StreamSource
from percore._worker.walks import check_in_loop, check_in_thread

if TYPE_CHECKING:
    from percore._common.tracing import Span

P = ParamSpec("P")
T = TypeVar("T")
A = TypeVar("A")
B = TypeVar("B")
In: TypeAlias = Iterable[A] | AsyncIterable[A]
AnyItems: TypeAlias = Iterable[Any] | AsyncIterable[Any]

_LONGEST_NAME: Final = 256
_ADVICE: Final = {
    "rate": "a key gets its rate in the program, as in runner.set_rate(key, rate), and these calls count, too",
    "window": "it is an argument of map, as in percore.current_runner().map(fn, items, window=10)",
}
"""Advice for keyword arguments of `Runner.options` and of maps."""

_INHERIT: Final[Any] = object()
"""No key was given: the call belongs to the key of its caller."""


class _View(NamedTuple):
    """The options of the calls of one view.

    Attributes:
        key: the key that the user gave, if `inherits` is False.
        inherits: whether the calls belong to the key of their caller.
        options: without the key.
        request: the options as requests have them; None: the defaults.
    """

    key: PlainKey = None
    inherits: bool = True
    options: CallOptions = CallOptions()
    request: tuple[Any, ...] | None = None


class CurrentRunner:
    """The runner of the worker that a call runs in: makes calls from inside the call. `percore.current_runner()` returns it.

    Coroutines use `run` and `submit`; plain functions, which run on threads, use `run_sync`. Both use `map`, `map_items`, `starmap`
    and `stream`, with `async for` or `for`. The calls may run in any worker. They end when the call ends that makes them: what it
    has not awaited by then is cancelled.
    """

    def __init__(self, family: Any, view: Any = None) -> None:
        self._family: Family = family
        self._view: _View = _View() if view is None else view

    @overload
    async def run(self, fn: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    @overload
    async def run(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    async def run(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run one call and return its result, as `Runner.run`. If cancelled, the call is cancelled.

        Raises:
            RuntimeError: not called in the worker's event loop, or the call that makes this one has ended, or calls would wait for
                each other's keys for ever.
            ValueError: the call that makes this one, or one that has made that, holds the key.
            Exception: as `Runner.run`.
        """
        return await self.submit(fn, *args, **kwargs)

    @overload
    def submit(self, fn: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]: ...
    @overload
    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]: ...
    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> asyncio.Future[Any]:
        """Make one call and return its future, as `Runner.submit`. It is cancelled if this call ends first.

        Raises:
            RuntimeError: as `run`.
        """
        check_in_loop(self._family, "run() and submit() are", "write percore.current_runner().run_sync(fn, ...)")
        span = self._span(fn)
        with _failing(span):
            return _ChildFuture(self._family, self._request(fn, args, kwargs, span=span), span)

    @overload
    def run_sync(self, fn: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    @overload
    def run_sync(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    def run_sync(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run one call and return its result, from a plain function. The thread waits; another one may run in its place.

        Raises:
            CancelledError: this call was cancelled meanwhile.
            TimeoutError: this call has exceeded its timeout meanwhile.
            RuntimeError: called in the event loop, or the call that makes this one has ended.
            Exception: as `run`.
        """
        check_in_thread("run_sync()", "write `await percore.current_runner().run(fn, ...)`")
        gate = threading.Lock()
        gate.acquire()
        child = self._family.child(Child, lambda _: gate.release())
        span = self._span(fn)
        with _failing(span):
            self._family.ask(self._request(fn, args, kwargs, span=span), child)
            try:
                self._family.wait(gate.acquire)
            except BaseException:
                self._family.drop(child)
                raise
            result = self._family.families.unpack(child)
        if span is not None:
            span.ended(None)
        return result

    # Many calls

    @overload
    def map(
        self,
        fn: Callable[[A], Awaitable[T]],
        a: In[A],
        /,
        *,
        ordered: bool = ...,
        window: int | None = ...,
        key: Callable[[A], PlainKey] | None = ...,
    ) -> NestedMap[T]: ...
    @overload
    def map(
        self,
        fn: Callable[[A], T],
        a: In[A],
        /,
        *,
        ordered: bool = ...,
        window: int | None = ...,
        key: Callable[[A], PlainKey] | None = ...,
    ) -> NestedMap[T]: ...
    @overload
    def map(
        self,
        fn: Callable[[A, B], Awaitable[T]],
        a: In[A],
        b: In[B],
        /,
        *,
        ordered: bool = ...,
        window: int | None = ...,
        key: Callable[[A, B], PlainKey] | None = ...,
    ) -> NestedMap[T]: ...
    @overload
    def map(
        self,
        fn: Callable[[A, B], T],
        a: In[A],
        b: In[B],
        /,
        *,
        ordered: bool = ...,
        window: int | None = ...,
        key: Callable[[A, B], PlainKey] | None = ...,
    ) -> NestedMap[T]: ...
    @overload
    def map(
        self,
        fn: Callable[..., Any],
        /,
        *iterables: AnyItems,
        ordered: bool = ...,
        window: int | None = ...,
        key: Callable[..., PlainKey] | None = ...,
        return_exceptions: bool = ...,
    ) -> NestedMap[Any]: ...
    @advising("CurrentRunner.map", MAP_ADVICE)
    def map(
        self,
        fn: Callable[..., Any],
        /,
        *iterables: AnyItems,
        ordered: bool = True,
        window: int | None = None,
        key: Callable[..., PlainKey] | None = None,
        return_exceptions: bool = False,
    ) -> NestedMap[Any]:
        """Return a map that calls `fn` with one item of each iterable at a time, until the shortest iterable ends.

        A coroutine awaits it for a list, or iterates it with `async for`; a plain function iterates it with `for`. The inputs are
        pulled here, in this worker: by the event loop, or by the thread that iterates the map, between two results. Each item is
        sent as a call of its own.

        Args:
            fn: a coroutine function or a plain function.
            *iterables: sync or, in a coroutine, async iterables; they may be endless.
            ordered: return results in the order of the inputs. False: return each result as soon as it is there.
            window: how many items may be pulled whose results have not been returned yet. Default: 256, within 64 MiB of pickled
                arguments and results.
            key: a plain function that takes the arguments of a call and returns its key, as `options` takes it.
            return_exceptions: return an error in the place of its result instead of raising it.

        Raises:
            TypeError, ValueError: `fn` is not callable, an iterable is not iterable, or an option is invalid.
        """
        return self._map(fn, iterables, (ordered, window, key, return_exceptions))

    @advising("CurrentRunner.map_items", MAP_ADVICE)
    def map_items(
        self,
        fn: Callable[..., Any],
        /,
        *iterables: AnyItems,
        ordered: bool = True,
        window: int | None = None,
        key: Callable[..., PlainKey] | None = None,
        return_exceptions: bool = False,
    ) -> NestedMap[tuple[Any, Any]]:
        """Like `map`, but return pairs of item and result. With several iterables the item is a tuple."""
        return self._map(fn, iterables, (ordered, window, key, return_exceptions), pairs=True)

    @advising("CurrentRunner.starmap", MAP_ADVICE)
    def starmap(
        self,
        fn: Callable[..., Any],
        iterable: AnyItems,
        /,
        *,
        ordered: bool = True,
        window: int | None = None,
        key: Callable[..., PlainKey] | None = None,
        return_exceptions: bool = False,
    ) -> NestedMap[Any]:
        """Like `map`, but the iterable yields tuples of arguments: each call is `fn(*row)`."""
        return self._map(fn, (iterable,), (ordered, window, key, return_exceptions), star=True)

    def _map(
        self,
        fn: Callable[..., Any],
        iterables: tuple[AnyItems, ...],
        options: tuple[bool, int | None, Callable[..., PlainKey] | None, bool],
        *,
        pairs: bool = False,
        star: bool = False,
    ) -> NestedMap[Any]:
        ordered, window, key, return_exceptions = options
        if not self._view.inherits:
            raise TypeError(
                "options(key=...) is for one call; a map takes a function that gives each call's key: map(..., key=host_of)"
            )
        is_coroutine_call(fn)
        check_map(iterables, window, key)
        span = self._span(fn)
        context = self._context(span)

        def request(args: tuple[Any, ...], given: Any) -> NestedRequest:
            view = self._view if given is None else self._view._replace(key=_checked_key(given), inherits=False)
            return self._request(fn, args, {}, view, context)

        spec = MapSpec(ordered, window, key, return_exceptions, pairs, star, request)
        return NestedMap(MapSource(self._family, span, Inputs(iterables), spec))

    @overload
    def stream(self, fn: Callable[P, AsyncIterator[T]], /, *args: P.args, **kwargs: P.kwargs) -> NestedStream[T]: ...
    @overload
    def stream(self, fn: Callable[P, Iterator[T]], /, *args: P.args, **kwargs: P.kwargs) -> NestedStream[T]: ...
    def stream(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> NestedStream[Any]:
        """Return a stream of the items that a generator function yields in a worker, as `Runner.stream`.

        A coroutine iterates it with `async for`, a plain function with `for`.

        Raises:
            TypeError: `fn` is no generator function, or the view has a time limit, retries, retry_on or backoff.
        """
        view = self._view
        view.options.check_stream()
        kind = Kind.TASK if is_async_stream(fn) else Kind.THREAD
        span = self._span(fn)
        prefetch, context = view.options.prefetch, self._context(span)

        def request() -> NestedRequest:
            made = self._request(fn, args, kwargs, view, context, kind)
            return made._replace(prefetch=prefetch, options=None)

        return NestedStream(StreamSource(self._family, span, prefetch, request))

    @advising("CurrentRunner.options", _ADVICE)
    def options(  # noqa: PLR0913  # each is a documented option
        self,
        *,
        key: PlainKey = _INHERIT,
        retries: int | None = None,
        retry_on: RetryOn | None = None,
        backoff: Backoff = 0.0,
        timeout: float | None = None,
        prefetch: int = PREFETCH,
        queue_timeout: float | None = None,
        hard_timeout: float | None = None,
    ) -> "CurrentRunner":
        """Return a view with these call options. They mean what they mean for `Runner.options`, except for the key.

        Args:
            key: a string, number, bytes or a tuple of these. Left out, a call belongs to the key of the call that makes it: it runs
                on that key's worker, and does not wait for the key. None: it belongs to no key.
            retries: how many more times to attempt a call that fails. Default: the runner's `retries`.
            retry_on: an exception class, a tuple of them, or a plain function. The program's process imports and calls it.
            backoff: seconds before the next attempt, or a plain function, as `retry_on`.
            timeout: how many seconds one attempt may run.
            prefetch: for `stream`: how many items the worker may produce that were not taken.
            queue_timeout: how many seconds the call may wait until it begins.
            hard_timeout: how many seconds one attempt may run, for code that ignores cancellation.

        Raises:
            TypeError, ValueError: an option is invalid.
            Exception: `retry_on` or `backoff` cannot be pickled.
        """
        given = checked(CallOptions(retries, retry_on, backoff, timeout, prefetch, queue_timeout, hard_timeout), 1)
        request = None
        if given != CallOptions(prefetch=prefetch):
            retry = None
            if given.retry_on is not None or given.backoff:
                retry = self._family.families.channel.pickled((given.retry_on, given.backoff))
            request = tuple(RequestOptions(given.retries, retry, given.timeout, given.queue_timeout, given.hard_timeout))
        if key is _INHERIT:
            return CurrentRunner(self._family, self._view._replace(options=given, request=request))
        return CurrentRunner(self._family, _View(_checked_key(key), False, given, request))

    def _span(self, fn: Callable[..., Any]) -> "Span | None":
        tracing = self._family.families.variables.tracing
        return None if tracing is None else tracing.begin(fn, None if self._view.inherits else self._view.key)

    def _context(self, span: "Span | None" = None) -> Any:
        families = self._family.families
        return families.variables.capture(families.channel, span)

    def _request(  # noqa: PLR0913, PLR0917  # the parts of a call
        self,
        fn: Callable[..., Any],
        args: tuple[Any, ...],
        kwargs: dict[str, Any],
        view: _View | None = None,
        context: Any = _INHERIT,
        kind: int | None = None,
        span: "Span | None" = None,
    ) -> NestedRequest:
        """Pickle a call. Runs user code. Left out: the options of this view, the context of now, the kind of a call of `fn`."""
        families = self._family.families
        view = self._view if view is None else view
        if kind is None:
            kind = Kind.TASK if is_coroutine_call(fn) else Kind.THREAD
        with families.shares.watch() as shares:
            pickle = families.channel.pickled((fn, args, kwargs))
        return NestedRequest(
            caller=self._family.call_id & ID_MASK,
            kind=kind,
            name=qualified_name(fn)[:_LONGEST_NAME],
            module=str(getattr(fn, "__module__", ""))[:_LONGEST_NAME],
            key=view.key,
            inherits=view.inherits,
            prefetch=0,
            options=view.request,
            context=self._context(span) if context is _INHERIT else context,
            shares=tuple(shares),
            pickle=pickle,
        )

    def __repr__(self) -> str:
        return "<percore.CurrentRunner>"

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(
            "the current runner cannot be pickled: it belongs to one call. Call percore.current_runner() in the other one"
        )


def _checked_key(key: Any) -> Any:
    if not is_plain_key(key):
        raise TypeError(f"the key of a nested call is a string, a number, bytes or a tuple of these, not {key!r}")
    return key


class _ChildFuture(asyncio.Future[Any]):
    """The future of a nested call. Its cancellation withdraws the call."""

    def __init__(self, family: Family, request: NestedRequest, span: "Span | None") -> None:
        super().__init__(loop=family.families.channel.loop)
        self._family = family
        self._span = span
        self._child = family.child(Child, self._told)
        family.ask(request, self._child, family.families.channel.send)

    def _told(self, child: Child) -> None:
        if child.failure is not None:
            self.get_loop().call_soon_threadsafe(self.cancel)
            return
        try:
            result = self._family.families.unpack(child)
        except BaseException as error:
            if settle_by(self, error):
                self._ended(error)
        else:
            if settle(self, result):
                self._ended(None)

    def cancel(self, msg: Any = None) -> bool:
        """Cancel the future, and withdraw the call."""
        if super().cancel(msg):
            self._family.drop(self._child)
            self._ended(asyncio.CancelledError())
            return True
        return False

    def _ended(self, error: BaseException | None) -> None:
        if self._span is not None:
            self._span.ended(error)


@contextmanager
def _failing(span: "Span | None") -> Iterator[None]:
    """End the span by an error that the block raises."""
    try:
        yield
    except BaseException as error:
        if span is not None:
            span.ended(error)
        raise


def current_runner() -> CurrentRunner:
    """Return the runner of this worker, to make calls from inside the call that asks for it.

    Raises:
        RuntimeError: the caller is in no call of a Runner.
    """
    found = current_context("current_runner")
    if found.families is None:
        raise RuntimeError("percore.current_runner() works in the workers of a Runner, not in those of a LoopPoolExecutor")
    call_id = of_id.get()
    if call_id is None:
        raise RuntimeError(
            "percore.current_runner() works only inside a call, not in the lifespan; in a thread that a call has started, use the "
            "runner that the call has got"
        )
    return CurrentRunner(found.families.of(call_id))
