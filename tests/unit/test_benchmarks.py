"""The harness of the benchmarks: its arithmetic, its order of play, its table. No process is started here."""

from __future__ import annotations

import itertools
import subprocess
import sys
from contextlib import asynccontextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from benchmarks.__main__ import draw, row_module, row_names, title_of
from benchmarks._figures import Limit, Spread, Target, in_items, in_mebibytes, in_times, in_words, paired_ratios, quantile
from benchmarks._harness import Result, Round, Row, Sample, judge, measure, rotated
from benchmarks._table import row_lines
from benchmarks.calls import spin
from benchmarks.rows import map_mixed

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


def test_other_units_in_words() -> None:
    assert in_mebibytes(2.5 * 2**20) == "2.50 MiB"
    assert in_times(1.04) == "1.040 x"
    assert in_items(16_384.0) == "16384 items"


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
    assert verdict.measured is not None
    assert verdict.measured.median == 2
    assert verdict.is_reached


def test_a_limit_is_judged_by_the_median_of_its_own_metric() -> None:
    result = result_of({"ours": [1.0, 9.0, 2.0]})
    reached, missed, unknown = judge(
        [Limit("ours", "a call", 2), Limit("ours", "a call", 1.9), Limit("rival", "a call", 9)], result
    )
    assert reached.measured == Spread(1.5, 2, 5.5)
    assert reached.is_reached
    assert not missed.is_reached
    assert unknown.measured is None
    assert not unknown.is_reached


def test_the_table_says_a_metric_in_its_unit() -> None:
    result = Result({"ours": [{"growth": 2.0**20, "a call": 0.002}]}, {"rival": "No module named 'rival'"})
    targets = [Limit("ours", "growth", 2 << 20), Limit("ours", "a call", 0.001), Limit("rival", "growth", 2 << 20)]
    lines = list(row_lines("memory: what stays", result, judge(targets, result), {"growth": in_mebibytes}))
    assert lines[3].endswith(" 1.00 MiB   1.00 MiB to 1.00 MiB")
    assert lines[4].endswith(" 2.00 ms   2.00 ms to 2.00 ms")
    assert lines[-3:] == [
        "  reached       ours, growth: target at most 2.00 MiB, measured 1.00 MiB (1.00 MiB to 1.00 MiB)",
        "  MISSED        ours, a call: target at most 1.00 ms, measured 2.00 ms (2.00 ms to 2.00 ms)",
        "  not measured  rival, growth: target at most 2.00 MiB",
    ]


def test_the_table_tells_target_and_reached() -> None:
    result = result_of({"ours": [0.001], "theirs": [0.003]})
    result.absent["rival"] = "No module named 'rival'"
    targets = [
        Target("ours", "theirs", "a call", at_least=2),
        Target("ours", "theirs", "a call", at_least=4),
        Target("ours", "rival", "a call", at_most=1),
    ]
    text = "\n".join(row_lines("calls: what a call costs", result, judge(targets, result), {}))
    assert "left out: No module named 'rival'" in text
    assert "reached       ours / theirs, a call: target at least 2 x as fast, measured 3.00 (3.00 to 3.00)" in text
    assert "MISSED        ours / theirs, a call: target at least 4 x as fast, measured 3.00 (3.00 to 3.00)" in text
    assert "not measured  ours / rival, a call: target at most 1 x the time" in text


class TestDraw:
    def test_tells_where_the_plot_is(self, tmp_path: Path) -> None:
        drawn: list[Path] = []
        row = Row({}, [], draw=lambda _result, path: drawn.append(path))
        assert draw(row, Result(), tmp_path / "row.png") == f"  plot: {tmp_path / 'row.png'}"
        assert drawn == [tmp_path / "row.png"]

    def test_does_without_matplotlib(self, tmp_path: Path) -> None:
        def needs(_result: Result, _path: Path) -> None:
            raise ModuleNotFoundError("No module named 'matplotlib'")

        assert draw(Row({}, [], draw=needs), Result(), tmp_path) == "  no plot: No module named 'matplotlib'"
        assert draw(Row({}, []), Result(), tmp_path) == "  no plot: this row has none"

    @pytest.mark.skipif(find_spec("matplotlib") is None, reason="comes with the extra bench alone")
    def test_the_window_over_the_durations(self, tmp_path: Path) -> None:
        # A process of its own: matplotlib keeps its fonts open.
        program = """
import sys
from pathlib import Path
from benchmarks._figures import in_words
from benchmarks._harness import Result
from benchmarks.rows import map_window
row = map_window.row(quick=False)
sample = {in_words(seconds): 64.0 for seconds in map_window.DURATIONS}
row.draw(Result({name: [sample] for name in row.contestants}), Path(sys.argv[1]))
"""
        root = Path(__file__).parents[2]
        subprocess.run([sys.executable, "-W", "error", "-c", program, str(tmp_path / "row.png")], cwd=root, check=True)
        assert (tmp_path / "row.png").read_bytes().startswith(b"\x89PNG")


class TestRows:
    @pytest.mark.parametrize("quick", [True, False])
    @pytest.mark.parametrize("name", row_names())
    def test_has_a_title_and_targets_among_its_contestants(self, name: str, quick: bool) -> None:
        try:
            row: Row = row_module(name).row(quick=quick)
        except SystemExit as error:  # round_trip, on a machine with one CPU
            pytest.skip(str(error))
        assert title_of(name).endswith((".", "?"))
        assert len(title_of(name)) <= 132
        for target in row.targets:
            named = {target.contestant} if isinstance(target, Limit) else {target.ours, target.theirs}
            assert named <= set(row.contestants)

    def test_the_costs_of_map_mixed_are_the_same_every_time_and_of_all_magnitudes(self) -> None:
        costs = map_mixed.costs_of(1000)
        assert costs == map_mixed.costs_of(1000)
        assert all(map_mixed.LEAST <= cost <= map_mixed.MOST for cost in costs)
        of_a_magnitude = [sum(low <= cost < 10 * low for cost in costs) for low in (1e-6, 1e-5, 1e-4, 1e-3, 1e-2)]
        assert min(of_a_magnitude) > 150

    def test_costs_dealt_by_hand_are_all_there_and_nearly_even(self) -> None:
        costs = map_mixed.costs_of(1000)
        parts = map_mixed.dealt(costs)
        assert sorted(cost for part in parts for cost in part) == sorted(costs)
        totals = [sum(part) for part in parts]
        assert max(totals) - min(totals) < 1e-4

    def test_a_spin_tells_what_it_used(self) -> None:
        assert spin(0.001) >= 0.001
        assert spin(0) >= 0
