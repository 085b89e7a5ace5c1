"""What a row is, and how it is played: settings tried, contestants opened and warmed up, then interleaved rounds."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable, Collection, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field, replace
from functools import wraps
from typing import TYPE_CHECKING, TypedDict, Unpack

from benchmarks.machine import Pin
from benchmarks.results import Choice, Result, Sample

if TYPE_CHECKING:
    from benchmarks.figures import Target, Unit
    from benchmarks.plots import Plot

Round = Callable[[], Awaitable[Sample]]
"""Does the work once and returns the time it took. It checks its results: a wrong one raises."""

Contestant = Callable[[], AbstractAsyncContextManager[Round]]
"""Starts its processes, yields its round, and ends and reaps everything that it started."""

Settings = Mapping[str, Contestant]
"""One contestant in several settings, by name: the fastest one plays."""

OURS = "percore"
"""Names of our own contestants begin with this. Their failure fails the row; a peer that fails is left out."""

PATIENCE = 20.0
"""Least number of seconds for opening, trying or playing a peer once, before it is left out."""


class How(TypedDict, total=False):
    """How a row is played; see Row."""

    rounds: int
    shown: int
    seconds: float
    warm_ups: int
    pin: Pin
    is_cheap: bool
    is_extra: bool
    choose_by: str


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement: its contestants, its targets and, from its decorator, how it is played.

    Contestants are opened in the order given, and closed in reverse. `seconds` is the row's wish for a part of the whole
    time: it stops after `rounds` rounds, or when its time is over. If there are targets, a contestant that no target names
    plays in the first `shown` rounds only. Without `warm_ups`, contestants warm up while they open. A contestant in `anew`
    uses CPU even without work: it is opened for each of its rounds alone. An extra row runs only if it is named: it is an
    experiment, or needs what `make bench` does not install. The first metric decides between settings, unless
    `choose_by` names another. `derive` adds metrics that need several contestants.
    """

    contestants: Mapping[str, Contestant | Settings]
    targets: Sequence[Target] = ()
    rounds: int = 9
    shown: int = 3
    seconds: float = 60.0
    warm_ups: int = 1
    pin: Pin = Pin.NOTHING
    is_cheap: bool = False
    is_extra: bool = False
    choose_by: str | None = None
    anew: frozenset[str] = frozenset()
    units: Mapping[str, Unit] = field(default_factory=dict)
    derive: Callable[[Result], None] | None = None
    plot: Plot | None = None

    @property
    def has_ratios(self) -> bool:
        return any(target.against is not None for target in self.targets)

    @property
    def judged(self) -> set[str]:
        """The contestants that a target names."""
        return {name for target in self.targets for name in target.contestants}


MakeRow = Callable[[bool], Row]
"""Makes a row; the argument says whether it is only a quick run, with fewer calls."""

ROWS: dict[str, MakeRow] = {}


def row(**how: Unpack[How]) -> Callable[[MakeRow], MakeRow]:
    """Register a row under its function's name, and say how it is played. The docstring's first line is the title."""

    def register(make: MakeRow) -> MakeRow:
        @wraps(make)
        def made(quick: bool) -> Row:
            return replace(make(quick), **how)

        ROWS[make.__name__] = made
        return made

    return register


@dataclass(frozen=True, slots=True)
class Wanted:
    """The part of a row to play: for how long (at least `rounds` rounds), which contestants, and with which settings.

    Settings that are not given are tried; in a `quick` run the first of each plays.
    """

    seconds: float | None = None
    rounds: int = 1
    quick: bool = False
    only: Collection[str] | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    patience: float | None = None

    @property
    def patience_with_peers(self) -> float | None:
        if self.patience is not None or self.seconds is None:
            return self.patience
        return max(PATIENCE, self.seconds)


def rotated(names: Sequence[str], by: int) -> list[str]:
    """The order of a round: no contestant always follows the same neighbour's garbage and warm caches."""
    start = by % len(names) if names else 0
    return [*names[start:], *names[:start]]


