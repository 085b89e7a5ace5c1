"""Runs a program under virtual time: clocks jump to the next timer, messages come late by chance, and workers die by chance.

All chance comes from one seed. The event loop is a SelectorEventLoop whose selector does three things:

- It holds back each descriptor that became readable, for a while that the seed gives. So answers of workers overtake each other.
- When nothing can be done now, it moves the clock to whatever is due next, and returns.
- While a thread runs a plain function, it waits for it, and the clock stands still.

percore's modules have read the names of the system's clocks when they were imported; they get the loop's clock for the time of the
simulation.
"""

from __future__ import annotations

import asyncio
import random
import selectors
import sys
import time
from contextlib import contextmanager
from importlib import import_module
from itertools import count
from typing import TYPE_CHECKING, Any, Final, TypeVar

import percore
from percore._runner.early import LATER, MODULES
from percore._testing.engine import FakeEngine, living_workers

if TYPE_CHECKING:
    from collections.abc import Callable, Coroutine, Iterator, Mapping

T = TypeVar("T")

_CLOCKS: Final = ("monotonic", "monotonic_ns", "perf_counter")
_PATIENCE: Final = 0.02
"""Real seconds that a thread may run without a sign until the clock moves on: it may wait for what the loop does later."""

_HANGS: Final = 2.0
"""Real seconds without any timer or event, after which the program counts as hanging."""


class Hangs(Exception):
    """Nothing is left that could happen, and the program has not ended."""


class Selector(selectors.BaseSelector):
    """The selector of a simulated loop, and its clock."""

    def __init__(self, chance: random.Random, latency: float) -> None:
        self.now = 1_000.0
        self._inner = selectors.DefaultSelector()
        self._chance = chance
        self._latency = latency
        self._ranks: dict[int, int] = {}
        self._numbers = count()
        self._held: dict[int, float] = {}
        """Until when a descriptor is held back."""

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        """Register a descriptor. Those that were registered first come first."""
        key = self._inner.register(fileobj, events, data)
        self._ranks[key.fd] = next(self._numbers)
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        """Forget a descriptor."""
        key = self._inner.unregister(fileobj)
        self._held.pop(key.fd, None)
        return key

    def modify(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        """Change what is waited for."""
        return self._inner.modify(fileobj, events, data)

    def get_map(self) -> Mapping[Any, selectors.SelectorKey]:
        """Return the registered descriptors."""
        return self._inner.get_map()

    def close(self) -> None:
        """Close the selector."""
        self._inner.close()

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """Return what is ready now. If nothing is and nobody runs, move the clock to what comes next.

        Raises:
            Hangs: nothing can come.
        """
        found = self._released(0)
        if found or (timeout is not None and timeout <= 0):
            return found
        if _threads_run():
            found = self._released(_PATIENCE)
            if found or self._held:
                return found
        steps = [*self._held.values(), *(() if timeout is None else (self.now + timeout,))]
        if not steps:
            found = self._released(_HANGS)
            if not (found or self._held):
                raise Hangs("the program waits for something that never comes: no timer runs, and no message is under way")
            return found
        self.now = max(self.now, min(steps))
        return self._released(0)

    def _released(self, timeout: float) -> list[tuple[selectors.SelectorKey, int]]:
        """Return what is readable and not held back, and hold back what was not readable before."""
        found = []
        for key, events in sorted(self._inner.select(timeout), key=lambda one: self._ranks[one[0].fd]):
            if self._ranks[key.fd] and key.fd not in self._held:  # the first one is the loop's own, which threads wake it with
                self._held[key.fd] = self.now + self._chance.random() * self._latency
            if self._held.get(key.fd, 0.0) <= self.now:
                self._held.pop(key.fd, None)
                found.append((key, events))
        return found


class VirtualLoop(asyncio.SelectorEventLoop):
    """An event loop under virtual time."""

    def __init__(self, chance: random.Random, latency: float) -> None:
        self.clock = Selector(chance, latency)
        super().__init__(self.clock)
        self._clock_resolution = 1e-9  # else a timer that is due within the resolution of the real clock would end early

    def time(self) -> float:
        """Return the virtual time in seconds."""
        return self.clock.now


def run(main: Callable[[], Coroutine[Any, Any, T]], seed: int, deaths: float, latency: float) -> T:
    """Run a program; see `percore.testing.simulate`."""
    chance = random.Random(seed)
    loop = VirtualLoop(chance, latency)
    with _virtual_clocks(loop), asyncio.Runner(loop_factory=lambda: loop) as runner:
        return runner.run(_beside_deaths(main, chance, deaths))


async def _beside_deaths(main: Callable[[], Coroutine[Any, Any, T]], chance: random.Random, deaths: float) -> T:
    dying = asyncio.create_task(_let_die(chance, deaths)) if deaths else None
    try:
        return await main()
    finally:
        if dying is not None:
            dying.cancel()


async def _let_die(chance: random.Random, deaths: float) -> None:
    while True:
        await asyncio.sleep(chance.expovariate(deaths))
        if workers := living_workers():
            chance.choice(workers).kill()


def _threads_run() -> bool:
    return any(not worker.core.server.threads.is_idle() for worker in living_workers())


class _Time:
    """The module `time`, as percore's modules see it during a simulation."""

    def __init__(self, clocks: dict[str, Callable[[], float]]) -> None:
        vars(self).update(clocks)

    def __getattr__(self, name: str) -> Any:
        return getattr(time, name)


@contextmanager
def _virtual_clocks(loop: VirtualLoop) -> Iterator[None]:
    """Give percore's modules the clock of the loop, and all runners fake workers."""
    clocks: dict[str, Callable[[], float]] = {
        "monotonic": loop.time,
        "perf_counter": loop.time,
        "monotonic_ns": lambda: int(loop.time() * 1e9),
    }
    shim = _Time(clocks)
    changed: list[tuple[Any, str, Any]] = []
    _import_all()
    for name, module in list(sys.modules.items()):
        if name.startswith("percore.") and not name.startswith("percore._testing."):
            for clock in (*_CLOCKS, "time"):
                value = vars(module).get(clock)
                if value is time or (value is not None and value is getattr(time, clock, None)):
                    changed.append((module, clock, value))
                    setattr(module, clock, shim if value is time else clocks[clock])
    changed.append((percore.Runner, "_make_engine", percore.Runner._make_engine))
    percore.Runner._make_engine = FakeEngine
    # Nobody can watch the program, and a page in each half second of virtual time would take most of the real time.
    publication: Any = sys.modules["percore._supervisor.publication"]
    changed.append((publication, "HAS_MEMFD", publication.HAS_MEMFD))
    publication.HAS_MEMFD = False
    try:
        yield
    finally:
        for owner, name, value in changed:
            setattr(owner, name, value)


def _import_all() -> None:
    """Import what a runner imports when it starts, so that its clocks can be replaced."""
    for name in vars(percore)["__all__"]:
        getattr(percore, name)
    for name in (*MODULES, *LATER):
        import_module(name)
