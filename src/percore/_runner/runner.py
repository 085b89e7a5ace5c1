"""Runner, the asyncio interface of percore. Importing this module is cheap."""

from __future__ import annotations

import asyncio
import os
import warnings
from collections.abc import Callable, Hashable, Iterable
from contextvars import ContextVar
from enum import Enum
from types import TracebackType
from typing import TYPE_CHECKING, Any, ClassVar, Final, Self, TypeVar

import percore
from percore._common.addresses import Listen
from percore._common.call_options import delay_of
from percore._common.engines import AnyEngine, Maker
from percore._common.errors import RunnerClosed
from percore._common.options import (
    MOST_WORKERS,
    PREFETCH,
    RUNNER_ADVICE,
    Backoff,
    Lifespan,
    RetryOn,
    RunnerOptions,
    StartMethod,
    advising,
    grace_of,
    whole,
)
from percore._runner.assembly import Assembly, EngineFactory, import_modules, running_loop
from percore._runner.early import warm_up
from percore._runner.verbs import Options, Verbs
from percore._worker import context

if TYPE_CHECKING:
    from percore._supervisor.supervisor import Supervisor

T = TypeVar("T")


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
_NO_LOOP = (
    "a Runner needs a running asyncio event loop, and there is none here: start the program with asyncio.run(main()), "
    'or with anyio.run(main, backend="asyncio"). It does not run under trio'
)


