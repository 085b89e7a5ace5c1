"""Slots: handed out once, lowest first, kept warm within a bound; and the file that picklers write into them."""

import contextlib
import faulthandler
import gc
import heapq
import pickle
import random
import threading
from collections.abc import Callable, Iterator
from pickle import PickleBuffer
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from percore._common.errors import PayloadTooLarge
from percore._protocol.messages import BrokenFrame, Payload
from percore._transport import slots as module
from percore._transport.memory import Memory
from percore._transport.slots import INLINE_LIMIT, SLOT_BITS, SLOT_MASK, WARM_LIMIT, Sink, SlotReader, SlotWriter
from tests.counts import times

MIB = 1 << 20


class Ledger:
    """Memory of any size that only remembers what was given back."""

    def __init__(self, size: int, on_give_back: Callable[[], None] = lambda: None) -> None:
        self.size = size
        self.view = memoryview(b"")
        self.given: list[tuple[int, int]] = []
        self.on_give_back = on_give_back

    def give_back(self, start: int, end: int) -> None:
        self.given.append((start, end))
        self.on_give_back()


class Bytes(Ledger):
    """Memory that can be written, without a mapping."""

    def __init__(self, size: int) -> None:
        super().__init__(size)
        self.view = memoryview(bytearray(size))

    def part(self, start: int, end: int) -> memoryview:
        return self.view[start:end]


def ledger_slots(count: int, slot_size: int) -> tuple[SlotWriter, Ledger]:
    ledger = Ledger(count * slot_size)
    return SlotWriter(ledger, slot_size, slot_size), ledger  # type: ignore[arg-type]


def byte_slots(count: int, slot_size: int, limit: int | None = None) -> SlotWriter:
    return SlotWriter(Bytes(count * slot_size), slot_size, limit or slot_size)  # type: ignore[arg-type]


def reader_of(writer: SlotWriter) -> SlotReader:
    return SlotReader(writer._memory, writer.slot_size)


def test_s6_a_collection_that_takes_and_gives_slots_while_one_is_taken_or_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """From 3.12 on a garbage collection may begin behind any call, the one that is made under the lock included."""
    slots, _ = ledger_slots(4, 64)
    inner: list[int | None] = []

    def heappop(heap: list[int]) -> int:
        slot = heapq.heappop(heap)
        if not inner:  # what a `__del__` does that submits a large call
            inner.append(None)
            inner[0] = slots.take()
        return slot

    monkeypatch.setattr(module, "heapq", SimpleNamespace(heappop=heappop, heappush=heapq.heappush))
    for slot in [slots.take() for _ in range(3)]:
        assert slot is not None
        slots.give(slot, 1)
    with faulthandler_limit():
        taken = slots.take()
    assert {taken, inner[0]} == {0, 1}
    assert slots.in_use == 2


@contextlib.contextmanager
def faulthandler_limit() -> Iterator[None]:
    """A lock that waits for itself cannot even be interrupted: end the process with its stacks instead."""
    faulthandler.dump_traceback_later(20, exit=True)
    try:
        yield
    finally:
        faulthandler.cancel_dump_traceback_later()


# Slots


