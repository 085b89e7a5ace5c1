"""The pool: starts workers in slots, replaces them and ends them.

Reasons for a replacement:

death of a worker     ─▶ its replacement starts, at once or after the delay given by the slot's budget
asked from outside    ─▶ the worker drains, and its replacement starts now
max_tasks_per_worker  ─▶ its replacement starts before the last calls are sent; once they are, it takes over and the old one drains

Invariant: a slot without a current worker has a start scheduled, has failed for good, or belongs to a runner that closes or whose
first start failed.
"""

import logging
import signal
from typing import TYPE_CHECKING, NamedTuple

from percore._broken import RunnerBroken, StartupFailed, frozen_hint, how
from percore._calls import PendingCall
from percore._core.lifecycle import Deadline, Event, State
from percore._core.restart import LIMIT, LONGEST_DELAY, RestartBudget
from percore._errors import RunnerClosed, shown
from percore._faults import Faults, report
from percore._interfaces import Exit
from percore._ipc.rebuild import text_of
from percore._items import Batch
from percore._limited import Limited
from percore._lives import Lives
from percore._member import Member, Turn
from percore._messages import DRAIN, FINISH
from percore._outcomes import Outcomes
from percore._points import POINTS, point

if TYPE_CHECKING:
    import asyncio

    from percore._supervisor import Supervisor


class Past(NamedTuple):
    """Counts of the dead workers of a slot, up to `generation`. A slot replaces it as a whole, because other threads read it."""

    done: int = 0
    failed: int = 0
    retried: int = 0
    generation: int = 0

    def with_(self, member: Member) -> "Past":
        """Return these counts with those of another dead worker added."""
        done, failed, retried, _ = self
        return Past(done + member.done, failed + member.failed, retried + member.retried, member.generation)


