"""Programs that may start no more processes and threads (RLIMIT_NPROC): python -m tests.e2e.process_limit_programs STORY METHOD

They run under a user of their own, since the limit counts all processes of a user, and does not hold for root.
"""

import asyncio
import contextlib
import faulthandler
import logging
import os
import resource
import signal
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import percore
from tests.e2e import limit_calls as calls
from tests.e2e.fault_programs import say
from tests.e2e.limit_programs import kinds, outcome_of, serves
from tests.internals import current_member
from tests.waiting import until

faulthandler.register(signal.SIGUSR1, all_threads=True)

MOST = 12
"""Processes and threads with which everything can be started."""


def children(pid: int) -> list[int]:
    """All descendants."""
    found: list[int] = []
    for task in os.listdir(f"/proc/{pid}/task"):
        with contextlib.suppress(FileNotFoundError):  # a thread that has ended
            for child in map(int, Path(f"/proc/{pid}/task/{task}/children").read_text().split()):
                found += [child, *children(child)]
    return found


def used() -> int:
    """How many processes and threads there are."""
    return sum(len(os.listdir(f"/proc/{pid}/task")) for pid in [os.getpid(), *children(os.getpid())])


@contextlib.asynccontextmanager
async def room_for(spare: int) -> AsyncIterator[None]:
    """Let this user start so many more."""
    await until(lambda: len(os.listdir("/proc/self/task")) == threading.active_count())  # no thread is ending that was joined
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)
    resource.setrlimit(resource.RLIMIT_NPROC, (used() + spare, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NPROC, (soft, hard))


async def start(method: Any) -> None:
    async with percore.Runner(1, start_method=method):  # what stays open for good is open now
        pass
    before = kinds()
    for spare in range(MOST):
        runner = percore.Runner(2, start_method=method)
        failure = plain = task = ""
        async with room_for(spare):
            try:
                await runner.start()
                # Calls of plain functions need a thread, and others do not.
                plain, task = await outcome_of(runner.submit(abs, -7)), await outcome_of(runner.submit(calls.twice_in_task, 7))
            except percore.StartupFailed as error:
                failure = str(error)
            await runner.aclose()
        say("start", [spare, failure, plain, task, sorted((kinds() - before).elements()), len(children(os.getpid()))])
        if plain == "7":
            break


async def thread(method: Any) -> None:
    """A worker that can start no thread gets more room, and starts them."""
    for spare in range(MOST):
        with contextlib.suppress(percore.StartupFailed):
            async with room_for(spare), percore.Runner(1, start_method=method) as runner:
                failure = ""
                try:
                    await runner.run(abs, -1)
                except RuntimeError as error:
                    failure = str(error)
                member = current_member(runner)
                assert member is not None
                assert member.pid is not None
                _, hard = resource.prlimit(member.pid, resource.RLIMIT_NPROC)
                resource.prlimit(member.pid, resource.RLIMIT_NPROC, (hard, hard))
                say("thread", [failure, await runner.map(abs, range(-100, 0)) == [*range(100, 0, -1)]])
                return


class Hogs(logging.Handler):
    """Takes the place of a worker that has died, before its replacement is forked, and gives it back upon the refusal."""

    def __init__(self) -> None:
        super().__init__()
        self.refusals: list[str] = []
        self._threads: list[threading.Thread] = []
        self._over = threading.Event()

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if "by SIGKILL" in text:
            with contextlib.suppress(RuntimeError):  # no room is left
                while True:
                    hog = threading.Thread(target=self._over.wait)
                    hog.start()
                    self._threads.append(hog)
        elif "could not" in text:
            self.refusals.append(text)
            self._over.set()
            while self._threads:
                self._threads.pop().join()


async def respawn(method: Any) -> None:
    """The limit stays, so that the fork server stays, too: it is the one that is refused."""
    for spare in range(MOST):
        with contextlib.suppress(percore.StartupFailed):
            async with room_for(spare), percore.Runner(1, start_method=method) as runner:
                hogs = Hogs()
                logging.getLogger("percore").addHandler(hogs)
                current_member(runner).worker.kill()  # type: ignore[union-attr]
                served = await outcome_of(runner.submit(calls.twice_in_task, 7))
                logging.getLogger("percore").removeHandler(hogs)
                say("respawn", [hogs.refusals, served])
                return


async def changes(method: Any) -> None:
    """A reload and a resize for which there is no room leave the workers in service, and do all once there is."""
    async with percore.Runner(2, start_method=method) as runner:
        before, pids = kinds(), {worker.pid for worker in runner.statistics().workers}
        for name, change in (("reload", runner.reload), ("resize", lambda: runner.resize(3))):
            failure = ""
            async with room_for(0):
                try:
                    await change()
                except percore.StartupFailed as error:
                    failure = str(error)
                serves_on = await serves(runner)
            kept = {worker.pid for worker in runner.statistics().workers} == pids
            left = sorted((kinds() - before).elements())
            await change()
            workers = runner.statistics().workers
            pids, before = {worker.pid for worker in workers}, kinds()
            say(name, [failure, serves_on, kept, left, len(workers), await serves(runner)])


async def executor(_method: Any) -> None:
    """A worker whose loop needs a thread beside the main one, for which there is no room, says so."""
    failures: list[str] = []
    soft, hard = resource.getrlimit(resource.RLIMIT_NPROC)

    def attempt() -> int:
        with percore.LoopPoolExecutor(1, max_threads=1) as one:  # which blocks the loop: nothing else needs it
            return one.submit(abs, -7).result()

    # The program, the executor's thread, the fork server and the worker. What is still ending counts as well: then it is too few.
    resource.setrlimit(resource.RLIMIT_NPROC, (4, hard))
    while not failures or (len(failures) < 500 and "could not start: " not in failures[-1]):
        try:
            failures.append(f"{attempt()}, without a thread")
        except (RuntimeError, percore.StartupFailed) as error:
            failures.append(str(error))
    resource.setrlimit(resource.RLIMIT_NPROC, (soft, hard))
    say("executor", [failures, attempt()])


if __name__ == "__main__":
    # What percore warns of is told by the story, if it is part of it: standard error is to stay empty.
    logging.getLogger("percore").addHandler(logging.NullHandler())
    asyncio.run(globals()[sys.argv[1]](sys.argv[2]))
