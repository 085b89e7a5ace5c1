"""The sweeps. Each test takes one place in one state through all deaths; see tests/sweep/__init__.py."""

import json
import os
import resource
import signal
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from itertools import count
from pathlib import Path
from typing import Final

import pytest

from tests.faults import LIMIT, Watch
from tests.sweep.judge import HARD, PATIENCE, Hit, Stage, processes_of
from tests.sweep.places import (
    BIRTHS,
    CHANGES,
    DEATHS,
    ENDS,
    IMPOSSIBLE,
    NESTED,
    SERVER,
    STATES,
    STEPS,
    SUPERVISOR_LIFE,
    SUPERVISOR_STEPS,
)

pytestmark = pytest.mark.timeout(240)

NOTES = {"busy": "worker.call.running", "full": "worker.frame.written", "slots": "worker.outcome.stored"}
"""Where a worker tells that it is in that state."""

HOLDERS = 32
"""Calls at most that hold a thread or a loop of a worker until they are let go."""

ATTEMPTS = 8

NEEDS_AN_EAR = {"worker.slot.released", "worker.slot.filled"}
"""Passed only when the supervisor has heard of something, so not while it hears nothing."""


def possible(places: tuple[str, ...]) -> list[tuple[str, str]]:
    """These places in each state in which they can be passed."""
    return [(place, state) for place in places for state in STATES if (place, state) not in IMPOSSIBLE]


Count = Callable[[str, str, str, str], None]
Start = Callable[..., AbstractContextManager[Stage]]