class SlotMachine(RuleBasedStateMachine):
    """Takes, holds and gives in any order, against a tally of holders and one of what is warm."""

    SIZE = 48 * MIB
    COUNT = 5

    def __init__(self) -> None:
        super().__init__()
        self.writer, self.ledger = ledger_slots(self.COUNT, self.SIZE)
        self.taken: dict[int, int] = {}
        """Holders of each slot that is taken."""
        self.warm = [0] * self.COUNT
        self.waiting: list[int] = []
        self.served: list[int] = []
        self.next_waiter = 0

    @rule()
    def take(self) -> None:
        slot = self.writer.take()
        free = set(range(self.COUNT)) - set(self.taken)
        assert slot == min(free, default=None)
        if slot is not None:
            self.taken[slot] = 1

    @rule(data=st.data(), length=st.integers(0, SIZE))
    def hold(self, data: st.DataObject, length: int) -> None:
        if self.taken:
            slot = data.draw(st.sampled_from(sorted(self.taken)))
            self.writer.hold(length << SLOT_BITS | slot)
            self.taken[slot] += 1

    @rule(slot=st.integers(0, COUNT + 3), length=st.integers(-1, SIZE + 1))
    def hold_what_is_not_taken_or_too_long(self, slot: int, length: int) -> None:
        if slot not in self.taken or not 0 <= length <= self.SIZE:
            with pytest.raises(BrokenFrame, match=f"slot {slot}"):
                self.writer.hold(length << SLOT_BITS | slot)

    @rule(data=st.data(), used=st.integers(0, SIZE))
    def give(self, data: st.DataObject, used: int) -> None:
        if not self.taken:
            return
        slot = data.draw(st.sampled_from(sorted(self.taken)))
        self.taken[slot] -= 1
        if self.taken[slot]:  # somebody holds it still: it is offered to nobody, and its pages stay
            self.ledger.given.clear()
            self.served.clear()
            self.writer.give(slot, used)
            assert (self.ledger.given, self.served) == ([], [])
            return
        del self.taken[slot]
        self.warm[slot] = max(self.warm[slot], used)
        self.ledger.given.clear()
        self.served.clear()
        expected, self.waiting = self.waiting[:1], self.waiting[1:]
        self.writer.give(slot, used)
        assert self.served == expected
        cooled = [start // self.SIZE for start, _ in self.ledger.given]
        for start, end in self.ledger.given:
            cold = start // self.SIZE
            assert cold not in self.taken
            assert end == cold * self.SIZE + self.warm[cold]  # from the top, and all that was touched
            self.warm[cold] = start - cold * self.SIZE
        # Those that are used last, first; and no page more than has to.
        assert cooled == sorted(cooled, reverse=True)
        assert min(cooled, default=slot) >= slot
        assert not cooled or sum(self.warm) == WARM_LIMIT
        warmer = [other for other in range(slot + 1, self.COUNT) if self.warm[other] and other not in self.taken]
        assert slot not in cooled or not warmer

    @rule(slot=st.integers(-3, COUNT + 3), used=st.integers(0, SIZE))
    def give_what_is_not_taken(self, slot: int, used: int) -> None:
        if slot not in self.taken:
            with pytest.raises(BrokenFrame, match=str(slot)):
                self.writer.give(slot, used)

    @rule()
    def wait(self) -> None:
        if len(self.taken) == self.COUNT:
            number, self.next_waiter = self.next_waiter, self.next_waiter + 1
            self.waiting.append(number)
            self.writer.wait(lambda: self.serve(number))

    def serve(self, number: int) -> bool:
        self.served.append(number)
        return True

    @invariant()
    def is_bounded(self) -> None:
        assert self.writer.in_use == len(self.taken)
        assert sum(self.warm) <= WARM_LIMIT


TestSlots = SlotMachine.TestCase
TestSlots.settings = settings(max_examples=times(30, 3000), stateful_step_count=40, deadline=None)
TestSlots.pytestmark = [pytest.mark.long]  # type: ignore[attr-defined]


def test_the_lowest_free_slot_comes_first() -> None:
    writer, _ = ledger_slots(4, 1024)
    assert [writer.take() for _ in range(5)] == [0, 1, 2, 3, None]
    for slot in (2, 0, 3):
        writer.give(slot, 0)
    assert [writer.take() for _ in range(4)] == [0, 2, 3, None]


def test_no_more_slots_than_a_payload_can_name() -> None:
    writer, _ = ledger_slots(SLOT_MASK + 100, 1024)
    assert writer.count == SLOT_MASK + 1


def test_a_double_release_is_a_broken_frame_and_changes_nothing() -> None:
    writer, _ = ledger_slots(2, 1024)
    writer.take()
    writer.give(0, 10)
    with pytest.raises(BrokenFrame):
        writer.give(0, 10)
    assert writer.in_use == 0
    assert [writer.take(), writer.take(), writer.take()] == [0, 1, None]


def test_a_slot_with_several_holders_is_free_after_the_last() -> None:
    writer, ledger = ledger_slots(1, 80 * MIB)
    assert writer.take() == 0
    payload = 80 * MIB << SLOT_BITS
    writer.hold(payload)
    writer.hold(payload)
    for _ in range(2):
        writer.discard(payload)
        assert (writer.in_use, writer.take(), ledger.given) == (1, None, [])
    writer.discard(payload)
    assert (writer.in_use, ledger.given) == (0, [(64 * MIB, 80 * MIB)])
    assert writer.take() == 0


def test_holders_that_come_and_go_in_threads_are_counted_right() -> None:
    writer, _ = ledger_slots(1, 1024)
    writer.take()

    def hold_and_give() -> None:
        for _ in range(2000):
            writer.hold(10 << SLOT_BITS)
            writer.give(0, 10)

    threads = [threading.Thread(target=hold_and_give) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert writer.in_use == 1
    writer.give(0, 10)
    assert writer.in_use == 0
    with pytest.raises(BrokenFrame):
        writer.hold(10 << SLOT_BITS)


def test_what_is_warm_above_the_bound_goes_back_at_once() -> None:
    writer, ledger = ledger_slots(3, 40 * MIB)
    slots = [writer.take() for _ in range(3)]
    assert slots == [0, 1, 2]
    writer.give(0, 40 * MIB)
    assert ledger.given == []
    writer.give(1, 40 * MIB)
    assert ledger.given == [(40 * MIB + 24 * MIB, 80 * MIB)]
    writer.give(2, 30 * MIB)
    assert ledger.given[1:] == [(80 * MIB, 110 * MIB)]
    # Used again, the warm ones cost nothing.
    for _ in range(3):
        slot = writer.take()
        assert slot == 0
        writer.give(slot, 40 * MIB)
    assert len(ledger.given) == 2


def test_a_slot_that_was_cooled_is_handed_out_once() -> None:
    writer, ledger = ledger_slots(4, 40 * MIB)
    assert [writer.take() for _ in range(4)] == [0, 1, 2, 3]
    for slot in (3, 2, 1, 0):  # the pages of the higher ones go back, which are free meanwhile
        writer.give(slot, 40 * MIB)
    assert ledger.given
    assert [writer.take() for _ in range(5)] == [0, 1, 2, 3, None]
    assert writer.in_use == 4


def test_the_lowest_free_slot_comes_first_whatever_was_cooled() -> None:
    chance = random.Random(0)  # it comes early to a state in which the free slots have to be put in order again
    writer, ledger = ledger_slots(24, 16 * MIB)
    taken: set[int] = set()
    for _ in range(2000):
        if taken and chance.random() < 0.5:
            slot = chance.choice(sorted(taken))
            taken.remove(slot)
            writer.give(slot, chance.choice([0, 1, 16]) * MIB)
        elif len(taken) < 24:
            lowest = min({*range(24)} - taken)
            assert writer.take() == lowest
            taken.add(lowest)
    assert len(ledger.given) > 100


def test_nobody_gets_a_slot_whose_pages_are_on_their_way_back() -> None:
    # 1. the loop gives a slot back, above the bound; 2. a thread takes that slot and writes; 3. the pages go: its data is zeros.
    taken: list[int | None] = []
    writer, ledger = ledger_slots(1, 80 * MIB)
    ledger.on_give_back = lambda: taken.append(writer.take())
    writer.take()
    writer.give(0, 80 * MIB)
    assert ledger.given == [(64 * MIB, 80 * MIB)]
    assert taken == [None]
    assert writer.take() == 0


# Waiting for a slot


def test_waiters_are_served_in_order_one_a_slot() -> None:
    writer, _ = ledger_slots(2, 1024)
    served: list[str] = []

    def waiter(name: str) -> Callable[[], bool]:
        def wants() -> bool:
            served.append(name)
            return writer.take() is not None

        return wants

    writer.take()
    writer.take()
    for name in "abc":
        writer.wait(waiter(name))
    assert served == []
    writer.give(1, 0)
    assert served == ["a"]
    writer.give(0, 0)
    writer.give(1, 0)
    assert served == ["a", "b", "c"]
    writer.give(0, 0)
    assert served == ["a", "b", "c"]


def test_a_waiter_that_declines_passes_the_slot_on() -> None:
    writer, _ = ledger_slots(1, 1024)
    writer.take()
    asked: list[int] = []

    def waiter(number: int, answer: bool) -> Callable[[], bool]:
        def wants() -> bool:
            asked.append(number)
            return answer

        return wants

    for number, answer in enumerate([False, False, True, True]):
        writer.wait(waiter(number, answer))
    writer.give(0, 0)
    assert asked == [0, 1, 2]
    assert writer.take() == 0


def test_a_slot_that_came_back_before_one_waited_is_not_missed() -> None:
    # 1. a thread finds no slot; 2. the loop gives the last one back, and nobody waits; 3. the thread waits: for ever, if it does
    # not look again.
    writer, _ = ledger_slots(1, 1024)
    writer.take()
    assert writer.take() is None
    writer.give(0, 0)
    served: list[bool] = []

    def serve() -> bool:
        served.append(True)
        return True

    writer.wait(serve)
    assert served == [True]


def test_a_slot_is_offered_once_though_two_threads_offer_at_once() -> None:
    # 1. two slots come back in two threads, one waits; 2. both see it; 3. one of them finds nobody any more.
    writer, _ = ledger_slots(2, 1024)

    class Snatched(type(writer._waiters)):  # type: ignore[misc]
        def popleft(self) -> Any:
            waiter = super().popleft()
            assert len(self) == 0
            super().popleft()  # as for the one who comes second
            return waiter

    writer.take()
    writer._waiters = Snatched([lambda: True])
    writer.give(0, 0)
    assert writer.in_use == 0


def test_slots_are_never_handed_out_twice_to_threads() -> None:
    writer, _ = ledger_slots(4, 1024)
    owners = [threading.Lock() for _ in range(4)]
    failures: list[BaseException] = []

    def work() -> None:
        try:
            for _ in range(2000):
                slot = writer.take()
                if slot is not None:
                    assert owners[slot].acquire(blocking=False), "two have it"
                    owners[slot].release()
                    writer.give(slot, 7)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert writer.in_use == 0


# Payloads


def test_store_copies_and_names_the_slot() -> None:
    writer = byte_slots(2, 4096)
    payload = writer.store(b"data" * 10)
    assert payload == 40 << SLOT_BITS | 0
    assert bytes(writer.read(payload)) == bytes(reader_of(writer).read(payload)) == b"data" * 10
    other = writer.store(b"x")
    assert other is not None
    assert other & SLOT_MASK == 1
    assert writer.store(b"no room") is None
    writer.discard(payload)
    assert writer.in_use == 1
    assert writer.take() == 0


def test_private_payloads_are_their_own_bytes() -> None:
    writer = byte_slots(1, 4096)
    assert writer.read(b"private") == b"private"
    assert reader_of(writer).read(b"private") == b"private"
    writer.discard(b"private")
    assert writer.in_use == 0


@given(payload=st.integers(-(2**70), 2**70))
def test_a_payload_outside_its_slot_is_a_broken_frame(payload: int) -> None:
    writer = byte_slots(3, 64)
    slot, length = payload & SLOT_MASK, payload >> SLOT_BITS
    if slot < 3 and 0 <= length <= 64:
        assert len(reader_of(writer).read(payload)) == length
    else:
        with pytest.raises(BrokenFrame, match=f"slot {slot}"):
            reader_of(writer).read(payload)


@pytest.mark.parametrize(("length", "slot"), [(65, 0), (0, 3), (64, 3), (-1, 0), (-64, 2), (1 << 60, 1)])
def test_what_a_broken_peer_may_name(length: int, slot: int) -> None:
    with pytest.raises(BrokenFrame):
        reader_of(byte_slots(3, 64)).read(length << SLOT_BITS | slot)


def test_two_processes_maps_agree() -> None:
    memory = Memory.create(4 * 65536)
    there = Memory(memory.reader_fd(), memory.size, writable=False)
    try:
        writer, reader = SlotWriter(memory, 65536, 65536), SlotReader(there, 65536)
        for data in (b"first", b"second" * 1000):
            payload = writer.store(data)
            assert payload is not None
            assert bytes(reader.read(payload)) == data
    finally:
        there.close()
        memory.close()


# Sink

Chunk = bytes | bytearray | memoryview | PickleBuffer
KINDS: list[Callable[[bytes], Chunk]] = [
    bytes,
    bytearray,
    memoryview,
    lambda data: PickleBuffer(bytearray(data)),
    lambda data: memoryview(bytearray(data) * 2)[: len(data)],
]
CHUNKS = st.lists(st.tuples(st.binary(max_size=60), st.sampled_from(KINDS)), max_size=6)


@pytest.fixture
def small_inline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "INLINE_LIMIT", 16)


def taken(writer: SlotWriter) -> Iterator[None]:
    while writer.take() is not None:
        yield


@pytest.mark.parametrize("way", ["slot", "no slot"])
@given(chunks=CHUNKS)
def test_what_is_written_is_what_travels(way: str, chunks: list[tuple[bytes, Callable[[bytes], Chunk]]]) -> None:
    whole = b"".join(data for data, _ in chunks)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "INLINE_LIMIT", 16)
        writer = byte_slots(2, 512)
        if way == "no slot":
            list(taken(writer))
        used = writer.in_use
        sink = Sink(writer)
        for data, kind in chunks:
            sink.write(kind(data))
        payload = sink.payload()
        assert bytes(reader_of(writer).read(payload)) == whole
        if way != "slot":
            assert isinstance(payload, bytes)
        assert writer.in_use == used + isinstance(payload, int)
        writer.discard(payload)
        assert writer.in_use == used


