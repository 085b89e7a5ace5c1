"""The registry of calls: it knows where each pending call is. Every step of a call from its start to its end goes through it.

Every call has one owner. While it waits, this is a queue of Dispatch; once it is sent, this is the PoolWorker. A call leaves its
queue when it is sent or withdrawn, and its worker when its outcome arrives, when it is handed back, or when the worker dies. Two
kinds of calls wait elsewhere: those between two attempts in Retries, and those of broadcasts in Broadcasts.
"""

import os
from collections import Counter, deque
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final, Protocol

from percore._calls.calls import Awaited, Outcome, PendingCall
from percore._calls.items import Batch, RunningMap
from percore._calls.shared_objects import Shares
from percore._common.errors import as_error
from percore._common.fault_points import POINTS, point
from percore._common.log import Faults
from percore._common.sure_handles import surely_later
from percore._common.worker_errors import WorkerDied
from percore._protocol.messages import CANCEL, Kind
from percore._scheduler.batching import Run
from percore._scheduler.dispatch import Dispatch
from percore._scheduler.phase import RunnerPhase
from percore._supervisor.broadcasts import Broadcasts
from percore._supervisor.measuring import measure_wait
from percore._supervisor.pool_worker import PoolWorker
from percore._supervisor.retries import Retries
from percore._supervisor.time_limits import TimeLimits, is_late, late
from percore._supervisor.timing import Turn

if TYPE_CHECKING:
    from collections.abc import Callable

    from percore._supervisor.rates import Rates


PIECE: Final = 500
"""Calls that one iteration of the loop ends when a runner closes or breaks: a millisecond or two of work."""

READ: Final[tuple[Any, ...]] = (Ellipsis,)
"""The body of a call whose arguments were read and released: no other worker can run it."""


class Progress(Protocol):
    """The supervisor, as its parts see it."""

    def advance(self) -> None:
        """Send all calls that can be sent now. To be called when calls or workers have ended, and on messages of workers."""

    def look_idle(self) -> None:
        """Let a closing check whether it can go on. To be called when a call has ended that took no place."""

    def workers_changed(self) -> None:
        """Tell who watches the runner from outside that a worker has started, become ready or died."""


class Watch(Protocol):
    """Watches the workers for as long as they have calls. It is armed while it does so, or if there is nothing to watch."""

    @property
    def is_armed(self) -> bool: ...

    def arm(self) -> None:
        """Watch from now on, as long as workers have calls."""


