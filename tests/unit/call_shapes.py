"""States of the explorer: what two paths have in common from which the same can follow.

A state is written down without what decides nothing:

- Calls have no numbers: they are named in the order in which the state mentions them. percore never sees the number of a call, only
  the order in which calls come. So two paths that differ in which of two equal calls was cancelled lead to one state.
- Workers have no indexes, only an order, as long as nothing that may still happen goes by their indexes.
- A call that has ended was judged at its end. If nobody mentions it any more, it is forgotten, and so is the worker that ran it.
- Times count from now on.

`call_orders.is_alike` holds this against the runner: from two paths to one state the same states follow.
"""

import asyncio
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Final

from percore._calls.nested import NestedStream
from percore._protocol.messages import ASK, BEGIN_BY, CLOSE, CREDIT, DROP, GRANT, RECALL, is_call
from percore._scheduler.phase import Phase
from percore._scheduler.replacement import LASTING
from tests.unit.stepped_calls import ANSWERS, Child, Label, Run
from tests.unit.stepped_users import Consumer

if TYPE_CHECKING:
    from tests.unit.call_orders import World
    from tests.unit.stepped_workers import StepWorker

_OF_NESTED: Final = frozenset({*ANSWERS, ASK, DROP, CLOSE, GRANT})
"""Messages whose number is that of a nested call, given by the worker."""
_COUNTS: Final = frozenset({CREDIT, GRANT})
"""Messages whose body is a count."""
_BY_INDEX: Final = ("reloads", "grows", "shrinks")
"""Events that go by the indexes of workers."""


