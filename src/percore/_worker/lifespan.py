"""The main task of a worker: it enters and leaves the lifespan, reports readiness, and cancels the tasks left behind.

The main task both enters and leaves the lifespan, as task groups and cancel scopes require. A task belongs to the calls if
`context.of_call` is set in its context: a call created it, or a task or callback that a call created. All other tasks belong to the
lifespan. They keep running until the lifespan has been left:

    last call ends ─▶ tasks of calls are cancelled ─▶ the lifespan is left ─▶ tasks that are still there are cancelled

This costs nothing while calls run: asyncio copies contexts anyway. It does not touch the user's task factory either.
"""

import asyncio
import gc
import logging
import sys
from collections.abc import AsyncGenerator, Callable, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from contextvars import Context
from typing import TYPE_CHECKING, Any, Final

from percore._common.fault_points import POINTS, point
from percore._protocol.messages import FAILED, READY, UNREADY
from percore._worker.context import WorkerContext, of_call
from percore._worker.server import Server

if TYPE_CHECKING:
    from percore._protocol.interfaces import WorkerChannel

logger: Final = logging.getLogger("percore")


async def serve_until_finished(
    channel: "WorkerChannel",
    server: Server,
    context: WorkerContext,
    lifespan: Callable[[], Callable[[], Any] | None],
    tasks: Callable[[], set[asyncio.Task[Any]]],
) -> int:
    """Enter the lifespan, serve until asked to end, and leave the lifespan. Return the exit code.

    `lifespan` unpickles and returns the user's factory, or returns None. An exception before the worker is ready goes to the
    supervisor, as does one that ends the lifespan while calls run. An exception at the lifespan's exit is logged. `tasks` returns
    the tasks of this worker: all tasks of its loop, if the loop is its own.
    """
    stack = _Entered(context)
    try:
        await stack.enter(lifespan)
    except BaseException as error:
        channel.send_exception(UNREADY, 0, error)
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
        if not channel.is_open:  # a test's engine ends the worker itself
            raise
        await _fail(channel, server, stack, error)
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
    """Wait for `future` while `asyncio.all_tasks` omits this task: a call that cancels all tasks must not end its worker."""
    me = asyncio.current_task()
    assert me is not None
    asyncio._unregister_task(me)
    try:
        await future
    finally:
        asyncio._register_task(me)


async def _fail(channel: "WorkerChannel", server: Server, stack: "_Entered", error: asyncio.CancelledError) -> None:
    """Handle the failure of a lifespan, which has cancelled the main task: one of its tasks has failed, or it has timed out.

    The cancellation is thrown into the lifespan at once, as task groups and cancel scopes require. The supervisor receives the
    exception that comes out. Running calls are not answered: the supervisor fails them, for that reason, when the worker ends.
    """
    channel.send(FAILED, 0, None)
    server.abandon()
    failure = await stack.leave_by(error)
    channel.send_exception(FAILED, 0, failure)
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
        """Throw `error` into the lifespan. Return the exception that comes out."""
        failure: BaseException = RuntimeError("the task that runs the lifespan was cancelled while the worker served")
        failure.__cause__ = error
        if self._manager is None:
            return failure
        try:
            await self._manager.__aexit__(type(error), error, error.__traceback__)
        except asyncio.CancelledError:
            """The lifespan let the cancellation through."""
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
    """Whether a call created this task, directly or through its tasks and callbacks."""
    context = _context_of(task)
    return context is not None and context.get(of_call, False)


def _context_of(task: Any) -> Context | None:
    """Return the context that a task runs in. None if the task, made by a custom task factory, does not expose it."""
    if sys.version_info >= (3, 12):
        get_context = getattr(task, "get_context", None)
        return None if get_context is None else get_context()
    # Python 3.11 has no `Task.get_context`. A task refers to its own context first. The contexts of its callbacks come later, as
    # they belong to its base class.
    return next((found for found in gc.get_referents(task) if type(found) is Context), None)


async def _cancel(tasks: Iterable[asyncio.Task[Any]], what: str) -> None:
    """Cancel these tasks, except the current one, wait until they have ended, and log their errors."""
    me = asyncio.current_task()
    others = [task for task in tasks if task is not me]
    for task in others:
        task.cancel()
    if others:
        await asyncio.gather(*others, return_exceptions=True)
    for task in others:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("percore: %s failed: %r", what, task, exc_info=error)
