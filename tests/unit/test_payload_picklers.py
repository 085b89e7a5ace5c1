"""Payload picklers: one after the other, one inside another, and what is not kept."""

import gc
import pickle
from collections.abc import Iterator
from typing import Any
from weakref import ref

import pytest

from percore._common.errors import PayloadTooLarge
from percore._transport.memory import Memory
from percore._transport.payload_picklers import PayloadPicklers
from percore._transport.slots import INLINE_LIMIT, SlotReader, SlotWriter

SLOT_SIZE = 1 << 20
SLOTS = 4


class Slots:
    def __init__(self, limit: int = SLOT_SIZE) -> None:
        self.memory = Memory.create(SLOTS * SLOT_SIZE)
        self.writer = SlotWriter(self.memory, SLOT_SIZE, limit)
        self.picklers = PayloadPicklers(self.writer, main_by_value=False)

    def loaded(self, obj: object) -> Any:
        """What arrives of it."""
        payload = self.picklers.take().payload(obj)
        value = pickle.loads(bytes(SlotReader(self.memory, SLOT_SIZE).read(payload)))
        self.writer.discard(payload)
        return value


@pytest.fixture
def slots() -> Iterator[Slots]:
    made = Slots()
    yield made
    made.memory.close()


class Thing:
    """Something that can be referred to weakly."""


class Nested:
    """Pickles something else while it is pickled."""

    def __init__(self, picklers: PayloadPicklers, inner: object) -> None:
        self.picklers = picklers
        self.inner = inner

    def __reduce__(self) -> Any:
        return bytes, (self.picklers.take().payload(self.inner),)


class Failing:
    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __reduce__(self) -> Any:
        raise self.error


def test_one_press_for_many(slots: Slots) -> None:
    first = slots.picklers.take()
    first.payload([1])
    assert slots.picklers.take() is first
    assert slots.picklers.take() is not first  # while that is in use


def test_each_pickle_is_complete(slots: Slots) -> None:
    same = ["shared by all", {"and": "changed"}]
    for number in range(3):
        same.append(str(number))
        assert slots.loaded((same, same)) == (same, same)


def test_nothing_is_kept_of_what_was_pickled(slots: Slots) -> None:
    thing = Thing()
    watch = ref(thing)
    slots.loaded([thing])
    del thing
    gc.collect()
    assert watch() is None


def test_one_inside_another(slots: Slots) -> None:
    for _ in range(3):
        inner = slots.loaded(["before", Nested(slots.picklers, {"inner": [1, 2]}), "behind"])
        assert inner[::2] == ["before", "behind"]
        assert pickle.loads(inner[1]) == {"inner": [1, 2]}


@pytest.mark.parametrize("error", [ValueError("no"), TypeError("no"), KeyboardInterrupt()])
def test_after_a_failure_the_next_one_is_pickled_as_ever(slots: Slots, error: BaseException) -> None:
    pickler = slots.picklers.take()
    with pytest.raises(type(error)):
        pickler.payload([b"x" * 2 * INLINE_LIMIT, Failing(error)])
    assert slots.picklers.take() is not pickler
    assert slots.writer.in_use == 0
    assert slots.loaded([1, 2]) == [1, 2]


def test_large_ones_go_into_slots_and_their_press_is_not_kept(slots: Slots) -> None:
    pickler = slots.picklers.take()
    large = list(range(100_000))
    payload = pickler.payload(large)
    assert type(payload) is int
    assert slots.writer.in_use == 1
    assert slots.picklers.take() is not pickler
    slots.writer.discard(payload)
    assert slots.loaded(large) == large


def test_what_c_cannot_pickle_is_pickled_otherwise(slots: Slots) -> None:
    assert slots.loaded(lambda: 42)() == 42
    assert slots.loaded([7]) == [7]


def test_above_the_limit() -> None:
    slots = Slots(limit=100)
    with pytest.raises(PayloadTooLarge):
        slots.loaded("x" * 200)
    assert slots.loaded("x" * 50) == "x" * 50
    slots.memory.close()


def test_a_sparing_one_takes_no_slot_when_they_are_scarce(slots: Slots) -> None:
    picklers = PayloadPicklers(slots.writer, main_by_value=False, sparing=True)
    large = ["x" * 2 * INLINE_LIMIT, 1]
    kinds = [type(picklers.take().payload(large)) for _ in range(SLOTS)]
    assert kinds == [int, int, bytes, bytes]
