"""A worker that is a thread of this process, and what its engine sees of it.

The thread has an event loop of its own, and serves one channel there. It is a guest: it handles no signals, touches no standard
stream and ends no process. Everything that its loop raises, SystemExit and KeyboardInterrupt included, ends the worker and nothing
else.

A thread cannot be killed. `kill` asks the loop to cancel all its tasks and to end. If the loop does not end within PATIENCE, or a
plain function still runs on one of its threads, the worker is given up: its thread runs on, and nothing of it arrives any more.
What has not begun by then is taken back, so that other workers can run it, and does not begin here.

    the supervisor's thread               the worker's thread
    kill ─────────────────────────────▶   _die: takes back what has not begun, cancels all tasks
    _give_up, PATIENCE later: takes it    _main ends: tells how
      back itself ─▶ _over     ◀──────────┘
"""

import asyncio
import logging
import os
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from contextvars import Context, copy_context
from functools import partial
from time import monotonic
from types import FrameType
from typing import TYPE_CHECKING, Final, Protocol

from percore._common.log import report
from percore._common.sure_handles import SureHandle, surely_later, surely_soon
from percore._common.system import new_loop
from percore._engines.threads.channel import ThreadChannel
from percore._protocol.interfaces import UNBEGUN, Condition, Exit, Fate
from percore._protocol.messages import MARK_WORDS, Body, is_call
from percore._protocol.worker_start import WorkerStart
from percore._serialization.exception_state import text_of, type_name_of
from percore._worker.context import CurrentWorker, WorkerContext, of_task
from percore._worker.executor_worker import initialize
from percore._worker.worker import WorkerCore

if TYPE_CHECKING:
    from percore._engines.threads.references import References

PATIENCE: Final = 0.5
"""Seconds that a worker has to end once it is killed. It has had `kill_after` before, if it was asked to end."""

_TRIES: Final = 16

RUNS_ON: Final = "its thread runs on, because a thread cannot be killed"
_ENDED: Final = "its event loop was stopped"


class Home(Protocol):
    """The engine, as its workers see it.

    Attributes:
        loop: the supervisor's.
        places: how many start marks each worker has: a power of two.
        loop_factory: makes the loops of the workers; None: the default.
        debug: the debug flag of these loops.
    """

    loop: asyncio.AbstractEventLoop
    places: int
    loop_factory: Callable[[], asyncio.AbstractEventLoop] | None
    debug: bool

    @property
    def store(self) -> "References": ...

    def look_gil(self) -> None:
        """A worker is ready: see whether its imports have turned the GIL on."""


