"""Samples the memory of workers, and asks for the replacement of each that has more than `max_memory_per_worker`."""

import asyncio
import logging
from typing import TYPE_CHECKING, Final, Protocol

from percore._common.log import Faults, report
from percore._common.worker_errors import mebibytes
from percore._scheduler.lifecycle import State
from percore._scheduler.memory_limit import LONGEST_WAIT, MemoryLimit, Verdict
from percore._scheduler.phase import Replaces, RunnerPhase
from percore._supervisor.timing import is_lost

if TYPE_CHECKING:
    from collections.abc import Sequence

    from percore._protocol.interfaces import Worker
    from percore._supervisor.first_start import FirstStart
    from percore._supervisor.pool_worker import PoolWorker
    from percore._supervisor.worker_slot import WorkerSlot

_EVERY: Final = 1.0
"""Seconds between two samples."""
_SHARE: Final = 50
"""A sample that takes long delays the next one by this many times as much. So sampling takes at most 2 % of one CPU."""


class RenewedPool(Protocol):
    """The pool, as the watch over the memory of its workers sees it."""

    slots: "list[WorkerSlot]"
    members: "set[PoolWorker]"
    first_start: "FirstStart"

    def renew(self, slot: "WorkerSlot") -> None:
        """Give the slot another worker, which takes over as soon as it is ready."""


class Scale(Protocol):
    """The engine, as the watch sees it."""

    async def memory(self, workers: "Sequence[Worker]", enough: int) -> "list[int | None]": ...


class MemoryWatch:
    """Watches the memory of one runner's workers, from the start of the first one until the last one has ended."""

    def __init__(self, loop: asyncio.AbstractEventLoop, pool: RenewedPool, engine: Scale, phase: RunnerPhase, limit: int) -> None:
        """`limit`: how many bytes a worker may have."""
        self._loop = loop
        self._pool = pool
        self._engine = engine
        self._phase = phase
        self._limit = limit
        self._limits: dict[WorkerSlot, MemoryLimit] = {}
        self._timer: asyncio.TimerHandle | None = None
        self._sampling: asyncio.Task[None] | None = None
        self._is_advised = self._has_failed = False

    def arm(self) -> None:
        """Watch the workers. To be called when one has started."""
        if self._timer is None and self._sampling is None:
            self._timer = self._loop.call_later(_EVERY, self._begin)

    def catch_up(self) -> None:
        """Go on watching if the loop has lost the timer."""
        if self._timer is not None and is_lost(self._timer, self._loop):
            self._timer.cancel()
            self._timer = None
            self.arm()

    def look_members(self) -> None:
        """Stop if no worker is left. To be called when a worker has ended."""
        if self._pool.members:
            return
        if self._timer is not None:
            self._timer.cancel()
        if self._sampling is not None:
            self._sampling.cancel()
        self._timer = self._sampling = None

    def _begin(self) -> None:
        self._timer = None
        self._sampling = self._loop.create_task(self._sample(), name="percore-memory")
        self._sampling.add_done_callback(self._has_ended)

    def _has_ended(self, sampling: "asyncio.Task[None]") -> None:
        """Go on if the program has cancelled all tasks, this one with them."""
        if self._sampling is sampling:
            self._sampling = None
            self.arm()

    async def _sample(self) -> None:
        started = self._loop.time()
        members = [member for member in self._pool.members if member.life.state in (State.READY, State.DRAINING)]
        try:
            sizes = await self._engine.memory([member.worker for member in members], self._limit)
        except Exception as error:
            if not self._has_failed:
                self._has_failed = True
                report(
                    logging.WARNING,
                    "the memory of the workers could not be read, so max_memory_per_worker has no effect: %r",
                    error,
                )
            sizes = []
        self._sampling = None
        self._timer = self._loop.call_later(max(_EVERY, _SHARE * (self._loop.time() - started)), self._begin)
        known = {member: size for member, size in zip(members, sizes, strict=False) if size is not None}
        Faults("the memory of the workers was compared with max_memory_per_worker").run(lambda: self._look(known))

    def _look(self, sampled: "dict[PoolWorker, int]") -> None:
        for member, size in sampled.items():
            member.memory = size
        for gone in self._limits.keys() - set(self._pool.slots):
            del self._limits[gone]
        for slot in list(self._pool.slots):
            current = slot.current
            if current is not None and current in sampled and current.is_ready:
                limit, is_free = self._limits.setdefault(slot, MemoryLimit(self._limit)), self._is_free(slot, current)
                verdict = limit.sampled(current.generation, sampled[current], self._loop.time(), is_free=is_free)
                if verdict is not Verdict.KEEP:
                    self._renew(slot, current, is_futile=verdict is Verdict.RENEW_AND_ADVISE)

    def _is_free(self, slot: "WorkerSlot", member: "PoolWorker") -> bool:
        """Whether the slot can be renewed, and has no worker that drains."""
        if self._phase.replaces is not Replaces.ALL or self._pool.first_start.is_on or not slot.can_renew:
            return False
        return not any(other.index == slot.index and other not in (member, slot.next) for other in self._pool.members)

    def _renew(self, slot: "WorkerSlot", member: "PoolWorker", *, is_futile: bool) -> None:
        assert member.memory is not None
        size, limit = mebibytes(member.memory), mebibytes(self._limit)
        report(
            logging.INFO,
            "%s has %s of memory, and max_memory_per_worker is %s; its replacement starts",
            *(member.name, size, limit),
            of=member,
        )
        if is_futile and not self._is_advised:
            self._is_advised = True
            report(
                logging.WARNING,
                "%s has %s of memory soon after its start, as the worker before it had, and max_memory_per_worker is %s: replacing "
                "workers does not help. Raise max_memory_per_worker, or load less in the lifespan, in imports and in each call. "
                "From now on percore waits up to %g s before it replaces such a worker",
                *(member.name, size, limit, LONGEST_WAIT),
                of=member,
            )
        slot.restarts_for_memory += 1
        self._pool.renew(slot)
