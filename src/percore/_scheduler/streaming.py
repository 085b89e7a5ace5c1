"""The decisions of a stream: how many items its worker may produce, when it may produce more, and how the stream ends.

Credits: a worker may produce `prefetch` items that the consumer has not taken. So it is granted `prefetch` items at first, and
one more for each item that the consumer takes. Grants share messages: one is due when the consumer has taken half of `prefetch`
since the last grant. It is sent when the consumer has taken all that has arrived, or the event loop goes on.

    produced <= granted <= taken + prefetch

A generator that has used its credits up waits for its consumer. It does not run then, so it gives its place back and takes it again
with the next grant. Otherwise slow consumers would keep calls waiting, even calls that they need themselves before they take on.

The producer never waits for ever. When the consumer has taken all `granted` items, it has taken `prefetch` of them since the last
grant, which is more than half, so the next grant was due.

    new ──begin──▶ open ──cut──▶ ending ──end──▶ over
     │              └─────────────end────────────▶
     └────────────────────────────end────────────▶
"""

from enum import Enum
from typing import Final

from percore._protocol.messages import BrokenFrame

PATIENCE: Final = 0.01
"""Seconds that a generator waits for its consumer before it gives its place back. A fast consumer takes items long before."""


class Credits:
    """The credits of one stream, counted in items from its start."""

    __slots__ = ("_prefetch", "_step", "arrived", "due_at", "granted", "taken")

    def __init__(self, prefetch: int) -> None:
        self._prefetch = self.granted = prefetch
        self._step = max(1, prefetch // 2)
        self.arrived = self.taken = 0
        self.due_at = self._step
        """When this many items are taken, `grant` is due."""

    def arrive(self, count: int) -> None:
        """Count items that the worker has sent.

        Raises:
            BrokenFrame: the worker has sent more items than it was granted.
        """
        self.arrived += count
        if self.arrived > self.granted:
            raise BrokenFrame(f"{self.arrived} items of a stream, of which {self.granted} were granted")

    @property
    def is_used_up(self) -> bool:
        """Whether the worker may produce nothing more until the next grant."""
        return self.arrived == self.granted

    def grant(self) -> int:
        """Return how many more items the worker may produce now, and count them as granted."""
        before, self.granted = self.granted, self.taken + self._prefetch
        self.due_at = self.taken + self._step
        return self.granted - before


class StreamPhase(Enum):
    """The phases of a stream, as in the diagram above."""

    NEW = "new"
    """No item was requested, and nothing was sent."""

    OPEN = "open"
    ENDING = "ending"
    """The runner closes and has asked the worker to close the generator. Items that still arrive are handed over."""

    OVER = "over"
    """The consumer gets no items but those that have arrived. A worker may still close the generator."""
