"""Token buckets: how many calls may begin, whatever the time between sending a call and its start."""

import random
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from percore import Rate
from percore._scheduler.buckets import LATENESS, Bucket

EARLIER = 1000.0
"""When the clock of a test begins."""

RATES = st.builds(
    lambda n, per, share: Rate(n, per=per, burst=max(1, round(n * share))),
    st.integers(1, 60),
    st.sampled_from([0.001, 0.05, 1.0, 7.3, 3600.0]),
    st.sampled_from([0.0, 0.3, 1.0]),
)


@dataclass
class Sent:
    """A call that was sent and whose start is not known here."""

    starts: float
    known: float


def check_windows(starts: list[float], rate: Rate) -> None:
    """No `per` seconds hold more than n starts; and any time holds no more than the burst and what the bucket gets."""
    starts = sorted(starts)
    interval = rate.per / rate.n
    for place, first in enumerate(starts):
        following = starts[place : place + rate.n + 1]
        assert len(following) <= rate.n or following[-1] - first >= rate.per
        for count, last in enumerate(following, 1):
            assert count <= rate.burst + (LATENESS + last - first) / interval + 1e-6


@given(RATES, st.integers(0, 2**32))
def test_no_window_holds_more_however_late_calls_begin(rate: Rate, seed: int) -> None:
    """Calls begin some time after they were sent, out of order, or never; that becomes known later still, and late by its clock."""
    decide = random.Random(seed)
    interval = rate.per / rate.n
    bucket, now = Bucket(rate), EARLIER
    sent: list[Sent] = []
    starts: list[float] = []
    for _ in range(200):
        now += decide.choice([0.0, 0.1, 0.9, 3.0]) * interval * decide.random()
        for call in [call for call in sent if call.known <= now]:
            sent.remove(call)
            if decide.random() < 0.9:  # else it was handed back
                starts.append(call.starts)
                bucket.began(call.starts + decide.choice([0.0, 1e-4 * interval]))
        if decide.random() < 0.3:
            bucket.opened(now)
        if decide.random() < 0.3:
            bucket.shut(now, len(sent))
        for _ in range(min(decide.choice([0, 1, 1000]), bucket.free(now, len(sent)))):
            begins = now + decide.choice([0.0, 0.5, 5.0]) * interval * decide.random()
            sent.append(Sent(begins, begins + decide.choice([0.0, 2.0]) * interval * decide.random()))
    check_windows([*starts, *(call.starts for call in sent)], rate)


@given(RATES, st.integers(0, 2**32))
def test_what_is_due_may_begin_then_and_not_much_earlier(rate: Rate, seed: int) -> None:
    decide = random.Random(seed)
    interval = rate.per / rate.n
    bucket, now = Bucket(rate), EARLIER
    for _ in range(100):
        held = 0
        while bucket.free(now, held) > 0 and decide.random() < 0.9:
            held += 1
        if bucket.free(now, held) <= 0:
            due = bucket.due(now, held)
            assert due >= now
            if held:
                bucket.began(now, held)
            assert bucket.free(due - 1e-3 * interval - rate.per / 500, 0) <= 0
            assert bucket.free(due + rate.per / 500, 0) > 0, "starts that share an entry come back with the last of them"
            now = due
        elif held:
            bucket.began(now, held)
        now += decide.choice([0.0, 0.5, 2.0]) * interval * decide.random()


@pytest.mark.parametrize("burst", [1, 10, 100])
@pytest.mark.parametrize("late", [0.0, 0.015])
def test_all_of_the_allowance_is_used(burst: int, late: float) -> None:
    """By a program that always has calls, and a timer that is late. Starts that fill a window are then late, too: that is lost."""
    rate = Rate(100, per=1, burst=burst)
    decide = random.Random(3)
    bucket, now, starts = Bucket(rate), EARLIER, 0
    while now < EARLIER + 100:
        starts += (free := bucket.free(now, 0))
        if free:
            bucket.began(now, free)
        now = bucket.shut(now, 0) + late * decide.random()
        bucket.opened(now)
    assert (0.98 if late else 0.998) * 10_000 <= starts <= 10_000 + 100


def test_without_a_burst_the_starts_are_spaced() -> None:
    bucket = Bucket(Rate(2, per=10))
    assert bucket.free(0.0, 0) == 1
    assert bucket.free(0.0, 1) == 0
    bucket.began(0.0)
    assert bucket.due(0.0, 0) == 5.0
    assert bucket.free(4.9, 0) == 0
    assert bucket.free(5.0, 0) == 1


def test_only_waiting_calls_make_up_for_lateness() -> None:
    """A key that was idle begins no more than its burst."""
    bucket = Bucket(Rate(100, per=1))
    bucket.began(0.0)
    due = bucket.shut(0.0, 0)
    bucket.opened(due + 0.05)
    assert bucket.free(due + 0.05, 0) == 6
    bucket.began(due + 0.05, 6)
    assert bucket.free(due + 0.05, 0) == 0
    for time in (1.0, 5.0):
        assert bucket.free(time, 0) == 1
        bucket.began(time)
        assert bucket.free(time, 0) == 0
    bucket.shut(5.0, 0)
    bucket.opened(9.0)
    assert bucket.free(9.0, 0) == 11, "no more than LATENESS, however late"


