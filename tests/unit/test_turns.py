"""Turns: which threads compute at a time is decided by measured time.

Time is an argument here: a clock that stands unless a call moves it.
"""

import sys
import threading
import time
from contextvars import copy_context
from itertools import pairwise

import pytest

from percore._worker import turns as module
from percore._worker.threads import Threads
from percore._worker.turns import JOIN_AFTER, Turns
from tests.unit.pools import Gate, Recorder, pool, void


@pytest.fixture(autouse=True)
def gil(monkeypatch: pytest.MonkeyPatch) -> None:
    """The rules of turns and of giving way are those of a Python with a GIL, wherever the tests run."""
    monkeypatch.setattr(module, "has_gil", lambda: True)


class Clock:
    """Stands in for the module `time`."""

    def __init__(self) -> None:
        self.wall = self.cpu = 1000.0
        self.others = 0.0
        """CPU of other threads."""
        self.slept: list[float] = []

    def perf_counter(self) -> float:
        return self.wall

    def thread_time(self) -> float:
        return self.cpu

    def process_time(self) -> float:
        return self.cpu + self.others

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def working(clock: Clock) -> Threads:
    """Threads whose calls are pairs: seconds they take, and of those seconds of CPU."""

    def run(_call_id: int, item: tuple[float, float]) -> None:
        clock.wall += item[0]
        clock.cpu += item[1]

    return Threads(4, run, copy_context())


def test_calls_that_keep_a_cpu_busy_take_turns(clock: Clock) -> None:
    threads = working(clock)
    threads.turns.run(1, (0.002, 0.002))
    assert threads.turns._takes_turns


def test_calls_that_wait_take_none(clock: Clock) -> None:
    threads = working(clock)
    threads.turns.run(1, (0.002, 0.002))
    threads.turns.run(2, (0.002, 0.0001))
    assert not threads.turns._takes_turns


@pytest.mark.parametrize(
    ("wall", "cpu", "others", "takes_turns"),
    [
        (0.02, 0.01, 0.01, True),  # two that share the GIL
        (0.02, 0.019, 0.019, False),  # two without it
        (0.02, 0.003, 0.016, False),  # many: nobody knows
        (0.02, 0.003, 0.0, False),  # it waits for something else
        (0.002, 0.001, 0.001, False),  # too short to say
    ],
)
def test_two_calls_that_had_to_share_the_gil_take_turns_from_then_on(
    clock: Clock, wall: float, cpu: float, others: float, takes_turns: bool
) -> None:
    def run(_call_id: int, _item: object) -> None:
        clock.wall += wall
        clock.cpu += cpu
        clock.others += others

    threads = Threads(2, run, copy_context())
    threads.turns._active[99] = None
    threads.turns._try_after = clock.wall + 1000  # that is another test
    threads.turns.run(1, None)
    assert threads.turns._takes_turns is takes_turns


def test_the_turn_comes_back_also_after_a_failure(clock: Clock) -> None:
    def fail(_call_id: int, _item: object) -> None:
        raise KeyboardInterrupt

    threads = Threads(1, fail, copy_context())
    threads.turns._takes_turns = True
    with pytest.raises(KeyboardInterrupt):
        threads.turns.run(1, None)
    assert not threads.turns._turn.locked()
    assert not threads.turns._active


def test_a_turn_is_held_while_its_call_runs(clock: Clock) -> None:
    held: list[bool] = []
    threads = Threads(1, lambda _call_id, _item: held.append(threads.turns._turn.locked()), copy_context())
    threads.turns._takes_turns = True
    threads.turns.run(1, None)
    assert held == [True]
    assert not threads.turns._turn.locked()


def test_a_long_turn_holds_nobody_up() -> None:
    gate = Gate()
    with pool(4, gate) as threads:
        threads.turns._takes_turns = True
        for call_id in range(4):
            threads.put(call_id, "never ends by itself")
        assert sorted(gate.begun.get() for _ in range(4)) == [0, 1, 2, 3]
        assert not threads.turns._takes_turns
        gate.opened.set()


