"""How many calls of a plain function run at once: one while they compute, as many as there are threads while they wait."""

import threading
import time
from collections.abc import Iterable
from types import SimpleNamespace

import pytest

from percore._worker import pacing as module
from percore._worker import thread_clocks
from percore._worker.pacing import BRIEF, COMPUTING, PATIENCE, Pace, Pacing

LIMIT = 8
LONG = 0.1


def pace_of(calls: Iterable[int], *, has_spare: bool = False) -> Pace:
    """The pace of a function with these calls, none of which has ended."""
    pace = Pace(LIMIT, has_spare=has_spare)
    for call in calls:
        pace.enters(call, 0.0)
    return pace


@pytest.fixture
def readings(monkeypatch: pytest.MonkeyPatch) -> dict[int, float]:
    """What each thread has computed."""
    readings = {threading.get_native_id(): 0.0}
    monkeypatch.setattr(thread_clocks, "computed", readings.__getitem__)
    monkeypatch.setattr(module, "wants_cpu", lambda _tid: False)
    return readings


def test_the_calls_of_a_new_function_begin_one_at_a_time() -> None:
    pace = Pace(LIMIT, has_spare=False)
    assert [pace.enters(call, 0.0) for call in range(3)] == [True, False, False]
    pace.ended(0, 1.0)
    assert pace.due(LONG) == [1]
    assert pace.due(LONG) == []
    assert pace.enters(3, LONG) is False
    assert list(pace.held) == [2, 3]


def test_calls_that_wait_let_ever_more_begin_until_all_may() -> None:
    pace = pace_of(range(20))
    begun, looks = 1, []
    while not pace.is_open:
        pace.looked(0.0, begun, 0.01)
        looks.append(len(pace.due(0.01)))
        begun += looks[-1]
    assert looks == [1, 2, 16]
    assert pace.enters(20, 0.01)


def test_a_call_that_computes_and_then_waits_lets_the_next_one_begin() -> None:
    pace = pace_of(range(3))
    pace.looked(1.0, 1, 0.01)
    assert pace.due(0.01) == []
    pace.looked(COMPUTING - 0.01, 1, 0.02)
    assert pace.due(0.02) == [1]


def test_calls_that_compute_and_wait_in_turn_begin_until_they_leave_no_time_unused() -> None:
    """With one that computes among them, there would be no time in which all of them wait."""
    pace = pace_of(range(12))
    pace.looked(0.3, 1, 0.01)
    assert pace.due(0.01) == [1]
    pace.looked(0.7, 2, 0.02)
    assert pace.due(0.02) == [2, 3]
    pace.looked(0.95, 4, 0.03)
    assert pace.due(0.03) == []
    pace.ended(0, 0.95)
    assert (pace.due(0.04), pace.allowed) == ([], 2)


def test_calls_that_began_together_to_be_seen_are_not_taken_for_calls_that_wait() -> None:
    pace = pace_of(range(6), has_spare=True)
    pace.looked(0.7, 2, 0.01)
    assert pace.due(0.01) == []


def test_calls_that_have_waited_are_seen_at_their_end() -> None:
    pace = pace_of(range(4))
    pace.ended(0, 0.1)
    assert pace.due(LONG) == [1, 2]


def test_calls_that_compute_after_others_have_waited_begin_one_at_a_time_again() -> None:
    pace = pace_of(range(12))
    pace.looked(0.0, 1, 0.01)
    assert pace.due(0.01) == [1]
    pace.ended(0, 1.0)  # two of them share the GIL
    assert pace.due(LONG) == []
    pace.ended(1, 1.0)
    assert pace.due(LONG) == [2]


def test_brief_calls_open_their_function_after_some() -> None:
    pace = pace_of(range(40))
    for call in range(15):
        pace.ended(call, 1.0, brief=1)
        assert pace.due(0.0) == [call + 1]
    pace.ended(15, 1.0, brief=1)
    assert pace.is_open
    assert pace.due(0.0) == list(range(16, 40))


def test_a_batch_of_brief_calls_opens_their_function_at_once(readings: dict[int, float]) -> None:
    pacing = Pacing(LIMIT, has_spare=False)
    pace = pacing.new()
    assert [pacing.holds(call, pace) for call in range(4)] == [False, True, True, True]
    for call, items, due in ((0, 14, [1]), (1, 16, [2, 3])):
        pacing.began(call)
        readings[threading.get_native_id()] += 1000  # it has computed all the time
        assert pacing.ended(call, 14 * BRIEF, items) == due
    assert pace.is_open


def test_a_long_call_among_brief_ones_keeps_their_function_closed() -> None:
    pace = pace_of(range(40))
    for call in range(30):
        pace.ended(call, 1.0, brief=int(call != 10))
        pace.due(0.0)
        assert pace.is_open is (call >= 26)


