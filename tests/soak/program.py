"""The program under test: python -m tests.soak.program ENGINE SEED FOLDER. It works in rounds, and tells of each quiet point.

A round is some seconds of calls of every kind on two runners, while workers of one of them are killed, drained, recycled, reloaded
and become more and fewer. Then everything ends that has begun, the program tells how much there is of what it alone can count, and
waits for a line on its standard input.
"""

import asyncio
import contextlib
import ctypes
import gc
import logging
import os
import random
import shutil
import signal
import sys
import threading
import warnings
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any, Final

import percore
from percore._common.measuring import Histogram, bucket_of, middle_of
from percore._scheduler.keys import Keys
from percore._scheduler.lifecycle import State
from tests.chaos import calls
from tests.chaos.load import ENDLESS, Load
from tests.chaos.program import state_of
from tests.complaints import Complaints
from tests.e2e.fault_programs import say
from tests.internals import current_member, members_of, slots_used, supervisor_of
from tests.log_jobs import say as say_in_log
from tests.waiting import until

RATE: Final = float(os.environ.get("SOAK_RATE") or 80)
"""Calls in a second on each of the two runners."""
SECONDS: Final = 8.0
"""Of calls, in each round."""
LIMIT: Final = 240.0
"""Seconds after which something counts as hung."""
WORKERS: Final = 2
AGE: Final = 1 << 40
"""Calls in each bucket of a histogram. As numbers up to 2**60, larger ones take no more memory."""
MOST_MEASURED: Final = 1 << 40
"""Nanoseconds of a call, or bytes: more than the longest takes here."""
RELOADED: Final = 30
"""Rounds between two reloads; half-way between them the fork server is killed."""


def objects() -> int:
    """How many objects the garbage collector of this process knows. What is free goes back to the system."""
    gc.collect()
    gc.collect()
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:  # glibc
        trim(0)
    return len(gc.get_objects())


def age(*runners: percore.Runner) -> None:
    """Put what is bounded, and fills for hours, where years of calls would have put it.

    Each bucket of a histogram is there, with a large count: rare durations fill it for days, and it takes hours until each slot has
    run each function. Each key has its lane in each queue: it takes hours until a call of each key has waited in each of them.
    """
    for runner in runners:
        for meter in supervisor_of(runner).meters.all():
            for slot in range(WORKERS + 1):
                meter.at(slot)
    for one in gc.get_objects():
        if type(one) is Histogram and one.count < AGE:
            for bucket in range(bucket_of(MOST_MEASURED)):
                one.add(int(middle_of(bucket)), AGE)
        elif type(one) is Keys:
            for name in list(one._keys):
                for queue in list(one._queues):
                    one._lane(name, queue)


class Counting(logging.Handler):
    """Counts records of workers."""

    count = 0

    def emit(self, _record: logging.LogRecord) -> None:
        self.count += 1


