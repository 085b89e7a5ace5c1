"""The shell: owns every pending call, turns what workers and users do into inputs of the pure core, and does what it decides.

    submit ─▶ Dispatch ─▶ Member.send ─▶ channel ═▶ worker
    future ◀─ outcome  ◀─ Outcomes    ◀─ channel ◀═ worker
    exit of a worker ─▶ Life, Dispatch, RestartBudget ─▶ its started calls fail, the others wait again, a replacement starts

Every call has one owner: the queue of Dispatch while it waits, the Member it was sent to afterwards. It leaves the first by being
sent or withdrawn, the second by its outcome or by the worker's death.
"""

import asyncio
import logging
import os
import time
from typing import TYPE_CHECKING, Any, Final

from percore._broken import RunnerBroken, StartupFailed, WorkerDied, how
from percore._calls import Call, Function, Functions
from percore._core.dispatch import Dispatch
from percore._core.lifecycle import Event, State
from percore._core.restart import LIMIT, RestartBudget
from percore._engine import Engine
from percore._errors import RunnerClosed
from percore._ipc.codec import is_inline
from percore._ipc.slots import SlotWriter
from percore._member import Member, Turn
from percore._messages import CANCEL, FINISH, RECALL, UNDEFINE, Kind
from percore._options import Options
from percore._outcomes import Outcomes
from percore._points import POINTS, point

if TYPE_CHECKING:
    from collections.abc import Callable

logger: Final = logging.getLogger("percore")


class Slot:
    """A place in the pool: its worker of now, and how its workers have fared."""

    def __init__(self, index: int) -> None:
        self.index = index
        self.generation = 0
        self.budget = RestartBudget()
        self.current: Member | None = None
        self.timer: asyncio.TimerHandle | None = None
        self.is_failed = False
        self.restarts = 0
        self.done = 0
        self.failed = 0