class ThreadWorker:
    """Implements `Worker`. The supervisor's loop calls the methods, unless their docstring says otherwise."""

    pid: int | None = None
    node: str | None = None

    def __init__(
        self, engine: "Home", start: WorkerStart, on_exit: Callable[[Exit], None], sockets: Sequence[socket.socket]
    ) -> None:
        """Start the thread.

        Raises:
            OSError: the thread could not be started.
        """
        self.index = start.index
        self.channel = ThreadChannel(engine.loop, engine.store)
        self._engine = engine
        self._start = start
        self._on_exit = on_exit
        self._context = copy_context()
        self._side = self.channel.peer
        self._marks = [0] * (engine.places * MARK_WORDS)
        self._mask = engine.places - 1
        self._taken_back: dict[int, int] = {}
        """What the worker's thread has taken back: as `Recalls.take_all`."""
        self._unbegun: dict[int, int] = {}
        """What was taken back, once the worker is over."""
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        """The worker's loop, while it runs."""
        self._core: WorkerCore | None = None
        self._main_task: asyncio.Task[int] | None = None
        self._goes_on = threading.Event()
        self._is_killed = self._is_over = False
        self._end = Exit(None, _ENDED)
        self._timer: SureHandle | None = None
        self._sockets = tuple(sock.dup() for sock in sockets)
        for sock in self._sockets:
            sock.setblocking(False)
        # In a context of its own: as in a process, variables that the program has set are unset.
        self._thread = threading.Thread(target=Context().run, args=(self._main,), name=f"percore-worker-{self.index}", daemon=True)
        try:
            self._thread.start()
        except RuntimeError as error:
            self._close_sockets()
            raise OSError(f"no thread can be started for the worker: {error}") from error

    # In the worker's thread

    def _main(self) -> None:
        """Run the worker. Never raises."""
        core: WorkerCore | None = None
        try:
            core = self._begin()
            self._end = self._run_loop(core)
        except BaseException as error:
            self._end = Exit(1, f"its event loop raised {type_name_of(error)}: {text_of(error)}")
            with suppress(Exception):
                report(logging.ERROR, "the event loop of worker %d raised", self.index, of=self, exc_info=error)
        finally:
            self._leave(core)

    def _begin(self) -> WorkerCore:
        """Make the loop and the worker."""
        executor = self._start.executor
        failure = None if executor is None else initialize(executor.initializer)
        loop = self._side.loop = (self._engine.loop_factory or new_loop)()
        loop.set_debug(self._engine.debug)
        asyncio.set_event_loop(loop)
        context = WorkerContext(CurrentWorker(self.index, self._start.generation, os.getpid(), self._sockets))
        context.strike = self._strike
        of_task.set(context)
        core = WorkerCore(self._side, self._marks, self._start, context, failure)
        core.server.threads.turns.may_switch_often = False
        return core

    def _run_loop(self, core: WorkerCore) -> Exit:
        loop = self._side.loop
        core.open(self._broke)
        task = self._main_task = loop.create_task(core.serve(lambda: asyncio.all_tasks(loop)))
        self._core = core
        with self._lock:
            self._loop = loop
            is_killed = self._is_killed
        if is_killed:
            self._die()
        try:
            code = loop.run_until_complete(task)
            return Exit(None, _ENDED) if self._is_killed else Exit(code)
        except asyncio.CancelledError:
            if not self._is_killed:
                raise
            return Exit(None, _ENDED)
        finally:
            self._side.stop()
            # Threads of the pool run on until they have nothing to do: they must not begin what another worker gets.
            self._taken_back |= core.server.take_all()
            _end_loop(loop, task)

    def _leave(self, core: WorkerCore | None) -> None:
        """Release what the worker has, and report its end. Plain functions that still run use the loop: then it is closed later."""
        self._side.stop()
        self._close_sockets()
        with self._lock:
            self._loop = None
        if core is not None:
            core.server.stop()
            if core.server.threads.is_idle():
                core.server.join()
            else:
                self._end = self._end._replace(why=RUNS_ON, is_given_up=True)
                self._report_end()
                core.server.forsake()  # nobody answers their nested calls any more
                core.server.join()
        asyncio.set_event_loop(None)
        with suppress(AttributeError):  # it could not be made
            self._side.loop.close()
        self._report_end()

    def _report_end(self) -> None:
        with suppress(RuntimeError):  # the supervisor's loop is closed
            for _ in range(2):  # a Ctrl-C may come before the loop begins one, which it then drops
                self._engine.loop.call_soon_threadsafe(self._ended, context=self._context)

    def _broke(self, error: BaseException) -> None:
        """End the worker: its channel is broken."""
        report(logging.ERROR, "the channel of worker %d broke", self.index, of=self, exc_info=error)
        self._is_killed = True
        self._die()

    def _die(self) -> None:
        """Take back what has not begun, and cancel everything else."""
        self._side.stop()
        core, task = self._core, self._main_task
        if core is None or task is None:
            return
        self._taken_back |= core.server.take_all()
        core.server.abandon()
        for one in asyncio.all_tasks(task.get_loop()) | {task}:
            one.cancel()

    def _strike(self) -> None:
        """Kill the worker. Nothing of it arrives any more, whatever the calling thread does next."""
        self._side.stop()
        with suppress(RuntimeError):  # the supervisor's loop is closed
            for _ in range(2):  # as in `_report_end`
                self._engine.loop.call_soon_threadsafe(self.kill, context=self._context)

    def _close_sockets(self) -> None:
        for sock in self._sockets:
            sock.close()

    # In the supervisor's thread

    def kill(self, signum: int = signal.SIGKILL) -> None:
        if self._is_over:
            return
        if signum == signal.SIGTERM:
            self._call(self._drain)
        elif signum == signal.SIGSTOP:
            if self._is_killed:  # it would stop for ever
                return
            self._goes_on.clear()
            self._call(self._goes_on.wait)
        elif signum == signal.SIGCONT:
            self._goes_on.set()
        elif not self._is_killed:
            self._is_killed = True
            self._goes_on.set()
            if not self._engine.loop.is_closed():  # else nobody waits for its end
                self._timer = surely_later(self._engine.loop, PATIENCE, self._give_up)
            self._call(self._die)

    def _drain(self) -> None:
        if self._core is not None:
            self._core.calls.run(self._core.server.drain)

    def _call(self, step: Callable[[], object]) -> None:
        """Have the worker's loop call this, if it has begun and not ended."""
        with self._lock:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(step, context=Context())

    def _give_up(self) -> None:
        """The loop has not ended: leave it alone."""
        if self._is_over:  # a Ctrl-C came when this was told
            return
        self._side.stop()
        if self._core is not None:
            self._unbegun = self._core.server.take_all()
            self._core.server.threads.stop()
        self._over(Exit(None, RUNS_ON, is_given_up=True))

    def _ended(self) -> None:
        if not self._is_over:
            if not self._end.is_given_up:
                self._thread.join()
            self._over(self._end)

    def _over(self, end: Exit) -> None:
        """Nothing begins in the worker any more, and nothing arrives of it but what it has sent."""
        once_more = self._engine.loop.call_soon(self._on_exit, end)  # unless a Ctrl-C keeps this from telling it: then it stays
        self._is_over = True
        if self._timer is not None:
            self._timer.cancel()
        self._unbegun |= self._taken_back
        inbox = self._side.inbox
        with suppress(IndexError):  # there are no more
            while True:
                op, call_id, _ = inbox.popleft()
                if is_call(op):
                    self._unbegun[call_id] = 0
        try:
            self._on_exit(end)
        except Exception:
            once_more.cancel()
            raise
        once_more.cancel()

    def rouse(self) -> None:
        """Have the thread run for a moment, so that it frees what other threads have dropped."""
        self._call(_nothing)

    def ready(self, told: Body) -> None:
        self._engine.look_gil()

    def fate(self, call_id: int) -> Fate:
        word = (call_id & self._mask) * MARK_WORDS
        is_marked = self._marks[word] == call_id
        age = monotonic() - self._marks[word + 1] / 1e9 if is_marked else None
        if not self._is_over:
            return Fate(True, age, self._marks[word + 2]) if is_marked else UNBEGUN
        items = self._unbegun.get(call_id)
        if items is None:  # the worker has taken it
            return Fate(True, age, self._marks[word + 2] if is_marked else 0)
        return Fate(True, age, items) if items else UNBEGUN

    def examine(self, told: Callable[[Condition], None]) -> None:
        def examined() -> None:
            if not self._is_over:
                told(_condition_of(self._thread.ident, [one.ident for one in self._threads() if one.ident is not None]))

        surely_soon(self._engine.loop, examined)

    def _threads(self) -> list[threading.Thread]:
        return [self._thread, *([] if self._core is None else self._core.server.threads.living())]

    @property
    def thread_ids(self) -> tuple[int, ...]:
        return tuple(thread.native_id for thread in self._threads() if thread.native_id is not None)

    def join(self) -> None:
        """Wait until all its threads have ended, also those of a worker that was given up. Any thread may call this."""
        self._thread.join()

    def close(self) -> None:
        self.channel.close()


