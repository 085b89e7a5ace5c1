"""LoopPoolExecutor, the concurrent.futures interface of percore.

What this module imports is on the way of a short program to its first result: its first call starts the fork server, and only then
imports the rest (`Portal`), while the fork server imports the modules of a worker on another CPU.
"""

import signal
import sys
import time
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from functools import partial
from itertools import islice
from multiprocessing.context import BaseContext
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, TypeVar, overload

import percore  # noqa: TC001  # get_type_hints needs it
from percore._common.engines import AnyEngine
from percore._common.options import Lifespan
from percore._executor.futures import EarlyFuture, Held, trace, traced_future
from percore._executor.portal import Portal
from percore._executor.setup import Broken, setup_of
from percore._runner.early import check_start

if TYPE_CHECKING:
    from percore._executor.worker_process import WorkerProcess

P = ParamSpec("P")
T = TypeVar("T")


class LoopPoolExecutor(Executor):
    """An executor that runs plain functions and coroutine functions in worker processes.

    Each worker process has a thread pool for plain functions and an event loop for coroutine functions.

        with percore.LoopPoolExecutor(max_threads=1) as executor:
            sizes = list(executor.map(measure, paths))

    It is a replacement for ProcessPoolExecutor and ThreadPoolExecutor. It needs no event loop. Any thread may use it, and so may
    `loop.run_in_executor(executor, ...)`, with several event loops at once. Workers start with the first call. The fork
    server that they are forked from is kept for later executors, until the interpreter ends. In a forked child
    the executor starts workers of its own, even if it had workers before the fork. The futures of earlier calls end only in the
    parent.

    Plain functions run on several threads of a worker at once, so they must be thread-safe. With `max_threads=1` each worker runs
    one at a time, in its main thread, as with ProcessPoolExecutor. Coroutine functions run as tasks in the worker's event loop, up
    to 100 at once.

    Args:
        max_workers: number of worker processes. Default: the CPUs available to this process.
        mp_context: a multiprocessing context that starts the worker processes. They inherit `initargs`, which may therefore contain
            queues, locks and events of that context. Default: percore's fork server; if `initargs` contains such an object,
            multiprocessing's default context.
        initializer: a plain function that each worker calls once, before its first call. If it raises, the executor is broken.
        initargs: the arguments of `initializer`.
        max_tasks_per_child: how many calls a worker begins before percore replaces it. Not available with the "fork" start method.
        max_memory_per_worker: how many bytes of memory a worker may have before percore replaces it, as for Runner. Not available
            with the "fork" start method.
        max_threads: how many plain functions a worker runs at once. While the calls of a function compute instead of wait, they
            begin one at a time. Default: min(32, CPUs + 4), as with ThreadPoolExecutor.
        thread_initializer: a plain function that each pool thread calls once, before its first call. If it raises, the executor is
            broken.
        thread_initargs: the arguments of `thread_initializer`.
        lifespan: a function that returns the async or plain context manager of a worker, as for Runner.
        broken: what fails when a worker dies. "worker": the calls that it had begun fail with WorkerDied, and percore replaces it.
            "pool": all calls fail and the executor refuses new ones, as in the standard library, with errors whose `__cause__` says
            how the worker ended. With "pool" a call or result that cannot be unpickled breaks the executor as well.
        engine: where the workers run, as for Runner: None or "processes", "threads", "auto" or percore.ThreadsEngine(...).
        harden: whether to close the workers and this program to other processes of the same user, as for Runner. The program is
            closed when the workers start, by the first call.

    Raises:
        TypeError, ValueError: an argument is invalid.
    """

    def __init__(  # noqa: PLR0913  # each a documented argument; the list is closed
        self,
        max_workers: int | None = None,
        mp_context: BaseContext | None = None,
        initializer: Callable[..., object] | None = None,
        initargs: tuple[Any, ...] = (),
        *,
        max_tasks_per_child: int | None = None,
        max_memory_per_worker: int | None = None,
        max_threads: int | None = None,
        thread_initializer: Callable[..., object] | None = None,
        thread_initargs: tuple[Any, ...] = (),
        lifespan: Lifespan | None = None,
        broken: Broken = "worker",
        engine: AnyEngine | None = None,
        harden: bool = False,
    ) -> None:
        setup = setup_of(
            max_workers=max_workers,
            mp_context=mp_context,
            given=(initializer, tuple(initargs)),
            max_tasks_per_child=max_tasks_per_child,
            max_memory_per_worker=max_memory_per_worker,
            max_threads=max_threads,
            of_threads=(thread_initializer, tuple(thread_initargs)),
            lifespan=lifespan,
            broken=broken,
            engine=engine,
            harden=harden,
        )
        self._max_workers = setup.options.workers
        self._mp_context = setup.context
        self._tracing = setup.options.tracing
        self._portal = portal = Portal(setup.assemble, setup.warm_up, is_pool=setup.is_pool)
        is_ending = sys.is_finalizing  # bound here: where uWSGI embeds an interpreter, executors outlive the globals of modules
        self._collected = weakref.ref(self, lambda _: None if is_ending() else portal.release())

    @property
    def _processes(self) -> "dict[int, WorkerProcess]":
        """The workers by pid, as libraries read them from ProcessPoolExecutor. Empty before the first call.

        A worker that has no calls left and was replaced is not among them, although its process may not have ended yet.
        """
        from percore._executor.worker_process import WorkerProcess

        jobs = self._portal.jobs
        members = [] if jobs is None else sorted(jobs.supervisor.members, key=lambda member: member.generation)
        last = {member.index: member for member in members}
        found = [member for member in members if member.calls or last[member.index] is member]
        return {member.pid: WorkerProcess(member.pid, member.index) for member in found if member.pid is not None}

    @property
    def _broken(self) -> str | Literal[False]:
        return self._portal.life.text or False

    @overload
    def submit(self, fn: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]: ...
    @overload
    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]: ...
    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Submit one call and return its future. Any thread may call this.

        percore pickles the arguments when a worker has room for the call. Until then the future can be cancelled; after that its
        `cancel()` returns False. Calls that take longer than about 0.1 s wait for a worker that can begin them at once. If pickling
        fails, the future fails with that error. Otherwise the future gets the function's result, or the exception that it raised,
        of whatever class (BaseException included).

        Raises:
            BrokenProcessPool: the executor is broken.
            RuntimeError: the executor was shut down, or the interpreter is ending.
        """
        self._begin()
        portal = self._portal
        future: Future[Any]
        if portal.thread is None:  # a `__del__` submits while this thread starts it
            future = early = EarlyFuture(lambda: portal.thread is not None)
            if self._tracing is not None:
                trace(early, self._tracing, fn)
        else:
            future = Future() if self._tracing is None else traced_future(self._tracing, fn)
        portal.submit((future, fn, args, kwargs))
        if self._mp_context is not None:
            # As in the standard library, the processes are forked and the initargs are read before this method returns.
            portal.wait_launched()
        return future

    def _begin(self) -> None:
        """Check that calls are accepted, and start the thread and the workers if there are none. Raises as `submit`."""
        portal = self._portal
        portal.check()
        if portal.thread is None:
            check_start()
            portal.start()

    @overload
    def map(
        self,
        fn: Callable[..., Awaitable[T]],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
        buffersize: int | None = None,
    ) -> Iterator[T]: ...
    @overload
    def map(
        self,
        fn: Callable[..., T],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
        buffersize: int | None = None,
    ) -> Iterator[T]: ...
    def map(
        self,
        fn: Callable[..., Any],
        *iterables: Iterable[Any],
        timeout: float | None = None,
        chunksize: int = 1,
        buffersize: int | None = None,
    ) -> Iterator[Any]:
        """Call `fn` with one item of each iterable at a time, and return an iterator over the results in order.

        `map` collects the iterables and submits all calls at once. With `buffersize` it submits that many calls, and one more each
        time a result is taken. The iterator raises the first error at the place of its result. After an error, and when the
        iterator is closed, the calls that have not begun are cancelled.

        Args:
            fn: a plain function or a coroutine function.
            *iterables: iterables, as for the built-in `map`.
            timeout: how many seconds from now the results may take. Default: no limit.
            chunksize: how many items are sent in one call of a plain function. Calls of coroutine functions always get one item.
            buffersize: how many calls (chunks) may be submitted whose results have not been taken. Default: no limit.

        Raises:
            TimeoutError: the iterator raises it when `timeout` is over.
            TypeError, ValueError: `chunksize` or `buffersize` is invalid.
            BrokenProcessPool, RuntimeError: as in `submit`.
        """
        if chunksize < 1:
            raise ValueError("chunksize must be >= 1.")
        if buffersize is not None and not isinstance(buffersize, int):
            raise TypeError("buffersize must be an integer or None")
        if buffersize is not None and buffersize < 1:
            raise ValueError("buffersize must be None or > 0")
        end = None if timeout is None else time.monotonic() + timeout
        rows = zip(*iterables, strict=False)
        if chunksize == 1 or _is_coroutine_function(fn):
            return _ResultIterator(self, partial(_shared, fn), rows, end, buffersize).items()
        chunks = iter(lambda: tuple(islice(rows, chunksize)), ())
        calls = ((fn, chunk) for chunk in chunks)
        return _ResultIterator(self, _of_chunks, calls, end, buffersize).chunks()

    def statistics(self) -> "percore.Statistics":
        """Return a snapshot of the executor's counters. Any thread may call this.

        It is cheap and makes no system calls. `queued` includes the calls that wait for room in a worker; those that were cancelled
        count until percore discards them. There are no workers until the first call has started them.

        Raises:
            BrokenProcessPool, RuntimeError: as in `submit`.
        """
        return self._portal.statistics()

    def usage(self) -> "percore.Usage":
        """Return memory, CPU and threads of this process, the fork server and each worker. `str()` of it is a table.

        Any thread may call this. It waits some milliseconds for the executor's event loop, so in a coroutine write
        `await asyncio.to_thread(executor.usage)`. Before the first call it returns this process alone; later it
        leaves out a worker whose process does not exist yet. All executors and runners of this process share one fork server.

        Raises:
            RuntimeError: called in the thread of the executor's event loop, which runs callbacks of its futures; or as in `submit`.
            BrokenProcessPool: as in `submit`.
        """
        return self._portal.usage()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Refuse new calls, and let the accepted ones finish. Idempotent. Any thread may call this.

        Args:
            wait: return only after the last call has ended and all workers are gone.
            cancel_futures: cancel the calls that are not running.

        Raises:
            RuntimeError: a garbage collection has run a `__del__` that waits here, in the middle of a step of percore that has to
                end first. The executor shuts down all the same.
        """
        self._portal.shut(cancel=cancel_futures)
        if wait:
            self._portal.join()

    def terminate_workers(self) -> None:
        """Send SIGTERM to the workers, cancel the waiting calls, and refuse new ones. Does not wait.

        With `broken="pool"` the workers end at once, and their calls fail with BrokenProcessPool. With `broken="worker"` they
        finish the calls that they have begun.
        """
        self._portal.kill(signal.SIGTERM)

    def kill_workers(self) -> None:
        """Send SIGKILL to the workers, cancel the waiting calls, and refuse new ones. Does not wait.

        Running calls fail with BrokenProcessPool.
        """
        self._portal.kill(signal.SIGKILL)

    def __repr__(self) -> str:
        return f"<percore.LoopPoolExecutor max_workers={self._max_workers} {self._portal.life}>"

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(
            "a LoopPoolExecutor cannot be pickled: it belongs to the process that made it. Instead of giving it to a call, "
            "make the calls here, and give the results of one to the next"
        )


