"""For tests of programs that use percore: a runner without processes, deaths of workers on purpose, and virtual time.

async def test_a_death_is_survived():
    async with percore.testing.FakeRunner(workers=2) as runner:
        call = runner.submit(fetch, url)
        percore.testing.kill(runner, worker=0)
"""

import asyncio
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import AbstractContextManager, contextmanager
from math import inf
from typing import TYPE_CHECKING, Any, Final, TypeVar
from weakref import WeakKeyDictionary

import percore
from percore._common.options import seconds_of
from percore._testing import simulation
from percore._testing.engine import FakeEngine, FakeWorker
from percore._testing.faults import Starts, changed_calls, strike_own_worker
from percore._testing.simulation import Hangs

if TYPE_CHECKING:
    from percore._protocol.interfaces import Worker

__all__ = [
    "FakeRunner",
    "Hangs",
    "delayed",
    "delayed_starts",
    "die",
    "failing",
    "failing_starts",
    "kill",
    "losing",
    "simulate",
    "stopped",
]

T = TypeVar("T")


class FakeRunner(percore.Runner):
    """A Runner whose workers live in the event loop of the program, for tests. It starts in milliseconds and makes no process.

    Functions, arguments and results are pickled and sent as between processes, coroutine functions run in tasks, and plain
    functions on threads. Patches and mocks of modules, breakpoints and coverage thus reach what calls do. What differs:

    - `loop_factory`, `start_method`, `max_memory_per_worker` and `harden` have no effect: there is one loop, one memory and one
      process. A coroutine function that blocks its loop blocks the program.
    - A worker that dies (`kill`, `die`) cancels its coroutines. One that ignores this, and a plain function, run on until they
      return.
    - A call that ends its process, for example by `os._exit`, ends the program.

    It takes the arguments of Runner.
    """

    _make_engine = FakeEngine


def kill(runner: percore.Runner, worker: int = 0) -> None:
    """Kill a worker, as the system does when memory runs out. Its calls end with WorkerDied or are attempted again.

    It works with any runner. Call it in the thread of the runner's event loop.

    Args:
        runner: the runner, started and not closed.
        worker: the number of the worker, from 0.

    Raises:
        RunnerClosed: the runner is not started, or it is closed.
        IndexError: the runner has no worker of that number.
        ProcessLookupError: the worker has just died, and its replacement has not started.
    """
    _worker(runner, worker).kill()


@contextmanager
def stopped(runner: percore.Runner, worker: int = 0) -> Iterator[None]:
    """Stop a worker for the time of the block: it reads nothing and sends nothing, as a machine that is suspended.

    A process gets SIGSTOP, and SIGCONT at the end. A fake worker takes no messages; calls that it runs go on.

    Raises:
        RunnerClosed, IndexError, ProcessLookupError: as in `kill`.
    """
    found = _worker(runner, worker)
    if isinstance(found, FakeWorker):
        found.pause()
    else:
        found.kill(signal.SIGSTOP)
    try:
        yield
    finally:
        if isinstance(found, FakeWorker):
            found.resume()
        else:
            found.kill(signal.SIGCONT)


def die() -> None:
    """Kill the worker of the call that runs this, at once: nothing of the call arrives any more, whatever it has done.

    At the end of a function it loses the result of work that was done: `await save(page); percore.testing.die()`.

    With a FakeRunner, and with workers that are threads, it raises CancelledError in a coroutine, and returns in a plain function.

    Raises:
        RuntimeError: called outside of a call.
    """
    strike_own_worker()


def delayed(
    runner: percore.Runner, fn: Callable[..., Any] | None = None, *, seconds: float, times: int | None = None
) -> AbstractContextManager[None]:
    """Let calls wait in their workers before they begin, during the block. The wait counts as a part of the call.

        with percore.testing.delayed(runner, fetch, seconds=0.5):

    A coroutine function sleeps, and holds its place; a plain function blocks its thread. It works with any runner whose workers are
    on this machine, for all verbs but streams and for calls that begin during the block. Calls from inside calls stay as they
    are. The figures of the function and its name in errors stay the same.

    Args:
        runner: the runner, started and not closed. Use it in the thread of its event loop.
        fn: the function whose calls are changed. None: all functions.
        seconds: for how long they wait.
        times: how many attempts are changed, the first ones over all workers; retries are attempts of their own. None: all.

    Raises:
        RunnerClosed: the runner is not started, or it is closed.
        TypeError, ValueError: `seconds` or `times` is invalid.
    """
    return _changed(runner, fn, times, delay=seconds_of("seconds", seconds))


def failing(
    runner: percore.Runner,
    fn: Callable[..., Any] | None = None,
    *,
    error: BaseException | type[BaseException],
    times: int | None = None,
) -> AbstractContextManager[None]:
    """Let calls raise this error in their workers instead of calling the function, during the block.

        with percore.testing.failing(runner, fetch, error=OSError("no route"), times=2):

    Args:
        runner: as in `delayed`.
        fn: as in `delayed`.
        times: as in `delayed`.
        error: an exception that can be pickled, or its class.

    Raises:
        RunnerClosed: the runner is not started, or it is closed.
        TypeError, ValueError: `error` is no exception, or `times` is invalid.
    """
    given: object = error
    if not (isinstance(given, BaseException) or (isinstance(given, type) and issubclass(given, BaseException))):
        raise TypeError(f"error must be an exception or its class, not {given!r}")
    return _changed(runner, fn, times, error=error)


