"""The harness of the benchmarks: its arithmetic, its order of play, its verdicts, its table and its page.

No worker is started here; one test starts a process that fails at once, and one the bare echo.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import sys
from contextlib import asynccontextmanager
from typing import TYPE_CHECKING
from xml.etree import ElementTree as ET

import pytest

from benchmarks import moved, pages, plots
from benchmarks.__main__ import check, parsed_arguments
from benchmarks.bare import bare_echo
from benchmarks.calls import spin
from benchmarks.figures import (
    Spread,
    Target,
    in_items,
    in_mebibytes,
    in_percent,
    in_seconds,
    in_times,
    latencies,
    quantile,
)
from benchmarks.harness import Round, Row, Wanted, measure, rotated
from benchmarks.machine import differences
from benchmarks.pages import read
from benchmarks.peers import Pair, awaiting, mapping
from benchmarks.plots import Plot
from benchmarks.results import Change, Choice, Result, Sample, as_json, changes, from_json, judge, settings_of, to_text
from benchmarks.rows import maps
from benchmarks.rows.kinds import derive
from benchmarks.rows.payloads import Payload, memcpy, targets_of, value_of
from benchmarks.run import RowFailed, Share, row_names, row_of, run_row, share_of, title_of
from benchmarks.table import row_lines, setting_of

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Mapping

    from benchmarks.harness import Contestant
    from benchmarks.results import Json


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

    def test_latencies_have_a_thousandth_only_where_there_are_a_thousand(self) -> None:
        assert latencies([1.0, 2.0, 6.0]) == {"p50": 2.0, "p99": pytest.approx(5.92), "mean": 3.0}
        assert latencies([1.0] * 999 + [9.0])["p99.9"] == pytest.approx(1.008)


class TestRatios:
    def test_refuse_rounds_without_a_partner(self) -> None:
        with pytest.raises(ValueError, match="shorter"):
            Target("ours", "a call", "theirs", at_most=1).ratios([1.0, 2.0], [1.0])

    def test_at_least_asks_how_many_times_as_fast(self) -> None:
        target = Target("ours", "a call", "theirs", at_least=1.8)
        assert target.ratios([1.0, 2.0], [2.0, 2.0]) == [2.0, 1.0]
        assert target.is_reached(1.8)
        assert not target.is_reached(1.79)
        assert (target.kind, target.reach) == ("times as fast", 1.8)

    def test_at_most_asks_how_many_times_as_much(self) -> None:
        target = Target("ours", "a call", "theirs", at_most=1.4)
        assert target.ratios([1.0, 2.0], [2.0, 2.0]) == [0.5, 1.0]
        assert target.is_reached(1.4)
        assert not target.is_reached(1.41)
        assert (target.kind, target.reach) == ("times as much", 1.4)

    @pytest.mark.parametrize("bounds", [{}, {"at_least": 1.0, "at_most": 1.0}])
    def test_a_target_has_one_bound(self, bounds: dict[str, float]) -> None:
        with pytest.raises(ValueError, match="either at_least or at_most"):
            Target("ours", "a call", "theirs", **bounds)


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
def test_seconds_in_seconds(seconds: float, words: str) -> None:
    assert in_seconds(seconds) == words


def test_other_units_in_seconds() -> None:
    assert in_mebibytes(2.5 * 2**20) == "2.50 MiB"
    assert in_times(1.04) == "1.040 x"
    assert in_items(16_384.0) == "16384 items"
    assert in_percent(0.0005) == "0.05%"


def test_every_contestant_is_first_in_turn() -> None:
    assert [rotated(["a", "b", "c"], number) for number in range(4)] == [
        ["a", "b", "c"],
        ["b", "c", "a"],
        ["c", "a", "b"],
        ["a", "b", "c"],
    ]
    assert rotated([], 3) == []


class Players:
    """Contestants that write down what happens to them; a round takes as long as it is told."""

    def __init__(self) -> None:
        self.story: list[str] = []
        self.now = 0.0

    def make(self, name: str, seconds: float = 1.0, failing: Exception | None = None) -> Contestant:
        @asynccontextmanager
        async def contestant() -> AsyncIterator[Round]:
            self.story.append(f"open {name}")
            clock = itertools.count()

            async def once() -> Sample:
                self.story.append(name)
                self.now += seconds
                if failing is not None:
                    raise failing
                return {"number": float(next(clock)), "a call": seconds}

            yield once
            self.story.append(f"close {name}")

        return contestant

    async def play(self, row: Row, wanted: Wanted | None = None) -> Result:
        return await measure(row, wanted, clock=lambda: self.now)


@pytest.fixture
def players() -> Players:
    return Players()


class TestMeasure:
    async def test_opens_warms_up_interleaves_and_closes(self, players: Players) -> None:
        result = await players.play(Row({name: players.make(name) for name in "ab"}, [], rounds=3))
        played = ["a", "b", "b", "a", "a", "b"]
        assert players.story == ["open a", "a", "open b", "b", *played, "close b", "close a"]
        assert result.values("a", "number") == [1, 2, 3]  # the warm-up is not among them
        assert (result.rounds, result.seconds) == (3, 8)

    async def test_those_that_are_restless_are_open_for_their_rounds_alone(self, players: Players) -> None:
        row = Row({name: players.make(name) for name in "ab"}, [], rounds=2, anew=frozenset("b"))
        result = await players.play(row)
        alone = ["open b", "b", "b", "close b"]
        assert players.story == ["open a", "a", "a", *alone, *alone, "a", "close a"]
        assert result.rounds == 2

    async def test_a_peer_plays_with_the_fastest_of_its_settings(self, players: Players) -> None:
        settings = {"slow": players.make("slow", 3), "fast": players.make("fast", 1), "fair": players.make("fair", 2)}
        result = await players.play(Row({"peer": settings}, [], rounds=1, choose_by="a call"))
        assert result.choices == {"peer": Choice("fast", {"slow": 3, "fast": 1, "fair": 2})}
        assert result.values("peer", "a call") == [1]
        assert players.story[:4] == ["open slow", "slow", "slow", "close slow"]

    async def test_settings_that_are_known_are_not_tried(self, players: Players) -> None:
        row = Row({"peer": {name: players.make(name) for name in "ab"}, "other": players.make("other")}, [], rounds=1, warm_ups=0)
        known = await players.play(row, Wanted(settings={"peer": "b"}, only=["peer"]))
        assert known.choices == {"peer": Choice("b", {})}
        assert players.story == ["open b", "b", "close b"]
        first = await players.play(row, Wanted(quick=True))
        assert first.choices["peer"].setting == "a"
        assert set(first.samples) == {"peer", "other"}

    async def test_no_round_begins_that_would_end_after_the_time(self, players: Players) -> None:
        row = Row({"a": players.make("a", 10)}, [], rounds=9)
        assert (await players.play(row, Wanted(seconds=35))).rounds == 2  # the warm-up took ten
        assert (await players.play(row, Wanted(seconds=1))).rounds == 1
        assert (await players.play(row, Wanted(seconds=1, rounds=3))).rounds == 3
        assert (await players.play(row, Wanted())).rounds == 9

    async def test_those_that_no_target_names_play_in_the_first_rounds_only(self, players: Players) -> None:
        contestants = {name: players.make(name) for name in "abc"}
        row = Row(contestants, [Target("a", "a call", "b", at_most=1)], rounds=4, shown=1)
        result = await players.play(row)
        assert {name: len(samples) for name, samples in result.samples.items()} == {"a": 4, "b": 4, "c": 1}
        without = await players.play(Row(contestants, [], rounds=4, shown=1))
        assert {len(samples) for samples in without.samples.values()} == {4}

    async def test_a_peer_that_is_missing_or_fails_is_left_out(self, players: Players) -> None:
        missing = players.make("missing", failing=ModuleNotFoundError("No module named 'rival'"))
        broken = players.make("broken", failing=RuntimeError("a wrong result"))
        row = Row({"rival": missing, "broken": {"so": broken}, "percore": players.make("percore")}, [], rounds=2)
        result = await players.play(row)
        assert result.absent == {"rival": "No module named 'rival'", "broken": "it failed: RuntimeError: a wrong result"}
        assert set(result.samples) == {"percore"}

    async def test_a_peer_that_does_not_end_is_left_out(self, players: Players) -> None:
        @asynccontextmanager
        async def hanging() -> AsyncIterator[Round]:
            try:
                await asyncio.Event().wait()
                raise AssertionError("nobody sets it")
                yield
            finally:
                players.story.append("close hanging")

        result = await players.play(Row({"hanging": hanging, "peer": players.make("peer")}, [], rounds=1), Wanted(patience=0))
        assert result.absent == {"hanging": "it did not end within 0 s"}
        assert players.story[0] == "close hanging"
        assert set(result.samples) == {"peer"}

    @pytest.mark.parametrize(
        ("wanted", "patience"), [(Wanted(), None), (Wanted(5), 20), (Wanted(50), 50), (Wanted(50, patience=1), 1)]
    )
    def test_patience_with_peers_is_the_row_s_time(self, wanted: Wanted, patience: float | None) -> None:
        assert wanted.patience_with_peers == patience

    async def test_our_own_failure_fails_the_row_and_closes_the_others(self, players: Players) -> None:
        row = Row({"peer": players.make("peer"), "percore, b": players.make("b", failing=RuntimeError("a wrong result"))}, [])
        with pytest.raises(RuntimeError, match="a wrong result"):
            await players.play(row)
        assert players.story[-1] == "b"  # a contestant that failed sees to itself

    async def test_what_takes_several_contestants_is_derived_at_the_end(self, players: Players) -> None:
        def derive(result: Result) -> None:
            result.samples["b"] = [{**sample, "rounds": float(result.rounds)} for sample in result.samples["b"]]

        row = Row({name: players.make(name) for name in "ab"}, [], rounds=2, derive=derive)
        assert (await players.play(row)).values("b", "rounds") == [2, 2]


class TestPlan:
    def test_gives_what_is_wished_where_there_is_enough(self) -> None:
        assert share_of([60, 100], 1800) == Share(60, 140)

    def test_shares_what_there_is_in_proportion_and_keeps_some_back(self) -> None:
        assert share_of([60, 40], 50) == Share(60 * (50 * 0.85 / 100), 50)
        assert share_of([40], 20) == Share(40 * (20 * 0.85 / 40), 20)

    def test_begins_nothing_that_has_no_time(self) -> None:
        assert share_of([60], 2) is None

    def test_a_whole_run_never_takes_longer_than_it_may(self) -> None:
        wishes, left = [100.0] * 30, 1800.0
        for number in range(len(wishes)):
            share = share_of(wishes[number:], left)
            if share is None:
                break
            assert share.limit <= left
            left -= share.limit  # each takes all that it can
        assert left >= 0


def result_of(times: Mapping[str, list[float]]) -> Result:
    return Result({name: [{"a call": seconds} for seconds in values] for name, values in times.items()})


def test_the_verdict_is_the_median_of_the_paired_ratios() -> None:
    # Round by round twice, twice and half as fast; the ratio of the medians would say 1.
    result = result_of({"ours": [1.0, 10.0, 4.0], "theirs": [2.0, 20.0, 2.0]})
    (verdict,) = judge([Target("ours", "a call", "theirs", at_least=1.8)], result)
    assert verdict.measured is not None
    assert verdict.measured.median == 2
    assert verdict.is_reached


def test_a_limit_is_judged_by_the_median_of_its_own_metric() -> None:
    result = result_of({"ours": [1.0, 9.0, 2.0]})
    reached, missed, unknown = judge(
        [Target("ours", "a call", at_most=2), Target("ours", "a call", at_most=1.9), Target("rival", "a call", at_most=9)], result
    )
    assert reached.measured == Spread(1.5, 2, 5.5)
    assert reached.is_reached
    assert not missed.is_reached
    assert unknown.measured is None
    assert not unknown.is_reached


def test_of_several_rivals_the_best_counts() -> None:
    result = result_of({"ours": [2.0, 2.0, 2.0], "a": [1.0, 8.0, 8.0], "b": [4.0, 4.0, 4.0]})
    target = Target("ours", "a call", ("a", "b", "missing"), at_most=1.05)
    (verdict,) = judge([target], result)
    assert (verdict.against, verdict.measured) == ("b", Spread(0.5, 0.5, 0.5))
    assert target.question == "ours / the best of the others, a call"
    (unknown,) = judge([Target("ours", "a call", ("missing",), at_most=1)], result)
    assert unknown.measured is None
    assert Row({}, [target]).judged == {"ours", "a", "b", "missing"}
    assert Row({}, [Target("ours", "a call", at_most=1)]).judged == {"ours"}


def test_the_table_says_a_metric_in_its_unit() -> None:
    result = Result({"ours": [{"growth": 2.0**20, "a call": 0.002}]}, {"rival": "No module named 'rival'"})
    targets = [
        Target("ours", "growth", at_most=2 << 20),
        Target("ours", "a call", at_most=0.001),
        Target("rival", "growth", at_most=2 << 20),
    ]
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
        Target("ours", "a call", "theirs", at_least=2),
        Target("ours", "a call", "theirs", at_least=4, towards=5),
        Target("ours", "a call", "rival", at_most=1),
    ]
    result.choices["theirs"] = Choice("b", {"a": 0.006, "b": 0.003})
    text = "\n".join(row_lines("calls: what a call costs", result, judge(targets, result), {}))
    assert "theirs played with b (tried, relative to the best: a 2.00, b 1.00)" in text
    assert "left out: No module named 'rival'" in text
    assert "reached       ours / theirs, a call: target at least 2.00 x as fast, measured 3.00 x (3.00 x to 3.00 x)" in text
    missed = "MISSED        ours / theirs, a call: target at least 4.00 x as fast, then towards 5.00 x, measured 3.00 x"
    assert missed in text
    assert "not measured  ours / rival, a call: target at most 1.00 x" in text


def test_a_setting_that_was_not_tried_is_only_named() -> None:
    assert setting_of(Choice("qsize=2", {})) == "qsize=2"


def full_result() -> Result:
    return Result(
        samples={"ours": [{"p50": 1e-6}, {"p50": 3e-6}], "theirs": [{"p50": 4e-6}, {"p50": 6e-6}]},
        absent={"rival": "No module named 'rival'"},
        choices={"theirs": Choice("b", {"a": 2.0, "b": 1.0})},
        seconds=1.5,
    )


TARGETS = (
    Target("ours", "p50", "theirs", at_least=2, towards=3),
    Target("ours", "p50", at_most=1e-6),
    Target("rival", "p50", at_most=1),
)


def full_json() -> Json:
    result = full_result()
    return as_json(result, judge(TARGETS, result))


class TestResults:
    def test_come_back_from_json(self) -> None:
        assert from_json(json.loads(to_text(full_json()))) == full_result()

    def test_have_the_verdicts(self) -> None:
        reached, missed, unknown = full_json()["targets"]
        assert reached == {
            "question": "ours / theirs, p50",
            "metric": "p50",
            "kind": "times as fast",
            "reach": 2,
            "towards": 3,
            "against": "theirs",
            "measured": [2.5, 3.0, 3.5],
            "reached": True,
        }
        assert (missed["kind"], missed["measured"], missed["reached"]) == ("limit", [1.5e-6, 2e-6, 2.5e-6], False)
        assert (unknown["measured"], unknown["reached"]) == (None, None)

    def test_numbers_stand_beside_each_other(self) -> None:
        text = to_text({"samples": {"ours": {"p50": [1.5, -2e-05, 3]}}, "words": ["a", "b"]})
        assert '"p50": [ 1.5, -2e-05, 3 ]' in text
        assert json.loads(text) == {"samples": {"ours": {"p50": [1.5, -2e-05, 3]}}, "words": ["a", "b"]}


class TestRegression:
    @pytest.mark.parametrize(
        ("kind", "now", "is_worse"),
        [
            ("times as fast", (1.5, 1.7, 1.8), True),
            ("times as fast", (1.5, 1.7, 1.91), False),  # the spreads touch
            ("times as fast", (2.5, 2.6, 2.7), False),
            ("times as much", (2.2, 2.3, 2.4), True),
            ("times as much", (2.12, 2.3, 2.4), False),  # within the slack
            ("limit", (2.2, 2.3, 2.4), True),
            ("limit", (1.0, 1.1, 1.2), False),
        ],
    )
    def test_is_worse_when_it_is_beyond_both_spreads(self, kind: str, now: tuple[float, float, float], is_worse: bool) -> None:
        change = Change("ours, p50", kind, (1.9, 2.0, 2.1), now)
        assert change.is_worse is is_worse
        assert change.line.startswith("WORSE" if is_worse else "as before")

    def test_compares_what_is_in_both(self) -> None:
        now = full_json()
        before = full_json()
        del before["targets"][1]
        (change,) = changes(before, now)
        assert (change.question, change.before, change.now) == ("ours / theirs, p50", (2.5, 3.0, 3.5), (2.5, 3.0, 3.5))
        assert not change.is_worse

    def test_between_machines_only_ratios_count(self) -> None:
        kinds = [change.kind for change in changes(full_json(), full_json())]
        assert kinds == ["times as fast", "limit"]
        assert [change.kind for change in changes(full_json(), full_json(), ratios_only=True)] == ["times as fast"]

    def test_plays_with_the_settings_on_record(self) -> None:
        assert settings_of(full_json()) == {"theirs": "b"}

    def test_names_what_is_andifferences(self) -> None:
        here = {"python": "3.13", "processor": "x", "CPUs": "2", "load": "0"}
        assert differences({**here, "load": "9"}, here) == []
        assert differences({**here, "CPUs": "8"}, here) == ["CPUs: 2, on record 8"]

    def test_without_a_record_there_is_nothing_to_compare(self, capsys: pytest.CaptureFixture[str]) -> None:
        assert check(None) == 0
        assert "No run is on record yet" in capsys.readouterr().out

    @pytest.mark.parametrize(("factors", "status"), [((1.0,), 0), ((9.0, 1.0), 0), ((9.0, 9.0), 1)])
    def test_fails_when_a_row_is_worse_twice(
        self, factors: tuple[float, ...], status: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        machine = {"python": "", "processor": "", "CPUs": ""}
        monkeypatch.setattr("benchmarks.machine.describe", lambda: machine)
        monkeypatch.setattr("benchmarks.machine.is_busy", lambda: False)
        record = {"machine": machine, "rows": {"replacement": self.row_of(1.0), "map_window": self.row_of(1.0)}}
        runs = iter(factors)
        asked: list[str] = []

        def run(name: str, _wanted: Wanted, _limit: float) -> Json:
            asked.append(name)
            return self.row_of(next(runs))

        monkeypatch.setattr("benchmarks.__main__.run_row", run)
        assert check(record) == status
        assert asked == ["replacement"] * len(factors)  # map_window is not cheap
        assert ("1 figures are worse" in capsys.readouterr().out) is bool(status)

    def test_on_a_busy_machine_only_ratios_count(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        machine = {"python": "", "processor": "", "CPUs": ""}
        monkeypatch.setattr("benchmarks.machine.describe", lambda: machine)
        monkeypatch.setattr("benchmarks.machine.is_busy", lambda: True)
        asked: list[str] = []

        def run(name: str, _wanted: Wanted, _limit: float) -> Json:
            asked.append(name)
            return self.row_of(9.0)

        monkeypatch.setattr("benchmarks.__main__.run_row", run)
        assert check({"machine": machine, "rows": dict.fromkeys(("replacement", "start"), self.row_of(1.0))}) == 0
        assert asked == ["start"]  # replacement has no ratio
        assert "it is busy with other work" in capsys.readouterr().out

    def test_begins_no_row_when_its_time_is_over(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        machine = {"python": "", "processor": "", "CPUs": ""}
        monkeypatch.setattr("benchmarks.machine.describe", lambda: machine)
        monkeypatch.setattr("benchmarks.machine.is_busy", lambda: False)
        monkeypatch.setattr("benchmarks.__main__.CHECK_LIMIT", 0.0)
        assert check({"machine": machine, "rows": {"replacement": self.row_of(1.0)}}) == 0
        assert "not compared: replacement" in capsys.readouterr().out

    def row_of(self, factor: float) -> Json:
        result = Result({"percore": [{"p50": 0.005 * factor}] * 3})
        return as_json(result, judge([Target("percore", "p50", at_most=0.01)], result))


EXPLAINS_CLOSE = f"{pages.END}\n**`close`** why\n"


class TestMoved:
    def run(self, date: str, **rows: tuple[float, float]) -> Json:
        """A run of one ratio (times as fast) and one limit for each row."""

        def row(speed: float, seconds: float) -> Json:
            targets = [Target("ours", "p50", "theirs", at_least=2), Target("ours", "p50", at_most=1.0)]
            result = Result({"ours": [{"p50": seconds}] * 3, "theirs": [{"p50": seconds * speed}] * 3})
            return as_json(result, judge(targets, result))

        machine = {"date": date, "commit": "abc", "python": "3", "processor": "x", "CPUs": "2"}
        return {"machine": machine, "seconds": 60.0, "failed": {}, "rows": {name: row(*figures) for name, figures in rows.items()}}

    def test_a_row_that_has_moved_is_told_with_what_did_it(self) -> None:
        before = moved.outline(
            self.run("2026-01-02 10:00", start=(2.0, 0.1), close=(2.0, 0.1), reload=(1.0, 0.1), nodes=(1.0, 0.1))
        )
        now = self.run("2026-02-03", start=(3.0, 0.1), close=(2.02, 0.2), reload=(1.01, 0.1), rates=(1.0, 0.1))
        page = f"{pages.END}\n{pages.MOVED}\n\n**`start`** does less.\n"
        lines = pages.block(now, page, None, before).splitlines()
        table = lines[lines.index(moved.HEADING) :]
        assert table[2] == "Against the run of 2026-01-02, commit abc."
        said = "[said below](#what-moved-them)"
        assert table[6:8] == [
            f"| `start` | ours / theirs, p50 | 2.00 x (2.00 x to 2.00 x) | 3.00 x (3.00 x to 3.00 x) | better | {said} |",
            f"| `close` | ours, p50 | 100 ms (100 ms to 100 ms) | 200 ms (200 ms to 200 ms) | **worse** | {moved.UNSAID} |",
        ]
        assert {"New: `rates`.", "No more: `nodes`."} <= {*table}
        assert not any("`reload` |" in line for line in table[:12])

    def test_on_another_machine_only_ratios_have_moved(self) -> None:
        before, now = self.run("a", start=(2.0, 0.1)), self.run("b", start=(3.0, 0.2))
        now["machine"]["CPUs"] = "16"
        assert [change.kind for change in moved.moved(before, now)["start"]] == ["times as fast"]


class TestPage:
    def test_the_block_is_filled_and_the_rest_stays(self) -> None:
        page = f"before\n{pages.BEGIN}\nold\n{pages.END}\nafter\n"
        filled = pages.filled(page, "new")
        assert filled == f"before\n{pages.BEGIN}\n\nnew\n\n{pages.END}\nafter\n"
        assert pages.filled(filled, "new") == filled

    @pytest.mark.parametrize("page", ["nothing", f"{pages.BEGIN} no end", f"{pages.BEGIN}{pages.END}{pages.BEGIN}{pages.END}"])
    def test_a_page_without_its_marks_is_refused(self, page: str) -> None:
        with pytest.raises(ValueError, match="exactly one"):
            pages.filled(page, "new")

    def test_without_a_record_it_says_so(self) -> None:
        assert pages.block(None) == pages.NO_RECORD

    def test_has_machine_targets_and_figures(self) -> None:
        machine = {"python": "CPython 3.13", "CPUs": "2"}
        record = {"machine": machine, "seconds": 600.0, "rows": {"round_trip": full_json()}, "failed": {"close": "too late\nmore"}}
        lines = pages.block(record).splitlines()
        assert "One run, 10 minutes in all." in lines
        assert "| python | CPython 3.13 |" in lines
        assert "| `round_trip` | ours / theirs, p50 | ≥ 2.00 x | 3.00 x | 3.00 x | 2.50 x to 3.50 x | 2 | reached |" in lines
        assert "| `round_trip` | ours, p50 | ≤ 1.00 us |  | 2.00 us | 1.50 us to 2.50 us | 2 | **missed** |" in lines
        assert "| `round_trip` | rival, p50 | ≤ 1.00 s |  | | | | not measured |" in lines
        assert "| theirs | p50 | 5.00 us | 4.50 us to 5.50 us | 2 |" in lines
        assert "- theirs played with b (tried, relative to the best: a 2.00, b 1.00)" in lines
        assert "- rival was left out: No module named 'rival'" in lines
        assert "Not run: `close`, too late" in lines

    def test_the_page_in_the_repository_is_what_the_record_makes_it(self) -> None:
        record, supplement, previous = read(pages.RECORD), read(pages.SUPPLEMENT), read(moved.PREVIOUS)
        page = pages.PAGE.read_text(encoding="utf-8")
        assert pages.filled(page, pages.block(record, page, supplement, previous)) == page
        assert pages.UNEXPLAINED not in page
        assert moved.UNSAID not in page
        summary = pages.SUMMARY.read_text(encoding="utf-8")
        assert pages.filled(summary, pages.headlines(record)) == summary
        compared = pages.COMPARISON.read_text(encoding="utf-8")
        assert pages.filled(compared, pages.comparison(record)) == compared
        drawn = pages.pictures(record)
        assert {path.name: path.read_text(encoding="utf-8") for path in pages.PLOTS.iterdir()} == drawn

    def test_every_headline_names_a_target_of_its_row(self) -> None:
        questions = {
            (name, target.question)
            for name in {headline[0] for headline in pages.HEADLINES}
            for target in row_of(name, quick=False).targets
        }
        assert [one for one in pages.HEADLINES if one[:2] not in questions] == []

    def test_a_miss_without_an_explanation_is_seen(self) -> None:
        page = f"**`start`** is before the block.\n{pages.BEGIN}\n{pages.END}\n**`round_trip`**: why.\nnot **`close`** in a line\n"
        assert pages.explained_in(page) == {"round_trip"}
        assert pages.explained_in(f"{page}{pages.MOVED}\n\n**`close`** moved.\n") == {"round_trip"}
        assert pages.said_in(f"{page}{pages.MOVED}\n\n**`close`** moved.\n") == {"close"}
        record = {"machine": {}, "seconds": 60.0, "rows": {"round_trip": full_json(), "close": full_json()}, "failed": {}}
        lines = pages.block(record, page).splitlines()
        assert "| `round_trip` | ours, p50; rival, p50 | [explained](#below-the-target) |" in lines
        assert f"| `close` | ours, p50; rival, p50 | {pages.UNEXPLAINED} |" in lines

    def test_what_the_supplement_reaches_is_not_missed(self) -> None:
        record = {"machine": {}, "seconds": 60.0, "rows": {"round_trip": full_json(), "close": full_json()}, "failed": {}}
        more = full_json()
        rival = more["targets"][-1]
        assert (rival["question"], rival["measured"]) == ("rival, p50", None)
        rival |= {"measured": [0.5, 0.5, 0.5], "reached": True}
        machine = {"python": "CPython 3.14", "libraries": "percore 1", "commit": "abc", "date": "today"}
        supplement = {"machine": machine, "seconds": 120.0, "rows": {"round_trip": more}, "failed": {}}
        lines = pages.block(record, EXPLAINS_CLOSE, supplement).splitlines()
        assert "A run of its own, 2 minutes, with CPython 3.14; percore 1; " in lines
        assert "| `round_trip` | rival, p50 | ≤ 1.00 s |  | 500 ms | 500 ms to 500 ms | 2 | reached |" in lines
        assert f"| `round_trip` | ours, p50 | {pages.UNEXPLAINED} |" in lines
        assert "| `close` | ours, p50; rival, p50 | [explained](#below-the-target) |" in lines
        assert sum("ours / theirs, p50" in line for line in lines) == 2, "what the record has measured is not shown again"

    def test_without_a_miss_it_says_so(self) -> None:
        reached = full_json() | {"targets": full_json()["targets"][:1]}
        record = {"machine": {}, "seconds": 60.0, "rows": {"close": reached}, "failed": {}}
        assert "No target is missed." in pages.block(record).splitlines()
        assert "Reached, but still explained below: `close`." in pages.block(record, EXPLAINS_CLOSE).splitlines()


@pytest.mark.parametrize(("value", "quick", "minutes"), [("1", True, 5), ("", False, 30)])
def test_a_quick_run_is_asked_for_in_the_environment_too(
    value: str, quick: bool, minutes: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "argv", ["benchmarks"])
    monkeypatch.setenv("QUICK", value)
    arguments = parsed_arguments()
    assert (arguments.quick, arguments.minutes) == (quick, minutes)
    extra = {name for name in row_names() if row_of(name, quick=True).is_extra}
    assert {"auto_concurrency", "ray"} <= extra
    assert arguments.row == [name for name in row_names() if name not in extra]


class TestRuns:
    def test_a_row_that_fails_tells_its_last_words(self) -> None:
        with pytest.raises(RowFailed, match="KeyError: 'nonesuch'"):
            run_row("nonesuch", Wanted(1), limit=40)

    def test_a_row_that_takes_too_long_is_stopped(self) -> None:
        with pytest.raises(RowFailed, match="stopped after 0 s"):
            run_row("close", Wanted(1), limit=0.01)


class TestPeers:
    @pytest.mark.parametrize("name", sorted(awaiting(Pair(print, print))))
    def test_a_call_is_awaited_in_at_least_three_settings(self, name: str) -> None:
        assert len(awaiting(Pair(print, print))[name]) >= 3

    def test_a_map_is_made_in_at_least_three_settings(self) -> None:
        peers = mapping(Pair(print, print), (10, 100, 1000))
        assert all(len(settings) >= 3 for settings in peers.values())


def test_efficiency_is_the_speed_up_over_one_task_by_the_workers() -> None:
    base = {metric: 2.0 for load in ("low", "medium", "high") for metric in (load, f"{load}: CPU")}
    result = Result({"one task, one thread": [base], "percore": [dict.fromkeys(base, 4.0) | {"low: CPU": 8.0}]})
    derive(result)
    assert result.samples["one task, one thread"][0]["low: speed-up"] == 1
    sample = result.samples["percore"][0]
    assert (sample["low: tasks/s"], sample["low: speed-up"], sample["low: efficiency"]) == (1, 2, 0.5)
    assert sample["low: utilisation"] == 0.5


class TestPlots:
    def test_every_plot_is_drawn_from_what_was_measured(self) -> None:
        made = {name: row_of(name, quick=False) for name in row_names()}
        drawing = {name: row for name, row in made.items() if row.plot is not None}
        assert {"article_figure", "in_flight", "payload_sizes", "scaling"} <= drawing.keys()
        figures = {}
        for name, row in drawing.items():
            assert row.plot is not None
            sample = {metric: 0.5 + number for number, metric in enumerate(row.plot.places)}
            figures[name] = as_json(Result({contestant: [sample] for contestant in row.contestants}), [])
        del figures["scaling"]
        drawn = plots.drawn({name: row.plot for name, row in made.items()}, figures)
        assert drawn.keys() == {f"{name}.svg" for name in figures}
        for file, svg in drawn.items():
            row = drawing[file.removesuffix(".svg")]
            assert row.plot is not None
            assert len(ET.fromstring(svg).findall("{*}polyline")) == len(row.contestants.keys() - {row.plot.hidden})

    def test_a_line_has_the_medians_of_the_metrics_that_have_a_place(self) -> None:
        plot = Plot("title", "x", "y", {"1 kB": 1000, "1 MB": 10**6}, rates=True)
        result = Result({"percore": [{"1 kB": 1.0, "1 MB": 2.0, "a table": 9.0}] * 3, "peer": [{"a table": 1.0}]})
        (line,) = ET.fromstring(plot.svg(result)).findall("{*}polyline")
        (x, y), (other_x, other_y) = (map(float, point.split(",")) for point in line.attrib["points"].split())
        assert x < other_x
        assert y < other_y  # downwards

    def test_the_ratios_are_points_around_one(self) -> None:
        svg = plots.ratios([plots.Ratio("a", "peer", 1.8, 2, 2.2), plots.Ratio("a", "limit", 0.4, 0.5, 0.6)])
        faster, slower = (float(point.attrib["cx"]) for point in ET.fromstring(svg).findall("{*}circle"))
        one = next(line for line in ET.fromstring(svg).findall("{*}path") if line.attrib.get("class") == "one")
        assert slower < float(one.attrib["d"].split()[0][1:]) < faster


class TestPayloads:
    def test_each_is_made_once_for_all(self) -> None:
        payload = Payload("a kB", 1000, 1, lambda: os.urandom(1000))
        assert value_of(payload) is value_of(payload)

    def test_the_targets_are_those_that_it_has(self) -> None:
        small = Payload("int", 2, 1, lambda: 1, of_pool=0.5)
        large = Payload("1 MB", 10**6, 1, lambda: bytes(10**6), of_bare=1.5)
        assert targets_of([small, large]) == [
            Target("percore", "int", "ProcessPoolExecutor", at_most=0.5),
            Target("percore", "1 MB", "bare echo", at_most=1.5),
            Target("percore", "1 MB", "InterpreterPoolExecutor", at_most=1.0),
        ]

    @pytest.mark.parametrize("views", [False, True])
    async def test_a_bare_echo_brings_back_what_was_sent(self, views: bool) -> None:
        async with bare_echo(100_000, views=views) as echo:
            for size in (1, 100_000, 1000):
                data = os.urandom(size)
                answer = await echo(data)
                assert answer == data
                assert isinstance(answer, memoryview) is views

    async def test_a_memcpy_is_timed(self) -> None:
        async with memcpy([Payload("1 MB", 10**6, 3, bytes)])() as once:
            sample = await once()
        assert list(sample) == ["1 MB"]
        assert sample["1 MB"] > 0


class TestRows:
    def test_has_a_title_and_targets_among_its_contestants(self, subtests: pytest.Subtests) -> None:
        for name in row_names():
            for quick in [True, False]:
                with subtests.test(quick=quick, name=name):
                    row = row_of(name, quick=quick)
                    assert title_of(name).endswith((".", "?"))
                    assert len(title_of(name)) <= 132
                    assert row.judged <= set(row.contestants)
                    assert row.anew <= set(row.contestants)
                    assert all(not name.startswith("percore") or not isinstance(one, dict) for name, one in row.contestants.items())
                    assert all(len(one) >= 3 for one in row.contestants.values() if isinstance(one, dict))

    def test_all_together_fit_into_the_time_of_a_run(self) -> None:
        assert sum(row_of(name, quick=False).seconds for name in row_names()) <= 48 * 60  # all of them get less in proportion
        assert any(row_of(name, quick=False).is_cheap for name in row_names())

    def test_those_of_payloads_take_no_more_than_six_minutes(self) -> None:
        rows = [name for name in row_names() if name.startswith("payload_")]
        assert sum(row_of(name, quick=False).seconds for name in rows) <= 6 * 60

    def test_the_costs_of_map_mixed_are_the_same_every_time_and_of_all_magnitudes(self) -> None:
        costs = maps.costs_of(1000)
        assert costs == maps.costs_of(1000)
        assert all(maps.LEAST <= cost <= maps.MOST for cost in costs)
        of_a_magnitude = [sum(low <= cost < 10 * low for cost in costs) for low in (1e-6, 1e-5, 1e-4, 1e-3, 1e-2)]
        assert min(of_a_magnitude) > 150

    def test_costs_dealt_by_hand_are_all_there_and_nearly_even(self) -> None:
        costs = maps.costs_of(1000)
        parts = maps.dealt(costs)
        assert sorted(cost for part in parts for cost in part) == sorted(costs)
        totals = [sum(part) for part in parts]
        assert max(totals) - min(totals) < 1e-4

    def test_a_spin_tells_what_it_used(self) -> None:
        assert spin(0.001) >= 0.001
        assert spin(0) >= 0
