"""How much of a map is on its way: windows in items and in bytes, and what a batch is worth."""

import random
import sys
from collections import deque
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from percore._scheduler.windows import AHEAD_SECONDS, BATCH_SECONDS, BYTES, LEAST, MOST, Cost, Window, most_of

MIB = 1 << 20


def warm(room: int, *, result: int = 0, **more: Any) -> Window:
    """An adaptive window after its first result, which was of that size and is handed over."""
    window = Window(None, room, **more)
    window.pull(1, 0)
    window.end(1, 0, result, now=0.0)
    window.hand_over(result)
    return window


# Exact


@pytest.mark.parametrize("size", [1, 2, 63, 1000, 10**6])
def test_an_exact_window_is_exact(size: int) -> None:
    window = Window(size, 10**6, sys.maxsize)
    assert window.space() == size
    assert window.is_worth_a_pull()
    window.pull(size, size * BYTES)  # bytes do not count: the user has said what he wants
    assert window.space() == 0
    assert not window.is_worth_a_pull()
    window.end(size, size * BYTES, size * BYTES, now=0.0)
    assert window.space() == 0
    for handed_over in range(1, min(size, 100) + 1):
        window.hand_over(BYTES)
        assert window.space() == handed_over
        assert window.is_worth_a_pull()
    assert window.limit == size


def test_an_exact_window_never_adapts() -> None:
    window = Window(3, 1000)
    for now in range(100):
        window.pull(3, 0)
        window.end(3, 0, 0, now)
        window.hand_over(0, 3)
        assert window.limit == window.space() == 3


@pytest.mark.parametrize(("exact", "most", "limit"), [(10, 4, 4), (4, 10, 4), (None, 4, 4), (None, 10**6, LEAST)])
def test_no_window_is_larger_than_what_is_let_in(exact: int | None, most: int, limit: int) -> None:
    window = Window(exact, 1000, most)
    assert window.limit == limit
    for now in range(10):
        count = window.space()
        window.pull(count, 0)
        window.end(count, 0, 0, float(now))
        window.hand_over(0, count)
        assert window.limit <= most


def test_a_window_follows_the_number_of_workers() -> None:
    fresh = Window(None, 100)
    fresh.resize(300, most_of(3))
    assert fresh.limit == LEAST  # as long as there are no results
    window = warm(100)
    assert window.limit == 200
    window.resize(300, most_of(3))
    assert window.limit == 600
    window.resize(100, most_of(1))
    assert window.limit == 200
    window.pull(5000, 0)
    window.end(5000, 0, 0, now=AHEAD_SECONDS)
    window.hand_over(0, 5000)
    assert window.limit == 5000  # by its rate
    window.resize(300, most_of(3))
    assert window.limit == 5000
    window.resize(1, 1000)
    assert window.limit == 1000
    exact = Window(7, 100)
    exact.resize(300, 3)
    assert exact.limit == 7


# Adaptive, in items


def test_it_starts_at_64() -> None:
    window = Window(None, 10_000)
    assert window.space() == 64
    window.pull(64, 0)
    assert window.space() == 0


@pytest.mark.parametrize(
    ("room", "limit"), [(0, 64), (1, 64), (32, 64), (33, 66), (800, 1600), (65_536, 131_072), (65_537, 131_072), (10**6, 131_072)]
)
def test_with_the_first_results_it_is_twice_what_the_workers_can_hold(room: int, limit: int) -> None:
    assert warm(room).space() == limit


@pytest.mark.parametrize(
    ("a_second", "limit"),
    [(0, 64), (100, 64), (1280, 64), (2000, 100), (100_000, 5000), (2_621_440, MOST), (10**7, MOST), (10**9, MOST)],
)
def test_it_holds_what_ends_in_a_moment(a_second: int, limit: int) -> None:
    assert AHEAD_SECONDS == 0.05
    window = warm(1)
    window.pull(a_second, 0)
    window.end(a_second, 0, 0, now=1.0)
    window.hand_over(0, a_second)
    assert window.limit == limit


def test_it_shrinks_again_when_calls_take_longer() -> None:
    window = warm(100)
    for now, count, limit in ((1.0, 10**7, MOST), (2.0, 10**5, 5000), (3.0, 1, 200)):
        window.pull(count, 0)
        window.end(count, 0, 0, now)
        window.hand_over(0, count)
        assert window.limit == limit


def test_what_ends_at_once_is_no_rate() -> None:
    window = warm(1)
    for _ in range(1000):
        window.pull(64, 0)
        window.end(64, 0, 0, now=0.0)
        window.hand_over(0, 64)
    assert window.limit == 64


