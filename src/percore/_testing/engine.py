"""An engine without processes: workers that live in the supervisor's own loop.

The channel, its memory and bells, tasks, threads, the lifespan and pickles are real. A death is not: `kill` stops the serving and
cancels its tasks. Threads run on until their call ends, as do coroutines that ignore their cancellation. The loop is the test's
own, so no call may block it: see `pause`.
"""

import asyncio
import itertools
import os
import signal
import socket
import threading
from collections.abc import Callable, Coroutine, Sequence
from contextvars import copy_context
from typing import Any, Final
from weakref import WeakKeyDictionary, WeakSet, WeakValueDictionary

from percore._calls.worker_start import places_of, start_of
from percore._common.options import RunnerOptions
from percore._monitor.usage import ProcessUsage, Usage, UsageMeter
from percore._protocol.interfaces import Condition, Exit, Worker
from percore._protocol.messages import Body
from percore._protocol.worker_start import WorkerStart
from percore._serialization.pickler import MainInfo
from percore._transport.links import Links
from percore._transport.worker_side import WorkerEnd
from percore._worker.context import CurrentWorker, WorkerContext, of_task
from percore._worker.worker import WorkerCore

PATIENCE: Final = 0.5
"""Seconds that coroutines have to end when their worker is killed. Those that ignore their cancellation run on."""

_PIDS: Final = itertools.count(10_000_000)  # above what Linux gives: no process is ever meant
_tasks: Final[dict[int, WeakSet[asyncio.Task[Any]]]] = {}
_factories: Final[WeakKeyDictionary[asyncio.AbstractEventLoop, "_TaskFactory"]] = WeakKeyDictionary()
_living: Final[WeakValueDictionary[int, "FakeWorker"]] = WeakValueDictionary()


def _plain_task(loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], **options: Any) -> asyncio.Task[Any]:
    return asyncio.Task(coroutine, loop=loop, **options)


