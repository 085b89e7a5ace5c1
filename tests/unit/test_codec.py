"""Frames: what goes in comes out, of the same types; what may not go in is told; what is no frame is a BrokenFrame."""

import decimal
import enum
import marshal
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from percore._protocol.messages import BrokenFrame
from percore._transport.codec import SMALL, decode, encode, encode_small, is_inline, is_inline_value, list_small, weight_inline

SCALARS = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**256) + 1, 2**256 - 1),
    st.floats(),
    st.text(st.characters(exclude_categories=()), max_size=40),
    st.binary(max_size=40),
)
ARGS = st.lists(SCALARS, max_size=32).map(tuple)
BODIES = st.one_of(ARGS, SCALARS, st.tuples(st.integers(0, 1), st.binary(max_size=9)))
MESSAGES = st.tuples(st.integers(-8, 2**40), st.integers(0, 2**62), BODIES)


class Text(str):
    __slots__ = ()


class Data(bytes):
    __slots__ = ()


class Whole(int):
    __slots__ = ()


class Real(float):
    __slots__ = ()


class Colour(enum.IntEnum):
    RED = 1


class Mode(enum.StrEnum):
    ON = "on"


def same(one: Any, other: Any) -> bool:
    """Equal in value and in type, NaN and the sign of zero included."""
    if type(one) is not type(other):
        return False
    if isinstance(one, tuple):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, float):
        return (math.isnan(one) and math.isnan(other)) or (one == other and math.copysign(1, one) == math.copysign(1, other))
    return bool(one == other)


@given(st.lists(MESSAGES, max_size=8))
def test_what_goes_in_comes_out(messages: list[tuple[int, int, Any]]) -> None:
    data = encode(messages)
    assert same(tuple(decode(data)), tuple(messages))
    assert same(tuple(decode(memoryview(data))), tuple(messages))


@given(ARGS)
def test_small_scalars_are_inline(args: tuple[Any, ...]) -> None:
    assert is_inline(args)


@given(st.one_of(SCALARS, st.integers(), st.text(), st.lists(st.none()), st.binary(), st.complex_numbers()))
def test_one_value_is_judged_as_one_argument(value: Any) -> None:
    assert is_inline_value(value) == is_inline((value,)) == is_inline((None, value))


def test_only_exact_immutable_types_are_inline(subtests: pytest.Subtests) -> None:
    for value in [
        Text("x"),
        Data(b"x"),
        Whole(1),
        Real(1.0),
        Colour.RED,
        Mode.ON,
        bytearray(b"x"),
        memoryview(b"x"),
        1j,
        decimal.Decimal(1),
        (),
        (1,),
        [],
        {},
        frozenset(),
        Ellipsis,
        int,
        object(),
    ]:
        with subtests.test(value=value):
            assert not is_inline_value(value)
            assert not is_inline((1, value))


@pytest.mark.parametrize("value", [2**256, -(2**256), 1 << 9999], ids=["2**256", "-2**256", "enormous"])
def test_a_huge_int_is_not_inline(value: int) -> None:
    assert not is_inline_value(value)
    assert not is_inline((value,))
    assert is_inline_value(2**256 - 1)


def test_texts_are_small_together() -> None:
    assert is_inline(("x" * 4096,))
    assert is_inline(("x" * 2048, b"x" * 2048))
    assert not is_inline(("x" * 4097,))
    assert not is_inline((b"x" * 4097,))
    assert not is_inline(("x" * 2048, b"x" * 2049))
    assert not is_inline_value("x" * 4097)


def test_many_arguments_are_not_inline() -> None:
    assert is_inline((1,) * 32)
    assert not is_inline((1,) * 33)
    assert is_inline(())


# Many values at once


VALUES = st.one_of(SCALARS, st.integers(), st.text(min_size=4090, max_size=4100), st.lists(st.none()), st.complex_numbers())


@given(st.one_of(st.lists(VALUES, max_size=10), st.lists(st.integers()), st.lists(st.text()), st.lists(st.floats())))
def test_many_values_are_judged_as_each_of_them(values: list[Any]) -> None:
    weight = weight_inline(values)
    assert (weight is not None) == all(map(is_inline_value, values))


EDGES: list[Any] = [0, 1, -1, 0x69696969, 2**31 - 1, -(2**31), 2**31, -(2**31) - 1, 0x69 << 40, True, None, 0.5, "i", b"iiii", []]


