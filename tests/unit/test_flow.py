"""The window of a map, where the user does not say."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from percore._core.flow import default_window


@pytest.mark.parametrize(
    ("places", "window"), [(0, 64), (1, 64), (32, 64), (33, 66), (800, 1600), (8192, 16_384), (8193, 16_384), (10**6, 16_384)]
)
def test_twice_what_the_workers_can_run_within_bounds(places: int, window: int) -> None:
    assert default_window(places) == window


@given(st.integers(0, 10**9), st.integers(0, 10**9))
def test_more_places_never_mean_a_smaller_window(one: int, other: int) -> None:
    few, many = sorted((one, other))
    assert 64 <= default_window(few) <= default_window(many) <= 16_384
