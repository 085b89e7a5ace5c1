"""A byte ring for frames: one writer, one reader, positions told by a doorbell.

What must stay true
    Positions are cumulative counts of bytes; neither lies in the memory. The writer owns [written, read + size), the reader
    [read, end): a byte changes hands only when a doorbell carrying the new position has been received, so the kernel orders
    memory (also on ARM) and nobody looks at bytes the other may be writing.
    The writer publishes whole frames, so what a reader is told of is always a whole number of frames.

A frame is 8 bytes of header (length of the data, CRC-32 of the data; little endian) and the data. Both may wrap around the end.
"""

import struct
from typing import Final
from zlib import crc32

_HEADER = struct.Struct("<II")
HEADER_SIZE = _HEADER.size
_pack = _HEADER.pack
_unpack_from = _HEADER.unpack_from


OWED: Final = 4
"""The part of a ring that a reader may have read without telling, where it has no other occasion to tell: one in so many."""


def largest_frame(size: int) -> int:
    """Bytes of data that a frame may have in a ring of `size`: what fits, at the latest when the reader has read everything else.

    A reader tells what it has read when it owes more than a quarter. So it may owe a quarter, and tell nothing more: a larger frame
    could wait for ever.
    """
    return size - size // OWED - HEADER_SIZE


class BrokenFrame(Exception):
    """The peer wrote what it never should: it is broken, and nothing it says can be believed."""


class RingWriter:
    """The writing end."""

    __slots__ = ("_view", "acknowledged", "size", "written")

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self.size = len(view)
        self.written = 0
        self.acknowledged = 0

    def free(self) -> int:
        """Bytes that can be written now."""
        return self.size - self.written + self.acknowledged

    def is_unread(self) -> bool:
        """Whether the peer has not said yet that it read everything."""
        return self.written != self.acknowledged

    def write(self, data: bytes) -> int:
        """Write one frame and return its bytes, header included, to be published by the doorbell. `free()` must hold it."""
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
        """The peer has read `count` bytes more.

        Raises:
            BrokenFrame: it cannot have read what was never written, nor have unread anything.
        """
        self.acknowledged += count
        if count < 0 or self.acknowledged > self.written:
            raise BrokenFrame(f"peer acknowledged {self.acknowledged} of {self.written} bytes")

    def release(self) -> None:
        self._view.release()


class RingReader:
    """The reading end."""

    __slots__ = ("_view", "end", "read", "size")

    def __init__(self, view: memoryview) -> None:
        self._view = view
        self.size = len(view)
        self.read = 0
        self.end = 0

    def publish(self, count: int) -> None:
        """The peer has published `count` bytes more.

        Raises:
            BrokenFrame: more than the ring holds, or less than nothing.
        """
        self.end += count
        if count < 0 or self.end - self.read > self.size:
            raise BrokenFrame(f"peer published {self.end - self.read} bytes into a ring of {self.size}")

    def next(self) -> memoryview | bytes:
        """The data of the next frame, checked, where `read != end`. It may be decoded until its bytes are told as consumed.

        Raises:
            BrokenFrame: a length that does not fit what was published, or a wrong CRC.
        """
        read = self.read
        available = self.end - read
        if available < HEADER_SIZE:
            raise BrokenFrame(f"{available} bytes published: less than a header")
        at = read % self.size
        if at + available <= self.size:  # nothing of it wraps around: the short way
            length, crc = _unpack_from(self._view, at)
            data: memoryview | bytes = self._view[at + HEADER_SIZE : at + HEADER_SIZE + length]
        else:
            length, crc = _HEADER.unpack(self._bytes(read, HEADER_SIZE))
            data = self._bytes(read + HEADER_SIZE, min(length, available - HEADER_SIZE))
        if length > available - HEADER_SIZE:
            raise BrokenFrame(f"frame of {length} bytes in {available} published ones")
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
