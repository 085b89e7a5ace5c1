"""The supervisor: the imperative shell around the pure core.

It owns every pending call. It turns events from users and workers into inputs of the core (dispatch, life cycles, replacement),
and carries out the core's decisions.

    submit ─▶ Dispatch ─▶ PoolWorker.send ─▶ channel ═▶ worker
    future ◀─ outcome  ◀─ Outcomes        ◀─ channel ◀═ worker
    exit of a worker ─▶ Life, Dispatch, Replacement ─▶ its started calls fail or are retried, the others wait again, and
                                                       another worker starts

Every call has one owner. While it waits, this is a queue of Dispatch; once it is sent, this is the PoolWorker. A call leaves its
queue when it is sent or withdrawn, and its member when its outcome arrives, when it is handed back, or when the worker dies. Two
kinds of calls wait elsewhere: those between two attempts in Retries, and those of broadcasts in Broadcasts.
"""

import asyncio
import contextlib
import os
from collections.abc import Collection, Iterable
from typing import TYPE_CHECKING, Any

from percore._calls.calls import Awaited, Call, Outcome, PendingCall
from percore._calls.context_variables import Contexts
from percore._calls.functions import Function, Functions
from percore._calls.items import RunningMap
from percore._calls.policy import Policy
from percore._calls.shared_objects import Shares
from percore._common.errors import as_error
from percore._common.fault_points import POINTS, point
from percore._common.log import Faults
from percore._common.options import RunnerOptions
from percore._common.worker_errors import RunnerBroken, WorkerDied
from percore._protocol.interfaces import Engine
from percore._protocol.messages import CANCEL, Kind
from percore._scheduler.batching import Run
from percore._scheduler.dispatch import Dispatch
from percore._scheduler.phase import PhaseEvent, RunnerPhase
from percore._supervisor.admission import Admission
from percore._supervisor.broadcasts import Broadcasts
from percore._supervisor.deaths import Deaths
from percore._supervisor.pool import Pool
from percore._supervisor.pool_worker import PoolWorker
from percore._supervisor.rebalancing import Rebalancing
from percore._supervisor.retries import Retries
from percore._supervisor.submission import Submission

if TYPE_CHECKING:
    from collections.abc import Callable


