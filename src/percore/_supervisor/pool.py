"""The pool: starts workers in slots, replaces them and ends them.

`Replacement` decides when a slot gets another worker, and when that worker takes over. The pool carries this out. `PoolChanges` has
it replace all workers, or use more or fewer slots.
"""

import logging
import signal
from functools import partial
from typing import TYPE_CHECKING, Final, Protocol

from percore._calls.meters import Meters
from percore._common.errors import RunnerClosed, shown
from percore._common.fault_points import POINTS, point
from percore._common.log import Faults, report
from percore._common.options import RunnerOptions
from percore._common.worker_errors import RunnerBroken, StartupFailed
from percore._protocol.interfaces import Engine, Exit
from percore._protocol.messages import DRAIN, FINISH
from percore._scheduler.lifecycle import Deadline, Event, State
from percore._scheduler.phase import Replaces
from percore._scheduler.replacement import LIMIT, Act, Decision
from percore._supervisor.blocked_loops import BlockedLoops
from percore._supervisor.burials import Burials, WorkerObserver
from percore._supervisor.call_registry import CallRegistry, Progress
from percore._supervisor.first_start import FirstStart, Placeless, not_ready, unready
from percore._supervisor.lifecycles import Lifecycles
from percore._supervisor.listening import Listening
from percore._supervisor.measuring import Measurements
from percore._supervisor.nested import Nested
from percore._supervisor.outcomes import Outcomes
from percore._supervisor.pool_changes import PoolChanges
from percore._supervisor.pool_reports import worker_is_ready, worker_starts, workers_are_ready, workers_have_ended
from percore._supervisor.pool_worker import PoolWorker
from percore._supervisor.stream_items import StreamItems
from percore._supervisor.timing import is_lost
from percore._supervisor.worker_reports import WorkerReports
from percore._supervisor.worker_slot import WorkerSlot

if TYPE_CHECKING:
    from percore._supervisor.limited_worker import LimitedWorker
    from percore._supervisor.memory_watch import MemoryWatch

_CLOSED: Final = "the runner was closed while it started"


class Keeper(Progress, Protocol):
    """The supervisor, as the pool sees it."""

    def fail(self, error: RunnerBroken) -> None:
        """Break the runner, because no worker can be started any more."""