def test_one_small_write_is_kept_as_it_is(small_inline: None) -> None:
    writer = byte_slots(1, 4096)
    sink = Sink(writer)
    data = b"x" * 16
    sink.write(data)
    assert sink.payload() is data
    assert writer.in_use == 0


@pytest.mark.parametrize("chunks", [[b"x" * 17], [b"a", b"b"], [bytearray(b"a")]], ids=["large", "two", "buffer"])
def test_more_goes_straight_into_a_slot(small_inline: None, chunks: list[bytes]) -> None:
    writer = byte_slots(1, 4096)
    sink = Sink(writer)
    for chunk in chunks:
        sink.write(chunk)
    assert isinstance(sink.payload(), int)
    assert writer.in_use == 1


def test_without_a_slot_it_stays_private_and_none_is_lost(small_inline: None) -> None:
    writer = byte_slots(1, 4096)
    writer.take()
    sink = Sink(writer)
    sink.write(b"a" * 100)
    sink.write(b"b" * 100)
    assert sink.payload() == b"a" * 100 + b"b" * 100


def test_a_private_copy_does_not_change_with_its_source() -> None:
    source = bytearray(b"before")
    writer = byte_slots(1, 64)
    writer.take()
    sink = Sink(writer)
    sink.write(source)
    source[:] = b"after!"
    assert sink.payload() == b"before"


