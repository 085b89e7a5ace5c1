"""One slot of the pool: its workers, the timer of a delayed start, and the history that statistics and errors need."""

from typing import TYPE_CHECKING, NamedTuple

from percore._common.measuring import Histogram, merged
from percore._protocol.interfaces import Exit
from percore._scheduler.replacement import Occupancy, Replacement
from percore._supervisor.pool_worker import PoolWorker

if TYPE_CHECKING:
    import asyncio


class Past(NamedTuple):
    """Counts of the dead workers of a slot, up to `generation`. A slot replaces it as a whole, because other threads read it."""

    done: int = 0
    failed: int = 0
    retried: int = 0
    generation: int = 0
    run_times: Histogram = Histogram()
    given_up: int = 0

    def with_(self, member: PoolWorker) -> "Past":
        """Return these counts with those of another dead worker added."""
        done, failed, retried, _, run_times, given_up = self
        times = merged([run_times, member.run_times])
        given_up += member.end.is_given_up
        return Past(done + member.done, failed + member.failed, retried + member.retried, member.generation, times, given_up)


class WorkerSlot(Replacement[PoolWorker]):
    """A slot of the pool: its workers, the decisions about the next one, and the history of its workers."""

    def __init__(self, index: int) -> None:
        super().__init__()
        self.index = index
        self.generation = 0
        self.timer: asyncio.TimerHandle | None = None
        """The timer of a delayed start; None if no start is delayed."""
        self.past = Past()
        self.restarts_for_memory = 0
        """Of the workers replaced so far, those that had more than `max_memory_per_worker`."""
        self.end = Exit(None)
        """How the last dead worker has ended, or that the last start has failed."""
        self.failure: BaseException | None = None
        """The error that the last dead worker reported, if it reported one."""

    @property
    def pid(self) -> int | None:
        """The process id of its current worker; None if it has none."""
        return None if self.current is None else self.current.pid

    @property
    def is_failed(self) -> bool:
        return self.state is Occupancy.FAILED

    @property
    def is_served(self) -> bool:
        """Whether it has a ready worker."""
        return self.current is not None and self.current.is_ready

    def took(self, member: PoolWorker) -> None:
        """Add the counts of a dead worker to those of the earlier ones. Twice is as once."""
        if self.past.generation != member.generation:
            self.past = self.past.with_(member)

    def stop_timer(self) -> None:
        """Drop the delayed start, if there is one."""
        self.forget_delay()
        self.look_timer()

    def look_timer(self) -> None:
        """Cancel the timer if no start is delayed any more."""
        if self.timer is not None and not self.is_delayed:
            self.timer.cancel()
            self.timer = None