@pytest.fixture(autouse=True)
def quiet(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No core files; every warning is an error, in all processes."""
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    limits = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_CORE, limits)


@pytest.fixture
def counted(record_property: Callable[[str, object], None]) -> Count:
    """Count a hit, for the table."""

    def add(sweep: str, place: str, death: str, state: str) -> None:
        record_property("hit", json.dumps([sweep, place, death, state]))

    return add


@pytest.fixture
def start(tmp_path: Path) -> Start:
    stages = count()

    @contextmanager
    def started(loop: str = "asyncio") -> Iterator[Stage]:
        with Stage(tmp_path / f"stage{next(stages)}", loop) as stage:
            yield stage

    return started


def wave_of(place: str, how: str) -> str:
    """The order for a wave of calls that pass the place."""
    return f"nested {how}" if place in NESTED else how


def loop_for(place: str, state: str) -> str:
    """One of the two loops a test: which is as good as random, and always the same."""
    return ("asyncio", "uvloop")[(len(place) + STATES.index(state)) % 2]


def numbers(state: str) -> Iterator[int]:
    """The passings to strike at, one after the other until there are not so many. Where there are hundreds, ever fewer of them."""
    if state == "idle":
        yield from count(1)
    here, following = 1, 2
    while True:
        yield here
        here, following = following, here + following


def few(death: str) -> Iterator[int]:
    """As `numbers`, where every cell costs a program: with one death the 1st, 3rd, 9th and so on, with the others the first."""
    return (3**power for power in count()) if death == "kill" else iter([1])


def once(death: str) -> Iterator[int]:
    """As `numbers`, where each process passes but once: that it does not a second time is seen with one death for all."""
    yield from (1, 2) if death in ("kill", "term") else (1,)


def workers_in(state: str) -> int:
    return 1 if state == "idle" else 2


# Parts of a cell


def fill(stage: Stage, state: str, side: str, place: str = "") -> Hit | None:
    """Bring about the state. The first hit that is heard: of the place itself, or that a worker is in that state."""
    if state == "idle":
        return None
    has_note = side == "worker" and NOTES[state] != place
    if has_note:
        stage.plan(NOTES[state], f"tell~{state}")
    if (place, state) == ("worker.slot.released", "full"):
        stage.order("fill_and_release")
    else:
        stage.order("fill", how=f"{state} of {side}")
    stage.program.expect("filled")
    if not has_note:
        return None
    hit = stage.hit()
    assert hit is not None, f"no worker was ever {state}"
    check_state(hit, state)
    return hit


def check_state(hit: Hit, state: str) -> None:
    """The process that was struck was in that state; a full ring is seen by its counter."""
    assert state in hit.states, hit
    assert state != "full" or hit.full_count > 0, hit


def go_on(stage: Stage) -> None:
    stage.order("on")
    stage.give("stay", HOLDERS)


def strike_in_load(stage: Stage, plan: tuple[str, str], state: str, side: str) -> Hit | None:
    """A cell; where even the first passing was not hit, a few more: whether a ring is full just then may be a matter of luck."""
    for _ in range(ATTEMPTS if "@1~" in plan[1] else 1):
        hit = _strike_in_load(stage, plan, state, side)
        if hit is not None:
            break
    return hit


def _strike_in_load(stage: Stage, plan: tuple[str, str], state: str, side: str) -> Hit | None:
    """One cell: load, and the plan in it. The hit, if there was one; all has been heard and everything is whole again."""
    place, what = plan
    stage.plan(place, what)
    hit = None
    if state != "idle":
        hit = fill(stage, state, side, place)
        if hit is not None and hit.place != place:
            hit = None
        stage.order("wave", how=wave_of(place, "burst"))
        if (place, state) == ("worker.slot.released", "full"):
            stage.give("stay", HOLDERS)
            hit = stage.hit(PATIENCE)
        elif hit is None and (place not in NEEDS_AN_EAR or state == "busy"):
            hit = stage.hit(PATIENCE)
        go_on(stage)
    else:
        stage.order("wave", how=wave_of(place, "one by one"))
    later = [one for one in stage.settle() if one.place == place]
    assert len(later) <= (hit is None), "it is done once"
    hit = later[0] if later else hit
    if hit is not None:
        check_state(hit, state)
    return hit


# Workers


@pytest.mark.parametrize(("place", "state"), possible((*STEPS, NESTED[0])))
def test_a_worker_dies_at_a_step_of_a_call(place: str, state: str, start: Start, counted: Count) -> None:
    with start(loop_for(place, state)) as stage:
        for death in DEATHS:
            stage.open(workers_in(state))
            for nth in numbers(state):
                hit = strike_in_load(stage, (place, f"{death}@{nth}~{state}"), state, "worker")
                if hit is None:
                    assert nth > 1, f"{place} is not passed when {state}"
                    stage.judge(set())
                    break
                stage.killed(hit.pid)
                stage.judge({hit.pid}, code=DEATHS[death])
                counted("worker dies", place, death, state)
            stage.close()
        stage.leave()


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("place", BIRTHS)
def test_a_replacement_dies_at_a_step_of_its_birth(place: str, state: str, start: Start, counted: Count) -> None:
    with start(loop_for(place, state)) as stage:
        for death in DEATHS:
            stage.open(workers_in(state))
            for nth in once(death):
                hit = strike_in_life(stage, (place, f"{death}@{nth}"), state, signal.SIGKILL)
                if hit is None:
                    assert nth > 1, f"{place} is not passed when {state}"
                    break
                counted("worker dies", place, death, state)
            stage.close()
        stage.leave()


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("place", ENDS)
def test_a_worker_that_drains_dies_at_a_step_of_its_end(place: str, state: str, start: Start, counted: Count) -> None:
    with start(loop_for(place, state)) as stage:
        for death in DEATHS:
            stage.open(workers_in(state))
            for nth in once(death):
                if place == "worker.draining":
                    hit = strike_where_it_drains(stage, f"{death}@{nth}~{state}", state)
                else:
                    hit = strike_in_life(stage, (place, f"{death}@{nth}"), state, signal.SIGTERM)
                if hit is None:
                    assert nth > 1, f"{place} is not passed when {state}"
                    break
                counted("worker dies", place, death, state)
            stage.close()
        stage.leave()


def strike_in_life(stage: Stage, plan: tuple[str, str], state: str, trigger: int, *, others_die: bool = False) -> Hit | None:
    """One cell: a worker is sent a signal, and where it, its replacement or the fork server passes the place, it waits at the gate
    until the other worker is in the state, and then dies."""
    place, what = plan
    stage.plan(place, f"{what}!")
    victim = stage.pids()[0]
    os.kill(victim, trigger)
    hit = stage.hit(LIMIT if what.endswith("@1") else PATIENCE)
    if hit is not None:
        fill(stage, state, "worker")
        stage.give("gate")
        if not what.startswith("term"):
            stage.killed(hit.pid)
    if state != "idle":
        stage.order("wave", how="burst")
    go_on(stage)
    if state == "idle":
        stage.order("wave", how="one by one")
    assert stage.settle() == []
    stage.judge(None if others_die else {victim, hit.pid} if hit else {victim})
    stage.killed(victim)
    return hit


def strike_where_it_drains(stage: Stage, what: str, state: str) -> Hit | None:
    """One cell: a worker in that state is sent SIGTERM, and dies as it begins to drain."""
    note = fill(stage, state, "worker")
    victim = stage.pids()[0] if note is None else note.pid
    stage.plan("worker.draining", what)
    os.kill(victim, signal.SIGTERM)
    hit = stage.hit(LIMIT if "@1~" in what else PATIENCE)
    if hit is not None:
        assert hit.pid == victim
        check_state(hit, state)
    stage.order("wave", how="one by one" if state == "idle" else "burst")
    go_on(stage)
    assert stage.settle() == []
    stage.judge({victim} if hit else set())
    stage.killed(victim)
    return hit


# The fork server


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("place", SERVER)
def test_the_fork_server_dies_at_a_step(place: str, state: str, start: Start, counted: Count) -> None:
    with start(loop_for(place, state)) as stage:
        for death in DEATHS:
            stage.open(workers_in(state))
            for nth in once(death):
                hit = strike_in_life(stage, (place, f"{death}@{nth}"), state, signal.SIGKILL, others_die=True)
                if hit is None:
                    assert nth > 1, f"{place} is not passed when {state}"
                    break
                counted("fork server dies", place, death, state)
            stage.close()
        stage.leave()


# SIGTERM


@pytest.mark.parametrize(("place", "state"), possible((*STEPS, NESTED[0])))
def test_sigterm_at_a_step_of_a_call_loses_nothing(place: str, state: str, start: Start, counted: Count) -> None:
    with start(loop_for(place, state)) as stage:
        stage.open(workers_in(state))
        for nth in numbers(state):
            hit = strike_in_load(stage, (place, f"term@{nth}~{state}"), state, "worker")
            stage.judge(set())
            if hit is None:
                assert nth > 1, f"{place} is not passed when {state}"
                break
            stage.killed(hit.pid)
            counted("SIGTERM, and nothing is lost", place, "term", state)
        stage.close()
        stage.leave()


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("place", [*BIRTHS, *ENDS[1:]])
def test_sigterm_at_a_step_of_a_life_loses_nothing(place: str, state: str, start: Start, counted: Count) -> None:
    with start(loop_for(place, state)) as stage:
        stage.open(workers_in(state))
        for nth in once("term"):
            hit = strike_in_life(stage, (place, f"term@{nth}"), state, signal.SIGTERM)
            if hit is None:
                assert nth > 1, f"{place} is not passed when {state}"
                break
            stage.killed(hit.pid)
            counted("SIGTERM, and nothing is lost", place, "term", state)
        stage.close()
        stage.leave()


# The supervisor stands, and a worker is struck


@pytest.mark.parametrize(("place", "state"), possible((*SUPERVISOR_STEPS, *NESTED[1:])))
def test_a_worker_dies_while_the_supervisor_is_at_a_step(place: str, state: str, start: Start, counted: Count) -> None:
    with start(loop_for(place, state)) as stage:
        stage.open(workers_in(state))
        for action in ("strike", "drain"):
            for nth in numbers(state):
                hit = strike_in_load(stage, (place, f"{action}@{nth}~{state}"), state, "supervisor")
                stage.judge(set(stage.struck) if action == "strike" else set())
                if hit is None:
                    assert nth > 1, f"{place} is not passed when {state}"
                    break
                counted("a worker is killed, or drained, while the supervisor is there", place, action, state)
        stage.close()
        stage.leave()


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("place", SUPERVISOR_LIFE)
def test_a_worker_dies_while_the_supervisor_sees_to_another(place: str, state: str, start: Start, counted: Count) -> None:
    with start(loop_for(place, state)) as stage:
        stage.open(2)
        for action in ("strike", "drain"):
            hit = strike_while_it_sees_to_another(stage, (place, f"{action}@1~{state}"), state)
            assert hit is not None, f"{place} is not passed when {state}"
            counted("a worker is killed, or drained, while the supervisor is there", place, action, state)
        stage.close()
        stage.leave()


def end_a_worker(stage: Stage, place: str, state: str) -> int:
    """Bring about the state, and have a worker end in it, so that the supervisor passes the place."""
    victim = stage.pids()[0]
    drains = place == "supervisor.worker.draining"
    if drains:  # it is held up before it says so
        stage.plan("worker.draining", "tell!")
        os.kill(victim, signal.SIGTERM)
        assert stage.hit() is not None
    fill(stage, state, "supervisor")
    if drains:
        stage.give("gate")
    else:
        os.kill(victim, signal.SIGKILL)
    return victim


def strike_while_it_sees_to_another(stage: Stage, plan: tuple[str, str], state: str) -> Hit | None:
    """One cell: a worker ends, and while the supervisor sees to that, or to the replacement, it is struck or strikes."""
    place, _ = plan
    stage.plan(*plan)
    victim = end_a_worker(stage, place, state)
    hit = stage.hit()
    go_on(stage)
    stage.order("wave", how="one by one" if state == "idle" else "burst")
    later = stage.settle()
    hit = hit or (later[0] if later else None)
    stage.judge({victim, *stage.struck})
    if hit is not None:
        check_state(hit, state)
    return hit


# The supervisor dies


@pytest.mark.parametrize(("place", "state"), possible((*SUPERVISOR_STEPS, *SUPERVISOR_LIFE, *NESTED[1:])))
def test_the_supervisor_dies(place: str, state: str, start: Start, counted: Count) -> None:
    for death, code in DEATHS.items():
        for nth in [1] if place in SUPERVISOR_LIFE else few(death):
            with start(loop_for(place, state)) as stage:
                stage.open(2)
                if not kill_supervisor(stage, (place, f"{death}@{nth}~{state}"), state, code):
                    assert nth > 1, f"{place} is not passed when {state}"
                    break
                counted("supervisor dies, and nothing is left", place, death, state)


def kill_supervisor(stage: Stage, plan: tuple[str, str], state: str, code: int) -> bool:
    """One cell: whether it was hit. Then nothing of it is left."""
    place, _ = plan
    stage.plan(*plan)
    if place in SUPERVISOR_LIFE:
        end_a_worker(stage, place, state)
    elif state != "idle":
        stage.order("fill", how=f"{state} of supervisor")  # it may die of that already
    stage.order("wave", how=wave_of(place, "one by one" if state == "idle" else "burst"))
    hit = stage.hit(5.0 if "@1~" in plan[1] else PATIENCE)
    if hit is None:
        stage.give("stay", HOLDERS)
        stage.order("end")
        hit = stage.hit(1.0)
    if hit is None:
        return False
    assert hit.pid == stage.program.pid
    check_state(hit, state)
    with Watch([stage.program.pid]) as supervisor:
        assert supervisor.wait_gone(LIMIT) == []
    with Watch(processes_of(stage.folder)) as left:
        assert left.wait_gone(HARD) == []
    assert processes_of(stage.folder) == []
    assert stage.program.end() == code
    return True


# Interrupts


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("place", ["supervisor.bell.read", "supervisor.outcome.delivered", "supervisor.slot.released"])
def test_an_interrupt_while_a_bell_is_heard_costs_one_worker(
    place: str, loop: str, state: str, start: Start, counted: Count
) -> None:
    with start(loop) as stage:
        stage.open(2)
        for nth in numbers(state):
            stage.order("end")  # the strike before may have hit the very calls that showed it whole again
            stage.program.expect("ended")
            before = set(stage.pids())
            hit = strike_in_load(stage, (place, f"interrupt@{nth}~{state}"), state, "supervisor")
            stage.judge(before - set(stage.pids()))
            if hit is None:
                assert nth > 1, f"{place} is not passed when {state}"
                break
            assert len(before & set(stage.pids())) == 1, "one of two workers has lost its channel"
            counted("KeyboardInterrupt while a bell is heard", place, "interrupt", state)
        stage.close()
        stage.leave()


# Pairs


RECOVERY = (*BIRTHS, *SERVER[:3], "worker.bell.read", "worker.call.marked", "worker.call.running", *SUPERVISOR_LIFE)


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize("place", [one for one in RECOVERY if one != "supervisor.worker.draining"])
def test_a_second_death_in_the_recovery_from_the_first(place: str, state: str, start: Start, counted: Count) -> None:
    with start(loop_for(place, state)) as stage:
        for death in ["strike"] if place in SUPERVISOR_LIFE else DEATHS:
            stage.open(2)
            strike_twice(stage, place, death, state)
            counted("a second death in the recovery from the first", place, death, state)
            stage.close()
        stage.leave()


def strike_twice(stage: Stage, place: str, death: str, state: str) -> None:
    """One cell: a worker dies in a call, and another process while that one is replaced."""
    is_call = place.startswith(("worker.bell", "worker.call"))
    first = "worker.outcome.ready"
    stage.plan(first, f"kill~{state}!")
    hit = fill(stage, state, "worker")
    stage.order("wave", how="one by one" if state == "idle" else "burst")
    while hit is None or hit.place != first:
        hit = stage.hit()
        assert hit is not None
    check_state(hit, state)
    index, _, generation = hit.worker.partition(".")
    stage.plan(place, f"{death}#{index}.{int(generation) + 1}" if is_call else death)
    stage.give("gate")
    stage.killed(hit.pid)
    go_on(stage)
    second = stage.hit_of(place, PATIENCE if is_call else LIMIT)
    killers = {hit.pid, *stage.struck}
    later = [second, *stage.settle()]
    if not any(one and one.place == place for one in later):  # the replacement was given none of the calls: it gets some now
        stage.plan(place, f"{death}#{index}.{int(generation) + 1}")
        stage.order("wave", how="burst")
        later = [*stage.settle()]
    second = next((one for one in later if one and one.place == place), None)
    assert second is not None, f"{place} is not passed in the recovery"
    stage.judge(None if place in SERVER else killers | {second.pid, *stage.struck})


# Reload and resize

PASSED_IN: Final = {
    "reload": (*BIRTHS, *ENDS, "worker.bell.read", "worker.outcome.ready"),
    "grow": (*BIRTHS, "worker.bell.read", "worker.outcome.ready"),
    "shrink": (*ENDS, "worker.bell.read", "worker.outcome.ready"),
}
"""The places of workers that a change leads to, and two of the calls that go on meanwhile."""

SEEN_IN: Final = {
    "reload": ("supervisor.worker.started", "supervisor.worker.ready", "supervisor.worker.exited", "supervisor.worker.buried"),
    "grow": ("supervisor.worker.started", "supervisor.worker.ready", "supervisor.pool.grown", "supervisor.renewal.due"),
    "shrink": ("supervisor.worker.exited", "supervisor.worker.buried", "supervisor.pool.shrunk"),
}
SEEN_IN["reload"] += ("supervisor.renewal.due", "supervisor.worker.succeeded")
assert set(CHANGES) <= {place for places in SEEN_IN.values() for place in places}


def strike_in_change(stage: Stage, plan: tuple[str, str], state: str, change: str) -> Hit | None:
    """One cell: workers are replaced, added or removed in that state, with calls, and the plan is carried out meanwhile."""
    place, what = plan
    if state != "idle":
        fill(stage, state, "worker")
    stage.plan(place, what)
    stage.order("change", how=change)
    stage.order("wave", how="one by one" if state == "idle" else "burst")
    hit = stage.hit_of(place, PATIENCE)
    go_on(stage)
    later = [one for one in stage.settle() if one.place == place]
    assert len(later) <= (hit is None), "it is done once"
    return later[0] if later else hit


@pytest.mark.parametrize("state", ["idle", "busy"])
@pytest.mark.parametrize(("change", "place"), [(change, place) for change, places in PASSED_IN.items() for place in places])
def test_a_worker_dies_at_a_step_of_a_change(change: str, place: str, state: str, start: Start, counted: Count) -> None:
    with start(loop_for(place, state)) as stage:
        for death in DEATHS if state == "idle" else ("kill", "exit"):
            stage.open(2)
            hit = strike_in_change(stage, (place, death), state, change)
            assert hit is not None, f"{place} is not passed in {change} when {state}"
            stage.killed(hit.pid)
            stage.judge({hit.pid})
            counted(f"a worker dies in {change}", place, death, state)
            stage.close()
        stage.leave()


@pytest.mark.parametrize("state", ["idle", "busy"])
@pytest.mark.parametrize(("change", "place"), [(change, place) for change, places in SEEN_IN.items() for place in places])
def test_a_worker_dies_while_the_supervisor_changes_the_workers(
    change: str, place: str, state: str, start: Start, counted: Count
) -> None:
    with start(loop_for(place, state)) as stage:
        for action in ("strike", "drain"):
            for nth in (1, 2):
                stage.open(2)
                hit = strike_in_change(stage, (place, f"{action}@{nth}"), state, change)
                assert hit is not None or nth > 1, f"{place} is not passed in {change} when {state}"
                stage.judge(set(stage.struck) if action == "strike" else set())
                if hit is not None:
                    counted(f"a worker is killed, or drained, in {change}", place, action, state)
                stage.close()
        stage.leave()


@pytest.mark.parametrize("state", ["idle", "busy"])
@pytest.mark.parametrize("change", ["reload", "grow"])
@pytest.mark.parametrize("place", SERVER[:3])
def test_the_fork_server_dies_in_a_change(place: str, change: str, state: str, start: Start, counted: Count) -> None:
    with start(loop_for(place, state)) as stage:
        for death in ("kill", "exit"):
            stage.open(2)
            hit = strike_in_change(stage, (place, death), state, change)
            assert hit is not None, f"{place} is not passed in {change} when {state}"
            stage.judge(None)
            counted(f"the fork server dies in {change}", place, death, state)
            stage.close()
        stage.leave()


@pytest.mark.parametrize(("change", "place"), [(change, place) for change, places in SEEN_IN.items() for place in places])
def test_the_supervisor_dies_in_a_change(change: str, place: str, start: Start, counted: Count) -> None:
    with start(loop_for(place, "busy")) as stage:
        stage.open(2)
        stage.plan(place, "kill")
        stage.order("wave", how="burst")
        stage.order("change", how=change)
        with Watch([stage.program.pid]) as supervisor:
            assert supervisor.wait_gone(LIMIT) == []
        with Watch(processes_of(stage.folder)) as left:
            assert left.wait_gone(HARD) == []
        assert stage.program.end() == -9
        counted("supervisor dies, and nothing is left", place, "kill", "busy")


# Starting and closing


@pytest.mark.parametrize("method", ["forkserver", "spawn"])
@pytest.mark.parametrize("place", BIRTHS)
def test_a_first_start_dies(place: str, method: str, start: Start, counted: Count) -> None:
    if (place, method) == ("worker.forked", "spawn"):
        pytest.skip("a spawned worker is not forked")
    with start(loop_for(place, "idle")) as stage:
        for death in DEATHS if method == "forkserver" else ("kill", "exit"):
            stage.plan(place, death)
            stage.order("open", workers=2, method=method)
            opened = stage.told("opened")
            hit = stage.hit()
            assert hit is not None
            stage.killed(hit.pid)
            if opened["error"]:
                assert "before it was ready" in opened["error"]
                assert opened["left"] == []
            else:
                assert place == "worker.ready"
                stage.settle()
                stage.judge(set())
                stage.close()
            counted(f"first start fails, {method}", place, death, "idle")
        stage.leave()


@pytest.mark.parametrize("state", STATES)
@pytest.mark.parametrize(
    "place", ["worker.finished", "worker.lifespan.left", "worker.bye", "worker.bell.read", "worker.outcome.ready"]
)
def test_a_worker_dies_while_the_runner_closes(place: str, state: str, start: Start, counted: Count) -> None:
    with start(loop_for(place, state)) as stage:
        for death in DEATHS:
            stage.open(2)
            is_call = place.startswith(("worker.bell", "worker.outcome"))
            if is_call and state != "idle":
                stage.plan(place, f"{death}~{state}")
                stage.order("fill", how=f"{state} of worker")
                stage.program.expect("filled")
                stage.order("wave", how="burst")
                stage.order("on")
            else:
                stage.plan(place, death)
                stage.order("wave", how="burst")
            if is_call and state == "busy":
                stage.order("close")
                hit = stage.hit()  # before the calls that keep the worker busy are let go
                stage.give("stay", HOLDERS)
                stage.closed()
            else:
                stage.give("stay", HOLDERS)
                stage.close()
                hit = stage.hit(0)
            assert hit is not None, f"{place} is not passed in closing"
            stage.unplan()
            stage.judge({hit.pid}, cut=True)
            stage.killed(hit.pid)
            counted("a worker dies while the runner closes", place, death, state)
        stage.leave()
