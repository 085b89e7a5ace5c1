"""The shell: owns every pending call, turns what workers and users do into inputs of the pure core, and does what it decides.

    submit ─▶ Dispatch ─▶ Member.send ─▶ channel ═▶ worker
    future ◀─ outcome  ◀─ Outcomes    ◀─ channel ◀═ worker
    exit of a worker ─▶ Life, Dispatch, RestartBudget ─▶ its started calls fail, the others wait again, a replacement starts

Every call has one owner: the queue of Dispatch while it waits, the Member it was sent to afterwards. It leaves the first by being
sent or withdrawn, the second by its outcome or by the worker's death.
"""

import asyncio
import contextlib
import os
from collections import deque
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any, Final

from percore._admission import Admission
from percore._attempts import Attempts
from percore._beside import Beside
from percore._broken import RunnerBroken, WorkerDied
from percore._calls import Awaited, Call, Function, Functions
from percore._contexts import Contexts
from percore._core.batches import Run
from percore._core.dispatch import Dispatch
from percore._deaths import Deaths
from percore._engine import Engine
from percore._errors import RunnerClosed, as_error
from percore._faults import Faults
from percore._intake import Intake
from percore._ipc.slots import SlotWriter
from percore._items import Batch, Flow, Item
from percore._member import Member, Unit
from percore._messages import CANCEL, UNDEFINE, Kind
from percore._options import Knobs
from percore._points import POINTS, point
from percore._policy import Policy
from percore._pool import Pool
from percore._recalls import Recalls
from percore._shares import Shares

if TYPE_CHECKING:
    from collections.abc import Callable

_LOOKS: Final = 4
"""Functions of which calls still run that are looked at whenever something has ended: a few, however many there are."""


