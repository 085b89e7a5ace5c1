"""The threads of a worker: each call runs exactly once or is taken back."""

import queue
import threading
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar, copy_context
from types import SimpleNamespace
from typing import Any

import pytest

from percore._worker.server import Server
from percore._worker.threads import Threads
from tests.unit.pools import Gate, Recorder, pool


def test_calls_run_in_order_on_one_thread() -> None:
    run = Recorder()
    with pool(1, run) as threads:
        for call_id in range(100):
            threads.put(call_id, str(call_id))
        assert run.expect(100) == [(call_id, str(call_id)) for call_id in range(100)]
    assert threads.is_idle()


@pytest.mark.parametrize("threads", [1, 2])
def test_t3_as_many_calls_begin_as_there_are_tickets_although_the_loop_drains_at_once(threads: int) -> None:
    run, drained = Recorder(), queue.SimpleQueue[dict[int, Any]]()

    def drain() -> None:
        drained.put({call_id: item for call_id in range(4) if (item := made.take_back(call_id)) is not None})

    with pool(threads, run) as made:
        loop = SimpleNamespace(call_soon_threadsafe=lambda callback: callback())  # before the thread takes its next step
        limited: Any = SimpleNamespace(
            _tickets=deque([None] * 2), _tickets_lock=threading.Lock(), _threads=made, _loop=loop, drain=drain
        )
        made.take = lambda call_id: Server._take_with_ticket(limited, call_id)
        made.put(0, "0")
        run.expect(1)
        assert made.take(1) is None  # it was taken back, and costs no ticket
        for call_id in range(1, 4):
            made.waiting[call_id] = str(call_id)
        for call_id in range(1, 4):
            made._release([call_id])
        back = drained.get()
        assert len(back) == 2
        ((begun, item),) = run.expect(1)
        assert {begun: item, **back} == {1: "1", 2: "2", 3: "3"}
        assert made.take(begun) is None


def test_no_thread_before_the_first_call() -> None:
    with pool(4, Recorder()) as threads:
        assert threads._threads == []


def test_threads_are_started_as_they_are_needed_and_no_more() -> None:
    gate = Gate()
    with pool(3, gate) as threads:
        for call_id in range(1, 6):
            threads.put(call_id, "item")
            if call_id <= 3:
                gate.begun.get()
            assert len(threads._threads) == min(call_id, 3)
        gate.opened.set()


def test_a_free_thread_is_used_again() -> None:
    finished: queue.SimpleQueue[None] = queue.SimpleQueue()
    with pool(8, Recorder()) as threads:
        threads.when_idle(lambda: finished.put(None))
        for call_id in range(20):
            threads.put(call_id, "item")
            finished.get()
        assert len(threads._threads) == 1


def test_idle_threads_end_and_the_busy_ones_go_on() -> None:
    gate, finished = Gate(), queue.SimpleQueue[None]()
    with pool(3, gate) as threads:
        threads.when_idle(lambda: finished.put(None))
        for call_id in range(3):
            threads.put(call_id, "item")
            gate.begun.get()
        assert threads.end_idle()
        assert len(threads._threads) == 3
        gate.opened.set()
        finished.get()
        gate.opened.clear()
        threads.put(3, "busy")
        assert gate.begun.get() == 3
        first = list(threads._threads)
        assert threads.end_idle()
        assert len(threads._threads) == 1
        for _ in range(20):  # and who comes later waits behind nobody that is about to end
            threads.put(4, "item")
            assert gate.begun.get() == 4
            gate.opened.set()
            finished.get()
            assert not threads.end_idle()
            for thread in (*first, *threads._leaving):
                thread.join()
            gate.opened.clear()


def test_the_start_of_a_thread_is_told() -> None:
    started: list[int] = []
    with pool(2, Recorder()) as threads:
        threads.on_start = lambda: started.append(len(threads._threads))
        threads.put(1, "item")
        assert started == [1]