def test_nothing_written_is_nothing() -> None:
    sink = Sink(byte_slots(1, 64))
    assert sink.payload() == b""
    assert not sink.contains(b"x")


@pytest.mark.parametrize("way", ["slot", "no slot"])
@pytest.mark.parametrize("chunks", [[101], [60, 41], [100, 1], [1, 100], [30, 30, 41]])
def test_too_large_resets_cleanly(small_inline: None, way: str, chunks: list[int]) -> None:
    writer = byte_slots(2, 4096, limit=100)
    if way == "no slot":
        list(taken(writer))
    used = writer.in_use
    sink = Sink(writer)
    for length in chunks[:-1]:
        sink.write(b"x" * length)
    with pytest.raises(PayloadTooLarge, match="max_message=100"):
        sink.write(b"x" * chunks[-1])
    sink.reset()
    assert writer.in_use == used
    assert not sink.contains(b"x")
    sink.write(b"second try, which is longer")
    payload = sink.payload()
    assert bytes(reader_of(writer).read(payload)) == b"second try, which is longer"
    assert isinstance(payload, int) == (way == "slot")
    writer.discard(payload)
    assert writer.in_use == used


def test_exactly_the_limit_fits(small_inline: None) -> None:
    writer = byte_slots(1, 4096, limit=100)
    sink = Sink(writer)
    sink.write(b"x" * 40)
    sink.write(b"y" * 60)
    assert bytes(reader_of(writer).read(sink.payload())) == b"x" * 40 + b"y" * 60