class Runner(Verbs):
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
        max_tasks_per_worker: how many calls a worker begins before percore replaces it. Broadcasts do not count. The replacement
            starts ahead of time; if it is not ready in time, calls wait. Default: no limit.
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
        context.check_start()
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
                self._assembly = await self._assemble_processes(loop)
            else:
                self._assembly = await self._assemble_by(loop, choice._maker())
            self._supervisor = self._assembly.supervisor
            await self._supervisor.pool.start()
        except BaseException:
            await self.aclose(grace=0)
            raise
        if self._phase is not State.STARTING:  # 1. the last worker is ready  2. another task closes  3. this task wakes
            await self.aclose()
            raise RunnerClosed("the runner was closed while it started")
        self._phase = State.OPEN

    async def _assemble(self, loop: asyncio.AbstractEventLoop, make_engine: EngineFactory | None) -> Assembly:
        await import_modules()
        if self._phase is State.CLOSED:  # another task closed the runner meanwhile
            raise RunnerClosed("the runner was closed while it started")
        return Assembly(loop, self._options, make_engine)

    async def _assemble_processes(self, loop: asyncio.AbstractEventLoop) -> Assembly:
        early = warm_up(self._options)
        try:
            return await self._assemble(loop, None)
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

    # Workers

    @property
    def addresses(self) -> tuple[str, ...]:
        """The addresses on which the workers serve, in the order of `listen` and written as there, with the ports in use.

        Raises:
            RunnerClosed: the runner is not started or is closed.
        """
        return self._open_assembly().supervisor.pool.listening.addresses

    async def reload(self) -> None:
        """Replace every worker in turn, while calls go on: a new worker is ready before the old one takes no more calls.

        The new workers see modules that have changed on disk; this process does not. An old worker ends after the calls that it
        has begun, which may be later than this method returns; those that it has not begun run elsewhere. No call fails.

        Reloads and resizes run one after the other. If several reloads wait, the next one serves for all.

        If cancelled, it replaces no further workers: some are new and some old, and all are in service.

        Raises:
            StartupFailed: a new worker raised in its imports or its lifespan, died, or was not ready within `start_timeout`, or
                there was no place for it within this time. The old worker stays in service, and the remaining ones are not
                replaced.
            RunnerClosed: the runner is not started, is closing or closed, or was closed meanwhile.
            RunnerBroken: as in `submit`.
            RuntimeError: called from another event loop or thread, or after a fork.
        """
        self._check_open()
        await self._supervisor.pool.changes.reload()

    async def resize(self, workers: int) -> None:
        """Change the number of workers, while calls go on. No call fails, except those of a broadcast, as below.

        With more workers, it returns when all of them are ready; each takes calls as soon as it is ready. With fewer, the workers
        with the highest indexes take no more calls and end after those that they have begun, which may be later than this method
        returns; those that they have not begun run elsewhere. A broadcast's call that such a worker has not begun fails with
        WorkerDied, since no other worker may run it.

        If it is cancelled or fails, the number of workers stays as it was.

        Raises:
            StartupFailed: a new worker could not start, as in `reload`.
            TypeError, ValueError: `workers` is not a whole number from 1 to 1024.
            OSError: the address space has no room for so many.
            RunnerClosed, RunnerBroken, RuntimeError: as in `reload`.
        """
        workers = whole("workers", workers, 1, MOST_WORKERS)
        self._check_open()
        await self._supervisor.pool.changes.resize(workers)

    # Call options. The calls themselves are in Verbs.

    @advising("Runner.options", {})
    def options(  # noqa: PLR0913  # each is a documented option
        self,
        *,
        key: Hashable | None = None,
        retries: int | None = None,
        retry_on: RetryOn | None = None,
        backoff: Backoff = 0.0,
        timeout: float | None = None,
        prefetch: int = PREFETCH,
        queue_timeout: float | None = None,
        hard_timeout: float | None = None,
        rate: percore.Rate | None = None,
    ) -> Options:
        """Return a view of this runner with these call options: `runner.options(key=host).run(fetch, url)`.

        Args:
            key: a hashable value. Calls with equal keys are never on two workers at once, and at most `per_key` of them run at
                once. For `submit`, `run` and `stream`; a map takes a key function instead. The key's `__hash__` and `__eq__` are
                called here and not later, so changing the key afterwards has no effect.
            retries: how many more times to attempt a call that fails with an error selected by `retry_on`. Every attempt sends
                the original pickled bytes. Default: the runner's `retries`.
            retry_on: an exception class, a tuple of them, or a plain function that takes the error and returns whether to retry.
                Default: WorkerDied. `retry_on` and `backoff` need retries, here or in the runner.
            backoff: seconds to wait before the next attempt, or a plain function that returns them and takes the number of failed
                attempts (1 after the first). A call that waits occupies no worker. It ends at once if it is cancelled or the runner
                closes.
            timeout: how many seconds one attempt may run, from its start in the worker. After that a coroutine is cancelled there
                and ends with TimeoutError, as under `asyncio.timeout`. A plain function cannot be stopped: its caller gets
                TimeoutError, its thread stays busy until the function returns, and the next attempt begins only after that.
            prefetch: for `stream`, which alone uses it: how many items the worker may produce that the consumer has not taken.
            queue_timeout: how many seconds the call may wait until it begins. Then it ends with TimeoutError and never runs. The
                seconds count from `submit` or `run`, and for an item of a map from when it is pulled. They are rounded up by 3 % or
                50 ms, whichever is less. Once a call has begun, its later attempts may wait as long as they must.
            hard_timeout: how many seconds one attempt may run, for code that ignores cancellation. After that it is cancelled, and
                it ends with TimeoutError as soon as it has ended in its worker. Its worker gets no more calls meanwhile. If the
                attempt goes on for another second, or for half of `kill_after`, the worker is replaced. `kill_after` seconds after
                the cancellation the worker is killed; its other calls have had that long to end.
            rate: how many calls of the key begin in how much time, such as `percore.Rate(10, per=1)`. A call that has to wait
                for that holds no place, and `queue_timeout` limits its wait. Each attempt counts. The rate is the key's: all its
                calls wait for it and count, and the options of a later call may change it. See also `set_rate`.

        Raises:
            TypeError, ValueError: an option is invalid.
            Exception: any error from the key's `__hash__` or `__eq__`.
            RunnerClosed, RunnerBroken, RuntimeError: as in `submit`.
        """
        self._check_open()
        supervisor = self._supervisor
        policy = supervisor.policy_of(
            key=key,
            retries=retries,
            retry_on=retry_on,
            backoff=backoff,
            timeout=timeout,
            prefetch=prefetch,
            queue_timeout=queue_timeout,
            hard_timeout=hard_timeout,
            rate=rate,
            inherited=supervisor.options.retries,
        )
        if key is not None:
            policy.key = supervisor.dispatch.names.of(key)
        view = Options(self)
        view._policy = policy
        return view

    def set_rate(self, key: Hashable, rate: percore.Rate | None, *, after: float = 0.0) -> None:
        """Give a key another rate, from now on, whether it has calls or not.

        This rate goes before those in the `options` of calls, until `set_rate` is called for the key again or the runner closes.
        The starts that percore still remembers count under the new rate, too. Calls that were sent to a worker are not affected.

            runner.set_rate(host, percore.Rate(1, per=10))                # slower
            runner.set_rate(host, None, after=float(retry_after))         # a pause, and then as before

        Args:
            key: a key, as in `options`.
            rate: the new rate. None: the rate in the options of the key's calls; without one, its calls have no limit.
            after: seconds, from now, in which no call of the key begins. 0 ends a pause that was set before.

        Raises:
            TypeError, ValueError: an argument is invalid.
            Exception: any error from the key's `__hash__` or `__eq__`.
            RunnerClosed, RunnerBroken, RuntimeError: as in `submit`.
        """
        self._check_open()
        supervisor = self._supervisor
        policy = supervisor.policy_of(key=key, retries=0, retry_on=None, backoff=0.0, timeout=None, rate=rate)
        if key is None:
            raise TypeError("set_rate is for one key, such as a host: key must not be None")
        seconds = delay_of(after, "after")
        supervisor.rates.set(supervisor.dispatch.names.of(key), policy.rate, seconds)

    # Shared objects

    async def share(self, obj: T) -> percore.Shared[T]:
        """Put an object into shared memory once, for all workers, and return a handle to it.

        Pass the handle to calls and read its `.value` in them. percore pickles the object once, in a thread; each worker that reads
        the value unpickles it once. Buffers of 64 KiB and more (numpy arrays, Arrow tables and the like) are read-only and share
        the same physical pages in all workers, including replacements.

        The memory is freed after `close()` or after the last reference to the handle is gone, as soon as no call uses the object.
        Closing the runner frees it too.

        If cancelled, the thread finishes pickling and discards the result.

        Raises:
            PayloadTooLarge: the pickled object is larger than `max_message`.
            MemoryError: there is not enough memory.
            RuntimeError: too many objects are shared already; or called from another event loop or thread, or after a fork.
            RunnerClosed: the runner is not started, is closing or closed, or was closed meanwhile.
            RunnerBroken: as in `submit`.
            TypeError: the object contains a Shared.
            Exception: any error from pickling the object.
        """
        self._check_open()
        return await self._supervisor.shares.share(obj)

    # Statistics and usage

    def statistics(self) -> percore.Statistics:
        """Return a snapshot of the runner's counters.

        It is cheap and makes no system calls. Any thread may call it, for example the thread of a metrics server.

        Raises:
            RunnerClosed: the runner is not started or is closed.
            RuntimeError: called after a fork.
        """
        assembly = self._open_assembly()
        assembly.check_process()
        from percore._supervisor.snapshot import snapshot

        return snapshot(assembly.supervisor, is_here=assembly.is_here)

    async def usage(self) -> percore.Usage:
        """Return memory, CPU and threads of this process, the fork server and each worker. `str()` of it is a table.

        A thread reads them from the system. All runners of this process share one fork server.

        If cancelled, it returns at once; the thread ends by itself when its reading is complete.

        Raises:
            RunnerClosed: the runner is not started or is closed.
            RuntimeError: called from another event loop or thread, or after a fork.
        """
        assembly = self._open_assembly()
        assembly.check_caller()
        return await assembly.usage()

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
