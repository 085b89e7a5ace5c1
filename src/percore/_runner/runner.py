"""Runner, the asyncio interface of percore: its options, its start and its close. Importing this module is cheap.

Its base classes have the other methods: `Control` those that make no calls, `Verbs` and `MapVerbs` those that do.
"""

from __future__ import annotations

import asyncio
import os
import warnings
from collections.abc import Callable, Iterable
from contextvars import ContextVar
from enum import Enum
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self

from percore._common.engines import AnyEngine, Maker
from percore._common.errors import RunnerClosed
from percore._common.options import RUNNER_ADVICE, Lifespan, Listen, RunnerOptions, StartMethod, advising, grace_of
from percore._runner.assembly import Assembly, EngineFactory, import_modules, running_loop
from percore._runner.control import Control
from percore._runner.early import check_start, warm_up

if TYPE_CHECKING:
    from percore._supervisor.supervisor import Supervisor


class State(Enum):
    """The states of a runner, as its user sees them. They follow one another in this order; a runner may skip states."""

    NEW = "not started"
    STARTING = "starting"
    OPEN = "open"
    CLOSING = "closing"
    CLOSED = "closed"


_OPEN: Final = State.OPEN  # a name of its own, because each call reads it
_ADVICE: Final = {
    State.NEW: "the runner is not started: use `async with percore.Runner() as runner`, or `await runner.start()` first",
    State.STARTING: "the runner is still starting: make calls when `await runner.start()` has returned",
    State.CLOSING: "the runner is closing and takes no new calls",
    State.CLOSED: "the runner is closed; make a new one",
}
_CLOSED_MEANWHILE: Final = "the runner was closed while it started"
_NO_LOOP = (
    "a Runner needs a running asyncio event loop, and there is none here: start the program with asyncio.run(main()), "
    'or with anyio.run(main, backend="asyncio"). It does not run under trio'
)


