"""What a row is, and how it is played: settings tried, contestants opened and warmed up, then interleaved rounds."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from benchmarks._figures import Limit, Target, quantile
from benchmarks._pinning import Pin

if TYPE_CHECKING:
    from pathlib import Path

Sample = Mapping[str, float]
"""What one round of one contestant gave, by the name of the metric: seconds, unless the row says otherwise; less is better."""

Round = Callable[[], Awaitable[Sample]]
"""Does the work once and tells how long it took. It checks its results: a wrong one raises, it is never only slow."""

Contestant = Callable[[], AbstractAsyncContextManager[Round]]
"""Starts what it needs, yields its round, and ends and reaps what it started."""

Settings = Mapping[str, Contestant]
"""One contestant in several settings, by what they are called: the fastest one plays."""

OURS = "percore"
"""The names of our own contestants begin so. Their failure fails the row; a peer that fails is left out."""


@dataclass(frozen=True, slots=True)
class Row:
    """One measurement.

    The contestants are opened in the order given and closed in the reverse one. The first of their metrics is the one
    that matters most. Each setting is tried for `trials` rounds, and chosen by that metric unless `choose_by` names
    another. Those named in `anew` are opened and warmed up for each of their rounds alone: they do something even when
    they have nothing to do. `seconds` is what the row wants of a whole run's time: it stops after `rounds` rounds, or
    when that is used up. Where there are targets, those that no target names play in the first `shown` rounds only: what
    is judged gets the time. `words` tells how a metric is written that is not in seconds; `derive` adds to the samples what
    takes several contestants to tell; `draw` makes a plot of the result in a file, with matplotlib.
    """

    contestants: Mapping[str, Contestant | Settings]
    targets: Sequence[Target | Limit]
    rounds: int = 9
    shown: int = 3
    seconds: float = 60.0
    warm_ups: int = 1
    trials: int = 2
    anew: frozenset[str] = frozenset()
    pin: Pin = Pin.NOTHING
    choose_by: str | None = None
    is_cheap: bool = False
    words: Mapping[str, Callable[[float], str]] = field(default_factory=dict)
    derive: Callable[[Result], None] | None = None
    draw: Callable[[Result, Path], None] | None = None

    @property
    def has_ratios(self) -> bool:
        return any(isinstance(target, Target) for target in self.targets)

    @property
    def judged(self) -> set[str]:
        """The contestants that a target names."""
        return {name for target in self.targets for name in target.contestants}


@dataclass(frozen=True, slots=True)
class Choice:
    """The setting that a contestant plays with, and what the trial of each gave, in the metric that decides."""

    setting: str
    tried: Mapping[str, float]


@dataclass(slots=True)
class Result:
    """The samples of a row, by contestant, one a round; why a contestant was left out; the settings chosen; the time it took."""

    samples: dict[str, list[Sample]] = field(default_factory=dict)
    absent: dict[str, str] = field(default_factory=dict)
    choices: dict[str, Choice] = field(default_factory=dict)
    seconds: float = 0.0

    @property
    def rounds(self) -> int:
        return max(map(len, self.samples.values()), default=0)

    def values(self, contestant: str, metric: str) -> list[float]:
        return [sample[metric] for sample in self.samples[contestant]]


_PATIENCE = 20.0


@dataclass(frozen=True, slots=True)
class Wanted:
    """How much of a row is played: how long (`rounds` rounds at least), who, and with which settings.

    Settings that are not named are tried; with `untried` the first of each plays.
    """

    seconds: float | None = None
    rounds: int = 1
    only: frozenset[str] | None = None
    settings: Mapping[str, str] = field(default_factory=dict)
    untried: bool = False
    patience: float | None = None
    """Seconds after which a peer that is being opened, tried or played is given up; else `seconds`, and _PATIENCE at least."""

    @property
    def patience_with_peers(self) -> float | None:
        if self.patience is not None or self.seconds is None:
            return self.patience
        return max(_PATIENCE, self.seconds)


def rotated(names: Sequence[str], by: int) -> list[str]:
    """The order of a round: nobody always follows the same neighbour's garbage and warm caches."""
    start = by % len(names) if names else 0
    return [*names[start:], *names[:start]]


async def measure(row: Row, wanted: Wanted | None = None, *, clock: Callable[[], float] = time.perf_counter) -> Result:
    """Plays the row: at least as many rounds as are wanted, then as many as there are and as the time allows.

    A peer that is not installed or fails is left out; a failure of percore's is raised. Whatever was started has ended when
    it returns, raises or is cancelled.
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
        """What a peer cannot do leaves it out, from the beginning on: rounds without a partner compare nothing."""
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
        if name not in self._wanted.settings and not self._wanted.untried:
            for setting, contestant in settings.items():
                tried[setting] = await self._trial(contestant)
            best = min(tried, key=tried.__getitem__)
        self._result.choices[name] = Choice(best, tried)
        return settings[best]

    async def _trial(self, contestant: Contestant) -> float:
        """The best of its rounds: what disturbs one of them is not the setting's fault."""
        async with contestant() as once:
            await self._warm_up(once)
            samples = [await self._timed(once) for _ in range(self._row.trials)]
        return min(sample[self._row.choose_by or next(iter(sample))] for sample in samples)

    async def _warm_up(self, once: Round) -> None:
        for _ in range(self._row.warm_ups):
            await once()

    async def _timed(self, once: Round) -> Sample:
        self._row.pin.apply()
        gc.collect()  # or the garbage of one contestant is collected in the time of the next
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
        if name in self._playing:
            self._result.samples[name].append(await self._timed(self._playing[name]))
            return
        async with self._anew[name]() as once:
            await self._warm_up(once)
            self._result.samples[name].append(await self._timed(once))


def median_of(result: Result, contestant: str, metric: str) -> float:
    return quantile(result.values(contestant, metric), 0.5)
