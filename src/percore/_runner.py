"""The async face: Runner.

What it stands on is imported in `start`, when the fork server has been started: a fresh program's fork server imports its own half
at the same time, on another CPU.
"""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any, Self, TypeVar

from percore._errors import RunnerClosed
from percore._options import Knobs, advising, grace_of
from percore._verbs import Options, Verbs
from percore._worker import context

if TYPE_CHECKING:
    from collections.abc import Callable, Hashable, Iterable
    from contextvars import ContextVar
    from types import TracebackType

    from percore._closing import Closing
    from percore._engine import Engine
    from percore._engines.forkserver import ForkServerLauncher
    from percore._engines.process import CommonMemory
    from percore._ipc.pickles import MainInfo
    from percore._options import Lifespan, StartMethod
    from percore._policy import Backoff, RetryOn
    from percore._pool import Slot
    from percore._shared import Shared
    from percore._statistics import Statistics, WorkerStatistics
    from percore._supervisor import Supervisor
    from percore._usage import Usage, UsageMeter

T = TypeVar("T")

_running_loop = asyncio._get_running_loop  # None where none runs, instead of an exception
_has_gil: Callable[[], bool] = getattr(sys, "_is_gil_enabled", lambda: True)

_NEW, _STARTING, _OPEN, _CLOSING, _CLOSED = "not started", "starting", "open", "closing", "closed"
_ADVICE = {
    _NEW: "the runner is not started: use `async with percore.Runner() as runner`, or `await runner.start()` first",
    _STARTING: "the runner is still starting: make calls when `await runner.start()` has returned",
    _CLOSING: "the runner is closing and takes no new calls",
    _CLOSED: "the runner is closed; make a new one",
}
_NO_LOOP = (
    "a Runner needs a running asyncio event loop, and there is none here: start the program with asyncio.run(main()), "
    'or with anyio.run(main, backend="asyncio"). It does not run under trio'
)


_SETUP = "put the setup of a worker in lifespan=..., and that of a thread in thread_initializer=..."
_KEYWORDS = (
    dict.fromkeys(("max_workers", "processes", "n_jobs"), "write workers=...")
    | dict.fromkeys(("max_tasks_per_child", "maxtasksperchild"), "write max_tasks_per_worker=...")
    | dict.fromkeys(("initializer", "initargs"), _SETUP)
    | {
        "max_threads": "write threads=...",
        "childconcurrency": "write concurrency=...",
        "loop_initializer": "write loop_factory=...",
        "mp_context": 'write start_method="forkserver" or "spawn"; percore.LoopPoolExecutor takes an mp_context',
        "timeout": "it is an option of the calls, as in runner.options(timeout=5).run(...)",
        "chunksize": "there is no chunk size to tune, percore batches short calls by how long they take",
        "debug": "workers take the debug flag of this program's event loop",
    }
)
"""What other pools call it."""

HALF = (
    *("percore._broken", "percore._ipc.channel", "percore._ipc.pickles", "percore._core.dispatch", "percore._worker.main"),
    *("percore._engines.process", "percore._items", "percore._pool", "percore._supervisor", "percore._usage"),
)
"""What a started runner stands on, in pieces."""

if _running_loop() is None or threading.current_thread() is not threading.main_thread():
    # What it imports cannot be imported any more once the main thread has ended, so not as late as in `start`, where it would cost
    # nothing. Whoever comes here from a loop of the main thread starts a runner there.
    import_module("percore._broken")


async def _import_half() -> None:
    """Import it. All at once it takes longer than the loop may be held."""
    for name in HALF:
        if name not in sys.modules:
            import_module(name)
            await asyncio.sleep(0)


