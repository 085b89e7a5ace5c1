"""The face of concurrent.futures: LoopPoolExecutor."""

import multiprocessing
import os
import time
import weakref
from collections import deque
from collections.abc import Awaitable, Callable, Iterable, Iterator
from concurrent.futures import Executor, Future
from itertools import islice
from multiprocessing.context import BaseContext
from typing import Any, Final, Literal, ParamSpec, TypeVar, cast, get_args, overload

from percore._calls import kind_of
from percore._engine import Engine
from percore._engines.process import ProcessEngine
from percore._ipc.pickles import MainInfo, dump, is_by_reference, main_info
from percore._ipc.slots import Sink
from percore._messages import Kind
from percore._options import Lifespan, check_plain, usable_cpus, whole
from percore._portal import KILL, TERMINATE, Held, Portal
from percore._runner import Runner
from percore._worker import context
from percore._worker.chunks import run_chunk
from percore._worker.manners import Manners, ThreadStart

P = ParamSpec("P")
T = TypeVar("T")

Broken = Literal["worker", "pool"]

_MOST_WORKERS: Final = 1024
_FOR_EVER: Final = 1e8
_KILL_AFTER: Final = 30.0


class LoopPoolExecutor(Executor):
    """An executor over processes, the threads in each and an event loop in each: for plain functions and coroutine functions.

        with percore.LoopPoolExecutor(max_threads=1) as executor:
            sizes = list(executor.map(measure, paths))

    It stands where ProcessPoolExecutor or ThreadPoolExecutor stood. It needs no event loop, and may be used from any thread and by
    `loop.run_in_executor(executor, ...)`, also of several loops at once. Workers start with the first call. A fork of the
    program may use an executor that was made before the fork and has not been called.

    Functions run on threads beside each other, so they must be thread-safe, unless `max_threads=1`: one at a time in each worker,
    as ProcessPoolExecutor does it. Coroutine functions run as tasks in the worker's loop, a hundred at once.

    Args:
        max_workers: processes. Default: the CPUs this process may really use.
        mp_context: a multiprocessing context, whose processes the workers then are; `initargs` travel with their start, so its
            queues, locks and events can be among them. Default: percore's own fork server, or where `initargs` has such an object
            multiprocessing's default context.
        initializer: called once in each worker before its first call. If it raises, the executor is broken.
        initargs: its arguments.
        max_tasks_per_child: a worker begins so many calls and no more, then another takes its place. Not with "fork".
        max_threads: plain functions at once in each worker. Default: as ThreadPoolExecutor, min(32, CPUs + 4).
        thread_initializer: called once in each thread before its first call. If it raises, the executor is broken.
        thread_initargs: its arguments.
        lifespan: as that of a Runner: gives the (async) context manager each worker is in, in its loop.
        broken: "worker": when a worker dies, the calls it had begun fail with WorkerDied and it is replaced. "pool": then all calls
            fail and no more are taken, as the standard library has it; so it is for what cannot be unpickled.

    Raises:
        TypeError, ValueError: a bad argument.
    """

    def __init__(  # noqa: PLR0913  # each a documented argument; the list is closed
        self,
        max_workers: int | None = None,
        mp_context: BaseContext | None = None,
        initializer: Callable[..., object] | None = None,
        initargs: tuple[Any, ...] = (),
        *,
        max_tasks_per_child: int | None = None,
        max_threads: int | None = None,
        thread_initializer: Callable[..., object] | None = None,
        thread_initargs: tuple[Any, ...] = (),
        lifespan: Lifespan | None = None,
        broken: Broken = "worker",
    ) -> None:
        if broken not in get_args(Broken):
            raise ValueError(f'broken must be "worker" or "pool", not {broken!r}')
        if mp_context is not None and not isinstance(mp_context, BaseContext):
            raise TypeError(f'mp_context must be a context, such as multiprocessing.get_context("spawn"), not {mp_context!r}')
        for name, given in (("initializer", initializer), ("thread_initializer", thread_initializer)):
            if given is not None:
                if not callable(given):
                    raise TypeError(f"{name} must be a callable")
                check_plain(name, given)
        self._max_workers = _workers(max_workers)
        if mp_context is None and _need_inheritance(initargs):
            mp_context = multiprocessing.get_context()
        self._mp_context = mp_context
        runner = _ExecutorRunner(
            self._max_workers,
            lifespan=lifespan,
            threads=None if max_threads is None else whole("max_threads", max_threads, 1),
            thread_initializer=None if thread_initializer is None else ThreadStart(thread_initializer, tuple(thread_initargs)),
            context=mp_context,
            given=(initializer, tuple(initargs)),
            is_pool=broken == "pool",
            max_tasks=_max_tasks(max_tasks_per_child, mp_context),
        )
        self._portal = portal = Portal(runner, is_pool=broken == "pool")
        self._collected = weakref.ref(self, lambda _: portal.release())

    @property
    def _broken(self) -> str | Literal[False]:
        return self._portal.broken or False

    @overload
    def submit(self, fn: Callable[P, Awaitable[T]], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]: ...
    @overload
    def submit(self, fn: Callable[P, T], /, *args: P.args, **kwargs: P.kwargs) -> Future[T]: ...
    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Hand a call over; the future tells what came of it. From any thread.

        Arguments are pickled when a worker has room for the call; what cannot be pickled fails the future. Until then it can be
        cancelled. A result, and whatever the function raises, BaseExceptions included, arrives as itself.

        Raises:
            BrokenProcessPool: the executor is broken.
            RuntimeError: after `shutdown`, when the interpreter ends, or in a fork of the process that has called it.
        """
        portal = self._portal
        portal.check()
        if portal.thread is None:
            context.check_start()
        future: Future[Any] = Future()
        portal.submit((future, fn, args, kwargs))
        if self._mp_context is not None:
            # As in the standard library: what the processes are given is read, and forks are made, before this returns.
            portal.wait_launched()
        return future

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
        """Call `fn` with the items of the iterables, one of each at a time, and iterate over the results in order.

        The inputs are collected and the calls submitted now; with `buffersize` only so many, and one more for each result taken.
        The first error is raised at its place; what has not begun by then, or when the iterator is closed, is cancelled.

        Args:
            fn: a plain function or a coroutine function.
            *iterables: as of the built-in map.
            timeout: seconds from now in which the results must come.
            chunksize: so many items travel in one call, for plain functions. Calls of coroutine functions always travel alone.
            buffersize: calls (chunks) submitted whose results have not been taken.

        Raises:
            TimeoutError: from the iterator.
            TypeError, ValueError: a bad `chunksize` or `buffersize`.
            BrokenProcessPool, RuntimeError: as `submit`.
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
            shared = fn if is_by_reference(fn) else Held(self._portal, fn)
            return _Results(self, shared, rows, end, buffersize).items()
        chunks = iter(lambda: tuple(islice(rows, chunksize)), ())
        calls = ((fn, chunk) for chunk in chunks)
        return _Results(self, run_chunk, calls, end, buffersize).chunks()

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Take no more calls; those accepted are finished. Idempotent, from any thread.

        Args:
            wait: return when the last call has ended and all workers are gone.
            cancel_futures: cancel the calls that are not running.
        """
        self._portal.shut(cancel=cancel_futures)
        if wait:
            self._portal.join()

    def terminate_workers(self) -> None:
        """End the workers by SIGTERM, cancel what waits, and take no more calls. Does not wait.

        With broken="pool" that ends them at once, and running calls fail with BrokenProcessPool. With broken="worker" they finish
        the calls they have begun.
        """
        self._portal.kill(TERMINATE)

    def kill_workers(self) -> None:
        """End the workers by SIGKILL, cancel what waits, and take no more calls. Does not wait.

        Running calls fail with BrokenProcessPool.
        """
        self._portal.kill(KILL)

    def __repr__(self) -> str:
        portal = self._portal
        state = "broken" if portal.broken else "shut down" if portal.is_shut else "open"
        return f"<percore.LoopPoolExecutor max_workers={self._max_workers} {state}>"

    def __reduce__(self) -> tuple[Any, ...]:
        raise TypeError(
            "a LoopPoolExecutor cannot be pickled: it belongs to the process that made it. Instead of giving it to a call, "
            "make the calls here, and give the results of one to the next"
        )


class _Results:
    """The results of a map. It does not hold the executor: who has only the results may let that go."""

    def __init__(
        self,
        executor: LoopPoolExecutor,
        fn: Callable[..., Any],
        rows: Iterator[tuple[Any, ...]],
        end: float | None,
        most: int | None,
    ) -> None:
        self._executor = weakref.ref(executor)
        self._fn = fn
        self._rows = rows
        self._end = end
        self._is_bounded = most is not None
        self._futures: deque[Future[Any]] = deque()
        try:
            for args in rows if most is None else islice(rows, most):
                self._futures.append(executor.submit(fn, *args))
        except BaseException:
            self._cancel()
            raise

    def _cancel(self) -> None:
        for future in self._futures:
            future.cancel()

    def _submit_next(self) -> None:
        executor = self._executor()
        if executor is None:
            return
        for args in islice(self._rows, 1):
            self._futures.append(executor.submit(self._fn, *args))

    def _take(self) -> Any:
        """The next result. Holds neither it nor its future."""
        future = self._futures.popleft()
        try:
            try:
                return future.result(None if self._end is None else self._end - time.monotonic())
            finally:
                future.cancel()
        finally:
            del future  # its error's traceback has this frame

    def items(self) -> Iterator[Any]:
        try:
            while self._futures:
                if self._is_bounded:
                    self._submit_next()
                yield self._take()
        finally:
            self._cancel()

    def chunks(self) -> Iterator[Any]:
        for chunk in self.items():
            chunk.reverse()
            while chunk:
                yield chunk.pop()


class _ExecutorRunner(Runner):
    """A runner whose workers have the manners of the standard library's."""

    def __init__(  # noqa: PLR0913  # the terms of one executor
        self,
        workers: int,
        *,
        lifespan: Lifespan | None,
        threads: int | None,
        thread_initializer: Callable[[], object] | None,
        context: BaseContext | None,
        given: tuple[Callable[..., object] | None, tuple[Any, ...]],
        is_pool: bool,
        max_tasks: int,
    ) -> None:
        super().__init__(
            workers,
            lifespan=lifespan,
            threads=threads,
            thread_initializer=thread_initializer,
            start_method=None if context is None else "spawn",  # not used then: and no share in the fork server is taken
            start_timeout=_FOR_EVER,
            kill_after=_KILL_AFTER,
        )
        self._context = context
        self._given = given
        self._is_pool = is_pool
        self._max_tasks = max_tasks

    async def start(self) -> None:
        """As there; also in a fork of the process that made it, if that has not used it."""
        self._pid = os.getpid()
        await super().start()

    def _main_info(self) -> MainInfo:
        if self._context is not None and self._context.get_start_method() == "fork":
            return MainInfo("module", "__main__")  # a fork has this very one, and its functions' globals with it
        return main_info()

    async def _let_go(self) -> None:
        try:
            await super()._let_go()
        finally:
            self._given = (None, ())  # a queue of multiprocessing in there is the user's, who may want to see it go

    def _make_engine(self, main: Any) -> Engine:
        launcher = None
        initializer = b""
        if self._context is not None:
            from percore._engines.multiprocess import MultiprocessLauncher

            launcher = MultiprocessLauncher(self._context, self._given)
        elif self._given[0] is not None:
            sink = Sink(self._memory.arena, private=True)
            dump(self._given, sink, main_by_value=main.by_value)
            initializer = cast("bytes", sink.payload())
        manners = Manners(self._is_pool, self._max_tasks, self._context is not None, initializer)
        return ProcessEngine(self._loop, self._options, self._memory, main, launcher, manners)


