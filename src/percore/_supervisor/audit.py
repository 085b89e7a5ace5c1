"""The audit of a runner (PERCORE_DEBUG=1): invariants between parts of the supervisor that cost too much to check in production.

Several parts know of each call and of each worker. After messages, deaths and changes have been handled, the audit compares what
they know. A disagreement would show later, and elsewhere: as a call that never ends, a place that nobody gets, a key whose calls
wait for ever, or a slot without a worker. The audit reports it to the exception handler of the loop, as an AssertionError.

It looks at every call. So while many calls are pending it runs once for several steps, each of which pays for some calls.

Code of the user that a garbage collection runs may call percore in the middle of a step. The audit does not look then, and lets no
collection begin while it looks.
"""

import asyncio
import gc
from collections import Counter
from collections.abc import Hashable, Sequence
from typing import TYPE_CHECKING, Any, Final

from percore._protocol.messages import Kind
from percore._scheduler.lifecycle import Deadline, State
from percore._scheduler.phase import Replaces
from percore._scheduler.places import ROOM_OF_NONE
from percore._scheduler.replacement import Occupancy
from percore._supervisor.call_registry import CallRegistry
from percore._supervisor.pool import Pool
from percore._supervisor.pool_worker import PoolWorker

if TYPE_CHECKING:
    from percore._calls.calls import PendingCall

_PAID_FOR: Final = 32
"""Calls that each step pays for."""


class _Collection:
    """Whether a garbage collection runs, in any thread."""

    is_on = False

    @classmethod
    def note(cls, phase: str, _info: dict[str, int]) -> None:
        cls.is_on = phase == "start"


gc.callbacks.append(_Collection.note)


class Audit:
    """Audits one runner."""

    def __init__(self, loop: asyncio.AbstractEventLoop, calls: CallRegistry, pool: Pool) -> None:
        self._loop = loop
        self._calls = calls
        self._pool = pool
        self._paid = self._price = 0

    def look(self) -> None:
        """Check everything, if enough steps have paid for it and no part is in the middle of a step."""
        self._paid += _PAID_FOR
        if self._paid < self._price or _Collection.is_on or self._calls.is_moving or self._calls.is_withdrawing:
            return
        self._paid = 0
        was_enabled = gc.isenabled()
        gc.disable()
        try:
            self.check()
        except AssertionError as error:
            # Without its frames: whoever keeps it would keep the workers, with their memory.
            self._loop.call_exception_handler(
                {"message": "the parts of a runner disagree", "exception": error.with_traceback(None)}
            )
        finally:
            if was_enabled:
                gc.enable()

    def check(self) -> None:
        """Check everything.

        Raises:
            AssertionError: two parts disagree.
        """
        members = list(self._pool.members)
        for member in members:
            _check_calls(member)
            _check_places(member)
            _check_deadline(member, self._pool.lifecycles.draining)
        self._check_owners()
        self._check_keys(members)
        self._check_slots(members)

    def _check_owners(self) -> None:
        """Each call has one owner: a worker, a queue, or those that keep delayed calls and calls of broadcasts."""
        pending = self._calls.pending()
        self._price = len(pending)
        owned = Counter(map(id, pending))
        twice = [call for call in pending if owned[id(call)] > 1]
        assert not twice, f"calls of two owners: {_names(twice)}"
        waiting: list[PendingCall] = self._calls.dispatch.calls()
        held = [call for call in waiting if call.member is not None]
        assert not held, f"calls that wait, and are in a worker: {_names(held)}"
        assert not self._calls.withdrawn, f"calls that were cancelled as they were taken: {_names(list(self._calls.withdrawn))}"
        self._calls.dispatch.check_counts()

    def _check_keys(self, members: Sequence[PoolWorker]) -> None:
        """A key counts its calls that are in workers: else its other calls wait for ever, or run on two workers at once."""
        sent: Counter[Hashable] = Counter()
        for member in members:
            sent.update(call.key for call in member.calls.values() if call.key is not None and call.kind != Kind.BROADCAST)
        counted = self._calls.dispatch.keys.running()
        differing = {name: (count, sent[name]) for name, count in counted.items() if count != sent[name]}
        assert not differing, f"calls of keys that count as under way, and are: {differing}"
        assert sent.keys() <= counted.keys(), f"keys of calls under way that are not known: {sent.keys() - counted.keys()}"

    def _check_slots(self, members: Sequence[PoolWorker]) -> None:
        """A slot has a worker, or something will give it one; and no call is given to a worker that has ended or ends."""
        pool = self._pool
        used = len(pool.slots)
        assert pool.slots == pool.all_slots[:used], "a slot is used that is not where its index says"
        for slot in pool.all_slots[used:]:
            is_empty = slot.state is Occupancy.EMPTY and slot.current is None and slot.next is None
            assert is_empty, f"slot {slot.index} was removed, and is {slot.state.value}"
        # Before all workers were ready once the start fails with the first that is not, and a resize may take its slots back.
        is_served = self._calls.phase.replaces is Replaces.ALL and pool.opened_at is not None and not pool.changes.is_on
        for slot in pool.slots:
            for member in (slot.current, slot.next):
                assert member is None or member in members, f"slot {slot.index} has a worker that was buried"
            assert slot.is_delayed is (slot.timer is not None), f"slot {slot.index} is {slot.state.value}; its timer: {slot.timer}"
            assert not (is_served and slot.state is Occupancy.EMPTY), f"slot {slot.index} has no worker, and gets none"
        seats = self._calls.dispatch.seats
        assert len(set(seats)) == len(seats), f"workers that take calls twice: {seats}"
        for seat in seats:
            assert seat in members, f"{seat.name} takes calls, and was buried"
            is_ending = seat.life.state is not State.READY and self._calls.phase.begins
            assert not is_ending, f"{seat.name} takes calls, and is {seat.life.state.value}"
            assert not seat.killed_why, f"{seat.name} takes calls, and was killed: {seat.killed_why}"


