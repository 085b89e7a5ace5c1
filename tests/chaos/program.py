"""The program under test: python -m tests.chaos.program STORY ARGUMENTS. It tells its story on standard output."""

import asyncio
import contextlib
import faulthandler
import logging
import os
import random
import re
import signal
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, BinaryIO

import percore
from percore._engines.nodes.engine import NodesEngine
from tests.chaos import calls
from tests.chaos.history import KILL_AFTER
from tests.chaos.load import LIMIT, Load
from tests.e2e.fault_programs import fds, run, say
from tests.hosts import engine_of, host_runner
from tests.internals import members_of, slots_used, supervisor_of

faulthandler.register(signal.SIGUSR1, all_threads=True)

CALLS_A_ROUND = 20_000
LOST_AFTER = 3.0
"""Seconds after which a node is lost that does not beat."""


def _settings(decide: random.Random) -> dict[str, Any]:
    """Options of a round's runner."""
    return {
        "workers": decide.choices([1, 2, 3], [2, 5, 3])[0],
        "threads": decide.choice([1, 2, 4]),
        "concurrency": decide.choice([2, 20, 100]),
        "max_tasks_per_worker": decide.choice([None, None, 30, 500]),
        "max_memory_per_worker": decide.choice([None, None, 1 << 24]),  # many a worker has that after some seconds
        "max_pending": decide.choice([None, None, 100]),
        "per_key": decide.choice([None, 1, 3]),
        "contextvars": decide.choice([(), (calls.NUMBER,)]),
        "kill_after": KILL_AFTER,
    }


CLOSINGS = ["in order", "in a while", "at once", "cancelled"]


class Round:
    """One runner, from its start to its end, and all its calls."""

    def __init__(self, number: int, seed: str, folder: Path, method: Any, nodes: int) -> None:
        decide = random.Random(f"{seed}/{number}")
        self.number = number
        self._settings = _settings(decide)
        self._closing = decide.choice(CLOSINGS)
        self._seconds = decide.random() / 5
        self._folder = folder / str(number)
        self._folder.mkdir()
        self._settings["start_method"] = method
        patience = LOST_AFTER + 1 if nodes else 0.0
        self._settings["lifespan"] = partial(calls.serving, str(self._folder), self._settings["per_key"], patience)
        self._make = host_runner(nodes, LOST_AFTER) if nodes else percore.Runner
        self._load_seed = f"{seed}/{number}/load"
        self._change_seed = f"{seed}/{number}/changes"
        self._wrong: list[str] = []
        self._changes: Counter[str] = Counter()
        self._may_change = asyncio.Event()
        self._may_change.set()

    async def run(self, is_over: Callable[[], bool]) -> dict[str, Any]:
        """All of it: what there is to tell in the end."""
        before = _things()
        runner = self.runner = await self._start()
        load = Load(runner, self._load_seed, self._folder, 120)
        telling = asyncio.create_task(_tell_progress(load, runner))
        changing = [asyncio.create_task(self._change(runner, load, random.Random(f"{self._change_seed}/{n}"))) for n in range(2)]
        await load.feed(CALLS_A_ROUND, is_over)
        self._may_change.clear()
        await self._serves(runner)
        self._may_change.set()
        self._changes["replacement for memory"] = sum(worker.restarts_for_memory for worker in runner.statistics().workers)
        for _ in range(60):  # to be closed over
            load.submit()
        load.is_closing = True
        await self._close(runner)
        await asyncio.gather(*changing)
        hung = len(load.pending)  # each of them must be done now
        if load.tasks:
            await asyncio.wait(load.tasks, timeout=LIMIT)
        self._wrong += [f"{task.get_name()} still waits: {_stack(task)}" for task in load.tasks]
        telling.cancel()
        await asyncio.wait([telling])
        hung = max(hung, load.end())
        slots = slots_used(runner)
        settings = {name: value for name, value in self._settings.items() if isinstance(value, int | None)}
        story = {"round": self.number, "last": load.last, "hung": hung, "closing": self._closing, "settings": settings}
        del runner, self.runner, load, telling, changing
        for thread in threading.enumerate():
            if thread.name == "percore-host":  # it has ended its host, and ends
                thread.join(LIMIT)
        left = [f"{count} more {thing}" for thing, count in _more(before, _things()).items()]
        left += [f"{slots} slots of the arena"] if slots else []
        return {**story, "left": left, "wrong": self._wrong, "changes": self._changes}

    async def _start(self) -> percore.Runner:
        """A worker may be killed before it is ready: then the start fails, as it must in a first start, and is made once more."""
        while True:
            runner = self._make(**self._settings)
            try:
                async with asyncio.timeout(LIMIT):
                    await runner.start()
            except percore.StartupFailed:
                continue
            return runner

    async def _change(self, runner: percore.Runner, load: Load, decide: random.Random) -> None:
        """Replace the workers, or change their number, again and again. A worker that is killed in its start ends a change."""
        while not load.is_closing:
            await asyncio.sleep(decide.expovariate(1 / (4 if self._settings["start_method"] == "spawn" else 1)))
            await self._may_change.wait()
            kind = decide.choice(["reload", "resize"])
            change = runner.reload() if kind == "reload" else runner.resize(decide.randint(1, 4))
            try:
                async with asyncio.timeout(3 * LIMIT):
                    await change
                self._changes[kind] += 1
            except (percore.StartupFailed, percore.RunnerClosed) as error:
                self._changes[f"{kind} that ended with {type(error).__name__}"] += 1
            except TimeoutError:
                self._wrong.append(f"a {kind} took longer than {3 * LIMIT:g} s: {runner.statistics()}")

    async def _serves(self, runner: percore.Runner) -> None:
        """Whatever has happened. The limit is that of a standstill: with few calls a worker, a hundred calls need many starts."""
        loop, results = asyncio.get_running_loop(), []
        try:
            async with asyncio.timeout(LIMIT) as limit:
                async for result in runner.options(retries=1000).map(calls.accept, range(100)):
                    results.append(result)
                    limit.reschedule(loop.time() + LIMIT)
            if results != [1] * 100:
                self._wrong.append("after the faults it gave wrong results")
        except TimeoutError as error:
            raise TimeoutError(f"it did not serve within {LIMIT:g} s: {state_of(runner)}") from error

    async def _close(self, runner: percore.Runner) -> None:
        grace = {"in order": None, "in a while": self._seconds}.get(self._closing, 0.0)
        closing = asyncio.create_task(runner.aclose(grace=grace))
        if self._closing == "cancelled":
            await asyncio.sleep(self._seconds / 10)
            closing.cancel()
        done, _ = await asyncio.wait([closing], timeout=LIMIT)
        if not done:
            raise TimeoutError(f"it did not close within {LIMIT:g} s: {state_of(runner)}")
        if not closing.cancelled():
            closing.result()


