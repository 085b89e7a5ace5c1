"""An engine without processes: workers that live in the supervisor's own loop.

Real are: the channel, its memory and bells, the serving of calls on tasks and threads, the lifespan, what is pickled. Not real
are the death (`kill` stops the serving and cancels its tasks; threads run on until their call ends) and the loop, which all
workers share with the test. So a worker's loop cannot be blocked by a call; `FakeWorker.pause` stops its reading instead.
"""

import asyncio
import itertools
import os
import signal
from collections.abc import Callable, Coroutine, Sequence
from contextvars import copy_context
from dataclasses import replace
from typing import Any, Final
from weakref import WeakSet

from percore import CurrentWorker, Runner
from percore._common.options import RunnerOptions
from percore._engines.processes.engine import Cell, CommonMemory, fate_of, make_boot
from percore._monitor.usage import Usage, UsageMeter
from percore._protocol.interfaces import Exit, Fate, Worker
from percore._protocol.messages import Body
from percore._serialization.pickler import MainInfo, load
from percore._transport.arena import Arena
from percore._transport.channel import RING_SIZE
from percore._transport.doorbell import bell_of
from percore._transport.memory import Memory
from percore._transport.ring import RingReader, RingWriter
from percore._transport.slots import SlotReader, SlotWriter
from percore._transport.worker_side import WorkerSide
from percore._worker.context import WorkerContext, context_of_calls, of_task
from percore._worker.lifespan import serve_until_finished
from percore._worker.server import Server
from percore._worker_process.main import Boot, cell_size, marks_of, unpickler

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

    def __init__(self, engine: "FakeEngine", boot: Boot, on_exit: Callable[[Exit], None]) -> None:
        self._loop = engine.loop
        self._on_exit = on_exit
        self._boot = boot
        self.pid = next(_PIDS)
        self._cell = Cell(boot.places, engine.shared)
        self._marks = marks_of(self._cell.memory, boot.places)
        self.channel = self._cell.link(self._loop, engine.store)
        # The worker's own mappings, as in a process of its own: the supervisor lets go of its own when it likes.
        self._memories = (
            Memory(os.dup(self._cell.memory.fd), cell_size(boot.places), writable=True),
            Memory.of_reader(engine.shared.memory.reader_fd(), boot.arena_size),
            Memory(os.dup(self._cell.results.fd), boot.results_size, writable=True),
        )
        for memory in (*self._memories, self._cell.memory, self._cell.results):
            memory.close_fds()
        self._context = WorkerContext(CurrentWorker(boot.index, boot.generation, self.pid))
        self._exitcode: int | None = None
        self._is_killed = False
        self._is_ending = False
        _tasks[self.pid] = WeakSet()
        copy_context().run(self._begin)

    def _begin(self) -> None:
        of_task.set(self._context)
        cell, arena, results = self._memories
        self._side = WorkerSide(
            self._loop,
            (RingWriter(cell.view[RING_SIZE : 2 * RING_SIZE]), RingReader(cell.view[:RING_SIZE])),
            bell_of(self._cell.theirs),
            (SlotWriter(results, self._boot.slot_size, self._boot.max_message), SlotReader(arena, self._boot.slot_size)),
            leases=self._boot.leases,
        )
        self._own_marks = marks_of(cell, self._boot.places)
        self._calls = context_of_calls()
        self._server = self._calls.run(
            Server,
            self._side,
            self._own_marks,
            threads=self._boot.threads,
            thread_initializer=unpickler(self._boot.thread_initializer),
            contextvars=self._boot.contextvars,
        )
        self._context.shares = self._server.shares
        self._calls.run(self._side.open, self._server.receive, lambda _error: self._die(70))
        self._task = self._loop.create_task(
            serve_until_finished(
                self._side,
                self._server,
                self._context,
                lambda: load(self._boot.lifespan) if self._boot.lifespan else None,  # type: ignore[arg-type, return-value]
                tasks=self._live_tasks,
            )
        )
        # A callback, not a `finally` in there: killed before its first step, a task runs none.
        self._task.add_done_callback(self._served)

    def _live_tasks(self) -> set[asyncio.Task[Any]]:
        return {task for task in _tasks[self.pid] if not task.done()} | self._server.own_tasks()

    def _served(self, task: asyncio.Task[int]) -> None:
        self._is_ending = True
        if self._exitcode is None:
            self._exitcode = 1 if task.cancelled() or task.exception() is not None else task.result()
        self._last = self._loop.create_task(self._end())

    async def _end(self) -> None:
        """What a process does by ending: everything of it stops."""
        self._side.stop()
        tasks = self._live_tasks() - {self._last}
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._server._threads.waiting.clear()  # killed: what has not begun never will
        self._server.stop()
        self._side.close()
        if not self._is_killed:
            self._server.join()
            self._own_marks.release()
            for memory in self._memories:
                memory.close()
        # Else a call may run on in a thread, where a death would have ended it: the memory goes with the last of them.
        del _tasks[self.pid]
        self._loop.call_soon(self._on_exit, Exit(self._exitcode))

    def _die(self, exitcode: int) -> None:
        if not self._is_killed and not self._is_ending:
            self._is_killed = True
            self._exitcode = exitcode
            self._side.stop()
            self._task.cancel()

    # As the supervisor sees it

    def kill(self, signum: int = signal.SIGKILL) -> None:
        if signum == signal.SIGTERM:
            copy_context().run(self._drain)
        else:
            self._die(-signum)

    def ready(self, told: Body) -> None:
        """Its pid is known."""

    def _drain(self) -> None:
        of_task.set(self._context)
        self._server.drain()

    def fate(self, place: int, call_id: int) -> Fate:
        return fate_of(self._marks, place, call_id)

    def close(self) -> None:
        self.channel.close()
        self._marks.release()
        self._cell.close()

    # As a test sees it

    def pause(self) -> None:
        """Read nothing more, as a worker whose loop is blocked."""
        self._loop.remove_reader(self._side._bell.fileno())

    def resume(self) -> None:
        """Read on."""
        if self._side.is_open:
            self._calls.run(self._loop.add_reader, self._side._bell.fileno(), self._side._on_bell)


class FakeEngine:
    """Starts fake workers."""

    worker_class = FakeWorker

    def __init__(self, loop: asyncio.AbstractEventLoop, options: RunnerOptions, main: MainInfo) -> None:
        self.loop = loop
        self.shared = shared = CommonMemory.create(options)
        self.store = Arena(shared.memory, shared.slot_size, options.max_message, loop, main_by_value=main.by_value)
        try:
            self._boot = make_boot(options, shared, self.store, main, debug=False)
        except BaseException:
            shared.close()
            raise
        self._meter = UsageMeter()
        loop.set_task_factory(_create_task)  # type: ignore[arg-type]  # typeshed's factory is generic

    def start(self, index: int, generation: int, on_exit: Callable[[Exit], None]) -> FakeWorker:
        return self.worker_class(self, replace(self._boot, index=index, generation=generation), on_exit)

    async def usage(self, workers: Sequence[tuple[str, Worker]]) -> Usage:
        return await self._meter.read({os.getpid(): "supervisor"})

    async def aclose(self) -> None:
        self.shared.close()


class FakeRunner(Runner):
    """A runner whose workers are fakes."""

    _make_engine = FakeEngine
