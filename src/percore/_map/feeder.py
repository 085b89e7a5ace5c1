"""The feeder of a map: a task that pulls the inputs and submits their items while the window has room."""

import asyncio
from typing import TYPE_CHECKING, Any, Final

from percore._common.errors import shown
from percore._common.inputs import Inputs, Pulled
from percore._map.in_flight import InFlight
from percore._map.rows import Rows, Spec
from percore._protocol.messages import Kind
from percore._scheduler.map_life import MapEvent, MapPhase

if TYPE_CHECKING:
    from percore._supervisor.admission import Admission

_PULL_SECONDS: Final = 0.003
"""How long pulling from an input may keep the event loop busy before other tasks run."""

_TURNS: Final = 8
"""Iterations of the event loop left to other tasks after a single pull from a sync input took longer than `_PULL_SECONDS`.

Such an input blocks the loop, and events that became ready meanwhile pass through several tasks: the loop sees the descriptor, one
task reads from it, another task waits for the first."""

_CHUNK_SECONDS: Final = 0.0005
_MOST_AT_ONCE: Final = 8192


class Feeder:
    """Pulls the open inputs of one map, and submits their items."""

    def __init__(self, items: InFlight, inputs: Inputs, spec: Spec) -> None:
        self._supervisor = supervisor = items.supervisor
        self._loop = supervisor.loop
        self._admission = supervisor.admission
        self._inputs = inputs
        self._items = items
        self._window = items.window
        self._life = items.life
        self._has_pairs = spec.pairs
        self._is_batched = is_batched = items.batches is not None
        self._rows = Rows(supervisor.functions, items.function, spec, items, is_single=inputs.is_single, is_batched=is_batched)
        self._task: asyncio.Task[None] | None = None
        self._pulled_at = 0.0

    def begin(self) -> None:
        """Start the task."""
        self._life.advance(MapEvent.BEGIN)
        self._task = self._loop.create_task(self._feed(), name="percore-map")
        self._task.add_done_callback(self._ended)

    def _ended(self, _task: "asyncio.Task[None]") -> None:
        """End the map if the task could not: it was cancelled before its first step, or a Ctrl-C came at its last one."""
        life = self._life
        if life.now is MapPhase.BEGUN:
            self._cancelled(asyncio.CancelledError())
        if life.pulls:
            life.advance(MapEvent.EXHAUST)
        self._items.wake()

    def end(self) -> None:
        """Stop pulling, because the runner takes no more calls."""
        life = self._life
        if life.pulls:
            life.failure = self._supervisor.phase.refusal()
            # The task may be waiting for an input that never comes. If it has not run yet, it reads the runner's phase first.
            if life.now is MapPhase.FEEDING and self._task is not None:
                self._task.cancel()

    async def close(self) -> None:
        """End the task, and close the generators among the inputs. Call this once the map is closed."""
        task = self._task
        try:
            if task is not None and not task.done():
                task.cancel()
                await asyncio.wait([task])
        finally:  # also when this task is cancelled
            await self._inputs.close()

    async def _feed(self) -> None:
        life = self._life
        life.advance(MapEvent.FEED)
        try:
            await self._feed_until_end()
            self._send()
        except asyncio.CancelledError as error:
            self._cancelled(error)
        except Exception as error:  # an error of percore: those of the input arrive in `Pulled`
            life.stop(error)
        except BaseException as error:  # treated as a Ctrl-C: it propagates, and the map reports that the input was cut short
            life.failure = RuntimeError(f"reading the input was interrupted by {shown(error)}")
            if self._is_batched and not life.is_closed:
                self._supervisor.dispatch.appended(self._items.queue)  # it may have come just before this
            self._send()  # the loop may run on, and the map then ends once the items before the error have ended
            raise
        finally:
            life.advance(MapEvent.EXHAUST)
            self._items.wake()

    def _cancelled(self, error: asyncio.CancelledError) -> None:
        """The input raised it, or the program; or the map is being ended: by `close`, or by `end`, which has set `failure`."""
        life = self._life
        if not life.is_closed and life.failure is None:
            life.failure = RuntimeError(f"the input raised {shown(error)}")
            life.failure.__cause__ = error

    async def _feed_until_end(self) -> None:
        life, items, window, phase, loop = self._life, self._items, self._window, self._supervisor.phase, self._loop
        chunk = 1
        begun = loop.time()
        while life.pulls:
            space = window.space()
            if space <= 0:
                self._send()
                items.space_waiter = loop.create_future()
                items.wake_at = window.wake_at()
                await items.space_waiter
                items.space_waiter = None
                begun = loop.time()
                continue
            if not phase.accepts:
                life.failure = phase.refusal()
                return
            pulled = await self._pull(min(space, chunk))
            if not life.pulls:  # an item failed while this task waited for the input
                return
            if not self._submit(pulled.rows):
                return
            if pulled.is_end:
                life.failure = pulled.error
                return
            now = loop.time()
            took = now - self._pulled_at
            # The first rows of a chunk wait for its last one, so a chunk should take at most half a millisecond.
            chunk = min(_MOST_AT_ONCE, chunk * 2) if took < _CHUNK_SECONDS else max(1, chunk // 2)
            if now - begun > _PULL_SECONDS:  # even an async input may never suspend
                self._send()
                for _ in range(_TURNS if self._inputs.has_sync and took > _PULL_SECONDS else 1):
                    await asyncio.sleep(0)
                begun = loop.time()

    async def _enter(self, admission: "Admission", most: int = 1) -> int:
        """Enter admission with up to so many items. Return how many."""
        items = self._items
        count = await admission.enter(most)
        items.admitted += count  # at once: a Ctrl-C at the entry of a function would keep their room
        if self._life.is_closed:  # a garbage collection has run user code that has closed the map
            items.leave(items.admitted)
        return count

    async def _pull(self, most: int) -> Pulled:
        inputs, admission = self._inputs, self._admission
        if inputs.is_async:
            # Pull the row before entering: it may come from another map, which needs room itself, or take long to come.
            self._pulled_at = self._loop.time()
            pulled = await inputs.pull()
            if admission is not None and pulled.rows and self._life.pulls:
                await self._enter(admission)
            return pulled
        if admission is not None:
            most = await self._enter(admission, most)
        self._pulled_at = self._loop.time()
        pulled = inputs.pull_now(most)
        if admission is not None and len(pulled.rows) < most and not self._life.is_closed:
            self._items.leave(most - len(pulled.rows))
        return pulled

    def _submit(self, rows: list[Any]) -> bool:
        """Submit these rows. Return whether all were taken, as items or as failed items.

        If not, the map has ended: its failure is set already, or nothing reads it.
        """
        if not rows:
            return True
        number = self._window.pulled
        if self._has_pairs:
            self._items.given.update(enumerate(rows, number))
        taken = self._rows.submit(number, rows)
        if self._is_batched and not self._life.is_closed:
            self._supervisor.dispatch.appended(self._items.queue)
            if self._inputs.is_async or self._admission is not None:  # the next row may take long to come
                self._send()
        if taken < len(rows) and not self._life.is_closed:
            self._items.leave(len(rows) - taken)
        return taken == len(rows)

    def _send(self) -> None:
        """Send the waiting batch items. This happens after several chunks, so that batches can be cut from all their items."""
        if self._is_batched and not self._life.is_closed:
            self._supervisor.calls.send_waiting(Kind.THREAD)
