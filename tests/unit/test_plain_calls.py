"""Plain functions in a worker: which results wait for others, and that each of them goes."""

import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from percore._protocol.messages import MARK_WORDS, VALUE, Body, Kind
from percore._transport.codec import is_inline_value
from percore._worker import plain_calls as module
from percore._worker.answers import Answers, WorkerFunction
from percore._worker.plain_calls import PlainCalls
from percore._worker.terms import Terms, Variables

PLACES = 64
SLOW, QUICK = 30_000_000, 1_000_000


class Timer:
    """What can be cancelled."""

    def __init__(self, post: "Post", call: Callable[[], None]) -> None:
        self._post = post
        self._call = call

    def cancel(self) -> None:
        if self._call in self._post.timers:
            self._post.timers.remove(self._call)


class Post:
    """A channel and its loop, as far as results need them: what is queued, what is on its way, which timers wait."""

    def __init__(self) -> None:
        self.loop = self
        self.pickler = self.pack_values = SimpleNamespace
        self.passes = is_inline_value
        self.queued: list[int] = []
        self.gone: list[int] = []
        self.timers: list[Callable[[], None]] = []
        self.after_flush: Callable[[], object] = lambda: None
        self.before_keep: Callable[[], object] = lambda: None

    def call_later(self, _delay: float, call: Callable[[], None]) -> "Timer":
        self.timers.append(call)
        return Timer(self, call)

    def keep(self, op: int, call_id: int, _body: Body) -> None:
        assert op == VALUE
        self.before_keep()
        self.queued.append(call_id)

    def flush(self) -> None:
        self.gone += self.queued
        self.queued.clear()
        self.after_flush()

    def send_from_thread(self, op: int, call_id: int, body: Body) -> None:
        self.keep(op, call_id, body)
        self.flush()


