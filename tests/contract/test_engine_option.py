"""`engine=`: each start of a runner asks its choice for a maker, opens it, and has it make the engine, or abandons it."""

import asyncio
from collections.abc import Callable
from typing import Any

import pytest

from percore import Runner, RunnerClosed
from percore._common.engines import EngineChoice, Maker
from percore._common.options import RunnerOptions
from tests import jobs
from tests.fakes import FakeEngine

pytestmark = pytest.mark.asyncio_only


class FakeMaker(Maker):
    def __init__(self, steps: list[str], open_: Callable[[], Any], make: Callable[[], Any]) -> None:
        self.steps, self._open, self._make = steps, open_, make

    async def open(self, options: RunnerOptions) -> RunnerOptions:
        self.steps.append("open")
        await self._open()
        return options._replace(workers=3) if options.is_counted else options

    def make(self, loop: asyncio.AbstractEventLoop, options: RunnerOptions, main: Any, /) -> FakeEngine:
        self.steps.append("make")
        self._make()
        return FakeEngine(loop, options, main)

    async def abandon(self) -> None:
        self.steps.append("abandon")


class FakeChoice(EngineChoice):
    def __init__(self, open_: Callable[[], Any] = lambda: asyncio.sleep(0), make: Callable[[], Any] = lambda: None) -> None:
        self.steps: list[str] = []
        self._given = (self.steps, open_, make)

    def _maker(self) -> FakeMaker:
        return FakeMaker(*self._given)


async def test_an_engine_object_serves_any_number_of_runners_and_may_count_their_workers() -> None:
    choice = FakeChoice()
    async with Runner(engine=choice) as runner, Runner(1, engine=choice) as other:
        assert await runner.run(jobs.add, 4, 4) == await other.run(jobs.add, 4, 4) == 8
        assert (len(runner.statistics().workers), len(other.statistics().workers)) == (3, 1)
        assert "workers=3" in repr(runner)
    assert choice.steps == ["open", "make"] * 2


async def fails() -> None:
    raise OSError("no cluster")


def breaks() -> None:
    raise MemoryError("no room")


async def test_a_maker_whose_engine_is_not_made_is_abandoned() -> None:
    for choice, error, steps in [
        (FakeChoice(fails), OSError, ["open", "abandon"]),
        (FakeChoice(make=breaks), MemoryError, ["open", "make", "abandon"]),
    ]:
        runner = Runner(engine=choice)
        with pytest.raises(error):
            await runner.start()
        assert choice.steps == steps
        await runner.aclose()


async def test_a_start_that_is_cancelled_or_closed_meanwhile_abandons_its_maker() -> None:
    begun, go_on = asyncio.Event(), asyncio.Event()

    async def waits() -> None:
        begun.set()
        await go_on.wait()

    choice = FakeChoice(waits)
    start = asyncio.create_task(Runner(engine=choice).start())
    await begun.wait()
    start.cancel()
    with pytest.raises(asyncio.CancelledError):
        await start

    begun.clear()
    runner = Runner(engine=choice)
    start = asyncio.create_task(runner.start())
    await begun.wait()
    await runner.aclose()
    go_on.set()
    with pytest.raises(RunnerClosed, match="closed while it started"):
        await start
    assert choice.steps == ["open", "abandon"] * 2
