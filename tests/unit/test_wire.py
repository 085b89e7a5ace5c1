"""Frames between a program and a host: whatever is sent arrives, in any pieces, and a wrong head costs nothing."""

import marshal
import os
import struct
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from percore._protocol.messages import BrokenFrame
from percore._transport.wire import HEAD_SIZE, MOST_NUMBER, Decoder, Kind, head, limits, pack, unpack
from percore._transport.wire_proof import (
    ANSWER_SIZE,
    FIRST_SIZE,
    LAST_SIZE,
    MAGIC,
    TOKEN_SIZE,
    HostProof,
    NotProven,
    ProgramProof,
)

MOST = limits(1 << 20)
TOKEN = bytes(range(TOKEN_SIZE))


def feed(decoder: Decoder, data: bytes, most: int) -> list[tuple[int, int, bytes]]:
    """Give the decoder these bytes, at most so many at a time, and return the frames."""
    frames = []
    while data:
        room = decoder.buffer()
        count = min(len(room), len(data), most)
        assert count, "there is always room"
        room[:count] = data[:count]
        decoder.filled(count)
        data = data[count:]
        while (frame := decoder.next()) is not None:
            frames.append((frame.kind, frame.number, bytes(frame.data)))
    return frames


def framed(kind: int, number: int, data: bytes) -> bytes:
    return head(kind, number, data) + data


@given(
    frames=st.lists(st.tuples(st.sampled_from([Kind.MESSAGES, Kind.KEEP]), st.integers(0, MOST_NUMBER), st.binary(max_size=99))),
    most=st.integers(1, 200),
)
def test_frames_arrive_whole_and_in_order_in_any_pieces(frames: list[tuple[Kind, int, bytes]], most: int) -> None:
    assert feed(Decoder(MOST), b"".join(framed(*frame) for frame in frames), most) == frames


@pytest.mark.parametrize("size", [(1 << 18) - HEAD_SIZE, (1 << 18) - HEAD_SIZE + 1, 1 << 18, (1 << 20) - 1, 1 << 20])
def test_a_large_frame_gets_memory_of_its_own(size: int) -> None:
    frames = [(Kind.READ, 1, b"before"), (Kind.KEEP, 2, os.urandom(size)), (Kind.READ, 3, b"after")]
    for most in (1 << 16, 1 << 30):
        assert feed(Decoder(MOST), b"".join(framed(*frame) for frame in frames), most) == frames


def forged(kind: int, number: int, length: int) -> bytes:
    """A head whose check is right."""
    first = struct.pack("<BQQI", kind, number, length, 0)
    return first + struct.pack("<I", crc32(first))


@given(
    frame=st.tuples(st.sampled_from([Kind.MESSAGES, Kind.EXIT]), st.integers(0, MOST_NUMBER), st.binary(max_size=99)),
    data=st.data(),
)
def test_a_changed_byte_is_seen_before_anything_is_decoded(frame: tuple[Kind, int, bytes], data: st.DataObject) -> None:
    damaged = bytearray(framed(*frame))
    damaged[data.draw(st.integers(0, len(damaged) - 1))] ^= data.draw(st.integers(1, 255))
    with pytest.raises(BrokenFrame, match="damaged"):
        feed(Decoder(MOST), bytes(damaged), 1 << 16)


@pytest.mark.parametrize(
    ("kind", "number", "length", "text"),
    [
        (0, 0, 0, "of kind 0"),
        (255, 0, 0, "of kind 255"),
        (Kind.END, 0, 1, "END of 1 bytes, where 0 are allowed"),
        (Kind.KEEP, 0, (1 << 20) + 1, "KEEP of 1048577 bytes"),
        (Kind.MESSAGES, 0, 1 << 62, "MESSAGES of"),
        (Kind.MESSAGES, MOST_NUMBER + 1, 1, "with the number"),
    ],
)
def test_a_wrong_head_is_refused_before_its_data(kind: int, number: int, length: int, text: str) -> None:
    with pytest.raises(BrokenFrame, match=text):
        feed(Decoder(MOST), forged(kind, number, length), 1 << 16)


