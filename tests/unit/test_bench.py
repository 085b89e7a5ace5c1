"""`percore bench`: how it measures and shows, with contestants that do nothing."""

import pytest

from percore._cli.bench import Result, bars, bench, measure, shown
from percore._cli.rows import Contestant, Row


class Count:
    """Work that only counts itself."""

    def __init__(self) -> None:
        self.rounds: list[int] = []

    async def __call__(self, count: int) -> None:
        self.rounds.append(count)


async def test_contestants_get_rounds_of_as_many_items_as_fit() -> None:
    works = [Count(), Count()]
    row = Row("nothing", "calls", 10, tuple(Contestant(str(place), work) for place, work in enumerate(works)))
    result = await measure(row, rounds=2, seconds=1e-4)
    for work in works:
        assert work.rounds[:2] == [10, 10]  # to warm up, and to learn how long they take
        assert len(work.rounds) == 4
        assert work.rounds[2] == work.rounds[3] >= 1
    assert list(result.rates) == ["0", "1"]
    assert all(rate > 0 for rate in result.rates.values())


def test_percore_is_compared_with_the_best_other_one() -> None:
    result = Result("tiny", "calls", {"runner.map": 30.0, "slow": 1.0, "fast": 20.0})
    assert result.ratio == 1.5
    head, ours, slow, fast = shown(result).splitlines()
    assert head == "tiny: percore is 1.5 times as fast"
    assert ours == f"  runner.map  {'█' * 40}  30 calls/s"
    assert slow.endswith("  1.0 calls/s")
    assert fast.count("█") == 26


def test_bars() -> None:
    assert bars([("a", 8.0, "8"), ("bc", 1.0, "1"), ("d", 0.0, "0")], width=4) == ["a   ████  8", "bc  ▌     1", "d         0"]
    assert bars([("a", 0.0, "0")], width=2) == ["a      0"]
    assert bars([]) == []


def test_a_wrong_number_of_workers(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(workers=0, as_json=False) == 2
    assert capsys.readouterr().err == "percore bench: --workers must be from 1 to 1024, not 0\n"