class Pool:
    """The workers of one runner. Implements `StateReports`."""

    def __init__(  # noqa: PLR0913, PLR0917  # the parts that it connects
        self,
        options: RunnerOptions,
        engine: Engine,
        calls: CallRegistry,
        members: set[PoolWorker],
        keeper: Keeper,
        nested: Nested,
        meters: Meters,
        observer: WorkerObserver | None = None,
    ) -> None:
        self.slots: list[WorkerSlot] = []
        """The slots in use. It is always the same list."""
        self.all_slots: list[WorkerSlot] = []
        """The slots in use, and after them those that were removed and may have workers that drain, by index."""
        self.grow(options.workers)
        self.members = members
        self.listening = Listening(options.listen, self.slots, members)
        self.low: set[LimitedWorker] = set()
        """Workers near or at their limit of calls that have not been replaced yet."""
        self._engine = engine
        self._calls = calls
        self._dispatch = calls.dispatch
        self._phase = calls.phase
        self._keeper = keeper
        self._observer = observer
        self._loop = calls.loop
        self._options = options
        seconds = {Deadline.START: self._options.start_timeout, Deadline.END: self._options.kill_after}
        self.lifecycles = Lifecycles(self._loop, seconds, self._overdue)
        self._nested = nested
        self._outcomes = Outcomes(calls, StreamItems(calls), WorkerReports(self), nested, Measurements(meters))
        self._turn = calls.turn
        self.blocked_loops = BlockedLoops(self._loop, members, options.blocked_after)
        self.memory_watch = None if options.max_memory_per_worker is None else self._memory_watch(options.max_memory_per_worker)
        self.first_start = FirstStart(self._loop, self.slots, options.start_timeout)
        self._placeless = Placeless(self._loop, self.slots, members, options.start_timeout, self._no_place_in_time)
        self.last_report = ""
        """The last report of a worker that could not start or whose lifespan failed, or of a worker killed in its start."""
        self.changes = PoolChanges(self, engine, calls.phase, options.start_timeout)
        self.opened_at: float | None = None
        """When all workers were ready for the first time, as a time of the loop."""
        self._burials = Burials(self, calls, nested, keeper, observer)
        engine.on_place = self._has_place

    def _memory_watch(self, limit: int) -> "MemoryWatch":
        from percore._supervisor.memory_watch import MemoryWatch

        return MemoryWatch(self._loop, self, self._engine, self._phase, limit)

    # Starting

    async def start(self) -> None:
        """Start every worker and wait until all are ready.

        Raises:
            OSError: an address on which the workers should serve cannot be had.
            StartupFailed: a worker could not be started, died, failed, or was not ready in time. The others run on, and the caller
                must close the runner.
        """
        self.listening.open()
        began = self._loop.time()
        with self.first_start as ready:
            for slot in self.slots:
                self._spawn(slot)
            await ready()
        self.opened_at = self._loop.time()
        workers_are_ready(len(self.slots), self.opened_at - began)

    def _spawn(self, slot: WorkerSlot) -> None:
        """Start a worker for the slot."""
        slot.stop_timer()
        slot.generation += 1
        member: PoolWorker | None = None
        is_awaited = False
        try:
            member = self._member(slot)
            self._launch(slot, member)
        except BaseException as error:  # after any exception, the slot must get another try
            self.last_report = f"worker {slot.index} could not be started: {shown(error)}"
            if member is not None and member in self.members:  # its exit follows, and its burial replaces it
                member.worker.kill()
            elif isinstance(error, Exception) or not self.first_start.is_on:  # otherwise `start` raises it
                slot.end = Exit(None)
                is_awaited = self.changes.could_not_start(slot, slot.generation, self.last_report, error)
                self._could_not_start(slot)
            if not isinstance(error, Exception):
                raise
            report(logging.DEBUG if is_awaited else self.level(), "%s", self.last_report, of=slot)
            return
        if POINTS:
            point("supervisor.worker.started")

    def _launch(self, slot: WorkerSlot, member: PoolWorker) -> None:
        sockets = self.listening.sockets(slot.index)
        worker = self._engine.start(slot.index, slot.generation, lambda end: self._burials.exited(slot, member, end), sockets)
        if worker is None:
            slot.generation -= 1
            report(logging.INFO, "there is no place for worker %d yet", slot.index, of=slot)
            self._carry_out(slot, slot.no_place())
            self.first_start.look_place()
            return
        member.worker = worker
        self.members.add(member)  # at once: after any exception, only a member is killed
        slot.started(member)
        self._placeless.look()
        if self.memory_watch is not None:
            self.memory_watch.arm()
        self._keeper.workers_changed()
        self.lifecycles.look(member)
        member.attach(member.worker, self._calls.shares)
        if self._calls.limits.is_in_use:
            member.limit()
        broke, advance = lambda error: self._broke(member, error), self._keeper.advance
        member.worker.channel.open(self._outcomes.receiver(member), broke, advance)
        worker_starts(member)

    def _has_place(self) -> None:
        """Start the workers that wait for a place: the engine may have one again."""
        for slot in self.slots:
            self._carry_out(slot, slot.has_place(self._phase.replaces, has_waiting=self._calls.waiting() > 0))
        self.first_start.look_place()

    def _no_place_in_time(self) -> None:
        if self._phase.broken is None and not self._phase.is_cut:
            waited = f"none was found within start_timeout={self._options.start_timeout:g} s"
            why = self._engine.no_place
            error = RunnerBroken(0, None, f"{waited}: {why}" if why else waited)
            report(logging.ERROR, "%s", error)
            self._keeper.fail(error)

    def _member(self, slot: WorkerSlot) -> PoolWorker:
        dispatch, limit = self._dispatch, self._options.max_tasks_per_worker
        if limit is None:
            return PoolWorker(slot.index, slot.generation, dispatch, self._turn)
        from percore._supervisor.limited_worker import LimitedWorker

        return LimitedWorker(slot.index, slot.generation, dispatch, self._turn, limit, self._is_low, self._calls.take_back)

    def _overdue(self, member: PoolWorker) -> None:
        if member.deadline is Deadline.START:
            self.kill_one(member, f"not ready within start_timeout={self._options.start_timeout:g} s")
            return
        is_failed = member.life.state is State.FAILED
        failing = "its lifespan failed" if member.was_ready else "its start failed"
        why = failing if is_failed else "it was asked to end and had no call left"
        self.kill_one(member, f"not ended within kill_after={self._options.kill_after:g} s after {why}")

    # The state of a worker, as its messages report it

    def ready(self, member: PoolWorker) -> None:
        if self.lifecycles.advance(member, Event.READY) is not State.READY:
            return
        member.was_ready = True
        replaces_dead = member.generation > 1 and not any(m.index == member.index and m is not member for m in self.members)
        worker_is_ready(member, self.age(member), replaces_dead=replaces_dead)
        self._keeper.workers_changed()
        slot = self.all_slots[member.index]
        decision = slot.ready(member)
        self._seat(slot)
        if POINTS:
            point("supervisor.worker.ready")
        self._carry_out(slot, decision)
        self.first_start.look_ready()

    def age(self, member: PoolWorker) -> float:
        """Return how many seconds ago the worker was started."""
        return self._loop.time() - member.started_at

    def unready(self, member: PoolWorker, error: BaseException, text: str) -> None:
        self.lifecycles.advance(member, Event.FAIL)
        self.last_report, member.failure = text, error
        is_told = self.first_start.fail(unready(member)) or self.changes.awaits(self.all_slots[member.index], member.generation)
        if not is_told:  # otherwise `start`, `reload` or `resize` raises the error
            report(logging.WARNING, "worker %d could not start: %s", member.index, text or shown(error), of=member)

    def failing(self, member: PoolWorker) -> None:
        self.lifecycles.advance(member, Event.FAIL)
        self._dispatch.unseat(member)

    def failed(self, member: PoolWorker, error: BaseException, text: str) -> None:
        self.last_report, member.failure = text, error
        report(self.level(member), "the lifespan of %s failed while it served: %s", member.name, text or error, of=member)

    # Taking over

    def _is_low(self, member: "LimitedWorker") -> None:
        """A worker may begin few more calls, or none: let the next `relieve` replace it."""
        if member not in self.low or member.is_spent:
            self.low.add(member)
            self._loop.call_soon(self._keeper.advance)  # deferred: the worker may be sending

    def relieve(self) -> None:
        """Start the replacements of workers near their limit of calls. Let ready ones take over from workers at their limit."""
        rule = self._phase.replaces
        if self.first_start.is_on or self._phase.is_cut:
            return
        for member in list(self.low):
            slot = self.all_slots[member.index]
            if slot.current is not member or not member.is_ready:
                self.low.discard(member)
                continue
            decision = slot.low(rule, has_waiting=rule is Replaces.SPENT and self._calls.waiting() > 0)
            if decision.act is Act.START:
                report(logging.DEBUG, "%s may begin %d more calls; its replacement starts", member.name, member.tickets, of=member)
            self._carry_out(slot, decision)

    def _carry_out(self, slot: WorkerSlot, decision: Decision[PoolWorker]) -> None:
        """Do what was decided about a slot."""
        slot.look_timer()
        act, delay, retired = decision
        if act is Act.TAKE_OVER:
            self._seat(slot)
            if POINTS:
                point("supervisor.worker.succeeded")
        if retired is not None:
            self._retire(retired)
        if act is Act.START:
            self._spawn(slot)
        elif act is Act.START_LATER:
            if slot.timer is not None:
                slot.timer.cancel()  # the new delay takes the place of an earlier one
            slot.timer = self._loop.call_later(delay, self._spawn, slot)
        elif act is Act.GIVE_UP:
            self._give_up(slot)
        elif act is Act.FAIL_START:
            self.first_start.fail(StartupFailed(self.last_report))
        self.changes.look()
        self.listening.look()
        self._placeless.look(is_limited=not self.first_start.is_on)

    def _could_not_start(self, slot: WorkerSlot) -> None:
        self._carry_out(slot, slot.could_not_start(self._phase.replaces, is_first=self.first_start.is_on))

    def _seat(self, slot: WorkerSlot) -> None:
        """Let the current worker get calls, if it is ready, was not killed, and does not get them yet."""
        member = slot.current
        if member is not None and member.is_ready and not member.killed_why and member not in self._dispatch.seats:
            self._dispatch.seat(member)
            if self._observer is not None:
                self._observer.seated()

    def _retire(self, member: PoolWorker) -> None:
        self._dispatch.unseat(member)
        if member.life.state is State.READY:
            self.lifecycles.advance(member, Event.DRAIN)
            member.worker.channel.send(DRAIN, 0, None)
        elif member.life.state is State.STARTING:  # it has no calls
            self.lifecycles.advance(member, Event.FINISH)
            member.worker.kill()

    def supersede(self, member: PoolWorker) -> None:
        """Let a worker drain in which a call does not end, and start its replacement."""
        if not member.is_ready or self._phase.replaces is not Replaces.ALL:
            return
        slot = self.slots[member.index]
        decision = slot.asked_to_end(member, self._phase.replaces)
        self._retire(member)
        if decision.act is Act.START:
            report(logging.INFO, "a call does not end in %s; its replacement starts", member.name, of=member)
        self._carry_out(slot, decision)

    def draining(self, member: PoolWorker) -> None:
        self.lifecycles.advance(member, Event.DRAIN)
        self._dispatch.unseat(member)
        if POINTS:
            point("supervisor.worker.draining")
        slot = self.all_slots[member.index]
        decision = slot.asked_to_end(member, self._phase.replaces)
        if decision.act is Act.START:
            report(logging.INFO, "%s was asked to end; its replacement starts", member.name, of=member)
        self._carry_out(slot, decision)

    # Changes: reload and resize

    def renew(self, slot: WorkerSlot) -> None:
        """Give the slot another worker, which takes over as soon as it is ready. Twice is as once."""
        self._carry_out(slot, slot.renew())

    def grow(self, workers: int) -> list[WorkerSlot]:
        """Use this many slots. Return those that were added. They have no workers yet: `renew` starts them."""
        before = len(self.slots)
        self.all_slots += [WorkerSlot(index) for index in range(len(self.all_slots), workers)]
        self.slots += self.all_slots[before:workers]
        return self.slots[before:]

    def shrink(self, workers: int) -> None:
        """Use only the first slots, and let the workers of the others end after their calls. They hand back what has not begun."""
        removed = self.slots[workers:]
        del self.slots[workers:]
        if POINTS:
            point("supervisor.pool.shrunk")
        faults = Faults("workers were removed")
        for slot in removed:
            faults.surely(partial(self._remove, slot))
        faults.run(self.listening.look, self._keeper.advance)

    def _remove(self, slot: WorkerSlot) -> None:
        """Use a slot no more. Its workers get no more calls, and end after those that they have begun. Twice is as once."""
        slot.remove()
        slot.look_timer()
        for member in [member for member in self.members if member.index == slot.index]:
            self._retire(member)

    # Deaths

    def _broke(self, member: PoolWorker, error: BaseException) -> None:
        member.is_interrupted = not isinstance(error, Exception)  # such as a KeyboardInterrupt
        self.kill_one(member, f"its channel broke: {shown(error)}")

    def kill_one(self, member: PoolWorker, why: str) -> None:
        if not member.life.is_gone:
            member.killed_why = why
            text = f"{member.name} was killed: {why}"
            if member.life.state is State.STARTING:  # otherwise the last report may be the traceback of its lifespan
                self.last_report = text
            report(self.level(member), "%s", text, of=member)
            member.worker.kill()
            # It takes no more calls, although the system has yet to report its end: one that is sent to it now is late by that, and
            # that of a broadcast fails.
            self._dispatch.unseat(member)

    def succeed(self, slot: WorkerSlot, member: PoolWorker, decision: Decision[PoolWorker]) -> None:
        """Carry out what was decided about the slot of a dead worker."""
        if decision.act is not Act.FAIL_START:
            self._carry_out(slot, decision)
        elif self._phase.is_closing:
            self.first_start.fail(RunnerClosed(_CLOSED))
        else:
            self.first_start.fail(not_ready(member, member.end.report or self.last_report))

    def succeed_despite(self, slot: WorkerSlot) -> None:
        """Carry out what an error has left undone, so that the slot keeps the promise of `Replacement`."""
        self._seat(slot)
        if slot.is_failed:
            self._give_up(slot)
        elif slot in self.slots and slot.current is None and slot.timer is None and not slot.lacks_place:
            slot.forget_delay()
            self._could_not_start(slot)

    def _give_up(self, slot: WorkerSlot) -> None:
        """Break the runner if no slot is left that could get a worker."""
        self.last_report = slot.end.report or self.last_report
        if not all(other.is_failed for other in self.slots):
            report(
                logging.WARNING,
                "worker %d died %d times in a row before it began a call; the runner goes on without it%s",
                slot.index,
                LIMIT,
                f". The last report:\n{self.last_report}" if self.last_report else "",
                of=slot,
            )
        elif self._phase.broken is None:
            error = RunnerBroken(LIMIT, slot.end.code, self.last_report or slot.end.why)
            error.__cause__ = slot.failure
            report(logging.ERROR, "%s", error)
            self._keeper.fail(error)

    def level(self, member: PoolWorker | None = None) -> int:
        """Return the log level for a death: DEBUG if it is expected, else WARNING.

        It is expected while the runner closes, and if an exception such as a KeyboardInterrupt broke the worker's channel, which a
        second Ctrl-C may do. During the first start, StartupFailed reports the death.
        """
        is_expected = self._phase.is_closing or self.first_start.is_on or (member is not None and member.is_interrupted)
        return logging.DEBUG if is_expected else logging.WARNING

    # Ending

    def awaits_place(self) -> bool:
        """Whether a start waits for a place."""
        return any(slot.lacks_place for slot in self.slots)

    def can_begin(self) -> bool:
        """Whether a worker takes calls, or one starts or will start that may do so."""
        if self._dispatch.seats or any(member.life.state in (State.STARTING, State.READY) for member in self.members):
            return True
        return any(slot.lacks_place or slot.is_delayed for slot in self.slots)

    def finish(self) -> None:
        """Ask every worker to end, and kill those that are not ready yet. No call may run any more."""
        self.listening.close()
        Faults("workers were asked to end").run(*(partial(self._finish, member) for member in self.members))

    def _finish(self, member: PoolWorker) -> None:
        if member.life.state is State.STARTING:
            member.worker.kill()
        elif member.life.state not in (State.FINISHING, State.FAILED):
            member.worker.channel.send(FINISH, 0, None)
        self.lifecycles.advance(member, Event.FINISH)

    def say_ended(self) -> None:
        """Log what the workers have done, unless their start has failed, which raised. To be called when none is left."""
        if self.opened_at is not None:
            workers_have_ended(self.all_slots, self._loop.time() - self.opened_at)

    def catch_up(self) -> None:
        """Go on with what the loop has lost."""
        members = [member for member in self.members if member.is_attached]
        steps = [self.blocked_loops.catch_up, *(member.worker.channel.catch_up for member in members)]
        steps += [member.timer.catch_up for member in members if member.timer is not None]
        steps += [partial(self._spawn, slot) for slot in self.slots if is_lost(slot.timer, self._loop)]
        if self.memory_watch is not None:
            steps.append(self.memory_watch.catch_up)
        Faults("lost callbacks were made up for").run(*steps)

    def stop_timers(self) -> None:
        """Cancel all starts that are delayed or wait for a place."""
        for slot in self.slots:
            slot.stop_timer()
        self._placeless.look()
        if not self.members:
            self.first_start.fail(RunnerClosed(_CLOSED))

    def kill(self, signum: int = signal.SIGKILL) -> None:
        """Send a signal to every worker, SIGKILL by default. The exits of the workers that it ends are reported later."""
        Faults("workers were sent a signal").run(*(partial(member.worker.kill, signum) for member in self.members))
