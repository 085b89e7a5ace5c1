"""Ends the calls of a dead worker: calls that had begun fail or are attempted again, the others go back to the queues."""

from collections.abc import Callable, Collection, Iterable

from percore._calls.calls import Outcome, PendingCall
from percore._calls.items import Batch
from percore._common.log import Faults
from percore._protocol.interfaces import Fate
from percore._protocol.messages import Kind
from percore._scheduler.lifecycle import State
from percore._supervisor.call_registry import CallRegistry, was_read
from percore._supervisor.pool_worker import PoolWorker


class Deaths:
    """Ends the calls of dead workers."""

    def __init__(self, calls: CallRegistry, members: Collection[PoolWorker]) -> None:
        """`members`: all workers that have not ended."""
        self._calls = calls
        self._phase = calls.phase
        self._members = members

    def end_calls(self, member: PoolWorker, faults: Faults) -> bool:
        """Fail or retry the calls that had begun, and queue the others again. Return whether any call had begun.

        Each call is handled separately. If percore fails to handle one, that call ends with WorkerDied, caused by the failure.
        """
        has_begun = False
        with faults:
            member.note_running()
        # A call stays with this worker until it is handled, because retry_on and backoff may cancel any of the calls.
        for call in list(member.calls.values()):
            with faults:
                fate = member.fate(call)
                has_begun |= fate.begun is not False
                self._end(member, call, fate, faults)
            if faults.last is not None:
                self._give_up(member, call, faults)
        self._return(member, faults)
        if member.is_interrupted:
            with faults:
                self._calls.recount()
        return has_begun

    def _end(self, member: PoolWorker, call: PendingCall, fate: Fate, faults: Faults) -> None:
        if isinstance(call, Batch):
            items = call.size if fate.begun is None else fate.items
            self._lost_items(member, call, items, fate.age, faults)
            return
        began = fate.begun is not False or was_read(call)  # a broken worker may have read the arguments without a mark
        if call.done():
            if began:
                _count(member, call)
        elif began or self._phase.is_cut:
            delay = self._lost(member, call, fate.age, began=began)
            outer, self._calls.is_moving = self._calls.is_moving, True
            try:
                member.take(call.call_id)
                if delay is not None:
                    self._calls.again(call, delay)
            finally:
                self._calls.is_moving = outer
                self._calls.moved()

    def _give_up(self, member: PoolWorker, call: PendingCall, faults: Faults) -> None:
        """End a call for which the last step failed. The error is WorkerDied, since the call may have begun in the dead worker."""
        fault = failure = faults.last
        assert fault is not None
        with faults:
            failure = member.death(call)
            failure.__cause__ = fault
        self._calls.give_up(call, failure or fault, faults)

    def _lost(self, member: PoolWorker, call: PendingCall, age: float | None, *, began: bool = True) -> float | None:
        """Fail a call of the dead worker, or return the delay before its next attempt.

        `age`: seconds since the call began; None: unknown. `began`: False only while all calls are being cut off.
        """
        if self._phase.is_cut:
            self._calls.release(call)
            call.cut_off()
        else:
            death = member.death(call, age)
            # If the call timed out earlier, the timeout is what failed, and `late` is the delay before the next attempt. The death
            # only ends the thread.
            plan = call.plan
            if plan is None or plan.late is None:
                delay, error = self._calls.retries.next(call, death)
            elif plan.verdict is not None:
                delay, error = None, plan.verdict
            else:
                delay, error = (None if call.is_dropped() else plan.late), death
            if delay is not None and not call.done():
                member.retried += 1
                return delay
            self._calls.release(call)
            if not call.done():
                call.set_exception(error)
        _count(member, call, began=began)
        return None

    def _lost_items(self, member: PoolWorker, batch: Batch, items: int, age: float | None, faults: Faults) -> None:
        """As `_lost`, for the items of a batch: the first `items` had begun, the others go back to the queue."""
        inner = Faults(faults.when)  # the caller reads `faults.last` for the batch as a whole
        for index in batch.began(items):
            item = batch.target(index)
            batch.settle(index)
            member.shrink(1)
            if item.done():
                _count(member, item)
                continue
            self._lost_item(member, item.renewed(), age, inner)
        member.take(batch.call_id)
        run = batch.rest(items)
        if run is not None:
            self._calls.put_back(batch.map, run)
        inner.finish()

    def _lost_item(self, member: PoolWorker, item: PendingCall, age: float | None, faults: Faults) -> None:
        """As `_lost`, for an item that is a call of its own from now on, and is nowhere yet."""
        outer, self._calls.is_moving = self._calls.is_moving, True
        try:
            with faults:
                delay = self._lost(member, item, age)
                if delay is not None and not item.done():
                    self._calls.again(item, delay)
            if faults.last is not None:
                self._give_up(member, item, faults)
        finally:
            self._calls.is_moving = outer
        with faults:
            self._calls.moved()

    def _return(self, member: PoolWorker, faults: Faults) -> None:
        """Queue the calls that the dead worker had not begun again, or end them if no worker will run them."""
        back: list[PendingCall] = []

        def each(step: Callable[[PendingCall], object], calls: Iterable[PendingCall]) -> None:
            for call in calls:
                with faults:
                    step(call)
                if faults.last is not None:
                    self._give_up(member, call, faults)

        outer, self._calls.is_moving = self._calls.is_moving, True
        try:
            each(lambda call: back.append(member.take(call.call_id)), list(member.calls.values()))
            self._calls.loose.update(back)  # the code that runs when one call ends may cancel the others
            each(lambda call: self._refuse(member, call), back)
            self._calls.loose.difference_update(back)
            each(self._requeue, reversed(back))  # each goes to the head of its queue, so the first one goes last
        finally:
            self._calls.is_moving = outer
            with faults:
                self._calls.moved()

    def _requeue(self, call: PendingCall) -> None:
        if call.done():
            self._calls.release(call)
        else:
            self._calls.returned(call)

    def _refuse(self, member: PoolWorker, call: PendingCall) -> None:
        """End a call that had not begun, if no worker will run it. `_lost_items` has handled batches."""
        if call.done():
            self._calls.release(call)
        elif self._is_hopeless() or call.kind == Kind.BROADCAST:
            self._calls.release(call)
            call.set_exception(member.death(call, started=False))

    def _is_hopeless(self) -> bool:
        """Return whether no worker will run the waiting calls: the runner is broken, or closing and without a live worker."""
        if self._phase.broken is not None:
            return True
        return self._phase.is_closing and not any(m.life.state in (State.STARTING, State.READY) for m in self._members)


def _count(member: PoolWorker, call: Outcome, *, began: bool = True) -> None:
    """Count a call, or an item of a batch, that has ended with its worker."""
    member.done += 1
    member.failed += 1
    if began:
        call.function.meter.lost(member.index)
