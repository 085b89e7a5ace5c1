"""An executor's life: what may follow what, and what its calls are told, for every phase, event and set of marks."""

from concurrent.futures.process import BrokenProcessPool
from itertools import chain, combinations

import pytest

from percore._common.errors import IllegalEvent
from percore._common.worker_errors import StartupFailed
from percore._executor.life import ABRUPTLY, AFTER_SHUTDOWN, ExecutorEvent, ExecutorLife, ExecutorPhase, Mark, the_end

WAYS: dict[ExecutorPhase, list[ExecutorEvent]] = {
    ExecutorPhase.UNUSED: [],
    ExecutorPhase.STARTING: [ExecutorEvent.USE],
    ExecutorPhase.RUNNING: [ExecutorEvent.USE, ExecutorEvent.READY],
    ExecutorPhase.CLOSING: [ExecutorEvent.USE, ExecutorEvent.FAIL],
    ExecutorPhase.OVER: [ExecutorEvent.USE, ExecutorEvent.READY, ExecutorEvent.SETTLE, ExecutorEvent.END],
}

ALLOWED = {
    (ExecutorPhase.UNUSED, ExecutorEvent.USE): ExecutorPhase.STARTING,
    (ExecutorPhase.STARTING, ExecutorEvent.READY): ExecutorPhase.RUNNING,
    (ExecutorPhase.STARTING, ExecutorEvent.FAIL): ExecutorPhase.CLOSING,
    (ExecutorPhase.STARTING, ExecutorEvent.END): ExecutorPhase.OVER,
    (ExecutorPhase.RUNNING, ExecutorEvent.SETTLE): ExecutorPhase.CLOSING,
    (ExecutorPhase.RUNNING, ExecutorEvent.END): ExecutorPhase.OVER,
    (ExecutorPhase.CLOSING, ExecutorEvent.END): ExecutorPhase.OVER,
}

SETS = [set(marks) for marks in chain.from_iterable(combinations(Mark, count) for count in range(4))]


def life_in(phase: ExecutorPhase, marks: set[Mark] | None = None, cause: BaseException | None = None) -> ExecutorLife:
    life = ExecutorLife()
    for event in WAYS[phase]:
        life.advance(event)
    for mark in marks or ():
        if mark is Mark.BROKEN:
            assert life.break_off("it broke", cause)
        else:
            life.marks.add(mark)
    return life


def test_every_event_in_every_phase() -> None:
    for phase in ExecutorPhase:
        for event in ExecutorEvent:
            life = life_in(phase)
            assert life.phase is phase
            following = ALLOWED.get((phase, event))
            if following is None:
                with pytest.raises(IllegalEvent, match=f"{event.value} in phase {phase.value}"):
                    life.advance(event)
                following = phase
            else:
                life.advance(event)
            assert life.phase is following, (phase, event)


def test_only_a_running_executor_settles_when_it_is_broken_or_shut_and_idle() -> None:
    for phase in ExecutorPhase:
        for marks in SETS:
            for is_idle in (False, True):
                wanted = phase is ExecutorPhase.RUNNING and (Mark.BROKEN in marks or (Mark.SHUT in marks and is_idle))
                assert life_in(phase, marks).may_settle(is_idle=is_idle) is wanted, (phase, marks, is_idle)


def test_the_strongest_mark_decides_what_calls_are_told() -> None:
    cause = LookupError()
    for marks in SETS:
        life = life_in(ExecutorPhase.RUNNING, marks, cause)
        new, accepted = life.refusal(), life.last_word()
        if Mark.BROKEN in marks:
            assert (type(new), str(new), new.__cause__) == (BrokenProcessPool, "it broke", cause)
            assert (type(accepted), str(accepted), accepted.__cause__) == (BrokenProcessPool, "it broke", cause)
            assert str(life) == "broken"
            continue
        assert (type(new), str(new)) == (RuntimeError, AFTER_SHUTDOWN)
        wanted = (BrokenProcessPool, ABRUPTLY) if Mark.KILLED in marks else (RuntimeError, AFTER_SHUTDOWN)
        assert (type(accepted), str(accepted)) == wanted
        assert str(life) == ("shut down" if marks else "open")


def test_it_breaks_once_and_each_call_has_the_error_of_a_broken_pool_for_itself() -> None:
    cause = StartupFailed("no worker left")
    cause.__cause__ = LookupError()
    life = life_in(ExecutorPhase.RUNNING, {Mark.BROKEN}, cause)
    assert not life.break_off("again", LookupError())
    told = [life.last_word() for _ in range(2)]
    assert [(type(error), str(error), error.__cause__) for error in told] == [(StartupFailed, str(cause), cause.__cause__)] * 2
    assert len({*map(id, told), id(cause)}) == 3  # else `result()` would add to the traceback of the others
    assert (str(life.refusal()), life.refusal().__cause__) == ("it broke", cause)
    life = ExecutorLife()
    assert life.break_off("", None)  # an error without a text
    assert life.text == "the workers could not be started"


def test_the_cause_says_how_the_worker_ended() -> None:
    told = [the_end("worker 2 (pid 7)", *end).text for end in ((99, ""), (-9, "too much memory"), (-15, ""), (None, ""))]
    start = "worker 2 (pid 7) terminated abruptly "
    assert told == [
        start + end for end in ("with exit code 99", "by SIGKILL (too much memory)", "by SIGTERM", "(exit status unknown)")
    ]
