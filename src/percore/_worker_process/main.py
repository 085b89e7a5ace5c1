"""The entry point of a worker process, called once its launcher has set up the supervisor's environment (`world`)."""

import asyncio
import atexit
import contextlib
import gc
import os
import pickle
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass
from typing import Any, NoReturn, cast

from percore._common.fault_points import POINTS, point, this_is_worker
from percore._common.system import uvloop_wanted
from percore._serialization import reducers
from percore._serialization.pickler import MainInfo, load
from percore._transport.channel import RING_SIZE
from percore._transport.doorbell import Bell, bell_of
from percore._transport.memory import Memory, keep_heap_warm
from percore._transport.ring import RingReader, RingWriter
from percore._transport.slots import SlotReader, SlotWriter
from percore._transport.worker_side import WorkerSide
from percore._worker import context as worker_context
from percore._worker.context import CurrentWorker, WorkerContext, context_of_calls
from percore._worker.executor_worker import ExecutorAnswers, ExecutorSettings, initialize
from percore._worker.lifespan import serve_until_finished
from percore._worker.plain_calls import MARK_WORDS
from percore._worker.server import Server
from percore._worker_process import after_fork, main_module, multiprocessing_state
from percore._worker_process.log_forwarding import LOG_RING_SIZE, Levels, LogWriter, forward
from percore._worker_process.world import lifelines


@dataclass(frozen=True, slots=True)
class Boot:
    """What the supervisor sends to a worker before the channel exists: plain values, and the user's objects as pickles."""

    index: int
    generation: int
    places: int
    threads: int
    arena_size: int
    results_size: int
    slot_size: int
    max_message: int
    leases: int
    debug: bool
    main: tuple[Any, ...]
    loop_factory: bytes
    lifespan: bytes
    thread_initializer: bytes
    contextvars: tuple[tuple[str, str], ...]
    levels: Levels
    executor_settings: tuple[Any, ...] | None = None
    """The fields of `ExecutorSettings`, if the worker belongs to an executor."""
    authkey: bytes = b""
    """multiprocessing's authentication key in the program."""
    has_tracker: bool = False
    """Whether the last descriptor is the one of the program's multiprocessing resource tracker."""

    def pack(self) -> bytes:
        """Return this as bytes, for the launcher."""
        return pickle.dumps(astuple(self))

    @classmethod
    def unpack(cls, data: bytes) -> "Boot":
        """Return the `Boot` that `pack` packed."""
        return cls(*pickle.loads(data))


def cell_size(places: int) -> int:
    """Return the size of a worker's cell in bytes: a ring to the worker, a ring to the supervisor, and one start mark per place."""
    return 2 * RING_SIZE + places * MARK_WORDS * 8


def marks_of(cell: Memory, places: int) -> memoryview:
    """Return the start marks in a cell."""
    return cell.view[2 * RING_SIZE : 2 * RING_SIZE + places * MARK_WORDS * 8].cast("Q")


def unpickler(pickled: bytes) -> "Callable[[], Callable[[], Any]] | None":
    """Return a function that unpickles the user's function later, where a failure can be reported. None if there is none."""
    return (lambda: cast("Callable[[], Any]", load(pickled))) if pickled else None


def run(boot: bytes, fds: Sequence[int]) -> NoReturn:
    """Run a worker, until the process exits.

    `fds`: the cell; the arena (read-only); the results; this side's bell, two fds; the ring for log records; the pipe telling how
    much of that ring the supervisor has read; multiprocessing's resource tracker, if the program has one.
    """
    exitcode = 1
    try:
        exitcode = _run(Boot.unpack(boot), fds)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        _leave(exitcode)


def _run(boot: Boot, fds: Sequence[int]) -> int:
    this_is_worker(boot.index, boot.generation)
    if POINTS:
        point("worker.hello")
    signal.signal(signal.SIGINT, _ignore_interrupt)
    tracker = fds[-1] if boot.has_tracker else None
    *memory_fds, out_fd, in_fd, log_fd, pipe = fds if tracker is None else fds[:-1]
    reducers.become_worker()
    after_fork.withhold([*memory_fds, log_fd], [pipe, *lifelines])
    bell = bell_of((out_fd, in_fd))
    _forward_logs(log_fd, bell, pipe, boot.levels)  # before any user code runs
    main = MainInfo(*boot.main)
    executor_settings = ExecutorSettings(*boot.executor_settings) if boot.executor_settings is not None else None
    if executor_settings is None or not executor_settings.has_main:
        main_module.install(main)
        multiprocessing_state.take_over(boot.authkey, tracker)  # as multiprocessing does for the processes that it starts
    keep_heap_warm()
    context = WorkerContext(CurrentWorker(boot.index, boot.generation, os.getpid()))
    worker_context.of_process = context
    gc.collect()
    gc.freeze()
    failure = None if executor_settings is None else initialize(executor_settings)
    loop = _new_loop(boot)
    loop.set_debug(boot.debug)
    asyncio.set_event_loop(loop)
    try:
        serving = _serve(
            loop, boot, memory_fds, bell, context, main_by_value=main.by_value, executor_settings=executor_settings, failure=failure
        )
        return loop.run_until_complete(serving)
    finally:
        _end_loop(loop)


