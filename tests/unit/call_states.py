"""States of the explorer: what two paths that lead to the same future have in common; and the facts that hold in each state, and
when all calls have ended.
"""

import asyncio
from typing import TYPE_CHECKING, Any

from percore._calls.nested import NestedCall, NestedStream
from percore._calls.streams import StreamCall
from percore._protocol.messages import DROP

if TYPE_CHECKING:
    from tests.unit.call_orders import World


def shape_of(world: "World") -> object:
    """Return all that decides what can happen next."""
    told = tuple(map(_told, world.calls))
    tasks = tuple((name, task.done()) for name, task in world.tasks.items())
    timers = tuple((round(timer.when() - world.loop.now, 1), _name(timer)) for timer in world.loop.timers())
    workers = tuple(worker.shape() for worker in world.workers if worker.state != "gone")
    common = tuple(world.left.items()), told, tasks, timers, workers, tuple(sorted(world.ran.items(), key=repr))
    if world.runner._assembly is None:
        return common
    supervisor = world.supervisor
    dispatch = supervisor.dispatch
    label = labels(world)
    members = tuple(
        (
            (one.index, one.worker.state, one.life.state, tuple(one.load), one.recalling, one.deadline, one in dispatch.seats),
            (tuple(label.get(id(call)) for call in one.calls.values()), dispatch.recalls.barren.get(one) == dispatch.times_ahead),
            (tuple(one._aside), one._spares, tuple(sorted(one._reasons.values()))),
        )
        for one in sorted(supervisor.members, key=lambda one: (one.index, one.generation))
    )
    slots = tuple((slot.state, slot.budget.deaths, slot.renewal, slot.timer is not None) for slot in supervisor.slots)
    every = (*dispatch.singles, *dispatch._maps)
    queues = tuple(tuple(label.get(id(call)) for call in queue.calls) for queue in every)
    lanes = tuple(tuple(label.get(id(call)) for lane in queue.lanes.values() for call in lane.calls) for queue in every)
    delayed = frozenset(label.get(id(call)) for call in supervisor.calls.retries.delayed)
    shared = members, slots, queues, lanes, delayed, supervisor.phase.now, dispatch.recalls.is_ahead
    return common, shared, _families(world, label), _keys(world)


def labels(world: "World") -> dict[int, Any]:
    """Return the labels of all calls, by the ids of their objects."""
    found: dict[int, Any] = {id(getattr(call, "call", call)): number for number, call in enumerate(world.calls)}
    for member in world.supervisor.members:
        found |= {id(call): member.worker.labels.get(call_id) for call_id, call in member.calls.items()}
    for room in world.supervisor.nested.rooms.values():
        found |= {id(call): f"{room.member.index}:{number}" for number, (_, call) in room.asked.items() if id(call) not in found}
    return found


def _families(world: "World", label: dict[int, Any]) -> object:
    nested = world.supervisor.nested
    members = sorted(nested.rooms, key=lambda one: (one.index, one.generation))
    rooms = []
    for member in members:
        room = nested.rooms[member]
        asked = tuple((number, _stream(call)) for number, (_, call) in sorted(room.asked.items()))
        families = tuple(
            (label.get(id(parent.call)), tuple(sorted(parent.children)), parent.held, parent.is_aside)
            for parent in member.families.values()
        )
        rooms.append((member.index, member.generation, asked, tuple(room.announced.items()), tuple(room.lent), families))
    return tuple(rooms), tuple(label.get(id(parent.call)) for parent in nested.held)


def _stream(call: Any) -> object:
    if not isinstance(call, NestedStream):
        return None
    counts = call.credits
    return counts.granted, counts.arrived, counts.taken, call.is_aside, call.is_closing, len(call.outbox)


def _keys(world: "World") -> object:
    keys = world.supervisor.dispatch.keys
    return tuple(
        sorted(
            (str(name), key.running, -1 if key.seat is None else key.seat.index, key.gate is not None and key.gate.is_shut)
            for name, key in keys._keys.items()
            if not key.is_idle()
        )
    )


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


def _told(call: Any) -> object:
    if hasattr(call, "shape"):
        return call.shape()
    if not call.done():
        return None
    return "cancelled" if call.cancelled() else type(call.exception()).__name__


def _name(timer: asyncio.TimerHandle) -> str:
    callback: Any = timer._callback  # type: ignore[attr-defined]
    return getattr(callback, "__qualname__", None) or type(callback).__name__