@given(
    room=st.integers(0, 10**6),
    ends=st.lists(st.tuples(st.integers(1, 10**6), st.floats(0, 100), st.integers(0, 1 << 34)), max_size=30),
)
def test_it_stays_within_its_bounds(room: int, ends: list[tuple[int, float, int]]) -> None:
    window = Window(None, room)
    now = 0.0
    for count, seconds, size in ends:
        now += seconds
        window.pull(count, 0)
        window.end(count, 0, size, now)
        window.hand_over(size, count)
        assert LEAST <= window.limit <= MOST
        assert 1 <= window.space() <= MOST


# Adaptive, in bytes


def test_pickled_arguments_are_bounded() -> None:
    window = warm(10_000)
    pulled = 0
    while window.space():
        window.pull(1, MIB)
        pulled += 1
    assert pulled == BYTES // MIB
    window.end(1, MIB, 0, now=0.0)
    assert window.space() > 0


def test_results_are_bounded_those_that_wait_and_those_that_are_expected() -> None:
    window = warm(10_000, result=MIB)
    assert window.space() == 64
    window.pull(64, 0)
    assert window.space() == 0
    window.end(32, 0, 32 * MIB, now=0.0)
    assert window.space() == 0
    window.hand_over(MIB, 1)
    assert window.space() == 1
    window.hand_over(7 * MIB, 7)
    assert window.space() == 8


@pytest.mark.parametrize("size", [BYTES, 2 * BYTES, 1 << 36])
@pytest.mark.parametrize("what", ["arguments", "results"])
def test_one_item_always_passes(what: str, size: int) -> None:
    window = warm(100, result=size if what == "results" else 0)
    for now in range(10):
        assert window.space() >= 1
        assert window.is_worth_a_pull()
        window.pull(1, size if what == "arguments" else 0)
        assert window.space() == 0
        window.end(1, size if what == "arguments" else 0, size if what == "results" else 0, float(now))
        assert what == "arguments" or window.space() == 0
        window.hand_over(size if what == "results" else 0)


def test_the_mean_follows_the_results() -> None:
    window = warm(10_000, result=MIB)
    assert window.space() == 64
    for _ in range(1000):
        window.pull(1, 0)
        window.end(1, 0, 1024, now=0.0)
        window.hand_over(1024)
    assert window.space() > 10_000


def test_results_that_stay_small_after_a_large_one_never_fail() -> None:
    """Their mean falls by a 64th each time. When it was too small to divide by, a map failed after 44,600 calls."""
    window = warm(100, result=MIB)
    for _ in range(50_000):
        window.pull(1, 0)
        window.end(1, 0, 0, now=0.0)
        window.hand_over(0)
        assert window.space() > 64
        assert window.is_worth_a_pull()


def test_results_of_the_size_that_was_expected_stay_within_the_bound() -> None:
    window = warm(10_000, result=MIB)
    waiting = under_way = 0
    for _ in range(500):  # the consumer is slow
        space = window.space()
        window.pull(space, 0)
        under_way += space
        window.end(under_way, 0, under_way * MIB, now=0.0) if under_way else None
        waiting, under_way = waiting + under_way, 0
        assert waiting * MIB <= BYTES
        window.hand_over(MIB)
        waiting -= 1


# Waking whoever pulls


