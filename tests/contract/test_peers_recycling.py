"""What has gone wrong in others when workers are replaced, iterators are left, and everything happens at once: a test for each."""

import asyncio
import contextlib
import gc
import itertools
import random
import signal
import threading
from collections.abc import Callable, Coroutine, Iterator
from typing import Any

import pytest

import percore
from tests import jobs
from tests.contract import peer_jobs
from tests.contract.conftest import MakeRunner
from tests.counts import LONG, times
from tests.internals import members_of, supervisor_of
from tests.waiting import until

BOTH = pytest.mark.parametrize("fn", [jobs.echo, jobs.aecho])


def recycling(test: Any) -> Any:
    return pytest.mark.long(pytest.mark.parametrize("limit", [1, 2, 3] if LONG else [2])(test))


# 8: recycling comes to a halt


@recycling
async def test_peers_8_a_worker_is_replaced_with_a_backlog_and_without(make: MakeRunner, limit: int) -> None:
    async with make(1, max_tasks_per_worker=limit, concurrency=1, threads=1) as runner:
        # One after the other: the pool is idle in between.
        for number in range(4 * limit):
            assert await runner.run(jobs.echo if number % 2 else jobs.aecho, number) == number
        assert await runner.map(jobs.echo, range(40)) == list(range(40))
        while runner.statistics().workers[0].generation < 4:
            await runner.run(jobs.aecho)


@recycling
async def test_peers_8_a_close_that_nobody_waits_for_runs_the_backlog(make: MakeRunner, limit: int) -> None:
    runner = make(2, max_tasks_per_worker=limit, concurrency=1, threads=1)
    await runner.start()
    futures = [runner.submit(jobs.echo if number % 2 else jobs.aecho, number) for number in range(60)]
    closing = asyncio.create_task(runner.aclose())
    assert await asyncio.gather(*futures) == list(range(60))
    await closing


@recycling
async def test_peers_8_a_runner_that_nobody_holds_any_more_ends_its_backlog(make: MakeRunner, limit: int) -> None:
    runner = make(1, max_tasks_per_worker=limit, concurrency=1)
    await runner.start()
    supervisor, assembly = supervisor_of(runner), runner._assembly
    futures = [runner.submit(jobs.aecho, number) for number in range(50)]
    await futures[0]
    with pytest.warns(ResourceWarning, match="unclosed"):  # noqa: PT031
        del runner
        gc.collect()
    await asyncio.wait(futures)
    for number, future in enumerate(futures):
        error = future.exception()
        assert isinstance(error, percore.RunnerClosed | percore.WorkerDied) or future.result() == number
    await until(lambda: not supervisor.members)  # the last worker may still be ending
    assert assembly is not None
    await assembly.engine.aclose()


# 9: recycling loses what is large


@recycling
@BOTH
async def test_peers_9_large_results_and_errors_of_workers_that_are_replaced(
    make: MakeRunner, fn: Callable[..., Any], limit: int
) -> None:
    async with make(2, max_tasks_per_worker=limit, concurrency=2, threads=2) as runner:
        data = jobs.pattern(1 << 20)
        fine = [runner.submit(fn, b"%04d" % number + data) for number in range(10)]
        failing: list[asyncio.Future[Any]] = [runner.submit(jobs.fail_large, 1 << 20) for _ in range(5)]
        for number, future in enumerate(fine):
            assert await future == b"%04d" % number + data
        for future in failing:
            await asyncio.wait([future])
            assert type(future.exception()) is ValueError
        assert runner.statistics().failed == 5


# 22: results of abandoned iterators are kept


@pytest.mark.parametrize("fn", [peer_jobs.give, peer_jobs.agive])
@pytest.mark.parametrize("how", ["abandoned", "failed"])
@pytest.mark.apart(because="each side has objects of its own, made by pickling")
async def test_peers_22_results_that_nobody_will_ask_for_are_let_go(make: MakeRunner, fn: Callable[..., Any], how: str) -> None:
    before = peer_jobs.arrived
    async with make() as runner:
        numbers: Any = itertools.count() if how == "abandoned" else [*range(12), "x", *range(12)]
        async with runner.map(fn, numbers, window=30) as results:
            with contextlib.suppress(TypeError):
                async for _ in results:
                    while how == "abandoned" and peer_jobs.arrived < before + 20:
                        await runner.run(jobs.aecho)
                    if how == "abandoned":
                        break
        while runner.statistics().running or runner.statistics().queued:
            await runner.run(jobs.aecho)
        del results, _
        await until(lambda: gc.collect() >= 0 and not peer_jobs.ALIVE)