class Slot:
    """A place in the pool: its current worker, the next one, and the history of its workers."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.generation = 0
        self.budget = RestartBudget()
        self.current: Member | None = None
        self.next: Member | None = None
        """The replacement of the current worker. It starts, or is ready and takes over later."""
        self.timer: asyncio.TimerHandle | None = None
        """The timer of a delayed start; None if no start is delayed."""
        self.is_due = False
        """Whether `_never_began` is scheduled. It decides whether and when the slot gets another worker."""
        self.is_failed = False
        self.restarts = 0
        self.past = Past()
        self.failure: BaseException | None = None
        """The error that the last dead worker reported, if it reported one."""

    def took(self, member: Member) -> None:
        """Add the counts of a dead worker to those of the earlier ones. Twice is as once."""
        if self.past.generation != member.generation:
            self.past = self.past.with_(member)

    def stop_timer(self) -> None:
        """Cancel the delayed start, if there is one."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class Pool:
    """The workers of one runner."""

    def __init__(self, supervisor: "Supervisor", workers: int) -> None:
        self.slots = [Slot(index) for index in range(workers)]
        self.members = supervisor.members
        self.low: set[Limited] = set()
        """Workers near or at their limit of calls that have not been replaced yet."""
        self._supervisor = supervisor
        self._loop = supervisor.loop
        self._options = supervisor.options
        seconds = {Deadline.START: self._options.start_timeout, Deadline.END: self._options.kill_after}
        self.lives = Lives(self._loop, seconds, self._overdue)
        self._outcomes = Outcomes(supervisor)
        self._turn = Turn(supervisor.loop)
        self._starting: asyncio.Future[None] | None = None
        self._last_report = ""

    # Starting

    async def start(self) -> None:
        """Start every worker and wait until all are ready.

        Raises:
            StartupFailed: a worker could not be started, died, failed, or was not ready in time. The others run on, and the caller
                must close the runner.
        """
        starting = self._starting = self._loop.create_future()
        try:
            for slot in self.slots:
                self._spawn(slot)
            await starting
        finally:
            self._starting = None

    def _spawn(self, slot: Slot) -> None:
        """Start a worker for the slot. It becomes the current one if the slot has none, else the next one."""
        slot.timer = None
        slot.generation += 1
        member: Member | None = None
        try:
            member = self._member(slot)
            self._launch(slot, member)
        except BaseException as error:  # after any exception, the slot must get another try
            self._last_report = f"worker {slot.index} could not be started: {shown(error)}"
            if member is not None and member in self.members:  # its exit follows, and `_bury` replaces it
                member.worker.kill()
            elif isinstance(error, Exception) or self._starting is None:  # otherwise `start` raises it
                slot.is_due = True
                self._loop.call_soon(self._never_began, slot, None)
            if not isinstance(error, Exception):
                raise
            report(self._level(), "%s", self._last_report)
            return
        if POINTS:
            point("supervisor.worker.started")

    def _launch(self, slot: Slot, member: Member) -> None:
        supervisor = self._supervisor
        member.worker = supervisor.engine.start(slot.index, slot.generation, lambda end: self._exited(slot, member, end))
        self.members.add(member)  # at once: after any exception, only a member is killed
        if slot.current is None:
            slot.current = member
        else:
            slot.next = member
        member.attach(member.worker, supervisor.shares)
        self.lives.look(member)
        member.worker.channel.open(
            self._outcomes.receiver(slot, member),
            lambda error: self._broke(member, error),
            supervisor.advance,
        )

    def _member(self, slot: Slot) -> Member:
        dispatch, limit = self._supervisor.dispatch, self._options.max_tasks_per_worker
        if limit is None:
            return Member(slot.index, slot.generation, dispatch, self._turn)
        return Limited(slot.index, slot.generation, dispatch, self._turn, limit, self._is_low, self._take_back)

    def _overdue(self, member: Member) -> None:
        if member.deadline is Deadline.START:
            self._kill(member, f"not ready within start_timeout={self._options.start_timeout:g} s")
            return
        is_failed = member.life.state is State.FAILED
        failing = "its lifespan failed" if member.was_ready else "its start failed"
        why = failing if is_failed else "it was asked to end and had no call left"
        self._kill(member, f"not ended within kill_after={self._options.kill_after:g} s after {why}")

    def ready(self, slot: Slot, member: Member) -> None:
        """A worker has entered its lifespan. If it does not wait to take over, it gets calls from now on."""
        if self.lives.advance(member, Event.READY) is not State.READY:
            return
        member.was_ready = True
        is_standby = slot.next is member and slot.current is not None and slot.current.is_ready and not slot.current.is_spent
        if not is_standby:
            self._supervisor.dispatch.seat(member)
        if POINTS:
            point("supervisor.worker.ready")
        if slot.next is member and not is_standby:
            old, slot.current, slot.next = slot.current, member, None
            if old is not None:
                self._retire(old)
        if self._starting is not None and not self._starting.done() and all(s.current and s.current.is_ready for s in self.slots):
            self._starting.set_result(None)
            self._starting = None  # now: a worker that dies before `start` continues must be replaced

    def unready(self, member: Member, error: BaseException, text: str) -> None:
        """A worker's start failed with this error, and the worker is about to end. `text`: the error as the log shows it."""
        self.lives.advance(member, Event.FAIL)
        self._last_report, member.failure = text, error
        if self._starting is not None and not self._starting.done():
            failure = StartupFailed(f"worker {member.index} could not start: {type(error).__name__}: {text_of(error)}")
            failure.__cause__ = error
            self._starting.set_exception(failure)
        else:
            report(logging.WARNING, "worker %d could not start: %s", member.index, text or shown(error))

    def failing(self, member: Member) -> None:
        """The lifespan of a worker failed while it served. The worker gets no more calls and is about to end."""
        self.lives.advance(member, Event.FAIL)
        self._supervisor.dispatch.unseat(member)

    def failed(self, member: Member, error: BaseException, text: str) -> None:
        """Note and log the error by which a worker's lifespan failed. `text`: the error as the log shows it."""
        self._last_report, member.failure = text, error
        report(self._level(member), "the lifespan of %s failed while it served: %s", _name(member), text or error)

    # Taking over

    def _is_low(self, member: Limited) -> None:
        """A worker may begin few more calls, or none: let the next `relieve` replace it."""
        if member not in self.low or member.is_spent:
            self.low.add(member)
            self._loop.call_soon(self._supervisor.advance)  # deferred: the worker may be sending

    def _take_back(self, call: PendingCall) -> None:
        """Queue a call again whose worker may not begin it."""
        if isinstance(call, Batch):
            call.map.left(call)
            self._supervisor.put_back(call.map, call.run)
        else:
            self._supervisor.dispatch.untaken(call, call.queue)

    def relieve(self) -> None:
        """Start the replacements of workers near their limit of calls. Let ready ones take over from workers at their limit."""
        supervisor = self._supervisor
        if self._starting is not None or supervisor.phase.is_cut:
            return
        for member in list(self.low):
            slot = self.slots[member.index]
            if slot.current is not member or not member.is_ready:
                self.low.discard(member)
            elif slot.next is None:
                # A closing runner starts a replacement only if the worker is at its limit and calls wait.
                if (
                    slot.timer is None
                    and not slot.is_due
                    and (not supervisor.phase.is_closing or (member.is_spent and supervisor.waiting()))
                ):
                    slot.restarts += 1
                    report(logging.DEBUG, "%s may begin %d more calls; its replacement starts", _name(member), member.tickets)
                    self._spawn(slot)
            elif slot.next.is_ready and member.is_spent:
                self._promote(slot)
                self._retire(member)

    def _promote(self, slot: Slot) -> None:
        """Make the next worker of the slot, if any, the current one. If it is ready, it gets calls from now on, else once it is."""
        slot.current, slot.next = slot.next, None
        self._seat(slot)

    def _seat(self, slot: Slot) -> None:
        if slot.current is not None and slot.current.is_ready and slot.current not in self._supervisor.dispatch.seats:
            self._supervisor.dispatch.seat(slot.current)

    def _retire(self, member: Member) -> None:
        self._supervisor.dispatch.unseat(member)
        if member.life.state is State.READY:
            self.lives.advance(member, Event.DRAIN)
            member.worker.channel.send(DRAIN, 0, None)

    def draining(self, slot: Slot, member: Member) -> None:
        """Something outside percore asked a worker to end. The worker gets no more calls, and its replacement starts now."""
        self.lives.advance(member, Event.DRAIN)
        self._supervisor.dispatch.unseat(member)
        if POINTS:
            point("supervisor.worker.draining")
        if slot.current is not member or self._supervisor.phase.is_closing:
            return
        self._promote(slot)
        if slot.current is None:
            slot.restarts += 1
            slot.stop_timer()
            report(logging.INFO, "worker %d (pid %s) was asked to end; its replacement starts", member.index, member.pid)
            self._spawn(slot)

    # Deaths

    def _broke(self, member: Member, error: BaseException) -> None:
        member.is_interrupted = isinstance(error, KeyboardInterrupt)
        self._kill(member, f"its channel broke: {shown(error)}")

    def _kill(self, member: Member, why: str) -> None:
        if not member.life.is_gone:
            member.killed_why = why
            text = f"{_name(member)} was killed: {why}"
            if member.life.state is State.STARTING:  # otherwise the last report may be the traceback of its lifespan
                self._last_report = text
            report(self._level(member), "%s", text)
            member.worker.kill()

    def _exited(self, slot: Slot, member: Member, end: Exit) -> None:
        """The system has reported a worker's death. Receive its last messages, then end its calls and replace it.

        After the death nothing writes to the worker's memory, so its messages and start marks can be read without races.
        """
        if member not in self.members:  # an exception interrupted its start before it was added
            return
        faults = Faults(f"the calls of worker {slot.index} were ended and the worker was replaced")
        with faults:
            if POINTS:
                point("supervisor.worker.exited")
            member.worker.channel.receive()
        self._bury(slot, member, end, faults)
        faults.finish()  # raises a KeyboardInterrupt only now, when no call of the dead worker is left

    def _bury(self, slot: Slot, member: Member, end: Exit, faults: Faults) -> None:
        """End the calls of a dead worker and fill its slot. An exception in one step does not prevent the others."""
        supervisor, exitcode = self._supervisor, end.code
        state = member.life.state
        faults.surely(lambda: self._is_gone(member))
        with faults:
            supervisor.dispatch.unseat(member)
        if faults.last is not None:
            with faults:
                supervisor.dispatch.expel(member)
        # It stays in `members` until its calls have ended, because user code may cancel others of its calls meanwhile.
        began = supervisor.deaths.end_calls(member, exitcode, faults)
        began = began or member.done > 0 or member.retried > 0 or end.place_lost
        with faults:
            supervisor.shares.buried(member)
        faults.surely(lambda: slot.took(member))  # before it leaves `members`: another thread must find its counts somewhere
        self.members.discard(member)
        slot.failure = member.failure
        with faults:
            if began:
                slot.budget.began()
        faults.surely(member.worker.close)
        with faults:
            self._report_death(member, state, exitcode)
        # The slot forgets the worker before a step may fail. Otherwise the slot would keep a dead worker for ever.
        was_current, was_next = slot.current is member, slot.next is member
        if was_current:
            slot.current, slot.next = slot.next, None
        elif was_next:
            slot.next = None
        faults.surely(lambda: self._seat(slot))
        with faults:
            if was_next:
                self._never_began(slot, exitcode)
            elif was_current and slot.current is None:
                slot.stop_timer()
                self._replace(slot, began=began or state is State.DRAINING, exitcode=exitcode, why=member.killed_why)
        if faults.last is not None and slot.current is None and slot.timer is None and not slot.is_due:
            slot.is_due = True
            self._loop.call_soon(self._never_began, slot, exitcode)
        with faults:
            supervisor.advance()

    def _is_gone(self, member: Member) -> None:
        if not member.life.is_gone:
            self.lives.advance(member, Event.EXIT)

    def _report_death(self, member: Member, state: State, exitcode: int | None) -> None:
        if POINTS:
            point("supervisor.worker.buried")
        if state in (State.STARTING, State.READY):
            # `_kill` has reported it already if percore killed the worker.
            level = logging.DEBUG if member.killed_why else self._level(member)
            report(level, "%s died %s", _name(member), how(exitcode))
        on_death = self._supervisor.on_death
        is_asked_for = state is State.DRAINING and (not exitcode or bool(member.killed_why))
        if on_death is not None and not self._supervisor.phase.is_closing and not is_asked_for:
            on_death(member, exitcode, member.was_ready and state is not State.DRAINING)

    def _replace(self, slot: Slot, *, began: bool, exitcode: int | None, why: str) -> None:
        is_closing = self._supervisor.phase.is_closing
        if self._starting is not None and (is_closing or not began):  # it may have drained; no other gets ready for it
            if not self._starting.done():
                if is_closing:
                    error: Exception = RunnerClosed("the runner was closed while it started")
                elif why:
                    error = StartupFailed(f"worker {slot.index} was killed: {why}")
                else:
                    reason = f"worker {slot.index} died {how(exitcode)} before it was ready{frozen_hint()}"
                    error = StartupFailed(reason, self._last_report)
                    error.__cause__ = slot.failure
                self._starting.set_exception(error)
            return
        if is_closing:
            return
        slot.restarts += 1
        if began:
            self._spawn(slot)
        else:
            self._never_began(slot, exitcode)

    def _never_began(self, slot: Slot, exitcode: int | None) -> None:
        slot.is_due = False
        if self._starting is not None:
            if not self._starting.done():
                self._starting.set_exception(StartupFailed(self._last_report))
            return
        is_spent = slot.current is not None and slot.current.is_spent
        if self._supervisor.phase.is_closing and not is_spent:
            return
        delay = slot.budget.died()
        if delay is None and slot.current is not None and not is_spent:  # the current worker goes on; try later
            slot.budget.began()
            delay = LONGEST_DELAY
        if delay is not None:
            slot.timer = self._loop.call_later(delay, self._spawn, slot)
            return
        slot.is_failed = True
        if slot.current is not None:  # the worker is at its limit and will not be replaced
            self._retire(slot.current)
            slot.current = None
        if all(other.is_failed for other in self.slots):
            error = RunnerBroken(LIMIT, exitcode, self._last_report)
            error.__cause__ = slot.failure
            report(logging.ERROR, "%s", error)
            self._supervisor.fail(error)
        else:
            report(
                logging.WARNING,
                "worker %d died %d times in a row before it began a call; the runner goes on without it%s",
                slot.index,
                LIMIT,
                f". The last report:\n{self._last_report}" if self._last_report else "",
            )

    def _level(self, member: Member | None = None) -> int:
        """Return the log level for a death: DEBUG if it is expected, else WARNING.

        It is expected while the runner closes, and if a KeyboardInterrupt broke the worker's channel, which a second Ctrl-C may do.
        During the first start, StartupFailed reports the death.
        """
        is_expected = (
            self._supervisor.phase.is_closing or self._starting is not None or (member is not None and member.is_interrupted)
        )
        return logging.DEBUG if is_expected else logging.WARNING

    # Ending

    def finish(self) -> None:
        """Ask every worker to end, and kill those that are not ready yet. No call may run any more."""
        faults = Faults("workers were asked to end")
        for member in list(self.members):
            with faults:
                self._finish(member)
        faults.finish()

    def _finish(self, member: Member) -> None:
        if member.life.state is State.STARTING:
            member.worker.kill()
        elif member.life.state not in (State.FINISHING, State.FAILED):
            member.worker.channel.send(FINISH, 0, None)
        self.lives.advance(member, Event.FINISH)

    def stop_timers(self) -> None:
        """Cancel all delayed starts."""
        for slot in self.slots:
            slot.stop_timer()

    def kill(self, signum: int = signal.SIGKILL) -> None:
        """Send a signal to every worker, SIGKILL by default. The exits of the workers that it ends are reported later."""
        faults = Faults("workers were sent a signal")
        for member in list(self.members):
            with faults:
                member.worker.kill(signum)
        faults.finish()

    def is_expected(self) -> bool:
        """Return whether any worker is starting or ready."""
        return any(member.life.state in (State.STARTING, State.READY) for member in self.members)


def _name(member: Member) -> str:
    """Return the worker's name for log messages. A worker whose process never started has no pid."""
    return f"worker {member.index}" + ("" if member.pid is None else f" (pid {member.pid})")
