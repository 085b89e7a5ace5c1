"""The supervisor: the imperative shell around the pure core.

Its parts turn events from users and workers into inputs of the core (dispatch, life cycles, replacement), and carry out the core's
decisions.

    submit ─▶ Dispatch ─▶ PoolWorker.send ─▶ channel ═▶ worker
    future ◀─ outcome  ◀─ Outcomes        ◀─ channel ◀═ worker
    exit of a worker ─▶ Life, Dispatch, Replacement ─▶ its started calls fail or are retried, the others wait again, and
                                                       another worker starts

The CallRegistry knows where each call is, the Pool owns the workers, Closing ends both, and the Supervisor puts the parts together.
"""

import asyncio
from typing import TYPE_CHECKING, Any

from percore._calls.functions import Function, Functions
from percore._calls.meters import Meters
from percore._calls.policy import Policy
from percore._calls.shared_objects import Shares
from percore._common.log import Faults
from percore._common.options import RunnerOptions
from percore._common.system import IS_FREE_THREADED, debug_wanted, metrics_wanted
from percore._common.worker_errors import RunnerBroken
from percore._protocol.interfaces import Engine
from percore._protocol.messages import Kind
from percore._scheduler.dispatch import Dispatch
from percore._scheduler.phase import RunnerPhase
from percore._supervisor.burials import WorkerObserver
from percore._supervisor.call_registry import CallRegistry
from percore._supervisor.closing import Closing
from percore._supervisor.nested import Nested
from percore._supervisor.pool import Pool
from percore._supervisor.publication import Publication
from percore._supervisor.rebalancing import Rebalancing
from percore._supervisor.streams import Streams
from percore._supervisor.submission import Submission
from percore._supervisor.timing import Turn

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from percore._calls.calls import Call
    from percore._calls.context_variables import Contexts
    from percore._monitor.statistics import Statistics
    from percore._monitor.usage import ProcessUsage
    from percore._protocol.interfaces import Worker
    from percore._supervisor.admission import Admission
    from percore._supervisor.audit import Audit
    from percore._supervisor.hard_limits import HardLimits
    from percore._supervisor.pool_worker import PoolWorker
    from percore._supervisor.rates import Rates
    from percore._supervisor.reclaiming import Reclaiming


