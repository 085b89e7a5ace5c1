"""Histograms and gauges: what they keep of many values, and how far a percentile is from the truth."""

from itertools import pairwise
from math import ceil

from hypothesis import given
from hypothesis import strategies as st

from percore._common.measuring import MOST_SKIPPED, MOST_TINY_SKIPPED, QUICK_NS, TINY_NS, Gauge, Histogram, bucket_of, middle_of

VALUES = st.lists(st.integers(0, 10**12), min_size=1, max_size=200)


@given(st.integers(0, 10**15))
def test_the_middle_of_a_bucket_is_near_each_of_its_values(value: int) -> None:
    bucket = bucket_of(value)
    assert abs(middle_of(bucket) - value) <= value / 16
    assert bucket_of(value + 1) in {bucket, bucket + 1}


def test_small_values_have_buckets_of_their_own() -> None:
    assert [(bucket_of(value), middle_of(value)) for value in range(16)] == [(value, value) for value in range(16)]


@given(VALUES, st.floats(0.01, 1))
def test_a_percentile_is_as_exact_as_its_bucket(values: list[int], share: float) -> None:
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    (found,) = histogram.percentiles(share)
    exact = sorted(values)[ceil(share * len(values)) - 1]
    assert bucket_of(round(found)) == bucket_of(exact)
    assert (histogram.count, histogram.total) == (len(values), sum(values))


@given(VALUES, VALUES, st.integers(1, 50))
def test_merged_histograms_count_the_values_of_both(first: list[int], second: list[int], weight: int) -> None:
    whole, left, right = Histogram(), Histogram(), Histogram()
    for part, values in ((left, first), (right, second)):
        for value in values:
            part.add(value, weight)
            for _ in range(weight):
                whole.add(value)
    left.merge(right.counts.items(), right.total)
    assert (left.counts, left.count, left.total) == (whole.counts, whole.count, whole.total)
    assert left.percentiles(0.5, 0.9, 0.99) == whole.percentiles(0.5, 0.9, 0.99)


def test_a_histogram_without_values_has_percentiles_of_0() -> None:
    assert Histogram().percentiles(0.5, 0.99) == [0, 0]


@given(st.lists(st.sampled_from([TINY_NS, QUICK_NS, QUICK_NS + 1]), max_size=600))
def test_the_samples_stand_for_all_calls_up_to_the_last_one_measured(calls: list[int]) -> None:
    samples: list[tuple[int, int]] = []
    gauge = Gauge(lambda nanoseconds, weight: samples.append((nanoseconds, weight)))
    measured = 0
    for number, nanoseconds in enumerate(calls, 1):
        gauge.left -= 1
        if gauge.left < 0:
            gauge.took(nanoseconds)
            measured = number
    assert sum(weight for _, weight in samples) == measured
    assert len(calls) - measured < MOST_TINY_SKIPPED
    for (nanoseconds, _), (_, weight) in pairwise(samples):
        assert weight <= {TINY_NS: MOST_TINY_SKIPPED, QUICK_NS: MOST_SKIPPED}.get(nanoseconds, 1)


def test_a_gauge_that_is_off_measures_nothing() -> None:
    gauge = Gauge(None)
    gauge.left -= 1
    assert gauge.left > 10**15
    gauge.took(5)
    assert gauge.left > 10**15
