"""Two sides of a channel over real memory in one loop, with both kinds of bell; and each race it claims to stand, step by step."""

import asyncio
import random
import re
import threading
import time
from collections.abc import AsyncIterator, Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest
import pytest_asyncio

from percore._calls.calls import Call
from percore._calls.functions import Function
from percore._common.system import HAS_EVENTFD
from percore._protocol.messages import Body, BrokenFrame, Kind, Message
from percore._scheduler.dispatch import Dispatch
from percore._supervisor.pool_worker import PoolWorker
from percore._supervisor.timing import Turn
from percore._transport import channel as channel_module
from percore._transport import doorbell
from percore._transport.arena import Arena
from percore._transport.channel import Channel
from percore._transport.codec import encode
from percore._transport.doorbell import Bell, Haste, bell_fds, bell_of
from percore._transport.frames import LARGEST_FRAME, MAX_FRAME, RING_SIZE
from percore._transport.memory import Memory
from percore._transport.ring import HEADER_SIZE, RingReader, RingWriter
from percore._transport.slots import INLINE_LIMIT, SLOT_BITS, SLOT_MASK, SlotReader, SlotWriter
from percore._transport.supervisor_side import SupervisorSide

BELLS = [
    pytest.param(True, id="event", marks=pytest.mark.skipif(not HAS_EVENTFD, reason="this system has no eventfd")),
    pytest.param(False, id="socket"),
]
SLOT_SIZE = 1 << 20
SLOTS = 4


class CountedBell:
    """A bell that notes what is rung."""

    def __init__(self, bell: Bell) -> None:
        self.bell = bell
        self.rings: list[tuple[int, int]] = []
        self.fileno, self.read, self.log, self.close = bell.fileno, bell.read, bell.log, bell.close
        self.out_fileno = bell.out_fileno

    def ring(self, published: int, consumed: int) -> bool:
        self.rings.append((published, consumed))
        return self.bell.ring(published, consumed)


class Side:
    """A channel and what has arrived there."""

    def __init__(self, channel: Channel, bell: CountedBell) -> None:
        self.channel = channel
        self.bell = bell
        self.got: list[tuple[int, int, Body]] = []
        self.broken: list[BaseException] = []
        self.on_message: Callable[[int, int, Body], None] = lambda op, call_id, body: None
        self._wanted = 0
        self._arrived = asyncio.Event()

    def open(self) -> None:
        self.channel.open(self._take, self.broken.append)

    def _take(self, messages: list[Message]) -> None:
        for op, call_id, body in messages:
            self.got.append((op, call_id, body))
            self.on_message(op, call_id, body)
            if len(self.got) >= self._wanted:
                self._arrived.set()
            if not self.channel.is_open:
                return

    async def receive(self, count: int) -> list[tuple[int, int, Body]]:
        """Wait until so many messages have arrived in all."""
        self._wanted = count
        self._arrived.clear()
        if len(self.got) < count:
            await self._arrived.wait()
        return self.got

    def bytes_of(self, body: Any) -> bytes:
        return bytes(self.channel.incoming.read(body))

    def is_behind(self) -> bool:
        return self.channel.tx.written != self.channel.tx.acknowledged


