"""The harness of the benchmarks: its arithmetic, its order of play, its table. No process is started here."""

from __future__ import annotations

import itertools
from contextlib import asynccontextmanager
from functools import partial
from typing import TYPE_CHECKING

import pytest

from benchmarks._figures import Spread, Target, in_words, paired_ratios, quantile
from benchmarks._harness import Result, Round, Row, Sample, judge, measure, rotated
from benchmarks._table import row_lines

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping


class TestQuantile:
    @pytest.mark.parametrize(
        ("values", "share", "expected"),
        [
            ([3.0], 0.99, 3.0),
            ([3.0, 1.0, 2.0], 0.5, 2.0),
            ([4.0, 1.0, 2.0, 3.0], 0.5, 2.5),
            ([1.0, 2.0, 3.0, 4.0, 5.0], 0.25, 2.0),
            ([1.0, 2.0], 0.0, 1.0),
            ([1.0, 2.0], 1.0, 2.0),
        ],
    )
    def test_lies_between_the_values(self, values: list[float], share: float, expected: float) -> None:
        assert quantile(values, share) == pytest.approx(expected)

    def test_refuses_no_values_and_a_percentage(self) -> None:
        with pytest.raises(ValueError, match="at least one value"):
            quantile([], 0.5)
        with pytest.raises(ValueError, match="from 0 to 1"):
            quantile([1.0], 99)

    def test_spread_is_the_median_and_the_quartiles(self) -> None:
        assert Spread.of([5, 1, 4, 2, 3]) == Spread(2, 3, 4)


class TestRatios:
    def test_are_taken_round_by_round(self) -> None:
        assert paired_ratios([2.0, 9.0], [1.0, 3.0]) == [2.0, 3.0]

    def test_refuse_rounds_without_a_partner(self) -> None:
        with pytest.raises(ValueError, match="shorter"):
            paired_ratios([1.0, 2.0], [1.0])

    def test_at_least_asks_how_many_times_as_fast(self) -> None:
        target = Target("ours", "theirs", "a call", at_least=1.8)
        assert target.ratios([1.0, 2.0], [2.0, 2.0]) == [2.0, 1.0]
        assert target.is_reached(1.8)
        assert not target.is_reached(1.79)
        assert target.wording == "at least 1.8 x as fast"

    def test_at_most_asks_how_many_times_the_time(self) -> None:
        target = Target("ours", "theirs", "a call", at_most=1.4)
        assert target.ratios([1.0, 2.0], [2.0, 2.0]) == [0.5, 1.0]
        assert target.is_reached(1.4)
        assert not target.is_reached(1.41)
        assert target.wording == "at most 1.4 x the time"

    @pytest.mark.parametrize("bounds", [{}, {"at_least": 1.0, "at_most": 1.0}])
    def test_a_target_has_one_bound(self, bounds: dict[str, float]) -> None:
        with pytest.raises(ValueError, match="either at_least or at_most"):
            Target("ours", "theirs", "a call", **bounds)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (2.6e-6, "2.60 us"),
        (0.00012, "120 us"),
        (0.048, "48.0 ms"),
        (1.256, "1.26 s"),
        (123.4, "123 s"),
        (0.0, "0.00 us"),
    ],
)
def test_seconds_in_words(seconds: float, words: str) -> None:
    assert in_words(seconds) == words


def test_every_contestant_is_first_in_turn() -> None:
    assert [rotated(["a", "b", "c"], number) for number in range(4)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        ["a", "b", "c"],
    ]
    assert rotated([], 3) == []


class TestMeasure:
    async def test_opens_all_warms_up_interleaves_and_closes(self) -> None:
        story: list[str] = []

        @asynccontextmanager
        async def contestant(name: str) -> AsyncIterator[Round]:
            story.append(f"open {name}")
            clock = itertools.count()

            async def once() -> Sample:
                story.append(name)
                return {"a call": float(next(clock))}

            yield once
            story.append(f"close {name}")

        names = ("a", "b")
        result = await measure(Row({name: partial(contestant, name) for name in names}, [], rounds=3, warm_ups=1))
        played = ["a", "b", "a", "b", "b", "a", "a", "b"]
        assert story == ["open a", "open b", *played, "close b", "close a"]
        assert result.values("a", "a call") == [1, 2, 3]  # the warm-up is not among them

    async def test_leaves_out_what_is_not_installed(self) -> None:
        @asynccontextmanager
        async def missing() -> AsyncIterator[Round]:
            raise ModuleNotFoundError("No module named 'rival'")
            yield  # a generator all the same

        result = await measure(Row({"rival": missing}, [Target("ours", "rival", "a call", at_most=1)], rounds=1))
        assert result == Result(samples={}, absent={"rival": "No module named 'rival'"})

    async def test_a_failing_contestant_fails_the_row_and_closes_the_others(self) -> None:
        closed: list[str] = []

        @asynccontextmanager
        async def failing() -> AsyncIterator[Round]:
            async def once() -> Sample:
                raise RuntimeError("a wrong result")

            try:
                yield once
            finally:
                closed.append("failing")

        with pytest.raises(RuntimeError, match="a wrong result"):
            await measure(Row({"failing": failing}, []))
        assert closed == ["failing"]


def result_of(times: Mapping[str, list[float]]) -> Result:
    return Result({name: [{"a call": seconds} for seconds in values] for name, values in times.items()})


def test_the_verdict_is_the_median_of_the_paired_ratios() -> None:
    # Round by round twice, twice and half as fast; the ratio of the medians would say 1.
    result = result_of({"ours": [1.0, 10.0, 4.0], "theirs": [2.0, 20.0, 2.0]})
    (verdict,) = judge([Target("ours", "theirs", "a call", at_least=1.8)], result)
    assert verdict.ratio is not None
    assert verdict.ratio.median == 2
    assert verdict.is_reached


def test_the_table_tells_target_and_reached() -> None:
    result = result_of({"ours": [0.001], "theirs": [0.003]})
    result.absent["rival"] = "No module named 'rival'"
    targets = [
        Target("ours", "theirs", "a call", at_least=2),
        Target("ours", "theirs", "a call", at_least=4),
        Target("ours", "rival", "a call", at_most=1),
    ]
    text = "\n".join(row_lines("calls: what a call costs", result, judge(targets, result)))
    assert "left out: No module named 'rival'" in text
    assert "reached       ours / theirs, a call: target at least 2 x as fast, measured 3.00 (3.00 to 3.00)" in text
    assert "MISSED        ours / theirs, a call: target at least 4 x as fast, measured 3.00 (3.00 to 3.00)" in text
    assert "not measured  ours / rival, a call: target at most 1 x the time" in text
