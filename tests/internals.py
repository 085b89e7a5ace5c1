"""Where tests look into a runner: its workers, its calls and its memory slots, which `statistics()` and `usage()` do not show.

A test needs this to kill a particular worker, to see that a call has left nothing behind, or to make a fault happen. It is the
one way in, so that a change within percore changes these lines and no test. No module of a worker imports it.
"""

from typing import TYPE_CHECKING, Any

from percore import Runner

if TYPE_CHECKING:
    from percore._supervisor.pool_worker import PoolWorker
    from percore._supervisor.supervisor import Supervisor


def supervisor_of(runner: Runner) -> "Supervisor":
    """The part of a runner that owns its workers and calls."""
    return runner._supervisor


def members_of(runner: Runner) -> "list[PoolWorker]":
    """The workers of now, as the supervisor sees them: also those that start and those that drain."""
    return list(runner._supervisor.members)


def current_member(runner: Runner, index: int = 0) -> "PoolWorker | None":
    """The worker that has a slot of the pool."""
    return runner._supervisor.slots[index].current


def channel_of(member: "PoolWorker") -> Any:
    """The channel of a worker in a process or of a fake one, with all that is known of it."""
    return member.worker.channel


def arena_of(runner: Runner) -> Any:
    """The store of a runner whose workers map it."""
    return runner._supervisor.store


def slots_used(runner: Runner) -> int:
    """How many memory slots are taken by what is sent to workers."""
    return runner._supervisor.store.in_use
