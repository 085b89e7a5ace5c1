"""Generators in a worker: which items travel together, and what a stream does while it waits for credits or for room."""

import asyncio
import itertools
import marshal
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from queue import SimpleQueue
from types import SimpleNamespace
from typing import Any, cast

import pytest

from percore._protocol.messages import ITEM, ITEMS, VALUE, Body
from percore._transport.codec import is_inline_value, pack_values
from percore._transport.slots import INLINE_LIMIT
from percore._worker import streams
from percore._worker.answers import SMALL, Answers, ItemFailed
from percore._worker.batches import BatchResults, item_id
from percore._worker.streams import TaskStream, ThreadStream
from tests.waiting import until

WIDE = "\U0001f600" * 4096


class Pickler:
    lacks_room = False

    def payload(self, obj: Any) -> bytes:
        if obj is print:
            raise TypeError("not this one")
        return bytes(b"p" * obj[0])


class Post:
    """A channel of which only the messages count. While it is full it takes no payload."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.passes = is_inline_value
        self.messages: list[Any] = []
        self.is_full = False
        self.held: list[tuple[Body, Callable[[], None]]] = []
        self.arrived = threading.Semaphore(0)

    def pickler(self) -> Pickler:
        return Pickler()

    def pack_values(self, first: int, seconds: float, values: list[Any], pickled: list[int]) -> bytes:
        return pack_values(first, seconds, values, pickled)

    def send_from_thread(self, op: int, _call_id: int, body: Any) -> None:
        if op == ITEMS:
            assert len(body) <= INLINE_LIMIT
            _, _, values, pickled = marshal.loads(body)
            self.messages.append((values, pickled))
        else:
            assert op == ITEM
            self.messages.append(body)
        self.arrived.release()

    def send_payload(self, op: int, call_id: int, body: Body, send: Callable[..., None], sent: Callable[[], None]) -> None:
        if self.is_full:
            self.held.append((body, sent))
            self.arrived.release()
        else:
            send(op, call_id, body)
            sent()

    def empty(self) -> None:
        """Take what was held."""
        self.is_full = False
        for body, sent in self.held:
            self.messages.append(body)
            sent()
        self.held.clear()


def task_stream(prefetch: int) -> tuple[Post, TaskStream]:
    post: Any = Post(asyncio.get_running_loop())
    return post, TaskStream(post, Answers(post), 1, prefetch)


def sizes(messages: list[Any]) -> list[int]:
    return [len(message[0]) if type(message) is tuple else -1 for message in messages]


async def numbers(count: int) -> AsyncIterator[int]:
    for number in range(count):
        yield number


async def given(*items: Any) -> AsyncIterator[Any]:
    for item in items:
        yield item


@pytest.mark.parametrize(("item_takes", "expected"), [(0.0, [8]), (1.0, [4, 4])], ids=["fast", "slow"])
async def test_items_travel_together_and_those_of_a_slow_generator_in_halves(
    monkeypatch: pytest.MonkeyPatch, item_takes: float, expected: list[int]
) -> None:
    clock = itertools.count(0.0, item_takes)
    monkeypatch.setattr(streams, "time", SimpleNamespace(perf_counter=lambda: next(clock)))
    post, stream = task_stream(8)
    task = asyncio.create_task(stream.run(numbers, (100,), None))
    await asyncio.sleep(0)
    assert sizes(post.messages) == expected
    stream.credit(3)
    for _ in range(3):
        await asyncio.sleep(0)
    assert sizes(post.messages) == [*expected, 3]
    assert [value for values, _ in post.messages for value in values] == list(range(11))
    stream.close(task)
    await task
    assert sizes(post.messages) == [*expected, 3]


async def test_large_items_travel_alone_in_their_place() -> None:
    post, stream = task_stream(100)
    await stream.run(given, (1, [10], [SMALL + 1], 2, [3], [SMALL], [SMALL], [SMALL], 5, WIDE, WIDE, WIDE), None)
    assert [message if type(message) is bytes else message[1] for message in post.messages] == [
        [1],
        b"p" * (SMALL + 1),
        [1, 2, 3],
        [0],
        [],
    ]
    assert [len(message) if type(message) is bytes else len(message[0]) for message in post.messages] == [2, SMALL + 1, 4, 4, 1]


async def test_the_heaviest_items_fit_into_a_message() -> None:
    _, stream = task_stream(1_000_000)
    for item in (WIDE, "x" * 4096, b"x" * 4096, 2**255, 1 - 2**256, 2**63, 0.5, [SMALL], [100]):
        await stream.run(given, (item,) * 600, None)  # `send_from_thread` looks at the size


async def test_a_stream_waits_until_its_large_item_is_taken() -> None:
    post, stream = task_stream(100)
    post.is_full = True
    task = asyncio.create_task(stream.run(given, (1, [SMALL + 1], 2), None))
    for _ in range(3):
        await asyncio.sleep(0)
    assert sizes(post.messages) == [1]
    stream.credit(5)  # this wakes it, and it waits on
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert not task.done()
    await asyncio.to_thread(post.empty)
    await task
    assert sizes(post.messages) == [1, -1, 1]


async def test_a_stream_that_is_cancelled_while_its_large_item_waits_ends_after_the_item() -> None:
    """As by code in the worker that cancels all tasks."""
    post, stream = task_stream(100)
    post.is_full = True
    task = asyncio.create_task(stream.run(given, ([SMALL + 1], 2), None))
    await asyncio.sleep(0)
    task.cancel()
    for _ in range(3):
        await asyncio.sleep(0)
    assert not task.done()
    post.empty()
    await asyncio.wait([task])
    assert task.cancelled()
    assert sizes(post.messages) == [-1]


async def test_a_stream_that_never_awaits_gives_way() -> None:
    post, stream = task_stream(1_000_000)
    task = asyncio.create_task(stream.run(numbers, (1_000_000,), None))
    await asyncio.sleep(0)
    for _ in range(3):
        before = len(post.messages)
        while len(post.messages) == before:  # noqa: ASYNC110  # there is no event for it
            await asyncio.sleep(0)
        assert len(post.messages) < 3900
    stream.close(task)
    await task


async def test_an_item_that_cannot_be_pickled_ends_the_stream_after_the_items_before_it() -> None:
    post, stream = task_stream(100)
    closed = []

    async def generator() -> AsyncIterator[Any]:
        try:
            yield 1
            yield print
        finally:
            closed.append(True)

    with pytest.raises(ItemFailed) as caught:
        await stream.run(generator, (), None)
    assert "not this one" in str(caught.value.error)
    assert (sizes(post.messages), closed) == ([1], [True])


# On a thread


class OnThread:
    """A stream on a thread, and the pool of that thread."""

    patience = 0.0
    is_full = False

    def __init__(self, prefetch: int, fn: Callable[..., Iterator[Any]], *args: Any) -> None:
        self.post = Post(asyncio.get_running_loop())
        channel = cast("Any", self.post)
        self.ways = 0
        self.steps: list[str] = []
        self.stream = ThreadStream(channel, Answers(channel), 1, prefetch, cast("Any", self), self.patience)
        self.task = asyncio.create_task(asyncio.to_thread(self.stream.run, fn, args, None))

    def give_way(self) -> None:
        self.ways += 1

    def step_aside(self, _call_id: int) -> bool:
        if self.is_full:
            raise RuntimeError("can't start new thread")
        self.steps.append("aside")
        return True

    def come_back(self, _call_id: int) -> bool:
        self.steps.append("back")
        return True

    def trim(self) -> None:
        self.steps.append("trimmed")

    async def message(self) -> None:
        await asyncio.to_thread(self.post.arrived.acquire)


def count(number: int) -> Iterator[int]:
    yield from range(number)


def choose(*items: Any) -> Iterator[Any]:
    yield from items


def out_of_memory(*_: object) -> None:
    raise MemoryError


def thread_stream(prefetch: int) -> tuple[Post, ThreadStream]:
    """A stream on the thread of the test."""
    post: Any = Post(asyncio.get_running_loop())
    pool: Any = SimpleNamespace(give_way=lambda: None)
    return post, ThreadStream(post, Answers(post), 1, prefetch, pool, 0.0)


async def test_a_thread_waits_for_credits() -> None:
    it = OnThread(4, count, 1000)
    total = 0
    for credit in (0, 1, 4, 100):
        it.stream.credit(credit)
        total += credit
        while sum(sizes(it.post.messages)) < 4 + total:
            await it.message()
        assert sum(sizes(it.post.messages)) == 4 + total
    it.stream.close()
    await it.task
    assert it.ways
    assert [value for values, _ in it.post.messages for value in values] == list(range(4 + total))


async def test_a_thread_that_waits_for_credits_lets_another_one_run(monkeypatch: pytest.MonkeyPatch) -> None:
    for patience in (0.0, 0.001):
        monkeypatch.setattr(OnThread, "patience", patience)
        it = OnThread(1, count, 3)
        for credit in range(1, 3):
            while it.steps.count("aside") < credit:  # noqa: ASYNC110  # there is no event for it
                await asyncio.sleep(0)
            it.stream.credit(1)
        it.stream.credit(1)
        await it.task
        await asyncio.sleep(0)
        assert it.steps[:4] == ["aside", "back", "aside", "back"]
        assert it.steps[-1] == "trimmed"


async def test_a_thread_keeps_its_place_while_credits_come_soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OnThread, "patience", 60.0)
    it = OnThread(1, count, 50)
    it.stream.credit(50)
    await it.task
    assert it.steps == []


async def test_without_another_thread_it_waits_unless_its_consumer_may_need_the_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OnThread, "is_full", True)
    it = OnThread(1, count, 3)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        await it.task
    monkeypatch.setattr(OnThread, "patience", 0.001)
    it = OnThread(1, count, 3)
    await it.message()
    it.stream.credit(3)
    await it.task
    assert sum(sizes(it.post.messages)) == 3


async def test_a_thread_waits_until_its_large_item_is_taken() -> None:
    it = OnThread(100, choose, 1)
    await it.task
    it = OnThread(100, choose, 1, [SMALL + 1], 2)
    it.post.is_full = True
    while not it.post.held and not it.task.done():
        await it.message()
    if it.post.held:  # else the thread was faster than this test
        it.stream.credit(1)
        assert not it.task.done()
        it.post.empty()
    await it.task
    assert sizes(it.post.messages) == [1, -1, 1]


async def test_a_large_item_that_is_taken_just_before_its_thread_waits_for_it_lets_the_thread_go_on() -> None:
    post, stream = thread_stream(2)
    post.is_full = True

    class Grants(SimpleQueue[int]):
        def get(self, block: bool = True, timeout: float | None = None) -> int:
            post.empty()  # in this thread, as by a finalizer that gives a slot back
            return super().get(block=False)

    stream._grants = Grants()
    stream.run(choose, ([SMALL + 1],), None)
    assert sizes(post.messages) == [-1]


async def test_items_and_results_that_cannot_be_packed_now_are_sent_later(monkeypatch: pytest.MonkeyPatch) -> None:
    post, stream = thread_stream(9)
    packed: Any = post.pack_values
    lacks = iter([True, False, True])

    def pack(*args: Any) -> Any:
        if next(lacks, False):
            raise MemoryError
        return packed(*args)

    monkeypatch.setattr(post, "pack_values", pack)
    stream._add(1)
    stream._add([2])
    sent: list[Any] = []
    answers: Any = SimpleNamespace(pack_values=pack)
    function: Any = None
    results = BatchResults(1, function, answers, lambda *told: sent.append(marshal.loads(cast("bytes", told[2]))), lambda *_: None)
    results.values += [3, 4]
    for flush in (stream.flush, results.flush):
        with pytest.raises(MemoryError):
            flush()
        flush()
    assert post.messages == [([1, b"pp"], [1])]
    assert [values for _, _, values, _ in sent] == [[3, 4]]


@pytest.mark.parametrize("kind", ["task", "thread"])
async def test_the_loop_tries_again_to_send_items_that_it_could_not_pack(monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    post, stream = task_stream(9) if kind == "task" else thread_stream(9)
    flush = stream._flush_soon if isinstance(stream, TaskStream) else stream._flush_kept
    stream._add(1)
    with monkeypatch.context() as patch:
        patch.setattr(post, "pack_values", out_of_memory)
        with pytest.raises(MemoryError):
            flush()
    await until(lambda: post.messages)
    assert post.messages == [([1], [])]


async def test_items_that_cannot_be_packed_at_the_end_do_not_follow_the_outcome(monkeypatch: pytest.MonkeyPatch) -> None:
    (of_task, task), (of_thread, thread) = task_stream(9), thread_stream(9)
    thread._since = time.perf_counter()
    for post in (of_task, of_thread):
        monkeypatch.setattr(post, "pack_values", out_of_memory)
    with pytest.raises(MemoryError):
        await task.run(given, (1, [2]), None)
    with pytest.raises(MemoryError):
        thread.run(choose, (1, [2]), None)
    monkeypatch.undo()
    task.flush()
    thread.flush()
    assert of_task.messages == of_thread.messages == []


async def test_of_results_that_are_sent_one_by_one_none_is_lost_and_none_is_sent_twice() -> None:
    sent: list[int] = []
    lacks = iter([False, True])

    def send(_op: int, call_id: int, _body: Any) -> None:
        if next(lacks, False):
            raise MemoryError
        sent.append(call_id)

    function: Any = None
    answers: Any = SimpleNamespace(pack_values=lambda *_: None, result=lambda call_id, value, send: send(VALUE, call_id, value))
    results = BatchResults(1, function, answers, send, lambda *_: None)
    results.values += [3, b"pickled", 5]
    results._pickled.append(1)
    with pytest.raises(MemoryError):
        results.flush()
    results.values.append(b"added meanwhile")
    results._pickled.append(3)
    results.flush()
    assert sent == [item_id(1, index) for index in range(4)]
    assert not results._pickled


async def test_the_loop_sends_items_that_wait_behind_a_slow_one() -> None:
    gate = threading.Event()

    def slow() -> Iterator[int]:
        yield 0
        yield 1
        gate.wait()
        yield 2

    it = OnThread(100, slow)
    it.stream._since = time.perf_counter() + 1000  # as if items had just been sent
    while sum(sizes(it.post.messages)) < 2:
        await it.message()
    assert not it.task.done()
    gate.set()
    await it.task
    assert sum(sizes(it.post.messages)) == 3


async def test_an_abandoned_stream_waits_for_nothing() -> None:
    it = OnThread(1, count, 1000)
    await it.message()
    it.stream.abandon()
    await it.task
    it = OnThread(100, choose, *[[SMALL + 1]] * 10)
    it.post.is_full = True
    await it.message()
    it.stream.abandon()
    await it.task
