"""Buffers beside a pickle: where each lies, what is sent beside and what within, and that no damage is taken for a payload."""

import contextlib
import pickle
from collections.abc import Iterator
from pickle import PickleBuffer
from typing import Any, NoReturn

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from percore._common.errors import PayloadTooLarge
from percore._protocol.messages import BrokenFrame, Payload
from percore._serialization.pickler import dump
from percore._transport import slots as module
from percore._transport.buffers import ALIGNMENT, BUFFER_LIMIT, has_buffers, places_in, table_of
from percore._transport.slots import Sink, SlotWriter
from tests.counts import times
from tests.unit.test_slots import MIB, byte_slots, reader_of

PLAIN = st.recursive(st.none() | st.integers() | st.text(max_size=20) | st.binary(max_size=20), st.lists, max_leaves=8)
LENGTHS = st.lists(st.integers(0, 300), max_size=6)
WAYS = ["slot", "no slot"]


def with_table(pickled: int, lengths: list[int]) -> tuple[bytes, list[tuple[int, int]]]:
    """A payload of so many bytes, and beginning and end of each buffer."""
    data, places = bytearray(b"\1" * pickled), []
    for length in lengths:
        data += bytes(-len(data) % ALIGNMENT)
        places.append((len(data), length))
        data += b"\2" * length
    return bytes(data + table_of(pickled, places)), [(start, start + length) for start, length in places]


# The table


@given(pickled=st.integers(0, 300), lengths=LENGTHS)
def test_what_a_table_tells_is_read_back(pickled: int, lengths: list[int]) -> None:
    data, places = with_table(pickled, lengths)
    for form in (data, memoryview(data)):
        assert has_buffers(form)
        assert places_in(form) == (pickled, places)


@settings(max_examples=times(30, 1000))
@pytest.mark.long
@given(thing=PLAIN)
def test_a_pickle_alone_has_no_buffers(thing: Any) -> None:
    data = pickle.dumps(thing, protocol=5)
    assert not has_buffers(data)
    assert not has_buffers(memoryview(data))


def test_nothing_at_all_has_no_buffers() -> None:
    assert not has_buffers(b"")


def lies_within(data: bytes) -> None:
    """Damage shows as BrokenFrame and as nothing else; whatever else is read lies where buffers can lie."""
    with contextlib.suppress(BrokenFrame):
        pickled, places = places_in(data)
        assert 0 <= pickled <= len(data)
        for start, end in places:
            assert pickled <= start <= end <= len(data) - 13 - 16 * len(places)


@given(data=st.binary(max_size=200))
def test_any_bytes_are_a_broken_frame_or_lie_within(data: bytes) -> None:
    lies_within(data)


@given(
    pickled=st.integers(0, 100),
    lengths=LENGTHS,
    damage=st.lists(st.tuples(st.integers(1, 120), st.integers(0, 255)), min_size=1, max_size=8),
    cut=st.integers(0, 40),
)
def test_a_damaged_table_is_a_broken_frame_or_lies_within(
    pickled: int, lengths: list[int], damage: list[tuple[int, int]], cut: int
) -> None:
    data = bytearray(with_table(pickled, lengths)[0])
    for place, value in damage:
        if place <= len(data):
            data[-place] = value
    lies_within(bytes(data))
    lies_within(bytes(data[: len(data) - cut]))


@pytest.mark.parametrize(
    ("pickled", "places", "reason"),
    [
        (0, [(1 << 63, 1 << 63)], "a buffer of"),
        (0, [(0, 17)], "a buffer of 17 bytes at 0 of 16"),
        (8, [(7, 1)], "a buffer of 1 bytes at 7"),
        (17, [], "a pickle of 17 bytes"),
        ((1 << 64) - 1, [(0, 0)], "a pickle of 18446744073709551615"),
    ],
    ids=["past 64 bits", "into the table", "into the pickle", "a pickle into the end", "an endless pickle"],
)
def test_what_a_broken_peer_may_say(pickled: int, places: list[tuple[int, int]], reason: str) -> None:
    with pytest.raises(BrokenFrame, match=reason):
        places_in(bytes(16) + table_of(pickled, places))


def test_a_count_of_billions_takes_no_memory() -> None:
    with pytest.raises(BrokenFrame, match="4294967295 buffers"):
        places_in(bytes(100) + (0).to_bytes(8, "little") + b"\xff\xff\xff\xff\0")


def test_an_end_that_is_neither_of_a_pickle_nor_of_a_table_is_broken() -> None:
    with pytest.raises(BrokenFrame):
        places_in(with_table(10, [20])[0][:-1] + b"\1")


# What is written


@pytest.fixture
def small_limits() -> Iterator[None]:
    with lowered():
        yield


@contextlib.contextmanager
def lowered() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "BUFFER_LIMIT", 16)
        patch.setattr(module, "INLINE_LIMIT", 64)
        yield


def slots_for(way: str, size: int = MIB, limit: int | None = None) -> tuple[SlotWriter, Sink]:
    writer = byte_slots(1, size, limit)
    if way == "no slot":
        writer.take()
    return writer, Sink(writer)


def loaded(writer: SlotWriter, payload: Payload) -> Any:
    data = reader_of(writer).read(payload)
    if not has_buffers(data):
        return pickle.loads(data)
    pickled, places = places_in(data)
    assert all(start % ALIGNMENT == 0 for start, _ in places)
    return pickle.loads(data[:pickled], buffers=[bytearray(data[start:end]) for start, end in places])


