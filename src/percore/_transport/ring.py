"""A byte ring for frames, with one writer and one reader. A doorbell carries the positions.

Invariants
    Positions are cumulative counts of bytes, and are not stored in the shared memory. The writer owns [written, read + size), and
    the reader owns [read, end). A byte changes owner only when a side has received the new position by the doorbell. So the kernel
    orders memory accesses (also on ARM), and no side reads bytes that the other may be writing.
    The writer publishes whole frames only, so the reader always sees a whole number of frames.

A frame is a header of 8 bytes (length of the data, CRC-32 of the data, both little endian), and the data. Both may wrap around the
end.
"""

import struct
from typing import Final
from zlib import crc32

from percore._common.steps import step
from percore._protocol.messages import BrokenFrame

_HEADER = struct.Struct("<II")
HEADER_SIZE = _HEADER.size
_pack = _HEADER.pack
_unpack_from = _HEADER.unpack_from


OWED: Final = 4
"""A reader that has nothing to send reports what it has read once that is more than 1/OWED of the ring."""


def largest_frame(size: int) -> int:
    """Return how many bytes of data a frame may have in a ring of `size` bytes, so that it fits once the reader has read the rest.

    A reader reports what it has read when it owes more than a quarter of the ring. If it owes just a quarter, that part never
    becomes free, and a larger frame could wait for ever.
    """
    return size - size // OWED - HEADER_SIZE


@step
class RingWriter:
    """The writing end of a ring."""

    __slots__ = ("_view", "acknowledged", "size", "written")

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self.size = len(view)
        self.written = 0
        self.acknowledged = 0

    def free(self) -> int:
        """Return how many bytes can be written now."""
        return self.size - self.written + self.acknowledged

    def write(self, data: bytes) -> int:
        """Write one frame, which must fit into `free()`. Return its size with the header, for the doorbell to publish."""
        frame = _pack(len(data), crc32(data)) + data
        length = len(frame)
        at = self.written % self.size
        end = at + length
        if end <= self.size:
            self._view[at:end] = frame
        else:
            head = self.size - at
            self._view[at:] = frame[:head]
            self._view[: length - head] = frame[head:]
        self.written += length
        return length

    def acknowledge(self, count: int) -> None:
        """Count `count` bytes more as read by the peer.

        Raises:
            BrokenFrame: `count` is negative, or more than was written.
        """
        self.acknowledged += count
        if count < 0 or self.acknowledged > self.written:
            raise BrokenFrame(f"peer acknowledged {self.acknowledged} of {self.written} bytes")

    def release(self) -> None:
        self._view.release()


@step
class RingReader:
    """The reading end of a ring.

    The owner adds to `end` the bytes that the peer publishes, and checks that `end` stays within `read` and `read + size`.
    """

    __slots__ = ("_view", "end", "read", "size")

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self.size = len(view)
        self.read = 0
        self.end = 0

    def next(self) -> memoryview | bytes:
        """Return the checked data of the next frame. Call this only if `read != end`.

        The data is valid until its bytes are reported as consumed.

        Raises:
            BrokenFrame: the length exceeds what was published, or the CRC is wrong.
        """
        read = self.read
        room = self.end - read - HEADER_SIZE
        if room < 0:
            raise BrokenFrame(f"{room + HEADER_SIZE} bytes published: less than a header")
        at = read % self.size + HEADER_SIZE
        if at + room <= self.size:  # nothing wraps around: the fast path
            length, crc = _unpack_from(self._view, at - HEADER_SIZE)
            data: memoryview | bytes = self._view[at : at + length]
        else:
            length, crc = _HEADER.unpack(self._bytes(read, HEADER_SIZE))
            data = self._bytes(read + HEADER_SIZE, min(length, room))
        if length > room:
            raise BrokenFrame(f"frame of {length} bytes in {room + HEADER_SIZE} published ones")
        if crc32(data) != crc:
            raise BrokenFrame(f"wrong CRC over a frame of {length} bytes")
        self.read = read + HEADER_SIZE + length
        return data

    def _bytes(self, position: int, count: int) -> memoryview | bytes:
        at = position % self.size
        end = at + count
        if end <= self.size:
            return self._view[at:end]
        return b"".join((self._view[at:], self._view[: end - self.size]))

    def release(self) -> None:
        self._view.release()
