"""The channel between two threads: an inbox for each side, which is rung once for all that it holds."""

import asyncio
import sys
import threading
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

from percore._engines.threads import channel as module
from percore._engines.threads.channel import ThreadChannel, WorkerSide
from percore._engines.threads.references import Reference, References
from percore._protocol.messages import VALUE, BrokenFrame, Message
from percore._serialization.pickler import load
from tests.counts import times


class Loop:
    """A loop whose turns a test takes."""

    def __init__(self) -> None:
        self.due: list[Callable[[], Any]] = []

    def call_soon(self, callback: Callable[[], Any], *, context: Any = None) -> None:
        self.due.append(callback)

    call_soon_threadsafe = call_soon

    def turn(self) -> None:
        due, self.due = self.due, []
        for callback in due:
            callback()


class Pair:
    """Both sides, open, on loops of the test."""

    def __init__(self) -> None:
        loops: Any = Loop(), Loop()
        self.loop, self.worker_loop = loops
        self.channel = ThreadChannel(self.loop, References(self.loop))
        self.side: WorkerSide = self.channel.peer
        self.side.loop = self.worker_loop
        self.got: list[int] = []
        self.batches = 0
        self.broken: list[BaseException] = []
        self.on_worker_frame: Callable[[Iterable[Message]], None] = self._take
        self.channel.open(self._take, self.broken.append, self._batch)
        self.side.open(lambda messages: self.on_worker_frame(messages), self.broken.append)

    def _take(self, messages: Iterable[Message]) -> None:
        self.got.extend(call_id for _, call_id, _ in messages)

    def _batch(self) -> None:
        self.batches += 1


@pytest.fixture
def pair(monkeypatch: pytest.MonkeyPatch) -> Pair:
    monkeypatch.setattr(module, "has_gil", lambda: True)
    return opened()


def opened() -> Pair:
    made = Pair()
    made.loop.turn()
    made.worker_loop.turn()
    made.batches = 0
    return made


def test_one_ring_serves_all_that_comes_before_it_is_read(pair: Pair) -> None:
    for number in range(3):
        pair.channel.send(1, number, None)
    assert len(pair.worker_loop.due) == 1
    assert not pair.channel.has_read()
    assert pair.channel.waits_since > 0
    assert pair.channel.sent == 3
    pair.worker_loop.turn()
    assert pair.got == [0, 1, 2]
    assert pair.channel.has_read()
    assert pair.channel.waits_since == 0
    assert (pair.channel.sent, pair.channel.received) == (3, 0)
    pair.loop.turn()  # the worker has said that it has read
    assert pair.batches == 1
    pair.channel.send(1, 3, None)
    assert len(pair.worker_loop.due) == 1


def test_without_a_gil_an_iteration_rings_at_its_first_message_and_at_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "has_gil", lambda: False)
    pair = opened()
    pair.channel.send(1, 0, None)
    pair.worker_loop.turn()  # at once, in the other thread
    for number in range(1, 4):
        pair.channel.send(1, number, None)
    assert (pair.got, pair.worker_loop.due) == ([0], [])
    pair.loop.turn()
    assert len(pair.worker_loop.due) == 1
    pair.worker_loop.turn()
    assert pair.got == [0, 1, 2, 3]
    pair.channel.send(1, 4, None)
    assert len(pair.worker_loop.due) == 1
    pair.loop.turn()  # it is rung already
    assert len(pair.worker_loop.due) == 1
    pair.worker_loop.turn()
    assert pair.got == [0, 1, 2, 3, 4]


def test_what_comes_while_messages_are_read_rings_and_is_read_after_the_loop_has_turned_to_others(pair: Pair) -> None:
    """Else calls that compute, each of which is followed by another one, would keep the loop for long."""

    def take(messages: Iterable[Message]) -> None:
        for _, call_id, _ in messages:
            pair.got.append(call_id)
            if call_id == 0:
                pair.channel.send(1, 1, None)
                assert not pair.channel.has_read()

    pair.on_worker_frame = take
    pair.channel.send(1, 0, None)
    pair.worker_loop.turn()
    assert pair.got == [0]
    assert len(pair.worker_loop.due) == 1  # it was not rung any more when the message came
    pair.worker_loop.turn()
    assert pair.got == [0, 1]
    assert not pair.worker_loop.due


def test_many_messages_are_read_in_parts(pair: Pair) -> None:
    count = 2 * module._MOST + 1
    for number in range(count):
        pair.side.keep(VALUE, number, None)
    assert not pair.loop.due
    pair.side.flush()
    lengths = []
    while pair.loop.due:
        pair.loop.turn()
        lengths.append(len(pair.got))
    assert lengths == [module._MOST, 2 * module._MOST, count]
    assert pair.got == [*range(count)]


