"""The burial of a dead worker: its calls end, what it held is released, its death is reported, and its slot is filled.

`Deaths` decides what becomes of its calls, and the pool carries out what was decided about its slot.
"""

import logging
from typing import TYPE_CHECKING, Final, Protocol

from percore._common.fault_points import POINTS, point
from percore._common.log import Faults, report
from percore._common.worker_errors import KILLED, how, mebibytes, signal_of
from percore._protocol.interfaces import Exit
from percore._scheduler.lifecycle import Event, State
from percore._scheduler.listening import has_served
from percore._scheduler.replacement import has_lasted
from percore._supervisor.deaths import Deaths
from percore._supervisor.first_start import FirstStart, not_ready, unready
from percore._supervisor.lifecycles import Lifecycles
from percore._supervisor.pool_reports import worker_has_ended
from percore._supervisor.pool_worker import PoolWorker

if TYPE_CHECKING:
    from percore._scheduler.replacement import Decision
    from percore._supervisor.blocked_loops import BlockedLoops
    from percore._supervisor.call_registry import CallRegistry, Progress
    from percore._supervisor.listening import Listening
    from percore._supervisor.memory_watch import MemoryWatch
    from percore._supervisor.nested import Nested
    from percore._supervisor.pool_changes import PoolChanges
    from percore._supervisor.worker_slot import WorkerSlot


class WorkerObserver(Protocol):
    """A part above the supervisor that has to know how workers come and go: an executor."""

    def seated(self) -> None:
        """A worker has begun to take calls."""

    def died(self, member: PoolWorker, *, was_ready: bool) -> None:
        """A worker has died, and nothing asked it to end. `was_ready`: it was ready before, and not draining."""


class BereavedPool(Protocol):
    """The pool, as the burial of one of its workers sees it."""

    members: set[PoolWorker]
    lifecycles: Lifecycles
    first_start: FirstStart
    changes: "PoolChanges"
    blocked_loops: "BlockedLoops"
    listening: "Listening"
    memory_watch: "MemoryWatch | None"

    def age(self, member: PoolWorker) -> float:
        """Return how many seconds ago the worker was started."""

    def level(self, member: PoolWorker | None = None) -> int:
        """Return the log level for a death."""

    def succeed(self, slot: "WorkerSlot", member: PoolWorker, decision: "Decision[PoolWorker]") -> None:
        """Carry out what was decided about the slot of a dead worker."""

    def succeed_despite(self, slot: "WorkerSlot") -> None:
        """Carry out what an error has left undone."""


