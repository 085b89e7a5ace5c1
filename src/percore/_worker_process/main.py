"""The entry point of a worker process, called once its launcher has set up the supervisor's environment (`world`)."""

import asyncio
import atexit
import contextlib
import faulthandler
import gc
import os
import pickle
import signal
import socket
import sys
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NoReturn

from percore._common import hardening
from percore._common.fault_points import POINTS, point, this_is_worker
from percore._common.system import new_loop
from percore._protocol.worker_start import Given
from percore._serialization import reducers
from percore._serialization.pickler import MainInfo, load
from percore._transport.doorbell import Bell
from percore._transport.memory import Memory, keep_heap_warm
from percore._transport.ring import RingWriter
from percore._transport.worker_side import WorkerEnd
from percore._worker import context as worker_context
from percore._worker.context import CurrentWorker, WorkerContext
from percore._worker.executor_worker import initialize
from percore._worker.worker import WorkerCore
from percore._worker_process import after_fork, main_module, main_thread, multiprocessing_state, own_stacks
from percore._worker_process.boot import STACKS_SIGNAL, Boot
from percore._worker_process.log_forwarding import LOG_RING_SIZE, Levels, LogWriter, forward
from percore._worker_process.title import program_name, set_title
from percore._worker_process.world import lifelines


def run(boot: bytes, fds: Sequence[int], given: Given | None = None) -> NoReturn:
    """Run a worker, until the process exits.

    `boot`: a pickled `Boot`. `given`: the initializer of an executor, if it came with the process.

    `fds`: the cell; the arena (read-only); the results; this side's bell, two fds; the ring for log records; the pipe telling how
    much of that ring the supervisor has read; the file for stacks; multiprocessing's resource tracker, if the program has one; the
    sockets on which the worker serves.
    """
    exitcode = 1
    try:
        exitcode = _run(pickle.loads(boot), fds, given)
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        _leave(exitcode)


def _run(boot: Boot, fds: Sequence[int], given: Given | None) -> int:
    if boot.harden:  # before any thread starts, and before any data of the user is here
        hardening.close_process()
        hardening.renounce_privileges()
    this_is_worker(boot.start.index, boot.start.generation)
    set_title(f"worker {boot.start.index}", program_name(), f"percore-w{boot.start.index}")
    if POINTS:
        point("worker.hello")
    signal.signal(signal.SIGINT, _ignore_interrupt)
    end, sockets, tracker = _take(boot, fds)
    main = MainInfo(*boot.main)
    executor = boot.start.executor
    if executor is None or not executor.has_main:
        main_module.install(main)
        # As multiprocessing does for the processes that it starts.
        multiprocessing_state.take_over(boot.parent, boot.start.index, boot.authkey, tracker)
    main_module.leave_unpatched()
    keep_heap_warm()
    context = WorkerContext(CurrentWorker(boot.start.index, boot.start.generation, os.getpid(), tuple(sockets), boot.start.node))
    worker_context.of_process = context
    if executor is None or not executor.has_main:
        gc.collect()
    # Otherwise this may be a fork of the program: a collection would write to all the pages that the two share, and run
    # finalizers of the program's objects.
    gc.freeze()
    failure = None if executor is None else initialize(executor.initializer, given)
    make_loop: Any = load(boot.loop_factory) if boot.loop_factory else new_loop
    loop: asyncio.AbstractEventLoop = make_loop()
    loop.set_debug(boot.debug)
    channel = end.channel(loop, main_by_value=main.by_value)
    worker = WorkerCore(channel, end.marks, boot.start, context, failure)
    drains = executor is None or not executor.is_pool
    if executor is None or boot.start.threads > 1:
        return _run_loop(loop, worker, partial(_drain_on_sigterm, loop, worker.server.drain) if drains else None)
    on_open = main_thread.drain_on_sigterm(loop, worker.server.drain) if drains else None
    return main_thread.serve(partial(_run_loop, loop, worker, on_open), worker, _leave)


def _take(boot: Boot, fds: Sequence[int]) -> tuple[WorkerEnd, list[socket.socket], int | None]:
    """Give each descriptor its purpose, before any user code runs.

    Return the worker's end of the memory, the sockets on which it serves, and the descriptor of multiprocessing's resource tracker.
    """
    fds, sockets = fds[: len(fds) - boot.sockets], [*map(_listening, fds[len(fds) - boot.sockets :])]
    tracker = fds[-1] if boot.has_tracker else None
    *link_fds, log_fd, pipe, stacks_fd = fds if tracker is None else fds[:-1]
    faulthandler.register(STACKS_SIGNAL, stacks_fd)
    stacks_fds = [stacks_fd, *own_stacks.answer(stacks_fd)]
    reducers.is_worker = True
    after_fork.withhold(
        [*link_fds[:3], log_fd, *map(socket.socket.fileno, sockets)],
        [pipe, *stacks_fds, *lifelines],
    )
    end = WorkerEnd(boot.layout, link_fds)
    _forward_logs(log_fd, end.bell, pipe, boot.levels)
    return end, sockets, tracker


def _listening(fd: int) -> socket.socket:
    sock = socket.socket(fileno=fd)
    sock.setblocking(False)  # Python takes any descriptor for one that blocks
    return sock


def _forward_logs(fd: int, bell: Bell, pipe: int, levels: Levels) -> None:
    memory = Memory(fd, LOG_RING_SIZE, writable=True)
    memory.close_fds()
    forward(LogWriter(RingWriter(memory.view), bell, pipe).write, levels)


def _run_loop(loop: asyncio.AbstractEventLoop, worker: WorkerCore, on_open: Callable[[], None] | None) -> int:
    """Serve, in this thread, until asked to end, and return the exit code. `on_open`: called in the loop when it receives."""
    asyncio.set_event_loop(loop)
    try:
        return loop.run_until_complete(_serve(worker, on_open))
    finally:
        _end_loop(loop, worker)


async def _serve(worker: WorkerCore, on_open: Callable[[], None] | None) -> int:
    worker.open(_broken)
    if on_open is not None:
        on_open()
    return await worker.serve(asyncio.all_tasks)


def _drain_on_sigterm(loop: asyncio.AbstractEventLoop, drain: Callable[[], None]) -> None:
    loop.add_signal_handler(signal.SIGTERM, drain)
    after_fork.sigterm_drains()


def _broken(error: BaseException) -> None:
    """End the process: its channel is broken."""
    sys.excepthook(type(error), error, error.__traceback__)
    os._exit(70)  # EX_SOFTWARE


def _ignore_interrupt(_signum: int, _frame: object) -> None:
    """Ignore SIGINT: the supervisor handles Ctrl-C. This is a handler because the user's subprocesses would inherit SIG_IGN."""


def _end_loop(loop: asyncio.AbstractEventLoop, worker: WorkerCore) -> None:
    loop.run_until_complete(loop.shutdown_asyncgens())
    if worker.may_have_lost_tasks():
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