def _need_inheritance(initargs: tuple[Any, ...]) -> bool:
    """Whether one of them is a lock, queue or value of multiprocessing: they travel with the start of a process of it alone."""
    return any(type(arg).__module__.partition(".")[0] == "multiprocessing" for arg in initargs)


def _workers(max_workers: int | None) -> int:
    if max_workers is None:
        return usable_cpus()
    if not isinstance(max_workers, int):
        raise TypeError("max_workers must be an integer")
    if max_workers <= 0:
        raise ValueError("max_workers must be greater than 0")
    if max_workers > _MOST_WORKERS:
        raise ValueError(f"max_workers must be at most {_MOST_WORKERS}")
    return max_workers


def _max_tasks(given: int | None, context: BaseContext | None) -> int:
    if given is None:
        return 0
    if not isinstance(given, int):
        raise TypeError("max_tasks_per_child must be an integer")
    if given <= 0:
        raise ValueError("max_tasks_per_child must be >= 1")
    if context is not None and context.get_start_method() == "fork":
        raise ValueError(
            'max_tasks_per_child cannot be used with the "fork" start method, which would fork a process that runs threads; '
            "use another mp_context"
        )
    return given


def _is_coroutine_function(fn: Callable[..., Any]) -> bool:
    try:
        return kind_of(fn) == Kind.TASK
    except TypeError:  # what it is not fit for, its calls tell
        return False


LoopPoolExecutor.__module__ = "percore"
