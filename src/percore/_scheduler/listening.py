"""Which slots of a pool keep their listening sockets, and which of them get new connections."""

from collections.abc import Collection, Iterable
from typing import Final, NamedTuple, Protocol

SOON: Final = 10.0
"""Seconds within which a lifespan that fails has not served."""


class ListeningSlot(Protocol):
    """A slot in use, as it matters here."""

    @property
    def index(self) -> int: ...

    @property
    def is_failed(self) -> bool:
        """Whether it was given up."""

    @property
    def is_served(self) -> bool:
        """Whether it has a ready worker."""


class Plan(NamedTuple):
    """What to do with the sockets.

    Attributes:
        kept: the slots that keep their sockets, or get some.
        steered: those of them that get new connections.
    """

    kept: frozenset[int]
    steered: frozenset[int]


def plan(slots: Iterable[ListeningSlot], used: Collection[int]) -> Plan:
    """Return what to do now.

    A slot that was removed or given up keeps its sockets while a worker uses them, so that this worker can accept what waits there.
    It gets no new connections. While no slot has a ready worker, all in use get them, and they wait.

    Args:
        slots: the slots in use.
        used: the slots, in use or not, with a worker that has not ended.
    """
    in_use = [slot for slot in slots if not slot.is_failed]
    wanted = frozenset(slot.index for slot in in_use)
    served = frozenset(slot.index for slot in in_use if slot.is_served)
    return Plan(wanted.union(used), served or wanted)


def has_served(*, was_ready: bool, has_failed: bool, age: float) -> bool:
    """Whether a dead worker with sockets has done any work. It may have answered requests, of which only its lifespan knows.

    Args:
        was_ready: whether it was ready before it died.
        has_failed: whether its lifespan failed. If that happens soon, it would happen again and again.
        age: seconds since it was started.
    """
    return was_ready and (not has_failed or age >= SOON)
