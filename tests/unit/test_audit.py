"""The audit (PERCORE_DEBUG=1): each invariant that it checks is broken here on purpose, and it says so."""

from collections.abc import Callable, Iterator
from typing import Any, Final

import pytest

from percore._protocol.messages import Kind
from percore._scheduler.lifecycle import State
from percore._scheduler.replacement import Occupancy
from percore._supervisor.audit import Audit
from tests.unit.call_orders import Case, World, watched, world

pytestmark = pytest.mark.asyncio_only


@pytest.fixture(autouse=True)
def virtual() -> Iterator[None]:
    with watched():
        yield


def member_of(one: World) -> Any:
    """A worker that has calls."""
    return next(member for member in one.supervisor.members if member.calls)


def call_of(one: World) -> Any:
    return next(iter(member_of(one).calls.values()))


def waiting(one: World) -> Any:
    return one.supervisor.dispatch.singles[Kind.TASK].calls


def key_of(one: World) -> Any:
    return next(key for key in one.supervisor.dispatch.keys._keys.values() if key.running)


def empty(one: World) -> None:
    slot: Any = one.supervisor.slots[0]
    slot.state, slot.current = Occupancy.EMPTY, None


def late(one: World) -> None:
    member: Any = next(iter(one.supervisor.members))
    member.life.state = State.FAILED


def bury(one: World) -> None:
    """A worker without calls of keys."""
    supervisor = one.supervisor
    supervisor.members.discard(next(member for member in supervisor.members if not any(c.key for c in member.calls.values())))


BREAKS: Final[dict[str, tuple[Callable[[World], object], str]]] = {
    "a call of two owners": (lambda one: waiting(one).append(waiting(one)[0]), "calls of two owners"),
    "a cancelled call that is not counted": (
        lambda one: setattr(one.supervisor.dispatch.singles[Kind.TASK], "ended", 1),
        "as found",
    ),
    "a call that waits and runs": (lambda one: setattr(waiting(one)[0], "member", member_of(one)), "and are in a worker"),
    "a call that knows nothing of its worker": (lambda one: setattr(call_of(one), "member", None), "is call"),
    "arguments of a call that has gone": (lambda one: member_of(one).parked.add(77), "without their calls"),
    "a place that is lost": (lambda one: member_of(one).free.pop(), "places"),
    "a place that is given twice": (
        lambda one: member_of(one).free.__setitem__(0, next(iter(member_of(one).calls)) + member_of(one).stride),
        "with one start mark",
    ),
    "a load that is too small": (lambda one: member_of(one).load.__setitem__(Kind.TASK, 0), "counts 0 calls"),
    "a load of plain calls": (lambda one: member_of(one).load.__setitem__(Kind.THREAD, 1), "counts 1 calls"),
    "a broadcast that is over": (lambda one: member_of(one).load.__setitem__(Kind.BROADCAST, 1), "broadcasts"),
    "a key that is never free": (lambda one: setattr(key_of(one), "running", 2), "count as under way"),
    "a key that was dropped": (lambda one: one.supervisor.dispatch.keys._keys.clear(), "not known"),
    "a slot without a worker": (empty, "gets none"),
    "a start that nobody makes": (lambda one: setattr(one.supervisor.slots[0], "state", Occupancy.SERVED_DELAYED), "its timer"),
    "a worker that was buried": (bury, "buried"),
    "a removed slot that has a worker": (lambda one: one.supervisor.slots.pop(), "was removed"),
    "slots that have changed places": (lambda one: one.supervisor.slots.reverse(), "not where its index says"),
    "a worker that takes calls twice": (lambda one: one.supervisor.dispatch.seats.extend(one.supervisor.dispatch.seats), "twice"),
    "a killed worker that takes calls": (lambda one: setattr(member_of(one), "killed_why", "a test"), "was killed"),
    "a worker that may end when it likes": (late, "for as long as it likes"),
}


def test_what_is_broken_is_told(subtests: pytest.Subtests) -> None:
    """Each break in a runner of its own, with a call in each worker and one that waits."""
    for name, (strike, told) in BREAKS.items():
        with (
            subtests.test(break_=name),
            world(Case({}, calls=4, options={"concurrency": 1}, keys=("k",)), ["submits"] * 4) as one,
        ):
            supervisor: Any = one.supervisor
            audit = Audit(one.loop, supervisor.calls, supervisor.pool)
            audit.check()
            before = undo_of(one)
            strike(one)
            with pytest.raises(AssertionError, match=told):
                audit.check()
            audit.look()
            (fault,) = one.loop.faults
            assert fault["message"] == "the parts of a runner disagree"
            one.loop.faults.clear()
            before()


def undo_of(one: World) -> Callable[[], None]:
    """Return a function that mends what a break may have changed, so that the runner can end."""
    supervisor: Any = one.supervisor
    dispatch = supervisor.dispatch
    slots = [(slot, slot.state, slot.current) for slot in supervisor.slots]
    members = [(member, list(member.free), list(member.load), member.life.state) for member in supervisor.members]
    calls = [(call, call.member) for call in supervisor.calls.pending()]
    queue, seats, keys = waiting(one), list(dispatch.seats), dict(dispatch.keys._keys)
    queued, running = list(queue), {name: key.running for name, key in keys.items()}

    def undo() -> None:
        for slot, state, current in slots:
            slot.state, slot.current = state, current
        for member, free, load, state in members:
            supervisor.members.add(member)
            member.free[:], member.load[:], member.life.state = free, load, state
            member.parked.clear()
            member.killed_why = ""
        for call, member in calls:
            call.member = member
        queue.clear()
        queue.extend(queued)
        dispatch.seats[:] = seats
        dispatch.keys._keys.update(keys)
        for name, count in running.items():
            keys[name].running = count

    return undo


def test_many_calls_are_looked_at_once_for_several_steps() -> None:
    with world(Case({}, calls=1), ()) as one:
        supervisor: Any = one.supervisor
        audit: Any = Audit(one.loop, supervisor.calls, supervisor.pool)
        with one.loop.running():
            calls = [one.runner.submit(abs, number) for number in range(1000)]
        audit.look()
        looks: list[int] = []
        audit.check = lambda: looks.append(audit._price)
        for _ in range(64):
            audit.look()
        assert len(looks) == 2  # 32 steps pay for about a thousand calls
        for call in calls:
            call.cancel()
