"""Messages to frames and back.

marshal, because it is several times faster than pickle for scalars and cannot run anyone's code. Three things keep it right:
only values whose type is exactly one of a few immutable ones go in as they are (marshal silently turns other buffers into bytes;
immutable, so that sharing is harmless); version 2 (no references); and the ring's CRC is checked before it sees a frame (it can be
led by damaged bytes to ask for gigabytes).
"""

import marshal
from collections.abc import Collection, Sequence
from operator import countOf
from typing import Final

from percore._ipc.ring import BrokenFrame
from percore._messages import Message

_VERSION = 2
_PLAIN = frozenset({int, float, bool, type(None)})
_TEXT_LIMIT = 4096
_INT_LIMIT = 1 << 256
_LEAST = 1 - _INT_LIMIT
_COUNT_LIMIT = 32

SMALL: Final = 5
"""Bytes of an int of up to 32 bits in a frame: an i, and its value."""

_HEAD: Final = 5
"""Bytes before the items of a list or the text of a string: its kind, and its length."""

_SMALL_LIMIT: Final = 1 << 31
_DIGIT: Final = 15
"""Bits of a larger int that take two bytes in a frame."""
_HEAVIEST_INT: Final = SMALL + 2 * -(-256 // _DIGIT)
_HEAVIEST_SCALAR: Final = 9
"""Bytes of a float in a frame; bool and None take less."""


def is_inline_value(value: object) -> bool:
    """Whether this value can travel in a frame as it is: small, and of an exact immutable type."""
    kind = type(value)
    if kind is int:
        return _LEAST <= value < _INT_LIMIT  # type: ignore[operator]
    if kind is str or kind is bytes:
        return len(value) <= _TEXT_LIMIT  # type: ignore[arg-type]
    return kind in _PLAIN


def is_inline(args: tuple[object, ...]) -> bool:
    """As `is_inline_value`, for the arguments of a call: not too many, and small together."""
    text = 0
    for value in args:
        kind = type(value)
        if kind is int:
            if not _LEAST <= value < _INT_LIMIT:  # type: ignore[operator]
                return False
        elif kind is str or kind is bytes:
            text += len(value)  # type: ignore[arg-type]
        elif kind not in _PLAIN:
            return False
    return text <= _TEXT_LIMIT and len(args) <= _COUNT_LIMIT


def weight_of(args: Collection[object]) -> int | None:
    """Bytes that many values take in a frame at most, all together, where `is_inline_value` is true of each; else None."""
    weight = _HEAD
    for value in args:
        kind = type(value)
        if kind is int:
            if -_SMALL_LIMIT <= value < _SMALL_LIMIT:  # type: ignore[operator]
                weight += SMALL
            elif _LEAST <= value < _INT_LIMIT:  # type: ignore[operator]
                weight += _HEAVIEST_INT
            else:
                return None
        elif kind is str or kind is bytes:
            if len(value) > _TEXT_LIMIT:  # type: ignore[arg-type]
                return None
            weight += _HEAD + 4 * len(value)  # type: ignore[arg-type]
        elif kind in _PLAIN:
            weight += _HEAVIEST_SCALAR
        else:
            return None
    return weight


def encode_small(values: list[object]) -> bytes:
    """Many ints of up to 32 bits as they go into a frame, `SMALL` bytes each; empty where there is another value among them.

    What a map of ints takes on its way is mostly looking at each of them: to encode them once and look at that is the quickest way.
    """
    count = len(values)
    if countOf(map(type, values), int) < count:
        return b""
    data = marshal.dumps(values, _VERSION)
    if len(data) != _HEAD + SMALL * count or data[_HEAD::SMALL].count(b"i") < count:
        return b""
    return data[_HEAD:]


def list_small(data: bytes) -> bytes:
    """What `marshal` makes a list of, of what `encode_small` has given."""
    return b"[" + (len(data) // SMALL).to_bytes(_HEAD - 1, "little") + data


def weight_inline(values: list[object]) -> int | None:
    """Bytes that the heaviest of many values takes in a frame at most, where `is_inline_value` is true of each; else None."""
    kinds = set(map(type, values))
    if kinds == {int}:
        largest: int = max(max(values), -min(values))  # type: ignore[type-var, operator, call-overload]
        return SMALL + 2 * -(-largest.bit_length() // _DIGIT) if largest < _INT_LIMIT else None
    if kinds in ({str}, {bytes}):
        longest = max(map(len, values))  # type: ignore[arg-type]
        return 4 * longest + 16 if longest <= _TEXT_LIMIT else None
    if kinds <= _PLAIN:
        return _HEAVIEST_INT if int not in kinds or all(map(is_inline_value, values)) else None
    return 4 * _TEXT_LIMIT + _HEAD if all(map(is_inline_value, values)) else None


def encode(messages: Sequence[Message]) -> bytes:
    """The data of one frame."""
    return marshal.dumps(messages, _VERSION)  # type: ignore[arg-type]  # holds what is_inline let in, and pickles


def decode(data: memoryview | bytes) -> list[Message]:
    """What `encode` was given. The messages themselves are checked by whoever unpacks them: a wrong one fails there.

    Raises:
        BrokenFrame: it is no frame.
    """
    try:
        messages = marshal.loads(data)
    except (EOFError, ValueError, TypeError) as error:
        raise BrokenFrame(f"frame does not decode: {error}") from error
    if type(messages) is not list:
        raise BrokenFrame(f"frame holds {type(messages).__name__}")
    return messages
