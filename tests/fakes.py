"""An engine without processes: workers that live in the supervisor's own loop.

The channel, its memory and bells, tasks, threads, the lifespan and pickles are real. A death is not: `kill` stops the serving and
cancels its tasks, and threads run on until their call ends. The loop is the test's own, so no call may block it: see `pause`.
"""

import asyncio
import itertools
import os
import signal
import socket
from collections.abc import Callable, Coroutine, Sequence
from contextvars import copy_context
from dataclasses import replace
from typing import Any, Final
from weakref import WeakSet

from percore import CurrentWorker, Runner
from percore._calls.worker_start import places_of, start_of
from percore._common.options import RunnerOptions
from percore._monitor.usage import Usage, UsageMeter
from percore._protocol.interfaces import Condition, Exit, Worker
from percore._protocol.messages import Body
from percore._protocol.worker_start import WorkerStart
from percore._serialization.pickler import MainInfo
from percore._transport.links import Links
from percore._transport.worker_side import WorkerEnd
from percore._worker.context import WorkerContext, of_task
from percore._worker.worker import WorkerCore
from tests.jobs import HOARDS

_PIDS: Final = itertools.count(10_000_000)  # above what Linux gives: no process is ever meant
_tasks: dict[int, WeakSet[asyncio.Task[Any]]] = {}


def _create_task(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], **options: Any) -> asyncio.Task[Any]:
    """A task factory that remembers which worker's code has made a task."""
    task = asyncio.Task(coroutine, loop=loop, **options)
    context = of_task.get()
    if context is not None and context.worker.pid in _tasks:
        _tasks[context.worker.pid].add(task)
    return task


class FakeWorker:
    """A worker in the loop of its supervisor, and what its engine sees of it."""

    def __init__(
        self, engine: "FakeEngine", start: WorkerStart, on_exit: Callable[[Exit], None], sockets: Sequence[socket.socket]
    ) -> None:
        self._loop = engine.loop
        self._on_exit = on_exit
        self.pid = next(_PIDS)
        link = engine.links.link()
        self.channel, self.fate, self.close = link.channel, link.fate, link.close
        # The worker's own mappings, as in a process of its own: the supervisor lets go of its own when it likes.
        self._end = WorkerEnd(link.layout, [*map(os.dup, link.fds)])
        link.close_fds()
        self._sockets = tuple(sock.dup() for sock in sockets)
        for sock in self._sockets:
            sock.setblocking(False)
        self.exitcode: int | None = None
        _tasks[self.pid] = WeakSet()
        try:
            copy_context().run(self._begin, start)
        except BaseException:
            self._end.bell.close()
            self._end.close()
            self.close()
            self._close_sockets()
            raise

    def _begin(self, start: WorkerStart) -> None:
        context = WorkerContext(CurrentWorker(start.index, start.generation, self.pid, self._sockets))
        of_task.set(context)
        self._side = self._end.channel(self._loop, main_by_value=False)
        self.core = WorkerCore(self._side, self._end.marks, start, context)
        self.core.open(self._die)
        self._task = self._loop.create_task(self.core.serve(self._live_tasks))
        # A callback, not a `finally` in there: killed before its first step, a task runs none.
        self._task.add_done_callback(self._served)

    def _live_tasks(self) -> set[asyncio.Task[Any]]:
        return {task for task in _tasks[self.pid] if not task.done()} | self.core.server.own_tasks()

    def _served(self, task: asyncio.Task[int]) -> None:
        is_killed = self.exitcode is not None
        if not is_killed:
            self.exitcode = 1 if task.cancelled() or task.exception() is not None else task.result()
        self._last = self._loop.create_task(self._finish(is_killed=is_killed))

    async def _finish(self, *, is_killed: bool) -> None:
        """What a process does by ending: everything of it stops."""
        self._side.stop()
        self.core.server.abandon()
        tasks = self._live_tasks() - {self._last}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self.core.server.stop()
        self._side.close()
        if not is_killed:
            self.core.server.join()
            self._end.close()
        self._close_sockets()
        # Else a call may run on in a thread, where a death would have ended it: the memory goes with the last of them.
        del _tasks[self.pid]
        self._loop.call_soon(self._on_exit, Exit(self.exitcode))

    def _close_sockets(self) -> None:
        for sock in self._sockets:
            sock.close()

    def _die(self, why: BaseException | int) -> None:
        if self.exitcode is None:
            self.exitcode = why if isinstance(why, int) else 70
            self._side.stop()
            self._task.cancel()

    def kill(self, signum: int = signal.SIGKILL) -> None:
        if signum == signal.SIGTERM:
            self.core.calls.run(self.core.server.drain)
        else:
            self._die(-signum)

    def ready(self, told: Body) -> None: ...

    def examine(self, told: Callable[[Condition], None]) -> None:
        self._loop.call_soon(told, Condition())

    def pause(self) -> None:
        """Read nothing more, as a worker whose loop is blocked."""
        self._loop.remove_reader(self._end.bell.fileno())

    def resume(self) -> None:
        """Read on."""
        if self._side.is_open:
            self.core.open(self._die)


class FakeEngine:
    """Starts fake workers."""

    worker_class = FakeWorker
    on_place: Callable[[], None]
    sees_starts = True

    def __init__(self, loop: asyncio.AbstractEventLoop, options: RunnerOptions, main: MainInfo) -> None:
        self.loop = loop
        self.links = Links(loop, options, places_of(options), main_by_value=main.by_value)
        self.store = self.links.store
        try:
            self._start = start_of(options, self.store)
        except BaseException:
            self.links.close()
            raise
        loop.set_task_factory(_create_task)  # type: ignore[arg-type]  # typeshed's factory is generic

    def start(self, index: int, generation: int, on_exit: Callable[[Exit], None], sockets: Sequence[socket.socket]) -> FakeWorker:
        return self.worker_class(self, replace(self._start, index=index, generation=generation), on_exit, sockets)

    def renew(self) -> None:
        """Do nothing: there is one process, and it has its modules."""

    def resize(self, workers: int) -> None:
        self.links.resize(workers)

    async def memory(self, workers: Sequence[Worker], enough: int) -> list[int | None]:
        hoards = (HOARDS.get(worker.pid or 0, []) for worker in workers)
        return [2**20 + sum(map(len, hoard)) for hoard in hoards]

    async def usage(self, workers: Sequence[tuple[str, Worker]]) -> Usage:
        return await UsageMeter().read({os.getpid(): "supervisor"})

    async def aclose(self) -> None:
        self.links.close()


class FakeRunner(Runner):
    """A runner whose workers are fakes."""

    _make_engine = FakeEngine
