"""What surrounds the serving of a worker: its lifespan, readiness, and the tasks that calls have left behind."""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Final

from percore._ipc.channel import Channel
from percore._ipc.exceptions import dump_exception
from percore._ipc.slots import Sink
from percore._messages import READY, UNREADY
from percore._points import POINTS, point
from percore._worker.context import WorkerContext
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
    await server.finished
    if POINTS:
        point("worker.finished")
    await _cancel_leftovers(tasks)
    try:
        await stack.leave()
    except Exception:
        logger.exception("percore: the lifespan of worker %d failed on exit", context.worker.index)
    if POINTS:
        point("worker.lifespan.left")
    return 0


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


@asynccontextmanager
async def _as_async(manager: Any) -> AsyncGenerator[Any]:
    with manager as value:
        yield value


async def _cancel_leftovers(of_worker: Callable[[], set[asyncio.Task[Any]]]) -> None:
    """Cancel the tasks that calls have left behind, before the lifespan takes away what they use. Their errors are logged."""
    me = asyncio.current_task()
    tasks = [task for task in of_worker() if task is not me]
    for task in tasks:
        task.cancel()
    if tasks:
        await asyncio.gather(*tasks, return_exceptions=True)
    for task in tasks:
        if not task.cancelled() and (error := task.exception()) is not None:
            logger.error("percore: a task that a call left behind failed: %r", task, exc_info=error)
