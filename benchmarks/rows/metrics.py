"""What measuring and watching cost: runners that measure their calls or are watched, against those that do not."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING

import percore
from benchmarks.calls import same, same_plainly
from benchmarks.contestants import await_all, by_calls, map_seconds, playing
from benchmarks.figures import Target
from benchmarks.harness import Row, row
from benchmarks.peers import WORKERS
from percore._attach.programs import ProgramGone, read

if TYPE_CHECKING:
    from asyncio.subprocess import Process
    from collections.abc import AsyncIterator, Awaitable, Callable
    from contextlib import AbstractAsyncContextManager

    from benchmarks.results import Sample

AWAITED, MAPPED = "an awaited call", "an item of a map"
CPU_AWAITED, CPU_MAPPED = f"CPU, {AWAITED}", f"CPU, {MAPPED}"
EACH = 20
ALL = (AWAITED, MAPPED, CPU_AWAITED, CPU_MAPPED)


@row(rounds=300, seconds=40)
def metrics(quick: bool) -> Row:
    """The cost of measuring calls (`statistics().functions`): on against off with PERCORE_METRICS=0, 2 workers.

    The calls of awaited_int and of map_tiny, which have no work, in many short rounds by turns, and each round is compared with the
    one beside it. Both runners count calls; the one that measures also takes samples of waits and runs, and its workers send them
    twice a second. The CPU time is that of this process and its threads; that of the workers shows in the time.
    """
    once = calls_of_both(quick=quick)
    return Row(
        {name: playing(opening(is_on=is_on), once) for name, is_on in (("percore, off", False), ("percore, on", True))},
        [Target("percore, on", metric, "percore, off", at_most=1.02) for metric in ALL],
    )


@row(rounds=200, seconds=30)
def watched(quick: bool) -> Row:
    """What a program notices of `percore top`, which looks once a second: watched against alone, 2 workers.

    As `metrics`. Each runner is in this process, and so the watcher sees both; it is stopped while the other contestant runs.
    """
    once = calls_of_both(quick=quick)

    async def looked_at(opened: tuple[percore.Runner, Process]) -> Sample:
        runner, watcher = opened
        watcher.send_signal(signal.SIGCONT)
        try:
            return await once(runner)
        finally:
            watcher.send_signal(signal.SIGSTOP)

    return Row(
        {"alone": playing(opening(is_on=True), once), "watched": playing(watching, looked_at)},
        [Target("watched", metric, "alone", at_most=1.02) for metric in ALL],
    )


@asynccontextmanager
async def watching() -> AsyncIterator[tuple[percore.Runner, Process]]:
    async with opening(is_on=True)() as runner:
        while await asyncio.to_thread(is_unseen):
            await runner.run(same, 1)
        command = sys.executable, "-m", "percore", "top", str(os.getpid())
        watcher = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        assert watcher.stdout is not None
        await watcher.stdout.readline()  # it has imported what it needs
        rest = asyncio.create_task(watcher.stdout.read())
        watcher.send_signal(signal.SIGSTOP)
        try:
            yield runner, watcher
        finally:
            watcher.kill()
            await rest
            await watcher.wait()


def calls_of_both(*, quick: bool) -> Callable[[percore.Runner], Awaitable[Sample]]:
    """Return a round: awaited calls, then a map, of functions without work."""
    awaiters, items = (50, range(50_000)) if quick else (200, range(200_000))
    expected = list(items)

    async def once(opened: percore.Runner) -> Sample:
        began = time.process_time()
        awaited = await by_calls(await_all([lambda number: opened.run(same, number)] * awaiters, EACH))
        between = time.process_time()
        mapped = await map_seconds(lambda some: opened.map(same_plainly, some).collect(), items, expected) / len(items)
        ended = time.process_time()
        return {
            AWAITED: awaited,
            MAPPED: mapped,
            CPU_AWAITED: (between - began) / (awaiters * EACH),
            CPU_MAPPED: (ended - between) / len(items),
        }

    return once


def is_unseen() -> bool:
    """Whether this program has not published a page yet."""
    try:
        return not read(os.getpid())
    except ProgramGone:
        return True


def opening(*, is_on: bool) -> Callable[[], AbstractAsyncContextManager[percore.Runner]]:
    @asynccontextmanager
    async def opened() -> AsyncIterator[percore.Runner]:
        before = os.environ.pop("PERCORE_METRICS", None)
        if not is_on:
            os.environ["PERCORE_METRICS"] = "0"
        try:
            runner = percore.Runner(workers=WORKERS)
            await runner.start()
        finally:
            os.environ.pop("PERCORE_METRICS", None)
            if before is not None:
                os.environ["PERCORE_METRICS"] = before
        try:
            yield runner
        finally:
            await runner.aclose()

    return opened
