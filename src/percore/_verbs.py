"""What a runner is asked to do: the verbs, as methods of Runner and of the view that `options` gives."""

from __future__ import annotations

from asyncio import CancelledError, Future
from collections.abc import AsyncIterable, Awaitable, Callable, Hashable, Iterable
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

if TYPE_CHECKING:
    import asyncio

    from percore._calls import Call, Function
    from percore._map import Map
    from percore._policy import Policy
    from percore._supervisor import Supervisor

P = ParamSpec("P")
T = TypeVar("T")

AnyIterable = Iterable[Any] | AsyncIterable[Any]


class Verbs:
    """Runs functions in workers."""

    __slots__ = ()

    _supervisor: Supervisor
    _policy: Policy | None = None

    def _check_open(self) -> None:
        """That calls are taken, from here.

        Raises:
            RunnerClosed, RunnerBroken, RuntimeError: they are not; the text says why.
        """
        raise NotImplementedError

    # One call

    @overload
    def submit(self, fn: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]: ...
    @overload
    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]: ...
    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> asyncio.Future[Any]:
        """Hand a call over; never blocks.

        The arguments are pickled now, so later changes are not seen. The future can be awaited, or forgotten: percore holds it
        until it is done. Cancelling it withdraws the call, or cancels it in its worker.

        Raises:
            RunnerClosed: before start and after close.
            RunnerBroken: no worker can be started any more.
            RunnerFull: max_pending calls are accepted and not done.
            TypeError: `fn` is a coroutine, a generator function, or cannot be called.
            RuntimeError: from another loop or thread, or after a fork.
        """
        self._check_open()
        supervisor = self._supervisor
        function = supervisor.known.get(id(fn)) or supervisor.functions.of(fn)
        if supervisor.admission is not None:
            supervisor.admission.enter_now()
            return self._admitted(function, args, kwargs)
        return supervisor.intake.submit(function, args, kwargs, self._policy or supervisor.policy)

    @overload
    async def run(self, fn: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    @overload
    async def run(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    async def run(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run one call in a worker and return its result.

        Cancelled: returns at once. A call that has not begun never runs. One that has is cancelled in its worker: its `finally`
        runs on and holds its place until it ends; a plain function runs on in its thread. Whatever comes of it is dropped.

        Raises:
            WorkerDied: its worker died after the call had begun, and no attempt is left.
            RemoteError: it raised something that cannot arrive as itself, or its result cannot be pickled.
            PayloadTooLarge: arguments or result above max_message.
            TimeoutError: it ran for longer than `timeout`.
            Exception: whatever the function raises; the remote traceback is at the end of its `__cause__` chain.
            RunnerClosed, RunnerBroken, TypeError, RuntimeError: as `submit`.
        """
        self._check_open()
        supervisor = self._supervisor
        function = supervisor.known.get(id(fn)) or supervisor.functions.of(fn)
        if supervisor.admission is not None:
            await supervisor.admission.enter()
            try:
                self._check_open()
            except BaseException:
                supervisor.admission.leave()
                raise
            return await self._admitted(function, args, kwargs)
        call = supervisor.intake.run(function, args, kwargs, self._policy or supervisor.policy)
        try:
            return await (call if isinstance(call, Future) else call.future)
        except CancelledError:
            if not isinstance(call, Future):
                supervisor.withdraw(call)
            raise
        finally:
            del call  # has the error, whose traceback has this frame: a cycle, that would keep what the caller's frames hold

    def _admitted(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Submit a call that was let in; it leaves when it is done."""
        admission = self._supervisor.admission
        assert admission is not None
        try:
            call = self._supervisor.intake.submit(function, args, kwargs, self._policy or self._supervisor.policy)
        except BaseException:
            admission.leave()
            raise
        call.add_done_callback(admission.left)
        return call

    @overload
    async def broadcast(self, fn: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs) -> list[T]: ...
    @overload
    async def broadcast(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> list[T]: ...
    async def broadcast(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Run one call in each worker that is ready, beside all others, and return the results by the index of the worker.

        Workers that start later do not get it: put per-worker setup in the lifespan. A broadcast is never retried: the runner's
        `retries` do not apply to it. A worker that has 16 broadcasts to answer gets the next one when it has answered one of them;
        the other workers get it at once.
        Cancelled: as `run`, in each worker.

        Raises:
            WorkerDied: a worker died or ended before it had done it; `started` says whether it had begun.
            Exception: as `run`: the first failure; the other calls are cancelled.
            TypeError: `options` were given a key, retries, retry_on or backoff; and as `submit`.
            RunnerClosed, RunnerBroken, RuntimeError: as `submit`.
        """
        policy = None if self._policy is None else self._policy.for_broadcast()
        self._check_open()
        supervisor = self._supervisor
        function = supervisor.functions.of(fn)
        return await supervisor.broadcast(function, args, kwargs, policy)

    # Many calls

    @overload
    def map(
        self,
        fn: Callable[..., Awaitable[T]],
        /,
        *iterables: AnyIterable,
        ordered: bool = True,
        window: int | None = None,
        key: Callable[..., Hashable] | None = None,
        return_exceptions: bool = False,
    ) -> Map[T]: ...
    @overload
    def map(
        self,
        fn: Callable[..., T],
        /,
        *iterables: AnyIterable,
        ordered: bool = True,
        window: int | None = None,
        key: Callable[..., Hashable] | None = None,
        return_exceptions: bool = False,
    ) -> Map[T]: ...
    def map(
        self,
        fn: Callable[..., Any],
        /,
        *iterables: AnyIterable,
        ordered: bool = True,
        window: int | None = None,
        key: Callable[..., Hashable] | None = None,
        return_exceptions: bool = False,
    ) -> Map[Any]:
        """Call `fn` with the items of the iterables, one of each at a time, until the shortest ends.

        Nothing is pulled before the map is used, once: `await` it for a list, or iterate it with `async for` in bounded memory.
        Left early, inside `async with` or by `aclose()`, what is under way is cancelled. Tiny plain functions travel in batches
        of about a millisecond's work, as measured.

        Args:
            fn: a coroutine function or a plain one.
            *iterables: sync, async, or endless.
            ordered: give results in the order of the inputs, or as they come.
            window: exactly this many items are pulled and not yet handed over. Default: as many as the calls' duration asks for,
                at most 16,384 a worker and 131,072 in all, within 64 MiB of pickled arguments and 64 MiB of results that wait or
                are expected.
            key: a plain function that gives the key of a call, from its arguments: calls of equal keys are never on two workers
                at once.
            return_exceptions: give errors in place of results instead of raising them.

        Raises:
            TypeError, ValueError: something that cannot be called or iterated, or a bad window.
            RunnerClosed, RuntimeError: as `submit`.
        """
        return self._map(fn, iterables, ordered, window, key, return_exceptions)

    @overload
    def map_items(
        self,
        fn: Callable[..., Awaitable[T]],
        /,
        *iterables: AnyIterable,
        ordered: bool = True,
        window: int | None = None,
        key: Callable[..., Hashable] | None = None,
        return_exceptions: bool = False,
    ) -> Map[tuple[Any, T]]: ...
    @overload
    def map_items(
        self,
        fn: Callable[..., T],
        /,
        *iterables: AnyIterable,
        ordered: bool = True,
        window: int | None = None,
        key: Callable[..., Hashable] | None = None,
        return_exceptions: bool = False,
    ) -> Map[tuple[Any, T]]: ...
    def map_items(
        self,
        fn: Callable[..., Any],
        /,
        *iterables: AnyIterable,
        ordered: bool = True,
        window: int | None = None,
        key: Callable[..., Hashable] | None = None,
        return_exceptions: bool = False,
    ) -> Map[tuple[Any, Any]]:
        """As `map`, giving pairs of item and result; of several iterables the item is a tuple.

        With return_exceptions a pair says which item has failed, and how.
        """
        return self._map(fn, iterables, ordered, window, key, return_exceptions, pairs=True)

    @overload
    def starmap(
        self,
        fn: Callable[..., Awaitable[T]],
        iterable: AnyIterable,
        /,
        *,
        ordered: bool = True,
        window: int | None = None,
        key: Callable[..., Hashable] | None = None,
        return_exceptions: bool = False,
    ) -> Map[T]: ...
    @overload
    def starmap(
        self,
        fn: Callable[..., T],
        iterable: AnyIterable,
        /,
        *,
        ordered: bool = True,
        window: int | None = None,
        key: Callable[..., Hashable] | None = None,
        return_exceptions: bool = False,
    ) -> Map[T]: ...
    def starmap(
        self,
        fn: Callable[..., Any],
        iterable: AnyIterable,
        /,
        *,
        ordered: bool = True,
        window: int | None = None,
        key: Callable[..., Hashable] | None = None,
        return_exceptions: bool = False,
    ) -> Map[Any]:
        """As `map`, over tuples of arguments."""
        return self._map(fn, (iterable,), ordered, window, key, return_exceptions, star=True)

    def _map(  # noqa: PLR0913  # what three verbs have in common
        self,
        fn: Callable[..., Any],
        iterables: tuple[AnyIterable, ...],
        ordered: bool,
        window: int | None,
        key: Callable[..., Hashable] | None,
        return_exceptions: bool,
        *,
        pairs: bool = False,
        star: bool = False,
    ) -> Map[Any]:
        if self._policy is not None and self._policy.key is not None:
            raise TypeError(
                "options(key=...) is for one call; a map takes a function that gives each call's key: map(..., key=host_of)"
            )
        self._check_open()
        from percore._map import Map
        from percore._rows import Spec

        spec = Spec(ordered, window, key, return_exceptions, pairs, star, self._policy)
        return Map(self._supervisor, fn, iterables, spec, self._check_open)


class Options(Verbs):
    """A view of a runner under which calls have a key, retries or a timeout, made by `runner.options(...)`. It costs little."""

    __slots__ = ("__weakref__", "_check_open", "_policy", "_supervisor")

    def __init__(self, supervisor: Supervisor, policy: Policy, check: Callable[[], None]) -> None:
        self._supervisor = supervisor
        self._policy = policy
        self._check_open = check  # type: ignore[method-assign]

    def __repr__(self) -> str:
        return f"<percore.Options {self._policy}>"

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError("a view of a runner cannot be pickled: it belongs to the process and the loop that started the runner")
