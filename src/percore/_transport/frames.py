"""Sizes: of the memory that a worker maps, and of the frames of its channel, with how many queued messages go into the next one."""

from collections import deque
from typing import TYPE_CHECKING, Final, NamedTuple

from percore._protocol.messages import MARK_WORDS, Message
from percore._transport.codec import HEAVIEST_BATCH, encode
from percore._transport.doorbell import MOST_BYTES
from percore._transport.ring import largest_frame
from percore._transport.slots import INLINE_LIMIT

if TYPE_CHECKING:
    from percore._transport.memory import Memory

RING_SIZE: Final = 1 << 19
MAX_FRAME: Final = RING_SIZE // 2
"""Bytes of a frame of several messages."""
LARGEST_FRAME: Final = largest_frame(RING_SIZE)
"""Bytes of a frame of one message. No kind of message comes near this size; a test of `_protocol.messages` checks each."""
HEAVY: Final = 1 << 17
"""Bytes of queued bodies from which on `next_frame` looks at their sizes."""
_BATCH: Final = 256

assert RING_SIZE <= MOST_BYTES, "the sum of several rings of a bell could overflow"
assert max(INLINE_LIMIT, HEAVIEST_BATCH) < MAX_FRAME < LARGEST_FRAME, "a message could never fit into the ring"


class Layout(NamedTuple):
    """The sizes of the memory that a worker maps.

    A worker's cell holds the ring to the worker, the ring to the supervisor, and the start marks.

    Attributes:
        places: how many start marks the cell has.
        arena_size: bytes of the arena.
        results_size: bytes of the worker's memory for result slots.
        slot_size: bytes of every slot.
        max_message: the largest pickle in bytes.
        leases: how many slots of the arena one worker may keep in use after it has read them.
    """

    places: int
    arena_size: int
    results_size: int
    slot_size: int
    max_message: int
    leases: int

    @property
    def cell_size(self) -> int:
        return 2 * RING_SIZE + self.places * MARK_WORDS * 8

    def marks(self, cell: "Memory") -> memoryview:
        """Return a new view of the start marks in a cell."""
        return cell.view[2 * RING_SIZE : self.cell_size].cast("Q")


def checked(data: bytes, op: int) -> bytes:
    """Return `data`, the frame of a message of kind `op`, if it can ever fit into the ring.

    Raises:
        ValueError: it never can. Waiting for room would silently stop the channel.
    """
    if len(data) > LARGEST_FRAME:
        raise ValueError(f"a message ({op}) of {len(data)} bytes: the largest that fits into the ring has {LARGEST_FRAME}")
    return data


def next_frame(queue: deque[Message], *, is_heavy: bool) -> tuple[bytes, int]:
    """Take as many messages from the queue as fit into a frame. Threads may append to the queue meanwhile.

    `is_heavy`: whether the bodies in the queue have HEAVY bytes or more.

    Returns:
        The frame, and how many bytes the bodies in it have; 0 if it has taken the whole queue.

    Raises:
        ValueError: a message is too large for any frame. It has left the queue.
    """
    if not is_heavy:
        count = min(len(queue), _BATCH)
    else:
        # By index: an iterator would raise if a thread appended meanwhile.
        count, size = 0, 0
        while count < min(len(queue), _BATCH):
            body = queue[count][2]
            size += len(body) if type(body) is bytes else 0
            if count and size > HEAVY:
                break
            count += 1
    messages = [queue.popleft() for _ in range(count)]
    data = encode(messages)
    while len(data) > MAX_FRAME and len(messages) > 1:
        half = len(messages) // 2
        queue.extendleft(reversed(messages[half:]))
        messages = messages[:half]
        data = encode(messages)
    checked(data, messages[0][0])
    return data, sum(len(body) for _, _, body in messages if type(body) is bytes) if queue else 0
