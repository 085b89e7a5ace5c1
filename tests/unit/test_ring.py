"""The byte ring: whatever is written comes out whole and in order, and whatever is wrong is a BrokenFrame."""

import struct
import zlib
from collections import deque
from contextlib import suppress

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from percore._protocol.messages import BrokenFrame
from percore._transport.ring import HEADER_SIZE, OWED, RingReader, RingWriter, largest_frame

HEADER = struct.Struct("<II")


def ring(size: int, *, start: int = 0) -> tuple[RingWriter, RingReader, bytearray]:
    """Both ends over the same bytes, as if `start` bytes had passed through already."""
    cell = bytearray(size)
    writer, reader = RingWriter(memoryview(cell)), RingReader(memoryview(cell))
    writer.written = writer.acknowledged = reader.read = reader.end = start
    return writer, reader, cell


def take(reader: RingReader) -> bytes | None:
    data = reader.next() if reader.read != reader.end else None
    return None if data is None else bytes(data)


def drain(reader: RingReader, into: list[bytes]) -> None:
    while (data := take(reader)) is not None:
        into.append(data)


def test_a_new_ring_is_free_and_has_nothing() -> None:
    writer, reader, _ = ring(64)
    assert writer.free() == 64
    assert reader.read == reader.end


@given(data=st.data(), size=st.integers(16, 120), start=st.integers(0, 2**70))
def test_any_frames_in_any_order_of_writing_and_reading(data: st.DataObject, size: int, start: int) -> None:
    writer, reader, _ = ring(size, start=start)
    unpublished, told, unacknowledged = 0, 0, 0
    model: deque[bytes] = deque()
    for step in data.draw(st.lists(st.sampled_from("wwwprra"), max_size=60)):
        if step == "w":
            room = writer.free() - HEADER_SIZE
            if room < 0:
                continue
            frame = data.draw(st.binary(max_size=room))
            assert writer.write(frame) == HEADER_SIZE + len(frame)
            unpublished += HEADER_SIZE + len(frame)
            model.append(frame)
        elif step == "p":
            reader.end += unpublished
            told += unpublished
            unpublished = 0
        elif step == "r":
            frame_read = take(reader)
            if told:
                expected = model.popleft()
                assert frame_read == expected
                told -= HEADER_SIZE + len(expected)
                unacknowledged += HEADER_SIZE + len(expected)
            else:
                assert frame_read is None
        else:
            writer.acknowledge(unacknowledged)
            unacknowledged = 0
        assert writer.free() == size - unpublished - told - unacknowledged


@pytest.mark.parametrize("length", [0, 1, 7, 16, 32])
def test_r1_a_frame_wraps_at_every_offset(length: int) -> None:
    frame = bytes(range(1, length + 1))
    size = 40
    for start in range(size):
        writer, reader, _ = ring(size, start=start)
        count = writer.write(frame)
        reader.end += count
        assert take(reader) == frame
        assert take(reader) is None
        writer.acknowledge(count)
        assert writer.free() == size


def test_a_ring_can_be_filled_to_the_last_byte() -> None:
    writer, reader, _ = ring(64)
    count = writer.write(bytes(64 - HEADER_SIZE))
    assert writer.free() == 0
    reader.end += count
    assert take(reader) == bytes(64 - HEADER_SIZE)


