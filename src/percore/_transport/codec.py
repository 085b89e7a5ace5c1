"""Encode messages as frames, and the items of maps as the bodies of messages, and decode them.

Frames are marshalled: marshal is several times faster than pickle for scalars, and loading never runs code. Three rules make it
safe:

- a value goes in as it is only if its type is exactly one of a few immutable types. marshal would silently turn other buffers into
  bytes, and immutable values may be shared;
- version 2 is used, which has no references;
- the ring checks its CRC before marshal reads a frame, because damaged data can make marshal allocate gigabytes.
"""

import marshal
from collections.abc import Collection, Sequence
from operator import countOf
from typing import Any, Final

from percore._protocol.messages import BrokenFrame, Message

_VERSION = 2
_PLAIN = frozenset({int, float, bool, type(None)})
_TEXT_LIMIT = 4096
_INT_LIMIT = 1 << 256
_LEAST = 1 - _INT_LIMIT
_COUNT_LIMIT = 32

SMALL: Final = 5
"""Bytes of an int of up to 32 bits in a frame: the letter i, and the value."""

_HEAD: Final = 5
"""Bytes before the items of a list or the text of a string: the type, and the length."""

_SMALL_LIMIT: Final = 1 << 31
_DIGIT: Final = 15
"""How many bits of a larger int take two bytes in a frame."""
_HEAVIEST_INT: Final = SMALL + 2 * -(-256 // _DIGIT)
_HEAVIEST_SCALAR: Final = 9
"""Bytes of a float in a frame; bool and None take less."""


def is_inline_value(value: object) -> bool:
    """Whether `value` can travel in a frame as it is: it is small, and its type is exactly an immutable one."""
    kind = type(value)
    if kind is int:
        return _LEAST <= value < _INT_LIMIT  # type: ignore[operator]
    if kind is str or kind is bytes:
        return len(value) <= _TEXT_LIMIT  # type: ignore[arg-type]
    return kind in _PLAIN


def is_inline(args: tuple[object, ...]) -> bool:
    """Like `is_inline_value`, for the arguments of a call. There must not be too many, and their total size must be small."""
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
    """Return an upper bound on the bytes that `args` take together in a frame, or None if one of them is not inline."""
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
    """Encode ints of up to 32 bits as in a frame, `SMALL` bytes each. Return empty bytes if `values` has any other value.

    A map of ints spends most of its time in checking each value. It is fastest to encode all values at once and check the result.
    """
    count = len(values)
    if countOf(map(type, values), int) < count:
        return b""
    data = marshal.dumps(values, _VERSION)
    if len(data) != _HEAD + SMALL * count or data[_HEAD::SMALL].count(b"i") < count:
        return b""
    return data[_HEAD:]


def list_small(data: bytes) -> bytes:
    """Turn ints encoded by `encode_small` into the marshalled form of a list of them."""
    return b"[" + (len(data) // SMALL).to_bytes(_HEAD - 1, "little") + data


def weight_inline(values: list[object]) -> int | None:
    """Return an upper bound on the bytes that the largest of `values` takes in a frame, or None if one of them is not inline."""
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


# Items of maps: `Store` and `WorkerChannel` say what these functions promise.

HEAVIEST_BATCH: Final = 65_536
"""Bytes that the items of a batch may take, which must fit into one frame."""

_LARGEST_PICKLE: Final = 16_384
"""Bytes of the largest pickle that is part of a batch."""


def weigh(body: object) -> int | None:
    if type(body) is tuple:
        return weight_of(body)
    return len(body) if type(body) is bytes and len(body) <= _LARGEST_PICKLE else None


def weigh_rows(rows: list[object]) -> tuple[int, bytes] | None:
    data = encode_small(rows)
    if data:
        return SMALL, data
    weight = weight_inline(rows)
    return None if weight is None else (weight, b"")


def pack_items(function: int, bodies: list[Any], data: bytes, *, is_bare: bool) -> bytes:
    return marshal.dumps((function, list_small(data) if data else bodies, is_bare), _VERSION)


def unpack_items(body: bytes) -> tuple[int, list[Any], bool]:
    function, bodies, is_bare = marshal.loads(body)
    return function, marshal.loads(bodies) if type(bodies) is bytes else bodies, is_bare


def pack_values(first: int, seconds: float, values: list[Any], pickled: list[int]) -> bytes:
    return marshal.dumps((first, seconds, values, pickled), _VERSION)


def unpack_values(body: bytes) -> tuple[int, float, list[Any], list[int]]:
    try:
        first, seconds, values, pickled = marshal.loads(body)
    except (EOFError, ValueError, TypeError) as error:
        raise BrokenFrame(f"results of a batch do not decode: {error}") from error
    if type(values) is not list:
        raise BrokenFrame(f"results of a batch are {type(values).__name__}")
    return first, seconds, values, pickled


# Frames


def encode(messages: Sequence[Message]) -> bytes:
    """Encode messages as the data of one frame."""
    return marshal.dumps(messages, _VERSION)  # type: ignore[arg-type]  # bodies are inline values and pickles


def decode(data: memoryview | bytes) -> list[Message]:
    """Decode the messages of one frame. Each message is checked only when its receiver unpacks it.

    Raises:
        BrokenFrame: `data` is not the data of a frame.
    """
    try:
        messages = marshal.loads(data)
    except (EOFError, ValueError, TypeError) as error:
        raise BrokenFrame(f"frame does not decode: {error}") from error
    if type(messages) is not list:
        raise BrokenFrame(f"frame holds {type(messages).__name__}")
    return messages
