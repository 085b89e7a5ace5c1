"""A few of the kills of `make chaos`, and a runner with nothing else to do whose worker is killed. See tests/chaos."""

import os

import pytest

from tests.chaos.__main__ import spread
from tests.chaos.judge import OVER_NODES, PARTS, Part, quiet, trial
from tests.counts import LONG, times
from tests.rows import repeats

KILLS = times(10, 20)


@pytest.mark.long
@pytest.mark.timeout(200)
@pytest.mark.parametrize("part", (*PARTS, *OVER_NODES) if LONG else PARTS[:1], ids=str)
def test_kills_under_mixed_load_lose_nothing(part: Part, capfd: pytest.CaptureFixture[str]) -> None:
    seed = os.environ.get("CHAOS_SEED") or "1"
    verdict = trial(part, f"{seed}/{part}", KILLS)
    assert verdict.sentences == []
    assert verdict.is_clean
    assert sum(verdict.kills.values()) >= KILLS
    assert verdict.outcomes["value"] > 0
    with capfd.disabled():
        os.write(1, f"\n{part}: {dict(verdict.kills)}; {verdict.calls} calls: {dict(verdict.outcomes)}\n".encode())


@pytest.mark.parametrize("loop", ["asyncio", *repeats("uvloop")])
def test_a_death_is_told_and_mended_at_once(loop: str, capfd: pytest.CaptureFixture[str]) -> None:
    verdict = quiet(loop, 5)
    assert verdict.kills == {"kill": 5}
    told = f"\n{loop}: detection {spread(verdict.detection)}, recovery {spread(verdict.recovery)}\n"
    with capfd.disabled():
        os.write(1, told.encode())