def test_a_small_message_above_a_smaller_limit_is_too_large() -> None:
    sink = Sink(byte_slots(1, 4096, limit=1024))
    with pytest.raises(PayloadTooLarge):
        sink.write(b"x" * 1025)
    sink.reset()
    sink.write(b"x" * 1024)
    assert sink.payload() == b"x" * 1024


def test_reset_of_what_was_inline_is_inline_again(small_inline: None) -> None:
    writer = byte_slots(1, 64)
    sink = Sink(writer)
    sink.write(b"first")
    sink.reset()
    sink.write(b"second")
    assert sink.payload() == b"second"
    assert writer.in_use == 0


def written(value: Any, way: str) -> Sink:
    writer = byte_slots(1, 4 * MIB)
    if way == "no slot":
        writer.take()
    sink = Sink(writer)
    pickle.Pickler(sink, protocol=5).dump(value)
    return sink


def test_a_name_is_found_in_a_pickle_of_any_size(subtests: pytest.Subtests) -> None:
    every: list[list[Any]] = [
        [],
        [b"x" * 200_000],
        ["y" * 200_000],
        [bytearray(200_000), b"z" * 90_000],
        [f"{number:>200}" for number in range(2000)],
    ]
    for surroundings in every:
        for way in ["slot", "no slot"]:
            with subtests.test(way=way, surroundings=surroundings):
                for before, after in ((surroundings, []), ([], surroundings), (surroundings, surroundings)):
                    assert written([*before, "__main__", *after], way).contains(b"__main__")
                    assert not written([*before, "__other__", *after], way).contains(b"__main__")


