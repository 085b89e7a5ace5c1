"""Deadlines: what is due comes once, in order, and what is over does not pile up."""

from hypothesis import given
from hypothesis import strategies as st

from percore._scheduler.deadlines import Deadlines, end_of_pause, grain, rounded_up

TIMES = st.floats(0, 1000)


@given(st.lists(TIMES), st.lists(TIMES))
def test_each_item_is_due_once_and_in_order(times: list[float], looks: list[float]) -> None:
    deadlines: Deadlines[tuple[float, int]] = Deadlines()
    for number, when in enumerate(times):
        deadlines.add(when, (when, number))
    assert len(deadlines) == len(times)
    given_out: list[tuple[float, int]] = []
    for now in [*sorted(looks), 1001.0]:
        assert deadlines.next() == min((when for when in times if when > max([-1.0, *(one[0] for one in given_out)])), default=None)
        given_out += deadlines.due(now)
        assert all(when <= now for when, _ in given_out)
    assert given_out == sorted((when, number) for number, when in enumerate(times))
    assert deadlines.next() is None


def test_what_is_over_is_dropped_when_it_is_many() -> None:
    deadlines: Deadlines[int] = Deadlines()
    for number in range(10_000):
        deadlines.sweep(lambda item: item % 100 > 0)
        deadlines.add(float(number), number)
        assert len(deadlines) <= 65 + 2 * (number // 100 + 1)
    assert deadlines.due(9900.0)[-1] == 9900
    assert deadlines.next() is not None


def test_few_are_never_looked_at() -> None:
    deadlines: Deadlines[int] = Deadlines()
    deadlines.add(1.0, 1)
    deadlines.sweep(lambda _: True)
    assert deadlines.due(1.0) == [1]


@given(st.floats(1e-3, 1e6), st.floats(0, 1e6))
def test_a_deadline_is_rounded_up_by_3_percent_or_50_ms(seconds: float, now: float) -> None:
    when = now + seconds
    assert 0 <= rounded_up(when, grain(seconds)) - when <= min(0.032 * seconds, 0.0501) + 1e-6


@given(TIMES, st.floats(0, 10))
def test_looks_take_a_tenth_of_the_time_at_most(began: float, took: float) -> None:
    assert abs(end_of_pause(took, began + took) - began - 10 * took) < 1e-6