def test_all_threads_are_daemons_with_names() -> None:
    gate = Gate()
    with pool(2, gate) as threads:
        threads.put(1, "item")
        threads.put(2, "item")
        assert [thread.name for thread in threads._threads] == ["percore-0", "percore-1"]
        assert all(thread.daemon for thread in threads._threads)
        gate.opened.set()


def test_calls_run_in_a_copy_of_the_context() -> None:
    variable: ContextVar[str] = ContextVar("variable", default="unset")
    seen: queue.SimpleQueue[str] = queue.SimpleQueue()

    def run(_call_id: int, item: str) -> None:
        seen.put(variable.get())
        variable.set(item)

    token = variable.set("outside")
    with pool(1, run) as threads:
        threads.put(1, "inside")
        assert seen.get() == "outside"
    assert variable.get() == "outside"
    variable.reset(token)


def test_an_item_is_let_go_when_its_call_has_ended() -> None:
    class Item:
        def __del__(self) -> None:
            gone.set()

    gone = threading.Event()
    items: list[Item] = []
    # Without the GIL, a thread frees an object that a living thread made only when that thread next runs: this one will wait.
    maker = threading.Thread(target=lambda: items.append(Item()))
    maker.start()
    maker.join()
    with pool(1, lambda _call_id, _item: None) as threads:
        threads.put(1, items.pop())
        gone.wait()


# Taking back


def test_a_waiting_call_can_be_taken_back_once() -> None:
    gate = Gate()
    with pool(1, gate) as threads:
        threads.put(1, "runs")
        assert gate.begun.get() == 1
        threads.put(2, "waits")
        assert threads.take_back(2) == "waits"
        assert threads.take_back(2) is None
        assert threads.take_back(1) is None
        assert threads.take_back(99) is None
        threads.put(3, "runs too")
        gate.opened.set()
        assert gate.begun.get() == 3


def test_what_waits_can_be_looked_at_in_the_order_it_came() -> None:
    gate = Gate()
    with pool(1, gate) as threads:
        threads.put(0, "runs")
        gate.begun.get()
        for call_id in (3, 1, 2):
            threads.put(call_id, f"waits {call_id}")
        assert list(threads.waiting.items()) == [(3, "waits 3"), (1, "waits 1"), (2, "waits 2")]
        for call_id in (2, 3):
            threads.take_back(call_id)
        assert not threads.is_idle()
        gate.opened.set()
        assert gate.begun.get() == 1
    assert threads.is_idle()


@pytest.mark.parametrize("limit", [1, 4])
def test_each_call_runs_or_is_taken_back_exactly_once(limit: int) -> None:
    count = 4000
    run = Recorder()
    back: list[int] = []

    def take_back(call_ids: list[int]) -> None:
        back.extend(call_id for call_id in call_ids if threads.take_back(call_id) is not None)

    with pool(limit, run) as threads:
        for call_id in range(count):
            threads.put(call_id, "item")
            if call_id % 3 == 0:
                take_back([call_id - 1])
            if call_id % 50 == 0:
                take_back(list(threads.waiting)[-5:])
        while threads.waiting:
            take_back(list(threads.waiting)[:7])
        ran = [call_id for call_id, _ in run.expect(count - len(back))]
    assert run.ran.empty()
    assert sorted([*ran, *back]) == list(range(count))


class Lying(dict[int, Any]):
    """Waiting calls; a thread that takes one does so when told, and tells."""

    def __init__(self) -> None:
        super().__init__()
        self.reached, self.go_on = threading.Event(), threading.Event()

    def pop(self, *args: Any) -> Any:
        if threading.current_thread() is not threading.main_thread():
            self.reached.set()
            self.go_on.wait()
        return super().pop(*args)


def test_taken_back_while_a_thread_reaches_for_it(subtests: pytest.Subtests) -> None:
    for name in ("put", "run_beside"):
        run, lying = Recorder(), Lying()
        with subtests.test(given_by=name), pool(1, run) as threads:
            threads.waiting = lying
            getattr(threads, name)(1, "both want it")
            lying.reached.wait()
            assert threads.take_back(1) == "both want it"
            lying.go_on.set()
        assert run.ran.empty()
        assert threads.is_idle()


