"""Maps of every kind, used at random until they are over: what they count always fits, and in the end they hold nothing."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest

import percore
from tests import jobs
from tests.contract.conftest import MakeRunner
from tests.counts import times
from tests.internals import current_member, held_by, pulls, slots_used, supervisor_of
from tests.waiting import until


class Walk:
    """One map, and the steps that its user, its input and its runner take."""

    def __init__(self, runner: percore.Runner, dice: random.Random) -> None:
        self.runner = runner
        self.dice = dice
        self.is_left = False
        self.input: Any = self._numbers() if dice.random() < 0.5 else self._anumbers()
        fn: Any = dice.choice([jobs.echo, jobs.aecho, jobs.refuse_some])
        make: Any = dice.choice([runner.map, runner.map_items])
        self.mapped: percore.Map[Any] = make(
            fn,
            self.input,
            window=dice.choice([None, 1, 7]),
            ordered=dice.random() < 0.5,
            return_exceptions=dice.random() < 0.5,
        )

    def _end(self) -> None:
        if self.dice.random() < 0.3:
            raise LookupError("the input failed")

    def _numbers(self) -> Iterator[int]:
        try:
            yield from range(self.dice.choice([0, 30, 10_000]))
            self._end()
        finally:
            self.is_left = True

    async def _anumbers(self) -> AsyncIterator[int]:
        try:
            for number in range(self.dice.choice([0, 30, 10_000])):
                if not self.dice.randrange(5):
                    await asyncio.sleep(0)
                yield number
            self._end()
        finally:
            self.is_left = True

    def check(self) -> None:
        """The invariants of a map under way, between two steps."""
        held = held_by(self.runner, self.mapped)
        if held is None:
            return
        assert held.handed_over <= held.ended <= held.pulled
        # A failed item cancels those after it: they never end, and are held no more.
        assert held.items == held.pulled - held.ended if pulls(self.mapped) else held.items <= held.pulled - held.ended
        assert held.admitted == held.inside

    async def use(self) -> None:
        """Take the results, as a list or one by one, and check after each."""
        if self.dice.random() < 0.3:
            await self.mapped
        else:
            async for _ in self.mapped:
                self.check()

    async def run(self) -> None:
        """Use the map, and interfere, until it is over. The errors that this brings about belong to it."""
        task = asyncio.create_task(self.use())
        steps = [self.mapped.aclose, self._cancel(task), self._kill, self._nothing]
        for _ in range(self.dice.randrange(1, 60)):
            await asyncio.sleep(0)
            self.check()
        await self.dice.choice(steps)()
        self.check()
        if self.dice.random() < 0.7:  # otherwise the map goes on to its end, or until the runner is left
            await self.mapped.aclose()
            self.is_over()
        else:
            await asyncio.wait([task])
        with contextlib.suppress(LookupError, ValueError, asyncio.CancelledError, percore.WorkerDied):
            await task

    def _cancel(self, task: "asyncio.Task[None]") -> Any:
        async def cancel() -> None:
            task.cancel()

        return cancel

    async def _kill(self) -> None:
        member = current_member(self.runner)
        if member is not None:  # else its start is delayed, since earlier ones were killed before they began a call
            member.worker.kill()

    async def _nothing(self) -> None:
        """Leave the map alone."""

    def is_over(self) -> None:
        """A map that is over holds no input, no item, no place and no admission."""
        held = held_by(self.runner, self.mapped)
        if held is not None:
            assert (held.items, held.inputs, held.admitted, held.inside, held.is_open) == (0, 0, 0, 0, False)


@pytest.mark.long
@pytest.mark.parametrize("max_pending", [None, 5])
async def test_a_map_that_is_over_holds_nothing(make: MakeRunner, max_pending: int | None) -> None:
    for seed in range(times(1, 500)):
        async with make(2, concurrency=3, threads=2, max_pending=max_pending) as runner, asyncio.timeout(20):
            for part in range(times(2, 4)):
                walk = Walk(runner, random.Random(f"{seed} {part}"))
                await walk.run()
                walk.is_over()
            await until(lambda: not supervisor_of(runner).closing.unfinished())
            assert await runner.map(jobs.aecho, range(9)) == list(range(9))
            assert slots_used(runner) == 0