def _check_calls(member: PoolWorker) -> None:
    """A worker's calls know of it, and its other tables have these calls alone."""
    for call_id, call in member.calls.items():
        assert (call.member, call.call_id) == (member, call_id), f"{_names([call])} is call {call_id} of {member.name}"
    for table in (member.parked, member.families):
        assert member.calls.keys() >= set(table), f"{member.name} has {set(table)} without their calls"


def _check_places(member: PoolWorker) -> None:
    """Each call has one place, no two have the same start mark, and the loads count them: else places are lost, or given twice."""
    name, calls, free = member.name, member.calls, member.free
    assert len(calls) + len(free) == member.places, f"{name} has {len(calls)} calls and {len(free)} of {member.places} places"
    marks = Counter(call_id % member.stride for call_id in (*calls, *free))
    assert len(marks) == member.places, f"places of {name} with one start mark: {[m for m, count in marks.items() if count > 1]}"
    kinds = Counter(call.kind for call in calls.values())
    aside = member.aside
    for kind in (Kind.TASK, Kind.THREAD):
        held = member.load[kind] % ROOM_OF_NONE
        has = kinds[kind], aside[kind]
        assert held == has[0] - has[1], f"{name} counts {held} calls of kind {kind}; it has, and of these aside: {has}"
    broadcasts = member.load[Kind.BROADCAST]
    assert broadcasts == kinds[Kind.BROADCAST], f"{name} counts {broadcasts} broadcasts, and has {kinds[Kind.BROADCAST]}"


def _check_deadline(member: PoolWorker, draining: "set[PoolWorker]") -> None:
    """A worker that has to start or to end has a timer, unless its last calls may take as long as they do."""
    if not member.is_attached:  # its start has failed half-way, and it was killed
        return
    deadline = member.life.deadline(has_calls=bool(member.calls))
    if deadline is Deadline.END and member in draining:  # its timer starts at the next step
        return
    assert deadline is None or member.timer is not None, f"{member.name} is {member.life.state.value}, for as long as it likes"


def _names(calls: Sequence[Any]) -> list[str]:
    return [call.function.name for call in calls]