async def _tell_progress(load: Load, runner: percore.Runner) -> None:
    """Once a second, that the judge knows a standstill."""
    while True:
        say("progress", load.ended)
        await asyncio.sleep(1)
        if not load.is_closing:
            runner.statistics()


def state_of(runner: percore.Runner) -> str:
    """What is known of its workers and calls."""
    workers = [
        f"{member.name} of generation {member.generation}, {member.life.state.value}, load {member.load}, "
        f"calls {sorted({call.function.name for call in member.calls.values()})}"
        for member in members_of(runner)
    ]
    return "\n".join([*workers, str(supervisor_of(runner).calls.waiting()) + " wait", repr(runner)])


def _stack(task: asyncio.Task[Any]) -> str:
    """Where it waits, down to the innermost await."""
    places = []
    inner: Any = task.get_coro()
    while inner is not None:
        frame = getattr(inner, "cr_frame", None) or getattr(inner, "ag_frame", None) or getattr(inner, "gi_frame", None)
        places.append(f"{frame.f_code.co_qualname}:{frame.f_lineno}" if frame else repr(inner))
        inner = getattr(inner, "cr_await", None) or getattr(inner, "ag_await", None) or getattr(inner, "gi_yieldfrom", None)
    return " > ".join(places)


def _things() -> dict[str, int]:
    """What a runner must not leave behind, by kind."""
    counts = {f"thread {thread.name}": 1 for thread in threading.enumerate()}
    for task in asyncio.all_tasks():
        name = f"task {task.get_name()}"
        counts[name] = counts.get(name, 0) + 1
    for target in fds():
        name = "descriptor of " + re.sub(r"\d+", "N", target)
        counts[name] = counts.get(name, 0) + 1
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    counts["mapping of a memfd"] = maps.count("/memfd:")
    return counts


def _more(before: dict[str, int], now: dict[str, int]) -> dict[str, int]:
    return {thing: count - before.get(thing, 0) for thing, count in now.items() if count > before.get(thing, 0)}


class Rounds:
    """Rounds until `control` says so, or ends. Meanwhile it may name hosts: their links are cut."""

    def __init__(self, seed: str, folder: Path, control: BinaryIO, method: str, nodes: int) -> None:
        self._make = partial(Round, seed=seed, folder=folder, method=method, nodes=nodes)
        self._control = control
        self._round: Round | None = None
        self._is_over = False

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        loop.slow_callback_duration = 60  # the pickling of megabytes is the load, not a fault
        loop.add_reader(self._control, self._hear)
        number = 0
        while not self._is_over:
            number += 1
            say("begins", number)
            self._round = self._make(number)
            say("round", await self._round.run(lambda: self._is_over))
        loop.remove_reader(self._control)

    def _hear(self) -> None:
        line = self._control.readline()
        if line[:1] == b"c":
            runner = getattr(self._round, "runner", None)
            if runner is not None:
                cut(engine_of(runner), int(line[1:]))
        else:
            self._is_over = True


def cut(engine: NodesEngine, host: int) -> None:
    """Cut the link to the node of this host, if it is there."""
    places: Any = engine._places
    for link in engine.links[:]:
        if link.node in places.hosts and places.hosts[link.node].pid == host:
            link.connection.cut()


def chaos(loop: str, method: str, seed: str, folder: str, control: str, nodes: str) -> None:
    """Rounds until `control` says so, or ends."""
    logging.getLogger("percore").setLevel(logging.ERROR)
    with open(control, "rb", buffering=0) as file:
        run(loop, Rounds(seed, Path(folder), file, method, int(nodes)).run())
    say("over")


async def _quietly(times: int) -> None:
    async with percore.Runner(1) as runner:
        for _ in range(times):
            with contextlib.suppress(percore.WorkerDied):
                await runner.run(calls.hold)
            failed = time.monotonic_ns()
            say("failed", [failed, await runner.run(calls.served)])


def quiet(loop: str, times: str) -> None:
    """Nothing but one call; its worker is killed, again and again."""
    logging.getLogger("percore").setLevel(logging.ERROR)
    run(loop, _quietly(int(times)))
    say("over")


if __name__ == "__main__":
    os.environ.pop("PERCORE_POINTS", None)
    globals()[sys.argv[1]](*sys.argv[2:])