def test_a_call_that_has_not_begun_takes_one_token_and_not_two() -> None:
    """A worker needs longer to begin a call than the next one has to wait: the token of the first is not taken once more."""
    bucket = Bucket(Rate(100, per=1))
    assert bucket.free(0.0, 0) == 1
    due = bucket.shut(0.0, 1)
    assert due == pytest.approx(0.01), "if the first begins now"
    bucket.opened(due)
    assert bucket.free(due, 1) == 1
    assert bucket.free(due, 2) == 0
    bucket.began(due)  # the first
    assert bucket.free(due, 1) == 0
    assert bucket.due(due, 1) == pytest.approx(0.02)


def test_after_a_pause_there_is_nothing_to_make_up_for() -> None:
    bucket = Bucket(Rate(100, per=1, burst=2))
    bucket.paused_until = 30.0
    bucket.shut(0.0, 0)
    bucket.opened(30.0)
    assert bucket.free(30.0, 0) == 2


def test_a_burst_is_followed_by_spaced_starts_until_the_window_is_full() -> None:
    bucket = Bucket(Rate(4, per=8, burst=2))
    assert bucket.free(0.0, 0) == 2
    bucket.began(0.0, 2)
    assert [bucket.free(time, 0) for time in (1.9, 2.0)] == [0, 1]
    bucket.began(2.0)
    bucket.began(4.0)
    assert bucket.free(7.9, 0) == 0, "the bucket has tokens again, and the window has none"
    assert bucket.due(4.0, 0) == 8.0
    assert bucket.free(8.0, 0) == 2


def test_a_call_that_was_handed_back_leaves_nothing() -> None:
    bucket = Bucket(Rate(1, per=60))
    assert bucket.free(0.0, 1) == 0
    assert bucket.free(0.0, 0) == 1


def test_an_idle_bucket_is_full_again() -> None:
    bucket = Bucket(Rate(2, per=10, burst=2))
    assert bucket.is_full(0.0)
    bucket.began(0.0)
    assert not bucket.is_full(9.9)
    assert bucket.is_full(10.0)
    bucket.paused_until = 20.0
    assert not bucket.is_full(19.0)
    assert bucket.is_full(20.0)


def test_a_pause_stops_everything() -> None:
    for rate in (None, Rate(10, per=1, burst=10)):
        bucket = Bucket(rate)
        bucket.paused_until = 30.0
        assert bucket.free(29.9, 0) == 0
        assert bucket.due(0.0, 0) == 30.0
        assert bucket.free(30.0, 0) >= 10


def test_another_rate_counts_what_has_begun() -> None:
    bucket = Bucket(Rate(10, per=1))
    bucket.began(0.0)
    bucket.change(Rate(1, per=60), 0.0)
    assert bucket.free(59.9, 0) == 0
    assert bucket.free(60.0, 0) == 1
    bucket.change(Rate(1000, per=1, burst=1000), 60.0)
    assert bucket.free(60.0, 0) >= 999
    bucket.began(60.0, 700)
    bucket.change(Rate(500, per=1, burst=500), 60.0)
    assert bucket.free(60.9, 0) < 0
    bucket.change(None, 60.9)
    assert bucket.free(60.9, 5) > 1_000_000


def test_nothing_is_left_of_a_rate_that_was_taken_away() -> None:
    bucket = Bucket(Rate(10, per=1, burst=10))
    for at in (0.0, 0.5):
        bucket.began(at, 5)
    bucket.change(None, 0.6)
    bucket.began(0.6, 100)  # without a rate nothing counts
    bucket.change(Rate(4, per=1, burst=4), 0.7)
    assert bucket.free(0.7, 0) == 4
    bucket.began(0.7, 4)
    assert bucket.free(1.55, 0) <= 0  # also when the starts under the first rate are a second old
    assert bucket.due(1.55, 0) == pytest.approx(1.7)
    assert bucket.free(1.75, 0) == 4


def test_a_key_needs_little_memory_however_many_starts_its_window_holds() -> None:
    rate = Rate(10**6, per=3600, burst=10**6)
    bucket = Bucket(rate)
    for number in range(20_000):
        bucket.began(EARLIER + number * 0.17)
    assert len(bucket._log) <= 1100
    assert bucket.free(EARLIER + 20_000 * 0.17, 0) == 10**6 - 20_000


def test_calls_that_waited_for_one_rate_may_go_by_another() -> None:
    bucket = Bucket(Rate(2, per=1e6, burst=2))
    bucket.began(0.0, 2)
    bucket.shut(0.0, 0)
    bucket.change(Rate(3, per=1e6, burst=3), 0.0)
    bucket.opened(0.0)
    assert bucket.free(0.0, 0) == 1