@pytest.mark.parametrize("way", WAYS)
@given(chunks=st.lists(st.binary(max_size=90), max_size=5), text=st.text(max_size=100))
def test_large_buffers_lie_aligned_beside_the_pickle(way: str, chunks: list[bytes], text: str) -> None:
    with lowered():
        writer, sink = slots_for(way)
        things = [PickleBuffer(bytearray(chunk)) for chunk in chunks]
        dump([text, things], sink, main_by_value=False, beside=sink)
        payload = sink.payload()
        assert loaded(writer, payload) == [text, chunks]
        assert has_buffers(reader_of(writer).read(payload)) == any(len(chunk) >= 16 for chunk in chunks)
        assert sink.buffers == []


@pytest.mark.parametrize("way", WAYS)
def test_a_buffer_travels_beside_from_the_limit_on(way: str) -> None:
    for size, is_beside in ((BUFFER_LIMIT - 1, False), (BUFFER_LIMIT, True)):
        writer, sink = slots_for(way)
        dump(PickleBuffer(bytes(size)), sink, main_by_value=False, beside=sink)
        assert has_buffers(reader_of(writer).read(sink.payload())) == is_beside


def test_within_when_nobody_asks_for_it_beside() -> None:
    writer, sink = slots_for("slot")
    dump(PickleBuffer(bytearray(BUFFER_LIMIT)), sink, main_by_value=False)
    assert not has_buffers(reader_of(writer).read(sink.payload()))


def test_a_buffer_in_steps_is_refused_by_the_pickler() -> None:
    writer, sink = slots_for("slot")
    with pytest.raises(pickle.PicklingError, match="contiguous"):
        dump(PickleBuffer(memoryview(bytearray(2 * BUFFER_LIMIT))[::2]), sink, main_by_value=False, beside=sink)
    assert writer.in_use == 0
    assert sink.buffers == []


class Refuses:
    """Cannot be pickled."""

    def __reduce__(self) -> NoReturn:
        raise LookupError("not this one")


@pytest.mark.parametrize("way", WAYS)
def test_a_pickle_that_fails_behind_a_buffer_leaves_neither_slot_nor_buffer(way: str) -> None:
    writer, sink = slots_for(way)
    used = writer.in_use
    with pytest.raises(LookupError, match="not this one"):
        dump([PickleBuffer(bytearray(BUFFER_LIMIT)), Refuses()], sink, main_by_value=False, beside=sink)
    assert sink.buffers == []
    assert writer.in_use == used
    dump("after it", sink, main_by_value=False, beside=sink)
    assert loaded(writer, sink.payload()) == "after it"


@pytest.mark.parametrize("way", WAYS)
def test_what_is_pickled_in_another_way_has_each_buffer_once(way: str) -> None:
    """The first way has seen a buffer before it met what it cannot pickle."""
    writer, sink = slots_for(way)
    first, second = b"a" * BUFFER_LIMIT, b"b" * (BUFFER_LIMIT + 3)
    things = [PickleBuffer(bytearray(first)), lambda: 5, PickleBuffer(bytearray(second))]
    dump(things, sink, main_by_value=False, beside=sink)
    data = reader_of(writer).read(sink.payload())
    assert len(places_in(data)[1]) == 2
    left, function, right = loaded(writer, sink.payload())
    assert (left, function(), right) == (first, 5, second)


@pytest.mark.parametrize("way", WAYS)
def test_r4_buffers_above_the_limit_are_too_large_and_the_table_counts(small_limits: None, way: str) -> None:
    size = 500
    writer, sink = slots_for(way, 4096)
    dump(PickleBuffer(bytearray(size)), sink, main_by_value=False, beside=sink)
    whole = len(reader_of(writer).read(sink.payload()))
    for limit in (whole, whole - 1, size):
        writer, sink = slots_for(way, 4096, limit)
        used = writer.in_use
        if limit == whole:
            dump(PickleBuffer(bytearray(size)), sink, main_by_value=False, beside=sink)
            assert loaded(writer, sink.payload()) == bytes(size)
            continue
        with pytest.raises(PayloadTooLarge, match=f"max_message={limit}"):
            dump(PickleBuffer(bytearray(size)), sink, main_by_value=False, beside=sink)
        assert writer.in_use == used
        assert sink.buffers == []


def test_r4_buffers_for_which_there_is_no_room_are_a_memory_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "room_left", lambda: 1000)
    monkeypatch.setattr(module, "MARGIN", 4096)
    writer, sink = slots_for("slot")
    with pytest.raises(MemoryError, match="memory that is left, 1000 bytes"):
        dump(PickleBuffer(bytearray(BUFFER_LIMIT)), sink, main_by_value=False, beside=sink)
    assert sink.lacks_room
    assert writer.in_use == 0
    assert sink.buffers == []


def test_a_private_copy_of_a_buffer_does_not_change_with_its_source() -> None:
    writer, sink = slots_for("no slot")
    source = bytearray(b"b" * BUFFER_LIMIT)
    dump(PickleBuffer(source), sink, main_by_value=False, beside=sink)
    source[:] = b"a" * BUFFER_LIMIT
    assert loaded(writer, sink.payload()) == b"b" * BUFFER_LIMIT
    source.append(0)  # and nobody looks at it any more
