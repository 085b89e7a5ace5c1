"""submit, run, stream and broadcast: the methods that make calls, which Runner and the view returned by `options` share."""

from __future__ import annotations

import asyncio
from asyncio import CancelledError, Future
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from functools import partial
from time import monotonic
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

import percore
from percore._runner.map_verbs import MapVerbs

if TYPE_CHECKING:
    from percore._calls.calls import Call
    from percore._calls.functions import Function
    from percore._calls.policy import Policy
    from percore._supervisor.admission import Admission

P = ParamSpec("P")
T = TypeVar("T")


class Verbs(MapVerbs):
    """Run functions in workers."""

    __slots__ = ()

    # One call

    @overload
    def submit(self, fn: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]: ...
    @overload
    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> asyncio.Future[T]: ...
    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> asyncio.Future[Any]:
        """Submit one call and return its future. Never blocks.

        percore pickles the arguments now, so the call does not see later changes to them. The caller may await the future or
        discard it: percore holds it until it is done. Cancelling the future withdraws a call that has not begun, and cancels one
        that has begun in its worker.

        Raises:
            RunnerClosed: the runner is not started, is closing, or is closed.
            RunnerBroken: percore has given up starting workers.
            RunnerFull: `max_pending` calls are pending.
            TypeError: `fn` is a coroutine or a generator function, or is not callable.
            RuntimeError: called from another event loop or thread, or after a fork.
        """
        self._check_open()
        supervisor = self._supervisor
        function = supervisor.known.get(id(fn)) or supervisor.functions.of(fn)
        if supervisor.admission is not None:
            return self._submit_now(supervisor.admission, function, args, kwargs)
        return supervisor.submission.submit(function, args, kwargs, self._policy or supervisor.policy)

    @overload
    async def run(self, fn: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    @overload
    async def run(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> T: ...
    async def run(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
        """Run one call in a worker and return its result.

        If cancelled, it raises CancelledError at once. A call that has not begun never runs. A coroutine that has begun is
        cancelled in its worker; its `finally` blocks run to their end, and it counts as running until then. A plain function
        that has begun runs to its end in its thread. percore drops the outcome.

        Raises:
            WorkerDied: the worker died after the call had begun and no attempt is left, or no worker is left to run the call.
            RemoteError: the function raised something that cannot be sent back as itself, or its result cannot be pickled or
                unpickled.
            PayloadTooLarge: the pickled arguments or the pickled result are larger than `max_message`.
            TimeoutError: the call ran for longer than `timeout`, or did not begin within `queue_timeout`.
            Exception: any exception of the function. Its `__cause__` chain ends with the worker's traceback.
            RunnerClosed, RunnerBroken, TypeError, RuntimeError: as in `submit`.
        """
        self._check_open()
        supervisor = self._supervisor
        function = supervisor.known.get(id(fn)) or supervisor.functions.of(fn)
        if supervisor.admission is not None:
            return await (await self._submit_in_turn(supervisor.admission, function, args, kwargs))
        call = supervisor.submission.run(function, args, kwargs, self._policy or supervisor.policy)
        try:
            return await call.future
        except CancelledError:
            if not isinstance(call, Future):
                supervisor.calls.withdraw(call)
            raise
        finally:
            del call  # it holds the error, whose traceback holds this frame: a cycle that would keep the callers' locals alive

    # A call that the admission has counted leaves it when it is done. Between the two steps each function is called in a `try`:
    # a Ctrl-C may come at its entry.

    def _submit_now(self, admission: Admission, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Submit a call if the admission has room for it."""
        supervisor = self._supervisor
        admission.enter_now()
        try:
            call = supervisor.submission.submit(function, args, kwargs, self._policy or supervisor.policy)
        except BaseException:
            admission.leave()
            raise
        call.add_done_callback(admission.left)
        return call

    async def _submit_in_turn(
        self, admission: Admission, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Call:
        """Submit a call once the admission has room for it."""
        policy = await _enter(admission, self._policy or self._supervisor.policy)
        try:
            self._check_open()
            call = self._supervisor.submission.submit(function, args, kwargs, policy)
        except BaseException:
            admission.leave()
            raise
        call.add_done_callback(admission.left)
        return call

    @overload
    def stream(self, fn: Callable[P, AsyncIterator[T]], /, *args: P.args, **kwargs: P.kwargs) -> percore.Stream[T]: ...
    @overload
    def stream(self, fn: Callable[P, Iterator[T]], /, *args: P.args, **kwargs: P.kwargs) -> percore.Stream[T]: ...
    def stream(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> percore.Stream[Any]:
        """Return a Stream of the items that a generator function yields in a worker.

        An async generator runs in the worker's event loop and counts in `concurrency`, a plain one on one thread and in `threads`.
        The worker runs ahead of the consumer by at most `prefetch` items, an option of the call:
        `runner.options(prefetch=100).stream(...)`; the default is 16. A generator that waits for its consumer gives its place back
        after 10 ms and takes it again before it goes on. So a slow consumer holds up its own stream alone.

        The stream is lazy and can be used once: percore pickles the arguments when the first item is requested. Context variables
        have the values of this call. percore never retries a stream, even if the runner has `retries`.

        Raises:
            TypeError: `fn` is no generator function, or the view has a timeout, retries, retry_on or backoff.
            PayloadTooLarge: the values of the context variables are too large.
            RunnerClosed, RunnerBroken, RuntimeError: as in `submit`.
        """
        policy = None if self._policy is None else self._policy.for_stream()
        self._check_open()
        from percore._runner.stream import Stream

        supervisor, check = self._supervisor, self._check_open
        function = supervisor.functions.of(fn, is_stream=True)
        streams = supervisor.streams
        return Stream(function.name, streams.make(function, policy), check, partial(streams.begin, check, function, args, kwargs))

    @overload
    async def broadcast(self, fn: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs) -> list[T]: ...
    @overload
    async def broadcast(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> list[T]: ...
    async def broadcast(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> list[Any]:
        """Run one call in each ready worker, and return the results in the order of the workers' indices.

        The calls run in addition to the workers' other calls and do not wait for a free place. Workers that start later do not
        get the call: put per-worker setup in the lifespan. percore never retries a broadcast, even if the runner has `retries`. A
        worker with 16 unanswered broadcasts gets the next one after it has answered one of them; the other workers get it at once.

        If cancelled, each worker's call is cancelled as in `run`.

        Raises:
            WorkerDied: a worker died or ended before its call was done; `started` says whether the call had begun.
            Exception: the first failure, as in `run`. The other calls are cancelled.
            TypeError: the view has a key, retries, retry_on or backoff; or as in `submit`.
            RunnerClosed, RunnerBroken, RuntimeError: as in `submit`.
        """
        policy = None if self._policy is None else self._policy.for_broadcast()
        self._check_open()
        supervisor = self._supervisor
        function = supervisor.functions.of(fn)
        return await supervisor.broadcast(function, args, kwargs, policy)


for _verb in (Verbs.submit, Verbs.run, Verbs.stream, Verbs.broadcast):
    _verb.__qualname__ = f"Runner.{_verb.__name__}"  # the name in Python's own messages about wrong arguments


class Options(Verbs):
    """A view of a runner whose calls have a key, a rate, retries or time limits. `runner.options(...)` makes it, at little cost."""

    __slots__ = ("__weakref__", "_check_open", "_policy", "_supervisor")

    def __init__(self, runner: Verbs) -> None:
        self._supervisor = runner._supervisor
        self._policy = runner._policy
        self._check_open = runner._check_open  # type: ignore[method-assign]

    def __repr__(self) -> str:
        return f"<percore.Options {self._policy}>"

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(
            "a view of a runner cannot be pickled: it belongs to the process and the loop that started the runner. Instead of "
            "giving it to a call, make the calls here, and give the results of one to the next"
        )


async def _enter(admission: Admission, policy: Policy | None) -> Policy | None:
    """Wait until the admission lets a call in. Return the call's policy, less the time that it has waited."""
    if policy is None or policy.queue_timeout is None:
        await admission.enter()
        return policy
    began, is_inside = monotonic(), False
    try:
        async with asyncio.timeout(policy.queue_timeout):
            await admission.enter()
            is_inside = True
        return policy.after(monotonic() - began)
    except BaseException as error:
        if is_inside:
            admission.leave()
        elif isinstance(error, TimeoutError):
            policy.after(policy.queue_timeout)  # raises
        raise