class Program:
    """Runners, an executor, and their rounds."""

    def __init__(self, engine: str, seed: str, folder: Path) -> None:
        self._is_threads = engine == "threads"
        self._seed = seed
        self._folder = folder
        self._records = Counting()
        self._changes: Counter[str] = Counter()
        self._calls = 0
        common: dict[str, Any] = {"kill_after": 0.5, "concurrency": 20, "threads": 4}
        if self._is_threads:
            self._options: dict[str, Any] = {"engine": "threads"}
        else:
            self._options = {"lifespan": partial(calls.serving, str(folder), None)}
        lasting: dict[str, Any] = (
            {} if self._is_threads else {"start_method": "spawn"}
        )  # their death is not that of the fork server
        self._lasting = percore.Runner(WORKERS, **common, **self._options, **lasting)
        self._passing = percore.Runner(WORKERS, **common, **self._options, max_tasks_per_worker=300)
        self._executor = percore.LoopPoolExecutor(1, max_tasks_per_child=50, engine="threads" if self._is_threads else None)

    async def run(self) -> None:
        """Work until the parent says that it is enough, or has ended."""
        loop = asyncio.get_running_loop()
        loop.slow_callback_duration = 60
        loop.set_default_executor(ThreadPoolExecutor(1))  # else it has a second thread as soon as two jobs happen to meet
        logger = logging.getLogger("app.jobs")
        logger.addHandler(self._records)
        logger.propagate = False
        async with self._lasting, self._passing:
            number = 0
            while True:
                number += 1
                try:
                    await self._round(number)
                    facts = await self._facts()
                except TimeoutError:
                    for runner in (self._lasting, self._passing):
                        sys.stderr.write(f"! hangs in round {number}: {state_of(runner)}\n")
                    raise
                say("quiet", facts)
                if sys.stdin.readline() != "go\n":
                    break
        await asyncio.to_thread(self._executor.shutdown)

    async def _round(self, number: int) -> None:
        decide = random.Random(f"{self._seed}/{number}")
        folder = self._folder / str(number)
        for name in ("lasting", "passing"):
            (folder / name).mkdir(parents=True)
        omitted = ENDLESS if self._is_threads else frozenset[str]()
        lasting = Load(self._lasting, f"{self._seed}/{number}/lasting", folder / "lasting", 60, ENDLESS)
        passing = Load(self._passing, f"{self._seed}/{number}/passing", folder / "passing", 60, omitted)
        async with asyncio.timeout(LIMIT), asyncio.TaskGroup() as tasks:
            for load in (lasting, passing):
                tasks.create_task(self._drive(load))
            tasks.create_task(self._strike(decide))
            tasks.create_task(self._change(number))
            tasks.create_task(self._open_another(decide))
            tasks.create_task(self._execute(number))
            tasks.create_task(self._look())
        async with asyncio.timeout(LIMIT):
            for load in (lasting, passing):
                await until(lambda load=load: not load.pending and not load.tasks)
        self._calls += lasting.ended + passing.ended
        for load in (lasting, passing):
            load.end()
        await asyncio.to_thread(self._clear, folder)

    def _clear(self, folder: Path) -> None:
        """Forget what calls have written: the ledger would grow for hours."""
        shutil.rmtree(folder)
        for name in ("ledger", "rates"):
            with contextlib.suppress(FileNotFoundError):
                os.truncate(self._folder / name, 0)
        for file in self._folder.glob("flaky-*"):
            file.unlink()

    async def _drive(self, load: Load) -> None:
        loop = asyncio.get_running_loop()
        began = loop.time()
        while (passed := loop.time() - began) < SECONDS:
            await load.feed(int(passed * RATE), lambda: False)
            await asyncio.sleep(0.05)

    async def _strike(self, decide: random.Random) -> None:
        """Kill two workers, and drain one."""
        for kind in ("kill", "drain", "kill"):
            await asyncio.sleep(decide.random() * SECONDS / 3)
            ready = [one.index for one in self._passing.statistics().workers if one.state == "ready"]
            member = current_member(self._passing, decide.choice(ready)) if ready else None
            if member is not None:
                member.worker.kill(signal.SIGTERM if kind == "drain" else signal.SIGKILL)
                self._changes[kind] += 1

    async def _change(self, number: int) -> None:
        """More workers and fewer, in each round; at times other ones, or another fork server."""
        await asyncio.sleep(SECONDS / 4)
        try:
            await self._passing.resize(WORKERS + 1)
            if number % RELOADED == 1:
                await self._passing.reload()
                self._changes["reload"] += 1
        except percore.StartupFailed:  # a worker was killed as it started
            self._changes["change that failed"] += 1
        if number % RELOADED == RELOADED // 2 and not self._is_threads:
            usage = await self._passing.usage()
            for server in [one.pid for one in usage.processes if one.role == "fork server"]:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(server, signal.SIGKILL)
            self._changes["fork server"] += 1
        await asyncio.sleep(SECONDS / 4)
        while True:  # the number at the quiet point has to be the same
            try:
                await self._passing.resize(WORKERS)
            except percore.StartupFailed:
                self._changes["change that failed"] += 1
            else:
                break
        self._changes["resize"] += 1

    async def _open_another(self, decide: random.Random) -> None:
        """A runner for a while: calls, a shared object, a stream that is left."""
        await asyncio.sleep(decide.random() * SECONDS / 2)
        options: dict[str, Any] = {"engine": "threads"} if self._is_threads else {}
        with contextlib.suppress(percore.WorkerDied):  # with the fork server
            async with percore.Runner(1, **options) as another:
                with contextlib.closing(await another.share(calls.pattern(self._calls))) as shared:
                    await another.run(calls.accept, shared)
                await another.map(calls.accept, range(100))
                await another.run(say_in_log, "a record", logging.WARNING)
        self._changes["runner"] += 1

    async def _execute(self, number: int) -> None:
        """Use the executor that stays, and now and then one that does not, from another thread."""
        loop = asyncio.get_running_loop()
        with contextlib.suppress(percore.WorkerDied):
            for value in range(20):
                await loop.run_in_executor(self._executor, calls.accept, value)
                await asyncio.sleep(SECONDS / 40)
        if number % 3 == 0:
            await asyncio.to_thread(self._execute_elsewhere)
            self._changes["executor"] += 1

    def _execute_elsewhere(self) -> None:
        engine: Any = "threads" if self._is_threads else None
        with contextlib.suppress(percore.WorkerDied), percore.LoopPoolExecutor(1, engine=engine) as executor:
            assert list(executor.map(calls.accept, range(20))) == [1] * 20

    async def _look(self) -> None:
        """Read statistics and usage, as a program with a dashboard does."""
        for _ in range(8):
            await asyncio.sleep(SECONDS / 10)
            for runner in (self._lasting, self._passing):
                str(runner.statistics())
        for runner in (self._lasting, self._passing):
            str(await runner.usage())

    def _is_quiet(self) -> bool:
        for runner in (self._lasting, self._passing):
            statistics = runner.statistics()
            if statistics.running or statistics.queued or slots_used(runner):
                return False
            if len(statistics.workers) != WORKERS or any(member.life.state is not State.READY for member in members_of(runner)):
                return False
        return True

    async def _settle(self) -> None:
        """Wait until everything has ended and each place has one worker. Beside one that is soon recycled its successor waits."""
        await until(self._is_quiet)
        while len(members_of(self._passing)) > WORKERS:
            await self._passing.map(calls.accept, range(20))
            await until(self._is_quiet)

    async def _facts(self) -> dict[str, Any]:
        """What the program knows itself, when everything has ended."""
        async with asyncio.timeout(LIMIT):
            in_workers = [] if self._is_threads else await self._lasting.broadcast(objects)
            await self._passing.broadcast(calls.accept)  # the last one to start has run a call, like the others
            await self._settle()
        await asyncio.sleep(0.5)  # what is put off for less than that ends as well: timers, threads, messages nobody waits for
        age(self._lasting, self._passing)
        objects()
        loop: Any = asyncio.get_running_loop()
        lasting, passing = (runner.statistics().workers for runner in (self._lasting, self._passing))
        workers = {one.pid: "lasting worker" for one in lasting} | {one.pid: "passing worker" for one in passing}
        return {
            "calls": self._calls,
            "records": self._records.count,
            "changes": self._changes,
            "tasks": len(asyncio.all_tasks()),
            "timers": sum(not handle.cancelled() for handle in loop._scheduled),
            "watched": len(loop._selector.get_map()),
            "slots": slots_used(self._lasting) + slots_used(self._passing),
            "blocks": sys.getallocatedblocks(),
            "objects": len(gc.get_objects()),
            "workers": {} if self._is_threads else workers,
            "objects of workers": dict(zip([one.pid for one in lasting], in_workers, strict=False)),
            "threads": sorted(thread.name for thread in threading.enumerate()),
        }


def main() -> None:
    """Work until standard input ends."""
    engine, seed, folder = sys.argv[1:]
    logging.getLogger("percore").setLevel(logging.ERROR)
    mistakes: list[str] = []
    Complaints(mistakes.append)
    warnings.filterwarnings("ignore", 'engine="threads"', RuntimeWarning)
    with calls.entering(folder, f"{os.getpid()} 0") if engine == "threads" else contextlib.nullcontext():
        asyncio.run(Program(engine, seed, Path(folder)).run())
    if mistakes:
        sys.exit(f"! {len(mistakes)} mistakes, the first: {mistakes[0]}")


if __name__ == "__main__":
    main()