class Burials:
    """Buries the dead workers of one pool."""

    def __init__(
        self, pool: BereavedPool, calls: "CallRegistry", nested: "Nested", keeper: "Progress", observer: WorkerObserver | None
    ) -> None:
        self._pool = pool
        self._calls = calls
        self._dispatch = calls.dispatch
        self._phase = calls.phase
        self._nested = nested
        self._keeper = keeper
        self._observer = observer
        self._deaths = Deaths(calls, pool.members)
        self._unburied: set[PoolWorker] = set()
        """Workers whose calls have ended, and whose slots are about to be filled."""

    def exited(self, slot: "WorkerSlot", member: PoolWorker, end: Exit) -> None:
        """The system has reported a worker's death. Receive its last messages, then end its calls and replace it.

        After the death nothing writes to the worker's memory, so its messages and start marks can be read without races.

        If a KeyboardInterrupt has ended this midway, it is called once more.
        """
        faults = Faults(f"the calls of worker {slot.index} were ended and the worker was replaced")
        if member not in self._pool.members:
            if member in self._unburied:
                self._bury_at_last(slot, member, faults)
                faults.finish()
            return  # else an exception interrupted its start before it was added, or it is buried
        with faults:
            if POINTS:
                point("supervisor.worker.exited")
            member.worker.channel.receive()
        self._bury(slot, member, end, faults)
        faults.finish()  # raises a KeyboardInterrupt only now, when no call of the dead worker is left

    def _bury(self, slot: "WorkerSlot", member: PoolWorker, end: Exit, faults: Faults) -> None:
        """End the calls of a dead worker and fill its slot. An exception in one step does not prevent the others."""
        slot.end = member.end = end
        with faults:
            slot.end = member.end = end = _explained(end, member)
        state = member.life.state
        faults.surely(lambda: self._is_gone(member))
        with faults:
            self._dispatch.unseat(member)
        if faults.last is not None:
            with faults:
                self._dispatch.expel(member)
        # It stays in `members` until its calls have ended, because user code may cancel others of its calls meanwhile.
        began = self._deaths.end_calls(member, faults)
        with faults:
            member.check_empty()
        began = began or member.done > 0 or member.retried > 0 or end.place_lost or self._has_served(member)
        with faults:
            self._calls.shares.buried(member)
        with faults:
            self._nested.buried(member)
        faults.surely(lambda: slot.took(member))  # before it leaves `members`: another thread must find its counts somewhere
        self._unburied.add(member)
        self._pool.members.discard(member)
        slot.failure = member.failure
        with faults:
            if began:
                slot.budget.began()
        faults.surely(member.worker.close)
        with faults:
            self._report_death(member, state)
        self._fill(slot, member, state, faults, began=began)
        with faults:
            self._keeper.advance()
        self._unburied.discard(member)

    def _bury_at_last(self, slot: "WorkerSlot", member: PoolWorker, faults: Faults) -> None:
        """Do what an interrupt has left undone after the worker's calls had ended."""
        faults.surely(member.worker.close)
        if member in (slot.current, slot.next):
            self._fill(slot, member, State.GONE, faults, began=True)  # nobody knows any more whether it had begun a call
        else:
            with faults:
                self._pool.succeed_despite(slot)
        with faults:
            self._keeper.advance()
        self._unburied.discard(member)

    def _fill(self, slot: "WorkerSlot", member: PoolWorker, state: State, faults: Faults, *, began: bool) -> None:
        """Fill the slot of a dead worker. `state`: the one in which it died. `began`: whether it had begun a call or has lasted."""
        # Decide before a step may fail: otherwise the slot would keep the dead worker for ever.
        is_first, began = self._pool.first_start.is_on, began or state is State.DRAINING
        if not member.was_ready:
            with faults:
                error = not_ready(member, "") if member.failure is None else unready(member)
                self._pool.changes.could_not_start(slot, member.generation, error.reason, error.__cause__)
        decision = slot.died(member, self._phase.replaces, began=began, is_first=is_first)
        with faults:
            self._pool.succeed(slot, member, decision)
        if faults.last is not None:
            with faults:
                self._pool.succeed_despite(slot)

    def _has_served(self, member: PoolWorker) -> bool:
        """Whether a worker has done something, though it may have begun no call."""
        age = self._calls.loop.time() - member.started_at
        if has_lasted(was_ready=member.was_ready, age=age):
            return True
        has_failed = member.failure is not None
        return self._pool.listening.is_used and has_served(was_ready=member.was_ready, has_failed=has_failed, age=age)

    def _is_gone(self, member: PoolWorker) -> None:
        if not member.life.is_gone:
            self._pool.lifecycles.advance(member, Event.EXIT)

    def _report_death(self, member: PoolWorker, state: State) -> None:
        if POINTS:
            point("supervisor.worker.buried")
        self._pool.blocked_loops.look_members()
        if self._pool.memory_watch is not None:
            self._pool.memory_watch.look_members()
        self._keeper.workers_changed()
        exitcode, why, *_ = member.end
        if state in (State.STARTING, State.READY):
            # `kill_one` has reported it already if percore killed the worker.
            level = logging.DEBUG if member.killed_why else self._pool.level(member)
            report(level, "%s died %s", member.name, how(exitcode, why), of=member)
        else:
            worker_has_ended(member, self._pool.age(member))
        is_asked_for = state is State.DRAINING and (not exitcode or bool(member.killed_why))
        if self._observer is not None and not self._phase.is_closing and not is_asked_for:
            self._observer.died(member, was_ready=member.was_ready and state is not State.DRAINING)


_UNDRAINED: Final = {
    State.STARTING: "terminated while it was starting",
    State.DRAINING: "terminated while it was draining",
}
"""Why SIGTERM ends a worker of a Runner at once."""


def _explained(end: Exit, member: PoolWorker) -> Exit:
    """Return the end of a worker with more about it, where the end does not tell.

    That is for SIGTERM its state, and for SIGKILL its memory at the last sample, if there was one.
    """
    if signal_of(end.code) == "SIGTERM" and not end.why:
        return end._replace(why=_UNDRAINED.get(member.life.state, ""))
    if member.memory is None or signal_of(end.code) != "SIGKILL" or (end.why and end.peak is not None):
        return end
    return end._replace(why=f"{end.why or KILLED}; it last had {mebibytes(member.memory)}")