def losing(runner: percore.Runner, fn: Callable[..., Any] | None = None, *, times: int | None = 1) -> AbstractContextManager[None]:
    """Let workers die when they have done the work of a call and before its result arrives, during the block.

    The call ends with WorkerDied, or is attempted again if it has retries: the work is then done twice. Other calls that run in
    that worker end as well.

    Args:
        runner: as in `delayed`.
        fn: as in `delayed`.
        times: as in `delayed`, but one attempt is changed by default.

    Raises:
        RunnerClosed: the runner is not started, or it is closed.
        TypeError, ValueError: `times` is invalid.
    """
    return _changed(runner, fn, times, loses=True)


def delayed_starts(runner: percore.Runner, *, seconds: float, times: int | None = None) -> AbstractContextManager[None]:
    """Let workers start later, during the block, as on a machine that has no room for them yet.

    It works with a started runner, whose replacements it changes, and with a runner that is started in the block.

    Args:
        runner: the runner, not closed. Use it in the thread of its event loop.
        seconds: how much later they start. A runner whose workers all wait longer than `start_timeout` fails.
        times: how many starts are changed. None: all.

    Raises:
        RunnerClosed: the runner is closed.
        TypeError, ValueError: `seconds` or `times` is invalid.
    """
    return _changed_starts(runner, times, seconds_of("seconds", seconds))


def failing_starts(runner: percore.Runner, *, times: int | None = None) -> AbstractContextManager[None]:
    """Let starts of workers fail, during the block, as where the system refuses another process.

    A runner that is started in the block gets StartupFailed. One that was started before tries again, ever later; after ten
    failures in a row a slot is given up, and after that of all slots the runner is broken.

    Args:
        runner: as in `delayed_starts`.
        times: as in `delayed_starts`.

    Raises:
        RunnerClosed: the runner is closed.
        TypeError, ValueError: `times` is invalid.
    """
    return _changed_starts(runner, times, None)


_changes: Final[WeakKeyDictionary[percore.Runner, list[Callable[..., Any]]]] = WeakKeyDictionary()
"""What is changed of calls of each runner, in order."""


def _changed(runner: percore.Runner, fn: Callable[..., Any] | None, times: int | None, **plan: Any) -> AbstractContextManager[None]:
    runner.statistics()  # raises RunnerClosed
    _check_times(times)
    return changed_calls(runner._supervisor.functions, _changes.setdefault(runner, []), fn, times, **plan)


@contextmanager
def _changed_starts(runner: percore.Runner, times: int | None, delay: float | None) -> Iterator[None]:
    _check_times(times)
    starts = Starts(times, delay)
    assemble = runner._assemble
    assembly = runner._assembly

    async def changed(loop: asyncio.AbstractEventLoop, make_engine: Any) -> Any:
        made = await assemble(loop, make_engine)
        starts.begin(made.engine, loop)
        return made

    if assembly is not None:
        runner.statistics()  # raises RunnerClosed
        starts.begin(assembly.engine, asyncio.get_running_loop())
    runner._assemble = changed  # type: ignore[method-assign]
    try:
        yield
    finally:
        runner._assemble = assemble  # type: ignore[method-assign]
        starts.end()


def _check_times(times: object) -> None:
    if times is None:
        return
    if isinstance(times, bool) or not isinstance(times, int):
        raise TypeError(f"times must be an int or None, not {times!r}")
    if times < 1:
        raise ValueError(f"times must be at least 1, not {times}")


def simulate(main: Callable[[], Coroutine[Any, Any, T]], *, seed: int, deaths: float = 0.0, latency: float = 0.01) -> T:
    """Run a program under virtual time, with messages that overtake each other and workers that die, and return its result.

    It takes the place of `asyncio.run`. Every Runner in it is a FakeRunner. When nothing can be done now, the clock of the event
    loop moves to the next timer, so an hour of sleeping takes milliseconds. The same seed gives the same order of messages and the
    same deaths, so a failure can be repeated: run many seeds, and run the one that fails again.

        for seed in range(1000):
            percore.testing.simulate(main, seed=seed, deaths=0.1)

    Plain functions run on threads and take no virtual time. With several at once, their order is that of the machine: give the
    runner `workers=1, threads=1` or use coroutine functions where the order matters. `time.time` and other clocks of the program
    are real; `loop.time()` and asyncio's timers are virtual. So use no real network in it.

    Args:
        main: a coroutine function without arguments.
        seed: where all chance comes from.
        deaths: how many workers die in a second of virtual time, on average.
        latency: the longest time that a message takes, in seconds.

    Raises:
        Hangs: the program waits for something that cannot come.
        RuntimeError: called while an event loop runs in this thread.
        TypeError, ValueError: an argument is invalid.
        BaseException: whatever `main` raises, with a note that names the seed.
    """
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise TypeError(f"seed must be an int, not {seed!r}")
    given: object = deaths
    if isinstance(given, bool) or not isinstance(given, int | float) or not 0 <= given < inf:
        raise ValueError(f"deaths must be a number of deaths in a second, 0 or more, not {deaths!r}")
    try:
        return simulation.run(main, seed, deaths, seconds_of("latency", latency))
    except BaseException as error:
        error.add_note(f"simulate(..., seed={seed}, deaths={deaths}, latency={latency}) repeats this")
        raise


def _worker(runner: percore.Runner, index: int) -> "Worker":
    runner.statistics()  # raises RunnerClosed
    slots = runner._supervisor.slots
    if not 0 <= index < len(slots):
        raise IndexError(f"the runner has workers 0 to {len(slots) - 1}, and no worker {index}")
    member = slots[index].current
    if member is None:
        raise ProcessLookupError(f"worker {index} has died, and its replacement has not started")
    return member.worker