class Supervisor:
    """Keeps the workers of one runner. All methods belong to the thread of its loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        options: Options,
        engine: Engine,
        arena: SlotWriter,
        *,
        main_by_value: bool,
    ) -> None:
        self.loop = loop
        self.options = options
        self.engine = engine
        self.arena = arena
        self.dispatch: Dispatch[Call, Member] = Dispatch(options.concurrency, options.threads)
        self.functions = Functions(arena, main_by_value=main_by_value)
        self.known = self.functions.known
        self.slots = [Slot(index) for index in range(options.workers)]
        self.members: set[Member] = set()
        self.broken: RunnerBroken | None = None
        self.is_closing = False
        self.is_cut = False
        self.on_idle: Callable[[], None] | None = None
        self._outcomes = Outcomes(self)
        self._starting: asyncio.Future[None] | None = None
        self._last_report = ""
        self._pid = os.getpid()
        self._turn = Turn(loop)
        self._retired: list[Function] = []
        self.enders: set[Callable[[], None]] = set()
        """Called when no more calls will be taken: by whoever waits for something else meanwhile."""

    # Starting

    async def start(self) -> None:
        """Start every worker and wait until all are ready.

        Raises:
            StartupFailed: one could not be started, died, failed, or was late. The others run on: the caller closes.
        """
        starting = self._starting = self.loop.create_future()
        for slot in self.slots:
            self._spawn(slot)
        try:
            await starting
        finally:
            self._starting = None

    def _spawn(self, slot: Slot) -> None:
        slot.timer = None
        slot.generation += 1
        member = Member(slot.index, slot.generation, self.dispatch.room, self._turn)
        try:
            member.attach(self.engine.start(slot.index, slot.generation, lambda code: self._exited(slot, member, code)))
        except Exception as error:  # whatever it is, the slot has to go on
            self._report(f"worker {slot.index} could not be started: {error!r}")
            self.loop.call_soon(self._never_began, slot, None)
            return
        slot.current = member
        self.members.add(member)
        slot.timer = self.loop.call_later(self.options.start_timeout, self._late, slot, member)
        member.worker.channel.open(
            self._outcomes.receiver(slot, member),
            lambda error: self._kill(member, f"its channel broke: {error!r}"),
            self.advance,
        )

    def _late(self, slot: Slot, member: Member) -> None:
        if slot.current is member and member.life.state is State.STARTING:
            self._report(f"worker {slot.index} was not ready after start_timeout={self.options.start_timeout:g} seconds")
            self._kill(member, "it was not ready in time")

    def ready(self, slot: Slot, member: Member) -> None:
        """A worker has entered its lifespan."""
        if member.life.advance(Event.READY) is not State.READY:
            return
        if slot.timer is not None:
            slot.timer.cancel()
            slot.timer = None
        self.dispatch.seats.append(member)
        if self._starting is not None and not self._starting.done() and all(s.current and s.current.is_ready for s in self.slots):
            self._starting.set_result(None)
            self._starting = None  # now, not when its waiter runs: a worker may die before that and has to be replaced

    def unready(self, member: Member, error: BaseException, text: str) -> None:
        """A worker's start failed, with this exception; it is about to end."""
        member.life.advance(Event.FAIL)
        self._last_report = text
        if self._starting is not None and not self._starting.done():
            failure = StartupFailed(f"worker {member.index} could not start: {type(error).__name__}: {error}")
            failure.__cause__ = error
            self._starting.set_exception(failure)
        else:
            logger.warning("worker %d could not start: %s", member.index, text or error)

    def draining(self, slot: Slot, member: Member) -> None:
        """A worker was asked from outside to end: it gets nothing more, and its replacement starts now."""
        member.life.advance(Event.DRAIN)
        self._unseat(member)
        if slot.current is member and not self.is_closing:
            slot.restarts += 1
            logger.info("worker %d (pid %s) drains; its replacement starts", member.index, member.pid)
            self._spawn(slot)

    # Calls

    def submit(self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call:
        """Accept a call. What cannot be pickled fails the future."""
        if self.broken is not None:
            raise self.refusal()
        call = Call(loop=self.loop)
        call.owner = self
        call.function = function
        call.kind = function.kind
        call.member = None
        if function.number and not kwargs and is_inline(args):
            call.body = args
        elif not self._pickle(call, args, kwargs):
            return call
        if POINTS:
            point("supervisor.call.pickled")
        member = self.dispatch.submitted(call)
        if member is not None:
            member.send(call)
        return call

    def _pickle(self, call: Call, args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
        """Pickle what the call is to carry. False: the call has ended instead."""
        call.body = ()
        try:
            self.functions.pickle(call, args, kwargs)
        except KeyboardInterrupt:  # taken for the terminal's: the call was never accepted
            raise
        except BaseException as error:
            # A future must not carry what would end the program of whoever awaits it, nor a StopIteration.
            is_error = isinstance(error, Exception) and not isinstance(error, StopIteration)
            call.set_exception(error if is_error else RuntimeError(f"pickling raised {error!r}"))
            return False
        if self.is_closing or self.broken is not None:  # pickling runs user code, which may have closed the runner
            self.refuse(call)
            return False
        return True

    def cancelled(self, call: Call) -> None:
        """The caller has cancelled: withdraw the call, or have it cancelled where it runs."""
        if os.getpid() != self._pid:  # a copy of the call, in a fork of this process: the worker is none of its
            return
        member: Member | None = call.member
        if member is None:
            self.release(call)
            self.dispatch.ended(call)
            if self.on_idle is not None:
                self.on_idle()
        elif call.call_id in member.parked:
            self.release(member.take(call.call_id))
            self.advance()
        elif not self.is_cut:  # else closing has cancelled it already, and a second time would cancel its clean-up
            member.worker.channel.send(CANCEL, call.call_id, None)

    def release(self, call: Call) -> None:
        """Nobody will need the call's arguments again."""
        body, call.body = call.body, ()
        if type(body) is int:
            self.arena.discard(body)

    def advance(self) -> None:
        """Something has ended or begun: send what can be sent now, and let a closing look whether it can go on."""
        if self._retired:
            self._forget_retired()
        if not self.dispatch.is_quiet():
            self._dispatch()
        if self.on_idle is not None:
            self.on_idle()

    def _dispatch(self) -> None:
        for kind in (Kind.TASK, Kind.THREAD):
            for call, member in self.dispatch.fill(kind):
                member.send(call)
        if (recall := self.dispatch.recall()) is not None:
            recall.seat.recalling = True
            recall.seat.worker.channel.send(RECALL, recall.wanted, None)

    def forget(self, function: Function) -> None:
        """A held function is of no use any more, once the calls that are still under way have ended."""
        if function.users:
            function.users = 0
            self._retired.append(function)
            self._forget_retired()

    def _forget_retired(self) -> None:
        """Forget retired functions that no worker can still need: a call that has begun may be about to unpickle its own."""
        needed = {id(call.function) for member in self.members for call in member.calls.values()}
        for function in self._retired:
            if id(function) in needed:
                continue
            for member in self.members:
                if function.number in member.defined:
                    member.defined.discard(function.number)
                    member.worker.channel.send(UNDEFINE, function.number, None)
            self.functions.drop(function)
        self._retired = [function for function in self._retired if id(function) in needed]

    def refuse(self, call: Call) -> None:
        """End a call that nobody will run any more."""
        self.release(call)
        if call.done():
            return
        if self.broken is not None:
            call.set_exception(self.refusal())
        else:
            call.cut_off()

    def refusal(self) -> Exception:
        """A new instance of the reason why no call is taken."""
        if self.broken is not None:
            return RunnerBroken(self.broken.deaths, self.broken.exitcode, self.broken.detail)
        return RunnerClosed("the runner was closed before this call could end")

    # Deaths

    def _kill(self, member: Member, why: str) -> None:
        if not member.life.is_gone:
            member.killed_why = why
            log = logger.debug if self.is_closing else logger.warning  # a second Ctrl-C may well hit a channel while it reads
            log("worker %d (pid %s) is killed: %s", member.index, member.pid, why)
            member.worker.kill()

    def _exited(self, slot: Slot, member: Member, exitcode: int | None) -> None:
        """The system has reported a worker dead. Its last words count; then its memory is race-free and read once."""
        try:
            member.worker.channel.receive()
        finally:  # a KeyboardInterrupt there goes on, and must not leave calls of a dead worker behind
            self._bury(slot, member, exitcode)

    def _bury(self, slot: Slot, member: Member, exitcode: int | None) -> None:
        state = member.life.state
        member.life.advance(Event.EXIT)
        if slot.timer is not None and slot.current is member:
            slot.timer.cancel()
            slot.timer = None
        self._unseat(member)
        self.members.discard(member)
        begun = self._end_calls(member, exitcode)
        began = member.done > 0 or begun
        slot.done += member.done
        slot.failed += member.failed
        member.worker.close()
        if state in (State.STARTING, State.READY):
            log = logger.debug if self.is_closing else logger.warning
            log("worker %d (pid %s) died %s", member.index, member.pid, member.killed_why or how(exitcode))
        if slot.current is member:
            slot.current = None
            self._replace(slot, began=began or state is State.DRAINING, exitcode=exitcode, why=member.killed_why)
        self.advance()

    def _end_calls(self, member: Member, exitcode: int | None) -> bool:
        """Fail the calls that had begun, take back those that had not. Whether any had begun."""
        now = time.monotonic()
        back, begun = [], False
        for call in list(member.calls.values()):
            began_at = member.began_at(call)
            started = began_at is not None
            begun |= started
            call.member = None
            if call.done():
                self.release(call)
            elif started or self.is_cut:
                self.release(call)
                if self.is_cut:
                    call.cut_off()
                else:
                    call.set_exception(WorkerDied(member.pid, exitcode, call.function.name, now - (began_at or now)))
                member.done += 1
                member.failed += 1
            else:
                back.append(call)
        member.calls.clear()
        if back and self._is_hopeless():
            for call in back:
                self.release(call)
                call.set_exception(WorkerDied(member.pid, exitcode, call.function.name, None, started=False, attempts=0))
        else:
            self.dispatch.returned(back)
        return begun

    def _is_hopeless(self) -> bool:
        """Whether no worker will come to run what waits."""
        coming = (State.STARTING, State.READY)
        return self.broken is not None or (self.is_closing and not any(member.life.state in coming for member in self.members))

    def _unseat(self, member: Member) -> None:
        if member in self.dispatch.seats:
            self.dispatch.seats.remove(member)

    def _replace(self, slot: Slot, *, began: bool, exitcode: int | None, why: str) -> None:
        if self._starting is not None:
            if not self._starting.done():
                reason = (
                    f"worker {slot.index} died {how(exitcode)} before it was ready" if not why else f"worker {slot.index}: {why}"
                )
                self._starting.set_exception(
                    RunnerClosed("the runner was closed while it started")
                    if self.is_closing
                    else StartupFailed(reason, self._last_report)
                )
            return
        if self.is_closing:
            return
        slot.restarts += 1
        if began:
            slot.budget.began()
            self._spawn(slot)
        else:
            self._never_began(slot, exitcode)

    def _never_began(self, slot: Slot, exitcode: int | None) -> None:
        if self._starting is not None:
            if not self._starting.done():
                self._starting.set_exception(StartupFailed(self._last_report))
            return
        if self.is_closing:
            return
        delay = slot.budget.died()
        if delay is not None:
            slot.timer = self.loop.call_later(delay, self._spawn, slot)
            return
        slot.is_failed = True
        if all(other.is_failed for other in self.slots):
            self._break(exitcode)
        else:
            logger.warning(
                "worker %d died %d times in a row before it began a call; the runner goes on without it. %s",
                slot.index,
                LIMIT,
                self._last_report,
            )

    def _break(self, exitcode: int | None) -> None:
        self.broken = RunnerBroken(LIMIT, exitcode, self._last_report)
        logger.error("%s", self.broken)
        self.end_maps()
        for call in self.dispatch.withdraw():
            self.refuse(call)

    def end_maps(self) -> None:
        """No more calls are taken: open maps pull no more."""
        for end in list(self.enders):
            end()

    def _report(self, text: str) -> None:
        self._last_report = text
        logger.warning("%s", text)

    # Ending

    def unfinished(self) -> bool:
        """Whether any call waits or runs, those included whose callers have gone."""
        return bool(self.dispatch.waiting()) or any(member.calls for member in self.members)

    def cut(self) -> None:
        """Withdraw what waits and cancel what runs; the callers get RunnerClosed. Once: a second time does nothing."""
        if self.is_cut:
            return
        self.is_cut = True
        for call in self.dispatch.withdraw():
            self.refuse(call)
        for member in self.members:
            for call in list(member.calls.values()):
                if call.call_id in member.parked:
                    self.refuse(member.take(call.call_id))
                elif not call.done():
                    member.worker.channel.send(CANCEL, call.call_id, None)

    def finish(self) -> None:
        """Ask every worker to end: nothing runs any more. Those that are not ready yet are killed.

        What still waits does so for workers that have died meanwhile and are not replaced any more.
        """
        self._expect_nobody()
        for member in self.members:
            if member.life.state is State.STARTING:
                member.worker.kill()
            elif member.life.state is not State.FINISHING:
                member.worker.channel.send(FINISH, 0, None)
            member.life.advance(Event.FINISH)

    def _expect_nobody(self) -> None:
        """No worker will be started any more, nor become ready: nothing waits for one."""
        for call in self.dispatch.withdraw():
            self.refuse(call)
        for slot in self.slots:
            if slot.timer is not None:
                slot.timer.cancel()
                slot.timer = None

    def kill_all(self) -> None:
        """End every worker now, and start none. Their exits follow."""
        self.is_cut = True
        self._expect_nobody()
        for member in self.members:
            member.worker.kill()

    def abandon(self) -> None:
        """Nobody holds the runner any more, whose loop may be closed: end the workers, and touch nothing else.

        Where the loop still runs, the calls end as the workers do, and nothing is replaced.
        """
        self.is_closing = self.is_cut = True
        self.on_idle = self._refuse_abandoned
        for member in self.members:
            member.worker.kill()

    def _refuse_abandoned(self) -> None:
        if not self.members:
            self.finish()
