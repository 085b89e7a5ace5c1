"""A million pending calls, keys and time limits, a hundred thousand streams that are left: `python -m tests.scale`.

No step of the program's loop may take longer than 50 ms of CPU time while so many calls wait: no call that is made or cancelled, no
result, no statistics, no stopped, killed or added worker, no time limit that is over, no close. Garbage collections are measured
apart: a full one visits all the objects of the program, as in any other program that has so many.

Afterwards nothing of the calls may be left. The exit status is 1 if a step took longer, a call was lost, or something is left.
"""

import argparse
import asyncio
import gc
import os
import resource
import signal
import sys
import time
from asyncio import events
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final

import percore
from tests.waiting import until

LONGEST: Final = 0.05
"""Seconds of CPU time that a step of the loop may take."""
GROWTH: Final = 0.2
"""The same for a step in which the tables of the keys grow. CPython moves all entries of a dictionary at once: the last time those
of four with 699,051 entries each, which takes 25 ms for each of them."""
LISTED: Final = 0.1
"""The same for a step in which a time limit is over: it lists all calls that wait, before it looks through them piece by piece."""
CHUNK: Final = 100
"""Calls made in one step."""
WORKERS: Final = 2
IN_WORKERS: Final = 10_000
"""More calls than workers hold at once: the rest waits in the program."""


def negative(number: int) -> int:
    """Run in a worker."""
    return -number


async def same(number: int) -> int:
    """Run in a worker's loop."""
    return number


async def numbers() -> AsyncIterator[int]:
    """A stream without end."""
    number = 0
    while True:
        yield number
        number += 1


