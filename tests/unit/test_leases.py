"""Slots that are used for longer: limited, private to whoever has them, and told of when they end."""

import asyncio
import ctypes
import gc
import mmap
import pickle
import threading
from collections.abc import Callable, Iterator
from pickle import PickleBuffer
from typing import Any, NoReturn

import pytest

from percore._common.endings import Endings
from percore._protocol.messages import BrokenFrame, Payload
from percore._protocol.shared import Copy
from percore._serialization.pickler import dump
from percore._transport import leases as leases_module
from percore._transport.buffers import BUFFER_LIMIT
from percore._transport.leases import Leases, Received
from percore._transport.memory import Memory
from percore._transport.slots import SLOT_BITS, SLOT_MASK, Sink, SlotReader, SlotWriter

SLOT = 1 << 20
COUNT = 4

pytestmark = pytest.mark.both_loops


async def turns() -> None:
    """Turns of the loop: what has ended has been told."""
    for _ in range(3):
        await asyncio.sleep(0)


class Sides:
    """A sender's slots, and a receiver's leases of them."""

    def __init__(self) -> None:
        self.memory = Memory.create(COUNT * SLOT)
        self.writer = SlotWriter(self.memory, SLOT, SLOT)
        self.readers: list[Memory] = []
        self.begun: list[int] = []
        self.ended: list[int] = []

    def receiver(self, limit: int = COUNT, *, private: bool = True) -> Leases:
        """To be made in the loop."""
        fd = self.memory.reader_fd()
        self.readers.append(Memory.of_reader(fd, self.memory.size) if private else Memory(fd, self.memory.size, writable=False))
        leases = Leases(SlotReader(self.readers[-1], SLOT), Endings(asyncio.get_running_loop()), limit)
        leases.on_end = self.ended.append
        receive = leases.receive

        def recorded(payload: Payload) -> Received:
            received = receive(payload)
            if received.is_leased:
                assert isinstance(payload, int)
                self.begun.append(payload)
            return received

        leases.receive = recorded  # type: ignore[method-assign]
        return leases

    def send(self, thing: Any, *, private: bool = False) -> Payload:
        taken = list(iter(self.writer.take, None)) if private else []
        sink = Sink(self.writer)
        dump(thing, sink, main_by_value=False, beside=sink)
        for slot in taken:
            self.writer.give(slot, 0)
        return sink.payload()

    def close(self) -> None:
        for reader in self.readers:
            reader.close()
        self.memory.close()


@pytest.fixture
def sides() -> Iterator[Sides]:
    sides = Sides()
    yield sides
    sides.close()


def large(letter: bytes) -> PickleBuffer:
    return PickleBuffer(bytearray(letter * BUFFER_LIMIT))


def lies_in(view: memoryview, memory: Memory) -> bool:
    if view.readonly:
        return False
    start, address = (ctypes.addressof(ctypes.c_char.from_buffer(one)) for one in (memory.own, view))
    return start <= address < start + memory.size


async def test_buffers_arrive_as_views_that_are_writable_and_private(sides: Sides) -> None:
    leases = sides.receiver()
    payload = sides.send([large(b"a"), "text", large(b"b")])
    received = leases.receive(payload)
    assert (received.is_leased, received.size, leases.count, sides.begun) == (True, payload >> SLOT_BITS, 1, [payload])  # type: ignore[operator]
    first, text, second = received.load()
    assert (bytes(first), text, bytes(second)) == (b"a" * BUFFER_LIMIT, "text", b"b" * BUFFER_LIMIT)
    assert lies_in(first, sides.readers[0])
    assert lies_in(second, sides.readers[0])
    first[:] = b"-" * BUFFER_LIMIT
    assert bytes(leases.receive(payload).load()[0]) == b"a" * BUFFER_LIMIT, "the sender's has changed"
    del first, received
    await turns()
    assert (leases.count, sides.ended) == (1, [])
    del second
    await turns()
    assert (leases.count, sides.ended) == (0, [payload])


async def test_what_could_only_be_read_can_only_be_read(sides: Sides) -> None:
    leases = sides.receiver()
    for private in (False, True):
        view = leases.receive(sides.send(PickleBuffer(b"r" * BUFFER_LIMIT), private=private)).load()
        assert view.readonly
        assert bytes(view) == b"r" * BUFFER_LIMIT
        del view
    await turns()
    assert leases.count == 0


async def test_a_slot_that_is_used_again_shows_what_was_sent_last(sides: Sides) -> None:
    leases = sides.receiver()
    for letter in (b"a", b"b", b"c"):
        payload = sides.send(large(letter))
        view = leases.receive(payload).load()
        assert bytes(view) == letter * BUFFER_LIMIT
        view[:] = b"-" * BUFFER_LIMIT
        del view
        await turns()
        sides.writer.discard(payload)
    assert sides.ended == sides.begun
    assert {payload & SLOT_MASK for payload in sides.ended} == {0}


