"""Callbacks that the loop has taken and, because of a Ctrl-C just before their first step, not run: they are made up for.

asyncio drops such a callback. Without percore's doing, a part with a single timer would do nothing any more.
"""

import asyncio
import sys
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager
from types import FrameType, SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import uvloop

from percore import Rate, Runner, RunnerClosed, WorkerDied
from percore._engines.threads.channel import ThreadChannel
from percore._supervisor import publication, timing
from percore._supervisor.blocked_loops import BlockedLoops
from percore._supervisor.call_registry import PIECE, CallRegistry
from percore._supervisor.closing import Closing
from percore._supervisor.hard_limits import HardLimits
from percore._supervisor.memory_watch import MemoryWatch
from percore._supervisor.pool import Pool
from percore._supervisor.publication import Publication
from percore._supervisor.rates import Rates
from percore._supervisor.rebalancing import Rebalancing
from percore._supervisor.reclaiming import Reclaiming
from percore._supervisor.time_limits import TimeLimits
from percore._supervisor.timing import DeadlineTimer, Turn
from percore._transport.supervisor_side import SupervisorSide
from percore.testing import failing_starts, kill
from tests import jobs
from tests.fakes import FakeRunner
from tests.internals import channel_of, members_of, supervisor_of
from tests.waiting import until

LOOPS = pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])

Story = Callable[[Runner], Coroutine[Any, Any, None]]

FAST = Rate(1, per=0.01)


class Interrupts:
    """Raises KeyboardInterrupt at the next entry of a method of a class that the loop calls itself."""

    def __init__(self, kind: type, name: str) -> None:
        self._kind = kind
        self._name = name
        self.is_armed = self.has_struck = False

    def __call__(self, frame: FrameType, event: str, _argument: Any) -> None:
        code, before = frame.f_code, frame.f_back
        if not self.is_armed or self.has_struck or event != "call" or code.co_name != self._name or before is None:
            return
        is_callback = before.f_code in (asyncio.Handle._run.__code__, run_interrupted.__code__)  # the latter in uvloop
        if is_callback and isinstance(frame.f_locals.get("self"), self._kind):
            self.has_struck = True
            raise KeyboardInterrupt

    @contextmanager
    def on(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self)
        try:
            yield
        finally:
            sys.settrace(before)


def run_interrupted(interrupts: Interrupts, coroutine: Coroutine[Any, Any, None], loop: asyncio.AbstractEventLoop) -> None:
    """Run a program that goes on after a Ctrl-C, as a notebook does."""
    try:
        task = loop.create_task(coroutine)
        with interrupts.on(), pytest.raises(KeyboardInterrupt):
            loop.run_until_complete(task)
        loop.run_until_complete(asyncio.wait_for(task, 20))
    finally:
        loop.close()


@pytest.fixture(autouse=True)
def _soon(monkeypatch: pytest.MonkeyPatch) -> None:
    """Losses are made up for sooner."""
    monkeypatch.setattr(timing, "LATENESS", 0.05)
    monkeypatch.setattr(publication, "_PERIOD", 0.02)


async def calls_of_a_key(runner: Runner) -> None:
    calls = [runner.options(key="k", rate=FAST).submit(jobs.aecho, n) for n in range(4)]
    assert await asyncio.gather(*calls) == [0, 1, 2, 3]


async def a_changed_rate(runner: Runner) -> None:
    limited = runner.options(key="k", rate=Rate(1, per=1000))
    calls = [limited.submit(jobs.aecho, n) for n in range(2)]
    await calls[0]
    (member,) = members_of(runner)
    await until(lambda: channel_of(member).has_read() and not member.calls)
    runner.set_rate("k", FAST)
    assert await calls[1] == 1


async def many_calls(runner: Runner) -> None:
    for _ in range(3):
        calls = [runner.submit(jobs.aecho, n) for n in range(10)]
        assert await asyncio.gather(*calls) == list(range(10))


async def the_time_of_an_iteration(runner: Runner) -> None:
    call = runner.submit(asyncio.sleep, 1000)
    turn = supervisor_of(runner).calls.turn
    before = turn.time()
    await until(lambda: turn.time() != before)
    call.cancel()


async def a_worker_that_cannot_start_at_once(runner: Runner) -> None:
    with failing_starts(runner, times=2):
        kill(runner)
        assert await runner.run(jobs.aecho, 1) == 1


async def calls_one_by_one(runner: Runner) -> None:
    for n in range(3):
        assert await runner.run(jobs.aecho, n) == n


async def a_call_that_never_begins(runner: Runner) -> None:
    blocking = runner.submit(asyncio.sleep, 1000)
    with pytest.raises(TimeoutError):
        await runner.options(queue_timeout=0.05).run(jobs.aecho, 1)
    blocking.cancel()


async def a_call_that_takes_too_long(runner: Runner) -> None:
    with pytest.raises(TimeoutError):
        await runner.options(hard_timeout=0.05).run(asyncio.sleep, 1000)


async def a_close_with_grace(runner: Runner) -> None:
    call = runner.submit(asyncio.sleep, 1000)
    await runner.aclose(grace=0.05)
    with pytest.raises(RunnerClosed):
        await call