def test_kinds_have_numbers_of_their_own() -> None:
    assert len(Kind.__members__) == len(set(Kind))  # else two names were one kind


def test_each_side_takes_its_own_kinds_alone() -> None:
    with pytest.raises(BrokenFrame, match="of kind 37"):
        feed(Decoder({int(Kind.BEAT): 8}), framed(Kind.EXIT, 1, b""), 1 << 16)


@given(data=st.binary(max_size=400), most=st.integers(1, 50))
@settings(max_examples=300)
def test_any_bytes_give_frames_or_a_broken_frame(data: bytes, most: int) -> None:
    try:
        frames = feed(Decoder(MOST), data, most)
    except BrokenFrame:
        return
    assert all(len(frame[2]) <= MOST[frame[0]] for frame in frames)


VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=9) | st.binary(max_size=9),
    lambda inner: (
        st.lists(inner, max_size=3) | st.lists(inner, max_size=3).map(tuple) | st.dictionaries(st.text(), inner, max_size=2)
    ),
    max_leaves=9,
)
"""What marshal writes. (Not any bytes: a length that is not true lets marshal take gigabytes, which the checks keep from it.)"""


@given(value=VALUES, cut=st.integers(0, 99))
@settings(max_examples=300)
def test_any_value_is_one_of_the_right_types_or_broken(value: object, cut: int) -> None:
    try:
        (found,) = unpack(pack(value)[:-cut] if cut else pack(value), int)
    except BrokenFrame:
        return
    assert type(found) in (int, bool)


def test_values_are_those_of_their_kind() -> None:
    assert unpack(pack((1, "a", None)), int, str, (int, type(None))) == [1, "a", None]
    for wrong in (pack((1,)), pack(("1", "a")), pack([1, "a"]), marshal.dumps(1), b"", b"("):
        with pytest.raises(BrokenFrame):
            unpack(wrong, int, str)


# The proof


def test_both_sides_prove_the_token() -> None:
    program, host = ProgramProof(TOKEN), HostProof(TOKEN)
    answer = host.answer(program.first)
    last = program.last(answer)
    assert [*map(len, (program.first, answer, last))] == [FIRST_SIZE, ANSWER_SIZE, LAST_SIZE]
    host.check(last)


def test_another_token_proves_nothing_to_either_side() -> None:
    program, host = ProgramProof(TOKEN), HostProof(bytes(TOKEN_SIZE))
    answer = host.answer(program.first)
    with pytest.raises(NotProven, match="does not know the token"):
        program.last(answer)
    with pytest.raises(NotProven, match="does not know the token"):
        HostProof(TOKEN).check(os.urandom(LAST_SIZE))


def test_a_message_is_of_no_use_in_another_connection_or_the_other_direction() -> None:
    program, host = ProgramProof(TOKEN), HostProof(TOKEN)
    last = program.last(host.answer(program.first))
    other = HostProof(TOKEN)
    other.answer(program.first)
    with pytest.raises(NotProven):
        other.check(last)
    mirror = HostProof(TOKEN)
    reflected = mirror.answer(program.first)
    with pytest.raises(NotProven):
        mirror.check(reflected[-LAST_SIZE:])


@given(position=st.integers(0, ANSWER_SIZE - 1), change=st.integers(1, 255))
def test_a_changed_byte_of_the_answer_is_refused(position: int, change: int) -> None:
    program = ProgramProof(TOKEN)
    answer = bytearray(HostProof(TOKEN).answer(program.first))
    answer[position] ^= change
    with pytest.raises(NotProven):
        program.last(bytes(answer))


def test_other_programs_and_other_versions_are_told_apart() -> None:
    with pytest.raises(NotProven, match="it is no percore"):
        HostProof(TOKEN).answer(b"GET / HTTP/1.1\r\n".ljust(FIRST_SIZE, b"\n"))
    other = MAGIC[:-1] + bytes([MAGIC[-1] + 1])
    with pytest.raises(NotProven, match="speaks version 2 of the protocol, and this one version 1"):
        HostProof(TOKEN).answer(other.ljust(FIRST_SIZE, b"\0"))
