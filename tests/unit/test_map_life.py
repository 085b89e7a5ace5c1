"""The phases of a map: what may follow what, for every phase and event, and that no walk through them goes back."""

import random

import pytest

from percore._common.errors import IllegalEvent
from percore._scheduler.map_life import MapEvent, MapLife, MapPhase

BEGIN, FEED, EXHAUST, STOP, CLOSE = MapEvent

WAYS: dict[MapPhase, list[MapEvent]] = {
    MapPhase.NEW: [],
    MapPhase.BEGUN: [BEGIN],
    MapPhase.FEEDING: [BEGIN, FEED],
    MapPhase.FED: [BEGIN, FEED, EXHAUST],
    MapPhase.STOPPED: [BEGIN, FEED, STOP],
    MapPhase.CLOSED: [CLOSE],
}

FOLLOWING: dict[MapPhase, dict[MapEvent, MapPhase]] = {
    MapPhase.NEW: {BEGIN: MapPhase.BEGUN, CLOSE: MapPhase.CLOSED},
    MapPhase.BEGUN: {FEED: MapPhase.FEEDING, EXHAUST: MapPhase.FED, CLOSE: MapPhase.CLOSED},
    MapPhase.FEEDING: {EXHAUST: MapPhase.FED, STOP: MapPhase.STOPPED, CLOSE: MapPhase.CLOSED},
    MapPhase.FED: {EXHAUST: MapPhase.FED, STOP: MapPhase.STOPPED, CLOSE: MapPhase.CLOSED},
    MapPhase.STOPPED: {EXHAUST: MapPhase.STOPPED, STOP: MapPhase.STOPPED, CLOSE: MapPhase.CLOSED},
    MapPhase.CLOSED: dict.fromkeys(MapEvent, MapPhase.CLOSED),
}


def life_in(now: MapPhase) -> MapLife:
    life = MapLife()
    for event in WAYS[now]:
        life.advance(event)
    assert life.now is now
    return life


def test_every_event_in_every_phase() -> None:
    for now, row in FOLLOWING.items():
        for event in MapEvent:
            life = life_in(now)
            if event in row:
                life.advance(event)
                assert life.now is row[event], (now, event)
            else:
                with pytest.raises(IllegalEvent, match=f"{event.value} of a map that is {now.value}"):
                    life.advance(event)
                assert life.now is now, (now, event)
    assert set(FOLLOWING) == set(MapPhase)


def test_each_phase_allows_less_than_the_one_before() -> None:
    allowed = [(life.pulls, life.gives, not life.is_closed) for life in map(life_in, MapPhase)]
    assert allowed == [(True, True, True)] * 3 + [(False, True, True), (False, False, True), (False, False, False)]


def test_no_walk_goes_back() -> None:
    order = list(MapPhase)
    for seed in range(200):
        dice, life = random.Random(seed), MapLife()
        while life.now is not MapPhase.CLOSED:
            before = order.index(life.now)
            life.advance(dice.choice(list(FOLLOWING[life.now])))
            assert order.index(life.now) >= before, seed


def test_the_error_at_once_comes_before_the_error_at_the_end_and_the_first_one_is_kept() -> None:
    life = life_in(MapPhase.FEEDING)
    life.check()
    life.failure = OSError("at the end")
    with pytest.raises(OSError, match="at the end"):
        life.check()
    life.stop(ValueError("first"))
    life.stop(ValueError("second"))
    with pytest.raises(ValueError, match="first"):
        life.check()
    assert life.now is MapPhase.STOPPED
