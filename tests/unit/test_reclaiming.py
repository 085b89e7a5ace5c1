"""Without a GIL, a runner at rest wakes the threads that may have to free what others have dropped, more and more rarely."""

import mmap
from contextlib import closing
from typing import Any, cast

import pytest

from percore._monitor.memory import resident_memory
from percore._supervisor.reclaiming import ENOUGH, FIRST, LONGEST, PATIENCE, Reclaiming


class Clock:
    """A loop with timers that a test runs out."""

    def __init__(self) -> None:
        self.now = 0.0
        self.timers: list[Timer] = []

    def call_later(self, delay: float, call: Any) -> "Timer":
        timer = Timer(self, self.now + delay, call)
        self.timers.append(timer)
        return timer

    def until(self, when: float) -> None:
        while self.timers and self.timers[0].when <= when:
            timer = self.timers.pop(0)
            self.now = timer.when
            timer.call()
        self.now = when


class Timer:
    def __init__(self, clock: Clock, when: float, call: Any) -> None:
        self.clock, self.when, self.call = clock, when, call

    def cancel(self) -> None:
        self.clock.timers.remove(self)


class Runner:
    """A runner, and what is armed with its calls."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.has_calls = self.is_armed = False
        self.roused: list[float] = []
        self.memory = 1 << 30
        self.reclaiming = Reclaiming(cast(Any, self.clock), self, self, self._rouse, lambda: self.memory)
        self.freed: dict[float, int] = {}
        """What the next wake-up frees, by the time from which on it is dropped."""

    def _rouse(self) -> None:
        self.roused.append(self.clock.now)
        for dropped in [when for when in self.freed if when <= self.clock.now]:
            self.memory -= self.freed.pop(dropped)

    def is_busy(self) -> bool:
        return self.has_calls

    def arm(self) -> None:
        assert not self.is_armed
        self.is_armed = True

    def close(self) -> None:
        self.is_armed = False

    def call(self) -> None:
        self.has_calls = True
        if not self.reclaiming.is_armed:
            self.reclaiming.arm()


@pytest.fixture
def runner() -> Runner:
    return Runner()


def test_threads_are_woken_every_second_during_calls_and_then_more_and_more_rarely(runner: Runner) -> None:
    assert not runner.reclaiming.is_armed
    runner.call()
    assert runner.is_armed
    assert runner.reclaiming.is_armed
    runner.clock.until(3.5)
    assert runner.roused == [1, 2, 3]
    runner.has_calls = False
    runner.clock.until(300)
    assert runner.roused[3:] == [4, 6, 10, 18, 34, 66, 130, 194, 258]
    assert runner.roused[-1] - runner.roused[-2] == LONGEST


def test_what_is_dropped_after_the_last_call_is_freed_as_long_after_that_at_most(runner: Runner) -> None:
    runner.call()
    runner.has_calls = False
    runner.clock.until(500)
    for dropped in range(1, 400):
        freed = min(woken for woken in runner.roused if woken >= dropped)
        assert freed - dropped <= min(dropped + FIRST, LONGEST), dropped


@pytest.mark.parametrize("dropped", [0.5, 1.5, 17.2, PATIENCE - 1])
def test_16_mb_of_results_are_freed_within_a_second_of_being_dropped(runner: Runner, dropped: float) -> None:
    runner.call()
    runner.memory += ENOUGH
    runner.has_calls = False
    runner.freed[dropped] = ENOUGH
    runner.clock.until(dropped + FIRST)
    assert not runner.freed
    count = len(runner.roused)
    runner.clock.until(dropped + 8)
    assert len(runner.roused) <= count + 3  # its memory has fallen, so it is woken more rarely


def test_memory_that_does_not_fall_is_the_program_s(runner: Runner) -> None:
    runner.call()
    runner.memory += ENOUGH
    runner.has_calls = False
    runner.clock.until(400)
    ticks = int(PATIENCE) + 1
    assert runner.roused[:ticks] == [*range(1, ticks + 1)]
    assert [late - early for early, late in zip(runner.roused[ticks:], runner.roused[ticks + 1 :], strict=False)][:3] == [4, 8, 16]
    runner.call()  # from now on that memory counts as in use
    runner.has_calls = False
    runner.clock.until(410)
    assert runner.roused[-3:] == [401, 403, 407]
    runner.call()
    runner.memory += ENOUGH
    runner.has_calls = False
    runner.clock.until(414)
    assert runner.roused[-4:] == [411, 412, 413, 414]


def test_this_process_has_memory() -> None:
    before = resident_memory()
    with closing(mmap.mmap(-1, 2 * ENOUGH)) as large:  # not of malloc, which may have as much that it got before
        large.write(b"x" * (2 * ENOUGH))
        assert resident_memory() >= before + ENOUGH


def test_the_next_call_begins_again(runner: Runner) -> None:
    runner.call()
    runner.has_calls = False
    runner.clock.until(100)
    assert not runner.reclaiming.is_armed
    runner.call()
    assert len(runner.clock.timers) == 1
    runner.clock.until(101.5)
    assert runner.roused[-1] == 101
    runner.is_armed = False  # the other watch is at rest
    assert not runner.reclaiming.is_armed
    runner.call()
    assert runner.is_armed
    assert len(runner.clock.timers) == 1


def test_nothing_is_left_after_the_close(runner: Runner) -> None:
    runner.call()
    runner.reclaiming.close()
    assert not runner.clock.timers
    assert not runner.is_armed
    runner.reclaiming.close()


def test_it_ends_with_a_runner_that_nobody_refers_to() -> None:
    clock, roused = Clock(), []
    reclaiming = Reclaiming(cast(Any, clock), Idle(), Runner(), lambda: roused.append(clock.now))
    reclaiming.arm()
    clock.until(10)
    assert not clock.timers
    assert not roused


class Idle:
    def is_busy(self) -> bool:
        return False