@given(st.lists(st.one_of(st.integers(), st.integers(-(2**31), 2**31 - 1), st.sampled_from(EDGES)), max_size=30))
def test_small_ints_are_encoded_once_and_cut_anywhere(values: list[Any]) -> None:
    data = encode_small(values)
    if not all(type(value) is int and -(2**31) <= value < 2**31 for value in values):
        assert data == b""
        return
    assert len(data) == SMALL * len(values)
    for first in range(len(values)):
        decoded = marshal.loads(list_small(data[first * SMALL :]))
        assert decoded == values[first:]
        assert set(map(type, decoded)) == {int}


@given(st.lists(SCALARS, min_size=1, max_size=40))
def test_no_value_takes_more_than_its_weight(values: list[Any]) -> None:
    weight = weight_inline(values)
    assert weight is not None
    assert all(len(marshal.dumps(value, 2)) <= weight + 16 for value in values)


@pytest.mark.parametrize(
    "values",
    [[1, 2**255], ["é" * 4096, ""], [b"x" * 4096], ["\U0001f600" * 4096], ["\udcff" * 4096], [0.5, None, True], [1, "x" * 4096]],
    ids=["ints", "text", "bytes", "wide", "surrogates", "plain", "mixed"],
)
def test_the_heaviest_values_are_within_their_weight(values: list[Any]) -> None:
    weight = weight_inline(values)
    assert weight is not None
    assert max(len(marshal.dumps(value, 2)) for value in values) <= weight + 16


@pytest.mark.parametrize(
    ("values", "most"),
    [([1, 2, 3], 64), (["a" * 10, "b"], 64), ([b"a" * 10], 64), ([True, False], 64), ([1.5, None], 64), ([], 64)],
    ids=["ints", "text", "bytes", "bools", "plain", "none"],
)
def test_many_light_values_fit_a_batch(values: list[Any], most: int) -> None:
    weight = weight_inline(values)
    assert weight is not None
    assert weight <= most


@pytest.mark.parametrize(
    "values",
    [[1, 2**256], [-(2**256), 1], ["x" * 4097], ["", b"x" * 4097], [1, []], [None, Text("x")], [Whole(1)], [True, Colour.RED]],
    ids=["huge", "hugely negative", "long text", "long bytes", "list", "own text", "own int", "enum"],
)
def test_one_value_that_cannot_travel_as_it_is_is_enough(values: list[Any]) -> None:
    assert weight_inline(values) is None
    assert weight_inline(values[::-1]) is None


def test_messages_share_nothing_by_reference() -> None:
    text = "shared" * 10
    one, other = decode(encode([(1, 1, (text, text)), (1, 2, (text,))]))
    assert one == (1, 1, (text, text))
    assert other == (1, 2, (text,))


# What is no frame. The ring's CRC comes before the codec, so that it need not stand up to malice: garbage here keeps to what does
# not make marshal ask for gigabytes.


@given(st.lists(MESSAGES, min_size=1, max_size=4), st.data())
def test_a_frame_cut_short_is_broken(messages: list[tuple[int, int, Any]], data: st.DataObject) -> None:
    whole = encode(messages)
    with pytest.raises(BrokenFrame):
        decode(whole[: data.draw(st.integers(0, len(whole) - 1))])


@given(st.binary(max_size=30).map(lambda garbage: bytes(byte for byte in garbage if byte & 0x7F not in b"(<>[{ciluastrRxyzAfIgZ:")))
def test_garbage_is_broken(garbage: bytes) -> None:
    with pytest.raises(BrokenFrame):
        decode(garbage)


def test_known_garbage_is_broken(subtests: pytest.Subtests) -> None:
    for data in [
        b"",
        b"[",
        b"0",
        b"\xff" * 8,
        b"?" * 8,
        b"[\xff\xff\xff\xff",
        b"[\x01\0\0\0?",
        b"[\x01\0\0\0u\x02\0\0\0\xff\xff",
        b"[\x01\0\0\0" * 3000,
        b"[\x01\0\0\0R\x09\0\0\0",
        b"{0",
    ]:
        with subtests.test(data=data), pytest.raises(BrokenFrame):
            decode(data)


@pytest.mark.parametrize("value", [None, 1, "text", b"bytes", (), ((1, 2, 3),), {}, frozenset()])
def test_another_value_than_a_list_is_broken(value: Any) -> None:
    with pytest.raises(BrokenFrame, match=type(value).__name__):
        decode(marshal.dumps(value, 2))