async def test_no_more_slots_are_leased_than_may_be(sides: Sides) -> None:
    leases = sides.receiver(2)
    payloads = [sides.send(large(letter)) for letter in (b"a", b"b", b"c")]
    views = [leases.receive(payload).load() for payload in payloads]
    assert [lies_in(view, sides.readers[0]) for view in views] == [True, True, False]
    assert [bytes(view[:1]) for view in views] == [b"a", b"b", b"c"]
    assert sides.begun == payloads[:2]
    views[2][:1] = b"-"
    assert bytes(leases.receive(payloads[2]).load()[:1]) == b"c"
    del views[0]
    await turns()
    assert sides.ended == payloads[:1]
    assert lies_in(leases.receive(payloads[2]).load(), sides.readers[0])


@pytest.mark.parametrize(("limit", "private"), [(0, True), (COUNT, False)], ids=["limit of none", "memory that is read only"])
async def test_where_nothing_may_be_leased_everything_is_copied(sides: Sides, limit: int, private: bool) -> None:
    leases = sides.receiver(limit, private=private)
    received = leases.receive(sides.send([large(b"a"), large(b"b")]))
    assert not received.is_leased
    first, second = received.load()
    first[:1] = b"-"
    assert (bytes(first[:2]), bytes(second[:2])) == (b"-a", b"bb")
    assert (leases.count, sides.begun) == (0, [])


async def test_bytes_that_travelled_without_a_slot_are_copied(sides: Sides) -> None:
    leases = sides.receiver()
    payload = sides.send([large(b"a")], private=True)
    assert isinstance(payload, bytes)
    received = leases.receive(payload)
    assert not received.is_leased
    (view,) = received.load()
    view[:1] = b"-"
    assert bytes(view[:2]) == b"-a"
    assert payload[BUFFER_LIMIT // 2] == ord("a")


async def test_a_pickle_without_buffers_leases_nothing_and_is_let_go_of(sides: Sides) -> None:
    leases = sides.receiver()
    data = b"x" * 200_000
    received = leases.receive(sides.send(data))
    assert not received.is_leased
    assert received.load() == data
    for view in (sides.readers[0].view, sides.readers[0].own):
        view.release()  # nobody looks at either map: both can be closed
    sides.readers[0]._map.close()
    sides.readers[0]._own.close()


async def test_a_slot_that_is_leased_already_is_copied_from_what_was_sent(sides: Sides) -> None:
    """A second attempt in the worker that keeps the arrays of the first: it gets what was sent, and keeps what it has."""
    leases = sides.receiver()
    payload = sides.send(large(b"o"))
    first = leases.receive(payload).load()
    first[:] = b"1" * BUFFER_LIMIT
    second = leases.receive(payload).load()
    assert bytes(second) == b"o" * BUFFER_LIMIT
    second[:] = b"2" * BUFFER_LIMIT
    assert bytes(first) == b"1" * BUFFER_LIMIT
    del first
    await turns()
    assert bytes(second) == b"2" * BUFFER_LIMIT
    assert sides.begun == sides.ended == [payload]
    third = leases.receive(payload).load()
    assert lies_in(third, sides.readers[0])
    assert bytes(third) == b"o" * BUFFER_LIMIT


async def test_receivers_do_not_see_what_others_write(sides: Sides) -> None:
    payload = sides.send(large(b"o"))
    views = [sides.receiver().receive(payload).load() for _ in range(3)]
    for place, view in enumerate(views):
        view[:1] = b"%d" % place
    assert [bytes(view[:2]) for view in views] == [b"0o", b"1o", b"2o"]
    del views, view
    await turns()
    assert sides.ended == [payload] * 3


class Unreadable:
    """Fails where it is unpickled, behind a buffer."""

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer

    def __reduce__(self) -> tuple[Any, ...]:
        return _refuse, (self.buffer,)


def _refuse(_buffer: object) -> NoReturn:
    raise LookupError("not to be read")


async def test_a_lease_ends_when_its_payload_could_not_be_unpickled(sides: Sides) -> None:
    leases = sides.receiver()
    payload = sides.send([large(b"a"), Unreadable(large(b"b"))])
    received = leases.receive(payload)
    with pytest.raises(LookupError):
        received.load()
    del received
    gc.collect()  # what the error has seen
    await turns()
    assert (leases.count, sides.ended) == (0, [payload])


async def test_a_lease_ends_when_its_payload_is_never_unpickled(sides: Sides) -> None:
    leases = sides.receiver()
    payload = sides.send(large(b"a"))
    received = leases.receive(payload)
    assert leases.count == 1
    del received
    await turns()
    assert (leases.count, sides.ended) == (0, [payload])


@pytest.mark.parametrize("payload", [COUNT, (SLOT + 1) << SLOT_BITS, -1 << SLOT_BITS])
async def test_a_payload_outside_of_the_slots_is_broken_and_leases_nothing(sides: Sides, payload: int) -> None:
    leases = sides.receiver()
    with pytest.raises(BrokenFrame):
        leases.receive(payload)
    assert (leases.count, sides.begun) == (0, [])


async def test_buffers_outside_of_their_payload_are_broken_and_lease_nothing(sides: Sides) -> None:
    leases = sides.receiver()
    payload = sides.send(large(b"a"))
    assert isinstance(payload, int)
    sides.writer.view(0)[(payload >> SLOT_BITS) - 20] = 255  # the length of the buffer, in the table
    with pytest.raises(BrokenFrame, match="a buffer of"):
        leases.receive(payload)
    assert (leases.count, sides.begun) == (0, [])


async def test_threads_do_not_lease_more_than_may_be_leased(sides: Sides) -> None:
    limit = 2
    leases = sides.receiver(limit)
    payloads = [sides.send(large(b"%d" % place)) for place in range(COUNT)]
    most = [0]

    def receive_all() -> None:
        for number in range(300):
            place = number % COUNT
            view = leases.receive(payloads[place]).load()
            assert bytes(view) == b"%d" % place * BUFFER_LIMIT
            most[0] = max(most[0], leases.count)

    await asyncio.gather(*(asyncio.to_thread(receive_all) for _ in range(4)))
    await turns()
    assert 0 < most[0] <= limit
    assert leases.count == 0
    assert sorted(sides.begun) == sorted(sides.ended)


async def test_a_lease_that_ends_behind_its_memory_is_quiet(sides: Sides) -> None:
    """1. the last view goes; 2. the memory is closed; 3. the loop hears of the first."""
    leases = sides.receiver()
    view = leases.receive(sides.send(large(b"a"))).load()
    view[:1] = b"-"
    errors: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: errors.append(context))
    del view
    sides.readers[0].close()
    await turns()
    assert errors == []