class Runner(Verbs):
    """Runs coroutine functions and plain functions on every CPU: one worker process each, with an event loop and threads.

        async with percore.Runner(lifespan=http) as runner:
            sizes = await runner.map(fetch, urls)

    A runner belongs to the event loop it was started in. `async with` starts it and closes it: gracefully when the body ends,
    with `grace=0` when the body is left by an exception.

    Args:
        workers: processes. Default: the CPUs this process may really use, by affinity and cgroup quota.
        lifespan: called in each worker, gives an async or plain context manager that is entered in the worker's loop before its
            first call and left after its last; what it yields is `percore.state()` there. Tasks that it starts run until it is
            left. Those that calls have left behind are cancelled before.
        concurrency: coroutines at once, per worker.
        threads: size of the thread pool for plain functions, per worker. Default: min(32, CPUs + 4).
        loop_factory: makes the workers' event loops. Default: uvloop where installed, else asyncio's own.
        start_method: "forkserver" (default on Linux) or "spawn".
        max_message: bytes of one pickled message; above it that one call gets PayloadTooLarge.
        start_timeout: seconds a worker may take to be ready.
        kill_after: seconds in which a worker must end when it was asked to, or when its start has failed, before it is killed. They
            count from the end of its last call for a worker that drains.
        max_tasks_per_worker: a worker begins at most so many calls, broadcasts not counted, and is then replaced. Its replacement
            starts ahead of time; calls wait if it is not ready yet. Default: no limit.
        retries: further attempts of a call whose worker died; `options` has more.
        per_key: calls of one key at once, over all workers. Default: as many as its worker has places.
        contextvars: ContextVars of modules, whose values at `submit` (of a map: when it is made) a call sees in its worker.
            They may take 100,000 bytes together, pickled; above that the call gets PayloadTooLarge.
        thread_initializer: called in each thread for plain functions before its first call. What it raises is that call's outcome,
            and the next call tries again.
        max_pending: calls accepted and not done. At that bound `run` and maps wait for their turn, and `submit` raises RunnerFull.

    Raises:
        TypeError, ValueError: a bad option.
    """

    @advising("Runner", _KEYWORDS)
    def __init__(  # noqa: PLR0913  # each a documented knob; the list is closed
        self,
        workers: int | None = None,
        *,
        lifespan: Lifespan | None = None,
        concurrency: int = 100,
        threads: int | None = None,
        loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
        start_method: StartMethod | None = None,
        max_tasks_per_worker: int | None = None,
        retries: int = 0,
        per_key: int | None = None,
        contextvars: Iterable[ContextVar[Any]] = (),
        thread_initializer: Callable[[], object] | None = None,
        max_pending: int | None = None,
        max_message: int = 2**30,
        start_timeout: float = 60.0,
        kill_after: float = 5.0,
    ) -> None:
        self._options = Knobs.checked(
            workers=workers,
            lifespan=lifespan,
            concurrency=concurrency,
            threads=threads,
            loop_factory=loop_factory,
            start_method=start_method,
            max_message=max_message,
            start_timeout=start_timeout,
            kill_after=kill_after,
            max_tasks_per_worker=max_tasks_per_worker,
            retries=retries,
            per_key=per_key,
            contextvars=contextvars,
            thread_initializer=thread_initializer,
            max_pending=max_pending,
        )
        if self._options.contextvars:
            from percore._contexts import references

            references(self._options.contextvars)
        self._meter: UsageMeter
        self._state = _NEW
        self._pid = os.getpid()
        self._thread = 0
        self._loop: asyncio.AbstractEventLoop
        self._supervisor: Supervisor
        self._memory: CommonMemory
        self._engine: Engine
        self._closing: Closing | None = None

    # Life

    async def start(self) -> None:
        """Start all workers and wait until every one is ready. Cancelled: as closed with `grace=0`.

        Raises:
            StartupFailed: a worker could not be started, raised in its lifespan or imports, died, or took longer than
                start_timeout. The others are stopped; nothing is retried.
            RunnerClosed: it was closed by another task meanwhile.
            RuntimeError: started before, made before a fork, without asyncio (as under trio), or in a worker that is importing the
                user's script.
            OSError: no memory for even one message of max_message bytes.
            Exception: whatever pickling `lifespan` or `loop_factory` raises.
        """
        context.check_start()
        if self._state != _NEW:
            raise RuntimeError(f"a runner can be started once; this one is {self._state}")
        if os.getpid() != self._pid:
            raise RuntimeError("this runner was made before a fork; make a new one in the new process")
        loop = _running_loop()
        if loop is None:  # as under trio, which drives the same coroutines by itself
            raise RuntimeError(_NO_LOOP)
        self._loop = loop
        self._thread = threading.get_ident()
        self._state = _STARTING
        try:
            early = self._start_early()
            try:
                await _import_half()
                if self._state == _CLOSED:  # by another task meanwhile
                    raise RunnerClosed("the runner was closed while it started")
                self._make_supervisor()
            finally:
                if early is not None:
                    await early.aclose()  # the engine has a share of its own by now
        except BaseException:
            self._state = _CLOSED
            raise
        try:
            await self._supervisor.pool.start()
        except BaseException:
            await self.aclose(grace=0)
            raise
        if self._closing is not None:  # 1. the last worker is ready  2. another task closes  3. only now this one wakes
            await self.aclose()
            raise RunnerClosed("the runner was closed while it started")
        self._state = _OPEN

    def _start_early(self) -> ForkServerLauncher | None:
        """A share in the fork server, which is coming up."""
        if self._options.start_method != "forkserver":
            return None
        from percore._engines.forkserver import ForkServerLauncher

        launcher = ForkServerLauncher.open()
        launcher.warm_up()
        return launcher

    @property
    def _has_supervisor(self) -> bool:
        return hasattr(self, "_supervisor")

    def _make_supervisor(self) -> None:
        from percore._engines.process import CommonMemory
        from percore._ipc.pickles import alias_main
        from percore._supervisor import Supervisor
        from percore._usage import UsageMeter

        alias_main()
        main = self._main_info()
        self._meter = UsageMeter()
        self._memory = CommonMemory.create(self._options)
        try:
            self._engine = self._make_engine(main)
        except BaseException:
            self._memory.close()
            raise
        self._supervisor = Supervisor(self._loop, self._options, self._engine, self._memory.arena, main_by_value=main.by_value)

    def _main_info(self) -> MainInfo:
        from percore._ipc.pickles import main_info

        return main_info()

    def _make_engine(self, main: Any) -> Engine:
        from percore._engines.process import ProcessEngine

        return ProcessEngine(self._loop, self._options, self._memory, main)

    async def aclose(self, *, grace: float | None = None) -> None:
        """Close the runner: no new calls, accepted ones finish, workers leave their lifespans and end.

        Idempotent; a second caller waits for the first, and a smaller grace tightens it. Every future is done when this returns.
        Cancelled: all workers are killed at once, and still reaped.

        Args:
            grace: seconds for accepted calls to end. None: as long as they take. After it those that have not begun are withdrawn
                and the rest is cancelled, and `kill_after` seconds later killed: these calls end with RunnerClosed.

        Raises:
            TypeError, ValueError: `grace` is no number of seconds; the runner stays as it was.
            RuntimeError: from another loop or thread, or after a fork.
        """
        grace = grace_of(grace)
        if self._state == _NEW or (self._state == _STARTING and not self._has_supervisor):
            self._state = _CLOSED
        if self._state == _CLOSED:
            return
        self._check_here()
        if self._closing is None:
            from percore._closing import Closing

            self._state = _CLOSING
            self._closing = Closing(self._supervisor, self._let_go)
        self._closing.tighten(grace)
        await self._closing.wait()

    async def _let_go(self) -> None:
        try:
            await self._engine.aclose()
        finally:
            self._supervisor.shares.shut()
            self._memory.close()
            self._state = _CLOSED

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and os.getpid() != self._pid:  # a fork of the program that ends, by sys.exit perhaps
            return
        await self.aclose(grace=None if kind is None else 0)

    def __del__(self) -> None:
        if getattr(self, "_state", _CLOSED) in (_STARTING, _OPEN, _CLOSING) and os.getpid() == self._pid:
            warnings.warn(f"unclosed {self!r}; use `async with`, or await aclose()", ResourceWarning, source=self, stacklevel=2)
            supervisor = getattr(self, "_supervisor", None)
            if supervisor is not None:
                supervisor.abandon()

    def __repr__(self) -> str:
        return f"<percore.Runner workers={self._options.workers} {self._state}>"

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(
            "a Runner cannot be pickled: it belongs to the process and the loop that started it. Instead of giving it to a call, "
            "make the calls here, and give the results of one to the next"
        )

    # Calls: the verbs, and a view of them

    def options(
        self,
        *,
        key: Hashable | None = None,
        retries: int | None = None,
        retry_on: RetryOn | None = None,
        backoff: Backoff = 0.0,
        timeout: float | None = None,
    ) -> Options:
        """A view of this runner with these call options: `runner.options(key=host).run(fetch, url)`.

        Args:
            key: calls of equal keys are never on two workers at once, and at most `per_key` of them run at once over all workers.
                For `submit` and `run`; a map takes a function instead. Its `__hash__` and `__eq__` are called here and not later,
                so that a key may change afterwards without consequences.
            retries: further attempts of a call that fails so. Each sends the original bytes. Default: the runner's.
            retry_on: exception classes, or a predicate of the error, a plain function. Default: WorkerDied. It and backoff need
                retries, here or in the runner.
            backoff: seconds before the next attempt, or a plain function of the number of failed attempts, from 1. A call that
                waits holds no place in a worker, and ends at once when it is cancelled or the runner closes.
            timeout: seconds one attempt may run, from its start in the worker. A coroutine is then cancelled there, and ends with
                TimeoutError as under asyncio.timeout. A plain function cannot be stopped: its caller gets TimeoutError, its thread
                is busy until it ends, and no further attempt begins before.

        Raises:
            TypeError, ValueError: a bad option.
            Exception: whatever `__hash__` or `__eq__` of the key raises.
            RunnerClosed, RuntimeError: as `submit`.
        """
        self._check_open()
        supervisor = self._supervisor
        policy = supervisor.policy_of(
            key=key,
            retries=retries,
            retry_on=retry_on,
            backoff=backoff,
            timeout=timeout,
            inherited=supervisor.options.retries,
        )
        if key is not None:
            policy.key = supervisor.dispatch.names.of(key)
        return Options(supervisor, policy, self._check_open)

    # Data

    async def share(self, obj: T) -> Shared[T]:
        """Put an object into shared memory once, for all workers: give what this returns to calls, and read its `.value` there.

        It is pickled once, in a thread, and built once per worker that asks for it. Its buffers (numpy arrays, Arrow tables and the
        like of 64 kB and more) lie on the same physical pages in all workers, replacements included, and can only be read. It is
        freed by `close()`, when what this returns is dropped and no call uses it any more, and with the runner.
        Cancelled: the pickling runs on in its thread, and nothing is kept.

        Raises:
            PayloadTooLarge: its pickle is above max_message.
            MemoryError: there is too little memory for it.
            RuntimeError: as many objects as there may be are shared already; from another loop or thread, or after a fork.
            RunnerClosed: before start and after close; the runner was closed meanwhile.
            TypeError: there is a Shared in it.
            Exception: whatever pickling it raises.
        """
        self._check_open()
        return await self._supervisor.shares.share(obj)

    # Questions

    def statistics(self) -> Statistics:
        """A snapshot of the counters. No system call. May be called from any thread, for example by a server of metrics.

        Raises:
            RunnerClosed: before start and after close.
            RuntimeError: after a fork.
        """
        if self._state in (_NEW, _CLOSED) or not self._has_supervisor:
            raise RunnerClosed(_ADVICE[self._state])
        self._check_process()
        from percore._statistics import Statistics

        workers = tuple(self._slot_statistics(slot) for slot in self._supervisor.slots)
        return Statistics(
            running=sum(worker.running for worker in workers),
            queued=sum(worker.queued for worker in workers) + self._supervisor.waiting(),
            done=sum(worker.done for worker in workers),
            failed=sum(worker.failed for worker in workers),
            retried=sum(worker.retried for worker in workers),
            restarts=sum(worker.restarts for worker in workers),
            workers=workers,
        )

    async def usage(self) -> Usage:
        """Memory, CPU and threads of this process, the fork server and each worker; `str()` of it is a table.

        Asks the system, in a thread. The fork server is one for all runners of this process.

        Cancelled: nothing is left behind.

        Raises:
            RunnerClosed: before start and after close.
            RuntimeError: from another loop or thread, or after a fork.
        """
        if self._state in (_NEW, _CLOSED) or not self._has_supervisor:
            raise RunnerClosed(_ADVICE[self._state])
        self._check_here()
        members = sorted(self._supervisor.members, key=lambda member: (member.index, member.generation))
        workers = {member.pid: f"worker {member.index}" for member in members if member.pid is not None}
        return await self._meter.read({self._pid: "supervisor"} | self._engine.helpers() | workers)

    def _slot_statistics(self, slot: Slot) -> WorkerStatistics:
        from percore._statistics import WorkerStatistics

        # The loop's thread may bury a worker meanwhile: its counts enter the slot's past before it leaves the members.
        past, members = slot.past, tuple(self._supervisor.members)
        while past is not slot.past:
            past, members = slot.past, tuple(self._supervisor.members)
        member = slot.current
        # A worker that drains counts, too, beside its replacement.
        members = tuple(other for other in members if other.index == slot.index and other.generation != past.generation)
        may_look = threading.get_ident() == self._thread or _has_gil()
        counts = [other.statistics(self._options.threads, may_look=may_look) for other in members]
        channel = None if member is None else member.worker.channel
        return WorkerStatistics(
            index=slot.index,
            generation=slot.generation,
            pid=None if member is None else member.pid,
            state="failed" if slot.is_failed else "gone" if member is None else member.life.state.value,
            running=sum(running for running, _ in counts),
            queued=sum(queued for _, queued in counts),
            done=past.done + sum(other.done for other in members),
            failed=past.failed + sum(other.failed for other in members),
            retried=past.retried + sum(other.retried for other in members),
            started_at=None if member is None else member.started_at,
            loop_lag=None if channel is None else channel.lag(),
            bytes_in=0 if channel is None else channel.tx.written,
            bytes_out=0 if channel is None else channel.rx.read,
            restarts=slot.restarts,
        )

    # Misuse

    def _check_open(self) -> None:
        if self._state is not _OPEN:
            raise RunnerClosed(_ADVICE[self._state])
        if _running_loop() is not self._loop:
            self._check_here()
        if self._supervisor.broken is not None:
            raise self._supervisor.refusal()

    def _check_here(self) -> None:
        """That the caller is in the runner's process, thread and loop.

        Raises:
            RuntimeError: it is not; the text says which.
        """
        self._check_process()
        if threading.get_ident() != self._thread:
            raise RuntimeError(
                "this runner was started in another thread; call it there, for example with asyncio.run_coroutine_threadsafe"
            )
        running = _running_loop()
        if running is not None and running is not self._loop:
            raise RuntimeError("this runner was started in another event loop, and its futures can only be awaited there")
        if self._loop.is_closed():
            raise RuntimeError("the event loop that this runner was started in is closed; close the runner before its loop")

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise RuntimeError("this runner was started before a fork and works only in the process that started it")