# 24: submit after the close, while a map goes on lazily


async def test_peers_24_an_input_that_submits_after_the_close_ends_its_map(make: MakeRunner) -> None:
    runner = make()
    await runner.start()
    closing: list[asyncio.Task[None]] = []

    def numbers() -> Iterator[int]:
        for number in range(10):
            if number == 5:
                closing.append(asyncio.get_running_loop().create_task(runner.aclose()))
            elif number > 5 and closing[0].done():
                _ = runner.submit(jobs.aecho)
            yield number

    seen = []
    with pytest.raises(percore.RunnerClosed):  # noqa: PT012
        async for value in runner.map(jobs.aecho, numbers(), window=1):
            seen.append(value)
            if value == 5:
                await asyncio.sleep(0)
    assert seen == list(range(len(seen)))
    assert len(seen) >= 5
    await closing[0]


# 34, 40: everything at once


class Storm:
    """Calls, maps, cancellations, deaths, recycling and, some time, the close; every choice comes of the seed."""

    def __init__(self, make: MakeRunner, seed: int) -> None:
        self.chance = random.Random(seed)
        self.runner = make(
            self.chance.randint(1, 3),
            max_tasks_per_worker=self.chance.randint(1, 9),
            concurrency=self.chance.randint(1, 8),
            threads=self.chance.randint(1, 3),
            max_pending=self.chance.choice([None, None, 5]),
            kill_after=1.0,
        )
        self.outcomes: list[str] = []
        self.outcome = asyncio.Event()

    async def blow(self, steps: int) -> None:
        await self.runner.start()
        users = [asyncio.create_task(self._use(number)) for number in range(6)]
        while len(self.outcomes) < steps:
            await self.outcome.wait()
            self.outcome.clear()
        close = self.runner.aclose(grace=self.chance.choice([None, 0, 0.01]))
        closings = [asyncio.create_task(close), *(asyncio.create_task(self.runner.aclose()) for _ in range(2))]
        if self.chance.random() < 0.3:
            await asyncio.sleep(0)
            closings[self.chance.randrange(3)].cancel()
        await asyncio.wait([*users, *closings])
        for user in users:
            user.result()
        await self.runner.aclose()

    def _strike(self) -> None:
        members = [member for member in members_of(self.runner) if member.is_ready]
        if members and self.chance.random() < 0.1:
            self.chance.choice(members).worker.kill(self.chance.choice([signal.SIGKILL, signal.SIGTERM]))

    async def _use(self, number: int) -> None:
        while True:
            self._strike()
            self.outcomes.append(await self._step(self.chance.randrange(6), number))
            self.outcome.set()
            if self.outcomes[-1] == "RunnerClosed":
                return

    async def _step(self, kind: int, number: int) -> str:
        runner, fn = self.runner, self.chance.choice([jobs.echo, jobs.aecho])
        size = self.chance.choice([0, 10, 1000, 200_000])
        step: Coroutine[Any, Any, Any]
        if kind == 0:
            step = self._map(fn)
        elif kind == 1:
            step = self._nested(fn, number)
        else:
            step = runner.run(fn, bytes([number]) * size)
        task = asyncio.ensure_future(step)
        if kind == 2:
            await asyncio.sleep(0)
            task.cancel()
        await asyncio.wait([task])
        if task.cancelled():
            return "cancelled"
        error = task.exception()
        assert error is None or isinstance(error, percore.WorkerDied | percore.RunnerClosed | percore.RunnerFull), error
        expected = list(range(20)) if kind == 0 else number if kind == 1 else bytes([number]) * size
        assert error is not None or task.result() == expected
        return type(error).__name__ if error is not None else "value"

    async def _map(self, fn: Callable[..., Any]) -> Any:
        return await self.runner.map(fn, range(20), window=self.chance.choice([None, 3]))

    async def _nested(self, fn: Callable[..., Any], number: int) -> Any:
        """From the callback of one call another one is submitted."""
        inner: asyncio.Future[Any] = asyncio.get_running_loop().create_future()

        def go_on(first: "asyncio.Future[Any]") -> None:
            first.exception()  # it may well have died
            try:
                self.runner.submit(fn, number).add_done_callback(_passing_on(inner))
            except (percore.RunnerClosed, percore.RunnerFull) as error:
                inner.set_exception(error)

        self.runner.submit(fn).add_done_callback(go_on)
        return await inner


