"""`current_runner()`: calls from inside a call. They go through the supervisor to any worker, this one included."""

import asyncio
import inspect
import threading
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Final, ParamSpec, TypeVar, overload

from percore._common.callables import qualified_name, routines_of
from percore._common.options import seconds_of
from percore._protocol.messages import ID_MASK, Kind
from percore._protocol.nested_calls import NestedRequest, PlainKey, is_plain_key
from percore._worker.context import current_context, of_id
from percore._worker.families import Child, Family

if TYPE_CHECKING:
    from percore._common.tracing import Span

P = ParamSpec("P")
T = TypeVar("T")

_LONGEST_NAME: Final = 256
_INHERIT: Final[Any] = object()
"""No key was given: the call belongs to the key of its caller."""


class CurrentRunner:
    """The runner of the worker that a call runs in: makes calls from inside the call. `percore.current_runner()` returns it.

    Coroutines use `run` and `submit`; plain functions, which run on threads, use `run_sync`. The calls may run in any worker. They
    end when the call ends that makes them: what it has not awaited by then is cancelled.
    """

    def __init__(self, family: Any, key: PlainKey = None, timeout: float | None = None, *, inherits: bool = True) -> None:
        self._family: Family = family
        self._key = key
        self._timeout = timeout
        self._inherits = inherits

    @overload
    async def run(self, fn: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    @overload
    async def run(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    async def run(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run one call and return its result, as `Runner.run`. If cancelled, the call is cancelled.

        Raises:
            RuntimeError: not called in the worker's event loop, or the call that makes this one has ended.
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
        if asyncio._get_running_loop() is not self._family.families.channel.loop:
            raise RuntimeError(
                "run() and submit() are for coroutines; in a plain function, which runs on a thread, write "
                "percore.current_runner().run_sync(fn, ...)"
            )
        span = self._span(fn)
        with _failing(span):
            return _ChildFuture(self._family, self._request(fn, args, kwargs, span), span)

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
        if asyncio._get_running_loop() is not None:
            raise RuntimeError(
                "run_sync() would block the event loop; in a coroutine write `await percore.current_runner().run(fn, ...)`"
            )
        gate = threading.Lock()
        gate.acquire()
        span = self._span(fn)
        with _failing(span):
            child = self._family.ask(self._request(fn, args, kwargs, span), lambda _: gate.release())
            try:
                self._family.wait(gate)
            except BaseException:
                self._family.drop(child)
                raise
            result = self._family.families.unpack(child)
        if span is not None:
            span.ended(None)
        return result

    def options(self, *, key: PlainKey = _INHERIT, timeout: float | None = None) -> "CurrentRunner":
        """Return a view with these call options, as `Runner.options`.

        Args:
            key: a string, number, bytes or a tuple of these. Left out, a call belongs to the key of the call that makes it: it runs
                on that key's worker, and does not wait for the key. None: it belongs to no key.
            timeout: seconds that the call may run.

        Raises:
            TypeError, ValueError: an option is invalid.
        """
        if key is not _INHERIT and not is_plain_key(key):
            raise TypeError(f"the key of a nested call is a string, a number, bytes or a tuple of these, not {key!r}")
        seconds = None if timeout is None else seconds_of("timeout", timeout)
        if key is _INHERIT:
            return CurrentRunner(self._family, self._key, seconds, inherits=self._inherits)
        return CurrentRunner(self._family, key, seconds, inherits=False)

    def _span(self, fn: Callable[..., Any]) -> "Span | None":
        tracing = self._family.families.variables.tracing
        return None if tracing is None else tracing.begin(fn, None if self._inherits else self._key)

    def _request(self, fn: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], span: "Span | None") -> NestedRequest:
        """Pickle a call. Runs user code."""
        families = self._family.families
        kind = _kind_of(fn)
        with families.shares.watch() as shares:
            pickle = families.channel.pickled((fn, args, kwargs))
        return NestedRequest(
            caller=self._family.call_id & ID_MASK,
            kind=kind,
            name=qualified_name(fn)[:_LONGEST_NAME],
            module=str(getattr(fn, "__module__", ""))[:_LONGEST_NAME],
            key=self._key,
            inherits=self._inherits,
            timeout=self._timeout,
            context=families.variables.capture(families.channel, span),
            shares=tuple(shares),
            pickle=pickle,
        )

    def __repr__(self) -> str:
        return "<percore.CurrentRunner>"

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(
            "the current runner cannot be pickled: it belongs to one call. Call percore.current_runner() in the other one"
        )


class _ChildFuture(asyncio.Future[Any]):
    """The future of a nested call. Its cancellation withdraws the call."""

    def __init__(self, family: Family, request: NestedRequest, span: "Span | None") -> None:
        super().__init__(loop=family.families.channel.loop)
        self._family = family
        self._span = span
        self._child = family.ask(request, self._told)

    def _told(self, child: Child) -> None:
        if child.failure is not None:
            self.get_loop().call_soon_threadsafe(self.cancel)
            return
        try:
            result = self._family.families.unpack(child)
        except BaseException as error:
            if not self.done():
                self.set_exception(error)
                self._ended(error)
        else:
            if not self.done():
                self.set_result(result)
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


def _kind_of(fn: Any) -> int:
    if inspect.iscoroutine(fn):
        fn.close()
        raise TypeError("give the function and its arguments: runner.run(fetch, url), not runner.run(fetch(url))")
    if not callable(fn):
        raise TypeError(f"expected a function, not {fn!r}")
    made = routines_of(fn)
    if any(map(inspect.iscoroutinefunction, made)):
        return Kind.TASK
    if any(inspect.isgeneratorfunction(one) or inspect.isasyncgenfunction(one) for one in made):
        raise TypeError(f"{qualified_name(fn)} is a generator function: one call gives one result. Return a list instead")
    return Kind.THREAD


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
