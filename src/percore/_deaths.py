"""What becomes of the calls of a dead worker: those that had begun fail, or are attempted again; the others go elsewhere."""

import time
from typing import TYPE_CHECKING

from percore._broken import WorkerDied
from percore._calls import Awaited, Call, is_dropped
from percore._faults import Faults
from percore._items import Batch, Item
from percore._member import Member, Unit
from percore._messages import Kind

if TYPE_CHECKING:
    from percore._supervisor import Supervisor


class Deaths:
    """Ends the calls of dead workers."""

    def __init__(self, supervisor: "Supervisor") -> None:
        self._supervisor = supervisor

    def end_calls(self, member: Member, exitcode: int | None, faults: Faults) -> bool:
        """Fail the calls that had begun, take back those that had not. Whether any had begun.

        Each by itself: one that percore fails to end so ends with that failure.
        """
        now = time.monotonic()
        has_begun = False
        # Until what becomes of it is settled, a call stays this worker's: retry_on and backoff may cancel any of them.
        for call in list(member.calls.values()):
            with faults:
                began = member.began(call)
                has_begun |= began is not None
                self._end(member, call, began, exitcode, now, faults)
            if faults.last is not None:
                self._give_up(member, call, exitcode, faults)
        self._return(member, exitcode, faults)
        return has_begun

    def _end(
        self, member: Member, call: Unit, began: tuple[float, int] | None, exitcode: int | None, now: float, faults: Faults
    ) -> None:
        begun_at, items = began or (now, 0)
        if isinstance(call, Batch):
            self._lost_items(member, call, items, exitcode, now - begun_at, faults)
        elif not call.done() and (began is not None or self._supervisor.is_cut):
            delay = self._lost(member, call, exitcode, now - begun_at)
            member.take(call.call_id)
            if delay is not None:
                self._supervisor.attempts.again(call, delay)

    def _give_up(self, member: Member, call: Unit, exitcode: int | None, faults: Faults) -> None:
        """End a call with which the last step has failed: its worker has died, and it may have begun."""
        fault = failure = faults.last
        assert fault is not None
        with faults:
            failure = WorkerDied(member.pid, exitcode, call.function.name)
            failure.__cause__ = fault
        self._supervisor.give_up(call, failure or fault, faults)

    def _lost(self, member: Member, call: Awaited | Call | Item, exitcode: int | None, age: float) -> float | None:
        """A call had begun in a worker that has died: it fails, or there is a delay to its next attempt."""
        supervisor = self._supervisor
        if supervisor.is_cut:
            supervisor.release(call)
            call.cut_off()
        else:
            attempts = 1 if call.plan is None else call.plan.failed + 1
            death = WorkerDied(member.pid, exitcode, call.function.name, age, attempts=attempts)
            death.__cause__ = member.failure
            # Its thread may have run for too long: then that is what has failed, and now the thread has ended.
            late = None if call.plan is None else call.plan.late
            delay, error = supervisor.attempts.next(call, death) if late is None else (None if is_dropped(call) else late, death)
            if delay is not None and not call.done():
                member.retried += 1
                return delay
            supervisor.release(call)
            if not call.done():
                call.set_exception(error)
        member.done += 1
        member.failed += 1
        return None

    def _lost_items(self, member: Member, batch: Batch, items: int, exitcode: int | None, age: float, faults: Faults) -> None:
        """As `_lost`, for the items of a batch, `items` of which had begun; the others go back."""
        inner = Faults(faults.when)  # the other one tells what becomes of the batch
        for index in batch.began(items):
            item = batch.item(index)
            batch.settle(index)
            if item.done():
                continue
            renewed = item.renewed()
            with inner:
                delay = self._lost(member, renewed, exitcode, age)
                if delay is not None and not item.done():
                    self._supervisor.attempts.again(renewed, delay)
            if inner.last is not None:
                self._give_up(member, renewed, exitcode, inner)
        member.take(batch.call_id)
        run = batch.rest(items)
        if run is not None:
            self._supervisor.put_back(batch.flow, run)
        inner.finish()

    def _return(self, member: Member, exitcode: int | None, faults: Faults) -> None:
        """Calls that a dead worker had not begun go to another one, if one will come."""
        supervisor = self._supervisor
        back: list[Unit] = []
        for call in list(member.calls.values()):
            with faults:
                member.take(call.call_id)
                back.append(call)
            if faults.last is not None:
                self._give_up(member, call, exitcode, faults)
        supervisor.loose.update(back)  # what ends one may cancel the others
        for call in back:
            with faults:
                self._refuse(member, call, exitcode)
            if faults.last is not None:
                self._give_up(member, call, exitcode, faults)
        supervisor.loose.difference_update(back)
        for call in reversed(back):  # the first one is to be the first again
            with faults:
                if not call.done():
                    supervisor.dispatch.returned([(call, call.queue)])
            if faults.last is not None:
                self._give_up(member, call, exitcode, faults)

    def _refuse(self, member: Member, call: Unit, exitcode: int | None) -> None:
        """End a call that had not begun, where nobody will run it."""
        assert not isinstance(call, Batch)  # of these the items have gone back
        if call.done():
            self._supervisor.release(call)
        elif self._is_hopeless() or call.kind == Kind.BESIDE:
            self._supervisor.release(call)
            attempts = 0 if call.plan is None else call.plan.failed
            death = WorkerDied(member.pid, exitcode, call.function.name, None, started=False, attempts=attempts)
            death.__cause__ = member.failure
            call.set_exception(death)

    def _is_hopeless(self) -> bool:
        """Whether no worker will come to run what waits."""
        supervisor = self._supervisor
        return supervisor.broken is not None or (supervisor.is_closing and not supervisor.pool.is_expected())
