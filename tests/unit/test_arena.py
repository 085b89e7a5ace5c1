"""The store of workers that map the supervisor's memory: payloads in a message, in a slot, or private while no slot is free."""

import asyncio
import pickle
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from percore._common.errors import RunnerClosed
from percore._transport.arena import Arena
from percore._transport.memory import Memory
from percore._transport.slots import INLINE_LIMIT, SLOT_BITS

SLOT = 1 << 20
COUNT = 4
LARGE = bytes(INLINE_LIMIT + 1)


@pytest.fixture
def arena() -> Iterator[Arena]:
    memory = Memory.create(COUNT * SLOT)
    made = Arena(memory, SLOT, SLOT, cast("Any", SimpleNamespace()))
    yield made
    assert (made.in_use, made._private) == (0, {})
    memory.close()


def test_a_pickle_travels_in_the_message_up_to_the_limit_and_in_a_slot_beyond_it(arena: Arena) -> None:
    light = bytes(INLINE_LIMIT)
    assert (arena.adopt(light), arena.adopt(memoryview(light)), arena.kept(light)) == (light, light, light)
    assert arena.in_use == 0
    for heavy in (LARGE, memoryview(LARGE)):
        parcel = arena.adopt(heavy)
        assert isinstance(parcel, int)
        assert (arena.is_placed(parcel), arena.size(parcel), arena.place(parcel)) == (True, len(LARGE), parcel)
        assert bytes(arena.read(parcel)) == LARGE
        assert arena.in_use == 1
        arena.discard(parcel)


def test_half_of_the_slots_are_kept_for_calls_that_are_sent_now(arena: Arena) -> None:
    adopted = [arena.adopt(LARGE) for _ in range(COUNT)]
    placed = [parcel for parcel in adopted if arena.is_placed(cast("int", parcel))]
    assert (len(placed), arena.in_use) == (COUNT // 2, COUNT // 2)
    for parcel in adopted:
        assert isinstance(parcel, int)
        assert arena.size(parcel) == len(LARGE)
        if parcel not in placed:  # when it is sent it gets one of the others
            sent = arena.place(parcel)
            assert sent is not None
            assert arena.is_placed(sent)
            assert bytes(arena.read(sent)) == LARGE
            arena.discard(sent)
        arena.discard(parcel)


def test_a_parcel_waits_in_private_bytes_while_no_slot_is_free(arena: Arena) -> None:
    kept = arena.kept(LARGE)
    assert isinstance(kept, int)
    assert not arena.is_placed(kept)
    slots = [arena.keep(LARGE) for _ in range(COUNT)]
    with pytest.raises(RuntimeError, match=f"no room for another pickle of {len(LARGE)} bytes"):
        arena.keep(LARGE)
    assert arena.place(kept) is None
    assert arena.size(kept) == len(LARGE)
    arena.discard(slots.pop())
    placed = arena.place(kept)
    assert placed is not None
    assert bytes(arena.read(placed)) == LARGE
    for parcel in (placed, *slots):
        arena.discard(parcel)


def test_a_call_that_waits_again_gives_its_slot_back_where_slots_are_scarce(arena: Arena) -> None:
    parcel = arena.keep(LARGE)
    assert arena.unplaced(parcel) == parcel  # it has one of four slots, and keeps it
    assert arena.in_use == 1
    others = [arena.keep(LARGE) for _ in range(2)]
    assert arena.is_scarce()
    private = arena.unplaced(parcel)
    assert isinstance(private, int)
    assert not arena.is_placed(private)
    assert arena.in_use == 2
    assert arena.unplaced(private) == private
    placed = arena.place(private)
    assert placed is not None
    assert bytes(arena.read(placed)) == LARGE
    for each in (placed, *others):
        arena.discard(each)


def test_a_pickle_for_its_bytes_alone_leaves_nothing(arena: Arena) -> None:
    objects = ["small", bytes(2 * INLINE_LIMIT), [bytes(INLINE_LIMIT), bytes(INLINE_LIMIT)]]
    for free in range(COUNT + 1):
        taken = [arena.keep(LARGE) for _ in range(COUNT - free)]
        for made in objects:
            assert pickle.loads(arena.pickled(made)) == made
            assert (arena.in_use, arena._private) == (len(taken), {})
        for parcel in taken:
            arena.discard(parcel)


def test_payloads_name_their_slot_and_their_length(arena: Arena) -> None:
    parcels = [arena.keep(bytes([number]) * (number + 1)) for number in range(COUNT)]
    assert parcels == [(number + 1) << SLOT_BITS | number for number in range(COUNT)]
    for number, parcel in enumerate(parcels):
        assert bytes(arena.read(parcel)) == bytes([number]) * (number + 1)
        arena.discard(parcel)


async def test_a_shared_object_that_is_told_twice_keeps_its_slot_and_one_that_nobody_awaits_leaves_none(arena: Arena) -> None:
    """A Ctrl-C may have the loop tell it once more."""
    waiters: list[asyncio.Future[int]] = [asyncio.get_running_loop().create_future() for _ in range(3)]
    _, refused, cancelled = waiters
    refused.set_exception(RunnerClosed("closed"))
    cancelled.cancel()
    for waiter in waiters:
        payload = arena._pickled_beside([bytes(INLINE_LIMIT), bytes(INLINE_LIMIT)])
        for _ in range(2 if waiter is waiters[0] else 1):
            arena._shared(waiter, payload)
    assert arena.in_use == 1
    assert isinstance(refused.exception(), RunnerClosed)
    arena.discard(await waiters[0])
