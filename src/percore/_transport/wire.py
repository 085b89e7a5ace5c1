"""Frames between the program and a host: a head, and as many bytes as it says. No I/O: the owner of a socket feeds a Decoder.

    kind 1 byte │ number 8 bytes │ length 8 bytes │ check of the data 4 bytes │ check of the head 4 bytes │ data

The number is that of a worker, of a parcel or of a question, as the kind says; the data is a marshalled value, the messages of a
worker as `codec` writes them, or a large payload as it is. Each kind has a limit of its length. A head is checked before anything
else is read, and the data before it is decoded, so damaged data costs no memory. Both checks are CRC-32. A large payload has none:
it would take as long as a copy, and unpickling shows whether the payload is whole.
"""

import marshal
import struct
from collections.abc import Callable
from enum import IntEnum
from typing import Any, Final, NamedTuple
from zlib import crc32

from percore._protocol.messages import BrokenFrame

_HEAD: Final = struct.Struct("<BQQI")
_CHECK: Final = struct.Struct("<I")
_CHECKED_HEAD: Final = struct.Struct("<BQQII")
HEAD_SIZE: Final = _CHECKED_HEAD.size
READ_COUNT: Final = struct.Struct("<Q")
"""The number of messages read, at the beginning of ANSWERS."""

_BUFFER: Final = 1 << 18
"""Bytes that are received at a time. A frame that is larger gets memory of its own."""

MOST_NUMBER: Final = 1 << 62

OF_HOST: Final = MOST_NUMBER
"""In place of the slot of a worker: the record is the host's own."""

VERSION: Final = 1
"""Of this format. The proof of each side begins with it (`wire_proof`)."""


class Kind(IntEnum):
    """What a frame is about, and whose number it has."""

    # Either way.
    BEAT = 1  # number: 0; data: when it was sent, by the sender's monotonic clock
    MESSAGES = 2  # number: a worker; data: messages
    # To the host.
    SETUP = 10  # number: 0; data: a pickled HostOrders
    START = 11  # number: a new worker; data: its index, its generation, and the levels of loggers
    KEEP = 12  # number: a parcel; data: its pickle
    DROP = 13  # number: a parcel
    PARCEL = 14  # number: a worker; data: op, call id, number of a parcel
    KILL = 15  # number: a worker; data: a signal
    EXAMINE = 16  # number: a worker
    RENEW = 17  # number: 0
    RESIZE = 18  # number: how many workers
    USAGE = 19  # number: a question; data: role and number of each worker
    MEMORY = 20  # number: a question; data: numbers of workers, and how much is enough
    END = 21  # number: 0
    # To the program.
    HELLO = 30  # number: the protocol's version; data: a Hello
    PAYLOAD = 31  # number: a worker; data: the pickle that PAYLOAD_OF has announced
    READ = 32  # number: a worker; data: how many messages it has read
    LOG = 33  # number: the slot of a worker, or OF_HOST; data: a record
    BROKEN = 34  # number: a worker; data: why its channel broke
    CONDITION = 35  # number: a worker; data: a Condition
    FATES = 36  # number: a worker; data: how far some calls have come
    EXIT = 37  # number: a worker; data: code, why, place_lost and peak of an Exit, and its pid
    ANSWER = 38  # number: a question; data: the answer
    REFUSED = 39  # number: 0; data: why the host cannot be used
    PAYLOAD_OF = 40  # number: a worker; data: op and call id of the message whose pickle is the next PAYLOAD
    ANSWERS = 41  # number: a worker; data: how many messages it has read, 8 bytes, and messages: READ after MESSAGES


UNCHECKED: Final = frozenset({int(Kind.KEEP), int(Kind.PAYLOAD)})
"""The kinds of large payloads."""

_SMALL: Final = 64 << 10
_LARGE: Final = 16 << 20
_NONE: Final = frozenset({Kind.EXAMINE, Kind.RENEW, Kind.RESIZE, Kind.END, Kind.DROP})
_MANY: Final = frozenset(
    (Kind.MESSAGES, Kind.ANSWERS, Kind.SETUP, Kind.FATES, Kind.START, Kind.LOG, Kind.CONDITION, Kind.USAGE, Kind.ANSWER)
)


def limits(max_message: int) -> dict[int, int]:
    """Return how many bytes the data of each kind of frame may have. `max_message`: those of the largest pickle."""
    most = dict.fromkeys(Kind, _SMALL) | dict.fromkeys(_NONE, 0) | dict.fromkeys(_MANY, _LARGE)
    return {int(kind): size for kind, size in (most | {Kind.MEMORY: _LARGE}).items()} | {
        int(Kind.KEEP): max_message,
        int(Kind.PAYLOAD): max_message,
    }


