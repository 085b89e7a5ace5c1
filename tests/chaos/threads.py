"""python -m tests.chaos.threads: strikes at workers that are threads of this very process, and the figures.

    CHAOS_KILLS=300    how many workers are killed (default 300)
    CHAOS_SEED=7       the decisions; exactly when a thread runs does not come again

A thread cannot be killed: a worker whose loop is blocked, or whose plain function runs on, is given up. Program and workers share
their memory, so each call notes there that it begins. The exit code says whether anything happened that must not.
"""

import asyncio
import contextlib
import logging
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Final

import percore
from percore._common.system import new_loop
from tests import leaks
from tests.complaints import Complaints
from tests.internals import current_member, members_of

LIMIT: Final = 30.0
"""Seconds after which something counts as hung."""
CALLS: Final = 3000
ROOM: Final = 100
RETRIES: Final = 3

_STRIKES: Final = {"kill": 10, "drain": 2, "stop": 2, "all": 1, "reload": 1, "resize": 1}


@dataclass(slots=True)
class Found:
    """What was seen of all rounds. `breaches`: what must not happen, in words."""

    outcomes: Counter[str] = field(default_factory=Counter)
    strikes: Counter[str] = field(default_factory=Counter)
    breaches: list[str] = field(default_factory=list)
    rounds: int = 0
    given_up: int = 0


class Ledger:
    """Which calls have begun, how often, and which have ended. Workers and the program write to it."""

    def __init__(self, found: Found) -> None:
        self._found = found
        self._lock = threading.Lock()
        self.begun: Counter[int] = Counter()
        self.ended: dict[int, int] = {}
        """How often the calls have begun whose end was told, as their callers were told."""
        self.release = threading.Event()
        """Blocked calls go on."""

    def enter(self, number: int) -> int:
        with self._lock:
            self.begun[number] += 1
            if self.begun[number] > self.ended.get(number, sys.maxsize):
                self._found.breaches.append(f"call {number} began after its end was told")
        return -number

    async def task(self, number: int, seconds: float) -> int:
        value = self.enter(number)
        await asyncio.sleep(seconds)
        return value

    def thread(self, number: int, seconds: float) -> int:
        value = self.enter(number)
        time.sleep(seconds)
        return value

    async def stubborn(self, number: int, seconds: float) -> int:
        """Goes on for a while when it is cancelled."""
        value = self.enter(number)
        try:
            await asyncio.sleep(seconds)
        finally:
            await asyncio.sleep(0.005)
        return value

    async def blocking(self, number: int, seconds: float) -> int:
        """Blocks its loop, at times for longer than a worker has to end."""
        value = self.enter(number)
        self.release.wait(20 * seconds)
        return value

    def failing(self, number: int, _seconds: float) -> int:
        raise LookupError(self.enter(number))

    async def exiting(self, number: int, _seconds: float) -> int:
        self.enter(number)
        raise SystemExit(3)


_KINDS: Final = {"task": 40, "thread": 30, "stubborn": 5, "blocking": 2, "failing": 5, "exiting": 1}