def test_last_words_are_read_at_once_and_a_side_that_has_stopped_says_and_hears_nothing(pair: Pair) -> None:
    for number in range(2 * module._MOST):
        pair.side.send(VALUE, number, None)
    pair.side.stop()
    pair.side.send(VALUE, -1, None)
    pair.side.keep(VALUE, -1, None)
    pair.channel.send(1, -2, None)
    pair.worker_loop.turn()
    pair.channel.receive()
    assert pair.got == [*range(2 * module._MOST)]
    assert len(pair.side.inbox) == 1  # it can be taken back
    pair.side.open(pair._take, pair.broken.append)
    pair.worker_loop.turn()
    pair.channel.close()
    pair.channel.send(1, -3, None)
    assert len(pair.side.inbox) == 1
    assert -2 not in pair.got


def test_what_reading_raises_breaks_the_channel(pair: Pair) -> None:
    def refuse(messages: Iterable[Message]) -> None:
        next(iter(messages))
        raise BrokenFrame("no such message")

    pair.on_worker_frame = refuse
    pair.channel.send(1, 0, None)
    pair.channel.send(1, 1, None)
    pair.worker_loop.turn()
    assert [type(error) for error in pair.broken] == [BrokenFrame]
    assert not pair.side.is_open
    assert len(pair.side.inbox) == 1

    def interrupt(_: Iterable[Message]) -> None:
        raise KeyboardInterrupt

    pair.channel.on_frame = interrupt
    pair.side.is_open = True
    pair.side.send(VALUE, 0, None)
    with pytest.raises(KeyboardInterrupt):
        pair.loop.turn()
    assert type(pair.broken[-1]) is KeyboardInterrupt


@pytest.mark.parametrize("gil", [True, False])
def test_an_interrupted_ring_leaves_the_messages_to_the_next_one(monkeypatch: pytest.MonkeyPatch, gil: bool) -> None:
    monkeypatch.setattr(module, "has_gil", lambda: gil)
    pair = opened()
    taken: list[int] = []
    pair.on_worker_frame = lambda messages: taken.extend(call_id for _, call_id, _ in messages)

    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(pair.worker_loop, "call_soon_threadsafe", interrupt)
        with pytest.raises(KeyboardInterrupt):
            pair.channel.send(1, 1, None)
    pair.channel.send(1, 2, None)
    pair.worker_loop.turn()
    assert taken == [1, 2]


def test_a_reference_unpickles_to_its_object_while_it_exists() -> None:
    thing = object()
    reference = Reference(thing)
    assert load(reference) is thing
    assert bytes(reference) is reference
    copy = bytes(bytearray(reference))
    assert load(copy) is thing
    del reference
    with pytest.raises(KeyError):
        load(copy)
    store = References(asyncio.new_event_loop())
    store._loop.close()
    with pytest.raises(BrokenFrame):
        store.received(5)
    with pytest.raises(BrokenFrame):
        store.unpack_values(b"")


@contextmanager
def frequent_switches() -> Iterator[None]:
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        yield
    finally:
        sys.setswitchinterval(before)


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_four_threads_lose_no_message() -> None:  # noqa: C901  # counts the inner functions
    """Each sends its numbers in order, and is told of each that has arrived: so both inboxes run empty again and again."""
    count = times(2_000, 2_500_000)
    loop = asyncio.get_running_loop()
    done = loop.create_future()
    channel = ThreadChannel(loop, References(loop))
    side = channel.peer
    heard = [0] * 4
    told = [0] * 4
    ready = threading.Event()

    def arrived(messages: Iterable[Message]) -> None:
        for _, thread, number in messages:
            assert number == heard[thread]
            heard[thread] += 1
            channel.send(1, thread, number)

    def acknowledged(messages: Iterable[Message]) -> None:
        for _, thread, number in messages:
            assert number == told[thread]
            told[thread] += 1
            if sum(told) == 4 * count:
                loop.call_soon_threadsafe(done.set_result, None)

    def broken(error: BaseException) -> None:
        loop.call_soon_threadsafe(done.set_exception, error)

    def serve() -> None:
        inner = asyncio.new_event_loop()
        side.loop = inner
        inner.call_soon(side.open, acknowledged, broken)
        inner.call_soon(ready.set)
        loops.append(inner)
        inner.run_forever()
        inner.close()

    def speak(thread: int) -> None:
        for number in range(count):
            side.send(VALUE, thread, number)

    loops: list[asyncio.AbstractEventLoop] = []
    threads = [threading.Thread(target=serve), *(threading.Thread(target=partial(speak, thread)) for thread in range(4))]
    with frequent_switches():
        channel.open(arrived, broken, lambda: None)
        threads[0].start()
        await asyncio.to_thread(ready.wait)
        for thread in threads[1:]:
            thread.start()
        await done
    loops[0].call_soon_threadsafe(loops[0].stop)
    for thread in threads:
        await asyncio.to_thread(thread.join)
    assert heard == told == [count] * 4
    assert channel.has_read()