class Shape:
    """Writes one state down."""

    def __init__(self, world: "World") -> None:
        self.world = world
        self._now = world.loop.now
        self._names: dict[Label, int] = {}
        self._label: dict[int, Label] = {}
        """The labels of calls, by the ids of their objects."""
        self._ranks: dict[int, int] = {}
        """The places of workers in their order, by index."""

    def written(self) -> object:
        """Return all that decides what can happen next."""
        world = self.world
        is_open = world.runner._assembly is not None
        self._label = labels(world) if is_open else {}
        members = self._members() if is_open else []
        workers = sorted(world.workers, key=lambda one: (self._rank(one.index), one.generation))
        written = tuple(self._worker(worker) for worker in workers if worker.state != "gone")
        shared = (
            (*map(self._member, members), self._pool(), self._queues(), self._families(members), self._keys()) if is_open else ()
        )
        return written, shared, self._user(), self._calls()

    # Names

    def _rank(self, index: int) -> int:
        return self._ranks.setdefault(index, len(self._ranks))

    def name(self, label: Label | None) -> int:
        """Return the name of a call; -1 if the model does not know the call."""
        return -1 if label is None else self._names.setdefault(label, len(self._names))

    def _of(self, calls: Iterable[Any]) -> tuple[int, ...]:
        return tuple(self.name(self._label.get(id(call))) for call in calls)

    def _from_now(self, when: float | None) -> float | None:
        return None if when is None else round(when - self._now, 1)

    # Workers

    def _members(self) -> list[Any]:
        """Name all slots, and return the supervisor's workers: in the order in which calls prefer them, or by index."""
        supervisor = self.world.supervisor
        seats = supervisor.dispatch.seats
        members = sorted(supervisor.members, key=lambda one: (one.index, one.generation))
        slots = sorted(supervisor.pool.all_slots, key=lambda slot: slot.index)
        if not (self.world.has_keys or self._changes()):
            members = [*seats, *sorted((one for one in members if one not in seats), key=_nameless)]
            for one in members:
                self._rank(one.index)
            slots.sort(key=_slot)
        for slot in slots:
            self._rank(slot.index)
        return members

    def _changes(self) -> bool:
        world = self.world
        is_changing = any(not task.done() and name.split(" ")[0] in _BY_INDEX for name, task in world.tasks.items())
        return is_changing or any(world.left.get(event) for event in _BY_INDEX)

    def _worker(self, worker: "StepWorker") -> object:
        labels = worker.labels
        name = self.name

        def of(message: tuple[int, int, Any]) -> tuple[int, Any, Any]:
            op, number, body = message
            if op in _OF_NESTED:
                return op, name(worker.nested.get(number)), body if op in _COUNTS else None
            if op == RECALL:
                return op, number, None
            if op == BEGIN_BY:
                return op, 0, self._from_now(body)
            return op, name(labels[number]) if number in labels else 0, body if op in _COUNTS else None

        held = () if worker.member is None else worker.member.calls
        is_dying = worker.state == "dying"
        return (
            (self._rank(worker.index), worker.state, is_dying and worker.code, worker.is_stuck, worker.has_news),
            tuple(of(message) if not is_call(message[0]) else (1, name(labels[message[1]])) for message in worker.inbox),
            tuple(map(of, worker.outbox)),
            tuple(self._run(run) for run in worker.running.values()),
            tuple((name(labels[one]), self._from_now(worker.deadlines[one])) for one in worker.waiting),
            tuple(name(labels[one]) for one in worker.back),
            self._from_now(worker.begin_by),
            tuple((name(labels[one]), self._age(worker.begun[one])) for one in held if one in worker.begun),
        )

    def _age(self, begun: float) -> float:
        """Return how many seconds ago this was, if anything goes by it."""
        return min(round(self._now - begun, 1), LASTING) if self.world.counts_time else 0.0

    def _run(self, run: Run) -> object:
        children = tuple(self._child(child) for child in run.children.values())
        return self.name(run.label), run.is_cancelled, run.credits, run.produced, run.is_aside, children

    def _child(self, child: Child) -> object:
        return self.name(child.label), child.arrived, child.taken, child.since, child.is_closing

    def _member(self, one: Any) -> object:
        dispatch = self.world.supervisor.dispatch
        barren = dispatch.recalls.barren.get(one)
        deadline = None if one.deadline is None else one.deadline.value
        is_seat = dispatch.seats.index(one) if one in dispatch.seats else -1
        return (
            (self._rank(one.index), self._age_in_slot(one)),
            (one.worker.state, one.life.state.value, *one.load, one.recalling, deadline, is_seat),
            (self._of(one.calls.values()), barren is not None and barren == dispatch.times_ahead, self._limits(one)),
            (tuple(one._aside), one._spares, tuple(sorted(one._reasons.values())), one.is_holding, bool(one.killed_why)),
            (one.done + one.retried > 0, tuple(sorted(one.defined)), self._now - one.started_at >= LASTING),
        )

    def _age_in_slot(self, one: Any) -> int:
        """Return how many workers of its slot are older. Else nothing would tell which of them a member is."""
        others = (other for other in self.world.workers if other.index == one.index and other.state != "gone")
        return sum(other.generation < one.generation for other in others)

    def _limits(self, one: Any) -> object:
        begin_by = getattr(one, "_begin_by", None)
        return self._from_now(begin_by), one.tickets if one.tickets < 1000 else None, one.gave_back

    # The supervisor

    def _pool(self) -> object:
        supervisor = self.world.supervisor
        slots = tuple(map(_slot, sorted(supervisor.slots, key=lambda slot: self._rank(slot.index))))
        changes = supervisor.pool.changes
        awaited = tuple((self._rank(slot.index), slot.generation - since) for slot, since in changes._awaited.items())
        recalls = supervisor.dispatch.recalls
        hard = supervisor.calls.limits.hard
        steps = [] if hard is None else [round(when - self._now, 1) for when in hard._steps._times]  # the timer has the first one
        return slots, awaited, changes._failure is not None, supervisor.phase.now.value, recalls.is_ahead, tuple(sorted(steps))

    def _queues(self) -> object:
        dispatch = self.world.supervisor.dispatch
        every = (*dispatch.singles, *dispatch._maps)
        queues = tuple((self._of(queue.calls), queue.lanes_first, queue.is_listed) for queue in every)
        turns = tuple(tuple(every.index(queue) for queue in turns) for turns in dispatch._turns)
        lanes = tuple(self._of(call for lane in queue.lanes.values() for call in lane.calls) for queue in every)
        return queues, turns, lanes, tuple(dispatch._strained)

    def _families(self, members: list[Any]) -> object:
        nested = self.world.supervisor.nested
        rooms = []
        for member in members:
            room = nested.rooms.get(member)
            if room is None:
                continue
            child = member.worker.nested.get
            asked = tuple((self.name(child(number)), _stream(call)) for number, (_, call) in sorted(room.asked.items()))
            families = tuple(
                (
                    *self._of([parent.call]),
                    tuple(self.name(child(number)) for number in sorted(parent.children)),
                    parent.held is not None and self.name(child(parent.held)),
                    parent.is_aside,
                )
                for parent in member.families.values()
            )
            others = tuple(self.name(child(number)) for number in (*room.announced, *room.lent))
            rooms.append((self._rank(member.index), asked, families, others))
        return tuple(rooms), self._of(parent.call for parent in nested.held)

    def _keys(self) -> object:
        keys = self.world.supervisor.dispatch.keys
        gates = () if (rates := vars(self.world.supervisor.calls).get("rates")) is None else rates._gates.items()
        return (
            tuple(
                sorted(
                    (str(name), key.running, -1 if key.seat is None else key.seat.index, key.is_seated, key.is_home)
                    for name, key in keys._keys.items()
                    if not key.is_idle()
                )
            ),
            tuple((str(name), self._gate(gate)) for name, gate in gates),
        )

    def _gate(self, gate: Any) -> object:
        bucket = gate.bucket
        to_come = [when for when in (bucket.paused_until, bucket._full_at, bucket._behind_until) if when > self._now]
        log = [(self._from_now(starts.last), starts.count) for starts in bucket._log if starts.last + 3.0 > self._now]
        due = self._from_now(gate.due) if gate.is_shut else None
        held = self._of(gate.held)
        return gate.is_shut, due, held, gate.passes, gate.ended, str(bucket.rate), tuple(map(self._from_now, to_come)), tuple(log)

    # The user

    def _user(self) -> object:
        world = self.world
        tasks = sorted(name.split(" ")[0] for name, task in world.tasks.items() if not task.done())
        is_closing = tuple(sorted({"closes", "cuts"} & world.tasks.keys()))
        timers = tuple((self._from_now(timer.when()), _name(timer)) for timer in world.loop.timers())
        return tuple(tasks), is_closing, timers, 0 if is_closing else world.case.calls - len(world.calls)

    def _calls(self) -> object:
        """Return what is to be known of each call, in the order of their names; those without a name are named last."""
        world = self.world
        others = [number for number, call in enumerate(world.calls) if number not in self._names and not _is_forgotten(call)]
        for label in sorted(others, key=lambda number: repr(self._call(number))):
            self.name(label)
        known: list[object] = []
        names = self._names
        while len(known) < len(names):  # a nested call may name its caller
            known.append(self._call(list(names)[len(known)]))
        return tuple(known)

    def _call(self, label: Label) -> object:
        world = self.world
        if label in world.asked:
            caller = str(label).rpartition(".")[0]
            index = world.case.asks.index(world.asked[label])
            return index, world.ran[label], self.name(int(caller) if caller.isdigit() else caller), label in world.told
        call = world.call(label)
        if isinstance(call, Consumer):
            return world.traits(label), world.may_begin(label) if call.done() else world.ran[label], call.shape()
        if call is None or call.done():
            return world.traits(label), world.may_begin(label)
        return world.traits(label), world.ran[label], self._pending(call)

    def _pending(self, future: Any) -> object:
        if not self.world.counts_time:
            return None
        call = getattr(future, "call", future)
        plan = getattr(call, "plan", None)
        delay = None if plan is None or plan.timer is None else self._from_now(plan.timer.when())
        return self._from_now(getattr(call, "begin_by", None)), self._from_now(getattr(call, "hard_by", None)), delay


