"""The samples of a worker: when it sends them, and that it has no timer otherwise."""

from collections.abc import Callable
from typing import Any, cast

import pytest

from percore._common.measuring import bucket_of
from percore._protocol.messages import MEASURED
from percore._worker.sampling import INTERVAL, UNGAUGED, Sampler
from tests import jobs


class Timer:
    def __init__(self, timers: "list[Timer]", callback: Callable[[], object]) -> None:
        self.callback = callback
        self._timers = timers

    def cancel(self) -> None:
        if self in self._timers:
            self._timers.remove(self)


class Channel:
    """A channel whose loop runs a callback at once, and a timer when it is told to."""

    is_open = True

    def __init__(self) -> None:
        self.loop = self
        self.timers: list[Timer] = []
        self.sent: list[Any] = []

    def call_soon_threadsafe(self, callback: Callable[[], object]) -> None:
        callback()

    def call_later(self, seconds: float, callback: Callable[[], object]) -> Timer:
        assert seconds == INTERVAL
        self.timers.append(Timer(self.timers, callback))
        return self.timers[-1]

    def expire(self) -> None:
        (timer,) = self.timers
        self.timers.clear()
        timer.callback()

    def send(self, op: int, number: int, body: Any) -> None:
        self.sent.append((op, number, body))


def sampler_on(channel: Channel) -> Sampler:
    return Sampler(cast(Any, channel))


def test_samples_are_sent_together_and_then_nothing_is_at_work() -> None:
    channel = Channel()
    sampler = sampler_on(channel)
    echo, aecho = sampler.gauges_of(jobs.echo), sampler.gauges_of(jobs.aecho)
    assert (channel.timers, channel.sent) == ([], [])
    for nanoseconds in (10, 10, 1000):
        echo.left = -1
        echo.took(nanoseconds)
    echo.loads.took(7)
    aecho.dumps.took(8)
    assert (len(channel.timers), channel.sent) == (1, [])
    channel.expire()
    counts = ((10, 1 + 2), (bucket_of(1000), 4))
    assert channel.sent == [
        (MEASURED, 0, ("tests.jobs.echo", counts, 30 + 4000, 1, 7, 0, 0)),
        (MEASURED, 0, ("tests.jobs.aecho", (), 0, 0, 0, 1, 8)),
    ]
    assert channel.timers == []
    aecho.took(5)
    channel.expire()
    assert channel.sent[2:] == [(MEASURED, 0, ("tests.jobs.aecho", ((5, 1),), 5, 0, 0, 0, 0))]
    assert channel.timers == []


def test_the_end_sends_what_is_there_and_stops_the_timer() -> None:
    channel = Channel()
    sampler = sampler_on(channel)
    sampler.gauges_of(jobs.echo).took(5)
    sampler.send()
    assert (len(channel.sent), channel.timers) == (1, [])
    sampler.send()
    assert len(channel.sent) == 1


def test_a_closed_channel_gets_no_timer() -> None:
    channel = Channel()
    channel.is_open = False
    sampler_on(channel).gauges_of(jobs.echo).took(5)
    assert channel.timers == []


def test_functions_of_one_name_share_their_gauges_and_further_ones_have_none() -> None:
    sampler = sampler_on(Channel())
    made = [lambda: 1 for _ in range(2)]
    assert sampler.gauges_of(made[0]) is sampler.gauges_of(made[1])
    for number in range(1023):
        made[0].__qualname__ = f"name{number}"
        assert sampler.gauges_of(made[0]) is not UNGAUGED
    made[0].__qualname__ = "one more"
    assert sampler.gauges_of(made[0]) is UNGAUGED


def test_a_sample_whose_timer_an_exception_prevents_leaves_it_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    channel = Channel()
    took = sampler_on(channel).gauges_of(jobs.echo).loads.took

    def interrupt(_callback: Callable[[], object]) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(channel, "call_soon_threadsafe", interrupt)
        with pytest.raises(KeyboardInterrupt):
            took(5)
    for _ in range(100):
        took(5)
    assert len(channel.timers) == 1
