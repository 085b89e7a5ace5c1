"""The pool: which worker has which slot, from its start to its end, and who takes over from it.

death of a worker     ─▶ its replacement starts, at once or after the delay that the slot's budget says
asked from outside    ─▶ it drains, and its replacement starts now
max_tasks_per_worker  ─▶ its replacement starts before the last calls are sent; when they are, it takes over, the old one drains
"""

import logging
import signal
from typing import TYPE_CHECKING, NamedTuple

from percore._broken import RunnerBroken, StartupFailed, frozen_hint, how
from percore._core.lifecycle import Deadline, Event, State
from percore._core.restart import LIMIT, LONGEST_DELAY, RestartBudget
from percore._errors import RunnerClosed
from percore._faults import Faults
from percore._items import Batch
from percore._limited import Limited
from percore._lives import Lives
from percore._member import Member, Turn, Unit
from percore._messages import DRAIN, FINISH
from percore._outcomes import Outcomes
from percore._points import POINTS, point
from percore._reports import report

if TYPE_CHECKING:
    import asyncio

    from percore._supervisor import Supervisor


class Past(NamedTuple):
    """What the dead workers of a slot have done, up to the one of this generation. Replaced as a whole: other threads read it."""

    done: int = 0
    failed: int = 0
    retried: int = 0
    generation: int = 0

    def with_(self, member: Member) -> "Past":
        """After the death of this one, too."""
        done, failed, retried, _ = self
        return Past(done + member.done, failed + member.failed, retried + member.retried, member.generation)