@pytest.mark.parametrize("limit", [64, 100, 1600, MOST])
def test_short_calls_are_pulled_by_the_hundred(limit: int) -> None:
    window = warm(limit // 2)
    window.pull(limit, 0)
    window.end(limit - 1, 0, 0, now=0.0)
    for handed_over in range(1, -(-limit // 8)):
        window.hand_over(0)
        assert window.space() == handed_over
        assert not window.is_worth_a_pull()
    window.hand_over(0)
    assert window.is_worth_a_pull()


def test_who_is_held_by_bytes_is_woken_before_everything_has_ended() -> None:
    window = warm(10_000, result=MIB)  # 64 items fit, of the 20,000 that the window holds otherwise
    window.pull(64, 0)
    window.end(32, 0, 32 * MIB, now=0.0)
    window.hand_over(7 * MIB, 7)
    assert not window.is_worth_a_pull()
    window.hand_over(MIB)
    assert window.is_worth_a_pull()


def test_when_nothing_is_under_way_any_space_will_do() -> None:
    window = warm(10_000)
    window.pull(window.limit, 0)
    window.end(window.limit, 0, 0, now=0.0)
    window.hand_over(0)
    assert window.is_worth_a_pull()


@given(
    seed=st.integers(0, 1 << 32),
    exact=st.one_of(st.none(), st.integers(1, 100)),
    room=st.integers(0, 2000),
    most=st.sampled_from([1, 5, 200, MOST]),
    items=st.integers(0, 600),
    arguments=st.sampled_from([0, 100, MIB, 40 * MIB, 100 * MIB]),
    results=st.lists(st.sampled_from([0, 100, MIB, 40 * MIB, 100 * MIB]), min_size=1, max_size=3),
    is_list=st.booleans(),
)
def test_who_pulls_is_always_woken_again(  # noqa: PLR0917  # given by name
    seed: int,
    exact: int | None,
    room: int,
    most: int,
    items: int,
    arguments: int,
    results: list[int],
    is_list: bool,
) -> None:
    """A map as it runs: it pulls until there is no space and is woken only when `is_worth_a_pull` says so."""
    numbers = random.Random(seed)
    window = Window(exact, room, most)
    now = 0.0
    under_way = 0
    waiting: deque[int] = deque()
    is_asleep = False
    while window.handed_over < items:
        while not is_asleep and window.pulled < items:
            space = window.space()
            assert space <= window.limit
            count = min(space, items - window.pulled, numbers.randint(1, 64))
            window.pull(count, count * arguments)
            under_way += count
            is_asleep = space == 0
        assert under_way or waiting, "nothing is on its way, and nobody will wake whoever pulls"
        now += numbers.choice([0.0, 0.001, 0.1])
        if under_way and (not waiting or numbers.random() < 0.5):
            count = min(under_way, numbers.randint(1, 64))
            size = results[window.ended % len(results)]
            window.end(count, count * arguments, count * size, now)
            under_way -= count
            if is_list:
                window.hand_over(count * size, count)
            else:
                waiting.extend([size] * count)
        else:
            window.hand_over(waiting.popleft())
        if window.is_worth_a_pull():
            is_asleep = False
    assert window.pulled == window.ended == window.handed_over == items


@given(
    exact=st.one_of(st.none(), st.integers(1, 2000)),
    room=st.integers(0, 1000),
    under_way=st.integers(0, 10),
    size=st.sampled_from([0, 1000, MIB]),
)
def test_who_looks_no_earlier_than_told_is_hardly_late(exact: int | None, room: int, under_way: int, size: int) -> None:
    window = Window(exact, room, sys.maxsize) if exact else warm(room, result=size)
    count = window.space()
    window.pull(count, 0)
    ended = count - min(under_way, count - 1)
    window.end(ended, 0, ended * size, now=0.0)
    wake_at = window.wake_at()
    assert window.handed_over < wake_at <= window.pulled
    first = None
    for _ in range(ended):
        window.hand_over(size)
        if window.is_worth_a_pull():
            first = first or window.handed_over
            if window.handed_over >= wake_at:
                break
    assert first is not None
    assert window.handed_over - first <= window.limit // 8


@pytest.mark.parametrize(("limit", "batch", "first"), [(16_000, 1, 2000), (16_000, 3000, 3000), (16_000, 10**6, 4000)])
def test_who_pulls_for_batches_is_woken_for_a_whole_one_where_the_window_has_room_for_four(
    limit: int, batch: int, first: int
) -> None:
    window = warm(limit // 2)
    window.batch = batch
    window.pull(limit, 0)
    for ended, is_worth in ((first - 1, False), (1, True)):
        window.end(ended, 0, 0, now=0.0)
        window.hand_over(0, ended)
        assert window.is_worth_a_pull() == is_worth


def test_until_their_rate_is_known_it_holds_what_calls_are_known_to_take() -> None:
    window = Window(None, 100)
    window.expect(1000)
    assert window.limit == LEAST  # not before the first result
    window.pull(1, 0)
    window.end(1, 0, 0, now=0.0)
    window.hand_over(0)
    for items, limit in ((1000, 1000), (10**9, MOST), (1, 200)):
        window.expect(items)
        assert window.limit == limit
    window.pull(100, 0)
    window.end(100, 0, 0, now=1.0)
    window.hand_over(0, 100)
    assert window.is_rated
    window.expect(1000)
    assert window.limit == 200


@pytest.mark.parametrize(("exact", "most"), [(10, 10**6), (None, 70)])
def test_what_is_expected_never_exceeds_what_is_allowed(exact: int | None, most: int) -> None:
    window = Window(exact, 100, most)
    window.pull(1, 0)
    window.end(1, 0, 0, now=0.0)
    window.expect(1000)
    assert window.limit == min(exact or most, most)


# What a batch is worth


def test_before_anything_is_measured_items_go_one_by_one() -> None:
    assert Cost().batch(10**6, 4) == 1


def test_a_batch_is_a_millisecond_of_work(subtests: pytest.Subtests) -> None:
    for workers in [1, 4, 16]:
        for seconds, items in [(1e-5, 100), (1e-4, 10), (0.0005, 2), (0.001, 1), (0.0011, 1), (10, 1), (1e6, 1)]:
            with subtests.test(seconds=seconds, items=items, workers=workers):
                cost = Cost()
                cost.measured(100, 100 * seconds)
                assert abs(cost.batch(10**6, workers) - items) <= 1


@pytest.mark.parametrize("workers", [0, 1, 2, 4, 16, 64, 1024])
def test_each_worker_may_have_several_batches_of_a_window(workers: int) -> None:
    cost = Cost()
    cost.measured(1, 1e-9)
    count = cost.batch(MOST, workers)
    assert count >= LEAST
    assert count <= LEAST or 2 * count * max(1, workers) <= most_of(max(1, workers))


def test_a_map_holds_so_many_items_of_each_worker_and_not_too_many_in_all() -> None:
    assert [most_of(workers) for workers in (1, 2, 8, 9, 1024)] == [16_384, 32_768, 131_072, 131_072, 131_072]


@given(seconds=st.floats(1e-9, 10), waiting=st.integers(1, MOST), workers=st.integers(1, 64))
def test_of_a_few_items_each_worker_gets_a_part(seconds: float, waiting: int, workers: int) -> None:
    cost = Cost()
    cost.measured(1, seconds)
    whole, count = cost.batch(10**9, workers), cost.batch(waiting, workers)
    assert 1 <= count <= min(waiting, whole)
    assert count * workers >= min(waiting, whole)


def test_a_part_of_a_batch_is_worth_a_message_from_a_quarter_of_a_millisecond_on() -> None:
    cost = Cost()
    cost.measured(1, BATCH_SECONDS / 40)
    # Whole: 40 items. A quarter: 10.
    for waiting, workers, expected in [(40, 8, 40), (39, 1, 39), (39, 2, 20), (39, 8, 10), (8, 8, 8), (1, 8, 1), (0, 8, 1)]:
        assert cost.batch(waiting, workers) == expected, (waiting, workers)


def test_costs_are_believed_when_they_grow_and_by_and_by_when_they_fall() -> None:
    cost = Cost()
    cost.measured(1, 1e-6)
    for expected in (8e-6, 64e-6, 512e-6, 1e-3, 1e-3):
        cost.measured(10, 0.01)
        assert cost.seconds == pytest.approx(expected)
    for expected in (5e-4, 2.5e-4):
        cost.measured(10, 1e-6)
        assert cost.seconds == pytest.approx(expected)


def test_a_batch_that_had_to_wait_for_a_cpu_makes_the_next_ones_hardly_smaller() -> None:
    cost = Cost()
    cost.measured(1, 1e-6)
    for _ in range(3):
        cost.measured(1000, 0.009)
        assert cost.seconds == pytest.approx(1.25e-6)
        cost.measured(1000, 0.001)
    cost.measured(1000, 0.012)  # more than that
    assert cost.seconds == pytest.approx(8e-6)


def test_many_items_that_take_more_twice_in_a_row_are_believed() -> None:
    cost = Cost()
    cost.measured(1, 1e-6)
    for expected in (1.25e-6, 9e-6, 9e-6):
        cost.measured(1000, 0.009)
        assert cost.seconds == pytest.approx(expected)


def test_what_took_no_time_may_take_some_later() -> None:
    cost = Cost()
    cost.measured(1, 0.0)
    assert cost.batch(10**6, 1) >= LEAST
    for _ in range(12):
        cost.measured(1, 1.0)
    assert cost.batch(10**6, 1) == 1


@given(
    measured=st.lists(st.tuples(st.integers(1, 2000), st.floats(0, 1e6)), max_size=20),
    waiting=st.integers(1, 10**6),
    workers=st.integers(0, 1024),
)
def test_a_batch_is_never_empty_nor_endless(measured: list[tuple[int, float]], waiting: int, workers: int) -> None:
    cost = Cost()
    for count, seconds in measured:
        cost.measured(count, seconds)
    count = cost.batch(waiting, workers)
    assert 1 <= count <= min(waiting, MOST)
    assert cost.seconds is None or count == 1 or count * cost.seconds <= BATCH_SECONDS * 1.01