class Worker:
    """Plain functions on one thread, whose calls end one by one and take as long as they are told."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, is_free_threaded: bool = False) -> None:
        monkeypatch.setattr(module, "IS_FREE_THREADED", is_free_threaded)
        self.post = Post()
        self._now = 0
        self._begun, self._ends, self._ended = (threading.Semaphore(0) for _ in range(3))
        monkeypatch.setattr(module, "time", SimpleNamespace(monotonic_ns=lambda: self._now, perf_counter=lambda: self._now / 1e9))
        channel = cast("Any", self.post)
        marks = memoryview(bytearray(PLACES * MARK_WORDS * 8)).cast("Q")
        self.plain = PlainCalls(channel, Answers(channel), marks, 1, None, Variables(()), self._hand_over)
        run = self.plain.threads.turns._run

        def run_and_tell(call_id: int, item: object) -> None:
            run(call_id, item)
            self._ended.release()

        self.plain.threads.turns._run = run_and_tell
        self._function = WorkerFunction(Kind.THREAD, b"")
        self._function.fn = self._call

    def _call(self) -> None:
        self._begun.release()
        self._ends.acquire()

    def _hand_over(self, call_id: int, awaitable: object, deadline: float | None) -> None:
        raise AssertionError(call_id, awaitable, deadline)

    def put(self, count: int) -> None:
        for call_id in range(1, count + 1):
            self.put_one(call_id)

    def put_one(self, call_id: int) -> None:
        self.plain.put(call_id, (self._function, (), None))

    def hold_first(self) -> None:
        """Wait until the first call runs."""
        self._begun.acquire()
        self._begun.release()

    def end(self, nanoseconds: int) -> None:
        """The call that runs has taken so long."""
        self._begun.acquire()
        self._now += nanoseconds
        self._ends.release()
        self._ended.acquire()

    def tick(self) -> None:
        (timer,) = self.post.timers
        self.post.timers.clear()
        timer()

    def close(self) -> None:
        self._ends.release(PLACES)
        self.plain.stop()
        self.plain.threads.join()
        assert not self.post.timers


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Worker]:
    worker = Worker(monkeypatch)
    yield worker
    worker.close()


def test_results_of_slow_calls_travel_together_while_calls_enough_wait(worker: Worker) -> None:
    worker.put(8)
    worker.end(SLOW)
    worker.end(SLOW)
    assert (worker.post.queued, worker.post.gone) == ([1, 2], [])
    worker.tick()
    assert (worker.post.queued, worker.post.gone) == ([], [1, 2])


def test_while_the_loop_is_blocked_results_do_not_wait_for_its_timer(worker: Worker) -> None:
    worker.put(16)
    for _ in range(3):
        worker.end(SLOW)
    assert worker.post.gone == []
    worker.end(SLOW)
    assert worker.post.gone == [1, 2, 3, 4]
    worker.end(SLOW)
    assert worker.post.queued == [5]


def test_the_result_of_a_quick_call_waits_for_nobody(worker: Worker) -> None:
    worker.put(8)
    worker.end(QUICK)
    assert worker.post.gone == [1]


def test_where_few_calls_wait_results_do_not(worker: Worker) -> None:
    worker.put(2)
    worker.end(SLOW)
    assert worker.post.gone == [1]
    assert not worker.post.timers


def test_what_was_kept_goes_as_soon_as_few_calls_wait(worker: Worker) -> None:
    worker.put(5)
    worker.end(SLOW)
    assert worker.post.queued == [1]
    worker.end(SLOW)
    worker.end(SLOW)
    assert worker.post.gone == [1, 2, 3]


def test_a_result_that_is_kept_while_the_loop_sends_the_others_goes_too(worker: Worker) -> None:
    worker.put(5)
    worker.end(SLOW)

    def tick_in_between() -> None:
        worker.post.before_keep = lambda: None
        worker.plain.cancel(5, None)
        worker.tick()

    worker.post.before_keep = tick_in_between
    worker.end(SLOW)
    assert worker.post.gone == [1, 2]
    assert not worker.post.timers


def test_no_result_is_left_when_calls_begin_while_the_loop_sends(worker: Worker) -> None:
    worker.put(5)
    worker.end(SLOW)

    def keep_one_more() -> None:
        worker.post.after_flush = lambda: None
        worker.end(SLOW)
        for call_id in (4, 5):
            worker.plain.cancel(call_id, None)

    worker.post.after_flush = keep_one_more
    worker.tick()
    assert worker.post.gone == [1]
    assert worker.post.queued == [2]
    worker.tick()
    assert worker.post.gone == [1, 2]
    assert not worker.post.timers


def test_a_stream_that_makes_the_calls_enough_lets_the_loop_send_what_is_kept(worker: Worker) -> None:
    """Else the result would be kept until the next call ends, which may take hours."""
    worker.put(1)
    worker.hold_first()
    for call_id in (2, 3):
        worker.put_one(call_id)
    assert not worker.post.timers
    worker.plain.put_stream(4, None, b"", Terms(prefetch=1))
    worker.end(SLOW)
    assert worker.post.queued == [1]
    worker.tick()
    assert worker.post.gone == [1]
    worker.plain.cancel(4, None)


def test_the_loop_goes_on_sending_as_long_as_calls_enough_wait(worker: Worker) -> None:
    worker.put(6)
    worker.end(SLOW)
    worker.tick()
    worker.end(SLOW)
    worker.end(SLOW)
    worker.end(SLOW)
    worker.tick()
    assert worker.post.gone == [1, 2, 3, 4]
    assert not worker.post.timers


def test_the_loop_looks_again_for_results_of_batches_after_it_could_not_send_them() -> None:
    def fail() -> None:
        raise MemoryError

    timers: list[Any] = []
    batch = SimpleNamespace(end=2, results=SimpleNamespace(flush_kept=fail))
    loop = SimpleNamespace(call_later=lambda _delay, call: timers.append(call))
    calls: Any = SimpleNamespace(_batches={1: batch}, _loop=loop, _keeps_watch=True, _send_kept=None)
    with pytest.raises(MemoryError):
        PlainCalls._send_kept(calls)
    assert (timers, calls._keeps_watch) == ([None], True)


def test_without_a_gil_threads_end_that_have_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    worker = Worker(monkeypatch, is_free_threaded=True)
    threads, has_left = worker.plain.threads, threading.Semaphore(0)
    threads.when_idle(has_left.release)
    assert not worker.post.timers
    worker.put(1)
    worker.end(QUICK)
    has_left.acquire()
    (thread,) = threads._threads
    worker.tick()
    assert threads._threads == [thread]  # it has been at work since
    worker.tick()
    assert not threads._threads
    assert not worker.post.timers
    thread.join()
    worker.put(1)
    worker.end(QUICK)
    has_left.acquire()
    assert len(threads._threads) == len(worker.post.timers) == 1
    worker.close()
