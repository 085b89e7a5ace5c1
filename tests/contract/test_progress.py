"""`map(..., progress=...)`: what a callback is told, and that showing costs a map nothing but its own errors."""

import asyncio
import gc
import logging
from typing import Any

import pytest

import percore
from percore import Progress
from tests import jobs
from tests.contract.conftest import MakeRunner, worker_of
from tests.contract.pipes import Gate, Log
from tests.internals import supervisor_of


class Told:
    """A callback that keeps what it is told, and can be waited for."""

    def __init__(self) -> None:
        self.all: list[Progress] = []
        self._news = asyncio.Event()

    def __call__(self, progress: Progress) -> None:
        self.all.append(progress)
        self._news.set()

    async def until(self, done: int) -> Progress:
        while self.all[-1].done < done:
            self._news.clear()
            await self._news.wait()
        return self.all[-1]


async def test_a_callback_is_told_how_far_the_map_is(make: MakeRunner, log: Log, gate: Gate, other_gate: Gate) -> None:
    told, count = Told(), 4
    rows = [(log.path, gate.path, other_gate.path, place, 1) for place in range(count)]
    async with make(2) as runner:
        mapped = runner.starmap(jobs.wait_or_fail, rows, return_exceptions=True, progress=told)
        assert told.all == []  # a map that is not used shows nothing
        collecting = asyncio.create_task(mapped.collect())
        await log.take(count - 1)
        first = told.all[0]
        assert (first.function, first.done, first.failed, first.total, first.is_over) == ("wait_or_fail", 0, 0, count, False)
        seen = await told.until(1)
        assert (seen.done, seen.pulled, seen.failed, seen.workers, seen.is_over) == (1, count, 1, 2, False)
        assert 1 <= seen.busy <= 2
        assert seen.rate is not None
        assert seen.eta is not None
        gate.open()
        other_gate.open()
        await collecting
    last = told.all[-1]
    assert (last.done, last.failed, last.pulled, last.total, last.is_over) == (count, 1, count, count, True)
    assert [one.is_over for one in told.all].count(True) == 1
    assert [one.done for one in told.all] == sorted(one.done for one in told.all)


async def test_every_verb_and_every_end_tells_the_end(  # noqa: C901  # one story of each end
    make: MakeRunner, log: Log, gate: Gate, subtests: pytest.Subtests
) -> None:
    async with make(1) as runner:

        async def streamed(told: Told) -> None:
            async for _ in runner.map(jobs.echo, iter(range(3)), progress=told):
                pass

        async def pairs(told: Told) -> None:
            assert await runner.map_items(jobs.echo, [1, 2, 3], progress=told) == [(1, 1), (2, 2), (3, 3)]

        async def starred(told: Told) -> None:
            assert await runner.starmap(jobs.add, [(1, 2)] * 3, progress=told) == [3] * 3

        async def failing(told: Told) -> None:
            with pytest.raises(ValueError, match="no"):
                await runner.map(jobs.fail, [ValueError("no")] * 3, window=1, progress=told)

        async def left(told: Told) -> None:
            async with runner.map(jobs.echo, range(1000), window=2, progress=told) as results:
                assert await anext(results) == 0

        async def dropped(told: Told) -> None:
            results: Any = runner.map(jobs.echo, range(1000), window=2, progress=told)
            assert await anext(results) == 0
            del results
            gc.collect()
            while not told.all[-1].is_over:  # noqa: ASYNC110  # the loop closes the generator in its next turns
                await asyncio.sleep(0)

        async def cancelled(told: Told) -> None:
            task = asyncio.create_task(runner.map(jobs.await_, [log.path], [gate.path], progress=told).collect())
            await log.next()
            task.cancel()
            await asyncio.wait([task])

        for end in (streamed, pairs, starred, failing, left, dropped, cancelled):
            with subtests.test(end=end.__name__):
                told = Told()
                await end(told)
                assert told.all[-1].is_over
                assert [one.is_over for one in told.all].count(True) == 1
                assert told.all[0].total == {"streamed": None, "left": 1000, "dropped": 1000, "cancelled": 1}.get(end.__name__, 3)


async def test_a_death_counts_as_failures_or_retries(make: MakeRunner, log: Log, gate: Gate) -> None:
    told = Told()
    async with make(1) as runner:
        mapped = runner.map(jobs.await_, [log.path], [gate.path], [1], return_exceptions=True, progress=told)
        collecting = asyncio.create_task(mapped.collect())
        await log.next()
        worker_of(runner).kill()
        (death,) = await collecting
        assert isinstance(death, percore.WorkerDied)
    assert (told.all[-1].done, told.all[-1].failed) == (1, 1)


async def test_a_callback_that_raises_is_logged_and_the_map_goes_on(make: MakeRunner, caplog: pytest.LogCaptureFixture) -> None:
    calls = []

    def fail(progress: Progress) -> None:
        calls.append(progress)
        raise ValueError("no such bar")

    async with make(1) as runner:
        assert await runner.map(jobs.echo, range(100), progress=fail) == list(range(100))
    assert len(calls) == 1
    (record,) = [record for record in caplog.records if record.levelno == logging.ERROR]
    assert record.getMessage() == "percore: the progress of echo cannot be shown; its map goes on"
    assert "no such bar" in caplog.text


async def test_a_callback_may_close_the_runner(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(1) as runner:
        closing: list[asyncio.Task[None]] = []

        def close(progress: Progress) -> None:
            if not closing:
                closing.append(asyncio.create_task(runner.aclose(grace=0)))

        with pytest.raises(percore.RunnerClosed):
            await runner.map(jobs.await_, [log.path], [gate.path], progress=close)
        await closing[0]
        assert supervisor_of(runner).closing.is_over


async def test_progress_as_text_and_none(make: MakeRunner, capsys: pytest.CaptureFixture[str]) -> None:
    async with make(1) as runner:
        for progress in (None, False):
            assert await runner.map(jobs.echo, [1], progress=progress) == [1]
        assert capsys.readouterr().err == ""
        assert await runner.map(jobs.echo, [1, 2], progress="text") == [1, 2]
        assert capsys.readouterr().err.startswith("echo: 2 of 2 (100 %) in ")