class _TaskFactory:
    """Remembers which worker's code has made a task. Tasks are made as before, and so they are again after the last engine."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self._before: Any = loop.get_task_factory()
        self._make: Any = self._before or _plain_task
        self.engines = 0

    def __call__(self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], **options: Any) -> asyncio.Task[Any]:
        task: asyncio.Task[Any] = self._make(loop, coroutine, **options)
        context = of_task.get()
        if context is not None and context.worker.pid in _tasks:
            _tasks[context.worker.pid].add(task)
        return task

    def leave(self, loop: asyncio.AbstractEventLoop) -> None:
        """Count one engine less."""
        self.engines -= 1
        if not self.engines:
            _factories.pop(loop, None)
            current: Any = loop.get_task_factory()
            if current is self:
                loop.set_task_factory(self._before)


async def _ended(tasks: set[asyncio.Task[Any]]) -> set[asyncio.Task[Any]]:
    """Wait for tasks that were cancelled. Return those that run on."""
    if not tasks:
        return tasks
    done, stubborn = await asyncio.wait(tasks, timeout=PATIENCE)
    for task in done:
        if not task.cancelled():
            task.exception()  # asyncio is not to report it
    return stubborn


def worker_of_pid(pid: int) -> "FakeWorker | None":
    """Return the fake worker with this process id; None: there is none, or it has ended."""
    return _living.get(pid)


def living_workers() -> "list[FakeWorker]":
    """Return the fake workers that live, the oldest first."""
    return [worker for _, worker in sorted(_living.items()) if worker.exitcode is None]


class FakeWorker:
    """A worker in the loop of its supervisor, and what its engine sees of it."""

    node = None
    thread_ids = ()

    def __init__(
        self, engine: "FakeEngine", start: WorkerStart, on_exit: Callable[[Exit], None], sockets: Sequence[socket.socket]
    ) -> None:
        self.loop = engine.loop
        self._on_exit = on_exit
        self.pid = next(_PIDS)
        link = engine.links.link()
        self.channel, self.fate, self.close = link.channel, link.fate, link.close
        # The worker's own mappings, as in a process of its own: the supervisor lets go of its own when it likes.
        try:
            self._end = WorkerEnd(link.layout, [*map(os.dup, link.fds)])
        except BaseException:
            self.close()
            raise
        finally:
            link.close_fds()
        self._sockets = tuple(sock.dup() for sock in sockets)
        for sock in self._sockets:
            sock.setblocking(False)
        self.exitcode: int | None = None
        _tasks[self.pid] = WeakSet()
        _living[self.pid] = self
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
        self._side = self._end.channel(self.loop, main_by_value=False)
        self.core = WorkerCore(self._side, self._end.marks, start, context)
        self.core.open(self._die)
        self._task = self.loop.create_task(self.core.serve(self._live_tasks))
        # A callback, not a `finally` in there: killed before its first step, a task runs none.
        self._task.add_done_callback(self._served)

    def _live_tasks(self) -> set[asyncio.Task[Any]]:
        return {task for task in _tasks[self.pid] if not task.done()} | self.core.server.own_tasks()

    def _served(self, task: asyncio.Task[int]) -> None:
        is_killed = self.exitcode is not None
        if not is_killed:
            self.exitcode = 1 if task.cancelled() or task.exception() is not None else task.result()
        self._last = self.loop.create_task(self._finish(is_killed=is_killed))

    async def _finish(self, *, is_killed: bool) -> None:
        """What a process does by ending: everything of it stops."""
        self._side.stop()
        self.core.server.abandon()
        tasks = self._live_tasks() - {self._last}
        for task in tasks:
            task.cancel()
        stubborn = await _ended(tasks)
        self.core.server.stop()
        self._side.close()
        if not stubborn and (not is_killed or self.core.server.threads.is_idle()):
            self.core.server.join()
            self._end.close()
        self._close_sockets()
        # Else a call runs on where a death would have ended it: the memory goes with the last of them.
        del _tasks[self.pid]
        _living.pop(self.pid, None)
        self.loop.call_soon(self._on_exit, Exit(self.exitcode))

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

    def strike(self) -> None:
        """Die by SIGKILL before this returns. Any thread may call it; that of the loop waits for nothing."""
        if asyncio._get_running_loop() is self.loop:
            self._die(-signal.SIGKILL)
            return
        dead = threading.Event()
        self.loop.call_soon_threadsafe(self._struck, dead)
        dead.wait()

    def _struck(self, dead: threading.Event) -> None:
        self._die(-signal.SIGKILL)
        dead.set()

    def ready(self, told: Body) -> None: ...

    def examine(self, told: Callable[[Condition], None]) -> None:
        self.loop.call_soon(told, Condition())

    def pause(self) -> None:
        """Read nothing more, as a worker whose loop is blocked."""
        self.loop.remove_reader(self._end.bell.fileno())

    def resume(self) -> None:
        """Read on."""
        if self._side.is_open:
            self.core.open(self._die)


class FakeEngine:
    """Starts fake workers."""

    worker_class = FakeWorker
    no_place = ""
    on_place: Callable[[], None]
    rouse: Callable[[], object] | None = None
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
        factory = _factories.get(loop)
        if factory is None:
            factory = _factories[loop] = _TaskFactory(loop)
            loop.set_task_factory(factory)  # type: ignore[arg-type]  # typeshed's factory is generic
        factory.engines += 1
        self._factory: _TaskFactory | None = factory

    def start(self, index: int, generation: int, on_exit: Callable[[Exit], None], sockets: Sequence[socket.socket]) -> FakeWorker:
        return self.worker_class(self, self._start._replace(index=index, generation=generation), on_exit, sockets)

    def renew(self) -> None:
        """Do nothing: there is one process, and it has its modules."""

    def resize(self, workers: int) -> None:
        self.links.resize(workers)

    async def memory(self, workers: Sequence[Worker], enough: int) -> list[int | None]:
        """Return nothing: all workers have the memory of this process."""
        return [None] * len(workers)

    async def usage(self, workers: Sequence[tuple[str, Worker]]) -> Usage:
        return await UsageMeter().read({os.getpid(): "supervisor"})

    async def usage_elsewhere(self, workers: Sequence[tuple[str, Worker]]) -> Sequence[ProcessUsage]:
        """Return nothing: all workers are on this machine."""
        return ()

    async def aclose(self) -> None:
        self.links.close()
        if self._factory is not None:
            self._factory.leave(self.loop)
            self._factory = None
