"""The layout of a payload with buffers beside its pickle.

    pickle │ buffer │ buffer │ … │ table: offset and length of each │ length of the pickle, number of buffers, a zero

Every buffer starts at a multiple of 64 bytes from the payload's start. A pickle ends with a full stop, and this layout with a zero.
So the last byte shows whether a payload has buffers, whether it lies in a slot or in a frame.
"""

import struct
from typing import Final

from percore._protocol.messages import BrokenFrame

BUFFER_LIMIT: Final = 64 << 10
"""Buffers of at least this many bytes travel beside the pickle. Below that a copy costs less than a view."""

ALIGNMENT: Final = 64
"""The alignment of buffers in bytes. Vectorised code is fastest with it."""

_STOP: Final = 0x2E
_ROW: Final = struct.Struct("<QQ")
_END: Final = struct.Struct("<QIB")


def table_of(pickled: int, places: list[tuple[int, int]]) -> bytes:
    """Return the end of a payload: the table for a pickle of `pickled` bytes and buffers at these offsets and lengths."""
    return b"".join(_ROW.pack(*place) for place in places) + _END.pack(pickled, len(places), 0)


def has_buffers(data: memoryview | bytes) -> bool:
    """Whether the payload `data` has buffers beside its pickle."""
    return len(data) > 0 and data[-1] != _STOP


def places_in(data: memoryview | bytes) -> tuple[int, list[tuple[int, int]]]:
    """Return the size of the pickle, and the start and end of each buffer in `data`.

    Raises:
        BrokenFrame: `data` does not end with a valid table, or a buffer does not lie inside it.
    """
    size = len(data) - _END.size
    if size < 0:
        raise BrokenFrame(f"a payload of {len(data)} bytes that is no pickle")
    pickled, count, mark = _END.unpack_from(data, size)
    table = size - count * _ROW.size
    if mark or table < pickled:
        raise BrokenFrame(f"a payload of {len(data)} bytes with {count} buffers beside a pickle of {pickled} bytes")
    places = []
    for offset, length in _ROW.iter_unpack(data[table:size]):
        if offset < pickled or offset + length > table:
            raise BrokenFrame(f"a buffer of {length} bytes at {offset} of {table}")
        places.append((offset, offset + length))
    return pickled, places