def test_a_view_outlives_the_loop_and_the_memory() -> None:
    sides = Sides()

    async def receive() -> Any:
        return sides.receiver().receive(sides.send([large(b"a"), "text"])).load()

    view, _ = asyncio.run(receive())
    sides.close()
    view[:1] = b"-"
    assert bytes(view) == b"-" + b"a" * (BUFFER_LIMIT - 1)
    thread = threading.Thread(target=view.release)
    thread.start()
    thread.join()
    del view, _


RECEIVERS: list[Callable[[memoryview], object]] = [bytes, pickle.PickleBuffer, lambda view: view[:10]]


@pytest.mark.parametrize("take", RECEIVERS, ids=["bytes", "buffer", "part"])
async def test_what_is_made_of_a_view_decides_how_long(sides: Sides, take: Callable[[memoryview], object]) -> None:
    leases = sides.receiver()
    taken = take(leases.receive(sides.send(large(b"a"))).load())
    await turns()
    assert leases.count == (0 if isinstance(taken, bytes) else 1)
    del taken
    await turns()
    assert leases.count == 0


def test_a_slot_begins_with_a_page() -> None:
    """`forget_writes` counts on it."""
    assert SLOT % mmap.PAGESIZE == 0


@pytest.mark.parametrize("is_shared", [False, True], ids=["leased", "shared"])
async def test_buffers_share_nothing_that_two_threads_could_miscount(sides: Sides, *, is_shared: bool) -> None:
    """Views that are cut from one view count together how many they are, and lose count without a GIL."""
    leases = sides.receiver()
    payload = sides.send([PickleBuffer(bytearray(BUFFER_LIMIT)) for _ in range(3)])
    assert isinstance(payload, int)
    views = (leases.receive_shared(payload, lambda: None) if is_shared else leases.receive(payload)).load()
    assert [view.readonly for view in views] == [is_shared] * 3
    assert len({id(one) for view in views for one in gc.get_referents(view)}) == 3
    del views
    await turns()


@pytest.mark.parametrize("private", [True, False])
async def test_a_shared_payload_that_cannot_be_read_ends_at_once(
    sides: Sides, monkeypatch: pytest.MonkeyPatch, *, private: bool
) -> None:
    leases, ended = sides.receiver(private=private), list[int]()
    with pytest.raises(BrokenFrame):
        leases.receive_shared(COUNT, lambda: ended.append(1))  # there is no such slot
    await turns()
    assert ended == [1]

    def fails(*_: Any) -> NoReturn:
        raise MemoryError

    payload = sides.send(b"x" * 100_000)
    assert isinstance(payload, int)
    with monkeypatch.context() as patched:
        patched.setattr(leases_module, "export", fails)
        patched.setattr(leases_module, "bytes", fails, raising=False)
        forgotten = list[int]()
        copy = Copy(leases.receive_shared, payload, lambda: forgotten.append(1))
        with pytest.raises(MemoryError):
            copy.value()
        await turns()
    assert copy.value() == b"x" * 100_000  # the next call tries again
    copy.forget()
    gc.collect()
    await turns()
    assert forgotten == [1]  # though one attempt has failed