@pytest.mark.parametrize("way", ["slot", "no slot"])
def test_a_name_is_found_wherever_a_frame_ends(way: str) -> None:
    # A frame of a pickle is about 64 KiB: the name comes to lie before, across and behind where one would end.
    for length in range(65_536 - 60, 65_536 + 20, 3):
        assert written(["x" * (length // 2), "y" * (length - length // 2), "__main__", b"z" * 99_000], way).contains(b"__main__")


def test_what_an_earlier_payload_left_in_the_slot_is_not_found() -> None:
    writer = byte_slots(1, 4096)
    stale = writer.store(b"." * 100 + b"__main__")
    assert stale is not None
    writer.discard(stale)
    sink = Sink(writer)
    sink.write(bytearray(b"short"))
    assert not sink.contains(b"__main__")


def test_a_real_pickler_writes_into_it(subtests: pytest.Subtests) -> None:
    for is_full in [False, True]:
        for value in [
            b"x" * (INLINE_LIMIT + 1),
            bytearray(b"y" * 300_000),
            ["text" * 50_000, 1, b"z" * 200_000],
            {"small": 1},
            PickleBuffer(bytearray(b"p" * 200_000)),
        ]:
            with subtests.test(value=value, is_full=is_full):
                writer = byte_slots(1, 2 * MIB)
                used = len(list(taken(writer))) if is_full else 0
                sink = Sink(writer)
                pickle.Pickler(sink, protocol=5).dump(value)
                payload: Payload = sink.payload()
                loaded = pickle.loads(writer.read(payload))
                assert loaded == (bytes(value) if isinstance(value, PickleBuffer) else value)
                assert isinstance(payload, bytes) or not is_full
                writer.discard(payload)
                assert writer.in_use == used


def test_views_of_slots_share_nothing_that_two_threads_could_miscount() -> None:
    memory = Memory.create(MIB)
    writer = SlotWriter(memory, MIB, MIB)
    payload = writer.store(b"x" * 100)
    assert payload is not None
    reader = writer.reader()
    makers: list[Callable[[], Any]] = [
        *(lambda: writer.view(0), lambda: writer.read(payload), lambda: reader.read(payload), lambda: reader.own(payload))
    ]
    views = [make() for make in makers for _ in range(2)]
    counted = [id(one) for view in views for one in gc.get_referents(view)]
    assert len(counted) == len(views) == len(set(counted))
    for view in views:
        view.release()
    memory.close()
