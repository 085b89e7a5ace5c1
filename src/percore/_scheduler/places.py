"""Places: how many calls a worker may hold, and how many start marks that takes.

A vocabulary: pools, executors and the start data of workers use it, and need no dispatch for that.
"""

from typing import Final

from percore._scheduler.levels import MOST_ASIDE

AHEAD: Final = 4
"""Plain calls queued ahead in a worker, per thread. With 2, the measured throughput was 0.91 to 0.96 of that with 4."""

MOST_BROADCASTS: Final = 16
"""Additional room in every worker, for broadcasts."""

ROOM_OF_NONE: Final = 1 << 40
"""Added to the load of a worker that may begin no more calls. It then has no free place, even when calls end there."""


def room_of(concurrency: int, threads: int) -> int:
    """Return how many calls of all kinds one worker may hold at once, without those that are aside."""
    return concurrency + threads * (1 + AHEAD) + MOST_BROADCASTS


def places_for(room: int) -> int:
    """Return the number of start marks of a worker with this room: a power of two, so that the place follows from a call's id.

    It exceeds the room and the calls that may be aside, which keep their marks.
    """
    return 1 << (room + MOST_ASIDE).bit_length()


def places_at_first(room: int) -> int:
    """Return how many start marks of a worker with this room are in use while no call is aside.

    It exceeds the room: a garbage collection between choosing a worker and sending the call may run a `__del__` that takes the
    place.
    """
    return min(1 << room.bit_length(), places_for(room) - MOST_ASIDE)
