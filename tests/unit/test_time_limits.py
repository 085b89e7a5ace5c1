"""The clocks of queue_timeout and hard_timeout: how often they look through the pending calls."""

from types import SimpleNamespace
from typing import Any, TypeAlias

import pytest

from percore._calls.policy import Policy
from percore._scheduler import deadlines
from percore._scheduler.phase import RunnerPhase
from percore._supervisor import hard_limits, time_limits

Limits: TypeAlias = "time_limits.TimeLimits | hard_limits.HardLimits"

SECONDS = 0.1
COST = 1.0
"""Seconds for looking through the pending calls."""


class Shell:
    """A loop, a clock, and an owner of many calls."""

    def __init__(self) -> None:
        self.now = 1000.0
        self.loop: Any = self
        self.phase = RunnerPhase()
        self.timers: list[SimpleNamespace] = []
        self.calls: list[Any] = []
        self.is_interrupted = False
        """Whether the next timer cannot be made."""

    def monotonic(self) -> float:
        return self.now

    def call_later(self, seconds: float, callback: Any) -> Any:
        if self.is_interrupted:
            self.is_interrupted = False
            raise KeyboardInterrupt
        timer = SimpleNamespace(when=self.now + seconds, callback=callback)
        timer.cancel = lambda: self.timers.remove(timer)
        self.timers.append(timer)
        return timer

    def pending(self) -> list[Any]:
        self.now += COST
        return list(self.calls)

    def look(self) -> None:
        """Let the timer run."""
        (timer,) = self.timers
        self.timers.clear()
        self.now = max(self.now, timer.when)
        timer.callback()


def made(kind: str, shell: Any) -> "Limits":
    if kind == "queue":
        return time_limits.TimeLimits(shell, set())
    return hard_limits.HardLimits(shell, shell, 5.0, sees_starts=True)


class Call:
    """A call whose deadline is read. The first reading after `interrupt` is interrupted."""

    def __init__(self) -> None:
        self.deadline: float | None = None
        self.is_interrupted = False

    @property
    def begin_by(self) -> float | None:
        if self.is_interrupted:
            self.is_interrupted = False
            raise KeyboardInterrupt
        return self.deadline

    @begin_by.setter
    def begin_by(self, when: float | None) -> None:
        self.deadline = when

    hard_by = begin_by

    def done(self) -> bool:
        return False


@pytest.fixture
def shell(monkeypatch: pytest.MonkeyPatch) -> Shell:
    shell = Shell()
    for module in (time_limits, hard_limits):
        monkeypatch.setattr(module, "monotonic", shell.monotonic)
    return shell


def limit(limits: Any, call: Any, seconds: float = SECONDS) -> None:
    if isinstance(limits, time_limits.TimeLimits):
        limits.limit(call, Policy(queue_timeout=seconds))
    else:
        limits.limit(call, seconds)


@pytest.mark.parametrize("kind", ["queue", "hard"])
def test_an_interrupted_look_is_made_again(kind: str, shell: Shell) -> None:
    """Else the calls whose deadline was over would never hear of it."""
    limits, found, shell.calls = made(kind, shell), list[Any](), [Call(), Call()]
    for call in shell.calls:
        limit(limits, call)
    setattr(limits, "_expire" if kind == "queue" else "_look_at", lambda call, *_: found.append(call))
    shell.calls[-1].is_interrupted = True
    with pytest.raises(KeyboardInterrupt):
        shell.look()
    assert not found
    while not found:
        shell.look()
    assert found == shell.calls


@pytest.mark.parametrize("kind", ["queue", "hard"])
def test_a_timer_that_was_not_made_is_made_for_the_next_call(kind: str, shell: Shell) -> None:
    """And the one before it runs on until then."""
    limits = made(kind, shell)
    limit(limits, Call(), 2 * SECONDS)
    (before,) = shell.timers
    shell.is_interrupted = True
    with pytest.raises(KeyboardInterrupt):
        limit(limits, Call())
    assert shell.timers == [before]
    limit(limits, Call())
    (timer,) = shell.timers
    assert timer.when < before.when


@pytest.mark.parametrize("kind", ["queue", "hard"])
def test_new_calls_do_not_shorten_the_pause_between_looks(kind: str, shell: Shell) -> None:
    limits = made(kind, shell)
    limit(limits, Call())
    assert 1000 + SECONDS <= shell.timers[0].when <= 1000 + 2 * SECONDS
    for _ in range(3):
        shell.look()
        ended = shell.now
        limit(limits, Call())
        assert ended + 9 * COST <= shell.timers[0].when <= ended + 9 * COST + SECONDS
    shell.look()
    shell.now += 20 * COST  # nothing was limited for long
    limit(limits, Call())
    assert shell.timers[0].when <= shell.now + 2 * SECONDS


@pytest.mark.parametrize("interrupted", [None, 0, 2, 4])
@pytest.mark.parametrize("kind", ["queue", "hard"])
def test_of_many_calls_some_are_looked_at_in_each_step(
    kind: str, interrupted: int | None, shell: Shell, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of them hears, also those that are made meanwhile, and those whose step is interrupted."""
    monkeypatch.setattr(deadlines, "PIECE", 2)
    limits, found, shell.calls = made(kind, shell), list[Any](), [Call() for _ in range(5)]
    for call in shell.calls:
        limit(limits, call)
    if interrupted is not None:
        shell.calls[interrupted].is_interrupted = True

    def hears(call: Call, *_: object) -> None:
        found.append(call)
        call.deadline = None

    setattr(limits, "_expire" if kind == "queue" else "_look_at", hears)
    interrupts, last = 0, Call()
    while len(found) < 6:
        before = len(found)
        try:
            shell.look()
        except KeyboardInterrupt:
            interrupts += 1
        assert len(found) <= before + 2
        if found and last not in shell.calls:
            shell.calls.append(last)
            limit(limits, last, SECONDS / 2)
    assert sorted(map(id, found)) == sorted(map(id, shell.calls))
    assert interrupts == (interrupted is not None)
    for _ in range(10):
        if shell.timers:
            shell.look()
    assert not shell.timers