class Supervisor:
    """Keeps the workers of one runner. All methods belong to the thread of its loop."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        options: Knobs,
        engine: Engine,
        arena: SlotWriter,
        *,
        main_by_value: bool,
    ) -> None:
        self.loop = loop
        self.options = options
        self.engine = engine
        self.arena = arena
        self.dispatch: Dispatch[Any, Member] = Dispatch(options.concurrency, options.threads, options.per_key)
        self.shares = Shares(loop, arena, main_by_value=main_by_value)
        self.functions = Functions(arena, self.shares, main_by_value=main_by_value)
        self.known = self.functions.known
        self.functions.on_forgotten = self._undefine_forgotten
        self.policy = Policy(retries=options.retries) if options.retries else None
        """What calls are run under that are given nothing else."""
        self.policy_of = Policy.checked
        """Checks options; here, since a view of a runner may be made for each call, and an import there would cost as much."""
        self.contexts = Contexts(options.contextvars, arena, main_by_value=main_by_value) if options.contextvars else None
        self.beside = Beside(self)
        self.admission = Admission(loop, options.max_pending) if options.max_pending is not None else None
        self.attempts = Attempts(self)
        self.deaths = Deaths(self)
        self.loose: set[Unit] = set()
        """Calls that are neither where they waited nor where they ran: what ends one may cancel the others."""
        self._recalls = Recalls(self.loop, self.dispatch)
        self.broken: RunnerBroken | None = None
        self.is_closing = False
        """No call is taken any more, and no worker replaced."""
        self.is_cut = False
        """Nothing is begun any more."""
        self._on_progress: Callable[[], None] | None = None
        self.on_death: Callable[[Member, int | None, bool], None] | None = None
        """Told of each death that nobody has asked for: the worker, its exit code, and whether it had been ready."""
        self._pid = os.getpid()
        self._is_settling = False
        self._retired: deque[tuple[Function, list[Unit]]] = deque()
        """Held functions of no use any more, and their calls that were under way when that was said."""
        self.enders: set[Callable[[], None]] = set()
        """Called when no more calls will be taken: by whoever waits for something else meanwhile."""
        self.intake = Intake(self)
        self.pool = Pool(self, options.workers)
        self.slots, self.members, self.lives = self.pool.slots, self.pool.members, self.pool.lives

    # Calls

    def withdraw(self, call: Awaited) -> None:
        """What is awaited of this call was cancelled."""
        if not call.is_over:
            call.is_over = True
            self.cancelled(call)

    def accept(self, call: Awaited | Call | Item) -> None:
        """Send a call, or let it wait."""
        try:
            member = self.dispatch.submitted(call, call.queue)
            if member is not None:
                member.send(call)
        except BaseException as error:
            self.failed_with(call, error)

    def send_waiting(self, kind: int) -> None:
        """Send what waits, of one kind, as far as there are places."""
        for call, member in self.dispatch.fill(kind):
            if isinstance(call, Awaited) and call.future.done():  # cancelled, and its task will say so in a moment
                call.is_over = True
                if call.key is not None:
                    self.dispatch.left(call)
            else:
                try:
                    member.send(call)
                except BaseException as error:
                    self.failed_with(call, error)

    def failed_with(self, call: Unit, error: BaseException) -> None:
        """To go on with a call has raised this: the call ends so, wherever it is, and no other.

        Raises:
            BaseException: it is no Exception; the call has ended.
        """
        faults = Faults(f"a call of {call.function.name} was sent, or its outcome received")
        faults.note(error)
        self.give_up(call, error, faults)
        faults.finish()

    def give_up(self, call: Unit, error: BaseException, faults: Faults) -> None:
        """End a call with this error, by which percore has failed to go on with it. It may be anywhere."""
        failure = as_error(error, "percore")
        with faults:
            if isinstance(call, Batch):
                call.flow.broke(failure)
            elif not call.done():
                call.set_exception(failure)
        with faults:
            member = call.member
            if member is not None and member.calls.get(call.call_id) is call:
                member.give_up(call)
            elif not isinstance(call, Batch):
                self.attempts.drop(call)
                self.beside.remove(call)  # type: ignore[arg-type]  # no other is there
                self.dispatch.remove(call, call.queue)
        with faults:
            self.release(call)

    def put_back(self, flow: Flow, run: Run) -> None:
        """Items of a batch have come back: they go to other places, unless nobody will come."""
        batches = flow.queue.batches
        assert batches is not None
        if self.is_over:
            for number in range(run.start, run.start + len(run.bodies)):
                flow.failed(number, self.refusal(), 0)
        else:
            batches.put_back(run)
            self.dispatch.appended(flow.queue)

    def unanswered(self, member: Member, call: Call) -> None:
        """A call that was for this worker alone has not begun, and never will."""
        try:
            self.release(call)
            if not call.done():
                call.set_exception(WorkerDied(member.pid, None, call.function.name, None, started=False, attempts=0))
        except BaseException as error:
            self.failed_with(call, error)

    def cancelled(self, call: Unit) -> None:
        """The caller has cancelled: withdraw the call, or have it cancelled where it runs."""
        if os.getpid() != self._pid:  # a copy of the call, in a fork of this process: the worker is none of its
            return
        member: Member | None = call.member
        if isinstance(call, Batch):
            if member is not None and not self.is_cut:
                member.worker.channel.send(CANCEL, call.call_id, call.wanted)
        elif member is None:
            self.release(call)
            if call.kind == Kind.BESIDE:
                self.beside.remove(call)  # type: ignore[arg-type]  # such are calls
            elif call in self.attempts.delayed:
                self.attempts.drop(call)
            elif call not in self.loose:
                self.dispatch.ended(call, call.queue)
            self._look_idle()
        elif call.call_id in member.parked:
            self.release(member.take(call.call_id))
            self.advance()
        elif not self.is_cut:  # else closing has cancelled it already, and a second time would cancel its clean-up
            member.worker.channel.send(CANCEL, call.call_id, None)

    def release(self, call: Unit) -> None:
        """Nobody will need the call's arguments again, nor what was shared with it."""
        if isinstance(call, Batch):  # its items are scalars or small pickles
            return
        self._free(call, ())
        if self.shares.held:
            self.shares.drop(call)

    def unpickled(self, call: Unit) -> None:
        """Nobody will unpickle the call's arguments again."""
        assert not isinstance(call, Batch)
        self._free(call, b"" if call in self.shares.held else ())  # which tells that there is something to be released later

    def _free(self, call: Awaited | Call | Item, body: tuple[()] | bytes) -> None:
        before, call.body = call.body, body
        if type(before) is int:
            self.arena.discard(before)
            if POINTS:
                point("supervisor.call.released")

    def end_leases(self, member: Member, faults: Faults) -> None:
        """The worker is dead: nobody looks at the slots any more that its arrays lay in."""
        leases, member.leases = member.leases, []
        for payload in leases:
            with faults:
                self.arena.discard(payload)
        with faults:
            self.shares.buried(member)

    def advance(self) -> None:
        """Something has ended or begun: send what can be sent now, and let a closing look whether it can go on."""
        try:
            if self._retired:
                self._forget_retired()
            if self.lives.draining:
                self.lives.look_drained()
            if self.beside.waiting:
                self.beside.advance()
            if self.pool.low:
                self.pool.relieve()
            if not self.dispatch.is_quiet():
                self._dispatch()
            self._look_idle()
        except BaseException as error:
            self._advance_despite(error)

    def _advance_despite(self, error: BaseException) -> None:
        """As `advance`, when one of its steps has raised this: all of them once more, each by itself."""
        steps = (
            self._forget_retired,
            self.lives.look_drained,
            self.beside.advance,
            self.pool.relieve,
            self._dispatch,
            self._look_idle,
        )
        self._take(steps, "calls were sent to workers", error)

    def _look_idle(self) -> None:
        """Let a closing look whether it can go on: not while calls are between two places, where it would not see them."""
        if not self.is_closing or self.loose:
            return
        if not self.members:  # and none will come
            self._expect_nobody()
        if self._on_progress is not None:
            self._on_progress()

    def _dispatch(self) -> None:
        self.send_waiting(Kind.TASK)
        self.send_waiting(Kind.THREAD)
        self._recalls.look()
        if self.dispatch.keys.strays and not self._is_settling and not self.dispatch.is_settled():
            self._is_settling = True
            self.loop.call_soon(self._settle)

    def _settle(self) -> None:
        """Calls with keys move to where they belong since the workers have changed, a piece in each iteration of the loop."""
        self._is_settling = False
        self.dispatch.settle()
        self._dispatch()

    def forget(self, function: Function, calls: Iterable[Unit]) -> None:
        """A held function is of no use any more, once those of these calls have ended that are under way; there are no others."""
        if function.users:
            function.users = 0
            self._retired.append((function, [call for call in calls if call.member is not None]))
            self._forget_retired()

    def _forget_retired(self) -> None:
        """Forget retired functions that no worker can still need: a call that has begun may be about to unpickle its own.

        Only the last of a function's calls is looked at, and few functions of which one runs: this is done for each outcome. When
        the last of all these calls has ended, all functions are forgotten, whatever the order.
        """
        kept = 0
        for _ in range(len(self._retired)):
            if not self._retired or kept == _LOOKS:  # what is forgotten may run a `__del__`, which ends a map
                return
            function, calls = self._retired.popleft()
            while calls and calls[-1].member is None:
                calls.pop()
            if calls:
                self._retired.append((function, calls))
                kept += 1
            else:
                self._undefine(function)

    def _undefine(self, function: Function) -> None:
        for member in list(self.members):
            if function.number in member.defined:
                member.defined.discard(function.number)
                member.worker.channel.send(UNDEFINE, function.number, None)
        self.functions.drop(function)

    def _undefine_forgotten(self) -> None:
        """Functions are not known any more: workers need not remember them either.

        Those whose calls are on their way stay, for the next time. A worker that is sent another call is told of its function anew.
        """
        in_use = self.functions.numbers()
        for member in list(self.members):
            called = {call.function.number for call in list(member.calls.values())}
            for number in member.defined - in_use - called:
                member.defined.discard(number)
                member.worker.channel.send(UNDEFINE, number, None)

    def refuse(self, call: Unit) -> None:
        """End a call that nobody will run any more."""
        self.release(call)
        if call.done():
            return
        if isinstance(call, Batch):
            call.refuse(self.refusal)
        elif self.broken is not None:
            call.set_exception(self.refusal())
        else:
            call.cut_off()

    @property
    def is_over(self) -> bool:
        """Whether nothing more is begun, not even what was accepted."""
        return self.is_cut or self.broken is not None

    def refusal(self) -> Exception:
        """A new instance of the reason why no call is taken."""
        if self.broken is not None:
            refusal = RunnerBroken(self.broken.deaths, self.broken.exitcode, self.broken.detail)
            refusal.__cause__ = self.broken.__cause__
            return refusal
        return RunnerClosed("the runner was closed before this call could end")

    # Ending

    def refuse_calls(self) -> None:
        """Take no more calls and replace no worker. The calls that wait when the last worker has gone end then. Idempotent."""
        self.is_closing = True
        self._take((self.end_maps, self.attempts.end), "the runner took no more calls")

    def close(self, on_progress: "Callable[[], None]") -> None:
        """Refuse calls for the one closing, which is told whenever a call or a worker has ended."""
        assert self._on_progress is None, "a supervisor has one closing"
        self._on_progress = on_progress
        self.refuse_calls()

    def fail(self, error: RunnerBroken) -> None:
        """No worker can be started any more."""
        self.broken = error
        self._take((self.end_maps, self.attempts.end, self._refuse_waiting), "the runner broke")

    def _refuse_waiting(self) -> None:
        """End what waits for a worker."""
        calls: list[Unit] = [*self.dispatch.withdraw(), *self.beside.withdraw()]
        self._refuse_all(calls)

    def _refuse_all(self, calls: Collection[Unit]) -> None:
        faults = Faults("calls that nobody will run were ended")
        self.loose.update(calls)
        for call in calls:
            with faults:
                self.refuse(call)
            if faults.last is not None:
                self.give_up(call, faults.last, faults)
        self.loose.difference_update(calls)
        faults.finish()

    def end_maps(self) -> None:
        """No more calls are taken: open maps pull no more, and nobody waits to be let in."""
        faults = Faults("maps were ended")
        for end in list(self.enders):
            with faults:
                end()
        with faults:
            self.shares.refuse()
        with faults:
            if self.admission is not None:
                self.admission.refuse(self.refusal)
        faults.finish()

    # Broadcast

    async def broadcast(
        self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any], policy: Policy | None
    ) -> list[Any]:
        """Run a call in every ready worker, beside all others. Cancelled, or when one fails: the others are cancelled."""
        if self.broken is not None or self.is_closing:
            raise self.refusal()
        calls: list[Call] = []
        try:
            members = sorted(self.dispatch.seats, key=lambda member: member.index)
            calls.extend(self.intake.submit(function, args, kwargs, policy, member) for member in members)
            if calls:
                await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
            for call in calls:
                if call.done():
                    call.result()  # the first failure is raised, though others may run
            return [call.result() for call in calls]
        finally:
            for call in calls:
                if not call.cancel() and not call.cancelled():
                    call.exception()  # nobody will read it: it is not "never retrieved"

    def waiting(self) -> int:
        """Calls that wait here: for a place, or for their next attempt."""
        return self.dispatch.waiting() + len(self.attempts.delayed) + len(self.beside)

    def unfinished(self) -> bool:
        """Whether any call waits or runs, those included whose callers have gone."""
        return bool(self.waiting()) or any(member.calls for member in self.members)

    def cut(self) -> None:
        """Withdraw what waits and cancel what runs; the callers get RunnerClosed. Once: a second time does nothing."""
        if self.is_cut:
            return
        self.is_cut = True
        faults = Faults("calls were cancelled, since the runner closes")
        with faults:
            self._refuse_waiting()
        for member in list(self.members):
            for call in reversed(list(member.calls.values())):  # else what is next may begin before it is heard of
                with faults:
                    self._cut(member, call)
        faults.finish()

    def _cut(self, member: Member, call: Unit) -> None:
        if call.call_id in member.parked:
            self.refuse(member.take(call.call_id))
        elif not call.done():
            member.worker.channel.send(CANCEL, call.call_id, 0 if isinstance(call, Batch) else None)

    def finish(self) -> None:
        """Ask every worker to end: nothing runs any more. Those that are not ready yet are killed.

        What still waits does so for workers that have died meanwhile and are not replaced any more.
        """
        self.is_cut = True  # from now on nothing is begun
        self._take((self._expect_nobody, self.pool.finish), "the workers were asked to end")

    def _expect_nobody(self) -> None:
        """No worker will be started any more, nor become ready: nothing waits for one."""
        steps = (self.attempts.end, self._refuse_waiting, self._recalls.stop, self.pool.stop_timers)
        self._take(steps, "calls that nobody will run were ended")

    @staticmethod
    def _take(steps: "Iterable[Callable[[], object]]", when: str, error: BaseException | None = None) -> None:
        """Take each of these steps, whatever another one raises. `error`: what one before them has raised."""
        faults = Faults(when)
        if error is not None:
            faults.note(error)
        for step in steps:
            with faults:
                step()
        faults.finish()

    def kill_all(self) -> None:
        """End every worker now, and start none. Their exits follow."""
        self.is_cut = True
        self._take((self._expect_nobody, self.pool.kill), "all workers were killed")

    def signal_all(self, signum: int) -> None:
        """Send every worker this signal, and start none. What they do then is theirs; see `refuse_calls`."""
        self.refuse_calls()
        self.pool.stop_timers()
        self.pool.kill(signum)

    def abandon(self) -> None:
        """Nobody holds the runner any more, whose loop may be closed: end the workers, and touch nothing else.

        From any thread, in the midst of anything: that is where the garbage collector finds out. Where the loop still runs it does
        this itself, the calls end as the workers do, and nothing is replaced.
        """
        if self.loop.is_running():
            with contextlib.suppress(RuntimeError):  # it was closed meanwhile
                self.loop.call_soon_threadsafe(self._abandon)
                return
        self._abandon()

    def _abandon(self) -> None:
        self.is_closing = self.is_cut = True
        self.pool.kill()
