"""The timeouts of calls in a worker: one timer for all of them, whichever threads their calls begin in and end."""

import asyncio
import sys
import threading
from array import array
from time import monotonic_ns
from typing import Any

import pytest

from percore._protocol.messages import MARK_WORDS
from percore._worker import timeouts as module
from percore._worker.timeouts import Timeouts
from tests.waiting import until

PLACES = 1024


class Calls:
    """Calls that run, and those that were told as expired."""

    def __init__(self) -> None:
        self.expired: list[tuple[int, float]] = []
        self.marks: Any = array("q", [0] * (PLACES * MARK_WORDS))
        self.timeouts = Timeouts(
            asyncio.get_running_loop(), self.marks, lambda call_id, seconds: self.expired.append((call_id, seconds))
        )

    def begin(self, call_id: int, seconds: float) -> bool:
        self.marks[call_id % PLACES * MARK_WORDS + 1] = monotonic_ns()
        return self.timeouts.begin(call_id, seconds)


async def test_each_call_expires_in_its_time_and_those_that_have_ended_do_not() -> None:
    calls = Calls()
    assert calls.begin(1, 60)
    calls.timeouts.look()
    assert not calls.begin(2, 61)  # the timer comes early enough
    assert calls.begin(3, 0.02)
    calls.timeouts.look()
    assert calls.begin(4, 0.01)
    calls.timeouts.look()
    assert not calls.begin(5, 0.015)
    calls.timeouts.end(5)
    calls.timeouts.end(5)
    await until(lambda: len(calls.expired) == 2)
    assert sorted(calls.expired) == [(3, 0.02), (4, 0.01)]
    calls.timeouts.stop()


async def test_a_call_may_end_or_begin_another_while_it_is_told_as_expired() -> None:
    calls = Calls()

    def expired(call_id: int, _seconds: float) -> None:
        calls.expired.append((call_id, 0.0))
        calls.timeouts.end(2)
        if call_id == 1:
            assert calls.begin(3, 0.0)
            calls.timeouts.look()

    calls.timeouts._expired = expired
    for call_id in (1, 2):
        calls.begin(call_id, 0.0)
    calls.timeouts.look()
    await until(lambda: len(calls.expired) == 2)
    assert calls.expired == [(1, 0.0), (3, 0.0)]
    assert not calls.timeouts._due


async def test_very_long_ones_are_looked_at_each_day() -> None:
    calls = Calls()
    assert calls.begin(1, 1e300)
    calls.timeouts.look()
    assert calls.timeouts._timer is not None
    assert calls.timeouts._timer.when() <= asyncio.get_running_loop().time() + module._LATEST
    calls.timeouts.stop()


async def test_threads_that_begin_and_end_calls_lose_none(monkeypatch: pytest.MonkeyPatch) -> None:
    """A thread adds its call while the loop looks: either the look sees the call, or the thread has the loop look again."""
    monkeypatch.setattr(module, "_SOONEST", 0.0)
    calls, loop = Calls(), asyncio.get_running_loop()
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)

    def run(first: int) -> None:
        for call_id in range(first, first + 100):
            if calls.begin(call_id, 0.0005):
                loop.call_soon_threadsafe(calls.timeouts.look)
            if call_id % 2:
                calls.timeouts.end(call_id)

    threads = [threading.Thread(target=run, args=(first,)) for first in (0, 100, 200)]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            await asyncio.to_thread(thread.join)
    finally:
        sys.setswitchinterval(interval)
    await until(lambda: not calls.timeouts._due)
    assert {call_id for call_id, _ in calls.expired} >= set(range(0, 300, 2))
    assert len(calls.expired) == len(set(calls.expired))