def _nothing() -> None:
    return


def _end_loop(loop: asyncio.AbstractEventLoop, main: asyncio.Task[int]) -> None:
    """Cancel what is left in a loop, and wait until it has ended. What it raises here, even a SystemExit, ends in the log.

    `main`: the main task, which `asyncio.all_tasks` omits while the worker serves.
    """
    for step in (partial(_cancel_all, main), loop.shutdown_asyncgens, loop.shutdown_default_executor):
        for _ in range(_TRIES):  # a task that raises SystemExit stops the loop before the others have ended
            try:
                loop.run_until_complete(step())
                break
            except BaseException as error:
                report(logging.ERROR, "the event loop of a worker raised at its end", exc_info=error)


async def _cancel_all(main: asyncio.Task[int]) -> None:
    tasks = (asyncio.all_tasks() | {main}) - {asyncio.current_task()}
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def _condition_of(loop: int | None, idents: Iterable[int]) -> Condition:
    """Return what the stacks of these threads tell of a worker, written as faulthandler does. `loop`: the thread of its loop."""
    from percore._engines.processes import examination  # needed seldom

    frames = sys._current_frames()
    stacks = "\n\n".join(_stack(ident, frames[ident]) for ident in idents if ident in frames)
    return examination.condition_of(stacks, _head(loop or 0))


def _head(ident: int) -> str:
    return f"Thread 0x{ident:016x}"


def _stack(ident: int, frame: FrameType | None) -> str:
    lines = [f"{_head(ident)} (most recent call first):"]
    while frame is not None:
        lines.append(f'  File "{frame.f_code.co_filename}", line {frame.f_lineno} in {frame.f_code.co_name}')
        frame = frame.f_back
    return "\n".join(lines)