class CallRegistry:
    """The pending calls of one runner. Only the thread of the loop may call its methods."""

    def __init__(
        self,
        turn: Turn,
        dispatch: Dispatch[Any, PoolWorker],
        shares: Shares,
        phase: RunnerPhase,
        progress: Progress,
        members: set[PoolWorker],
    ) -> None:
        """`members`: all workers that have not ended."""
        self.turn = turn
        self.loop = turn.loop
        self.dispatch = dispatch
        self.shares = shares
        self.store = shares.store
        self.phase = phase
        self.retries = Retries(phase)
        self.broadcasts = Broadcasts()
        self.members = members
        self.limits = TimeLimits(self, members)
        self.make_rates: Callable[[], Rates]
        """The supervisor sets it."""
        self.loose: set[PendingCall] = set()
        """Calls in no queue and no worker, about to be ended or queued again. User code may cancel them meanwhile."""
        self.is_moving = False
        """Whether calls are moved: one may have left its queue or its worker, and be nowhere yet.

        Who sets it sets it back in a `finally`, before any call of a function (a Ctrl-C may come there), and then calls `moved`.
        """
        self.withdrawn: set[PendingCall] = set()
        """Calls that have no worker, and that user code has cancelled meanwhile, in a garbage collection."""
        self.is_withdrawing = False
        """Whether they are withdrawn now."""
        self.is_refusing = False
        """Whether the next iteration of the loop ends further calls that wait, since no more may begin."""
        self._unsent_cancels: deque[tuple[PoolWorker, PendingCall, int, int | None, bool]] = deque()
        """Calls that were cancelled while their worker was sending, each with its id, what was wanted, and whether it was done."""
        self.watch: Watch
        """Armed whenever calls are sent. The pool sets it."""
        self._progress = progress
        self._pid = os.getpid()

    @cached_property
    def rates(self) -> "Rates":
        """The rates of keys, made for the first one. From then on it is an attribute, as each call with a rate asks for it."""
        return self.make_rates()

    def stop_clocks(self) -> None:
        """Stop the timers of limits and rates, since all calls have ended. Idempotent."""
        for clock in (self.limits, self.limits.hard, vars(self).get("rates")):
            if clock is not None:
                clock.stop()

    def catch_up(self) -> None:
        """Go on with what the loop has lost."""
        self.turn.catch_up()
        rates: Rates | None = vars(self).get("rates")
        steps = [self.limits.catch_up, *([] if rates is None else [rates.catch_up])]
        if self.withdrawn:
            steps.append(self.moved)
        if self.is_refusing:
            steps.append(self._refuse_more)
        if self._unsent_cancels:
            steps.append(self._cancel_sent)
        steps.append(self.dispatch.catch_up)
        Faults("lost callbacks were made up for").run(*steps)

    def recount(self) -> None:
        """Go on after a step that a Ctrl-C has interrupted: it may have lost count of the calls of a key, or a turn."""
        held = [call for member in list(self.members) for call in list(member.calls.values())]
        self.dispatch.recount(Counter(call.key for call in held if call.key is not None and call.kind != Kind.BROADCAST))

    def pending(self) -> list[PendingCall]:
        """Return all calls that have not ended, and maybe some that have, but no items that wait to be sent in batches."""
        found: list[PendingCall] = self.dispatch.calls()
        found += self.broadcasts.calls()
        found += list(self.retries.delayed)
        for member in list(self.members):
            found += list(member.calls.values())  # at once: a garbage collection may run user code that makes or cancels calls
        return found

    def withdraw(self, call: Awaited) -> None:
        """Withdraw a call of `run` whose await was cancelled."""
        if not call.is_over:
            call.is_over = True
            self.cancelled(call)

    def accept(self, call: PendingCall) -> None:
        """Send a call, or queue it. An error ends the call.

        No code of the user knows the call yet: so it is not cancelled between its choice of a worker and its sending.
        """
        meter = call.function.meter
        meter.left = left = meter.left - 1
        call.accepted = 0 if left else meter.mark()
        member = None
        try:
            member = self.dispatch.submitted(call, call.queue)
            if member is not None:
                if not self.watch.is_armed:
                    self.watch.arm()
                member.send(call)
        except BaseException as error:
            self.failed_with(call, error, member)

    def accept_known(self, call: PendingCall, begin: "Callable[[], bool]") -> None:
        """As `accept`, for a call that its user knows, and may cancel meanwhile: a stream.

        `begin` is called once a cancellation finds the call here. It returns False if the call has ended before.
        """
        meter = call.function.meter
        meter.left = left = meter.left - 1
        call.accepted = 0 if left else meter.mark()
        if not self.watch.is_armed:
            self.watch.arm()
        outer, self.is_moving = self.is_moving, True
        try:
            if begin():
                self._accept_again(call)
            else:
                self.release(call)
        finally:
            self.is_moving = outer
            self.moved()

    def broadcast(self, call: PendingCall, member: PoolWorker) -> None:
        """Send a call of a broadcast to its worker, or queue it until the worker has a place."""
        meter = call.function.meter
        meter.left = left = meter.left - 1
        call.accepted = 0 if left else meter.mark()
        if not self.watch.is_armed:
            self.watch.arm()
        outer, self.is_moving = self.is_moving, True
        try:
            if not self.broadcasts.has_place(member):
                self.broadcasts.add(call, member)
            elif not self._was_withdrawn(call):
                member.send(call)
        except BaseException as error:
            self.failed_with(call, error, member)
        finally:
            self.is_moving = outer
            self.moved()

    def send_broadcasts(self) -> None:
        """Send the calls of broadcasts whose workers have a place now, and end those whose workers take no more calls."""
        outer, self.is_moving = self.is_moving, True
        try:
            for call, member, is_seated in self.broadcasts.fill(self.dispatch.seats):
                try:
                    if not is_seated:
                        self.hand_on(member, call)
                    elif not self._was_withdrawn(call):
                        member.send(call)
                except BaseException as error:
                    self.failed_with(call, error, member)
        finally:
            self.is_moving = outer
            self.moved()

    def again(self, call: PendingCall, delay: float) -> None:
        """Attempt a call once more after `delay` seconds. The call has left its worker, and keeps its pickled arguments."""
        plan = call.plan
        assert plan is not None
        plan.failed += 1
        plan.late = plan.verdict = plan.started = None
        if call.begin_by is not None:  # the call has begun once, and nothing limits how long it may wait after that
            call.begin_by = None
            if plan.terms is not None:
                plan.set_begin_by(None)
        call.repeated()
        if not self.phase.begins or (delay and not self.phase.delays) or call.is_dropped() or call.done():
            # The attempt was decided on earlier, and the call's thread has only ended now; or user code has cancelled the call.
            self.refuse(call)
        elif delay:
            plan.timer = surely_later(self.loop, delay, self._attempt, call)
            self.retries.delayed.add(call)
        else:
            self._accept_again(call)

    def _attempt(self, call: PendingCall) -> None:
        if call not in self.retries.delayed:  # a Ctrl-C has ended this attempt in its middle
            return
        if call.is_dropped():
            call.drop()
            self.cancelled(call)
            return
        self._accept_again(call)

    def _accept_again(self, call: PendingCall) -> None:
        """As `accept`, for a call that its user may cancel meanwhile, in code that a garbage collection runs."""
        member, outer, self.is_moving = None, self.is_moving, True
        try:
            self.retries.drop(call)
            if call.plan is not None and call.plan.policy.rate is not None:
                self.rates.limit(call, call.plan.policy)
            member = self.dispatch.submitted(call, call.queue)
            if member is not None and not self._was_withdrawn(call):
                member.send(call)
        except BaseException as error:
            self.failed_with(call, error, member)
        finally:
            self.is_moving = outer
            self.moved()

    def send_waiting(self, kind: int) -> None:
        """Send the waiting calls of one kind, as far as workers have room."""
        if not self.watch.is_armed:
            self.watch.arm()
        outer, self.is_moving = self.is_moving, True
        try:
            for call, member in self.dispatch.fill(kind):
                try:
                    if call.is_dropped():
                        call.drop()  # it is cancelled; its task will call `withdraw` soon
                        if call.key is not None:
                            self.dispatch.unsent(call)
                    elif not self.withdrawn or not self._was_withdrawn(call):
                        member.send(call)
                except BaseException as error:
                    self.failed_with(call, error, member)
        finally:
            self.is_moving = outer
            self.moved()

    def _was_withdrawn(self, call: PendingCall) -> bool:
        """Whether a call was cancelled since it was taken for a worker: then it is not sent, and has ended."""
        if call not in self.withdrawn:
            return False
        self.release(call)
        call.left()
        if call.key is not None:
            self.dispatch.unsent(call)
        return True

    def moved(self) -> None:
        """Withdraw the calls that were cancelled while calls were moved. To be called when that has ended.

        Each of them is in a worker by now, waits, or was dropped on its turn as one whose cancellation is counted: so count it.
        """
        if self.is_moving or not self.withdrawn:
            return
        outer, self.is_withdrawing = self.is_withdrawing, True
        try:
            while self.withdrawn:
                self.cancelled(self.withdrawn.pop())
        finally:
            self.is_withdrawing = outer

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
                self.dispatch.unsent(call)  # the key counts it as sent
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

    def take_back(self, call: PendingCall) -> None:
        """Queue a call again that was chosen for a worker which may not begin it."""
        if isinstance(call, Batch):
            call.map.left(call)
            run = call.rest(0)
            if run is not None:
                self.put_back(call.map, run)
        else:
            self.dispatch.untaken(call, call.queue)

    def hand_on(self, member: PoolWorker, call: PendingCall) -> None:
        """Give a broadcast's call that has not begun to the worker that has taken over. Without one, end it."""
        successor = next((seat for seat in self.dispatch.seats if seat.index == member.index and seat is not member), None)
        if successor is None or call.done():
            self.unanswered(member, call)
        else:
            self.broadcast(call, successor)

    def unanswered(self, member: PoolWorker, call: PendingCall) -> None:
        """End a broadcast's call that has not begun in its worker and never will. Its error is WorkerDied."""
        try:
            self.release(call)
            if not call.done():
                why, name = member.killed_why, call.function.name
                code = None if why else 0  # a worker that was asked to end exits with 0 once its calls have ended
                node = member.worker.node
                call.set_exception(WorkerDied(member.pid, code, name, None, started=False, attempts=0, why=why, node=node))
        except BaseException as error:
            self.failed_with(call, error)

    def cancelled(self, call: PendingCall) -> None:
        """Withdraw a cancelled call if it waits, or ask its worker to cancel it."""
        if os.getpid() != self._pid:  # a copy of the call in a fork of this process, which has no workers
            return
        member: PoolWorker | None = call.member
        if member is None and self.is_moving:
            self.withdrawn.add(call)
        elif member is None:
            self.release(call)
            if call.kind == Kind.BROADCAST:
                self.broadcasts.remove(call)
            elif call in self.retries.delayed:
                self.retries.drop(call)
            elif call not in self.loose and type(call) is not Batch:  # no batch waits, and one that an error has lost is nowhere
                self.dispatch.ended(call, call.queue)
            self._progress.look_idle()
        elif call.call_id in member.parked:
            self.release(member.take(call.call_id))
            self._progress.advance()
        elif not self.phase.is_cut:  # otherwise closing has cancelled it already; a second cancellation would hit its clean-up
            if member.is_sending:
                self._cancel_later(member, call)
            else:
                member.tell(CANCEL, call.call_id, call.wanted)

    def _cancel_later(self, member: PoolWorker, call: PendingCall) -> None:
        if not self._unsent_cancels:
            self.loop.call_soon(self._cancel_sent)
        self._unsent_cancels.append((member, call, call.call_id, call.wanted, call.done()))

    def _cancel_sent(self) -> None:
        """Let workers cancel calls that are sent by now, unless a later CANCEL, or that of a closing, has replaced this one."""
        faults = Faults("calls that had just been sent were cancelled")
        while self._unsent_cancels:
            member, call, call_id, wanted, was_done = self._unsent_cancels.popleft()
            if member.calls.get(call_id) is not call or call.wanted != wanted or (self.phase.is_cut and not was_done):
                continue
            with faults:
                if call_id in member.parked:
                    self.release(member.take(call_id))
                    self._progress.advance()
                else:
                    member.tell(CANCEL, call_id, wanted)
        faults.finish()

    def has_room(self) -> None:
        """Send waiting calls: a stream has given its place back, since it waits for its consumer."""
        self._progress.advance()

    def expire(self, call: PendingCall) -> None:
        """End a call that was not sent, because its time to begin is over."""
        member: PoolWorker | None = call.member
        error = late(call)
        if member is None:
            self.release(call)
            call.set_exception(error)
            if call.kind == Kind.BROADCAST:
                self.broadcasts.remove(call)
            else:
                self.dispatch.ended(call, call.queue)
            self._progress.look_idle()
        else:
            self.release(member.take(call.call_id))
            call.set_exception(error)
            self._progress.advance()

    def returned(self, call: PendingCall) -> None:
        """Queue a call again that its worker has handed back or not begun, or end it if its time to begin is over."""
        if not is_late(call):
            self.dispatch.returned([(call, call.queue)])
            return
        self.release(call)
        if not call.done():
            call.set_exception(late(call))

    def release(self, call: Outcome) -> None:
        """Release the call's arguments and the shared objects it holds. No attempt of the call will follow."""
        if self.withdrawn:
            self.withdrawn.discard(call)
        if call.body is None:  # a batch: its items are scalars or small pickles, which hold no slots
            return
        self._free(call, ())
        if self.shares.held:
            self.shares.drop(call)

    def ended(self, member: PoolWorker, target: Outcome, *, failed: bool = False, began: bool = True) -> None:
        """Count a call, or an item of a batch, that has its outcome, and free its place in its worker.

        `began`: False for a call that was cancelled before it began.
        """
        if began:
            tally = target.function.meter.at(member.index)
            tally.ended += 1
            tally.failed += failed
            if target.accepted:
                measure_wait(member, target)  # before it leaves its place
        target.leave(member)
        self.release(target)
        member.done += 1
        member.failed += failed
        if POINTS:
            point("supervisor.outcome.delivered")

    def unpickled(self, call: PendingCall) -> None:
        """Release the call's arguments, because no worker will unpickle them again. The call keeps its shared objects."""
        if type(call.body) is not tuple:  # else there was nothing to unpickle
            self._free(call, b"" if call in self.shares.held else READ)  # not a tuple: `receive` then calls `release`

    def _free(self, call: Outcome, body: tuple[Any, ...] | bytes) -> None:
        before, call.body = call.body, body
        if type(before) is int:
            self.store.discard(before)
            if POINTS:
                point("supervisor.call.released")

    def refuse(self, call: PendingCall) -> None:
        """End a call that no worker will run."""
        self.release(call)
        if call.done():
            return
        if self.phase.broken is not None:
            call.refuse(self.phase.refusal)
        else:
            call.cut_off()

    def refuse_delayed(self) -> None:
        """End all calls that wait for their next attempt, because the runner closes or is broken."""
        faults = Faults("calls between two attempts were ended")
        for call in list(self.retries.delayed):
            with faults:
                self.retries.drop(call)
                self.refuse(call)
            if faults.last is not None:
                self.give_up(call, faults.last, faults)
        faults.finish()

    def refuse_waiting(self) -> None:
        """End all calls that wait for a worker: some hundred now, and the others in the next iterations of the loop."""
        if self.is_refusing:
            return
        calls: list[PendingCall] = []
        faults = Faults("calls that nobody will run were ended")
        has_more = True
        outer, self.is_moving = self.is_moving, True
        try:
            with faults:
                has_more = self.dispatch.withdraw(calls, PIECE)
            if faults.last is not None:
                with faults:
                    has_more = self.dispatch.withdraw(calls, PIECE)
            faults.surely(lambda: calls.extend(self.broadcasts.withdraw()))
            self.loose.update(calls)
        finally:
            self.is_moving = outer
            with faults:
                self.moved()
        for call in calls:
            with faults:
                self.refuse(call)
            if faults.last is not None:
                self.give_up(call, faults.last, faults)
        self.loose.difference_update(calls)
        if has_more:
            self.is_refusing = True
            self.loop.call_soon(self._refuse_more)
        faults.finish()

    def _refuse_more(self) -> None:
        self.is_refusing = False
        self.refuse_waiting()
        self._progress.look_idle()

    def waiting(self) -> int:
        """Return the number of calls that wait for a place or for their next attempt."""
        return self.dispatch.waiting() + len(self.retries.delayed) + len(self.broadcasts)


def was_read(call: PendingCall) -> bool:
    """Whether a worker has said that it has read the arguments, so that they are released."""
    return call.body is READ or call.body == b""
