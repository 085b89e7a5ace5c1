"""The calls that wait, and the workers that may take them, as the decisions of this room see them."""

from collections import deque
from collections.abc import Hashable
from typing import Protocol, TypeVar

from percore._scheduler.batching import Batches
from percore._scheduler.lanes import Lanes


class Queued(Protocol):
    """A call or a batch, as the dispatch sees it."""

    kind: int

    @property
    def key(self) -> Hashable | None: ...

    def done(self) -> bool:
        """Whether the call ended while it waited, because it was cancelled."""

    @property
    def size(self) -> int:
        """Number of items; 1 for a call."""


class Seat(Protocol):
    """A ready worker, as the dispatch sees it."""

    index: int

    load: list[int]
    """Places taken, by kind."""

    tickets: int
    """Calls that the worker may still begin. At 0, `load` includes `ROOM_OF_NONE`."""

    @property
    def items(self) -> int:
        """Plain calls sent and not ended. Each item of a batch counts."""

    recalling: bool
    """Whether the worker was asked to return calls and has not answered yet."""

    is_holding: bool
    """Whether the worker, as it last told, does not begin plain calls for now although it has threads for them."""

    def silence(self) -> int:
        """How long the worker has left messages unread, in coarse steps; 0 if that is too short to matter."""

    def has_read(self) -> bool:
        """Whether the worker has read every message. If not, the supervisor looks for calls to send once it has."""


C = TypeVar("C", bound=Queued)
S = TypeVar("S", bound=Seat)


class Queue(Lanes[C, S]):
    """The waiting calls of one map, the single calls of one kind, or the nested calls of one kind and `depth` from 1 on.

    They are calls, calls with keys, and items for batches.
    """

    __slots__ = ("batches", "calls", "depth", "ended", "is_listed", "kind", "lanes_first")

    def __init__(self, kind: int, batches: Batches[C] | None = None, depth: int = 0) -> None:
        super().__init__()
        self.kind = kind
        self.batches = batches
        self.depth = depth
        self.calls: deque[C] = deque()
        self.ended = 0
        self.is_listed = False
        self.lanes_first = False

    def __len__(self) -> int:
        """Number of waiting calls and items, including cancelled calls without keys."""
        return len(self.calls) + self.count + (0 if self.batches is None else len(self.batches))