def test_a_thread_is_free_while_it_has_no_call_whether_it_was_started_or_not() -> None:
    gate = Gate()
    with pool(3, gate) as threads:
        assert threads.free() == 3
        for call_id in (1, 2, 3):
            threads.put(call_id, "runs")
            gate.begun.get()
            assert threads.free() == 3 - call_id
        threads.run_beside(4, "takes no thread of the pool")
        gate.begun.get()
        assert threads.free() == 0
        gate.opened.set()
    assert threads.free() == 3


# Beside


def test_a_call_beside_waits_for_nobody() -> None:
    gate = Gate()
    with pool(1, gate) as threads:
        threads.put(1, "runs")
        assert gate.begun.get() == 1
        threads.put(2, "waits")
        for call_id in range(10, 15):
            threads.run_beside(call_id, "beside")
        assert sorted(gate.begun.get() for _ in range(5)) == list(range(10, 15))
        assert list(threads.waiting) == [2]
        assert len(threads._threads) == 1
        gate.opened.set()
    assert threads.is_idle()
    assert threads._beside == {}


def test_a_thread_beside_is_a_daemon_with_a_name_and_ends_with_its_call() -> None:
    seen: queue.SimpleQueue[threading.Thread] = queue.SimpleQueue()
    with pool(1, lambda _call_id, _item: seen.put(threading.current_thread())) as threads:
        threads.run_beside(7, "beside")
        thread = seen.get()
        assert (thread.name, thread.daemon) == ("percore-beside-7", True)
        thread.join()
        assert threads._threads == []


def test_a_call_beside_runs_in_a_copy_of_the_context() -> None:
    variable: ContextVar[str] = ContextVar("variable", default="unset")
    context = copy_context()
    context.run(variable.set, "of the pool")
    seen: queue.SimpleQueue[str] = queue.SimpleQueue()

    def run(_call_id: int, item: str) -> None:
        seen.put(variable.get())
        variable.set(item)

    with pool(1, run, context) as threads:
        threads.run_beside(1, "inside")
        assert seen.get() == "of the pool"
    assert context[variable] == "of the pool"


def test_a_call_beside_counts_while_it_runs() -> None:
    idle: queue.SimpleQueue[bool] = queue.SimpleQueue()
    gate = Gate()
    with pool(1, gate) as threads:
        threads.when_idle(lambda: idle.put(threads.is_idle()))
        threads.run_beside(1, "beside")
        gate.begun.get()
        assert not threads.is_idle()
        gate.opened.set()
        assert idle.get() is True


# Threads that cannot be started


@pytest.fixture
def no_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)


@pytest.mark.usefixtures("no_threads")
def test_a_call_for_which_there_is_no_thread_is_nowhere() -> None:
    threads = Threads(1, Recorder(), copy_context())
    for put in (threads.put, threads.run_beside):
        with pytest.raises(RuntimeError, match="no thread can be started"):
            put(1, "item")
        assert threads.is_idle()
        assert threads._beside == {}


