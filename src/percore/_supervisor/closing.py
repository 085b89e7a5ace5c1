"""The closing of a runner, as a state machine.

    aclose ─▶ waiting for calls ──all done──────────────▶ finishing ──all workers gone─▶ closed
                    └──grace is over──▶ cut ──all done──▶     │
                                         └──kill_after──▶ killed (also from finishing)

Events drive it: outcomes of calls, exits of workers, and two timers. `wait` only waits, so a second caller of `aclose` joins the
first. Workers may die or be killed from outside meanwhile: in `waiting for calls` and `cut`, the exit of the last worker leads to
`finishing`.
"""

import asyncio
from collections.abc import Awaitable, Callable

from percore._scheduler.phase import Phase, PhaseEvent
from percore._supervisor.pool_worker import DeadlineTimer
from percore._supervisor.supervisor import Supervisor


class Closing:
    """The one closing of a supervisor."""

    def __init__(self, supervisor: Supervisor, on_gone: Callable[[], Awaitable[None]]) -> None:
        """Make the supervisor refuse calls from now on. `on_gone` releases shared resources when the last worker has ended."""
        self._supervisor = supervisor
        self._on_gone = on_gone
        self._loop = supervisor.loop
        self._gone = self._loop.create_future()
        self._grace_timer: asyncio.TimerHandle | None = None
        self._kill_timer: DeadlineTimer | None = None
        self._last: asyncio.Task[None] | None = None
        supervisor.close(self._look)

    def tighten(self, grace: float | None) -> None:
        """Limit the running calls to `grace` seconds from now, unless an earlier limit is set. None sets no limit."""
        if grace is None:
            return
        when = self._loop.time() + grace
        timer = self._grace_timer
        if timer is not None and timer.when() <= when:
            return
        if timer is not None:
            timer.cancel()
        if grace <= 0:
            self._cut()
        else:
            self._grace_timer = self._loop.call_at(when, self._cut)

    async def wait(self) -> None:
        """Wait until every worker has ended and their shared resources are released.

        Cancellation kills all workers at once. CancelledError is raised only after they have ended and everything is released.
        """
        self._look()
        interrupted: asyncio.CancelledError | None = None
        while not self._gone.done() or not (self._last is not None and self._last.done()):
            try:
                await asyncio.shield(self._gone)
                if self._last is None:
                    self._last = self._loop.create_task(self._release(), name="percore-close")
                await asyncio.shield(self._last)
            except asyncio.CancelledError as error:
                interrupted = error
                self._supervisor.kill_all()
        if interrupted is not None:
            raise interrupted

    async def _release(self) -> None:
        await self._on_gone()

    def _look(self) -> None:
        supervisor = self._supervisor
        if supervisor.phase.now is Phase.FINISHING:
            if not supervisor.members:
                self._stop_timers()  # first: if it fails, the next look goes on from here
                supervisor.phase.advance(PhaseEvent.END)
                self._gone.set_result(None)
        elif supervisor.phase.now is not Phase.ENDED and (not supervisor.unfinished() or not supervisor.members):
            self._finish()

    def _finish(self) -> None:
        self._arm_kill()  # first, so that `wait` ends even if the next step fails
        self._supervisor.finish()
        self._loop.call_soon(self._look)

    def _cut(self) -> None:
        self._grace_timer = None
        if self._supervisor.phase.now not in (Phase.FINISHING, Phase.ENDED):
            self._arm_kill()
            self._supervisor.cut()
            self._look()

    def _arm_kill(self) -> None:
        if self._kill_timer is None:
            self._kill_timer = DeadlineTimer(self._loop, self._supervisor.options.kill_after, self._supervisor.kill_all)

    def _stop_timers(self) -> None:
        for timer in (self._grace_timer, self._kill_timer):
            if timer is not None:
                timer.cancel()
