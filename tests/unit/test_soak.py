"""The judge of the soak finds what grows, and noise is not found; made series, no process."""

import os
import random
from collections.abc import Callable
from typing import Any, Final

import pytest

from tests.soak.judge import Points, judge_count, judge_size
from tests.soak.samples import BOUNDS, KIB, figures, judged, roles, table

EVERY: Final = 10.0
"""Seconds between two quiet points."""
CALLS: Final = 1500
"""Calls between them."""
WARM_UP: Final = 600.0


def noise(seed: int, deviation: float, memory: float, count: int = 600) -> list[float]:
    """So many values, each of which remembers that share of the one before it."""
    decide = random.Random(seed)
    values = [0.0]
    for _ in range(count):
        values.append(memory * values[-1] + decide.gauss(0.0, deviation * (1 - memory**2) ** 0.5))
    return values[1:]


def points(values: list[float], growth: float = 0.0) -> Points:
    """Values every ten seconds, and so much more at each of them."""
    return [(number * EVERY / 3600, value + number * growth) for number, value in enumerate(values)]


def test_noise_does_not_grow() -> None:
    for memory in (0.0, 0.5, 0.9):
        for seed in range(40):
            for count in (240, 600):
                verdict = judge_size([points(noise(seed, 500 * KIB, memory, count))], BOUNDS["heap"])
                assert verdict.grows is False, (memory, seed, count, verdict)


def test_a_hundred_bytes_a_call_grow() -> None:
    for memory in (0.0, 0.5, 0.9):
        for seed in range(10):
            verdict = judge_size([points(noise(seed, 500 * KIB, memory, 240), growth=100 * CALLS)], BOUNDS["heap"])
            assert verdict.grows, (memory, seed, verdict)
            assert verdict.line is not None
            assert verdict.line.slope == pytest.approx(100 * CALLS * 3600 / EVERY, rel=0.1)


def test_one_object_a_minute_and_no_bound_below_it() -> None:
    steady = [40_000.0] * 240
    assert judge_size([points(steady)], BOUNDS["objects"]).grows is False
    assert judge_size([points(steady, growth=1 / 6)], BOUNDS["objects"]).grows is False
    assert judge_size([points(steady, growth=2 / 6)], BOUNDS["objects"]).grows


def test_one_descriptor_an_hour_grows_and_one_for_a_moment_does_not() -> None:
    hours = [number * EVERY / 3600 for number in range(720)]
    leaking = [(hour, 79.0 + int(hour)) for hour in hours]
    passing = [(hour, 79.0 + (number % 50 == 0)) for number, hour in enumerate(hours)]
    fewer = [(hour, 79.0 - (hour > 1)) for hour in hours]
    assert judge_count([leaking]).grows
    assert judge_count([passing]).grows is False
    assert judge_count([fewer]).grows is False
    assert judge_count([passing, leaking]).grows  # in one of the lives


def test_few_points_have_no_verdict() -> None:
    assert judge_size([points([1.0] * 11)], 0.0).grows is None
    assert judge_size([[(0.0, 1.0)]] * 20, 0.0).grows is None
    assert judge_count([points([1.0] * 11)] * 2).grows is None


def test_groups_have_levels_of_their_own() -> None:
    """Processes that live one after the other, each of them smaller than the one before, and growing."""
    lives = [[(life + number / 360, 1000.0 - 300 * life + number / 36) for number in range(60)] for life in range(4)]
    verdict = judge_size(lives, 0.0)
    assert verdict.grows
    assert verdict.line is not None
    assert verdict.line.slope == pytest.approx(10.0)


def samples(count: int, figure: Callable[[str, int, int], dict[str, float]], **told: Any) -> list[dict[str, Any]]:
    """A run in which each passing worker is seen twice, and ids come again. `figure`: of a role, at a quiet point and an age."""
    made = []
    for number in range(count):
        processes = {
            "1": {"role": "program", **figure("program", number, number), "started": 1},
            "2": {"role": "lasting worker", **figure("lasting worker", number, number), "started": 2},
            str(100 + number // 2 % 20): {
                "role": "passing worker",
                "started": 3 + number // 2,
                **figure("passing worker", number, number % 2),
            },
        }
        made.append({"seconds": number * EVERY, "processes": processes, "tasks": 1, **told})
    return made


def growing(made: list[dict[str, Any]]) -> set[tuple[str, str, str]]:
    rows = judged(made, WARM_UP)
    assert len(table(rows)) == len(rows) + 1
    return {(row.role, row.measure, row.how) for row in rows if row.verdict.grows}


def test_a_run_is_judged_process_by_process() -> None:
    def steady(role: str, number: int, age: int) -> dict[str, float]:
        """All of them grow in their youth, which is no leak."""
        del role
        youth = min(age, 5) * 1000 * KIB if number > 60 else 0
        return {"descriptors": 79, "heap": 20_000 * KIB + youth + (number * 7919 % 100) * KIB, "resident": 30_000 * KIB}

    def leaking(which: str, measure: str, growth: float) -> Callable[[str, int, int], dict[str, float]]:
        def figure(role: str, number: int, age: int) -> dict[str, float]:
            found = steady(role, number, age)
            found[measure] += int(number * growth) if role == which else 0
            return found

        return figure

    calm = samples(360, lambda role, number, age: steady(role, number, age) | {"threads": 3})
    assert growing(calm) == set()
    per_call = 100 * CALLS
    assert growing(samples(360, leaking("program", "heap", per_call))) == {("program", "heap", "over the run")}
    assert growing(samples(360, leaking("lasting worker", "heap", per_call))) == {("lasting worker", "heap", "over each life")}
    assert growing(samples(360, leaking("passing worker", "heap", per_call))) == {("passing worker", "heap", "at equal age")}
    assert growing(samples(720, leaking("program", "descriptors", EVERY / 3600))) == {("program", "descriptors", "over the run")}


def test_what_the_program_tells_is_judged() -> None:
    made = samples(360, lambda *_: {"heap": 0.0})
    for number, one in enumerate(made):
        one["tasks"] += number // 60
    assert growing(made) == {("program", "tasks", "over the run")}


def test_a_process_is_read_from_proc() -> None:
    read = figures(os.getpid())
    assert read is not None
    assert set(read) == {"descriptors", "threads", "maps", "heap", "resident", "started"}
    assert all(value > 0 for value in read.values())
    assert figures(2**22 + 1) is None
    assert roles(os.getpid(), {"workers": {}})[os.getpid()] == "program"