@pytest.mark.parametrize("size", [64, 1000, 1 << 16])
def test_the_largest_frame_fits_whatever_a_reader_does_not_report(size: int) -> None:
    """It reports what it has read once it owes more than its share of the ring."""
    largest = largest_frame(size)
    for before in range(HEADER_SIZE, size, max(1, size // 50)):
        writer, reader, _ = ring(size)
        writer.write(bytes(before - HEADER_SIZE))
        reader.end = writer.written
        drain(reader, [])
        owed = reader.read
        if owed > size // OWED:
            writer.acknowledged = owed
        assert writer.free() >= largest + HEADER_SIZE
        writer.write(bytes(largest))
    writer, _, _ = ring(size)
    writer.written = size // OWED  # the most that is never reported: nothing larger would fit
    assert writer.free() == largest + HEADER_SIZE


def test_a_frame_is_not_seen_before_it_is_published() -> None:
    writer, reader, _ = ring(64)
    count = writer.write(b"secret")
    assert reader.read == reader.end
    reader.end += count
    assert take(reader) == b"secret"


def test_a_frame_can_be_decoded_after_the_next_one_was_looked_at() -> None:
    writer, reader, _ = ring(64)
    reader.end += writer.write(b"one") + writer.write(b"two")
    one, two = reader.next(), reader.next()
    assert (bytes(one or b""), bytes(two or b"")) == (b"one", b"two")
    assert reader.read == reader.end


# What is wrong


@given(
    frames=st.lists(st.binary(min_size=1, max_size=20), min_size=1, max_size=4),
    start=st.integers(0, 127),
    at=st.integers(0, 2**20),
    flip=st.integers(1, 255),
)
def test_a_damaged_byte_is_a_broken_frame_and_what_came_before_is_whole(
    frames: list[bytes], start: int, at: int, flip: int
) -> None:
    writer, reader, cell = ring(128, start=start)
    published = sum(writer.write(frame) for frame in frames)
    cell[(start + at % published) % 128] ^= flip
    reader.end += published
    delivered: list[bytes] = []
    with pytest.raises(BrokenFrame):
        drain(reader, delivered)
    assert delivered == frames[: len(delivered)]
    assert len(delivered) < len(frames)


@given(cell=st.binary(min_size=16, max_size=64), start=st.integers(0, 63), published=st.integers(0, 64))
def test_garbage_and_lies_end_in_broken_frame_or_in_nothing(cell: bytes, start: int, published: int) -> None:
    reader = RingReader(memoryview(cell))
    reader.read = reader.end = start
    try:
        reader.end += min(published, reader.size)
        while take(reader) is not None:
            pass
    except BrokenFrame:
        return
    assert reader.read == reader.end


@given(frames=st.lists(st.binary(max_size=12), max_size=4), start=st.integers(0, 100), lie=st.integers(-100, 100))
def test_a_lie_about_what_was_published_delivers_no_wrong_frame(frames: list[bytes], start: int, lie: int) -> None:
    writer, reader, _ = ring(100, start=start)
    published = sum(writer.write(frame) for frame in frames)
    delivered: list[bytes] = []
    reader.end += max(0, min(published + lie, reader.size))  # the owner lets no other position through
    with suppress(BrokenFrame):
        drain(reader, delivered)
    # Beyond what was written there are zeros, which read as empty frames; decoding one of those fails in the codec.
    assert delivered[: len(frames)] == frames[: len(delivered)]
    assert not any(delivered[len(frames) :])


@pytest.mark.parametrize("length", [1, 57, 2**31, 2**32 - 1])
def test_a_length_beyond_what_was_published(length: int) -> None:
    _, reader, cell = ring(64)
    HEADER.pack_into(cell, 0, length, zlib.crc32(b""))
    reader.end += HEADER_SIZE
    with pytest.raises(BrokenFrame, match=str(length)):
        reader.next()


@pytest.mark.parametrize("count", range(1, HEADER_SIZE))
def test_less_than_a_header(count: int) -> None:
    _, reader, _ = ring(64)
    reader.end += count
    with pytest.raises(BrokenFrame, match="header"):
        reader.next()


def test_a_frame_of_which_the_end_is_missing(subtests: pytest.Subtests) -> None:
    for missing in range(1, 12):
        with subtests.test(missing=missing):
            writer, reader, _ = ring(64)
            reader.end += writer.write(b"whole frame") - missing
            with pytest.raises(BrokenFrame):
                reader.next()


@pytest.mark.parametrize("count", [-1, -(2**40)])
def test_nothing_is_unread(count: int) -> None:
    writer, _, _ = ring(64)
    length = writer.write(b"abc")
    writer.acknowledge(length)
    with pytest.raises(BrokenFrame):
        writer.acknowledge(count)


@settings(max_examples=50)
@given(written=st.lists(st.binary(max_size=8), max_size=3), count=st.integers(0, 2**64))
def test_only_what_was_written_can_be_acknowledged(written: list[bytes], count: int) -> None:
    writer, _, _ = ring(64)
    total = sum(writer.write(data) for data in written)
    if count <= total:
        writer.acknowledge(count)
        assert writer.free() == 64 - total + count
    else:
        with pytest.raises(BrokenFrame, match="acknowledged"):
            writer.acknowledge(count)


def test_release_lets_the_memory_go() -> None:
    writer, reader, cell = ring(64)
    writer.release()
    reader.release()
    cell.append(0)  # BufferError while anybody looks at it