class _ResultIterator:
    """The results of a map. It refers to the executor weakly, so that the user may drop the executor and keep the results."""

    def __init__(
        self,
        executor: LoopPoolExecutor,
        function_of: Callable[[LoopPoolExecutor], Callable[..., Any]],
        rows: Iterator[tuple[Any, ...]],
        end: float | None,
        most: int | None,
    ) -> None:
        """`function_of`: returns the function that all calls have. It is called for the first one."""
        self._executor = weakref.ref(executor)
        self._function_of = function_of
        self._fn: Callable[..., Any] | None = None
        self._rows = rows
        self._end = end
        self._is_bounded = most is not None
        self._futures: deque[Future[Any]] = deque()
        try:
            self._submit(most)
        except BaseException:
            self._cancel()
            raise

    def _cancel(self) -> None:
        for future in self._futures:
            future.cancel()

    def _submit(self, most: int | None) -> None:
        executor = self._executor()
        if executor is None:
            return
        for args in islice(self._rows, most):
            if self._fn is None:
                executor._begin()  # first: the fork server starts while this process imports what the next line needs
                self._fn = self._function_of(executor)
            self._futures.append(executor.submit(self._fn, *args))

    def _take(self) -> Any:
        """Remove and return the next result. Keeps no reference to the result or its future."""
        future = self._futures.popleft()
        try:
            try:
                return future.result(None if self._end is None else self._end - time.monotonic())
            finally:
                future.cancel()
        finally:
            del future  # the traceback of its error refers to this frame: a cycle

    def items(self) -> Iterator[Any]:
        try:
            while self._futures:
                if self._is_bounded:
                    self._submit(1)
                yield self._take()
        finally:
            self._cancel()

    def chunks(self) -> Iterator[Any]:
        for chunk in self.items():
            chunk.reverse()
            while chunk:
                yield chunk.pop()


def _shared(fn: Callable[..., Any], executor: LoopPoolExecutor) -> Callable[..., Any]:
    """Return `fn`, or if it is pickled by value, what is pickled once for all calls of a map."""
    from percore._serialization.pickler import is_by_reference

    return fn if is_by_reference(fn) else Held(fn, executor._portal.forget)


def _of_chunks(_executor: LoopPoolExecutor) -> Callable[..., Any]:
    from percore._worker.executor_worker import run_chunk

    return run_chunk


def _is_coroutine_function(fn: Callable[..., Any]) -> bool:
    from percore._common.callables import is_coroutine_call

    try:
        return is_coroutine_call(fn)
    except TypeError:  # not a function that percore can call: the calls report it
        return False


LoopPoolExecutor.__module__ = "percore"
