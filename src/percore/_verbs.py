"""What a runner is asked to do: the verbs, as methods of Runner and of the view that `options` gives."""

from __future__ import annotations

from asyncio import CancelledError, Future
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar, overload

from percore._map_verbs import MapVerbs

if TYPE_CHECKING:
    import asyncio
    from collections.abc import Awaitable, Callable

    from percore._calls import Call, Function
    from percore._policy import Policy
    from percore._supervisor import Supervisor

P = ParamSpec("P")
T = TypeVar("T")


class Verbs(MapVerbs):
    """Runs functions in workers."""

    __slots__ = ()

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


for _verb in (Verbs.submit, Verbs.run, Verbs.broadcast):
    _verb.__qualname__ = f"Runner.{_verb.__name__}"  # what Python says of its arguments names what users know


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
        raise TypeError(
            "a view of a runner cannot be pickled: it belongs to the process and the loop that started the runner. Instead of "
            "giving it to a call, make the calls here, and give the results of one to the next"
        )