class Steps:
    """How long the steps of the loop take, by phase. It measures every callback from `measured` on, in CPU time of the thread."""

    def __init__(self) -> None:
        self.longest: dict[str, tuple[float, str]] = {}
        self.phase = ""
        self.collections = 0.0
        """Seconds of the longest garbage collection."""
        self._collecting = 0.0
        self._began = 0.0

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Measure during the block."""
        run = events.Handle._run

        def timed(handle: Any) -> None:
            self._collecting, began = 0.0, time.thread_time()
            run(handle)
            self.took(time.thread_time() - began - self._collecting, handle)

        handles: Any = events.Handle
        handles._run = timed
        gc.callbacks.append(self._collected)
        try:
            yield
        finally:
            gc.callbacks.remove(self._collected)
            handles._run = run

    def took(self, seconds: float, handle: object) -> None:
        """Note a step."""
        if seconds > self.longest.get(self.phase, (0.0, ""))[0]:
            self.longest[self.phase] = seconds, repr(handle)[:120]

    def _collected(self, phase: str, _info: object) -> None:
        if phase == "start":
            self._began = time.thread_time()
        else:
            seconds = time.thread_time() - self._began
            self._collecting += seconds
            self.collections = max(self.collections, seconds)


class Scale:
    """One run."""

    def __init__(self, steps: Steps) -> None:
        self.steps = steps
        self.wrong: list[str] = []

    async def phase(self, name: str, work: Callable[[], Awaitable[object]], most: float = LONGEST) -> None:
        """Do some work as a phase of its own. `most`: seconds that a step may take."""
        await asyncio.sleep(0)  # a step before the work belongs to the phase before, and the last one of the work to this
        self.steps.phase, began = name, time.monotonic()
        await work()
        await asyncio.sleep(0)
        self.steps.phase = ""
        longest, where = self.steps.longest.get(name, (0.0, ""))
        tell(f"  {name:<28} {time.monotonic() - began:7.1f} s, longest step {longest * 1000:6.1f} ms")
        if longest > most:
            self.wrong.append(f"{name}: a step took {longest * 1000:.0f} ms: {where}")

    async def pending(self, count: int, *, has_keys: bool) -> None:
        """Make so many calls while no worker runs, change all that can change meanwhile, and let them end."""
        runner = percore.Runner(WORKERS, blocked_after=None, kill_after=60.0)
        await runner.start()
        made: list[asyncio.Future[int]] = []
        await self.phase("made", lambda: self.make(runner, count, made, has_keys=has_keys), GROWTH if has_keys else LONGEST)
        await self.phase("statistics", lambda: self.read(runner, count))
        await self.phase("a hundred cancelled", lambda: cancel(made))
        await self.phase("a death", lambda: die(runner))
        await self.phase("a resize", lambda: runner.resize(WORKERS + 1))
        await self.phase("run, closed", lambda: go_on(runner))
        self.judge(made)

    async def limited(self, count: int) -> None:
        """Make so many calls while no worker runs, and wait until the time of each is over in which it has to begin."""
        runner = percore.Runner(WORKERS, blocked_after=None)
        await runner.start()
        made: list[asyncio.Future[int]] = []
        await self.phase("made", lambda: self.make(runner, count, made, queue_timeout=10.0, hard_timeout=5.0))
        await self.phase("their time is over", lambda: until(lambda: runner.statistics().queued <= IN_WORKERS), LISTED)
        await self.phase("a close", lambda: runner.aclose(grace=0))
        wrong = sum(not isinstance(call.exception(), TimeoutError) for call in made)
        if wrong > IN_WORKERS:
            self.wrong.append(f"{wrong} calls were not told that their time is over")

    async def cut(self, count: int) -> None:
        """Close a runner in which so many calls wait."""
        runner = percore.Runner(WORKERS, blocked_after=None)
        await runner.start()
        made: list[asyncio.Future[int]] = []
        await self.phase("made", lambda: self.make(runner, count, made))
        await self.phase("a close that ends all calls", lambda: runner.aclose(grace=0))
        told = sum(isinstance(call.exception(), percore.RunnerClosed) for call in made)
        if told != count:
            self.wrong.append(f"{count - told} calls were told nothing by the close")

    async def make(
        self,
        runner: percore.Runner,
        count: int,
        made: "list[asyncio.Future[int]]",
        *,
        has_keys: bool = False,
        queue_timeout: float | None = None,
        hard_timeout: float | None = None,
    ) -> None:
        """Stop the workers, and make calls."""
        signal_all(runner, signal.SIGSTOP)
        view = runner.options(retries=1, queue_timeout=queue_timeout, hard_timeout=hard_timeout)
        for first in range(0, count, CHUNK):
            for number in range(first, first + CHUNK):
                one = runner.options(key=number, retries=1) if has_keys else view
                made.append(one.submit(same if number % 2 else negative, number))
            await asyncio.sleep(0)

    async def read(self, runner: percore.Runner, count: int) -> None:
        """Read the statistics."""
        queued = runner.statistics().queued
        if queued < count - IN_WORKERS:
            self.wrong.append(f"only {queued} calls wait")

    def judge(self, made: "list[asyncio.Future[int]]") -> None:
        """Look at each result."""
        wrong = sum(
            not call.cancelled() and (call.exception() is not None or call.result() != (number if number % 2 else -number))
            for number, call in enumerate(made)
        )
        if wrong or not all(call.done() for call in made):
            self.wrong.append(f"{wrong} calls have no result, or another one's")

    async def streams(self, count: int) -> None:
        """Open streams, take an item or none, and leave them in each way."""
        async with percore.Runner(WORKERS, blocked_after=None) as runner:
            await leave_streams(runner, 10 * CHUNK)
            before = await at_rest(runner)
            await self.phase("opened and left", lambda: leave_streams(runner, count))
            after = await at_rest(runner)
        tell(f"  objects of the program: {before} before, {after} after")
        if after > before + 500:
            self.wrong.append(f"{after - before} objects are left of {count} streams")


def tell(line: str) -> None:
    """At once: it takes minutes."""
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def signal_all(runner: percore.Runner, signum: int) -> None:
    """Send all workers a signal."""
    for worker in runner.statistics().workers:
        os.kill(worker.pid or 0, signum)


async def cancel(made: "list[asyncio.Future[int]]") -> None:
    """Cancel a hundred calls."""
    for call in made[:: len(made) // 100]:
        call.cancel()


async def die(runner: percore.Runner) -> None:
    """Kill a worker, and wait for its replacement."""
    pid = runner.statistics().workers[0].pid or 0
    os.kill(pid, signal.SIGKILL)
    await until(lambda: runner.statistics().workers[0].pid != pid and runner.statistics().workers[0].state == "ready")


async def go_on(runner: percore.Runner) -> None:
    """Let the workers run, and close the runner when all calls have ended."""
    signal_all(runner, signal.SIGCONT)
    await runner.aclose()


async def leave_streams(runner: percore.Runner, count: int) -> None:
    """Open so many streams, a hundred at once, and leave each of them."""
    for first in range(0, count, CHUNK):
        await asyncio.gather(*(leave(runner, number) for number in range(first, first + CHUNK)))


async def leave(runner: percore.Runner, number: int) -> None:
    """Open a stream, take an item or cancel the taking, and close or drop the stream."""
    stream = runner.options(prefetch=2).stream(numbers)
    first = asyncio.ensure_future(anext(stream))
    if number % 3:
        await first
    else:
        await asyncio.sleep(0)
        first.cancel()
    if number % 2:
        await stream.aclose()


async def at_rest(runner: percore.Runner) -> int:
    """Wait until no call runs, and return the number of the program's objects."""
    await runner.map(negative, range(1000))
    await until(lambda: not (runner.statistics().running or runner.statistics().queued))
    gc.collect()
    return len(gc.get_objects())


async def run(calls: int, keys: int, streams: int) -> int:
    """Run all parts. Return 1 if something is wrong."""
    scale = Scale(Steps())
    with scale.steps.measured():
        parts: dict[str, Callable[[], Awaitable[None]]] = {
            f"{calls} pending calls": lambda: scale.pending(calls, has_keys=False),
            f"{keys} pending calls, each with a key of its own": lambda: scale.pending(keys, has_keys=True),
            f"{calls} pending calls with time limits": lambda: scale.limited(calls),
            f"{calls} pending calls, and a close": lambda: scale.cut(calls),
            f"{streams} streams": lambda: scale.streams(streams),
        }
        for title, part in parts.items():
            tell(title)
            scale.steps.longest.clear()
            await part()
            gc.collect()
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10
    tell(f"the longest garbage collection took {scale.steps.collections:.2f} s; the program had up to {peak} MiB")
    for one in scale.wrong:
        tell(f"! {one}")
    return int(bool(scale.wrong))


def main() -> int:
    """Run it."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--calls", type=int, default=1_000_000)
    parser.add_argument("--keys", type=int, default=1_000_000)
    parser.add_argument("--streams", type=int, default=100_000)
    asked = parser.parse_args()
    return asyncio.run(run(asked.calls, asked.keys, asked.streams))


if __name__ == "__main__":
    sys.exit(main())