class Runner(Control):
    """Run coroutine functions and plain functions on every CPU, in one worker process per CPU.

    Each worker has an event loop for coroutine functions and a thread pool for plain functions.

        async with percore.Runner(lifespan=http) as runner:
            sizes = await runner.map(fetch, urls)

    A runner belongs to the event loop in which it was started. `async with` starts the runner and closes it: gracefully when the
    body ends normally, with `grace=0` when the body raises.

    Args:
        workers: number of worker processes. Default: the CPUs available to this process, by CPU affinity and cgroup quota.
        lifespan: a function without arguments that returns an async or plain context manager. Each worker calls it once. The
            worker enters the context manager in its event loop before the first call and exits it after the last one. Calls get
            the value it yields from `percore.state()`. Tasks that the lifespan starts run until it exits. Tasks that calls have
            left running are cancelled before that.
        concurrency: how many coroutines a worker runs at once.
        threads: how many plain functions a worker runs at once, each on a thread. While the calls of a function compute instead of
            wait, they begin one at a time. Default: min(32, CPUs + 4).
        loop_factory: a function that creates a worker's event loop. Default: uvloop if it is installed, otherwise asyncio's loop.
        start_method: "forkserver" (the default on Linux 5.3 and newer) or "spawn" (the default elsewhere).
        max_message: the largest pickled message, in bytes. A call that needs a larger one fails with PayloadTooLarge.
        start_timeout: how many seconds a worker may take to become ready.
        kill_after: how many seconds a worker may take to end after it was asked to, or after its start failed. Then percore kills
            it. For a worker that drains, the time counts from the end of its last call.
        max_tasks_per_worker: how many calls a worker begins at most before percore replaces it. Broadcasts do not count. The
            replacement starts ahead of time; if it is not ready in time, calls wait. If it is ready earlier, it takes over what the
            old worker has not begun. Default: no limit.
        max_memory_per_worker: how many bytes of memory a worker may have before percore replaces it, counted without shared memory.
            About every second percore reads what the workers have. The new worker takes over as soon as it is ready; the old one
            finishes the calls that it has begun, however long they take. Default: no limit.
        retries: how many more times to attempt a call whose worker died. See `options` for retries of other errors.
        per_key: how many calls with the same key run at once, over all workers. Default: as many as one worker can run.
        contextvars: module-level ContextVars. A call sees in its worker the values that they had at `submit`; a call of a map
            sees those they had when the map was created. Together they may take 100,000 bytes when pickled; above that the call
            fails with PayloadTooLarge.
        thread_initializer: a plain function that each pool thread calls before its first call. If it raises, that call fails with
            the exception, and the thread's next call runs it again.
        max_pending: how many calls may be pending, that is accepted and not done. At the limit `run` and maps wait, and `submit`
            raises RunnerFull. Default: no limit.
        blocked_after: how many seconds a worker may leave its messages unread before percore logs that its event loop is blocked,
            with the functions that it runs and the stacks of its threads; and again when it goes on. A worker that is stopped or
            gets no CPU is reported as that. None: never.
        listen: addresses on which the workers serve: "127.0.0.1:8080", "[::1]:8080" (port 0: a free one), "unix:/run/app.sock", or
            stream sockets that are bound. The runner listens from its start until its workers are asked to end, and each worker
            gets one socket for each address, `percore.current_worker().sockets`, on which its lifespan starts a server. A
            replacement gets the sockets of the worker that it replaces, with the connections that wait there. On Linux each worker
            has a TCP socket of its own (SO_REUSEPORT), and the system divides the connections among the workers that are ready.
            Otherwise they share one. A socket of yours is shared, stays open and becomes non-blocking.
        engine: where the workers run. None or "processes": as processes of this machine. "threads", or percore.ThreadsEngine(...):
            as threads of this process, which run at once on free-threaded Python only; nothing is pickled. "auto": as threads where
            they run at once, else as processes. A `percore.RayEngine`: on the nodes of a Ray cluster.
        harden: whether to close the workers and this program, for the rest of its life, to other processes of the same user: only
            root can trace them, read their memory or environment, or watch them by `percore top`, `percore record`, py-spy and gdb,
            and they leave no core dumps. Programs that calls start get no further rights, so sudo does not work in them.

    Raises:
        TypeError, ValueError: an option is invalid.
    """

    _make_engine: ClassVar[EngineFactory | None] = None
    """Makes the engine of every runner of this class, for tests. None: the option `engine` chooses."""

    @advising("Runner", RUNNER_ADVICE)
    def __init__(  # noqa: PLR0913  # each is a documented option; the list is closed
        self,
        workers: int | None = None,
        *,
        lifespan: Lifespan | None = None,
        concurrency: int = 100,
        threads: int | None = None,
        loop_factory: Callable[[], asyncio.AbstractEventLoop] | None = None,
        start_method: StartMethod | None = None,
        max_tasks_per_worker: int | None = None,
        max_memory_per_worker: int | None = None,
        retries: int = 0,
        per_key: int | None = None,
        contextvars: Iterable[ContextVar[Any]] = (),
        thread_initializer: Callable[[], object] | None = None,
        max_pending: int | None = None,
        max_message: int = 2**30,
        start_timeout: float = 60.0,
        kill_after: float = 5.0,
        blocked_after: float | None = 1.0,
        listen: Listen = (),
        engine: AnyEngine | None = None,
        harden: bool = False,
    ) -> None:
        self._options = RunnerOptions.checked(
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
            max_memory_per_worker=max_memory_per_worker,
            retries=retries,
            per_key=per_key,
            contextvars=contextvars,
            thread_initializer=thread_initializer,
            max_pending=max_pending,
            blocked_after=blocked_after,
            listen=listen,
            engine=engine,
            harden=harden,
        )
        if self._options.contextvars:
            from percore._calls.context_variables import references

            references(self._options.contextvars)
        self._pid = os.getpid()
        self._loop: asyncio.AbstractEventLoop
        self._supervisor: Supervisor
        self._assembly: Assembly | None = None
        self._phase: State = State.NEW

    # Start and close

    async def start(self) -> None:
        """Start all workers and wait until every one is ready.

        If cancelled, the runner is closed as by `aclose(grace=0)`.

        Raises:
            StartupFailed: a worker could not be started, raised in its lifespan or its imports, died, or was not ready within
                `start_timeout`. The other workers are stopped. percore does not retry a first start.
            RunnerClosed: another task closed the runner meanwhile.
            RuntimeError: the runner was started before, or was created before a fork; or no asyncio event loop is running (as under
                trio); or the caller is a worker that is importing the user's script.
            OSError: the runner cannot listen on one of its addresses; or there is not enough memory for even one message of
                `max_message` bytes.
            Exception: any error from pickling `lifespan` or `loop_factory`.
        """
        check_start()
        if self._state is not State.NEW:
            raise RuntimeError(f"a runner can be started once; this one is {self._state.value}")
        if os.getpid() != self._pid:
            raise RuntimeError("this runner was made before a fork; make a new one in the new process")
        loop = running_loop()
        if loop is None:  # for example under trio, which runs coroutines without an asyncio loop
            raise RuntimeError(_NO_LOOP)
        self._loop = loop
        self._phase = State.STARTING
        try:
            choice = self._options.engine
            if self._make_engine is not None:
                self._assembly = await self._assemble(loop, self._make_engine)
            elif choice is None:
                await self._assemble_processes(loop)
            else:
                self._assembly = await self._assemble_by(loop, choice._maker())
            assert self._assembly is not None
            self._supervisor = self._assembly.supervisor
            if self._phase is not State.STARTING:
                raise RunnerClosed(_CLOSED_MEANWHILE)
            await self._supervisor.pool.start()
        except BaseException:
            await self.aclose(grace=0)
            raise
        if self._phase is not State.STARTING:  # 1. the last worker is ready  2. another task closes  3. this task wakes
            await self.aclose()
            raise RunnerClosed(_CLOSED_MEANWHILE)
        self._phase = State.OPEN

    async def _assemble(self, loop: asyncio.AbstractEventLoop, make_engine: EngineFactory | None) -> Assembly:
        await import_modules()
        if self._phase is State.CLOSED:  # another task closed the runner meanwhile
            raise RunnerClosed(_CLOSED_MEANWHILE)
        return await Assembly(loop, self._options, make_engine).supervise()

    async def _assemble_processes(self, loop: asyncio.AbstractEventLoop) -> None:
        early = warm_up(self._options)
        try:
            self._assembly = await self._assemble(loop, None)  # at once: a close that comes at the next `await` must find it
        finally:
            if early is not None:
                await early.aclose()  # by now the engine has its own reference to the fork server

    async def _assemble_by(self, loop: asyncio.AbstractEventLoop, maker: Maker) -> Assembly:
        try:
            self._options = await maker.open(self._options)
            return await self._assemble(loop, maker.make)
        except BaseException:
            await maker.abandon()
            raise

    @property
    def _state(self) -> State:
        return State.CLOSED if self._assembly is not None and self._assembly.closing.is_over else self._phase

    async def aclose(self, *, grace: float | None = None) -> None:
        """Close the runner: refuse new calls, let accepted calls finish, then end the workers.

        Each worker exits its lifespan before it ends. All futures are done when this method returns. It is idempotent: a second
        caller waits for the same close, and a smaller `grace` shortens it.

        If cancelled, it kills all workers at once, reaps them, and then raises CancelledError.

        Args:
            grace: how many seconds accepted calls may take to end. None: no limit. After that, percore withdraws the calls that
                have not begun and cancels the others; `kill_after` seconds later it kills the workers that are left. All these
                calls end with RunnerClosed.

        Raises:
            TypeError, ValueError: `grace` is not a number of seconds. The runner stays as it was.
            RuntimeError: called from another event loop or thread, or after a fork.
        """
        grace = grace_of(grace)
        if self._assembly is None:
            self._phase = State.CLOSED
        elif not self._assembly.closing.is_over:
            self._assembly.check_caller()
            self._phase = State.CLOSING
            await self._assembly.closing.close(grace)

    async def __aenter__(self) -> Self:
        await self.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if error is not None and os.getpid() != self._pid:  # a forked child is ending, for example by sys.exit
            return
        await self.aclose(grace=None if kind is None else 0)

    def __del__(self) -> None:
        if getattr(self, "_state", State.CLOSED) in (State.STARTING, State.OPEN, State.CLOSING) and os.getpid() == self._pid:
            warnings.warn(f"unclosed {self!r}; use `async with`, or await aclose()", ResourceWarning, source=self, stacklevel=2)
            if self._assembly is not None:
                self._assembly.closing.abandon()

    def __repr__(self) -> str:
        """Return its state, how many workers it has, how many of them are ready, and how many calls are accepted and not done."""
        state = self._state
        if self._assembly is None or state is State.CLOSED:
            return f"<percore.Runner {state.value} workers={self._options.workers}>"
        workers, ready, in_flight = self._supervisor.figures()
        return f"<percore.Runner {state.value} workers={workers} ready={ready} in_flight={in_flight}>"

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(
            "a Runner cannot be pickled: it belongs to the process and the loop that started it. Instead of giving it to a call, "
            "make the calls here, and give the results of one to the next"
        )

    # Checks

    def _check_open(self) -> None:
        if self._phase is not _OPEN:
            raise RunnerClosed(_ADVICE[self._state])
        if running_loop() is not self._loop:
            self._open_assembly().check_caller()
        if self._supervisor.phase.broken is not None:
            raise self._supervisor.phase.refusal()

    def _open_assembly(self) -> Assembly:
        assembly = self._assembly
        if assembly is None or assembly.closing.is_over:
            raise RunnerClosed(_ADVICE[self._state])
        return assembly