class Slot:
    """A place in the pool: its worker of now, and how its workers have fared."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.generation = 0
        self.budget = RestartBudget()
        self.current: Member | None = None
        self.next: Member | None = None
        """The worker that is to take over from the current one, while it starts."""
        self.timer: asyncio.TimerHandle | None = None
        """While there is a delay before the next start."""
        self.is_due = False
        """While it is about to be looked at whether, and when, another worker is started after one that never began."""
        self.is_failed = False
        self.restarts = 0
        self.past = Past()
        self.failure: BaseException | None = None
        """Why the last worker that died had failed, where it has said so."""

    def stop_timer(self) -> None:
        """Nothing is to be started by and by."""
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None


class Pool:
    """The workers of one runner."""

    def __init__(self, supervisor: "Supervisor", workers: int) -> None:
        self.slots = [Slot(index) for index in range(workers)]
        self.members: set[Member] = set()
        self.low: set[Limited] = set()
        """Those that may begin few calls more, and have not been relieved."""
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
            StartupFailed: one could not be started, died, failed, or was late. The others run on: the caller closes.
        """
        starting = self._starting = self._loop.create_future()
        for slot in self.slots:
            self._spawn(slot)
        try:
            await starting
        finally:
            self._starting = None

    def _spawn(self, slot: Slot) -> None:
        """Start the slot's worker, or the one that is to take over from it."""
        slot.timer = None
        slot.generation += 1
        member: Member | None = None
        try:
            member = self._member(slot)
            self._launch(slot, member)
        except BaseException as error:  # whatever it is, the slot has to go on
            self._last_report = f"worker {slot.index} could not be started: {error!r}"
            if member is not None and member in self.members:  # its burial follows
                member.worker.kill()
            elif isinstance(error, Exception) or self._starting is None:  # else the first start fails by it
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
        member.attach(supervisor.engine.start(slot.index, slot.generation, lambda code: self._exited(slot, member, code)))
        if slot.current is None:
            slot.current = member
        else:
            slot.next = member
        self.members.add(member)
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
        """A worker has entered its lifespan."""
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
            self._starting = None  # now, not when its waiter runs: a worker may die before that and has to be replaced

    def unready(self, member: Member, error: BaseException, text: str) -> None:
        """A worker's start failed, with this exception; it is about to end."""
        self.lives.advance(member, Event.FAIL)
        self._last_report, member.failure = text, error
        if self._starting is not None and not self._starting.done():
            failure = StartupFailed(f"worker {member.index} could not start: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._starting.set_exception(failure)
        else:
            report(logging.WARNING, "worker %d could not start: %s", member.index, text or error)

    def failing(self, member: Member) -> None:
        """The lifespan of a worker has failed while it served. It gets nothing more, and is about to end."""
        self.lives.advance(member, Event.FAIL)
        self._supervisor.dispatch.unseat(member)

    def failed(self, member: Member, error: BaseException, text: str) -> None:
        """This is why the lifespan of a worker has failed."""
        self._last_report, member.failure = text, error
        report(self._level(member), "the lifespan of %s failed while it served: %s", _name(member), text or error)

    # Taking over

    def _is_low(self, member: Limited) -> None:
        """A worker may begin few calls more, or none."""
        if member not in self.low or member.is_spent:
            self.low.add(member)
            self._loop.call_soon(self._supervisor.advance)  # it may be in the midst of sending

    def _take_back(self, call: Unit) -> None:
        """A call was meant for a worker that may not begin it."""
        if isinstance(call, Batch):
            call.flow.left(call)
            self._supervisor.put_back(call.flow, call.run)
        else:
            self._supervisor.dispatch.returned([(call, call.queue)])

    def relieve(self) -> None:
        """Start the replacements of workers that may begin few calls more. Where one may begin none, its replacement takes over."""
        supervisor = self._supervisor
        if self._starting is not None or supervisor.is_cut:
            return
        for member in list(self.low):
            slot = self.slots[member.index]
            if slot.current is not member or not member.is_ready:
                self.low.discard(member)
            elif slot.next is None:
                # A closing runner starts it only for calls that wait.
                if (
                    slot.timer is None
                    and not slot.is_due
                    and (not supervisor.is_closing or (member.is_spent and supervisor.waiting()))
                ):
                    slot.restarts += 1
                    report(logging.DEBUG, "%s may begin %d more calls; its replacement starts", _name(member), member.tickets)
                    self._spawn(slot)
            elif slot.next.is_ready and member.is_spent:
                self._promote(slot)
                self._retire(member)

    def _promote(self, slot: Slot) -> None:
        """The worker that is to take over does so: at once if it is ready, else as soon as it is."""
        slot.current, slot.next = slot.next, None
        if slot.current is not None and slot.current.is_ready:
            self._supervisor.dispatch.seat(slot.current)

    def _retire(self, member: Member) -> None:
        self._supervisor.dispatch.unseat(member)
        if member.life.state is State.READY:
            self.lives.advance(member, Event.DRAIN)
            member.worker.channel.send(DRAIN, 0, None)

    def draining(self, slot: Slot, member: Member) -> None:
        """A worker was asked from outside to end: it gets nothing more, and its replacement starts now."""
        self.lives.advance(member, Event.DRAIN)
        self._supervisor.dispatch.unseat(member)
        if POINTS:
            point("supervisor.worker.draining")
        if slot.current is not member or self._supervisor.is_closing:
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
        self._kill(member, f"its channel broke: {error!r}")

    def _kill(self, member: Member, why: str) -> None:
        if not member.life.is_gone:
            member.killed_why = why
            text = f"{_name(member)} was killed: {why}"
            if member.life.state is State.STARTING:  # else there may be the traceback of its lifespan
                self._last_report = text
            report(self._level(member), "%s", text)
            member.worker.kill()

    def _exited(self, slot: Slot, member: Member, exitcode: int | None) -> None:
        """The system has reported a worker dead. Its last words count; then its memory is race-free and read once."""
        if member not in self.members:  # a KeyboardInterrupt came in the midst of its start: it never was anybody's
            return
        faults = Faults(f"the calls of worker {slot.index} were ended and the worker was replaced")
        with faults:
            if POINTS:
                point("supervisor.worker.exited")
            member.worker.channel.receive()
        self._bury(slot, member, exitcode, faults)
        faults.finish()  # a KeyboardInterrupt goes on, and has left no calls of a dead worker behind

    def _bury(self, slot: Slot, member: Member, exitcode: int | None, faults: Faults) -> None:
        """Whatever one of the steps raises, the others are taken: the calls end, and the slot is filled."""
        supervisor = self._supervisor
        state = member.life.state
        faults.surely(lambda: self._is_gone(member))
        with faults:
            supervisor.dispatch.unseat(member)
        if faults.last is not None:
            with faults:
                supervisor.dispatch.expel(member)
        # It stays one of the members meanwhile: an error of one of its calls may cancel others, in its batches too.
        began = supervisor.deaths.end_calls(member, exitcode, faults)
        began = began or member.done > 0 or member.retried > 0
        with faults:
            supervisor.end_leases(member, faults)
        slot.past = slot.past.with_(member)  # before it leaves: so nobody finds its counts in neither place
        self.members.discard(member)
        slot.failure = member.failure
        with faults:
            if began:
                slot.budget.began()
        faults.surely(member.worker.close)
        with faults:
            self._report_death(member, state, exitcode)
        with faults:
            self._succeed(slot, member, exitcode, began=began or state is State.DRAINING)
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
            # That percore has killed it was reported then.
            level = logging.DEBUG if member.killed_why else self._level(member)
            report(level, "%s died %s", _name(member), how(exitcode))
        on_death = self._supervisor.on_death
        is_asked_for = state is State.DRAINING and (not exitcode or bool(member.killed_why))
        if on_death is not None and not self._supervisor.is_closing and not is_asked_for:
            on_death(member, exitcode, member.was_ready and state is not State.DRAINING)

    def _succeed(self, slot: Slot, member: Member, exitcode: int | None, *, began: bool) -> None:
        """Somebody takes the place of a worker that has died."""
        if slot.next is member:
            slot.next = None
            self._never_began(slot, exitcode)
        elif slot.current is member:
            self._promote(slot)
            if slot.current is None:
                slot.stop_timer()
                self._replace(slot, began=began, exitcode=exitcode, why=member.killed_why)

    def _replace(self, slot: Slot, *, began: bool, exitcode: int | None, why: str) -> None:
        is_closing = self._supervisor.is_closing
        if self._starting is not None and (is_closing or not began):  # it drained, perhaps; and no other will be ready in its place
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
        if self._supervisor.is_closing and not is_spent:
            return
        delay = slot.budget.died()
        if delay is None and slot.current is not None and not is_spent:  # its worker lives, and could not be relieved: it goes on
            slot.budget.began()
            delay = LONGEST_DELAY
        if delay is not None:
            slot.timer = self._loop.call_later(delay, self._spawn, slot)
            return
        slot.is_failed = True
        if slot.current is not None:  # it may begin nothing more, and nobody will relieve it
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
        """How much a death matters: little where the user wants an end, also by a second Ctrl-C, which may well hit a channel.

        In the first start it fails that start, and StartupFailed says it.
        """
        is_expected = self._supervisor.is_closing or self._starting is not None or (member is not None and member.is_interrupted)
        return logging.DEBUG if is_expected else logging.WARNING

    # Ending

    def finish(self) -> None:
        """Ask every worker to end: nothing runs any more. Those that are not ready yet are killed."""
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
        """No worker will be started any more."""
        for slot in self.slots:
            slot.stop_timer()

    def kill(self, signum: int = signal.SIGKILL) -> None:
        """Send every worker this signal, which ends it. Their exits follow."""
        faults = Faults("workers were sent a signal")
        for member in list(self.members):
            with faults:
                member.worker.kill(signum)
        faults.finish()

    def is_expected(self) -> bool:
        """Whether any worker is ready or will be."""
        return any(member.life.state in (State.STARTING, State.READY) for member in self.members)


def _name(member: Member) -> str:
    """The worker in a report. One that was never born has no pid."""
    return f"worker {member.index}" + ("" if member.pid is None else f" (pid {member.pid})")