def test_an_open_function_is_closed_by_a_long_call_that_computes() -> None:
    pace = pace_of([])
    pace.is_open = True
    pacing = Pacing(LIMIT, has_spare=False)
    for seconds, cpu, active in ((0.004, 0.004, 1), (0.1, 0.01, 1), (0.1, 0.02, 2)):
        assert not pacing.closes(pace, seconds, cpu, cpu, active, 1)
        assert pace.is_open
    assert pacing.closes(pace, 0.1, 0.04, 0.09, 2, 1)  # two that share the GIL
    assert not pace.is_open
    assert [pace.enters(call, 0.0) for call in (1, 2)] == [True, False]


@pytest.mark.parametrize("items", [1, 20])
def test_calls_that_wait_and_compute_a_little_stay_open_when_they_use_a_whole_cpu_together(items: int) -> None:
    pace = pace_of([])
    pace.is_open = True
    pacing = Pacing(LIMIT, has_spare=False)
    assert not pacing.closes(pace, 0.024 * items, 0.0008 * items, 0.024 * items, 30, items)  # 20 ms of waiting, 0.8 ms of computing
    assert pace.is_open


def test_calls_without_the_gil_run_beside_each_other_while_there_are_cpus() -> None:
    pace = pace_of(range(40), has_spare=True)
    assert sorted(pace.admitted) == [0, 1]
    pace.looked(1.0, 1, 0.01)  # the other one waits for a thread: nobody knows yet
    assert pace.due(0.01) == []
    pace.looked(1.9, 2, 0.02)
    assert pace.due(0.02) == [2, 3]
    pace.looked(3.9, 4, 0.03)
    assert pace.is_open
    pacing = Pacing(LIMIT, has_spare=True)
    assert not pacing.closes(pace, 0.1, 0.1, 0.4, 4, 1)
    assert pace.is_open


def test_calls_that_share_the_gil_begin_one_at_a_time_whatever_cpus_there_are() -> None:
    pace = pace_of(range(5), has_spare=True)
    pace.looked(1.0, 2, 0.01)
    pace.ended(0, 1.0)
    assert pace.due(LONG) == []
    pace.ended(1, 1.0)
    assert pace.due(LONG) == [2]


def test_after_a_long_time_a_call_begins_beside_one_that_computes() -> None:
    """It may compute until the other one has done something."""
    pace = pace_of(range(4))
    pace.looked(1.0, 1, PATIENCE - 1)
    assert pace.due(PATIENCE - 1) == []
    pace.looked(1.0, 1, PATIENCE + 1)
    assert pace.due(PATIENCE + 1) == [1]
    pace.looked(1.0, 2, 2 * PATIENCE)
    assert pace.due(2 * PATIENCE) == []
    pace.looked(1.0, 2, 2 * PATIENCE + 2)
    assert pace.due(2 * PATIENCE + 2) == [2]


def test_calls_that_wait_for_a_thread_tell_nothing() -> None:
    pace = pace_of(range(4))
    pace.looked(0.0, 0, 0.01)
    assert pace.due(0.01) == []


def test_a_call_that_was_taken_back_is_held_no_more() -> None:
    pacing = Pacing(LIMIT, has_spare=False)
    pace = pacing.new()
    assert [pacing.holds(call, pace) for call in range(4)] == [False, True, True, True]
    assert [pacing.is_held(call) for call in range(4)] == [False, True, True, True]
    assert pacing.left(2) == []
    assert pacing.held == 2
    assert pacing.left(0) == [1]  # it had not begun
    assert pacing.held == 1
    assert pacing.left(0) == []
    assert pacing.left(1) == [3]
    assert pacing.left(3) == []
    assert (pacing.held, pacing.paces) == (0, {})


def test_functions_do_not_hold_up_each_other() -> None:
    pacing = Pacing(LIMIT, has_spare=False)
    first, second = pacing.new(), pacing.new()
    assert not pacing.holds(1, first)
    assert not pacing.holds(2, second)
    assert pacing.holds(3, first)
    pacing.began(2)
    assert pacing.ended(2, LONG, 1) == []
    assert pacing.held == 1


class Clock:
    """The time, and how long this thread and the rest of the process have computed."""

    def __init__(self, readings: dict[int, float]) -> None:
        self.now = self.rest = 0.0
        self._readings = readings

    def pass_by(self, seconds: float, computed: float, rest: float = 0.0) -> None:
        self.now += seconds
        self.rest += rest
        self._readings[threading.get_native_id()] += computed

    def perf_counter(self) -> float:
        return self.now

    def process_time(self) -> float:
        return self.rest + self._readings[threading.get_native_id()]