def _passing_on(target: "asyncio.Future[Any]") -> "Callable[[asyncio.Future[Any]], None]":
    def done(future: "asyncio.Future[Any]") -> None:
        error = future.exception()
        if error is not None:
            target.set_exception(error)
        else:
            target.set_result(future.result())

    return done


@pytest.mark.long
@pytest.mark.timeout(200)
@pytest.mark.parametrize("seed", [1, 2, 3] if LONG else [1])
async def test_peers_34_calls_recycling_deaths_and_close_in_any_order(make: MakeRunner, seed: int) -> None:
    for round_ in range(times(1, 2)):
        storm = Storm(make, 1000 * seed + round_)
        await storm.blow(times(20, 100))
        assert storm.outcomes.count("value") > 0


@recycling
async def test_peers_40_many_threads_submit_while_workers_are_replaced(make_real: MakeRunner, limit: int) -> None:
    async with make_real(2, max_tasks_per_worker=limit) as runner:
        loop = asyncio.get_running_loop()
        results: list[list[Any]] = [[] for _ in range(8)]
        refused: list[BaseException] = []

        def submit(place: int) -> None:
            for number in range(12):
                fn = jobs.echo if number % 2 else jobs.aecho
                results[place].append(asyncio.run_coroutine_threadsafe(runner.run(fn, (place, number)), loop).result(20))
            try:
                _ = runner.submit(jobs.echo)
            except RuntimeError as error:
                refused.append(error)

        threads = [threading.Thread(target=submit, args=(place,)) for place in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            await asyncio.to_thread(thread.join)
        await loop.shutdown_default_executor()
        assert results == [[(place, number) for number in range(12)] for place in range(8)]
        assert len(refused) == 8


async def test_peers_40_a_callback_submits_again_and_again(make: MakeRunner) -> None:
    async with make(2, max_tasks_per_worker=5) as runner:
        ended = asyncio.get_running_loop().create_future()
        seen: list[int] = []

        def go_on(future: "asyncio.Future[int]") -> None:
            seen.append(future.result())
            if len(seen) == 100:
                ended.set_result(None)
            elif len(seen) < 100:
                runner.submit(jobs.echo if len(seen) % 2 else jobs.aecho, len(seen)).add_done_callback(go_on)

        runner.submit(jobs.aecho, 0).add_done_callback(go_on)
        await ended
        assert seen == list(range(100))


# 37: progress counts batches instead of items


@BOTH
@pytest.mark.parametrize("ordered", [True, False])
async def test_peers_37_each_item_is_one_result(make: MakeRunner, fn: Callable[..., Any], ordered: bool) -> None:
    async with make(2) as runner:
        await runner.map(fn, range(1000))  # by now the calls are known to be short, and travel in batches
        results = runner.map(fn, range(101), ordered=ordered)
        total, count = len(results), 0
        async for _ in results:
            count += 1
        assert (total, count) == (101, 101)


# 38: a guard against leaks of memory ends healthy workers


@pytest.mark.asyncio_only
async def test_peers_38_a_worker_that_takes_much_memory_is_left_alone(make_real: MakeRunner) -> None:
    async with make_real() as runner:
        before = await runner.run(jobs.where)
        assert await runner.run(peer_jobs.take, 400 << 20) > 400 << 20
        assert await runner.run(jobs.where) == before
        assert runner.statistics().restarts == 0