async def measure(row: Row, wanted: Wanted | None = None, *, clock: Callable[[], float] = time.perf_counter) -> Result:
    """Plays the row: the wanted number of rounds at least, then more as the time allows.

    A peer that is not installed or fails is left out; a failure of percore is raised. Everything that was started has ended
    when this returns, raises or is cancelled.
    """
    return await _Play(row, wanted or Wanted(), clock).play()


class _Play:
    def __init__(self, row: Row, wanted: Wanted, clock: Callable[[], float]) -> None:
        self._row = row
        self._wanted = wanted
        self._clock = clock
        self._result = Result()
        self._playing: dict[str, Round] = {}
        self._anew: dict[str, Contestant] = {}

    async def play(self) -> Result:
        began = self._clock()
        async with AsyncExitStack() as stack:
            for name, contestant in self._row.contestants.items():
                if self._wanted.only is None or name in self._wanted.only:
                    await self._trying(name, self._enter(name, contestant, stack))
            await self._rounds(began)
        self._result.seconds = self._clock() - began
        if self._row.derive is not None:
            self._row.derive(self._result)
        return self._result

    async def _trying(self, name: str, doing: Awaitable[None]) -> None:
        """A peer that fails loses its earlier rounds too: rounds without a partner compare nothing."""
        patience = None if name.startswith(OURS) else self._wanted.patience_with_peers
        try:
            async with asyncio.timeout(patience) as limit:
                await doing
        except Exception as error:
            if name.startswith(OURS) and not isinstance(error, ModuleNotFoundError):
                raise
            if limit.expired():
                self._result.absent[name] = f"it did not end within {patience:.0f} s"
            elif isinstance(error, ModuleNotFoundError):
                self._result.absent[name] = str(error)
            else:
                self._result.absent[name] = f"it failed: {type(error).__name__}: {error}"
            self._playing.pop(name, None)
            self._anew.pop(name, None)
            self._result.samples.pop(name, None)

    async def _enter(self, name: str, contestant: Contestant | Settings, stack: AsyncExitStack) -> None:
        opened = await self._chosen(name, contestant) if isinstance(contestant, Mapping) else contestant
        if name in self._row.anew:
            self._anew[name] = opened
        else:
            self._playing[name] = await stack.enter_async_context(opened())
            await self._warm_up(self._playing[name])
        self._result.samples[name] = []

    async def _chosen(self, name: str, settings: Settings) -> Contestant:
        tried: dict[str, float] = {}
        best = self._wanted.settings.get(name, next(iter(settings)))
        if name not in self._wanted.settings and not self._wanted.quick:
            for setting, contestant in settings.items():
                sample = await self._alone(contestant)
                tried[setting] = sample[self._row.choose_by or next(iter(sample))]
            best = min(tried, key=tried.__getitem__)
        self._result.choices[name] = Choice(best, tried)
        return settings[best]

    async def _alone(self, contestant: Contestant) -> Sample:
        async with contestant() as once:
            await self._warm_up(once)
            return await self._timed(once)

    async def _warm_up(self, once: Round) -> None:
        for _ in range(self._row.warm_ups):
            await once()

    async def _timed(self, once: Round) -> Sample:
        self._row.pin.apply()
        gc.collect()  # else the garbage of one contestant is collected in the time of the next
        return await once()

    async def _rounds(self, began: float) -> None:
        for number in range(self._row.rounds):
            started = self._clock()
            names = [name for name in self._result.samples if self._plays(name, number)]
            for name in rotated(names, number):
                await self._trying(name, self._once(name))
            if number + 1 < self._wanted.rounds or self._wanted.seconds is None:
                continue
            now = self._clock()
            if now + (now - started) > began + self._wanted.seconds:
                break

    def _plays(self, name: str, number: int) -> bool:
        is_there = name in self._playing or name in self._anew
        judged = self._row.judged
        return is_there and (number < self._row.shown or not judged or name in judged)

    async def _once(self, name: str) -> None:
        playing = self._playing.get(name)
        sample = await (self._alone(self._anew[name]) if playing is None else self._timed(playing))
        self._result.samples[name].append(sample)