def test_waiting_calls_spread_over_all_threads() -> None:
    meeting = threading.Barrier(6)
    with pool(6, lambda _call_id, _item: void(meeting.wait())) as threads:
        for call_id in range(60):
            threads.put(call_id, "met")


def test_who_waits_for_a_turn_gets_it_when_it_is_given_back() -> None:
    class Watched:
        """The turn; tells when somebody wants it."""

        def __init__(self) -> None:
            self.lock, self.wanted = threading.Lock(), threading.Event()
            self.release = self.lock.release

        def acquire(self, timeout: float = -1) -> bool:
            self.wanted.set()
            return self.lock.acquire(timeout=timeout)

    run = Recorder()
    turn = Watched()
    with pool(1, run) as threads:
        threads.turns._turn = turn  # type: ignore[assignment]
        threads.turns._takes_turns = True
        threads.turns._turn_began = time.perf_counter() + 1000  # however slow the machine: this turn has not lasted long
        turn.acquire()
        turn.wanted.clear()
        threads.put(1, "item")
        turn.wanted.wait()
        assert run.ran.empty()
        threads.turns._turn.release()
        assert run.expect(1) == [(1, "item")]


def test_threads_step_back_every_few_milliseconds_whoever_of_them(clock: Clock) -> None:
    threads = working(clock)
    threads.turns._active[99] = None
    for call_id in range(100):
        threads.turns.run(call_id, (0.001, 0.0005))
    assert 15 <= len(clock.slept) <= 21
    assert all(seconds > 0 for seconds in clock.slept)


def test_turns_are_tried_where_many_keep_the_process_busy_and_ever_more_rarely_in_vain(clock: Clock) -> None:
    threads = working(clock)
    threads.turns._active[99] = None  # nobody is ever alone, so nothing is measured
    tried: list[float] = []
    while clock.wall < 1040:
        threads.turns.run(1, (0.001, 0.001))
        if threads.turns._takes_turns:
            tried.append(clock.wall)
            threads.turns._takes_turns = False  # a long call was among them
    pauses = [after - before for before, after in pairwise(tried)]
    assert len(pauses) > 3
    assert all(later > earlier - 0.1 for earlier, later in pairwise(pauses))
    assert pauses[-1] > 4


def test_an_idle_process_tries_no_turns(clock: Clock) -> None:
    threads = working(clock)
    threads.turns._active[99] = None
    for call_id in range(2000):
        threads.turns.run(call_id, (0.002, 0.0005))
        # The first look has nothing to compare with.
        assert not threads.turns._takes_turns or call_id < 30
        threads.turns._takes_turns = False


def test_the_gil_changes_hands_often_while_calls_compute_for_long(clock: Clock) -> None:
    usual = sys.getswitchinterval()
    threads = working(clock)
    seen = []
    for item in [(0.1, 0.1), (0.1, 0.1), (0.1, 0.001), (0.1, 0.1)]:
        threads.turns.run(1, item)
        seen.append(sys.getswitchinterval())
    threads.stop()
    assert seen == [pytest.approx(expected) for expected in (0.0005, 0.0005, usual, 0.0005)]
    assert sys.getswitchinterval() == usual


def test_the_last_of_several_pools_restores_the_interval(clock: Clock) -> None:
    usual = sys.getswitchinterval()
    pools = working(clock), working(clock)
    for each in pools:
        each.turns.run(1, (0.1, 0.1))
    pools[0].stop()
    assert sys.getswitchinterval() == pytest.approx(0.0005)
    pools[1].stop()
    assert sys.getswitchinterval() == usual


def test_a_call_that_ends_after_its_pool_leaves_the_interval_alone(clock: Clock) -> None:
    """A killed worker whose threads live in somebody's process, such as a test's, runs on until its calls return."""
    usual = sys.getswitchinterval()

    def run(_call_id: int, _item: object) -> None:
        clock.wall += 0.1
        clock.cpu += 0.1
        turns.stop()

    turns = Turns(run)
    for call_id in range(2):
        turns.run(call_id, None)
        assert sys.getswitchinterval() == usual


def test_joining_takes_milliseconds() -> None:
    assert JOIN_AFTER <= 0.01