def head(kind: int, number: int, *data: memoryview | bytes) -> bytes:
    """Return the head of a frame whose data consists of these pieces."""
    check = 0
    if kind not in UNCHECKED:
        for piece in data:
            check = crc32(piece, check)
    first = _HEAD.pack(kind, number, sum(map(len, data)), check)
    return first + _CHECK.pack(crc32(first))


def pack(value: object) -> bytes:
    """Return the data of a frame for a value of marshal's types."""
    return marshal.dumps(value, 2)  # type: ignore[arg-type]  # no references: see `codec`


def unpack(data: memoryview | bytes | bytearray, *kinds: type | tuple[type, ...]) -> list[Any]:
    """Return the value of `pack`, a tuple of these types.

    Raises:
        BrokenFrame: it is something else.
    """
    try:
        values = marshal.loads(data)
    except (EOFError, ValueError, TypeError) as error:
        raise BrokenFrame(f"a frame does not decode: {error}") from error
    if type(values) is not tuple or len(values) != len(kinds):
        raise BrokenFrame("a frame has other values than its kind")
    for value, kind in zip(values, kinds, strict=True):
        if not isinstance(value, kind):
            raise BrokenFrame(f"a frame has {type(value).__name__} in place of {kind}")
    return list(values)


class Frame(NamedTuple):
    """A frame that has arrived. Its data may be a view that is valid until the next call of the decoder."""

    kind: int
    number: int
    data: memoryview | bytearray


Room = Callable[[int, int, int], "memoryview | bytearray"]
"""Returns memory for the data of a large frame, by its kind, its number and its length. Raises BrokenFrame if it may not come."""


def _own_memory(_kind: int, _number: int, length: int) -> bytearray:
    return bytearray(length)


class Decoder:
    """Turns bytes into frames: fill `buffer`, say how much by `filled`, take frames by `next` until there is none."""

    def __init__(self, most: dict[int, int], room: Room = _own_memory) -> None:
        """`most`: the bytes that the data of each kind may have. Other kinds are refused. `room`: where large frames are put."""
        self.most = most
        self.room = room
        self._buffer = memoryview(bytearray(_BUFFER))
        self._start = self._end = 0
        self._large: memoryview | bytearray | None = None
        self._has = 0
        """Bytes of `_large` that have arrived."""
        self._head = (0, 0, 0, 0)

    def buffer(self) -> memoryview:
        """Return memory for the next bytes. It is not empty."""
        if self._large is not None:
            return memoryview(self._large)[self._has :]
        if self._start == self._end:
            self._start = self._end = 0
        elif self._start:
            rest = bytes(self._buffer[self._start : self._end])
            self._buffer[: len(rest)] = rest
            self._start, self._end = 0, len(rest)
        return self._buffer[self._end :]

    def filled(self, count: int) -> None:
        """So many bytes of `buffer` have arrived."""
        if self._large is not None:
            self._has += count
        else:
            self._end += count

    def next(self) -> Frame | None:
        """Return the next frame that is complete, or None.

        Raises:
            BrokenFrame: a head is invalid. Nothing more can be read.
        """
        large = self._large
        if large is not None:
            if self._has < len(large):
                return None
            self._large = None
            return self._whole(large)
        start = self._start
        if self._end - start < HEAD_SIZE:
            return None
        kind, number, length, check, own = _CHECKED_HEAD.unpack_from(self._buffer, start)
        self._head = kind, number, length, check
        if crc32(self._buffer[start : start + _HEAD.size]) != own:
            raise BrokenFrame("a frame whose head is damaged")
        if length > self.most.get(kind, -1) or number > MOST_NUMBER:
            raise self._refusal(kind, number, length)
        start += HEAD_SIZE
        if self._end - start >= length:
            self._start = start + length
            return self._whole(self._buffer[start : self._start])
        if HEAD_SIZE + length > _BUFFER:
            large = self.room(kind, number, length)
            self._has = self._end - start
            large[: self._has] = self._buffer[start : self._end]
            self._start = self._end = 0
            self._large = large
        return None

    def _whole(self, data: memoryview | bytearray) -> Frame:
        kind, number, _, check = self._head
        if kind not in UNCHECKED and crc32(data) != check:
            raise BrokenFrame(f"a frame {Kind(kind).name} whose data is damaged")
        return Frame(kind, number, data)

    def _refusal(self, kind: int, number: int, length: int) -> BrokenFrame:
        most = self.most.get(kind)
        if most is None:
            return BrokenFrame(f"a frame of kind {kind}")
        if length > most:
            return BrokenFrame(f"a frame {Kind(kind).name} of {length} bytes, where {most} are allowed")
        return BrokenFrame(f"a frame {Kind(kind).name} with the number {number}")