class Pair:
    """The supervisor's side (`up`) and a worker's side (`down`), which tells promptly what it has read."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        self.cell = Memory.create(2 * RING_SIZE)
        self.slots = Memory.create(SLOTS * SLOT_SIZE), Memory.create(SLOTS * SLOT_SIZE)
        down = slice(RING_SIZE)
        up = slice(RING_SIZE, 2 * RING_SIZE)
        view = self.cell.view
        bells = [CountedBell(bell_of(fds)) for fds in bell_fds()]
        self.arena = Arena(self.slots[0], SLOT_SIZE, SLOT_SIZE, loop)
        results = SlotWriter(self.slots[1], SLOT_SIZE, SLOT_SIZE)
        readers = [SlotReader(memory, SLOT_SIZE) for memory in self.slots]
        rings = RingWriter(view[down]), RingReader(view[up])
        self.link = SupervisorSide(loop, rings, cast("Bell", bells[0]), (self.arena, readers[1]), leases=0, lent=0)
        self.up = Side(self.link, bells[0])
        self.down = Side(
            Channel(loop, (RingWriter(view[up]), RingReader(view[down])), bells[1], (results, readers[0]), prompt=True), bells[1]
        )

    def open(self) -> "Pair":
        self.up.open()
        self.down.open()
        return self

    def sides(self) -> tuple[tuple[Side, Side], tuple[Side, Side]]:
        return (self.up, self.down), (self.down, self.up)

    def close(self) -> None:
        for side in (self.up, self.down):
            side.channel.close()
            side.channel.close()
            side.broken.clear()  # their tracebacks hold views of the ring
        for memory in (self.cell, *self.slots):
            memory.close()


@pytest_asyncio.fixture(params=BELLS)
async def closed_pair(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Pair]:
    """A pair that is not open yet."""
    monkeypatch.setattr(doorbell, "HAS_EVENTFD", request.param)
    pair = Pair()
    yield pair
    pair.close()


@pytest_asyncio.fixture
async def pair(closed_pair: Pair) -> Pair:
    return closed_pair.open()


async def turns(count: int = 5) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def until(condition: Callable[[], bool]) -> None:
    """Turns of the loop until something holds that no message tells."""
    while not condition():
        await turns(1)


# Messages


async def test_a_message_arrives_as_it_was_sent(pair: Pair) -> None:
    for sender, receiver in pair.sides():
        for body in (None, (), (1, "two", b"three", 4.0, None, True), b"pickle", 7 << SLOT_BITS | 1):
            receiver.got.clear()
            sender.channel.send(3, 2**40, body)
            assert await receiver.receive(1) == [(3, 2**40, body)]
        assert sender.broken == receiver.broken == []


@pytest.mark.both_loops
async def test_r1_messages_of_all_sizes_both_ways(pair: Pair) -> None:
    chance = random.Random(1)
    sizes = [0, 1, 100, 4096, 65_536, INLINE_LIMIT, *(chance.randrange(INLINE_LIMIT) for _ in range(60))] * 3
    chance.shuffle(sizes)
    for sender, _ in pair.sides():
        for number, size in enumerate(sizes):
            sender.channel.send(1, number, number.to_bytes(2, "big") + b"x" * size)
    for _, receiver in pair.sides():
        got = await receiver.receive(len(sizes))
        assert [call_id for _, call_id, _ in got] == list(range(len(sizes)))
        assert all(body == number.to_bytes(2, "big") + b"x" * sizes[number] for _, number, body in got)


async def test_a_frame_that_fits_exactly_is_not_left_behind(pair: Pair) -> None:
    """1. the ring is full, and a frame waits; 2. the peer reports just as much room as the frame needs: no other report follows."""
    sender, receiver = pair.up, pair.down
    sender.channel.send(1, 1, b"x" * 100)
    await receiver.receive(1)
    await until(lambda: not sender.is_behind())
    tx = sender.channel.tx
    frame = len(encode([(1, 2, b"y" * 100)])) + HEADER_SIZE
    for room in (frame - 1, frame):
        acknowledged = tx.acknowledged
        tx.acknowledged -= tx.size - room  # so much is free, and nothing is on its way
        if room < frame:
            sender.channel.send_from_thread(1, 2, b"y" * 100)
            assert not sender.channel.is_flushed()
        else:
            sender.channel.flush()
        tx.acknowledged = acknowledged
        assert sender.channel.is_flushed() is (room == frame)
    assert await receiver.receive(2) == [(1, 1, b"x" * 100), (1, 2, b"y" * 100)]


async def test_a_message_to_an_idle_peer_waits_if_threads_fill_the_ring_meanwhile(pair: Pair) -> None:
    """1. the loop finds that the peer is idle; 2. a thread fills the ring; 3. the loop gets the lock and has no room."""
    sender, receiver = pair.up, pair.down
    own = sender.channel._lock

    class Late:
        def acquire(self, blocking: bool) -> bool:
            sender.channel._lock = own
            while sender.channel._frame is None:
                sender.channel.send_from_thread(1, 0, b"t" * 60_000)
            frame, sender.channel._frame = sender.channel._frame, None
            waiting.append(frame)
            return own.acquire(blocking)

        def release(self) -> None:
            own.release()

    waiting: list[bytes] = []
    sender.channel._lock = cast("Any", Late())
    sender.channel.send(2, 7, b"late" * 15_000)
    assert waiting
    assert sender.channel.tx.written - sender.channel.tx.acknowledged <= sender.channel.tx.size
    assert not sender.channel.is_flushed()
    await until(lambda: bool(receiver.got) and receiver.got[-1][0] == 2)
    assert receiver.got[-1] == (2, 7, b"late" * 15_000)
    assert [*{body for op, _, body in receiver.got if op == 1}] == [b"t" * 60_000]
    assert sender.broken == receiver.broken == []


async def test_the_lag_is_the_time_from_a_frame_to_its_reading(pair: Pair) -> None:
    for sender, receiver in pair.sides():
        assert sender.channel.lag() == 0.0
        before = time.monotonic()
        sender.channel.send(1, 1, None)
        if sender is pair.up:  # its peer reports promptly; the other side reports with what it sends
            await receiver.receive(1)
            await until(lambda sender=sender: not sender.is_behind())  # type: ignore[misc]
            assert 0.0 <= sender.channel.lag() <= time.monotonic() - before
        else:
            assert 0.0 <= sender.channel.lag() <= time.monotonic() - before


@pytest.mark.both_loops
async def test_payloads_of_all_sizes_both_ways(pair: Pair) -> None:
    sizes = [1, INLINE_LIMIT, INLINE_LIMIT + 1, 300_000, SLOT_SIZE, SLOT_SIZE - 1] * 4
    for sender, receiver in pair.sides():
        read: dict[int, bytes] = {}

        def keep(_op: int, number: int, body: Any, sender: Side = sender, receiver: Side = receiver, read: Any = read) -> None:
            read[number] = receiver.bytes_of(body)
            if type(body) is int:
                sender.channel.outgoing.give(body & SLOT_MASK, body >> SLOT_BITS)

        receiver.on_message = keep
        for number, size in enumerate(sizes):
            sender.channel.send_payload(1, number, bytes([number]) * size)
        await receiver.receive(len(sizes))
        assert read == {number: bytes([number]) * size for number, size in enumerate(sizes)}
        assert sender.channel.outgoing.in_use == 0


async def test_r2_both_rings_full_at_once(pair: Pair) -> None:
    count = 3000
    for sender, _ in pair.sides():
        for number in range(count):
            sender.channel.send(1, number, b"x" * 1000)
    await turns(1)
    for _, receiver in pair.sides():
        assert [call_id for _, call_id, _ in await receiver.receive(count)] == list(range(count))
    for sender, _ in pair.sides():
        assert sender.channel.full_count > 0
        assert not sender.channel._queue


async def test_answers_while_the_ring_is_full(pair: Pair) -> None:
    # Each message makes the other side send two, until there were many: reading goes on while nothing can be written.
    for sender, _ in pair.sides():

        def answer(op: int, call_id: int, _body: Body, sender: Side = sender) -> None:
            if call_id < 10:
                for _ in range(2):
                    sender.channel.send(op, call_id + 1, b"x" * 900)

        sender.on_message = answer
    pair.up.channel.send(1, 0, None)
    await pair.down.receive(sum(4**level for level in range(6)))
    await pair.up.receive(sum(2 * 4**level for level in range(5)))
    assert pair.up.broken == pair.down.broken == []


async def test_no_frame_is_larger_than_half_a_ring(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    write, frames = RingWriter.write, []

    def noting(writer: RingWriter, data: bytes) -> int:
        frames.append(len(data))
        return write(writer, data)

    monkeypatch.setattr(RingWriter, "write", noting)
    for number in range(700):
        pair.up.channel.send(1, number, ("\U0001f600" * 4096,))  # 16 KiB that count as 4096
    got = await pair.down.receive(700)
    assert [call_id for _, call_id, _ in got] == list(range(700))
    assert max(frames) <= MAX_FRAME
    assert len(frames) < 350


async def test_a_thread_publishes_while_this_side_rings_for_what_it_has_read(pair: Pair) -> None:
    """Otherwise a process that dies then takes along the result of a call that a thread has just sent."""
    down = pair.down
    written: list[int] = []
    bell = down.bell.bell

    def ring(published: int, consumed: int) -> bool:
        if not published and not written:
            thread = threading.Thread(target=down.channel.send_from_thread, args=(1, 2, None))
            thread.start()
            thread.join()
            written.append(down.channel.tx.written)
        return bell.ring(published, consumed)

    down.bell.bell = cast("Bell", SimpleNamespace(ring=ring))
    pair.up.channel.send(1, 1, None)
    await until(lambda: bool(written))
    assert written[0] > 0
    assert await pair.up.receive(1) == [(1, 2, None)]


async def test_a_message_that_nobody_awaits_goes_with_the_next_one(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if it was sent while messages were delivered: the worker would be woken for it alone."""
    monkeypatch.setattr(channel_module, "_LAZY", 60.0)
    up, down = pair.up, pair.down
    up.on_message = lambda op, call_id, body: up.channel.send_lazily(2, call_id, None)
    down.channel.send(1, 1, None)
    await up.receive(1)
    await turns(3)
    assert up.channel.sent == 0
    up.channel.send(1, 2, None)
    assert not up.channel._queue
    assert await down.receive(2) == [(2, 1, None), (1, 2, None)]


