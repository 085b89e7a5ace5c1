"""The end of a runner: it closes, breaks, or is dropped. Nothing else ends all calls or all workers.

    aclose ─▶ waiting for calls ──all done──────────────▶ finishing ──all workers gone─▶ closed
                    └──grace is over──▶ cut ──all done──▶     │
                                         └──kill_after──▶ killed (also from finishing)

Events drive it: outcomes of calls, exits of workers, and two timers. `close` only waits, so a second caller joins the first.
Workers may die or be killed from outside meanwhile: in `waiting for calls` and `cut`, the exit of the last worker leads to
`finishing`. `RunnerPhase` decides which step is due.
"""

import asyncio
import contextlib
from functools import partial
from typing import TYPE_CHECKING

from percore._common.log import Faults
from percore._common.sure_handles import surely_from_thread
from percore._protocol.messages import CANCEL
from percore._scheduler.phase import Phase, PhaseEvent
from percore._supervisor.pool_worker import PoolWorker
from percore._supervisor.timing import DeadlineTimer, is_lost

if TYPE_CHECKING:
    from collections.abc import Callable

    from percore._calls.calls import PendingCall
    from percore._common.worker_errors import RunnerBroken
    from percore._protocol.interfaces import Engine
    from percore._supervisor.admission import Admission
    from percore._supervisor.call_registry import CallRegistry
    from percore._supervisor.pool import Pool
    from percore._supervisor.publication import Publication
    from percore._supervisor.rebalancing import Rebalancing
    from percore._supervisor.reclaiming import Reclaiming