def _forward_logs(fd: int, bell: Bell, pipe: int, levels: Levels) -> None:
    memory = Memory(fd, LOG_RING_SIZE, writable=True)
    memory.close_fds()
    forward(LogWriter(RingWriter(memory.view), bell, pipe).write, levels)


def _new_loop(boot: Boot) -> asyncio.AbstractEventLoop:
    if boot.loop_factory:
        factory: Callable[[], asyncio.AbstractEventLoop] = load(boot.loop_factory)  # type: ignore[assignment]
        return factory()
    if uvloop_wanted():
        with contextlib.suppress(ImportError):
            import uvloop

            return uvloop.new_event_loop()
    return asyncio.new_event_loop()


async def _serve(  # noqa: PLR0913  # parts of one worker, put together in one place
    loop: asyncio.AbstractEventLoop,
    boot: Boot,
    fds: Sequence[int],
    bell: Bell,
    context: WorkerContext,
    *,
    main_by_value: bool,
    executor_settings: ExecutorSettings | None,
    failure: BaseException | None,
) -> int:
    cell_fd, arena_fd, results_fd = fds
    cell = Memory(cell_fd, cell_size(boot.places), writable=True)
    arena = Memory.of_reader(arena_fd, boot.arena_size)
    results = Memory(results_fd, boot.results_size, writable=True)
    for memory in (cell, arena, results):
        memory.close_fds()
    channel = WorkerSide(
        loop,
        (RingWriter(cell.view[RING_SIZE : 2 * RING_SIZE]), RingReader(cell.view[:RING_SIZE])),
        bell,
        (SlotWriter(results, boot.slot_size, boot.max_message), SlotReader(arena, boot.slot_size)),
        leases=boot.leases,
        main_by_value=main_by_value,
    )
    calls = context_of_calls()
    server = calls.run(
        Server,
        channel,
        marks_of(cell, boot.places),
        threads=boot.threads,
        thread_initializer=unpickler(boot.thread_initializer),
        contextvars=boot.contextvars,
        answers=None if executor_settings is None else ExecutorAnswers(channel, is_pool=executor_settings.is_pool),
    )
    context.shares = server.shares
    if executor_settings is not None and executor_settings.max_tasks:
        server.limit(executor_settings.max_tasks)
    calls.run(channel.open, server.receive, _broken)
    if executor_settings is None or not executor_settings.is_pool:
        loop.add_signal_handler(signal.SIGTERM, server.drain)
        after_fork.sigterm_drains()
    return await serve_until_finished(
        channel,
        server,
        context,
        lambda: _lifespan(boot, failure),
    )


def _lifespan(boot: Boot, failure: BaseException | None) -> Callable[[], Any] | None:
    if failure is not None:
        raise failure
    return cast("Callable[[], Any]", load(boot.lifespan)) if boot.lifespan else None


def _broken(error: BaseException) -> None:
    """End the process: its channel is broken."""
    sys.excepthook(type(error), error, error.__traceback__)
    os._exit(70)  # EX_SOFTWARE


def _ignore_interrupt(_signum: int, _frame: object) -> None:
    """Ignore SIGINT: the supervisor handles Ctrl-C. This is a handler because the user's subprocesses would inherit SIG_IGN."""


def _end_loop(loop: asyncio.AbstractEventLoop) -> None:
    loop.run_until_complete(loop.shutdown_asyncgens())
    gc.collect()  # failed tasks whose exception was never retrieved log it when they are freed: this is the last chance
    asyncio.set_event_loop(None)
    # Do not close the loop: threads of calls may still use it, and the process is about to end.


def _leave(exitcode: int) -> NoReturn:
    """Run the exit functions, flush the streams and exit, without waiting for threads."""
    try:
        atexit._run_exitfuncs()
    finally:
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(Exception):  # closed or broken: nothing can be reported any more
                stream.flush()
        if POINTS:
            point("worker.bye")
        os._exit(exitcode)
