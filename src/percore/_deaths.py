"""What becomes of the calls of a dead worker: those that had begun fail, or are attempted again; the others go elsewhere."""

import time
from typing import TYPE_CHECKING

from percore._broken import WorkerDied
from percore._calls import Awaited, Call, is_dropped
from percore._items import Batch, Item
from percore._member import Member, Unit
from percore._messages import Kind

if TYPE_CHECKING:
    from percore._supervisor import Supervisor


class Deaths:
    """Ends the calls of dead workers."""

    def __init__(self, supervisor: "Supervisor") -> None:
        self._supervisor = supervisor

    def end_calls(self, member: Member, exitcode: int | None) -> bool:
        """Fail the calls that had begun, take back those that had not. Whether any had begun."""
        is_cut = self._supervisor.is_cut
        now = time.monotonic()
        has_begun = False
        # Until what becomes of it is settled, a call stays this worker's: retry_on and backoff may cancel any of them.
        for call in list(member.calls.values()):
            began = member.began(call)
            has_begun |= began is not None
            begun_at, items = began or (now, 0)
            if isinstance(call, Batch):
                self._lost_items(member, call, items, exitcode, now - begun_at)
            elif not call.done() and (began is not None or is_cut):
                delay = self._lost(member, call, exitcode, now - begun_at)
                member.take(call.call_id)
                if delay is not None:
                    self._supervisor.attempts.again(call, delay)
        self._return(member, [member.take(call_id) for call_id in list(member.calls)], exitcode)
        return has_begun

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

    def _lost_items(self, member: Member, batch: Batch, items: int, exitcode: int | None, age: float) -> None:
        """As `_lost`, for the items of a batch, `items` of which had begun; the others go back."""
        for index in batch.began(items):
            item = batch.item(index)
            batch.settle(index)
            if not item.done():
                renewed = item.renewed()
                delay = self._lost(member, renewed, exitcode, age)
                if delay is not None and not item.done():
                    self._supervisor.attempts.again(renewed, delay)
        member.take(batch.call_id)
        run = batch.rest(items)
        if run is not None:
            self._supervisor.put_back(batch.flow, run)

    def _return(self, member: Member, back: list[Unit], exitcode: int | None) -> None:
        """Calls that a dead worker had not begun go to another one, if one will come."""
        supervisor = self._supervisor
        with supervisor.loose(back):
            for call in back:
                assert not isinstance(call, Batch)  # of these the items have gone back
                if call.done():
                    supervisor.release(call)
                elif self._is_hopeless() or call.kind == Kind.BESIDE:
                    supervisor.release(call)
                    attempts = 0 if call.plan is None else call.plan.failed
                    death = WorkerDied(member.pid, exitcode, call.function.name, None, started=False, attempts=attempts)
                    death.__cause__ = member.failure
                    call.set_exception(death)
        supervisor.dispatch.returned([(call, call.queue) for call in back if not call.done()])

    def _is_hopeless(self) -> bool:
        """Whether no worker will come to run what waits."""
        supervisor = self._supervisor
        return supervisor.broken is not None or (supervisor.is_closing and not supervisor.pool.is_expected())