class Round:
    """A runner, its calls, and the strikes at its workers."""

    def __init__(self, seed: str, found: Found) -> None:
        self._decide = random.Random(seed)
        self._found = found
        self._ledger = Ledger(found)
        self._room = asyncio.Semaphore(ROOM)
        self._calls: dict[int, asyncio.Future[Any]] = {}
        choice = self._decide.choice
        self.runner = percore.Runner(
            self._decide.randint(1, 3),
            engine="threads",
            threads=choice([1, 2, 4]),
            concurrency=choice([2, 20, 100]),
            max_tasks_per_worker=choice([None, 200]),
            per_key=choice([None, 1]),
            kill_after=0.3,
        )

    async def run(self, kills: int) -> None:
        """Strike so often while calls are made. Close, and look what is left."""
        await asyncio.to_thread(_join_workers)  # the loop's own threads, and what uvloop keeps for its signals, come first
        new_loop().close()
        before = leaks.snapshot()
        async with asyncio.timeout(LIMIT):
            await self.runner.start()
        striking = asyncio.create_task(self._strike(kills))
        number = 0
        while number < CALLS and not striking.done():
            await self._room.acquire()
            number += 1
            self._submit(number)
        await striking
        results = await asyncio.wait_for(self.runner.options(retries=100).map(abs, range(-50, 0)).collect(), LIMIT)
        if results != [*range(50, 0, -1)]:
            self._found.breaches.append("it gave wrong results at the end")
        self._found.given_up += self.runner.statistics().given_up
        async with asyncio.timeout(LIMIT):
            await self.runner.aclose(grace=self._decide.choice([None, 0.0, 0.1]))
        if self._calls:
            await asyncio.wait(list(self._calls.values()), timeout=LIMIT)
        self._found.breaches += [f"call {number} hangs" for number in self._calls]
        self._found.rounds += 1
        self._ledger.release.set()
        await asyncio.to_thread(_join_workers)
        self._found.breaches += leaks.since(before)

    def _submit(self, number: int) -> None:
        kind = self._decide.choices(list(_KINDS), list(_KINDS.values()))[0]
        options: dict[str, Any] = {}
        if self._decide.random() < 0.2:
            options["retries"] = RETRIES
        if self._decide.random() < 0.2:
            options["key"] = f"key{self._decide.randrange(3)}"
        submit = self.runner.options(**options).submit if options else self.runner.submit
        future = submit(getattr(self._ledger, kind), number, self._decide.random() ** 3 / 20)
        self._calls[number] = future
        future.add_done_callback(partial(self._done, number, options.get("retries", 0) + 1))
        if self._decide.random() < 0.08:
            asyncio.get_running_loop().call_later(self._decide.random() / 50, future.cancel)

    def _done(self, number: int, attempts: int, future: asyncio.Future[Any]) -> None:
        del self._calls[number]
        self._room.release()
        begun = self._ledger.begun[number]
        outcome = "cancelled" if future.cancelled() else (future.exception() or future.result())
        # Nobody takes back at once what is cancelled or closed over. A call counts as begun before its function runs: in the thread
        # of a worker that is given up just then, it runs a moment later.
        if isinstance(outcome, percore.WorkerDied):
            self._ledger.ended[number] = outcome.attempts
        elif isinstance(outcome, int):
            self._ledger.ended[number] = begun
        name = {int: "value", str: "cancelled"}.get(type(outcome), type(outcome).__name__)
        self._found.outcomes[name] += 1
        if not _may_be(outcome, number, begun, attempts):
            self._found.breaches.append(f"call {number}, which has begun {begun} times of {attempts}, ended with {outcome!r}")

    async def _strike(self, kills: int) -> None:
        while kills > 0:
            await asyncio.sleep(self._decide.expovariate(1 / 0.03))
            kind = self._decide.choices(list(_STRIKES), list(_STRIKES.values()))[0]
            workers = [member.worker for member in members_of(self.runner)]
            ready = [one.index for one in self.runner.statistics().workers if one.state == "ready"]
            if not ready:
                continue
            self._found.strikes[kind] += 1
            if kind in ("reload", "resize"):
                change = self.runner.reload() if kind == "reload" else self.runner.resize(self._decide.randint(1, 3))
                with contextlib.suppress(percore.StartupFailed):
                    await asyncio.wait_for(change, LIMIT)
                continue
            victim = current_member(self.runner, self._decide.choice(ready))
            assert victim is not None
            for worker in workers if kind == "all" else [victim.worker]:
                worker.kill({"drain": signal.SIGTERM, "stop": signal.SIGSTOP}.get(kind, signal.SIGKILL))
                kills -= kind in ("kill", "all")
            if kind == "stop":
                asyncio.get_running_loop().call_later(self._decide.random(), victim.worker.kill, signal.SIGCONT)


def _may_be(outcome: object, number: int, begun: int, attempts: int) -> bool:
    """Whether a call that has begun so often may have ended so."""
    match outcome:
        case percore.WorkerDied():
            return begun <= attempts if outcome.started else begun == 0 or attempts > 1
        case int():
            return outcome == -number and 1 <= begun <= attempts
        case LookupError():
            return outcome.args == (-number,) and 1 <= begun <= attempts
        case percore.RemoteError():
            return outcome.type_name == "SystemExit" and 1 <= begun <= attempts
        case "cancelled" | percore.RunnerClosed():
            return begun <= attempts
        case _:
            return False


def _join_workers() -> None:
    """Wait until the threads of workers have ended, also of those that were given up."""
    for thread in threading.enumerate():
        if thread.name.startswith("percore-") and thread is not threading.current_thread():
            thread.join(LIMIT)


async def _rounds(seed: str, kills: int, found: Found, tell: Callable[[str], object]) -> None:
    while found.strikes["kill"] + found.strikes["all"] < kills:
        await Round(f"{seed}/{found.rounds}", found).run(min(kills, 40))
        tell(f"  round {found.rounds}: {found.outcomes.total()} calls, {len(found.breaches)} breaches")


def main() -> int:
    kills = int(os.environ.get("CHAOS_KILLS") or 300)
    seed = os.environ.get("CHAOS_SEED") or str(int.from_bytes(os.urandom(3), "big"))
    logging.getLogger("percore").setLevel(logging.ERROR)
    found = Found()
    Complaints(found.breaches.append)
    warnings.filterwarnings("ignore", 'engine="threads"', RuntimeWarning)

    def tell(line: str) -> None:
        sys.stdout.write(line + "\n")
        sys.stdout.flush()

    tell(f"chaos of threads: {kills} kills, CHAOS_SEED={seed}")
    began = time.monotonic()
    asyncio.run(_rounds(seed, kills, found, tell))
    for name, counts in (("strikes", found.strikes), ("calls", found.outcomes)):
        tell(f"  {name:<12} " + ", ".join(f"{count} {kind}" for kind, count in counts.most_common()))
    tell(f"  given up     {found.given_up} workers, {time.monotonic() - began:.0f} s")
    tell(f"  breaches     {len(found.breaches)}")
    for breach in found.breaches[:50]:
        tell(f"! {breach}")
    return 1 if found.breaches or not found.given_up else 0


if __name__ == "__main__":
    sys.exit(main())
