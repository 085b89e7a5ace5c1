"""Rates and their gates, with a clock, a loop and workers that the test plays."""

from collections.abc import Callable
from dataclasses import dataclass, field
from heapq import heappop, heappush
from itertools import count
from math import ceil
from random import Random
from typing import Any

import pytest

from percore import Rate
from percore._calls.policy import CallPlan, Policy
from percore._protocol.interfaces import UNBEGUN, Fate
from percore._scheduler.dispatch import Dispatch
from percore._scheduler.lifecycle import Life
from percore._supervisor import rates as module
from percore._supervisor.rates import Rates
from tests.marks import most_within

SECOND = Rate(1, per=1)


@dataclass(eq=False)
class Timer:
    when: float
    callback: Callable[[], None]
    is_cancelled: bool = False

    def cancel(self) -> None:
        self.is_cancelled = True


@dataclass
class Clock:
    """The loop and its clock."""

    now: float = 1000.0
    timers: list[Timer] = field(default_factory=list)
    soon: list[Callable[[], None]] = field(default_factory=list)

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        timer = Timer(self.now + seconds, callback)
        self.timers.append(timer)
        return timer

    def call_soon(self, callback: Callable[[], None]) -> None:
        self.soon.append(callback)

    def armed(self) -> list[float]:
        """When the timers end that were not cancelled."""
        return [round(timer.when, 6) for timer in self.timers if not timer.is_cancelled]

    def advance(self, seconds: float) -> None:
        """Let time pass, and run what is due."""
        self.now += seconds
        for callback in self.soon:
            callback()
        self.soon.clear()
        for timer in [timer for timer in self.timers if timer.when <= self.now and not timer.is_cancelled]:
            self.timers.remove(timer)
            timer.callback()


@dataclass(eq=False)
class Call:
    key: Any
    kind: int = 0
    call_id: int = 0
    plan: CallPlan | None = None

    def done(self) -> bool:
        return False

    def retry_plan(self) -> CallPlan | None:
        return self.plan


class Member:
    """A worker. Calls begin in it when the test says so."""

    def __init__(self, clock: Clock) -> None:
        self.index = 0
        self.load = [0, 0, 0]
        self.tickets = 1 << 30
        self.calls: dict[int, Call] = {}
        self.parked: set[int] = set()
        self.begun: dict[Call, float] = {}
        self._clock = clock
        self._numbers = count(1)
        self.sees = True
        self.life = Life()

    def silence(self) -> int:
        return 0

    def send(self, call: Call) -> None:
        call.call_id = next(self._numbers)
        self.calls[call.call_id] = call
        self.load[call.kind] += 1

    def fate(self, call: Call) -> Fate:
        if not self.sees:
            return Fate(begun=None)
        return Fate(True, self._clock.now - self.begun[call]) if call in self.begun else UNBEGUN


