"""The phases of a runner: what may follow what, for every phase and event, and what each phase allows."""

import pytest

from percore import RunnerBroken, RunnerClosed
from percore._common.errors import IllegalEvent
from percore._scheduler.phase import Phase, PhaseEvent, Replaces, RunnerPhase

CLOSE, BREAK, CUT, FINISH, END = PhaseEvent.CLOSE, PhaseEvent.BREAK, PhaseEvent.CUT, PhaseEvent.FINISH, PhaseEvent.END

WAYS: dict[Phase, list[PhaseEvent]] = {
    Phase.OPEN: [],
    Phase.CLOSING: [CLOSE],
    Phase.BROKEN: [BREAK],
    Phase.BROKEN_CLOSING: [BREAK, CLOSE],
    Phase.CUT: [CLOSE, CUT],
    Phase.FINISHING: [CLOSE, FINISH],
    Phase.ENDED: [CLOSE, FINISH, END],
}

FOLLOWING: dict[Phase, dict[PhaseEvent, Phase | None]] = {
    Phase.OPEN: {CLOSE: Phase.CLOSING, BREAK: Phase.BROKEN, CUT: Phase.CUT, FINISH: None, END: None},
    Phase.CLOSING: {CLOSE: Phase.CLOSING, BREAK: Phase.BROKEN_CLOSING, CUT: Phase.CUT, FINISH: Phase.FINISHING, END: None},
    Phase.BROKEN: {CLOSE: Phase.BROKEN_CLOSING, BREAK: None, CUT: Phase.CUT, FINISH: None, END: None},
    Phase.BROKEN_CLOSING: {
        CLOSE: Phase.BROKEN_CLOSING,
        BREAK: None,
        CUT: Phase.CUT,
        FINISH: Phase.FINISHING,
        END: None,
    },
    Phase.CUT: {CLOSE: Phase.CUT, BREAK: Phase.CUT, CUT: Phase.CUT, FINISH: Phase.FINISHING, END: None},
    Phase.FINISHING: {CLOSE: Phase.FINISHING, BREAK: Phase.FINISHING, CUT: Phase.FINISHING, FINISH: None, END: Phase.ENDED},
    Phase.ENDED: {CLOSE: Phase.ENDED, BREAK: None, CUT: Phase.ENDED, FINISH: None, END: None},
}


def phase_in(now: Phase) -> RunnerPhase:
    phase = RunnerPhase()
    for event in WAYS[now]:
        phase.advance(event)
    assert phase.now is now
    return phase


def test_every_event_in_every_phase() -> None:
    for now, row in FOLLOWING.items():
        assert set(row) == set(PhaseEvent)
        for event, following in row.items():
            phase = phase_in(now)
            if following is None:
                with pytest.raises(IllegalEvent, match=f"{event.value} of a runner that is {now.value}"):
                    phase.advance(event)
                assert phase.now is now, (now, event)
            else:
                phase.advance(event)
                assert phase.now is following, (now, event)
    assert set(FOLLOWING) == set(Phase)


def test_only_an_open_runner_accepts_calls_and_lets_them_wait_for_an_attempt() -> None:
    assert [now for now in Phase if phase_in(now).accepts] == [Phase.OPEN]
    assert [now for now in Phase if phase_in(now).delays] == [Phase.OPEN]


def test_accepted_calls_begin_until_the_runner_is_broken_or_cut() -> None:
    assert [now for now in Phase if phase_in(now).begins] == [Phase.OPEN, Phase.CLOSING]


def test_which_workers_are_replaced() -> None:
    replaces = {now: phase_in(now).replaces for now in Phase}
    assert replaces.pop(Phase.OPEN) is Replaces.ALL
    assert replaces.pop(Phase.CLOSING) is Replaces.SPENT
    assert set(replaces.values()) == {Replaces.NONE}


def test_no_event_gives_a_permission_back() -> None:
    for now in Phase:
        for event, following in FOLLOWING[now].items():
            if following is not None:
                phase = phase_in(now)
                before = (phase.accepts, phase.begins, phase.delays, not phase.is_closing, not phase.is_cut)
                phase.advance(event)
                after = (phase.accepts, phase.begins, phase.delays, not phase.is_closing, not phase.is_cut)
                assert all(new <= old for new, old in zip(after, before, strict=True)), (now, event)


def test_each_refusal_is_an_error_of_its_own() -> None:
    phase = phase_in(Phase.CLOSING)
    assert isinstance(phase.refusal(), RunnerClosed)
    broken = RunnerBroken(10, 3, "a report")
    broken.__cause__ = OSError("the cause")
    phase.fail(broken)
    refusals = [phase.refusal(), phase.refusal()]
    assert refusals[0] is not refusals[1]
    for refusal in refusals:
        assert (type(refusal), str(refusal), refusal.__cause__) == (RunnerBroken, str(broken), broken.__cause__)
    assert phase.now is Phase.BROKEN_CLOSING


def test_the_error_that_broke_a_runner_stays_when_it_closes() -> None:
    phase = RunnerPhase()
    phase.fail(RunnerBroken(10, 3))
    phase.advance(CLOSE)
    phase.advance(FINISH)
    phase.advance(END)
    assert isinstance(phase.refusal(), RunnerBroken)


def test_which_event_is_due_in_a_closing() -> None:
    for now in (Phase.CLOSING, Phase.BROKEN_CLOSING, Phase.CUT):
        phase = phase_in(now)
        assert phase.due(has_calls=True, has_workers=True) is None
        for has_calls, has_workers in ((False, True), (True, False), (False, False)):  # without workers no call can end
            assert phase.due(has_calls=has_calls, has_workers=has_workers) is FINISH
    for has_calls in (False, True):
        assert phase_in(Phase.FINISHING).due(has_calls=has_calls, has_workers=True) is None
        assert phase_in(Phase.FINISHING).due(has_calls=has_calls, has_workers=False) is END
        assert phase_in(Phase.ENDED).due(has_calls=has_calls, has_workers=False) is None
