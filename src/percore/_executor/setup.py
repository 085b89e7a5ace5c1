"""The setup of an executor: its arguments are checked when it is made, and its workers are made of them with its first call.

Importing this module is cheap: see `executor`.
"""

import multiprocessing
from collections.abc import Callable
from multiprocessing.context import BaseContext
from typing import TYPE_CHECKING, Final, Literal, NamedTuple, TypeAlias, cast, get_args

from percore._common.engines import AnyEngine, engine_of
from percore._common.options import Lifespan, RunnerOptions, usable_cpus, whole
from percore._runner.early import keep_warm

if TYPE_CHECKING:
    import asyncio

    from percore._common.engines import EngineChoice
    from percore._protocol.interfaces import Engine
    from percore._protocol.worker_start import Given
    from percore._runner.assembly import Assembly
    from percore._serialization.pickler import MainInfo
    from percore._supervisor.burials import WorkerObserver

Broken: TypeAlias = Literal["worker", "pool"]

_MOST_WORKERS: Final = 1024
_FOR_EVER: Final = 1e8
_KILL_AFTER: Final = 30.0


class Setup(NamedTuple):
    """What an executor's workers are made of. They behave as the standard library promises (see `_worker/executor_worker.py`)."""

    options: RunnerOptions
    context: BaseContext | None
    given: "Given"
    is_pool: bool
    max_tasks: int

    def warm_up(self) -> None:
        if self.options.engine is None:
            keep_warm(self.options)

    def assemble(self, loop: "asyncio.AbstractEventLoop", observer: "WorkerObserver | None") -> "Assembly":
        from percore._runner.assembly import Assembly
        from percore._serialization.pickler import MainInfo

        # A forked worker has this same __main__ module, with its globals.
        is_forked = self.context is not None and self.context.get_start_method() == "fork"
        return Assembly(loop, self.options, self._make_engine, MainInfo("module", "__main__") if is_forked else None, observer)

    def _make_engine(self, loop: "asyncio.AbstractEventLoop", options: RunnerOptions, main: "MainInfo", /) -> "Engine":
        from percore._protocol.worker_start import ExecutorSettings

        if options.engine is not None:
            settings = ExecutorSettings(is_pool=False, max_tasks=self.max_tasks, has_main=False, initializer=b"")
            return cast("Engine", options.engine._engine_of_executor(loop, options, settings, self.given))
        from percore._engines.processes.engine import ProcessEngine

        launcher, given = None, None
        if self.context is not None:
            from percore._engines.processes.multiprocessing_launcher import MultiprocessLauncher

            launcher = MultiprocessLauncher(self.context, self.given)
        elif self.given[0] is not None:
            given = self.given
        executor_settings = ExecutorSettings(self.is_pool, self.max_tasks, self.context is not None, b"")
        return ProcessEngine(loop, options, main, launcher, executor_settings, given)


def setup_of(  # noqa: PLR0913  # the arguments of LoopPoolExecutor, where they are documented
    *,
    max_workers: int | None,
    mp_context: BaseContext | None,
    given: "Given",
    max_tasks_per_child: int | None,
    max_memory_per_worker: int | None,
    max_threads: int | None,
    of_threads: "Given",
    lifespan: Lifespan | None,
    broken: Broken,
    engine: AnyEngine | None,
    harden: bool,
) -> Setup:
    """Check the arguments of an executor and return its setup.

    Raises:
        TypeError, ValueError: an argument is invalid.
    """
    if broken not in get_args(Broken):
        raise ValueError(f'broken must be "worker" or "pool", not {broken!r}')
    if mp_context is not None and not isinstance(mp_context, BaseContext):
        raise TypeError(f'mp_context must be a context, such as multiprocessing.get_context("spawn"), not {mp_context!r}')
    _check_initializers(initializer=given[0], thread_initializer=of_threads[0])
    workers = _workers(max_workers)
    choice = engine_of(engine)
    context = _context_of(mp_context, choice, given, broken)
    options = RunnerOptions.checked(
        workers=workers,
        lifespan=lifespan,
        concurrency=100,
        threads=None if max_threads is None else whole("max_threads", max_threads, 1),
        loop_factory=None,
        start_method=None if context is None else "spawn",  # with a context: only to start no fork server
        max_message=2**30,
        start_timeout=_FOR_EVER,
        kill_after=_KILL_AFTER,
        max_tasks_per_worker=None,
        max_memory_per_worker=max_memory_per_worker,
        retries=0,
        per_key=None,
        contextvars=(),
        thread_initializer=_thread_start(of_threads),
        max_pending=None,
        listen=(),
        blocked_after=None,
        engine=choice,
        harden=harden,
    )
    if max_memory_per_worker is not None:
        _check_replaces("max_memory_per_worker", context)
    return Setup(options, context, given, broken == "pool", _max_tasks(max_tasks_per_child, context))


def _context_of(
    given_context: BaseContext | None, choice: "EngineChoice | None", given: "Given", broken: Broken
) -> BaseContext | None:
    """Return the context whose processes the workers are; None: those of percore, or of another engine."""
    if choice is not None:
        _check_engine(choice, given_context, broken)
    elif given_context is None and given[1]:
        from percore._engines.processes.multiprocessing_launcher import needs_inheritance

        if needs_inheritance(*given):
            return multiprocessing.get_context()
    return given_context


def _check_initializers(**initializers: object) -> None:
    for name, given in initializers.items():
        if given is None:
            continue
        if not callable(given):
            raise TypeError(f"{name} must be a callable")
        from percore._common.callables import check_plain

        check_plain(name, given)


def _thread_start(given: "Given") -> Callable[[], object] | None:
    initializer, initargs = given
    if initializer is None:
        return None
    from percore._worker.executor_worker import ThreadStart

    return ThreadStart(initializer, initargs)


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


def _check_engine(choice: "EngineChoice", mp_context: BaseContext | None, broken: Broken) -> None:
    choice._check_executor()
    if mp_context is not None:
        raise ValueError(f"mp_context starts processes, and engine={choice!r} has none: give one of the two")
    if broken == "pool":
        raise ValueError(f'broken="pool" ends all workers, and those of engine={choice!r} cannot be ended: use broken="worker"')


def _max_tasks(given: int | None, context: BaseContext | None) -> int:
    if given is None:
        return 0
    if not isinstance(given, int):
        raise TypeError("max_tasks_per_child must be an integer")
    if given <= 0:
        raise ValueError("max_tasks_per_child must be >= 1")
    _check_replaces("max_tasks_per_child", context)
    return given


def _check_replaces(name: str, context: BaseContext | None) -> None:
    if context is not None and context.get_start_method() == "fork":
        raise ValueError(
            f'{name} cannot be used with the "fork" start method, which would fork a process that runs threads; '
            "use another mp_context"
        )
