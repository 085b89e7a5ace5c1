"""What surrounds the serving of a worker: its lifespan, readiness, and the tasks that calls have left behind.

The lifespan is entered and left in one task, the worker's main one, as task groups and cancel scopes demand.
A task belongs to the calls if its context says so (`context.of_call`): a call has made it, or a task or a callback that a call has
made. All other tasks are the lifespan's. So the lifespan keeps what works for it until it is left:

    last call ends ─▶ tasks of calls are cancelled ─▶ the lifespan is left ─▶ tasks that are still there are cancelled

Nothing is asked for this while calls run: contexts are copied anyway, and a task factory of the user's stays as it is.
"""

import asyncio
import gc
import logging
import sys
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from contextvars import Context
from typing import Any, Final

from percore._ipc.channel import Channel
from percore._ipc.exceptions import dump_exception
from percore._ipc.slots import Sink
from percore._messages import FAILED, READY, UNREADY
from percore._points import POINTS, point
from percore._worker.context import WorkerContext, of_call
from percore._worker.serve import Server

logger: Final = logging.getLogger("percore")


async def serve_until_finished(
    channel: Channel,
    server: Server,
    context: WorkerContext,
    lifespan: Callable[[], Callable[[], Any] | None],
    *,
    main_by_value: bool,
    tasks: Callable[[], set[asyncio.Task[Any]]] = asyncio.all_tasks,
) -> int:
    """Enter the lifespan, serve until asked to end, leave it: the exit code.

    `lifespan` unpickles the user's factory, or gives None. What fails before the worker is ready is told to the supervisor; what
    fails afterwards is logged. `tasks` gives this worker's: all of the loop, unless workers share one.
    """
    stack = _Entered(context)
    try:
        await stack.enter(lifespan)
    except BaseException as error:
        sink = dump_exception(error, lambda: Sink(channel.outgoing), main_by_value=main_by_value)
        channel.send_payload(UNREADY, 0, sink.payload())
        if isinstance(error, asyncio.CancelledError):
            raise
        return 1
    if POINTS:
        point("worker.lifespan.entered")
    channel.send(READY, 0, context.worker.pid)
    if POINTS:
        point("worker.ready")
    try:
        await _unseen(server.finished)
        if POINTS:
            point("worker.finished")
        await _cancel([task for task in tasks() if _is_of_call(task)], "a task that a call left behind")
    except asyncio.CancelledError as error:
        if not channel.is_open:  # the worker itself is ended, by a test's engine
            raise
        await _fail(channel, server, stack, error, main_by_value=main_by_value)
        await _cancel(tasks(), "a task of a worker whose lifespan failed")
        return 1
    try:
        await stack.leave()
    except Exception:
        logger.exception("percore: the lifespan of worker %d failed on exit", context.worker.index)
    await _cancel(tasks(), "a task still running after the lifespan's exit")
    if POINTS:
        point("worker.lifespan.left")
    return 0


async def _unseen(future: "asyncio.Future[None]") -> None:
    """Wait, in a task that `asyncio.all_tasks` does not show meanwhile: a call that cancels all tasks must not end its worker."""
    me = asyncio.current_task()
    assert me is not None
    asyncio._unregister_task(me)
    try:
        await future
    finally:
        asyncio._register_task(me)


async def _fail(channel: Channel, server: Server, stack: "_Entered", error: asyncio.CancelledError, *, main_by_value: bool) -> None:
    """The lifespan has cancelled the task that it was entered in: one of its tasks has failed, or its time is over.

    Its body is left at once, by that cancellation, as its task groups and cancel scopes demand. The supervisor is told the error
    that comes out. Calls that had begun have no outcome of their own: they end with the worker, by that reason.
    """
    channel.send(FAILED, 0, None)
    server.abandon()
    failure = await stack.leave_by(error)
    sink = dump_exception(failure, lambda: Sink(channel.outgoing), main_by_value=main_by_value)
    channel.send_payload(FAILED, 0, sink.payload())
    channel.flush()


class _Entered:
    """The lifespan's context manager, async or plain."""

    def __init__(self, context: WorkerContext) -> None:
        self._context = context
        self._manager: AbstractAsyncContextManager[Any] | None = None

    async def enter(self, factory: Callable[[], Callable[[], Any] | None]) -> None:
        lifespan = factory()
        if lifespan is None:
            return
        manager = lifespan()
        if hasattr(type(manager), "__aenter__"):
            self._manager = manager
        elif hasattr(type(manager), "__enter__"):
            self._manager = _as_async(manager)
        else:
            if asyncio.iscoroutine(manager):
                manager.close()
            raise TypeError(
                f"the lifespan must return a context manager, not {type(manager).__name__}: "
                "decorate it with contextlib.asynccontextmanager, or contextlib.contextmanager"
            )
        assert self._manager is not None
        self._context.enter(await self._manager.__aenter__())

    async def leave(self) -> None:
        if self._manager is not None:
            try:
                await self._manager.__aexit__(None, None, None)
            finally:
                self._context.leave()

    async def leave_by(self, error: asyncio.CancelledError) -> BaseException:
        """Leave the body by this error. The error that comes out of it."""
        failure: BaseException = RuntimeError("the task that runs the lifespan was cancelled while the worker served")
        failure.__cause__ = error
        if self._manager is None:
            return failure
        try:
            await self._manager.__aexit__(type(error), error, error.__traceback__)
        except asyncio.CancelledError:
            """It let it through, and says no more."""
        except BaseException as raised:
            failure = raised
        finally:
            self._context.leave()
        return failure


@asynccontextmanager
async def _as_async(manager: Any) -> AsyncGenerator[Any]:
    with manager as value:
        yield value


def _is_of_call(task: asyncio.Task[Any]) -> bool:
    """Whether a call has made this task, or something that a call has made."""
    context = _context_of(task)
    return context is not None and context.get(of_call, False)


def _context_of(task: Any) -> Context | None:
    """The context that a task runs in. None: it does not say; a task factory may make tasks of its own kind."""
    if sys.version_info >= (3, 12):
        get_context = getattr(task, "get_context", None)
        return None if get_context is None else get_context()
    # Python 3.11 has no `Task.get_context`. The first context that a task refers to is the one it runs in: the other ones are those
    # of its callbacks, which are of its base class.
    return next((found for found in gc.get_referents(task) if type(found) is Context), None)


async def _cancel(tasks: Iterable[asyncio.Task[Any]], what: str) -> None:
    """Cancel these tasks but the current one, and wait for their ends. Their errors are logged."""
    me = asyncio.current_task()
    others = [task for task in tasks if task is not me]
    for task in others:
        task.cancel()
    if others:
        await asyncio.gather(*others, return_exceptions=True)
    for task in others:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("percore: %s failed: %r", what, task, exc_info=error)