class Shell:
    """A supervisor with one worker."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, sees_starts: bool = True) -> None:
        self.clock = Clock()
        monkeypatch.setattr(module, "monotonic", lambda: self.clock.now)
        self.dispatch: Dispatch[Any, Any] = Dispatch(2000, 4)
        self.member = Member(self.clock)
        self.member.sees = sees_starts
        self.dispatch.seat(self.member)
        self.rates = Rates(self.clock, self.dispatch, self, sees_starts=sees_starts)  # type: ignore[arg-type]
        self.sent: list[Call] = []

    def advance(self) -> None:
        for call, member in self.dispatch.fill(0):
            self._send(call, member)

    def _send(self, call: Call, member: Member) -> None:
        member.send(call)
        self.sent.append(call)

    def submit(self, key: str, rate: Rate | None = SECOND) -> Call:
        policy = Policy(key=key, rate=rate)
        call = Call(self.dispatch.names.of(key), plan=None if rate is None else CallPlan(policy))
        if rate is not None:
            self.rates.limit(call, policy)  # type: ignore[arg-type]
        member = self.dispatch.submitted(call)
        if member is not None:
            self._send(call, member)
        return call

    def begin(self, call: Call) -> None:
        self.member.begun[call] = self.clock.now

    def end(self, call: Call) -> None:
        """The worker is done with a call, whether it has begun or not."""
        del self.member.calls[call.call_id]
        self.member.load[call.kind] -= 1
        self.dispatch.left(call)
        self.advance()


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> Shell:
    return Shell(monkeypatch)


def test_the_next_call_goes_when_the_start_of_the_one_before_is_old_enough(shell: Shell) -> None:
    first, second, third = (shell.submit("k") for _ in range(3))
    assert shell.sent == [first]
    assert shell.clock.armed() == [1001.0]
    shell.clock.advance(0.3)
    shell.begin(first)
    shell.clock.advance(0.7)
    assert shell.sent == [first]
    assert shell.clock.armed() == [1001.3], "a second after the start, not after the sending"
    shell.clock.advance(0.3)
    assert shell.sent == [first, second]
    shell.begin(second)
    shell.clock.advance(1.0)
    assert shell.sent == [first, second, third]


def test_nothing_goes_while_a_worker_has_not_begun(shell: Shell) -> None:
    first, second = shell.submit("k"), shell.submit("k")
    for _ in range(100):
        shell.clock.advance(1.0)
    assert shell.sent == [first]
    assert len(shell.clock.timers) <= 2, "one look in a second"
    shell.begin(first)
    shell.clock.advance(1.0)
    shell.clock.advance(0.001)
    assert shell.sent == [first, second]


def test_without_waiting_calls_there_is_no_timer(shell: Shell) -> None:
    first = shell.submit("k")
    assert shell.clock.armed() == []
    second = shell.submit("k")
    shell.begin(first)
    shell.end(first)
    shell.clock.advance(1.0)
    assert shell.sent == [first, second]
    shell.begin(second)
    shell.end(second)
    shell.clock.advance(100)
    assert shell.clock.armed() == []
    shell.submit("k"), shell.submit("k")
    shell.rates.stop()
    assert shell.clock.armed() == []


def test_one_timer_serves_all_keys(shell: Shell) -> None:
    for key, per in (("a", 3.0), ("b", 1.0), ("c", 2.0)):
        shell.submit(key, Rate(1, per=per))
        shell.submit(key, Rate(1, per=per))
    assert shell.clock.armed() == [1001.0]
    for call in list(shell.sent):
        shell.begin(call)
    order = []
    for _ in range(3):
        shell.clock.advance(1.0)
        order.append(repr(shell.sent[-1].key))
    assert order == ["'b'", "'c'", "'a'"]


def test_a_call_that_comes_back_unbegun_makes_room_at_once(shell: Shell) -> None:
    first, second = shell.submit("k"), shell.submit("k")
    shell.end(first)
    assert shell.sent == [first, second]


def test_a_call_that_has_begun_in_a_dead_worker_counts(shell: Shell) -> None:
    first, second = shell.submit("k"), shell.submit("k")
    shell.begin(first)
    shell.end(first)
    assert shell.sent == [first]
    shell.clock.advance(1.0)
    assert shell.sent == [first, second]


def test_a_call_that_was_not_sent_is_not_counted(shell: Shell) -> None:
    policy = Policy(key="k", rate=SECOND)
    call = Call(shell.dispatch.names.of("k"), plan=CallPlan(policy))
    shell.rates.limit(call, policy)  # type: ignore[arg-type]
    assert shell.dispatch.submitted(call) is shell.member
    second = shell.submit("k")
    assert shell.sent == []
    shell.dispatch.unsent(call)
    shell.clock.advance(0.0)
    assert shell.sent == [second]


def test_a_call_without_a_mark_counts_from_what_its_worker_announces(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = Shell(monkeypatch, sees_starts=False)
    first, second, third = (shell.submit("k") for _ in range(3))
    assert [call.plan is not None and call.plan.announces for call in (first, second)] == [True, False], "when it is sent"
    shell.clock.advance(0.5)
    shell.rates.began(first)  # type: ignore[arg-type]
    shell.clock.advance(0.5)
    shell.clock.advance(0.5)
    assert shell.sent == [first, second]
    shell.end(second)  # it was cancelled before it began, as nothing has announced its start
    assert shell.sent == [first, second, third]


def test_many_calls_pass_without_a_look_at_marks(shell: Shell) -> None:
    looks = 0
    fate = shell.member.fate

    def counted(call: Call) -> Fate:
        nonlocal looks
        looks += 1
        return fate(call)

    shell.member.fate = counted  # type: ignore[method-assign]
    most = Rate(1000, per=1, burst=1000)
    for _ in range(600):
        call = shell.submit("k", most)
        shell.begin(call)
        shell.end(call)
    assert len(shell.sent) == 600
    assert looks < 20, "now and then, when so many have passed as could be known to fit"
    for _ in range(600):
        shell.submit("k", most)
    assert len(shell.sent) == 1000, "what has passed unseen is counted, too"


def test_idle_keys_are_forgotten_once_their_buckets_are_full(shell: Shell) -> None:
    for number in range(500):
        call = shell.submit(f"key {number}")
        shell.begin(call)
        shell.end(call)
        assert len(shell.rates) <= number + 1
    assert len(shell.rates) == 500
    shell.rates.set(shell.dispatch.names.of("set"), SECOND, 0.0)
    shell.submit("busy", SECOND)
    shell.clock.advance(2.0)
    for number in range(20_000):
        shell.clock.advance(0.01)
        call = shell.submit(f"other {number}")
        shell.begin(call)
        shell.end(call)
        assert len(shell.rates) <= 1200
    assert [shell.rates._gates[shell.dispatch.names.of(name)].name.value for name in ("set", "busy")] == ["set", "busy"]


def test_a_pause_and_a_rate_are_set(shell: Shell) -> None:
    name = shell.dispatch.names.of("k")
    shell.rates.set(name, None, 0.0)
    assert len(shell.rates) == 0
    shell.rates.set(name, None, 5.0)
    calls = [shell.submit("k", None) for _ in range(3)]
    shell.clock.advance(4.9)
    assert shell.sent == []
    shell.clock.advance(0.1)
    assert shell.sent == calls
    for call in calls:
        shell.begin(call)
    shell.rates.set(name, SECOND, 1e7)
    shell.submit("k", None)
    assert shell.clock.armed() == [round(shell.clock.now + 86_400, 6)], "loops have limits"
    shell.clock.advance(86_400)
    assert len(shell.clock.armed()) == 1
    shell.rates.set(name, SECOND, 0.0)
    shell.clock.advance(0.0)
    assert len(shell.sent) == 4


def test_options_of_a_later_call_let_the_calls_before_it_go(shell: Shell) -> None:
    calls = [shell.submit("k") for _ in range(3)]
    assert len(shell.sent) == 1
    calls.append(shell.submit("k", Rate(100, per=1, burst=100)))
    shell.clock.advance(0.0)
    assert sorted(map(calls.index, shell.sent)) == [0, 1, 2, 3]


def test_calls_without_a_rate_of_their_own_announce_their_start_too(monkeypatch: pytest.MonkeyPatch) -> None:
    shell = Shell(monkeypatch, sees_starts=False)
    shell.rates.set(shell.dispatch.names.of("k"), SECOND, 0.0)
    first, second = shell.submit("k", None), shell.submit("k", None)
    assert first.plan is not None
    assert first.plan.announces
    shell.rates.began(first)  # type: ignore[arg-type]
    shell.clock.advance(1.0)
    assert shell.sent == [first, second]


def test_a_gate_that_has_opened_early_is_woken_again_after_others_have_crowded_it_out(shell: Shell) -> None:
    first, second = shell.submit("k"), shell.submit("k")
    shell.end(first)  # it has not begun: the second goes at once, and nothing waits at the gate any more
    for number in range(100):
        shell.submit(f"other {number}", Rate(1, per=100)), shell.submit(f"other {number}", Rate(1, per=100))
    shell.clock.advance(0.5)
    shell.begin(second)
    third = shell.submit("k")
    shell.clock.advance(0.5)
    assert third not in shell.sent
    shell.clock.advance(0.5)
    assert third in shell.sent


def test_an_interrupted_look_at_marks_leaves_no_call_behind(shell: Shell, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = shell.submit("k"), shell.submit("k")
    shell.begin(first)

    def interrupted(_call: Call) -> Fate:
        monkeypatch.undo()
        monkeypatch.setattr(module, "monotonic", lambda: shell.clock.now)
        raise KeyboardInterrupt

    monkeypatch.setattr(shell.member, "fate", interrupted)
    with pytest.raises(KeyboardInterrupt):
        shell.clock.advance(1.0)
    shell.clock.advance(1.0)
    assert shell.sent == [first, second]


def test_what_was_made_up_for_is_no_burst_later(shell: Shell) -> None:
    """Calls that waited may begin many at once. Later ones may not, though the gate let them pass without a look."""
    fast = Rate(1000, per=1)
    calls = [shell.submit("k", fast) for _ in range(10)]
    shell.begin(calls[0])
    shell.clock.advance(0.2)
    assert shell.sent == calls, "percore was late by more than they take"
    for call in calls[1:]:
        shell.begin(call)
    shell.clock.advance(10.0)
    later = [shell.submit("k", fast) for _ in range(10)]
    assert shell.sent[10:] == later[:1]


class Busy(Clock):
    """A loop whose timers end at whole milliseconds, and the workers' messages, in the order of their times."""

    def __init__(self) -> None:
        super().__init__()
        self._events: list[tuple[float, int, Callable[[], object]]] = []
        self._numbers = count()

    def at(self, when: float, callback: Callable[[], object]) -> None:
        heappush(self._events, (when, next(self._numbers), callback))

    def call_later(self, seconds: float, callback: Callable[[], None]) -> Timer:
        timer = Timer(ceil((self.now + seconds) * 1000) / 1000, callback)
        self.at(timer.when, lambda: timer.is_cancelled or timer.callback())  # type: ignore[func-returns-value]
        return timer

    def call_soon(self, callback: Callable[[], None]) -> None:
        self.at(self.now, callback)

    def run_until(self, end: float) -> None:
        while self._events and self._events[0][0] < end:
            when, _, callback = heappop(self._events)
            self.now = max(self.now, when)
            callback()