@pytest.fixture
def clock(readings: dict[int, float], monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock(readings)
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(thread_clocks, "time", clock)
    return clock


def held_behind_one(pacing: Pacing, count: int) -> Pace:
    """The pace of a function of which one call runs and so many others are held."""
    pace = pacing.new()
    assert [pacing.holds(call, pace) for call in range(1 + count)] == [False, *[True] * count]
    pacing.began(0)
    return pace


def test_a_call_is_judged_at_its_end_by_all_that_it_has_done(clock: Clock) -> None:
    """In the moment since the last look it may have waited, such as for the GIL that the look needed."""
    pacing = Pacing(LIMIT, has_spare=False)
    held_behind_one(pacing, 3)
    clock.pass_by(0.01, computed=0.01)
    assert pacing.look() == []
    clock.pass_by(0.001, computed=0.0)
    assert pacing.ended(0, 0.01, 1) == [1]


def test_a_call_that_has_just_begun_tells_nothing(clock: Clock) -> None:
    pacing = Pacing(LIMIT, has_spare=False)
    held_behind_one(pacing, 1)
    clock.pass_by(0.001, computed=0.0)
    assert pacing.look() == []
    clock.pass_by(0.009, computed=0.0)
    assert pacing.look() == [1]


@pytest.mark.parametrize(("computed", "due"), [(0.004, [1]), (0.0005, [1, 2])])
def test_a_call_that_waits_for_the_gil_computes(clock: Clock, computed: float, due: list[int]) -> None:
    """The loop of the worker takes half of the time, or nearly all of it."""
    pacing = Pacing(LIMIT, has_spare=False)
    held_behind_one(pacing, 3)
    clock.pass_by(0.01, computed=computed, rest=0.01 - computed)
    assert pacing.ended(0, computed, 1) == due


def test_a_look_allows_for_the_rest_of_the_process(clock: Clock) -> None:
    pacing = Pacing(LIMIT, has_spare=False)
    held_behind_one(pacing, 3)
    clock.pass_by(0.01, computed=0.004, rest=0.006)
    assert pacing.look() == []
    clock.pass_by(0.01, computed=0.0005, rest=0.009)
    assert pacing.look() == [1]


def test_a_call_is_judged_with_those_that_ran_beside_it() -> None:
    pace = Pace(LIMIT, has_spare=True)
    for call in (0, 1):
        pace.began(call, 0.0)
    pace.ended(1, 1.0)
    assert pace.beside(0, 0.1) == 1.0  # so far as is known here, the other one has run no time
    pace.began(2, 0.1)
    assert pace.beside(0, 0.2) == pytest.approx(1.5)
    assert pace.beside(2, 0.2) == pytest.approx(2.0)
    pace.left(2, 0.2)
    assert pace.beside(0, 0.4) == pytest.approx(1.25)


def test_calls_that_take_turns_with_the_gil_end_one_after_the_other(clock: Clock) -> None:
    pacing = Pacing(LIMIT, has_spare=True)
    pace = pacing.new()
    assert [pacing.holds(call, pace) for call in range(5)] == [False, False, True, True, True]
    for call in (0, 1):
        pacing.began(call)
    clock.pass_by(0.02, computed=0.01, rest=0.01)
    assert pacing.ended(0, 0.01, 1) == []
    clock.pass_by(0.002, computed=0.002)
    assert pacing.ended(1, 0.012, 1) == [2]


def test_an_open_function_forgets_its_calls(readings: dict[int, float], monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    clock = SimpleNamespace(perf_counter=lambda: now[0], process_time=lambda: now[0])
    monkeypatch.setattr(module, "time", clock)
    monkeypatch.setattr(thread_clocks, "time", clock)
    pacing = Pacing(2, has_spare=False)
    pace = pacing.new()
    assert [pacing.holds(call, pace) for call in range(4)] == [False, True, True, True]
    pacing.began(0)
    now[0], readings[threading.get_native_id()] = 0.01, 0.01
    assert pacing.look() == []
    now[0], readings[threading.get_native_id()] = 0.02, 0.011
    assert pacing.look() == [1, 2, 3]
    assert (pacing.held, pacing.paces) == (0, {})
    assert not pacing.holds(4, pace)
    assert pacing.ended(0, LONG, 1) == []


def test_the_computing_of_a_thread_counts() -> None:
    tid = threading.get_native_id()
    before, began = thread_clocks.computed(tid), time.thread_time()
    while time.thread_time() - began < 0.02:
        pass
    assert thread_clocks.computed(tid) - before >= 0.019


def test_a_thread_that_is_ready_to_run_is_told_from_one_that_waits() -> None:
    ready: list[int] = []
    waits, over = threading.Event(), threading.Event()

    def wait() -> None:
        ready.append(threading.get_native_id())
        waits.set()
        over.wait()

    thread = threading.Thread(target=wait)
    thread.start()
    waits.wait()
    while thread_clocks.wants_cpu(ready[0]):  # it is about to wait
        pass
    over.set()
    thread.join()
    assert thread_clocks.wants_cpu(threading.get_native_id())
    while thread_clocks.wants_cpu(ready[0]):  # its end comes a moment after `join`, and then it wants none any more
        pass


def test_the_threads_of_a_foreign_proc_are_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    """In a PID namespace of its own without its /proc, a process finds others under the numbers of its threads."""
    tid = threading.get_native_id()
    monkeypatch.setattr(thread_clocks, "_are_listed", lambda _pid: False)
    before = time.thread_time()
    assert before <= thread_clocks.computed(tid) <= time.thread_time()
    assert not thread_clocks.wants_cpu(tid)
