"""The supervisor: the imperative shell around the pure core.

Its parts turn events from users and workers into inputs of the core (dispatch, life cycles, replacement), and carry out the core's
decisions.

    submit ─▶ Dispatch ─▶ PoolWorker.send ─▶ channel ═▶ worker
    future ◀─ outcome  ◀─ Outcomes        ◀─ channel ◀═ worker
    exit of a worker ─▶ Life, Dispatch, Replacement ─▶ its started calls fail or are retried, the others wait again, and
                                                       another worker starts

The CallRegistry knows where each call is, the Pool owns the workers, and the Supervisor puts the parts together.
"""

import asyncio
import contextlib
from typing import TYPE_CHECKING, Any

from percore._calls.calls import Call, PendingCall
from percore._calls.context_variables import Contexts
from percore._calls.functions import Function, Functions
from percore._calls.policy import Policy
from percore._calls.shared_objects import Shares
from percore._common.log import Faults
from percore._common.options import RunnerOptions
from percore._common.worker_errors import RunnerBroken
from percore._protocol.interfaces import Engine
from percore._protocol.messages import CANCEL, Kind
from percore._scheduler.dispatch import Dispatch
from percore._scheduler.phase import PhaseEvent, RunnerPhase
from percore._supervisor.admission import Admission
from percore._supervisor.call_registry import CallRegistry
from percore._supervisor.pool import Pool
from percore._supervisor.pool_worker import PoolWorker
from percore._supervisor.rebalancing import Rebalancing
from percore._supervisor.submission import Submission

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable


class Supervisor:
    """Supervises the workers and calls of one runner. Only the thread of its loop may call its methods, except `abandon`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, options: RunnerOptions, engine: Engine) -> None:
        self.loop = loop
        self.options = options
        self.engine = engine
        self.store = store = engine.store
        self.dispatch: Dispatch[Any, PoolWorker] = Dispatch(options.concurrency, options.threads, options.per_key)
        self.shares = Shares(loop, store)
        self.phase = RunnerPhase()
        self.calls = CallRegistry(loop, self.dispatch, self.shares, self.phase, self)
        self._broadcasts = self.calls.broadcasts
        self.members: set[PoolWorker] = set()
        """All workers that have not ended. The pool adds and removes them."""
        self.functions = Functions(store, self.shares, self.members)
        self.known = self.functions.known
        self.policy = Policy(retries=options.retries) if options.retries else None
        """The policy of calls without options of their own; None: the defaults."""
        self.policy_of = Policy.checked
        """Checks call options. Kept here to save an import per view of the runner, since users may make a view for each call."""
        self.contexts = Contexts(options.contextvars, store) if options.contextvars else None
        self.admission = Admission(loop, options.max_pending) if options.max_pending is not None else None
        self._rebalancing = Rebalancing(self.loop, self.dispatch)
        self._on_progress: Callable[[], None] | None = None
        self._is_settling = False
        self.enders: set[Callable[[], None]] = set()
        """Functions to call when the runner stops accepting calls. Open maps, which may wait for inputs, register here."""
        self.submission = Submission(self.calls, self.functions, self.contexts)
        self.pool = Pool(options, engine, self.calls, self.members, self)
        self.slots, self.lifecycles = self.pool.slots, self.pool.lifecycles

    def advance(self) -> None:
        """Send all calls that can be sent now, and let a closing check whether it can go on.

        To be called when calls or workers have ended, and when workers have sent messages or read some.
        """
        try:
            if self.functions.retired:
                self.functions.forget_retired()
            if self.lifecycles.draining:
                self.lifecycles.look_drained()
            if self._broadcasts.waiting:
                self.calls.send_broadcasts()
            if self.pool.low:
                self.pool.relieve()
            if not self.dispatch.is_quiet():
                self._dispatch()
            self.look_idle()
        except BaseException as error:
            self._advance_despite(error)

    def _advance_despite(self, error: BaseException) -> None:
        """Run all steps of `advance` again, each isolated, after one of them raised this error."""
        steps = (
            self.functions.forget_retired,
            self.lifecycles.look_drained,
            self.calls.send_broadcasts,
            self.pool.relieve,
            self._dispatch,
            self.look_idle,
        )
        self._take(steps, "calls were sent to workers", error)

    def look_idle(self) -> None:
        """Let a closing check whether it can go on, unless calls are in `loose`, where the check would miss them."""
        if not self.phase.is_closing or self.calls.loose:
            return
        if not self.members:  # a closing runner does not replace dead workers
            self._expect_nobody()
        if self._on_progress is not None:
            self._on_progress()

    def _dispatch(self) -> None:
        send = self.calls.send_waiting
        send(Kind.TASK)
        send(Kind.THREAD)
        self._rebalancing.look()
        if self.dispatch.keys.strays and not self._is_settling and not self.dispatch.is_settled():
            self._is_settling = True
            self.loop.call_soon(self._settle)

    def _settle(self) -> None:
        """Move some calls with keys to their new workers, after the set of workers changed. One piece per iteration of the loop."""
        self._is_settling = False
        self.dispatch.settle()
        self._dispatch()

    # Ending

    def refuse_calls(self) -> None:
        """Accept no more calls and replace no dead workers. Waiting calls end when the last worker has ended. Idempotent."""
        self.phase.advance(PhaseEvent.CLOSE)
        self._take((self.end_maps, self.calls.refuse_delayed), "the runner took no more calls")

    def close(self, on_progress: "Callable[[], None]") -> None:
        """Refuse calls for the runner's only closing. `on_progress` is called whenever a call or a worker may have ended."""
        assert self._on_progress is None, "a supervisor has one closing"
        self._on_progress = on_progress
        self.refuse_calls()

    def fail(self, error: RunnerBroken) -> None:
        """Break the runner, because no worker can be started any more: end all waiting calls and open maps."""
        self.phase.fail(error)
        self._take((self.end_maps, self.calls.refuse_delayed, self.calls.refuse_waiting), "the runner broke")

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

    def unfinished(self) -> bool:
        """Return whether any call waits or runs, including cancelled calls that still run."""
        return bool(self.calls.waiting()) or any(member.calls for member in self.members)

    def cut(self) -> None:
        """End all waiting calls and cancel the running ones. The callers get RunnerClosed. A second call does nothing."""
        if self.phase.is_cut:
            return
        self.phase.advance(PhaseEvent.CUT)
        faults = Faults("calls were cancelled, since the runner closes")
        with faults:
            self.calls.refuse_waiting()
        for member in list(self.members):
            for call in reversed(list(member.calls.values())):  # last first: else a worker may begin the next
                with faults:
                    self._cut(member, call)
        faults.finish()

    def _cut(self, member: PoolWorker, call: PendingCall) -> None:
        if call.call_id in member.parked:
            self.calls.refuse(member.take(call.call_id))
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
        steps = (self.calls.refuse_delayed, self.calls.refuse_waiting, self._rebalancing.stop, self.pool.stop_timers)
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
