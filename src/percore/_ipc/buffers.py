"""Buffers that travel beside a pickle: the layout of a payload that has some.

    pickle │ buffer │ buffer │ … │ table: offset and length of each │ length of the pickle, number of buffers, a zero

Every buffer begins at a multiple of 64 bytes from the payload's start. A pickle ends with a full stop, and this with a zero: so the
last byte tells whether a payload has buffers, wherever it lies.
"""

import struct
from typing import Final

from percore._ipc.ring import BrokenFrame

BUFFER_LIMIT: Final = 64 << 10
"""Bytes from which a buffer travels beside the pickle; below it a copy costs less than a view."""

ALIGNMENT: Final = 64
"""What vectorised code likes to find."""

_STOP: Final = 0x2E
_ROW: Final = struct.Struct("<QQ")
_END: Final = struct.Struct("<QIB")


def table_of(pickled: int, places: list[tuple[int, int]]) -> bytes:
    """The end of a payload whose pickle has so many bytes, and whose buffers lie there: offset and length of each."""
    return b"".join(_ROW.pack(*place) for place in places) + _END.pack(pickled, len(places), 0)


def has_buffers(data: memoryview | bytes) -> bool:
    """Whether these bytes are more than a pickle."""
    return len(data) > 0 and data[-1] != _STOP


def places_in(data: memoryview | bytes) -> tuple[int, list[tuple[int, int]]]:
    """Bytes of the pickle, and beginning and end of each buffer.

    Raises:
        BrokenFrame: they do not lie in these bytes, or end with no table.
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