class Closing:
    """Ends the calls and the workers of one runner. Only the thread of its loop may call its methods, except `abandon`."""

    def __init__(  # noqa: PLR0913, PLR0917  # the parts that it ends
        self,
        engine: "Engine",
        calls: "CallRegistry",
        pool: "Pool",
        admission: "Admission | None",
        rebalancing: "Rebalancing",
        publication: "Publication | Reclaiming",
        kill_after: float,
    ) -> None:
        self._loop = calls.loop
        self._phase = calls.phase
        self._engine = engine
        self._calls = calls
        self._pool = pool
        self._admission = admission
        self._rebalancing = rebalancing
        self._publication = publication
        self._kill_after = kill_after
        self.enders: dict[Callable[[], None], None] = {}
        """Functions to call when the runner stops accepting calls. Open maps, which may wait for inputs, and streams register."""
        self._gone: asyncio.Future[None] | None = None
        """Done when the last worker has ended. None: nothing has called `close`."""
        self._grace_timer: asyncio.TimerHandle | None = None
        self._grace_until = 0.0
        self._kill_timer: DeadlineTimer | None = None
        self._releasing: asyncio.Task[None] | None = None
        self.is_over = False
        """Whether every worker has ended and every part is released."""

    # The steps of a close

    async def close(self, grace: float | None) -> None:
        """Refuse calls, wait until every worker has ended, and release what they shared. Every caller waits for the same close.

        Cancellation kills all workers at once. CancelledError is raised only after they have ended and everything is released.

        Args:
            grace: how many seconds the calls may take from now, unless an earlier limit is set. None sets no limit.
        """
        gone = self._gone
        if gone is None:
            gone = self._gone = self._loop.create_future()
        self.refuse_calls()
        if grace is not None:
            self._tighten(grace)
        self.look()
        interrupted: asyncio.CancelledError | None = None
        while not self.is_over:
            try:
                await asyncio.shield(gone)
                if self._releasing is None or self._releasing.done():  # done: it was cancelled before its first step
                    self._releasing = self._loop.create_task(self._release(), name="percore-close")
                await asyncio.shield(self._releasing)
            except asyncio.CancelledError as error:
                interrupted = error
                self.kill_all()
        if interrupted is not None:
            raise interrupted

    def _tighten(self, grace: float) -> None:
        when = self._loop.time() + grace
        timer = self._grace_timer
        if timer is not None and self._grace_until <= when:
            return
        if timer is not None:
            timer.cancel()
        self._grace_until = when
        if grace <= 0:
            self._cut()
        else:
            self._grace_timer = self._loop.call_at(when, self._cut)

    def look(self) -> None:
        """Take the step that is due now. To be called when calls or workers have ended.

        It waits while calls are in `loose`, and while those of a dead worker are ended or queued again: it would miss some. The
        burial of a worker ends with another look.
        """
        if not self._phase.is_closing or self._calls.loose or any(member.life.is_gone for member in self._pool.members):
            return
        # A closing runner replaces no worker that has died, but one that has left its place to the next one.
        has_workers = bool(self._pool.members) or bool(self._calls.waiting() and self._pool.awaits_place())
        if not has_workers:
            self._expect_nobody()
        elif self._calls.dispatch.waiting() and not self._pool.can_begin():  # those that drain may wait for these very calls
            self._calls.refuse_waiting()
        if self._gone is None or self._calls.is_refusing:
            return
        due = self._phase.due(has_calls=self.unfinished(), has_workers=has_workers)
        if due is PhaseEvent.FINISH:
            self._finish()
        elif due is PhaseEvent.END:
            self._calls.stop_clocks()
            self._stop_timers()  # first: if it fails, the next look goes on from here
            self._phase.advance(PhaseEvent.END)
            self._gone.set_result(None)

    def unfinished(self) -> bool:
        """Return whether any call waits or runs, including cancelled calls that still run."""
        return bool(self._calls.waiting()) or any(member.calls for member in self._pool.members)

    def _finish(self) -> None:
        """Ask every worker to end, and kill those that are not ready yet, since no call may run any more.

        Calls that still wait are ended: their workers died during the closing and were not replaced.
        """
        self._arm_kill()  # first, so that the closing ends even if the next step fails
        self._loop.call_soon(self.look)
        self._phase.advance(PhaseEvent.FINISH)
        Faults("the workers were asked to end").run(self._expect_nobody, self._pool.finish)

    def _cut(self) -> None:
        """The grace is over: end all waiting calls and cancel the running ones. Their callers get RunnerClosed."""
        self._grace_timer = None
        if self._phase.now is Phase.ENDED:
            return
        self._arm_kill()
        if not self._phase.is_cut:
            self._phase.advance(PhaseEvent.CUT)
            Faults("calls were cancelled, since the runner closes").run(self._calls.refuse_waiting, self._cancel_running)
        self.look()

    def _cancel_running(self) -> None:
        # Those of a worker last first: else it may begin the next. In lists: a garbage collection may run code that cancels some.
        held = [(member, list(member.calls.values())) for member in list(self._pool.members)]
        calls = [partial(self._cancel, member, call) for member, calls in held for call in reversed(calls)]
        Faults("calls were cancelled, since the runner closes").run(*calls)

    def _cancel(self, member: PoolWorker, call: "PendingCall") -> None:
        if call.call_id in member.parked:
            self._calls.refuse(member.take(call.call_id))
        elif not call.done():
            member.tell(CANCEL, call.call_id, None if call.wanted is None else 0)

    def _arm_kill(self) -> None:
        if self._kill_timer is None:
            self._kill_timer = DeadlineTimer(self._loop, self._kill_after, self.kill_all)

    def catch_up(self) -> None:
        """Go on with a close whose timer, or whose last look, the loop has lost."""
        if self._grace_timer is not None and is_lost(self._grace_timer, self._loop):
            self._grace_timer.cancel()
            self._cut()
        if self._kill_timer is not None:
            self._kill_timer.catch_up()
        self.look()

    def _stop_timers(self) -> None:
        for timer in (self._grace_timer, self._kill_timer):
            if timer is not None:
                timer.cancel()

    async def _release(self) -> None:
        try:
            self._pool.listening.close()
            self._calls.shares.shut()
            await self._engine.aclose()
            self._pool.say_ended()
        finally:
            self._publication.close()
            self.is_over = True

    # Other ends

    def refusal(self) -> BaseException:
        """Return a new error for a call that the runner's end cuts short."""
        return self._phase.refusal()

    def refuse_calls(self) -> None:
        """Accept no more calls and replace no dead workers. Waiting calls end when the last worker has ended. Idempotent."""
        self._phase.advance(PhaseEvent.CLOSE)
        Faults("the runner took no more calls").run(self._pool.changes.look, self._end_maps, self._calls.refuse_delayed)

    def fail(self, error: "RunnerBroken") -> None:
        """Break the runner, because no worker can be started any more: end all waiting calls and open maps."""
        self._phase.fail(error)
        Faults("the runner broke").run(
            self._pool.changes.look, self._end_maps, self._calls.refuse_delayed, self._calls.refuse_waiting
        )

    def _end_maps(self) -> None:
        """Stop open maps from pulling inputs, and refuse the callers that wait for admission or for an object to be shared."""
        # The last first, as in `_cancel_running`: a worker may begin a stream when one before it ends.
        faults, admission = Faults("maps were ended"), self._admission
        for end in [*reversed(self.enders)]:
            with faults:
                end()
        faults.surely(self._calls.shares.refuse)
        if admission is not None:
            faults.surely(lambda: admission.refuse(self._phase.refusal))
        faults.finish()

    def _expect_nobody(self) -> None:
        """End the calls that wait for a worker or an attempt, and stop recalls and delayed starts: no worker will get ready."""
        calls = self._calls
        steps = (calls.refuse_delayed, calls.refuse_waiting, self._rebalancing.stop, self._pool.stop_timers)
        Faults("calls that nobody will run were ended").run(*steps)

    def kill_all(self) -> None:
        """Kill every worker and start none. Their exits are reported later."""
        self._phase.advance(PhaseEvent.CUT)
        # If there is no worker any more, no exit leads to the next look, and the loop may have lost that of `_finish`.
        Faults("all workers were killed").run(self._expect_nobody, self._pool.kill, partial(self._loop.call_soon, self.look))

    def signal_all(self, signum: int) -> None:
        """Refuse calls, start no worker, and send every worker this signal. The signal need not end the workers."""
        self.refuse_calls()
        self._pool.stop_timers()
        self._pool.kill(signum)

    def abandon(self) -> None:
        """Kill the workers of a runner that was garbage-collected without being closed, and touch nothing else.

        The garbage collector may call this in any thread, at any point of the program, and the loop may be closed. If the loop
        still runs, the workers are killed from the loop: the calls end when the workers have ended, and no worker is replaced.
        """
        if self._loop.is_running():
            with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
                surely_from_thread(self._loop, self._abandon)
                return
        self._abandon()

    def _abandon(self) -> None:
        self._phase.advance(PhaseEvent.CUT)
        self._pool.kill()
        self._pool.listening.close()
