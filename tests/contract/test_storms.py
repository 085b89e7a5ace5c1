"""Cancelling at any moment, very often, and at every step of a call: one outcome, nothing left, nothing sent twice."""

import asyncio
import gc
import itertools
import os
import random
import signal
import sys
import threading
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import Any

import psutil
import pytest
import pytest_asyncio

import percore
from percore._protocol.messages import CANCEL
from tests import jobs
from tests.contract.conftest import worker_of
from tests.contract.pipes import Gate
from tests.counts import times
from tests.fakes import FakeRunner
from tests.internals import sent_messages, supervisor_of
from tests.sweep import places
from tests.waiting import until

LARGE = 150_000
"""Bytes that travel in a slot."""


def make_call(runner: percore.Runner, number: int) -> "tuple[asyncio.Future[Any], Any]":
    """A call of one of many kinds, and what it is to give."""
    if number % 64 == 0:
        return runner.submit(jobs.length, bytes(LARGE)), LARGE
    if number % 64 == 1:
        return runner.submit(jobs.apattern, LARGE), jobs.pattern(LARGE)
    if number % 8 == 2:
        return runner.submit(jobs.aecho, [number]), [number]
    if number % 8 == 3:
        return runner.submit(jobs.later, number), number
    return runner.submit(jobs.echo if number % 8 == 4 else jobs.aecho, number), number


@pytest_asyncio.fixture
async def silent_loop() -> AsyncIterator[None]:
    """The loop's exception handler has nothing to do."""
    reports: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: reports.append(context))
    yield
    gc.collect()
    assert reports == []


async def nothing_is_held(runner: percore.Runner) -> None:
    """No call, place or slot is taken; the runner works."""
    supervisor = supervisor_of(runner)
    async with asyncio.timeout(30):
        await until(lambda: not supervisor.closing.unfinished())
        assert await runner.map(jobs.aecho, range(100)) == list(range(100))
        assert await runner.map(jobs.echo, [[i] for i in range(100)]) == [[i] for i in range(100)]
    assert supervisor.store.in_use == 0
    for member in supervisor.members:
        assert not member.calls
        assert not member.parked
        assert member.load == [0, 0, 0]
        assert len(member.free) == member.places


# Any moment


@pytest.mark.long
@pytest.mark.asyncio_only
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("silent_loop")
async def test_c3_a_million_calls_cancelled_at_any_moment() -> None:
    dice = random.Random(5)
    async with FakeRunner(2, concurrency=20, threads=4) as runner:
        for start in range(0, times(4000, 1_000_000), 200):
            calls = [make_call(runner, number) for number in range(start, start + 200)]
            to_cancel = dice.sample(calls, 150)
            cancelled = set()
            while to_cancel:
                await asyncio.sleep(0)
                for future, _ in [to_cancel.pop() for _ in range(min(len(to_cancel), dice.randrange(12)))]:
                    if future.cancel():
                        cancelled.add(future)
            for future, value in calls:
                if future not in cancelled:
                    assert await future == value
            assert all(future.cancelled() for future in cancelled)
        await nothing_is_held(runner)


# Every step