class Supervisor:
    """Supervises the workers and calls of one runner. Only the thread of its loop may call its methods."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, options: RunnerOptions, engine: Engine, observer: WorkerObserver | None = None
    ) -> None:
        """`observer` is told of new workers, and of each death that nobody asked for."""
        self.loop = loop
        self.options = options
        self.engine = engine
        self.store = store = engine.store
        turn = Turn(loop)
        self.dispatch: Dispatch[Any, PoolWorker] = Dispatch(options.concurrency, options.threads, options.per_key, turn.time)
        self.shares = Shares(loop, store)
        self.phase = RunnerPhase()
        self.members: set[PoolWorker] = set()
        """All workers that have not ended. The pool adds and removes them."""
        self.calls = CallRegistry(turn, self.dispatch, self.shares, self.phase, self, self.members)
        self._broadcasts = self.calls.broadcasts
        self.meters = Meters(is_on=metrics_wanted())
        self.functions = Functions(store, self.shares, self.members, self.meters)
        self.known = self.functions.known
        self.policy = Policy(retries=options.retries) if options.retries else None
        """The policy of calls without options of their own; None: the defaults."""
        self.policy_of = Policy.checked
        """Checks call options. Kept here to save an import per view of the runner, since users may make a view for each call."""
        self.contexts = self._contexts() if options.contextvars or options.tracing else None
        self.admission = None if options.max_pending is None else self._admission(options.max_pending)
        self._rebalancing = Rebalancing(self.loop, self.dispatch)
        self._is_settling = False
        self.submission = Submission(self.calls, self.functions, self.contexts)
        self.nested = Nested(self.calls, options.concurrency, options.retries, self.meters)
        self.pool = pool = Pool(options, engine, self.calls, self.members, self, self.nested, self.meters, observer)
        self._limits = self.calls.limits
        self._limits.make_hard, self.calls.make_rates = self._hard_limits, self._rates
        self.slots, self.lifecycles = pool.slots, pool.lifecycles
        self._blocked_loops = pool.blocked_loops
        self._publication = Publication(loop, self, pool.blocked_loops, is_on=self.meters.is_on)
        watch: Publication | Reclaiming = self._publication
        self._waker: Reclaiming | None = None
        if IS_FREE_THREADED and engine.rouse is not None:
            watch = self._waker = self._reclaiming(loop, engine.rouse)
        self.calls.watch = watch
        self.closing = Closing(engine, self.calls, pool, self.admission, self._rebalancing, watch, options.kill_after)
        self.streams = Streams(loop, self.submission, self.contexts, self.admission, self.closing)
        self._audit = self._new_audit() if debug_wanted() else None

    # Parts that few runners need are imported for those that do: so the start of the others takes less time.

    def _contexts(self) -> "Contexts":
        from percore._calls.context_variables import Contexts

        return Contexts(self.options.contextvars, self.store, self.options.tracing)

    def _admission(self, most: int) -> "Admission":
        from percore._supervisor.admission import Admission

        return Admission(self.loop, most)

    def _hard_limits(self) -> "HardLimits":
        from percore._supervisor.hard_limits import HardLimits

        return HardLimits(self.calls, self.pool, self.options.kill_after, sees_starts=self.engine.sees_starts)

    def _rates(self) -> "Rates":
        from percore._supervisor.rates import Rates

        return Rates(self.loop, self.dispatch, self, sees_starts=self.engine.sees_starts)

    def _new_audit(self) -> "Audit":
        from percore._supervisor.audit import Audit

        return Audit(self.loop, self.calls, self.pool)

    def _reclaiming(self, loop: asyncio.AbstractEventLoop, rouse: "Callable[[], object]") -> "Reclaiming":
        from percore._supervisor.reclaiming import Reclaiming

        return Reclaiming(loop, self, self._publication, rouse)

    def advance(self) -> None:  # noqa: C901  # steps in a row
        """Send all calls that can be sent now, and let a closing check whether it can go on.

        To be called when calls or workers have ended, and when workers have sent messages or read some.
        """
        try:
            if self.functions.retired:
                self.functions.forget_retired()
            if self.lifecycles.draining or self.pool.low or self._blocked_loops.told:
                self._look_workers()
            if self._broadcasts.waiting:
                self.calls.send_broadcasts()
            hard = self._limits.hard
            if hard is not None and hard.overruns.calls:
                hard.look()
            if self.nested.rooms:
                self.nested.look_at_keys()
            if self.nested.held:  # before other calls take the places
                self.nested.resume()
            if not self.dispatch.is_quiet():
                self._dispatch()
            if self.phase.is_closing:
                self.closing.look()
            if self._audit is not None:
                self._audit.look()
        except BaseException as error:
            faults, calls = Faults("calls were sent to workers"), self.calls
            faults.note(error)
            drain, relieve = self.lifecycles.look_drained, self.pool.relieve
            resume, look = self.nested.resume, self.closing.look
            faults.run(self.functions.forget_retired, drain, calls.send_broadcasts, relieve, resume, self._dispatch, look)

    def _look_workers(self) -> None:
        self.lifecycles.look_drained()
        self.pool.relieve()
        self._blocked_loops.look_again()

    def look_idle(self) -> None:
        """Implement `Progress`."""
        self.closing.look()

    def fail(self, error: RunnerBroken) -> None:
        """Implement `Keeper`."""
        self.closing.fail(error)

    def workers_changed(self) -> None:
        """Implement `Progress`."""
        self._publication.touch()

    def statistics(self, most: int | None = None) -> "Statistics":
        """Implement `Published`."""
        from percore._supervisor.snapshot import snapshot  # not needed for a start

        return snapshot(self, is_here=True, most=most)

    def is_busy(self) -> bool:
        """Implement `Published`."""
        # Not `> 0`: a wrong count, after a Ctrl-C, is set right while the runner is busy.
        return self.calls.waiting() != 0 or any(member.calls for member in self.members)

    def roles(self) -> "list[tuple[str, Worker]]":
        """Return the workers with their roles, as records of usage have them, by slot."""
        members = sorted(self.members, key=lambda member: (member.index, member.generation))
        return [(f"worker {member.index}", member.worker) for member in members]

    def catch_up(self) -> None:
        """Implement `Published`."""
        steps = [self.calls.catch_up, self.pool.catch_up, self._rebalancing.catch_up, self.closing.catch_up]
        if self._waker is not None:
            steps.append(self._waker.catch_up)
        if self._is_settling:
            steps.append(self._settle)
        Faults("lost callbacks were made up for").run(*steps)

    def has_nodes(self) -> bool:
        """Implement `Published`."""
        return any(member.worker.node for member in self.members)

    async def usage_elsewhere(self) -> "Sequence[ProcessUsage]":
        """Implement `Published`."""
        return await self.engine.usage_elsewhere(self.roles())

    def figures(self) -> tuple[int, int, int]:
        """Return how many workers there should be, how many are ready, and how many calls are pending. Any thread may call this."""
        slots = tuple(self.slots)
        ready = sum(slot.current is not None and slot.current.is_ready for slot in slots)
        return len(slots), ready, self.calls.waiting() + sum(member.pending for member in list(self.members))

    def busy(self) -> tuple[int, int]:
        """Return how many workers have calls, and how many workers there should be."""
        return sum(bool(member.calls) for member in self.members), len(self.slots)

    def _dispatch(self) -> None:
        if not self.phase.begins:  # the calls that wait are about to be ended
            return
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
        call: Call | None = None
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
            calls.clear()  # the traceback of an error refers to this frame: a cycle that would keep the callers' locals alive
            call = None
