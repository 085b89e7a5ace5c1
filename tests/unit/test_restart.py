"""The restart budget: at once, then 0.1 · 2ⁿ up to 5 seconds, and never after ten deaths in a row."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from percore._core.restart import LIMIT, RestartBudget

DELAYS = [0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]


def test_ten_deaths_in_a_row() -> None:
    budget = RestartBudget()
    assert [budget.died() for _ in range(LIMIT - 1)] == pytest.approx(DELAYS)
    assert budget.died() is None
    assert budget.died() is None


def test_ten_it_is() -> None:
    assert LIMIT == 10


def test_a_begun_call_forgives_everything() -> None:
    budget = RestartBudget()
    for _ in range(LIMIT - 1):
        assert budget.died() is not None
    budget.began()
    assert [budget.died() for _ in range(LIMIT - 1)] == pytest.approx(DELAYS)
    assert budget.died() is None


@given(st.lists(st.booleans(), max_size=60))
def test_only_deaths_in_a_row_count(story: list[bool]) -> None:
    budget, row = RestartBudget(), 0
    for began in story:
        if began:
            budget.began()
            row = 0
            continue
        row += 1
        delay = budget.died()
        assert (delay is None) == (row >= LIMIT)
        assert budget.deaths == row
        if delay is not None:
            assert delay == pytest.approx(DELAYS[row - 1])
