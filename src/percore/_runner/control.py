"""Control, the base class of Runner: the methods of an open runner that make no calls themselves."""

from __future__ import annotations

from collections.abc import Hashable
from typing import TYPE_CHECKING, TypeVar

import percore
from percore._common.call_options import delay_of
from percore._common.options import MOST_WORKERS, PREFETCH, Backoff, RetryOn, advising, whole
from percore._runner.verbs import Options, Verbs

if TYPE_CHECKING:
    from percore._runner.assembly import Assembly

T = TypeVar("T")


class Control(Verbs):
    """Reload and resize an open runner, set options and rates of its calls, share objects, read its statistics."""

    def _open_assembly(self) -> Assembly:
        """Return the parts of the runner.

        Raises:
            RunnerClosed: the runner is not started or is closed.
        """
        raise NotImplementedError

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

    # Options of calls. The calls themselves are in Verbs.

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
                the cancellation the worker is killed; its other calls have had that long to end. A call from inside a call may run
                in the worker of its caller, which then dies with it.
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
        supervisor.calls.rates.set(supervisor.dispatch.names.of(key), policy.rate, seconds)

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
        return self._statistics(None)

    def _statistics(self, most: int | None) -> percore.Statistics:
        """As `statistics`, with the figures of so many functions at most in each worker; None: of all."""
        assembly = self._open_assembly()
        assembly.check_process()
        from percore._supervisor.snapshot import snapshot

        return snapshot(assembly.supervisor, is_here=assembly.is_here, most=most)

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


for _method in (Control.reload, Control.resize, Control.set_rate, Control.share, Control.statistics, Control.usage):
    _method.__qualname__ = f"Runner.{_method.__name__}"  # the name in Python's own messages about wrong arguments
