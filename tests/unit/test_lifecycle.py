"""A worker's life: what may follow what, for every state and event."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from percore._common.errors import IllegalEvent
from percore._scheduler.lifecycle import Deadline, Event, Life, State

READY, FAIL, DRAIN, FINISH, EXIT = Event.READY, Event.FAIL, Event.DRAIN, Event.FINISH, Event.EXIT

WAYS: dict[State, list[Event]] = {
    State.STARTING: [],
    State.READY: [READY],
    State.DRAINING: [READY, DRAIN],
    State.FINISHING: [READY, FINISH],
    State.FAILED: [FAIL],
    State.GONE: [EXIT],
}

FOLLOWING: dict[State, dict[Event, State | None]] = {
    State.STARTING: {
        READY: State.READY,
        FAIL: State.FAILED,
        DRAIN: State.DRAINING,
        FINISH: State.FINISHING,
        EXIT: State.GONE,
    },
    State.READY: {READY: None, FAIL: State.FAILED, DRAIN: State.DRAINING, FINISH: State.FINISHING, EXIT: State.GONE},
    # Asked to end while it was starting, a worker still says how the start went.
    State.DRAINING: {
        READY: State.DRAINING,
        FAIL: State.FAILED,
        DRAIN: State.DRAINING,
        FINISH: State.FINISHING,
        EXIT: State.GONE,
    },
    State.FINISHING: {
        READY: State.FINISHING,
        FAIL: State.FINISHING,
        DRAIN: State.FINISHING,
        FINISH: State.FINISHING,
        EXIT: State.GONE,
    },
    State.FAILED: {READY: None, FAIL: State.FAILED, DRAIN: State.FAILED, FINISH: State.FAILED, EXIT: State.GONE},
    State.GONE: dict.fromkeys(Event),
}


def life_in(state: State) -> Life:
    life = Life()
    for event in WAYS[state]:
        life.advance(event)
    assert life.state is state
    return life


def test_every_event_in_every_state(subtests: pytest.Subtests) -> None:
    for state in list(State):
        for event in list(Event):
            with subtests.test(event=event, state=state):
                life = life_in(state)
                following = FOLLOWING[state][event]
                if following is None:
                    with pytest.raises(IllegalEvent):
                        life.advance(event)
                    assert life.state is state
                else:
                    assert life.advance(event) is following
                    assert life.state is following
                    assert life.is_gone == (following is State.GONE)


def test_a_life_begins_with_its_start() -> None:
    life = Life()
    assert life.state is State.STARTING
    assert not life.is_gone


def test_an_illegal_event_tells_the_story() -> None:
    life = Life()
    for event in (READY, DRAIN, EXIT):
        life.advance(event)
    with pytest.raises(IllegalEvent, match="finish in state gone after: ready drain exit"):
        life.advance(FINISH)


def test_the_story_stays_short() -> None:
    life = Life()
    for event in (READY, *[DRAIN] * 1000, EXIT):
        life.advance(event)
    with pytest.raises(IllegalEvent) as caught:
        life.advance(EXIT)
    assert str(caught.value).endswith("drain exit")
    assert len(str(caught.value)) < 100


@given(st.lists(st.sampled_from(Event), max_size=20))
def test_no_way_back(events: list[Event]) -> None:
    order = [State.STARTING, State.READY, State.DRAINING, State.FINISHING, State.FAILED, State.GONE]
    life = Life()
    for event in events:
        before = life.state
        try:
            life.advance(event)
        except IllegalEvent:
            assert life.state is before
        assert order.index(life.state) >= order.index(before)


@given(st.lists(st.sampled_from([READY, FAIL, DRAIN, FINISH]), max_size=10))
def test_who_is_to_end_has_a_deadline_from_every_way_there(events: list[Event]) -> None:
    life = Life()
    assert life.deadline(has_calls=False) is Deadline.START
    for event in events:
        try:
            life.advance(event)
        except IllegalEvent:
            continue
        is_to_end = life.state in (State.DRAINING, State.FINISHING, State.FAILED)
        assert (life.deadline(has_calls=False) is Deadline.END) == is_to_end
        # The calls of a draining worker may take as long as they need.
        assert (life.deadline(has_calls=True) is Deadline.END) == (is_to_end and life.state is not State.DRAINING)


@given(st.lists(st.sampled_from([READY, FAIL, DRAIN, FINISH]), max_size=10))
def test_the_systems_word_on_a_death_is_always_believed(events: list[Event]) -> None:
    life = Life()
    for event in events:
        try:
            life.advance(event)
        except IllegalEvent:
            break
    assert life.advance(EXIT) is State.GONE
