"""Changes of a pool: replaces all workers of a pool, or changes their number, while calls go on.

    reload ──▶ for each slot in turn: a new worker starts ─▶ ready ─▶ it takes over ─▶ the old one ends after its calls
    resize ──▶ more: new workers start ─▶ all ready          fewer: the workers with the highest indexes end after their calls

One reload or resize runs at a time, in the order in which they were asked for. `Replacement` decides when a worker takes over. The
pool reports each change of a slot (`look`) and each worker that could not start. A reload that fails, is cancelled or is cut off by
the end of the runner leaves every slot with the worker that it has.

An engine may have no place for one worker more than there are. Then a reload waits for `start_timeout` seconds, and fails: to end
an old worker first would leave fewer ready ones than the runner promises.
"""

import asyncio
from typing import TYPE_CHECKING, Protocol

from percore._common.fault_points import POINTS, point
from percore._common.log import Faults
from percore._common.worker_errors import StartupFailed
from percore._scheduler.phase import RunnerPhase

if TYPE_CHECKING:
    from collections.abc import Callable

    from percore._supervisor.worker_slot import WorkerSlot


class ChangedPool(Protocol):
    """The pool, as its changes see it."""

    slots: "list[WorkerSlot]"

    def renew(self, slot: "WorkerSlot") -> None:
        """Give the slot another worker, which takes over as soon as it is ready. Twice is as once."""

    def grow(self, workers: int) -> "list[WorkerSlot]":
        """Use this many slots. Return those that were added."""

    def shrink(self, workers: int) -> None:
        """Use only the first slots, and let the workers of the others end after their calls."""


class Renewing(Protocol):
    """The engine, as the changes of a pool see it."""

    no_place: str

    def renew(self) -> None: ...

    def resize(self, workers: int) -> None: ...


class PoolChanges:
    """The reloads and resizes of one runner. Only the thread of its loop may call its methods."""

    def __init__(self, pool: ChangedPool, engine: Renewing, phase: RunnerPhase, patience: float) -> None:
        """`patience`: for how many seconds a worker may wait for a place."""
        self._pool = pool
        self._engine = engine
        self._phase = phase
        self._turn = asyncio.Lock()
        self.resized: set[Callable[[], None]] = set()
        """Functions to call when the number of workers has changed. Open maps register."""
        self._reloads = 0
        """Reloads begun so far."""
        self._done = 0
        """The number of the last reload that has replaced every worker."""
        self._awaited: dict[WorkerSlot, int] = {}
        """The slots of which a later generation than this one has to be ready."""
        self._failure: str | None = None
        """Why one of the awaited workers could not start, and the error behind it."""
        self._cause: BaseException | None = None
        self._changed = asyncio.Event()
        self._patience = patience
        self._waits_until: float | None = None
        """Until when awaited workers may wait for places, as a time of the loop; None: none waits for one."""

    @property
    def is_on(self) -> bool:
        """Whether a reload or a resize runs."""
        return self._turn.locked()

    async def reload(self) -> None:
        """Replace every worker by one that was started after this call.

        Raises:
            StartupFailed: a new worker could not start. All workers that served go on, and slots before it have new ones.
            RunnerClosed, RunnerBroken: the runner closes or is broken, and replaces nothing more.
        """
        begun = self._reloads
        async with self._turn:
            if self._done > begun:  # a reload that began after this call has replaced every worker
                return
            self._check()
            self._reloads = number = self._reloads + 1
            self._engine.renew()
            for slot, generation in [(slot, slot.generation) for slot in self._pool.slots]:
                await self._renewed({slot: generation}, "reload")
            self._done = number

    async def resize(self, workers: int) -> None:
        """Change the number of workers. The first workers stay the same.

        A resize to more workers that fails or is cancelled leaves as many as there were.

        Raises:
            StartupFailed: a new worker could not start.
            RunnerClosed, RunnerBroken: the runner closes or is broken.
        """
        async with self._turn:
            self._check()
            before = len(self._pool.slots)
            self._engine.resize(workers)
            try:
                added = self._pool.grow(max(before, workers))
                if POINTS:
                    point("supervisor.pool.grown")
                # A slot that was given up must not be all that is left.
                failed = [slot for slot in self._pool.slots[:workers] if slot.is_failed]
                await self._renewed({slot: slot.generation for slot in (*added, *failed)}, "resize")
            except BaseException:
                self._pool.shrink(before)
                self._engine.resize(before)
                raise
            self._pool.shrink(workers)
            Faults("the number of workers changed").run(*self.resized)

    async def _renewed(self, awaited: "dict[WorkerSlot, int]", what: str) -> None:
        """Renew slots until each has a ready worker of a later generation than the given one."""
        self._awaited = awaited
        try:
            while late := [slot for slot, generation in awaited.items() if not _serves(slot, generation)]:
                self._check()  # first: the end of the runner ends workers that start, too
                if self._failure is not None:
                    raise StartupFailed(f"the {what} stopped, and the workers in service go on: {self._failure}") from self._cause
                for slot in late:
                    self._renew(slot, awaited[slot])
                if not self._is_settled():
                    self._changed.clear()  # now: renewing has set it
                    await self._change([slot for slot in late if slot.lacks_place], what)
        finally:
            self._awaited, self._failure, self._cause, self._waits_until = {}, None, None, None
            for slot in awaited:
                slot.stay()

    async def _change(self, placeless: "list[WorkerSlot]", what: str) -> None:
        """Wait until a slot has changed. `placeless`: the awaited ones that have no place for the next worker.

        Raises:
            StartupFailed: there was none for too long.
        """
        now = asyncio.get_running_loop().time()
        self._waits_until = (self._waits_until or now + self._patience) if placeless else None
        try:
            async with asyncio.timeout_at(self._waits_until):
                await self._changed.wait()
        except TimeoutError:
            waiting, why = ", ".join(str(slot.index) for slot in placeless), self._engine.no_place
            raise StartupFailed(
                f"the {what} stopped, and the workers in service go on: there was no place for worker {waiting} within "
                f"start_timeout={self._patience:g} s{f': {why}' if why else ''}. A new worker needs a place beside those that serve"
            ) from None

    def _is_settled(self) -> bool:
        return self._failure is not None or all(_serves(slot, generation) for slot, generation in self._awaited.items())

    def _renew(self, slot: "WorkerSlot", generation: int) -> None:
        while slot.current is None or slot.current.generation <= generation:
            before = slot.current
            if POINTS:
                point("supervisor.renewal.due")
            self._pool.renew(slot)
            if slot.current is before:  # otherwise an earlier replacement was ready and has taken over
                return

    def _check(self) -> None:
        if not self._phase.accepts:
            raise self._phase.refusal()

    # Reports

    def look(self) -> None:
        """Note that the workers of a slot have changed, or that the runner has begun to close or is broken."""
        self._changed.set()

    def awaits(self, slot: "WorkerSlot", generation: int) -> bool:
        """Whether a reload or resize waits for this worker, and raises the error if it cannot start."""
        return generation > self._awaited.get(slot, generation)

    def could_not_start(self, slot: "WorkerSlot", generation: int, why: str, cause: BaseException | None) -> bool:
        """Note that a worker could not start. Return whether a reload or resize fails with it."""
        if not self.awaits(slot, generation):
            return False
        if self._failure is None:
            self._failure, self._cause = why, cause
        self._changed.set()
        return True


def _serves(slot: "WorkerSlot", generation: int) -> bool:
    """Whether a worker of a later generation is the current one, and ready."""
    return slot.current is not None and slot.current.is_ready and slot.current.generation > generation