class Using(Shell):
    """A supervisor whose worker begins each call some milliseconds after it was sent, and reports its end as late."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, rate: Rate, milliseconds: float) -> None:
        super().__init__(monkeypatch)
        self.starts: list[int] = []
        self._rate = rate
        self._late = milliseconds / 1000
        self._chance = Random(rate.n)
        self.clock: Busy = Busy()
        self.member._clock = self.clock
        self.rates._loop = self.clock  # type: ignore[assignment]

    def _send(self, call: Call, member: Member) -> None:
        super()._send(call, member)
        self.clock.at(self.clock.now + self._late * (0.5 + self._chance.random()), lambda: self._begun(call))

    def _begun(self, call: Call) -> None:
        self.begin(call)
        self.starts.append(round(self.clock.now * 1e9))
        self.clock.at(self.clock.now + self._late, lambda: self._ended(call))

    def _ended(self, call: Call) -> None:
        self.end(call)
        self.submit("k", self._rate)


@pytest.mark.parametrize(("n", "milliseconds"), [(1, 3.0), (10, 3.0), (100, 3.0), (1000, 0.2), (1000, 3.0), (10_000, 3.0)])
def test_a_key_that_always_has_calls_uses_its_rate(monkeypatch: pytest.MonkeyPatch, n: int, milliseconds: float) -> None:
    """Though workers begin calls later than the next one may go, and the loop's timers have coarse ticks."""
    shell = Using(monkeypatch, Rate(n, per=1), milliseconds)
    for _ in range(n):
        shell.submit("k", shell._rate)
    seconds = 1.2 if n > 1000 else max(2, 20 // n)
    shell.clock.run_until(1000.0 + seconds)
    assert len(shell.starts) >= 0.98 * n * seconds
    assert most_within(shell.starts, 1.0) <= n