async def a_close_with_many_calls(runner: Runner) -> None:
    calls = [runner.submit(asyncio.sleep, 1000) for _ in range(3 * PIECE)]
    await runner.aclose(grace=0)
    assert {type(error) for error in await asyncio.gather(*calls, return_exceptions=True)} == {RunnerClosed}


async def a_close_without_workers(runner: Runner) -> None:
    call = runner.submit(asyncio.sleep, 1000)
    closing = asyncio.create_task(runner.aclose())
    await asyncio.sleep(0)
    kill(runner)
    with pytest.raises(WorkerDied):
        await call
    await closing


async def the_watch_of_blocked_loops(runner: Runner) -> None:
    blocked = supervisor_of(runner).pool.blocked_loops
    call = runner.submit(asyncio.sleep, 1000)
    lost = None
    while not timing.is_lost(lost, asyncio.get_running_loop()):
        lost = blocked._timer
        await asyncio.sleep(0.01)
    await until(lambda: blocked._timer is not lost)
    call.cancel()


async def the_page(runner: Runner) -> None:
    page = supervisor_of(runner)._publication
    call = runner.submit(asyncio.sleep, 1000)
    lost = None
    while not timing.is_lost(lost, asyncio.get_running_loop()):
        lost = page._timer
        await asyncio.sleep(0.01)
    await until(lambda: page._timer is not lost)
    call.cancel()


@pytest.mark.parametrize(
    ("kind", "name", "story", "options"),
    [
        (Rates, "_wake", calls_of_a_key, {}),
        (Rates, "_advance", a_changed_rate, {}),
        (SupervisorSide, "_end_turn", many_calls, {}),
        (Turn, "_end", the_time_of_an_iteration, {}),
        (Pool, "_spawn", a_worker_that_cannot_start_at_once, {}),
        (ThreadChannel, "_woken", calls_one_by_one, {"engine": "threads"}),
        (TimeLimits, "_look", a_call_that_never_begins, {"concurrency": 1}),
        (HardLimits, "_look", a_call_that_takes_too_long, {}),
        (Closing, "_cut", a_close_with_grace, {}),
        (Closing, "look", a_close_without_workers, {"kill_after": 0.1}),
        (CallRegistry, "_refuse_more", a_close_with_many_calls, {"concurrency": 1}),
        (BlockedLoops, "_look", the_watch_of_blocked_loops, {"blocked_after": 0.1}),
        (Publication, "_publish", the_page, {"blocked_after": 0.1}),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
@LOOPS
def test_a_lost_callback_is_made_up_for(kind: type, name: str, story: Story, options: dict[str, Any], new_loop: Any) -> None:
    async def program() -> None:
        async with (Runner if "engine" in options else FakeRunner)(1, **options) as runner:
            interrupts.is_armed = True
            async with asyncio.timeout(10):
                await story(runner)

    interrupts = Interrupts(kind, name)
    run_interrupted(interrupts, program(), new_loop())
    assert interrupts.has_struck


async def test_a_lost_timer_is_set_again_and_one_that_was_called_or_cancelled_is_not(subtests: pytest.Subtests) -> None:
    loop, told = asyncio.get_running_loop(), list[int]()
    part: Any = SimpleNamespace(members=set(), memory=lambda: 0)
    parts: list[tuple[Any, Callable[[], object]]] = []
    blocked = BlockedLoops(loop, [], 3600.0)
    parts.append((blocked, blocked.arm))
    memory = MemoryWatch(loop, part, part, part, 1)
    parts.append((memory, memory.arm))
    busy, inner = Mock(), Mock(is_armed=True)
    reclaiming = Reclaiming(loop, busy, inner, lambda: None, lambda: 0)
    parts.append((reclaiming, reclaiming.arm))
    deadline = DeadlineTimer(loop, 3600.0, lambda: told.append(1))
    parts.append((deadline, lambda: None))
    for one, arm in parts:
        with subtests.test(type(one).__name__):
            arm()
            first = one._timer
            one.catch_up()
            assert one._timer is first, "it is not lost"
            first.cancel()
            one._timer = SimpleNamespace(when=lambda: loop.time() - 10, cancel=lambda: None)
            one.catch_up()
            assert one._timer.when() > loop.time(), "it was lost"
            one._timer.cancel()
    assert not told
    deadline._end()
    deadline.catch_up()
    deadline.cancel()
    assert (told, deadline._timer) == ([1], None)
    deadline.catch_up()
    assert deadline._timer is None


async def test_calls_with_keys_that_were_about_to_move_and_recalls_go_on() -> None:
    async with FakeRunner(1) as runner:
        supervisor = supervisor_of(runner)
        dispatch: Any = SimpleNamespace(is_dry=lambda: True, recall=lambda: None)
        rebalancing = supervisor._rebalancing = Rebalancing(asyncio.get_running_loop(), dispatch)
        rebalancing.look()
        lost = rebalancing._next
        assert lost is not None
        lost.cancel()  # as good as lost
        supervisor._is_settling = True
        supervisor.catch_up()
        assert rebalancing._next is not lost
        assert not supervisor._is_settling
        rebalancing.stop()