class Supervisor:
    """Supervises the workers and calls of one runner. Only the thread of its loop may call its methods, except `abandon`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, options: RunnerOptions, engine: Engine) -> None:
        self.loop = loop
        self.options = options
        self.engine = engine
        self.store = store = engine.store
        self.dispatch: Dispatch[Any, PoolWorker] = Dispatch(options.concurrency, options.threads, options.per_key)
        self.shares = Shares(loop, store)
        self.members: set[PoolWorker] = set()
        """All workers that have not ended. The pool adds and removes them."""
        self.functions = Functions(store, self.shares, self.members)
        self.known = self.functions.known
        self.policy = Policy(retries=options.retries) if options.retries else None
        """The policy of calls without options of their own; None: the defaults."""
        self.policy_of = Policy.checked
        """Checks call options. Kept here to save an import per view of the runner, since users may make a view for each call."""
        self.contexts = Contexts(options.contextvars, store) if options.contextvars else None
        self.broadcasts = Broadcasts(self)
        self.admission = Admission(loop, options.max_pending) if options.max_pending is not None else None
        self.retries = Retries(self)
        self.deaths = Deaths(self)
        self.loose: set[PendingCall] = set()
        """Calls in no queue and no worker, about to be ended or queued again. User code may cancel them meanwhile."""
        self._rebalancing = Rebalancing(self.loop, self.dispatch)
        self.phase = RunnerPhase()
        self._on_progress: Callable[[], None] | None = None
        self.on_death: Callable[[PoolWorker, int | None, bool], None] | None = None
        """Called on each unrequested death, with the worker, its exit code, and whether it was ready before and not draining."""
        self._pid = os.getpid()
        self._is_settling = False
        self.enders: set[Callable[[], None]] = set()
        """Functions to call when the runner stops accepting calls. Open maps, which may wait for inputs, register here."""
        self.submission = Submission(self)
        self.pool = Pool(self, options.workers)
        self.slots, self.lifecycles = self.pool.slots, self.pool.lifecycles

    # Calls

    def withdraw(self, call: Awaited) -> None:
        """Withdraw a call of `run` whose await was cancelled."""
        if not call.is_over:
            call.is_over = True
            self.cancelled(call)

    def accept(self, call: PendingCall) -> None:
        """Send a call, or queue it. An error ends the call."""
        member = None
        try:
            member = self.dispatch.submitted(call, call.queue)
            if member is not None:
                member.send(call)
        except BaseException as error:
            self.failed_with(call, error, member)

    def send_waiting(self, kind: int) -> None:
        """Send the waiting calls of one kind, as far as workers have room."""
        for call, member in self.dispatch.fill(kind):
            try:
                if not call.is_dropped():
                    member.send(call)
                    continue
                call.drop()  # it is cancelled; its task will call `withdraw` soon
                if call.key is not None:
                    self.dispatch.left(call)
            except BaseException as error:
                self.failed_with(call, error, member)

    def failed_with(
        self, call: PendingCall, error: BaseException, chosen: PoolWorker | None = None, *, stays: bool = False
    ) -> None:
        """End one call with an error that percore raised while it handled the call, wherever the call is.

        `chosen`: the worker to which the call was being sent. `stays`: a worker holds the call, and its outcome follows.

        Raises:
            BaseException: `error`, if it is no Exception. The call has ended by then.
        """
        faults = Faults(f"a call of {call.function.name} was sent, or its outcome received")
        faults.note(error)
        if chosen is not None and call.member is None and call.key is not None and call.kind != Kind.BROADCAST:
            with faults:
                self.dispatch.left(call)  # the key counts it as sent
        if not stays:
            self.give_up(call, error, faults)
        elif not call.done():
            with faults:
                call.abandon(as_error(error, "percore"))
        faults.finish()

    def give_up(self, call: PendingCall, error: BaseException, faults: Faults) -> None:
        """End a call with this error and remove it from wherever it is: a worker, a queue, or the calls that wait for an attempt.

        `faults` takes the errors of these steps.
        """
        failure = as_error(error, "percore")
        with faults:
            if not call.done():
                call.set_exception(failure)
        with faults:
            member = call.member
            if member is not None and member.calls.get(call.call_id) is call:
                member.give_up(call)
            else:
                self.retries.drop(call)
                self.broadcasts.remove(call)
                if call.kind != Kind.BROADCAST:
                    self.dispatch.remove(call, call.queue)
        with faults:
            self.release(call)

    def put_back(self, running: RunningMap, run: Run) -> None:
        """Queue the items of a batch again that its worker has not begun, or fail them if no more calls may begin."""
        batches = running.queue.batches
        assert batches is not None
        if not self.phase.begins:
            for number in range(run.start, run.start + len(run.bodies)):
                running.failed(number, self.phase.refusal(), 0)
        else:
            batches.put_back(run)
            self.dispatch.appended(running.queue)

    def unanswered(self, member: PoolWorker, call: PendingCall) -> None:
        """End a broadcast's call that has not begun in its worker and never will. Its error is WorkerDied."""
        try:
            self.release(call)
            if not call.done():
                why, name = member.killed_why, call.function.name
                code = None if why else 0  # a worker that was asked to end exits with 0 once its calls have ended
                call.set_exception(WorkerDied(member.pid, code, name, None, started=False, attempts=0, why=why))
        except BaseException as error:
            self.failed_with(call, error)

    def cancelled(self, call: PendingCall) -> None:
        """Withdraw a cancelled call if it waits, or ask its worker to cancel it."""
        if os.getpid() != self._pid:  # a copy of the call in a fork of this process, which has no workers
            return
        member: PoolWorker | None = call.member
        if member is None:
            self.release(call)
            if call.kind == Kind.BROADCAST:
                self.broadcasts.remove(call)
            elif call in self.retries.delayed:
                self.retries.drop(call)
            elif call not in self.loose:
                self.dispatch.ended(call, call.queue)
            self._look_idle()
        elif call.call_id in member.parked:
            self.release(member.take(call.call_id))
            self.advance()
        elif not self.phase.is_cut:  # otherwise closing has cancelled it already; a second cancellation would hit its clean-up
            member.tell(CANCEL, call.call_id, call.wanted)

    def release(self, call: Outcome) -> None:
        """Release the call's arguments and the shared objects it holds. No attempt of the call will follow."""
        if call.body is None:  # a batch: its items are scalars or small pickles, which hold no slots
            return
        self._free(call, ())
        if self.shares.held:
            self.shares.drop(call)

    def unpickled(self, call: PendingCall) -> None:
        """Release the call's arguments, because no worker will unpickle them again. The call keeps its shared objects."""
        self._free(call, b"" if call in self.shares.held else ())  # not a tuple: `receive` then calls `release`

    def _free(self, call: Outcome, body: tuple[()] | bytes) -> None:
        before, call.body = call.body, body
        if type(before) is int:
            self.store.discard(before)
            if POINTS:
                point("supervisor.call.released")

    def advance(self) -> None:
        """Send all calls that can be sent now, and let a closing check whether it can go on.

        To be called when calls or workers have ended, and when workers have sent messages or read some.
        """
        try:
            if self.functions.retired:
                self.functions.forget_retired()
            if self.lifecycles.draining:
                self.lifecycles.look_drained()
            if self.broadcasts.waiting:
                self.broadcasts.advance()
            if self.pool.low:
                self.pool.relieve()
            if not self.dispatch.is_quiet():
                self._dispatch()
            self._look_idle()
        except BaseException as error:
            self._advance_despite(error)

    def _advance_despite(self, error: BaseException) -> None:
        """Run all steps of `advance` again, each isolated, after one of them raised this error."""
        steps = (
            self.functions.forget_retired,
            self.lifecycles.look_drained,
            self.broadcasts.advance,
            self.pool.relieve,
            self._dispatch,
            self._look_idle,
        )
        self._take(steps, "calls were sent to workers", error)

    def _look_idle(self) -> None:
        """Let a closing check whether it can go on, unless calls are in `loose`, where the check would miss them."""
        if not self.phase.is_closing or self.loose:
            return
        if not self.members:  # a closing runner does not replace dead workers
            self._expect_nobody()
        if self._on_progress is not None:
            self._on_progress()

    def _dispatch(self) -> None:
        self.send_waiting(Kind.TASK)
        self.send_waiting(Kind.THREAD)
        self._rebalancing.look()
        if self.dispatch.keys.strays and not self._is_settling and not self.dispatch.is_settled():
            self._is_settling = True
            self.loop.call_soon(self._settle)

    def _settle(self) -> None:
        """Move some calls with keys to their new workers, after the set of workers changed. One piece per iteration of the loop."""
        self._is_settling = False
        self.dispatch.settle()
        self._dispatch()

    def refuse(self, call: PendingCall) -> None:
        """End a call that no worker will run."""
        self.release(call)
        if call.done():
            return
        if self.phase.broken is not None:
            call.refuse(self.phase.refusal)
        else:
            call.cut_off()

    # Ending

    def refuse_calls(self) -> None:
        """Accept no more calls and replace no dead workers. Waiting calls end when the last worker has ended. Idempotent."""
        self.phase.advance(PhaseEvent.CLOSE)
        self._take((self.end_maps, self.retries.end), "the runner took no more calls")

    def close(self, on_progress: "Callable[[], None]") -> None:
        """Refuse calls for the runner's only closing. `on_progress` is called whenever a call or a worker may have ended."""
        assert self._on_progress is None, "a supervisor has one closing"
        self._on_progress = on_progress
        self.refuse_calls()

    def fail(self, error: RunnerBroken) -> None:
        """Break the runner, because no worker can be started any more: end all waiting calls and open maps."""
        self.phase.fail(error)
        self._take((self.end_maps, self.retries.end, self._refuse_waiting), "the runner broke")

    def _refuse_waiting(self) -> None:
        """End all calls that wait for a worker."""
        calls: list[PendingCall] = [*self.dispatch.withdraw(), *self.broadcasts.withdraw()]
        self._refuse_all(calls)

    def _refuse_all(self, calls: Collection[PendingCall]) -> None:
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
        """Stop open maps from pulling inputs, and refuse the callers that wait for admission or for an object to be shared."""
        faults = Faults("maps were ended")
        for end in list(self.enders):
            with faults:
                end()
        with faults:
            self.shares.refuse()
        with faults:
            if self.admission is not None:
                self.admission.refuse(self.phase.refusal)
        faults.finish()

    # Broadcast

    async def broadcast(
        self, function: Function, args: tuple[Any, ...], kwargs: dict[str, Any], policy: Policy | None
    ) -> list[Any]:
        """Run a call in every ready worker, and return the results by the index of the worker.

        If this is cancelled or one call fails, the other calls are cancelled.
        """
        if not self.phase.accepts:
            raise self.phase.refusal()
        calls: list[Call] = []
        try:
            members = sorted(self.dispatch.seats, key=lambda member: member.index)
            calls.extend(self.submission.submit(function, args, kwargs, policy, member) for member in members)
            if calls:
                await asyncio.wait(calls, return_when=asyncio.FIRST_EXCEPTION)
            for call in calls:
                if call.done():
                    call.result()  # raise the first failure, though other calls may still run
            return [call.result() for call in calls]
        finally:
            for call in calls:
                if not call.cancel() and not call.cancelled():
                    call.exception()  # mark it as retrieved, so asyncio does not log it

    def waiting(self) -> int:
        """Return the number of calls that wait for a place or for their next attempt."""
        return self.dispatch.waiting() + len(self.retries.delayed) + len(self.broadcasts)

    def unfinished(self) -> bool:
        """Return whether any call waits or runs, including cancelled calls that still run."""
        return bool(self.waiting()) or any(member.calls for member in self.members)

    def cut(self) -> None:
        """End all waiting calls and cancel the running ones. The callers get RunnerClosed. A second call does nothing."""
        if self.phase.is_cut:
            return
        self.phase.advance(PhaseEvent.CUT)
        faults = Faults("calls were cancelled, since the runner closes")
        with faults:
            self._refuse_waiting()
        for member in list(self.members):
            for call in reversed(list(member.calls.values())):  # last first: else a worker may begin the next
                with faults:
                    self._cut(member, call)
        faults.finish()

    def _cut(self, member: PoolWorker, call: PendingCall) -> None:
        if call.call_id in member.parked:
            self.refuse(member.take(call.call_id))
        elif not call.done():
            member.tell(CANCEL, call.call_id, None if call.wanted is None else 0)

    def finish(self) -> None:
        """Ask every worker to end, and kill those that are not ready yet. No call may run any more.

        Calls that still wait are ended: their workers died during the closing and were not replaced.
        """
        self.phase.advance(PhaseEvent.FINISH)
        self._take((self._expect_nobody, self.pool.finish), "the workers were asked to end")

    def _expect_nobody(self) -> None:
        """End the calls that wait for a worker or an attempt, and stop recalls and delayed starts: no worker will get ready."""
        steps = (self.retries.end, self._refuse_waiting, self._rebalancing.stop, self.pool.stop_timers)
        self._take(steps, "calls that nobody will run were ended")

    @staticmethod
    def _take(steps: "Iterable[Callable[[], object]]", when: str, error: BaseException | None = None) -> None:
        """Run each of these steps, even if another one raises. `error`: an exception from an earlier step, to be handled alike."""
        faults = Faults(when)
        if error is not None:
            faults.note(error)
        for step in steps:
            with faults:
                step()
        faults.finish()

    def kill_all(self) -> None:
        """Kill every worker and start none. Their exits are reported later."""
        self.phase.advance(PhaseEvent.CUT)
        self._take((self._expect_nobody, self.pool.kill), "all workers were killed")

    def signal_all(self, signum: int) -> None:
        """Refuse calls, start no worker, and send every worker this signal. The signal need not end the workers."""
        self.refuse_calls()
        self.pool.stop_timers()
        self.pool.kill(signum)

    def abandon(self) -> None:
        """Kill the workers of a runner that was garbage-collected without being closed, and touch nothing else.

        The garbage collector may call this in any thread, at any point of the program, and the loop may be closed. If the loop
        still runs, the workers are killed from the loop: the calls end when the workers have ended, and no worker is replaced.
        """
        if self.loop.is_running():
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                self.loop.call_soon_threadsafe(self._abandon)
                return
        self._abandon()

    def _abandon(self) -> None:
        self.phase.advance(PhaseEvent.CUT)
        self.pool.kill()