async def test_what_a_thread_queues_while_others_are_published_together_is_published(pair: Pair) -> None:
    """The thread does not get the lock, so it relies on the one that has it to look again."""
    down, bell = pair.down, pair.down.bell.bell
    rung: list[int] = []

    def ring(published: int, consumed: int) -> bool:
        rung.append(published)
        if len(rung) == 1:
            thread = threading.Thread(target=down.channel.send_from_thread, args=(1, 3, None))
            thread.start()
            thread.join()
        return bell.ring(published, consumed)

    down.bell.bell = cast("Bell", SimpleNamespace(ring=ring))
    down.channel.send_lazily(1, 1, None)
    down.channel.send(1, 2, None)
    assert not down.channel._queue
    assert await pair.up.receive(3) == [(1, 1, None), (1, 2, None), (1, 3, None)]


@pytest.mark.parametrize("others", [0, 1], ids=["alone", "in turn"])
async def test_a_message_that_can_never_fit_breaks_the_channel_at_once(pair: Pair, others: int) -> None:
    channel = pair.down.channel
    for number in range(others):
        channel.send_later(1, number, ())
    channel.send(1, 99, tuple("x" * 4096 for _ in range(RING_SIZE // 4096)))
    channel.flush()
    (error,) = pair.down.broken
    assert re.search(rf"largest that fits .* {LARGEST_FRAME}$", str(error))


async def test_the_largest_frame_fits_when_all_else_is_read(pair: Pair) -> None:
    """However little the reader owes of what it has read, and says nothing of."""
    down, body = pair.down.channel, b"x" * 4000
    for _ in range(RING_SIZE // 4 // 4100):
        down.send(1, 1, (body,))
        await pair.up.receive(1)
        pair.up.got.clear()
    assert 0 < down.tx.written - down.tx.acknowledged <= RING_SIZE // 4
    overhead = len(encode([(1, 2, (b"",))]))
    down.send(1, 2, (bytes(LARGEST_FRAME - overhead),))
    ((_, call_id, _),) = await pair.up.receive(1)
    assert call_id == 2


# Ringing


async def test_the_first_message_of_a_turn_rings_at_once_and_the_rest_share_a_ring(pair: Pair) -> None:
    for sender, receiver in pair.sides():
        for turn in range(3):
            receiver.got.clear()
            await turns(1)
            sender.bell.rings.clear()
            for number in range(10):
                sender.channel.send(1, number, None)
                assert 1 <= len(sender.bell.rings) <= 2
            await receiver.receive(10)
            publishing = [published for published, _ in sender.bell.rings if published]
            assert len(publishing) <= 3, turn
            assert publishing[-1] > publishing[0]


async def test_no_more_peers_than_can_run_are_rung_before_the_iteration_ends() -> None:
    haste = Haste(2)
    pairs = [Pair().open() for _ in range(4)]
    for pair in pairs:
        pair.up.channel.haste = haste
        for number in range(3):
            pair.up.channel.send(1, number, None)
    assert [bool(pair.up.bell.rings) for pair in pairs] == [True, True, False, False]
    for pair in pairs:
        assert [number for _, number, _ in await pair.down.receive(3)] == [0, 1, 2]
    assert [len(pair.up.bell.rings) for pair in pairs[2:]] == [1, 1]
    await until(lambda: not any(pair.up.is_behind() for pair in pairs))  # of which it has heard: it begins anew
    for pair in pairs:
        pair.up.channel.send(1, 3, None)
    assert [len(pair.up.bell.rings) for pair in pairs[2:]] == [1, 1]
    assert all(len(pair.up.bell.rings) > 1 for pair in pairs[:2])
    for pair in pairs:
        await pair.down.receive(4)
        pair.close()


async def test_a_lone_message_is_one_ring(pair: Pair) -> None:
    pair.up.channel.send(1, 1, None)
    assert len(pair.up.bell.rings) == 1
    await pair.down.receive(1)
    await turns()
    assert len(pair.up.bell.rings) == 1


async def test_a_worker_tells_at_once_what_it_has_read(pair: Pair) -> None:
    pair.up.channel.send(1, 1, None)
    assert pair.up.is_behind()
    await pair.down.receive(1)
    await until(lambda: not pair.up.is_behind())
    assert [published for published, _ in pair.down.bell.rings] == [0]


@pytest.mark.parametrize("in_turn", [False, True])
async def test_a_peer_waits_since_there_is_something_to_read(pair: Pair, in_turn: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr("percore._transport.channel.monotonic", lambda: now)
    channel = pair.up.channel
    send = channel.send_later if in_turn else channel.send
    assert channel.has_read()
    send(1, 1, None)
    assert not channel.has_read()  # also while it is queued
    channel.flush()
    assert channel.waits_since == 100
    now = 101
    send(1, 2, None)
    channel.flush()
    assert channel.waits_since == 100  # it has not read the first one
    await pair.down.receive(2)
    await until(channel.has_read)
    assert channel.waits_since == 0
    now = 500
    send(1, 3, None)
    channel.flush()
    assert channel.waits_since == 500


async def test_what_was_read_goes_with_the_answer(pair: Pair) -> None:
    pair.down.on_message = lambda op, call_id, _body: pair.down.channel.send(op, call_id, None)
    pair.up.channel.send(1, 1, None)
    await pair.up.receive(1)
    assert not pair.up.is_behind()
    await turns()
    assert len(pair.down.bell.rings) == 1


async def test_a_supervisor_tells_what_it_has_read_once_a_quarter_is_owed(pair: Pair) -> None:
    pair.down.channel.send(1, 1, b"x" * 1000)
    await pair.up.receive(1)
    await turns()
    assert pair.up.bell.rings == []
    assert pair.down.is_behind()
    pair.down.channel.send(1, 2, b"x" * 90_000)
    pair.down.channel.send(1, 3, b"x" * 90_000)
    await pair.up.receive(3)
    await until(lambda: not pair.down.is_behind())
    assert all(not published for published, _ in pair.up.bell.rings)


async def test_what_a_supervisor_has_read_goes_with_its_next_message(pair: Pair) -> None:
    pair.down.channel.send(1, 1, None)
    await pair.up.receive(1)
    pair.up.channel.send(1, 2, None)
    await pair.down.receive(1)
    assert not pair.down.is_behind()


async def test_what_was_sent_before_the_other_side_opened_arrives(closed_pair: Pair) -> None:
    closed_pair.up.open()
    for number in range(100):
        closed_pair.up.channel.send(1, number, None)
    await turns()
    closed_pair.down.open()
    assert len(await closed_pair.down.receive(100)) == 100


async def test_r3_a_bell_nobody_hears_fills_up_and_nothing_is_lost(closed_pair: Pair) -> None:
    closed_pair.up.open()
    for number in range(500):
        closed_pair.up.channel.send(1, number, None)
        closed_pair.up.channel.flush()
        await asyncio.sleep(0)  # a ring each
    assert closed_pair.up.channel._bell_waits == isinstance(closed_pair.up.bell.bell, doorbell.SocketBell)
    closed_pair.down.open()
    assert [call_id for _, call_id, _ in await closed_pair.down.receive(500)] == list(range(500))
    await until(lambda: not closed_pair.up.channel._bell_waits)
    await until(lambda: not closed_pair.up.is_behind())


async def test_a_full_bell_is_rung_later_though_the_loop_has_lost_who_waits_for_it(
    closed_pair: Pair, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As by a Ctrl-C just before the callback."""
    channel = closed_pair.up.channel
    closed_pair.up.open()
    with monkeypatch.context() as patch:
        patch.setattr(Channel, "_watch_bell", lambda _: None)
        for number in range(500):
            channel.send(1, number, None)
            channel.flush()
            await asyncio.sleep(0)
    channel.catch_up()
    closed_pair.down.open()
    assert [call_id for _, call_id, _ in await closed_pair.down.receive(500)] == list(range(500))
    await until(lambda: not channel._bell_waits)


async def test_closing_while_the_bell_is_full(closed_pair: Pair) -> None:
    closed_pair.up.open()
    for number in range(500):
        closed_pair.up.channel.send_from_thread(1, number, None)
    closed_pair.up.channel.stop()
    await turns()


async def test_the_last_words_of_a_peer_are_heard(closed_pair: Pair) -> None:
    closed_pair.open()
    closed_pair.down.channel.send(1, 1, None)
    closed_pair.down.channel.send(1, 2, None)
    closed_pair.down.channel.flush()
    closed_pair.down.channel.close()
    closed_pair.up.channel.receive()
    assert [call_id for _, call_id, _ in closed_pair.up.got] == [1, 2]
    closed_pair.up.channel.receive()
    assert closed_pair.up.broken == []


async def test_a_batch_is_announced_when_all_of_it_was_delivered(closed_pair: Pair) -> None:
    batches: list[int] = []
    down = closed_pair.down
    closed_pair.up.open()
    down.channel.open(down._take, down.broken.append, lambda: batches.append(len(down.got)))
    for number in range(10):
        closed_pair.up.channel.send(1, number, None)
    closed_pair.up.channel.flush()
    await down.receive(10)
    assert batches == [10]


# A broken peer


def bad_crc(pair: Pair) -> None:
    length = pair.down.channel.tx.write(encode([(1, 99, None)]))
    pair.cell.view[RING_SIZE + pair.down.channel.tx.written % RING_SIZE - 1] ^= 1
    pair.down.bell.ring(length, 0)


def too_many_bytes(pair: Pair) -> None:
    pair.down.bell.ring(RING_SIZE + 1, 0)


def half_a_header(pair: Pair) -> None:
    pair.down.bell.ring(HEADER_SIZE - 1, 0)


def never_written(pair: Pair) -> None:
    pair.down.bell.ring(0, 10_000)


def frame(data: bytes) -> Callable[[Pair], None]:
    return lambda pair: void(pair.down.bell.ring(pair.down.channel.tx.write(data), 0))


def void(_value: object) -> None:
    return


def negative_slot(pair: Pair) -> None:
    pair.down.channel.send(2, 99, -1)


def foreign_slot(pair: Pair) -> None:
    pair.down.channel.send(2, 99, 10 << SLOT_BITS | SLOTS)


def long_payload(pair: Pair) -> None:
    pair.down.channel.send(2, 99, SLOT_SIZE + 1 << SLOT_BITS)


LIES = [
    bad_crc,
    too_many_bytes,
    half_a_header,
    never_written,
    pytest.param(frame(b""), id="empty_frame"),
    pytest.param(frame(b"?" * 20), id="garbage"),
    pytest.param(frame(encode([(1, 99)])), id="no_triple"),  # type: ignore[list-item]
    pytest.param(frame(encode([99])), id="no_message"),  # type: ignore[list-item]
    pytest.param(frame(encode((1, 99, None))), id="no_list"),  # type: ignore[arg-type]
    negative_slot,
    foreign_slot,
    long_payload,
]


@pytest.mark.parametrize("lie", LIES)
async def test_a_broken_peer_is_told_of_once_and_never_believed_again(pair: Pair, lie: Callable[[Pair], None]) -> None:
    def read(op: int, _call_id: int, body: Any) -> None:
        if op == 2:
            pair.up.bytes_of(body)

    pair.up.on_message = read
    pair.down.channel.send(1, 1, None)
    await pair.up.receive(1)
    await turns()
    lie(pair)
    await until(lambda: bool(pair.up.broken))
    for number in range(3):
        pair.down.channel.send(1, number, None)
        await turns()
    pair.up.channel.receive()
    assert len(pair.up.broken) == 1
    assert isinstance(pair.up.broken[0], BrokenFrame | ValueError | TypeError)
    assert [message for message in pair.up.got if message[0] == 1] == [(1, 1, None)]
    pair.up.channel.send(1, 1, None)  # to nobody, and without harm
    pair.up.channel.flush()
    assert len(pair.up.broken) == 1


async def test_log_records_are_told_before_the_messages_after_them(pair: Pair) -> None:
    told: list[object] = []
    pair.up.channel.on_logged = lambda count: told.append(f"{count} records")
    pair.up.on_message = lambda op, call_id, body: told.append(call_id)
    pair.down.bell.log(2)
    pair.down.channel.send(1, 7, None)
    await pair.up.receive(1)
    assert told == ["2 records", 7]


async def test_log_records_that_nobody_reads_break_the_channel(pair: Pair) -> None:
    pair.down.bell.log(1)
    await until(lambda: bool(pair.up.broken))
    assert "nobody is there to read any" in str(pair.up.broken[0])


async def test_nothing_is_delivered_after_records_that_ended_the_channel(pair: Pair) -> None:
    ended: list[int] = []

    def end(count: int) -> None:
        ended.append(count)
        pair.up.channel.stop()

    pair.up.channel.on_logged = end
    pair.down.bell.log(1)
    pair.down.channel.send(1, 7, None)
    await until(lambda: bool(ended))
    assert (ended, pair.up.got, pair.up.broken) == ([1], [], [])


async def test_a_handler_that_fails_breaks_the_channel(pair: Pair) -> None:
    def fail(_op: int, call_id: int, _body: Body) -> None:
        if call_id == 2:
            raise KeyError(call_id)

    pair.up.on_message = fail
    for number in range(1, 5):
        pair.down.channel.send(1, number, None)
    pair.down.channel.flush()
    await until(lambda: bool(pair.up.broken))
    await turns()
    assert [call_id for _, call_id, _ in pair.up.got] == [1, 2]
    assert [type(error) for error in pair.up.broken] == [KeyError]


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit, asyncio.CancelledError, GeneratorExit])
async def test_what_is_no_exception_breaks_the_channel_and_goes_on(closed_pair: Pair, kind: type[BaseException]) -> None:
    def interrupt(_op: int, call_id: int, _body: Body) -> None:
        if call_id == 2:
            raise kind

    pair = closed_pair
    pair.down.open()
    pair.up.channel.open(pair.up._take, pair.up.broken.append)
    pair.up.on_message = interrupt
    for number in range(1, 5):
        pair.down.channel.send(1, number, None)
    pair.down.channel.flush()
    with pytest.raises(kind):
        pair.up.channel.receive()
    pair.up.channel.receive()
    await turns()
    assert [call_id for _, call_id, _ in pair.up.got] == [1, 2]
    assert [type(error) for error in pair.up.broken] == [kind]


@pytest.mark.parametrize("name", ["send_later", "send_lazily"])
async def test_an_interrupt_before_a_flush_is_scheduled_leaves_it_to_the_next_message(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    def interrupt(*_args: object) -> None:
        raise KeyboardInterrupt

    send = getattr(pair.up.channel, name)
    with monkeypatch.context() as patch:
        patch.setattr(pair.up.channel, "loop", SimpleNamespace(call_soon=interrupt, call_later=interrupt))
        with pytest.raises(KeyboardInterrupt):
            send(1, 1, None)
    send(1, 2, None)
    async with asyncio.timeout(10):
        assert await pair.down.receive(2) == [(1, 1, None), (1, 2, None)]


@pytest.mark.parametrize("first", [True, False])
async def test_an_interrupt_while_sending_breaks_the_channel_and_goes_on(
    pair: Pair, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    def interrupt(_published: int, _consumed: int) -> bool:
        raise KeyboardInterrupt

    if not first:
        pair.up.channel.send(1, 1, None)
    monkeypatch.setattr(pair.up.bell, "ring", interrupt)
    send = pair.up.channel.send if first else pair.up.channel.send_from_thread
    with pytest.raises(KeyboardInterrupt):
        send(1, 1, None)
    assert [type(error) for error in pair.up.broken] == [KeyboardInterrupt]
    assert not pair.up.channel._lock.locked()


async def test_an_interrupt_as_the_lock_is_taken_breaks_the_channel_and_goes_on(pair: Pair) -> None:
    class Lock:
        """Ctrl-C comes after `acquire` has the lock and before its caller has the answer."""

        def __init__(self) -> None:
            self.lock = threading.Lock()

        def acquire(self, blocking: bool) -> bool:
            self.lock.acquire(blocking)
            raise KeyboardInterrupt

    pair.up.channel._lock = Lock()  # type: ignore[assignment]
    with pytest.raises(KeyboardInterrupt):
        pair.up.channel.send(1, 1, None)
    assert [type(error) for error in pair.up.broken] == [KeyboardInterrupt]
    pair.up.channel.send(1, 2, None)
    pair.up.channel.flush()  # neither waits nor raises: the owner was told


async def test_what_cannot_be_encoded_breaks_the_channel(pair: Pair) -> None:
    pair.up.channel.send(1, 1, object())
    assert [type(error) for error in pair.up.broken] == [ValueError]


@pytest.mark.parametrize("end", ["stop", "close"])
async def test_a_handler_that_ends_the_channel_gets_nothing_more(pair: Pair, end: str) -> None:
    pair.up.on_message = lambda _op, call_id, _body: getattr(pair.up.channel, end)() if call_id == 2 else None
    for number in range(1, 6):
        pair.down.channel.send(1, number, None)
        pair.down.channel.flush()
    await until(lambda: len(pair.up.got) >= 2)
    await turns()
    assert [call_id for _, call_id, _ in pair.up.got] == [1, 2]
    assert pair.up.broken == []


async def test_a_message_whose_answer_breaks_the_channel_is_the_last(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_published: int, _consumed: int) -> bool:
        raise OSError("the bell is gone")

    monkeypatch.setattr(pair.up.bell, "ring", fail)
    pair.up.on_message = lambda op, call_id, _body: pair.up.channel.send(op, call_id, None)
    for number in range(1, 6):
        pair.down.channel.send(1, number, None)
    pair.down.channel.flush()
    await until(lambda: bool(pair.up.broken))
    assert len(pair.up.got) == 1
    assert len(pair.up.broken) == 1


# Payloads that wait


def take_all(slots: SlotWriter) -> list[int]:
    taken = []
    while (slot := slots.take()) is not None:
        taken.append(slot)
    return taken


async def test_a_payload_without_a_slot_waits_for_one_in_order(pair: Pair) -> None:
    slots = pair.up.channel.outgoing
    taken = take_all(slots)
    for number in range(6):
        pair.up.channel.send_payload(1, number, bytes([number]) * 200_000)
    pair.up.channel.send_payload(1, 99, b"small goes at once")
    assert await pair.down.receive(1) == [(1, 99, b"small goes at once")]
    bodies: list[Any] = []
    for number in range(6):
        slots.give(taken.pop(), 0)
        got = await pair.down.receive(2 + number)
        bodies.append(got[-1][2])
        assert got[-1][1] == number
        assert pair.down.bytes_of(bodies[-1]) == bytes([number]) * 200_000
        taken.append(bodies[-1] & SLOT_MASK)


async def test_what_cannot_be_sent_any_more_passes_its_slot_on(closed_pair: Pair) -> None:
    closed_pair.open()
    slots = closed_pair.up.channel.outgoing
    taken = take_all(slots)
    other: list[str] = []
    closed_pair.up.channel.send_payload(1, 1, b"x" * 200_000)

    def serve() -> bool:
        other.append("served")
        return True

    slots.wait(serve)
    closed_pair.up.channel.stop()
    slots.give(taken[0], 0)
    assert other == ["served"]
    assert slots.in_use == SLOTS - 1


class Ticket:
    def __init__(self) -> None:
        self.wanted = True
        self.payloads: list[int] = []

    def is_wanted(self) -> bool:
        return self.wanted

    def stored(self, payload: int) -> bool:
        self.payloads.append(payload)
        return self.wanted


def private(pair: Pair, data: bytes) -> int:
    """A parcel for which no slot was free when it was pickled."""
    parcel = pair.arena.kept(data)
    assert type(parcel) is int
    return parcel


async def test_who_sent_a_parcel_learns_where_it_lies(pair: Pair) -> None:
    slots = pair.arena
    ticket = Ticket()
    stored = ticket.payloads
    pair.link.send_parcel(1, 1, private(pair, b"x" * 200_000), ticket)
    assert bytes(slots.read(stored[0])) == b"x" * 200_000
    take_all(slots)
    parcel = private(pair, b"y" * 200_000)
    pair.link.send_parcel(1, 2, parcel, ticket)
    assert len(stored) == 1
    assert (slots.is_placed(parcel), slots.size(parcel)) == (False, 200_000)
    slots.discard(stored[0])
    assert bytes(slots.read(stored[1])) == b"y" * 200_000
    pair.link.send_parcel(1, 3, stored[1], ticket)
    assert stored[2] == stored[1]
    assert slots.is_placed(stored[1])
    await pair.down.receive(3)


async def test_a_payload_that_is_no_longer_wanted_takes_no_slot(pair: Pair) -> None:
    slots = pair.arena
    taken = take_all(slots)
    ticket = Ticket()
    pair.link.send_parcel(1, 1, private(pair, b"x" * 200_000), ticket)
    ticket.wanted = False
    slots.give(taken[0], 0)
    assert not ticket.payloads
    assert slots.in_use == SLOTS - 1


async def test_s6_a_payload_whose_call_is_cancelled_while_it_is_stored_is_not_sent(pair: Pair) -> None:
    """By a __del__ that a garbage collection runs there."""
    slots = pair.arena
    ticket = Ticket()
    ticket.wanted = False
    pair.link.send_parcel(1, 1, private(pair, b"x" * 200_000), ticket)
    assert slots.in_use == 0
    pair.up.channel.send_payload(1, 2, b"next")
    assert await pair.down.receive(1) == [(1, 2, b"next")]


async def test_s6_a_placed_payload_whose_call_is_cancelled_is_discarded_by_its_owner_alone(pair: Pair) -> None:
    """Its owner knows the number, and has released the slot by then: another payload may lie there."""
    slots = pair.arena
    parcel = slots.keep(b"x" * 200_000)
    ticket = Ticket()
    ticket.wanted = False
    pair.link.send_parcel(1, 1, parcel, ticket)
    assert slots.in_use == 1
    slots.discard(parcel)
    pair.up.channel.send_payload(1, 2, b"next")
    assert await pair.down.receive(1) == [(1, 2, b"next")]


async def test_pickles_of_another_store_are_kept_as_long_as_there_is_room(pair: Pair) -> None:
    """Half of the slots are for them, so that they are sure of a slot whatever workers lease."""
    slots = pair.arena
    assert slots.room == max(1, slots.count // 2)
    parcels = [slots.keep(b"x" * 200_000) for _ in range(slots.count)]
    assert all(map(slots.is_placed, parcels))
    with pytest.raises(RuntimeError, match="no room"):
        slots.keep(b"x")
    for parcel in parcels:
        slots.discard(parcel)
    assert slots.in_use == 0


@pytest.mark.parametrize("waits", [True, False])
async def test_a_call_whose_private_pickle_got_a_slot_owns_it(pair: Pair, waits: bool) -> None:
    # Else nobody gives that slot back: the call is all that is known when the worker has read it.
    slots = pair.arena
    taken = take_all(slots) if waits else []
    member = PoolWorker(0, 1, Dispatch(2, 1), Turn(asyncio.get_running_loop()))
    member.attach(cast("Any", SimpleNamespace(channel=pair.up.channel)), cast("Any", SimpleNamespace(held={})))
    call = Call(loop=asyncio.get_running_loop())
    call.function = Function(len, Kind.TASK)
    call.kind = Kind.TASK
    call.key = call.plan = None
    call.body = private(pair, b"x" * 200_000)
    member.send(call)
    for slot in taken:
        slots.give(slot, 0)
    await pair.down.receive(1)
    body = call.body
    assert type(body) is int
    assert slots.is_placed(body)
    assert slots.in_use == 1
    slots.discard(body)
    assert slots.in_use == 0


# Races, one step after the other


class HookedLock:
    """The channel's lock; runs a hook as soon as it is taken."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.hooks: list[Callable[[], None]] = []
        self.release, self.locked = self.lock.release, self.lock.locked

    def acquire(self, blocking: bool = True) -> bool:
        taken = self.lock.acquire(blocking)
        if taken and self.hooks:
            self.hooks.pop(0)()
        return taken


def hooked(side: Side) -> HookedLock:
    lock = HookedLock()
    side.channel._lock = lock  # type: ignore[assignment]
    return lock


def in_thread(work: Callable[[], None]) -> None:
    thread = threading.Thread(target=work)
    thread.start()
    thread.join()


async def test_a_thread_that_sends_while_the_loop_rings_alone_loses_nothing(pair: Pair) -> None:
    # 1. the loop takes the lock to tell positions; 2. a thread queues a message and fails to take the lock, so it leaves;
    # 3. the loop must look at the queue.
    lock = hooked(pair.down)
    lock.hooks.append(lambda: in_thread(lambda: pair.down.channel.send_from_thread(1, 7, None)))
    pair.down.channel._ring_alone()
    assert lock.hooks == []
    assert await pair.up.receive(1) == [(1, 7, None)]


async def test_a_thread_that_sends_while_the_loop_tells_what_it_read_loses_nothing(pair: Pair) -> None:
    lock = hooked(pair.down)
    lock.hooks.append(lambda: in_thread(lambda: pair.down.channel.send_from_thread(1, 7, None)))
    pair.up.channel.send(1, 1, None)
    assert await pair.up.receive(1) == [(1, 7, None)]
    assert lock.hooks == []


async def test_a_thread_that_sends_while_the_loop_sends_loses_nothing(pair: Pair) -> None:
    lock = hooked(pair.down)
    lock.hooks.append(lambda: in_thread(lambda: pair.down.channel.send_from_thread(1, 7, None)))
    pair.down.channel.send(1, 8, None)
    assert lock.hooks == []
    assert sorted(await pair.up.receive(2)) == [(1, 7, None), (1, 8, None)]


async def test_a_thread_that_sends_just_before_the_lock_is_let_go_loses_nothing(pair: Pair) -> None:
    # 1. whoever publishes has emptied the queue and rung; 2. a thread queues and finds the lock taken; 3. the lock is let go.
    lock = hooked(pair.down)
    release = lock.release
    late = [lambda: in_thread(lambda: pair.down.channel.send_from_thread(1, 7, None))]

    def let_go() -> None:
        if late:
            late.pop()()
        release()

    lock.release = let_go
    pair.down.channel.send_from_thread(1, 8, None)
    assert await pair.up.receive(2) == [(1, 8, None), (1, 7, None)]


async def test_the_loop_that_finds_the_lock_taken_leaves_its_ring_to_whoever_has_it(pair: Pair) -> None:
    # 1. a thread publishes; 2. the loop wants to tell what it has read, and cannot; 3. the thread lets go of the lock, and rings.
    channel = pair.down.channel
    bell, rings = channel._bell, 0

    class Interrupted:
        read = bell.read

        def ring(self, published: int, consumed: int) -> bool:
            nonlocal rings
            rings += 1
            if rings == 1:
                pair.up.channel.send(1, 1, None)
                channel.receive()
                channel._ring_alone()
                assert rings == 1
            return bell.ring(published, consumed)

    channel._bell = cast("Bell", Interrupted())
    channel.send_from_thread(1, 2, None)
    channel._bell = bell
    assert rings == 2
    await until(lambda: not pair.up.is_behind())


class HookedWriter(RingWriter):
    """A ring that, asked for its room, answers and then lets something happen before anyone has acted on the answer."""

    def __init__(self, view: memoryview) -> None:
        super().__init__(view)
        self.hooks: list[Callable[[], None]] = []

    def free(self) -> int:
        free = super().free()
        if self.hooks:
            self.hooks.pop(0)()
        return free


async def test_a_thread_that_finds_the_ring_full_while_the_loop_learns_of_space(closed_pair: Pair) -> None:
    # 1. a flusher finds the ring full; 2. the loop hears that the peer has read; 3. the loop's try to flush fails, because the
    # flusher still holds the lock; 4. the flusher lets go, and nobody will ever ring again: it must look itself.
    pair = closed_pair
    up, down = pair.up, pair.down
    writer = HookedWriter(pair.cell.view[:RING_SIZE])
    up.channel.tx = writer
    up.open()
    down.channel.open(down._take, down.broken.append)
    asyncio.get_running_loop().remove_reader(down.bell.fileno())  # it reads when told
    for number in range(5):
        up.channel.send_from_thread(1, number, b"x" * INLINE_LIMIT)
    room = writer.free()
    assert room < 50_000

    def peer_reads() -> None:
        down.channel.receive()
        down.channel._ring_alone()
        up.channel._on_bell()
        assert writer.acknowledged == writer.written

    writer.hooks.append(peer_reads)
    up.channel.send_from_thread(1, 5, b"y" * 50_000)
    assert writer.hooks == []
    assert up.channel.full_count == 1
    assert not up.channel._queue
    assert up.channel._frame is None
    down.channel.receive()
    assert [call_id for _, call_id, _ in down.got] == list(range(6))


async def test_a_full_ring_is_filled_again_when_the_peer_has_read(closed_pair: Pair) -> None:
    pair = closed_pair
    pair.up.open()
    for number in range(20):
        pair.up.channel.send_from_thread(1, number, b"x" * INLINE_LIMIT)
    assert pair.up.channel._frame is not None
    pair.down.open()
    assert [call_id for _, call_id, _ in await pair.down.receive(20)] == list(range(20))


async def test_a_slot_that_comes_back_before_a_thread_waits_is_not_missed(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    # 1. a thread finds no slot for its result; 2. the loop hears that the last one was read, and finds nobody waiting;
    # 3. the thread waits.
    slots = pair.down.channel.outgoing
    taken = take_all(slots)
    store = slots.store

    def store_late(data: bytes) -> int | None:
        stored = store(data)
        while taken:
            slots.give(taken.pop(), 0)
        return stored

    monkeypatch.setattr(slots, "store", store_late)
    channel = pair.down.channel
    in_thread(lambda: channel.send_payload(1, 7, b"x" * 200_000, channel.send_from_thread))
    got = await pair.up.receive(1)
    assert pair.up.bytes_of(got[0][2]) == b"x" * 200_000


@pytest.mark.both_loops
async def test_threads_send_all_at_once_and_each_in_its_order(pair: Pair) -> None:
    count, each = 8, 5000
    start = threading.Barrier(count)

    def work(number: int) -> None:
        start.wait()
        for sequence in range(each):
            pair.down.channel.send_from_thread(number, sequence, b"x" * (sequence % 300))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    got = await pair.up.receive(count * each)
    for thread in threads:
        thread.join()
    for number in range(count):
        assert [sequence for op, sequence, _ in got if op == number] == list(range(each))
    assert all(body == b"x" * (sequence % 300) for _, sequence, body in got)
    assert pair.up.broken == pair.down.broken == []


async def test_threads_and_the_loop_send_both_ways_at_once(pair: Pair) -> None:
    count, each = 4, 1500
    pair.down.on_message = lambda op, call_id, _body: pair.down.channel.send(op, call_id, None)

    def work(number: int) -> None:
        for sequence in range(each):
            pair.down.channel.send_from_thread(number, sequence, (number, sequence))

    threads = [threading.Thread(target=work, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for sequence in range(each):
        pair.up.channel.send(99, sequence, None)
        if sequence % 10 == 0:
            await asyncio.sleep(0)
    got = await pair.up.receive((count + 1) * each)
    for thread in threads:
        thread.join()
    for number in (*range(count), 99):
        assert [sequence for op, sequence, _ in got if op == number] == list(range(each))