def labels(world: "World") -> dict[int, Label]:
    """Return the labels of all calls, by the ids of their objects."""
    found: dict[int, Label] = {id(getattr(call, "call", call)): number for number, call in enumerate(world.calls)}
    for member in world.supervisor.members:
        found |= {
            id(call): member.worker.labels[call_id] for call_id, call in member.calls.items() if call_id in member.worker.labels
        }
    for room in world.supervisor.nested.rooms.values():
        nested = room.member.worker.nested
        found |= {id(call): nested[number] for number, (_, call) in room.asked.items() if id(call) not in found}
    return found


def events_left(world: "World") -> tuple[int, ...]:
    """Return how often each event of the case may still happen, and has something to happen to."""
    gone = set()
    is_used_up = world.is_closing() or len(world.calls) == world.case.calls
    if world.is_closing():
        gone |= {*_BY_INDEX, "paces", *({"closes", "cuts"} & world.tasks.keys())}
        if all(worker.state == "gone" for worker in world.workers) and world.supervisor.phase.now is Phase.ENDED:
            gone |= {"dies", "sticks", "drains", "fails"}
    if is_used_up and all(call is None or call.done() for call in world.calls):
        gone |= {"cancels", "leaves", "forgets"}
    return tuple(0 if event in gone else count for event, count in world.left.items())


def _is_forgotten(call: Any) -> bool:
    return call is None or call.done()


def _nameless(member: Any) -> tuple[Any, ...]:
    """Return what is to be known of a worker without the name of any call."""
    worker = member.worker
    return (
        (member.life.state.value, worker.state, worker.is_stuck, worker.has_news, *member.load, tuple(sorted(member.defined))),
        ([op for op, _, _ in worker.inbox], [op for op, _, _ in worker.outbox], len(worker.running), len(member.calls)),
        (member.done + member.retried > 0, member.recalling, member.is_holding, bool(member.killed_why)),
    )


def _slot(slot: Any) -> tuple[Any, ...]:
    return slot.state.value, slot.budget.deaths, slot.renewal.value, slot.timer is not None


def _stream(call: Any) -> object:
    if not isinstance(call, NestedStream):
        return None
    counts = call.credits
    return counts.granted, counts.arrived, counts.taken, call.is_aside, call.is_closing, len(call.outbox)


def _name(timer: asyncio.TimerHandle) -> str:
    callback: Any = timer._callback  # type: ignore[attr-defined]
    return getattr(callback, "__qualname__", None) or type(callback).__name__
