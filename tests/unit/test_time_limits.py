"""The clocks of queue_timeout and hard_timeout: how often they look through the pending calls."""

from types import SimpleNamespace
from typing import Any, TypeAlias

import pytest

from percore._calls.policy import Policy
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

    def monotonic(self) -> float:
        return self.now

    def call_later(self, seconds: float, callback: Any) -> Any:
        timer = SimpleNamespace(when=self.now + seconds, callback=callback)
        timer.cancel = lambda: self.timers.remove(timer)
        self.timers.append(timer)
        return timer

    def pending(self) -> list[Any]:
        self.now += COST
        return []

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


@pytest.mark.parametrize("kind", ["queue", "hard"])
def test_new_calls_do_not_shorten_the_pause_between_looks(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    shell = Shell()
    for module in (time_limits, hard_limits):
        monkeypatch.setattr(module, "monotonic", shell.monotonic)
    limits: Any = made(kind, shell)

    def limit() -> None:
        call = SimpleNamespace(begin_by=None, hard_by=None)
        if kind == "queue":
            limits.limit(call, Policy(queue_timeout=SECONDS))
        else:
            limits.limit(call, SECONDS)

    limit()
    assert 1000 + SECONDS <= shell.timers[0].when <= 1000 + 2 * SECONDS
    for _ in range(3):
        shell.look()
        ended = shell.now
        limit()
        assert ended + 9 * COST <= shell.timers[0].when <= ended + 9 * COST + SECONDS
    shell.look()
    shell.now += 20 * COST  # nothing was limited for long
    limit()
    assert shell.timers[0].when <= shell.now + 2 * SECONDS
