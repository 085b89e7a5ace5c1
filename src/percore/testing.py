"""For tests of programs that use percore: a runner without processes, deaths of workers on purpose, and virtual time.

async def test_a_death_is_survived():
    async with percore.testing.FakeRunner(workers=2) as runner:
        call = runner.submit(fetch, url)
        percore.testing.kill(runner, worker=0)
"""

import asyncio
import os
import signal
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from math import inf
from typing import TYPE_CHECKING, Any, TypeVar

import percore
from percore._common.options import seconds_of
from percore._testing import simulation
from percore._testing.engine import FakeEngine, FakeWorker, worker_of_pid
from percore._testing.simulation import Hangs
from percore._worker.context import current_context

if TYPE_CHECKING:
    from percore._protocol.interfaces import Worker

__all__ = ["FakeRunner", "Hangs", "die", "kill", "simulate", "stopped"]

T = TypeVar("T")


class FakeRunner(percore.Runner):
    """A Runner whose workers live in the event loop of the program, for tests. It starts in milliseconds and makes no process.

    Functions, arguments and results are pickled and sent as between processes, coroutine functions run in tasks, and plain
    functions on threads. Patches and mocks of modules, breakpoints and coverage thus reach what calls do. What differs:

    - `loop_factory`, `start_method` and `max_memory_per_worker` have no effect: there is one loop and one memory. A coroutine
      function that blocks its loop blocks the program.
    - A worker that dies (`kill`, `die`) cancels its coroutines. A plain function runs on in its thread until it returns.
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
    found = current_context("current_worker")
    strike, loop = found.strike, None
    if fake := worker_of_pid(found.worker.pid):
        strike, loop = fake.strike, fake.loop
    if strike is None:
        os.kill(os.getpid(), signal.SIGKILL)
        return
    strike()
    if (running := asyncio._get_running_loop()) is not None and loop in (None, running):
        raise asyncio.CancelledError


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
