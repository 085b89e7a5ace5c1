"""The core of a worker, which every engine runs: it serves one channel, from the lifespan's entry to its exit."""

import asyncio
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, cast

from percore._protocol.messages import StartMarks
from percore._serialization.pickler import load
from percore._worker.context import WorkerContext, context_of_calls
from percore._worker.executor_worker import ExecutorAnswers
from percore._worker.lifespan import serve_until_finished
from percore._worker.sampling import Sampler
from percore._worker.server import Server
from percore._worker.terms import Variables

if TYPE_CHECKING:
    from percore._common.tracing import Tracing
    from percore._protocol.interfaces import WorkerChannel
    from percore._protocol.worker_start import WorkerStart


class WorkerCore:
    """A worker. Its loop calls the methods."""

    def __init__(
        self,
        channel: "WorkerChannel",
        marks: StartMarks,
        start: "WorkerStart",
        context: WorkerContext,
        failure: BaseException | None = None,
    ) -> None:
        """`failure`: an error before the worker's start, reported as the lifespan's."""
        self._channel = channel
        self._start = start
        self._context = context
        self._failure = failure
        self.calls = context_of_calls()
        """The context in which messages are received, and so calls run."""
        tracing: Tracing | None = None
        try:
            tracing = cast("Tracing", load(start.tracing)) if start.tracing else None
        except BaseException as error:
            self._failure = error
        executor, initializer = start.executor, start.thread_initializer
        sampler = Sampler(channel) if start.is_measured else None
        self.server = self.calls.run(
            Server,
            channel,
            marks,
            threads=start.threads,
            has_spare=start.has_spare,
            # Unpickled later, where a failure can be reported.
            thread_initializer=(lambda: cast("Callable[[], object]", load(initializer))) if initializer else None,
            variables=Variables(start.contextvars, tracing),
            answers=None if executor is None else ExecutorAnswers(channel, sampler, is_pool=executor.is_pool),
            sampler=sampler,
        )
        context.shares = self.server.shares
        if executor is None:
            context.families = self.server.families
        if executor is not None and executor.max_tasks:
            self.server.limit(executor.max_tasks)

    def fail(self, error: BaseException) -> None:
        """Report this error in place of serving. To be called before `serve`."""
        self._failure = self._failure or error

    def open(self, on_broken: Callable[[BaseException], None]) -> None:
        """Begin to receive. `on_broken` is called with the exception if the channel breaks."""
        self.calls.run(self._channel.open, self.server.receive, on_broken)

    async def serve(self, tasks: Callable[[], set[asyncio.Task[Any]]]) -> int:
        """Serve until asked to end, and return the exit code. As `serve_until_finished`."""
        return await serve_until_finished(self._channel, self.server, self._context, self._lifespan, tasks)

    def may_have_lost_tasks(self) -> bool:
        """Whether tasks of the user may have failed here that nobody has awaited.

        In an executor most calls are plain functions. A collection of what these have made and imported may take longer than they.
        """
        return self._start.executor is None or bool(self._start.lifespan) or self.server.has_had_tasks()

    def _lifespan(self) -> Callable[[], Any] | None:
        if self._failure is not None:
            raise self._failure
        return cast("Callable[[], Any]", load(self._start.lifespan)) if self._start.lifespan else None
