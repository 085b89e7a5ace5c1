"""The facts that hold in each state of the explorer, and when all calls have ended."""

from typing import TYPE_CHECKING

from percore._calls.nested import NestedCall, NestedStream
from percore._calls.streams import StreamCall
from percore._protocol.messages import DROP

if TYPE_CHECKING:
    from tests.unit.call_orders import World


def _check_dropped(world: "World") -> None:
    """A nested call that its caller has dropped is kept by nobody, once that was heard."""
    for member, room in world.supervisor.nested.rooms.items():
        worker = member.worker
        if worker.state in ("dying", "gone") or not worker.channel.is_open:
            continue
        unheard = {number for op, number, _ in worker.outbox if op == DROP}
        wanted = {number for run in worker.running.values() for number in run.children}
        kept = set(room.asked) - wanted - unheard
        assert not kept, f"nested calls {kept} of {worker.name} were dropped, and go on"


def check_relations(world: "World") -> None:
    """Check what holds after each step between calls, their callers and their places."""
    _check_dropped(world)
    supervisor = world.supervisor
    nested = supervisor.nested
    assert nested.rooms.keys() <= supervisor.members, "a buried worker has nested calls"
    asked = {id(call) for room in nested.rooms.values() for _, call in room.asked.values()}
    for member in supervisor.members:
        for call in member.calls.values():
            if isinstance(call, NestedCall) and not call.done():
                assert call.asker.call.member is not None, f"{call.function.name} runs on without its caller"  # type: ignore[attr-defined]
                assert id(call) in asked, f"{call.function.name} runs on, though nobody wants it"
            if isinstance(call, StreamCall | NestedStream) and not call.done() and _is_aside(call):
                assert call.credits.is_used_up, "a generator that may go on has given its place away"


def _is_aside(call: "StreamCall | NestedStream") -> bool:
    return call._is_aside if isinstance(call, StreamCall) else call.is_aside


def check_full(world: "World") -> None:
    """Check that all places, slots and tables are as they were before the calls, since no call is under way."""
    supervisor = world.supervisor
    dispatch = supervisor.dispatch
    for member in supervisor.members:
        member.check_empty()
        left = [*filter(None, member._aside), *member._reasons, *member.families, *member.parked]
        assert not left, f"{member.name}: calls are aside, or have nested calls: {left}"
    assert dispatch._levels._aside == [0, 0], f"calls count as aside: {dispatch._levels._aside}"
    assert not dispatch._strained[0], "nested calls go first, though there are none"
    assert not dispatch._strained[1]
    assert not dispatch.waiting(), "calls wait"
    for key in dispatch.keys._keys.values():  # a cancelled call may wait for its turn, on which it is dropped
        waiting = sum(len(lane.calls) - lane.ended for lane in key.lanes.values())
        assert not key.running, f"{key.name} counts as taken"
        assert not waiting, f"calls of {key.name} wait"
    assert not supervisor.nested.held
    for room in supervisor.nested.rooms.values():
        left = [*room.asked, *room.lent, *filter(None, room.announced.values())]
        assert not left, f"nested calls are left: {left}"
    assert not supervisor.calls.retries.delayed
    assert not supervisor.calls.loose
    rates = vars(supervisor.calls).get("rates")  # made for the first call with a rate
    assert rates is None or not any(gate.held for gate in rates._gates.values()), "calls count as under way for their rate"
    hard = supervisor.calls.limits.hard
    assert hard is None or not hard.overruns.calls, "a worker rests for a call that has ended"
    assert not world.store.in_use, "parcels are left"