def test_where_one_thread_runs_the_lack_of_another_is_no_failure(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    gate = Gate()
    with pool(2, gate) as threads:
        threads.put(1, "runs")
        gate.begun.get()
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", refuse)
            threads.put(2, "runs later")
        gate.opened.set()
        assert gate.begun.get() == 2


# Idle


def test_idle_is_nothing_waiting_and_nothing_running() -> None:
    gate = Gate()
    with pool(1, gate) as threads:
        assert threads.is_idle()
        threads.put(1, "item")
        assert not threads.is_idle()
        gate.begun.get()
        assert not threads.is_idle()
        gate.opened.set()
    assert threads.is_idle()


def test_a_call_is_never_nowhere_between_waiting_and_running() -> None:
    lying = Lying()
    with pool(1, Recorder()) as threads:
        threads.waiting = lying
        threads.put(1, "item")
        lying.reached.wait()
        assert not threads.is_idle()
        lying.go_on.set()


def test_who_asked_during_the_last_call_is_told_when_it_has_left() -> None:
    # 1. the call has answered, and its thread still counts it as running; 2. the loop asks and hears that something runs;
    # 3. the thread leaves. Nobody else would ever look again.
    idle: queue.SimpleQueue[bool] = queue.SimpleQueue()
    asked: list[bool] = []

    def run(_call_id: int, _item: str) -> None:
        threads.when_idle(lambda: idle.put(threads.is_idle()))
        asked.append(threads.is_idle())

    with pool(1, run) as threads:
        threads.put(1, "item")
        assert idle.get() is True
    assert asked == [False]


def test_who_asked_while_a_thread_reached_for_a_call_taken_back_is_told() -> None:
    idle: queue.SimpleQueue[bool] = queue.SimpleQueue()
    lying = Lying()
    with pool(1, Recorder()) as threads:
        threads.waiting = lying
        threads.put(1, "item")
        lying.reached.wait()
        threads.when_idle(lambda: idle.put(True))
        assert threads.take_back(1) == "item"
        assert not threads.is_idle()
        lying.go_on.set()
        assert idle.get()


def test_nobody_is_told_while_something_runs() -> None:
    told: list[str] = []
    threads = Threads(2, lambda _call_id, _item: None, copy_context())
    threads.when_idle(lambda: told.append("idle"))
    threads._running[99] = None  # in another thread
    threads.waiting[1] = "item"
    for call_id in (1, None):
        threads._ids.put(call_id)
    threads._work()
    assert told == []
    del threads._running[99]
    threads.waiting[2] = "item"
    for call_id in (2, None):
        threads._ids.put(call_id)
    threads._work()
    assert told == ["idle"]


# Stopping


def test_stop_ends_what_waits_first() -> None:
    run = Recorder()
    with pool(2, run) as threads:
        for call_id in range(10):
            threads.put(call_id, "item")
    assert run.ran.qsize() == 10
    assert not any(thread.is_alive() for thread in threads._threads)


def test_stop_and_join_without_threads() -> None:
    threads = Threads(3, Recorder(), copy_context())
    threads.stop()
    threads.join()


def test_the_main_thread_works_alone_until_it_is_stopped() -> None:
    recorder, started = Recorder(), []
    threads = Threads(1, recorder, copy_context())
    threads.on_start = lambda: started.append(True)
    threads.use_main()
    threads.put(1, "first")
    threads.put(2, "second")
    assert threads.take_back(2) == "second"
    assert threads.end_idle() is False  # it goes on
    threads.put(3, "third")
    threads.stop()
    threads.work()
    assert recorder.expect(2) == [(1, "first"), (3, "third")]
    assert (threads.is_idle(), len(started)) == (True, 3)


# Threads that wait for nested calls


class Aside:
    """Calls that step aside, and come back once they are told to. `begun` and `back` tell the ids of calls."""

    def __init__(self) -> None:
        self.begun: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.back: queue.SimpleQueue[int] = queue.SimpleQueue()
        self.answered = {call_id: threading.Event() for call_id in range(4)}
        self.finish = {call_id: threading.Event() for call_id in range(4)}
        self.threads: Threads

    def __call__(self, call_id: int, waits: Any) -> None:
        self.begun.put(call_id)
        if waits:
            assert self.threads.step_aside(call_id)
            self.answered[call_id].wait()
            assert self.threads.come_back(call_id)
            self.back.put(call_id)
        self.finish[call_id].wait()


@contextmanager
def pool_with_calls_aside() -> Iterator[tuple[Aside, Threads]]:
    """Give a pool of one thread in which two calls are aside and a third one runs."""
    calls = Aside()
    with pool(1, calls) as threads:
        calls.threads = threads
        for call_id, waits in enumerate((True, True, False)):
            threads.put(call_id, waits)
        try:
            assert [calls.begun.get() for _ in range(3)] == [0, 1, 2]
            yield calls, threads
        finally:
            for event in (*calls.answered.values(), *calls.finish.values()):
                event.set()


def wait_for_gate(threads: Threads, count: int) -> None:
    """Wait until so many threads want to come back."""
    while len(threads._back) < count:
        time.sleep(0)


def test_calls_come_back_one_by_one_and_in_order() -> None:
    with pool_with_calls_aside() as (calls, threads):
        assert threads.free() == 0
        for count, call_id in enumerate((1, 0), 1):
            calls.answered[call_id].set()
            wait_for_gate(threads, count)
        assert calls.back.empty()  # the third call has the only place
        calls.finish[2].set()
        assert calls.back.get() == 1
        assert (len(threads._back), threads.free()) == (1, 0)
        calls.finish[1].set()
        assert calls.back.get() == 0


def test_calls_come_back_before_others_begin() -> None:
    with pool_with_calls_aside() as (calls, threads):
        threads.put(3, False)
        calls.answered[0].set()
        wait_for_gate(threads, 1)
        calls.finish[2].set()
        assert calls.back.get() == 0
        assert calls.begun.empty()
        assert 3 in threads.waiting  # it may still be taken back
        calls.finish[0].set()
        assert calls.begun.get() == 3
        calls.finish[3].set()
        calls.answered[1].set()
        assert calls.back.get() == 1


def test_a_call_that_waits_at_the_gate_can_be_taken_back() -> None:
    with pool_with_calls_aside() as (calls, threads):
        threads.put(3, False)
        assert threads.take_back(3) is False  # its item
        for call_id in (0, 1):
            calls.answered[call_id].set()
            calls.finish[call_id].set()
        calls.finish[2].set()
        assert {calls.back.get(), calls.back.get()} == {0, 1}
        assert calls.begun.empty()


def test_threads_beyond_the_limit_end_once_nobody_is_aside() -> None:
    with pool_with_calls_aside() as (calls, threads):
        threads.trim()
        assert len(threads._threads) == 3
        calls.finish[2].set()
        for call_id in (0, 1):
            calls.answered[call_id].set()
            calls.finish[call_id].set()
        assert {calls.back.get(), calls.back.get()} == {0, 1}
        threads.trim()
        assert len(threads._threads) == 1


def test_only_a_call_on_a_thread_of_the_pool_steps_aside() -> None:
    told: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def run(call_id: int, _: Any) -> None:
        told.put(threads.step_aside(call_id))
        told.put(threads.come_back(call_id))

    with pool(1, run) as threads:
        threads.run_beside(1, "item")
        assert [told.get(), told.get()] == [False, False]
        assert not threads.step_aside(7)
        assert not threads.come_back(7)


def test_a_call_that_was_interrupted_while_aside_is_aside_no_more_at_its_end() -> None:
    told: queue.SimpleQueue[bool] = queue.SimpleQueue()

    def run(call_id: int, _: Any) -> None:
        told.put(threads.step_aside(call_id))  # and an exception comes before the `try` whose `finally` comes back

    with pool(1, run) as threads:
        threads.put(1, "item")
        assert told.get()
    assert not threads._aside


def test_a_call_that_is_interrupted_while_it_waits_to_come_back_takes_no_turn_later(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by a signal handler of the user that raises in the main thread of a worker."""
    threads = Threads(1, lambda *_: None, copy_context())
    threads._running = {1: None, 2: None}
    threads._aside.add(1)

    class Lock:
        """The lock for which an interrupted thread waits."""

        is_held = False

        def acquire(self) -> None:
            if self.is_held:
                raise KeyboardInterrupt
            self.is_held = True

    with monkeypatch.context() as patch:
        patch.setattr(threading, "Lock", Lock)
        with pytest.raises(KeyboardInterrupt):
            threads.come_back(1)
    assert not threads._back
    del threads._running[2]
    turn = threading.Lock()
    turn.acquire()
    threads._entering.append((3, turn))
    threads._admit()
    assert 3 in threads._running