class Strike:
    """Does something at the n-th passing of a place, at both sides of the fake engine."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.place = ""
        self.left = 0
        self.action: Callable[[], None] = int  # type: ignore[assignment]
        for name, module in list(sys.modules.items()):
            if name.startswith("percore.") and hasattr(module, "point") and hasattr(module, "POINTS"):
                monkeypatch.setattr(module, "POINTS", True)
                monkeypatch.setattr(module, "point", self._pass)

    def plan(self, place: str, nth: int, action: Callable[[], None]) -> None:
        self.place, self.left, self.action = place, nth, action

    def _pass(self, name: str) -> None:
        # Futures are the loop's: a place in a worker's thread is not one where anybody could cancel.
        if name == self.place and threading.current_thread() is threading.main_thread():
            self.left -= 1
            if self.left == 0:
                self.action()


@pytest.fixture
def strike(monkeypatch: pytest.MonkeyPatch) -> Strike:
    return Strike(monkeypatch)


def outcome(future: "asyncio.Future[Any]", value: Any) -> str:
    """What became of a call: one thing, and nothing wrong."""
    assert future.done()
    if future.cancelled():
        return "cancelled"
    error = future.exception()
    if error is not None:
        return type(error).__name__
    assert future.result() == value
    return "value"


@pytest.mark.long
@pytest.mark.asyncio_only
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("silent_loop")
@pytest.mark.parametrize("place", [*places.STEPS, *places.SUPERVISOR_STEPS])
async def test_c3_cancelled_at_every_step_of_any_call(place: str, strike: Strike) -> None:
    hits = 0
    async with FakeRunner(2, concurrency=4, threads=2, max_message=200_000) as runner:
        for nth in range(1, times(12, 200)):
            calls: list[tuple[asyncio.Future[Any], Any]] = []
            struck: list[int] = []

            def cancel(calls: Any = calls, struck: Any = struck) -> None:
                struck.append(sum(future.cancel() for future, _ in calls[::2]))

            strike.plan(place, nth, cancel)
            for number in range(16):
                calls.append(make_call(runner, number))  # noqa: PERF401  # what is struck sees those before it
            await asyncio.wait([future for future, _ in calls], timeout=30)
            if not struck:  # a message that nobody waits for goes with the next call
                await asyncio.gather(*(runner.run(jobs.aecho) for _ in range(2)))
            outcomes = Counter(outcome(future, value) for future, value in calls)
            hits += len(struck)
            assert outcomes["cancelled"] == sum(struck)
            assert outcomes["value"] == len(calls) - sum(struck)
            if not struck:
                break
        await nothing_is_held(runner)
    # The others are passed in threads or in streams alone, or where a payload waits for a slot.
    assert hits or place in {"worker.item.ready", "worker.slot.filled", "supervisor.slot.filled"}


# Against a death, and against closing


@pytest.mark.long
@pytest.mark.asyncio_only
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("silent_loop")
@pytest.mark.parametrize("place", [*places.SUPERVISOR_LIFE, "", "supervisor.bell.read", "supervisor.outcome.delivered"])
async def test_c6_cancelled_at_every_step_of_a_death(place: str, strike: Strike) -> None:
    dice, hits = random.Random(3), 0
    async with FakeRunner(2, concurrency=4, threads=2) as runner:
        for turn in range(times(10, 50)):
            # Without awaitables that threads have made: where a process dies nobody says that they were never awaited.
            calls = [make_call(runner, number) for number in range(2, 18) if number % 8 != 3]
            struck: list[int] = []

            def cancel(calls: Any = calls, struck: Any = struck) -> None:
                struck.append(sum(future.cancel() for future, _ in calls[::2]))

            strike.plan(place, 1 + turn % 2, cancel)
            for _ in range(dice.randrange(6)):
                await asyncio.sleep(0)
            worker_of(runner, turn % 2).kill(signal.SIGTERM if turn % 3 == 2 else signal.SIGKILL)
            if not place:  # in the very turn of the death
                cancel()
            await asyncio.wait([future for future, _ in calls], timeout=30)
            outcomes = Counter(outcome(future, value) for future, value in calls)
            hits += len(struck)
            assert outcomes["cancelled"] == sum(struck)
            assert outcomes.keys() <= {"cancelled", "value", "WorkerDied"}
            await nothing_is_held(runner)
            async with asyncio.timeout(30):
                await until(lambda: all(slot.current and slot.current.is_ready for slot in supervisor_of(runner).slots))
    assert hits


@pytest.mark.asyncio_only
@pytest.mark.usefixtures("silent_loop")
@pytest.mark.parametrize("grace", [None, 0, 0.001])
@pytest.mark.parametrize("is_first", [True, False], ids=["cancelled first", "closed first"])
async def test_c6_cancelled_at_every_turn_around_a_closing(grace: float | None, is_first: bool) -> None:
    for before, between in itertools.product(range(8), range(6)):
        runner = FakeRunner(2, concurrency=4, threads=2)
        await runner.start()
        calls = [make_call(runner, number) for number in range(2, 18)]
        for _ in range(before):
            await asyncio.sleep(0)
        closing = None if is_first else asyncio.create_task(runner.aclose(grace=grace))
        for _ in range(0 if is_first else between):
            await asyncio.sleep(0)
        cancelled = sum(future.cancel() for future, _ in calls[::2])
        for _ in range(between if is_first else 0):
            await asyncio.sleep(0)
        await asyncio.wait_for(closing or runner.aclose(grace=grace), 30)
        outcomes = Counter(outcome(future, value) for future, value in calls)
        assert outcomes["cancelled"] == cancelled
        assert outcomes.keys() <= ({"cancelled", "value"} if grace is None else {"cancelled", "value", "RunnerClosed"})


# In masses


async def storm_of_submits(runner: percore.Runner) -> int:
    """Submit and cancel at once, many times."""
    count = times(2_000, 100_000)
    for number in range(count):
        assert runner.submit(jobs.aecho if number % 2 else jobs.echo, number).cancel()
        if number % 500 == 0:
            await asyncio.sleep(0)
    return count


async def storm_of_timeouts(runner: percore.Runner) -> int:
    """Be overtaken by a timeout, or not."""

    async def one(number: int) -> int:
        try:
            async with asyncio.timeout(0.001):
                assert await runner.run(jobs.aecho, number) == number
        except TimeoutError:
            return 1
        return 0

    count = times(1_000, 100_000)
    for start in range(0, count, 100):
        await asyncio.gather(*(one(number) for number in range(start, start + 100)))
    return count


async def storm_of_groups(runner: percore.Runner) -> int:
    """A group of tasks that fails as a whole."""
    count = times(1_000, 10_000)

    async def fail() -> None:
        await asyncio.sleep(0)
        raise KeyError("sibling")

    with pytest.raises(ExceptionGroup) as caught:  # noqa: PT012
        async with asyncio.TaskGroup() as group:
            for number in range(count):
                group.create_task(runner.run(jobs.aecho, number))
            group.create_task(fail())
    assert [type(error) for error in caught.value.exceptions] == [KeyError]
    return count


@pytest.mark.long
@pytest.mark.asyncio_only
@pytest.mark.timeout(300)
@pytest.mark.usefixtures("silent_loop")
@pytest.mark.parametrize("storm", [storm_of_submits, storm_of_timeouts, storm_of_groups])
async def test_c5_storms_of_cancellations(storm: Callable[[percore.Runner], Any]) -> None:
    async with percore.Runner(2, threads=2) as runner:
        sent = sent_messages(runner)
        await storm(runner)
        await nothing_is_held(runner)
        sizes = resident(runner)
        count = await storm(runner)
        assert sent[CANCEL] <= 2 * count  # one a call, at most
        await nothing_is_held(runner)
        assert all(after <= 1.05 * before + (1 << 20) for before, after in zip(sizes, resident(runner), strict=True))
        assert runner.statistics().restarts == 0


def resident(runner: percore.Runner) -> list[int]:
    """Bytes in memory, of this process and of its workers."""
    gc.collect()
    pids = [os.getpid(), *(worker.pid for worker in runner.statistics().workers)]
    return [psutil.Process(pid).memory_info().rss for pid in pids]


@pytest.mark.long
@pytest.mark.usefixtures("silent_loop")
async def test_peers_14_cancelled_after_random_delays(gate: Gate) -> None:
    dice = random.Random(14)
    async with percore.Runner(2, threads=2) as runner:
        pids = {worker.pid for worker in runner.statistics().workers}
        for number in range(times(100, 1000)):
            victim = runner.submit(*((jobs.await_, os.devnull, gate.path) if number % 2 else (jobs.aecho, number)))
            following = runner.submit(jobs.aecho if number % 3 else jobs.echo, -number)
            for _ in range(dice.randrange(200)):
                await asyncio.sleep(0)
            cancelled = victim.cancel()
            assert await asyncio.wait_for(following, 30) == -number  # nothing meant for the other one hits it
            assert outcome(victim, number) == ("cancelled" if cancelled else "value")
        await nothing_is_held(runner)
        assert {worker.pid for worker in runner.statistics().workers} == pids


async def test_peers_39_submit_holds_up_no_loop_although_nobody_reads() -> None:
    async with percore.Runner(1, threads=2) as runner:
        (worker,) = runner.statistics().workers
        assert worker.pid is not None
        os.kill(worker.pid, signal.SIGSTOP)
        try:
            turns = 0
            calls = []
            for number in range(20_000):  # some times what rings and queues of workers hold
                calls.append(runner.submit(jobs.length, bytes(1000)))  # between turns of the loop
                if number % 100 == 0:
                    await asyncio.sleep(0)
                    turns += 1
            assert turns == 200
            assert not any(call.done() for call in calls)
        finally:
            os.kill(worker.pid, signal.SIGCONT)
        async with asyncio.timeout(40):
            assert await asyncio.gather(*calls) == [1000] * 20_000
