"""Callbacks that the loop calls although a Ctrl-C came just before one began, and the parts that need them."""

import asyncio
import gc
import os
import sys
import weakref
from collections import deque
from collections.abc import Callable, Coroutine
from types import SimpleNamespace
from typing import Any

import pytest

import percore
from percore import Runner, WorkerDied, watch_loop
from percore._common.sure_handles import SureHandle, surely_later, surely_soon
from percore._engines.nodes import engine as nodes
from percore._engines.nodes.engine import NodesEngine
from percore._engines.nodes.places import NoPlace
from percore._engines.nodes.store import NodesStore
from percore._engines.processes.descriptors import pipe
from percore._engines.processes.examination import Examiner
from percore._engines.processes.spawn_launcher import ThreadWatchedProcess
from percore._engines.threads import worker as threads
from percore._engines.threads.worker import ThreadWorker
from percore._map.threaded import _Puller
from percore._runner.loop_watch import _LoopWatcher
from percore._supervisor import publication
from percore._supervisor.call_registry import CallRegistry
from percore._supervisor.closing import Closing
from percore.testing import die, kill
from tests import jobs
from tests.contract import share_jobs, stream_jobs
from tests.fakes import FakeRunner
from tests.internals import members_of, supervisor_of
from tests.unit.test_lost_callbacks import LOOPS, Interrupts, run_interrupted
from tests.waiting import until

ON_THREADS: dict[str, Any] = {"engine": "threads"}

Start = Callable[[asyncio.AbstractEventLoop, Callable[[], None]], SureHandle]


def soon(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> SureHandle:
    return surely_soon(loop, callback)


def later(loop: asyncio.AbstractEventLoop, callback: Callable[[], None]) -> SureHandle:
    return surely_later(loop, 0.002, callback)


@pytest.mark.parametrize("start", [soon, later])
@LOOPS
def test_it_is_called_once_and_again_after_a_ctrl_c(new_loop: Any, start: Start, subtests: pytest.Subtests) -> None:
    def begin() -> None:
        handles.append(start(loop, callback))

    def callback() -> None:
        told.append(len(told))
        if raised and raised[0] is not None:
            raise raised.pop(0)

    loop = new_loop()
    told, faults, handles, raised = list[int](), list[Any](), list[SureHandle](), list[BaseException]()
    loop.set_exception_handler(lambda _, context: faults.append(context))
    try:
        with subtests.test("once"):
            begin()
            loop.run_until_complete(asyncio.sleep(0.01))
            assert told == [0]
        with subtests.test("cancelled"):
            begin()
            handles[-1].cancel()
            handles[-1].cancel()
            loop.run_until_complete(asyncio.sleep(0.01))
            assert told == [0]
        with subtests.test("an Exception"):
            raised.append(ValueError())
            begin()
            loop.run_until_complete(asyncio.sleep(0.01))
            assert (told, len(faults)) == ([0, 1], 1)
        with subtests.test("Ctrl-C in it"):
            raised.append(KeyboardInterrupt())
            begin()
            waits = loop.create_task(asyncio.sleep(0.01))
            with pytest.raises(KeyboardInterrupt):
                loop.run_until_complete(waits)
            loop.run_until_complete(waits)
            assert (told, raised) == ([0, 1, 2, 3], [])
    finally:
        loop.close()


@pytest.mark.parametrize("error", [MemoryError, KeyboardInterrupt])
@pytest.mark.parametrize("start", [soon, later])
async def test_a_loop_that_takes_it_once(start: Start, error: type[BaseException]) -> None:
    """After an Exception it is not called: its caller was told so. After a Ctrl-C it is called, without an error."""

    def once(method: Callable[..., asyncio.Handle]) -> Callable[..., asyncio.Handle]:
        def call(*args: Any) -> asyncio.Handle:
            if taken:
                raise error
            taken.append(method(*args))
            return taken[0]

        return call

    loop = asyncio.get_running_loop()
    loop_once: Any = SimpleNamespace(time=loop.time, call_soon=once(loop.call_soon), call_at=once(loop.call_at))
    told, taken = list[int](), list[asyncio.Handle]()
    with pytest.raises(error):
        start(loop_once, lambda: told.append(1))
    await asyncio.sleep(0.01)
    assert told == ([1] if error is KeyboardInterrupt else [])


@pytest.mark.parametrize("is_called", [False, True], ids=["cancelled", "called"])
async def test_it_keeps_nothing_alive_once_it_is_over(is_called: bool) -> None:
    class Owner:
        def __init__(self) -> None:
            self.timer = surely_soon(asyncio.get_running_loop(), self.end)

        def end(self) -> None:
            pass

    gc.disable()
    try:
        owner = Owner()
        gone = weakref.ref(owner)
        if is_called:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        else:
            owner.timer.cancel()
        del owner
        assert gone() is None
    finally:
        gc.enable()


async def a_retry(runner: Runner) -> None:
    with pytest.raises(ValueError, match="wrong"):
        await runner.options(retries=1, retry_on=ValueError, backoff=0.001).run(jobs.fail, ValueError("wrong"))


async def a_stream_that_waits_for_its_consumer(runner: Runner) -> None:
    items = runner.options(prefetch=2).stream(stream_jobs.anumbers, 100)
    assert await anext(items) == 0
    assert await runner.run(jobs.aecho, 1) == 1
    await items.aclose()


async def progress(runner: Runner) -> None:
    told = list[percore.Progress]()
    mapped = runner.map(asyncio.sleep, [1000], progress=told.append)
    items = aiter(mapped)
    first = asyncio.ensure_future(anext(items))
    await until(lambda: len(told) >= 4)
    first.cancel()
    await asyncio.wait([first])


async def a_cancellation_while_its_worker_sends(runner: Runner) -> None:
    call = runner.submit(asyncio.sleep, 1000)
    (member,) = members_of(runner)
    await until(lambda: member.fate(supervisor_of(runner).calls.pending()[0]).begun)
    member.is_sending = True
    call.cancel()
    member.is_sending = False
    await until(lambda: not member.calls)


async def an_object_that_is_shared(runner: Runner) -> None:
    shared = await runner.share("object")
    assert await runner.run(share_jobs.first, shared, None) == "object"


async def an_input_that_a_thread_pulls(runner: Runner) -> None:
    pulled = percore.threaded(iter(range(3)), ahead=1)
    assert await runner.map(jobs.aecho, pulled) == [0, 1, 2]


async def a_worker_that_its_call_kills(runner: Runner) -> None:
    with pytest.raises(WorkerDied):
        await runner.run(die)
    assert await runner.run(jobs.aecho, 1) == 1


async def stop_loop() -> None:
    asyncio.get_running_loop().stop()
    await asyncio.sleep(1000)


async def a_worker_whose_loop_stops(runner: Runner) -> None:
    with pytest.raises(WorkerDied):
        await runner.run(stop_loop)
    assert await runner.run(jobs.aecho, 1) == 1


async def a_worker_that_is_given_up(runner: Runner) -> None:
    read_end, write_end = os.pipe()

    async def blocked() -> None:
        os.read(read_end, 1)

    call = runner.submit(blocked)
    (member,) = members_of(runner)
    await until(lambda: member.fate(supervisor_of(runner).calls.pending()[0]).begun)
    kill(runner)
    try:
        with pytest.raises(WorkerDied):
            await call
        assert await runner.run(jobs.aecho, 1) == 1
    finally:
        os.write(write_end, b"1")
        await asyncio.to_thread(member.worker.join)  # type: ignore[attr-defined]
        os.close(write_end)
        os.close(read_end)


@pytest.mark.parametrize(
    ("kind", "name", "story", "options"),
    [
        (SureHandle, "_run", a_retry, {}),
        (SureHandle, "_run", a_stream_that_waits_for_its_consumer, {"concurrency": 1}),
        (SureHandle, "_run", progress, {}),
        (CallRegistry, "_cancel_sent", a_cancellation_while_its_worker_sends, {}),
        (SureHandle, "_run", an_object_that_is_shared, {}),
        (_Puller, "_wake", an_input_that_a_thread_pulls, {}),
        (ThreadWorker, "kill", a_worker_that_its_call_kills, ON_THREADS),
        (ThreadWorker, "_ended", a_worker_whose_loop_stops, ON_THREADS),
        (SureHandle, "_run", a_worker_that_is_given_up, ON_THREADS),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
@LOOPS
def test_a_lost_callback_is_called_again(
    kind: type,
    name: str,
    story: Callable[[Runner], Coroutine[Any, Any, None]],
    options: dict[str, Any],
    new_loop: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async def program() -> None:
        async with (Runner if "engine" in options else FakeRunner)(1, **options) as runner:
            interrupts.is_armed = True
            async with asyncio.timeout(10):
                await story(runner)

    monkeypatch.setattr(publication, "_PERIOD", 0.02)
    monkeypatch.setattr(threads, "PATIENCE", 0.02)
    interrupts = Interrupts(kind, name)
    run_interrupted(interrupts, program(), new_loop())
    assert interrupts.has_struck


@LOOPS
@pytest.mark.parametrize(("kind", "name"), [(SureHandle, "_run"), (NodesEngine, "_find")], ids=["timer", "search"])
def test_a_search_for_nodes_goes_on(kind: type, name: str, new_loop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    async def program() -> None:
        found = asyncio.Event()

        async def place(*_: Any) -> list[Any]:
            if len(asked) < 2:
                asked.append(1)
                raise NoPlace("a", "it has no room")
            found.set()
            return []

        engine = NodesEngine.__new__(NodesEngine)
        engine._loop, engine._places = asyncio.get_running_loop(), SimpleNamespace(place=place)
        engine._token, engine._patience = b"", 10.0
        engine._search = engine._again = None
        engine._is_closed, engine.no_place, engine.links, engine._slots = False, "", [], {0: SimpleNamespace()}  # type: ignore[dict-item]
        engine._orders = SimpleNamespace(sizes={"workers": 1})  # type: ignore[assignment]
        interrupts.is_armed = True
        engine._find_nodes()
        await found.wait()
        assert engine._again is not None
        engine._again.cancel()

    monkeypatch.setattr(nodes, "_PAUSE", 0.001)
    asked: list[int] = []
    interrupts = Interrupts(kind, name)
    run_interrupted(interrupts, program(), new_loop())
    assert interrupts.has_struck


@LOOPS
def test_the_end_of_a_process_is_told_by_the_thread_that_waits_for_it(new_loop: Any) -> None:
    async def program() -> None:
        read_end, lifeline = pipe()
        read_end.close()
        ended = asyncio.Event()

        def told(code: int | None) -> None:
            codes.append(code)
            ended.set()

        interrupts.is_armed = True
        ThreadWatchedProcess(asyncio.get_running_loop(), pid, lifeline, told)
        await ended.wait()
        await asyncio.sleep(0)

    pid = os.posix_spawn(sys.executable, [sys.executable, "-I", "-S", "-c", "pass"], {})
    codes = list[int | None]()
    interrupts = Interrupts(ThreadWatchedProcess, "_finish")
    run_interrupted(interrupts, program(), new_loop())
    assert interrupts.has_struck
    assert codes == [0]


@LOOPS
def test_a_slot_that_is_free_is_told_to_those_who_wait_for_it(new_loop: Any) -> None:
    async def program() -> None:
        told = asyncio.Event()
        store = NodesStore.__new__(NodesStore)
        store._loop, store._waiting, store._is_waking = asyncio.get_running_loop(), deque(), False
        store.has_free = lambda: True  # type: ignore[method-assign]
        interrupts.is_armed = True
        store.wait(told.set)
        await told.wait()

    interrupts = Interrupts(SureHandle, "_run")
    run_interrupted(interrupts, program(), new_loop())
    assert interrupts.has_struck


@LOOPS
def test_the_workers_of_a_dropped_runner_are_killed(new_loop: Any) -> None:
    async def program() -> None:
        killed = asyncio.Event()
        closing = Closing.__new__(Closing)
        closing._loop, closing._phase = asyncio.get_running_loop(), SimpleNamespace(advance=lambda _: None)  # type: ignore[assignment]
        closing._pool = SimpleNamespace(kill=killed.set, listening=SimpleNamespace(close=lambda: None))  # type: ignore[assignment]
        interrupts.is_armed = True
        closing.abandon()
        await killed.wait()

    interrupts = Interrupts(SureHandle, "_run")
    run_interrupted(interrupts, program(), new_loop())
    assert interrupts.has_struck


@LOOPS
def test_an_examination_goes_on(new_loop: Any) -> None:
    async def program() -> None:
        examiner = Examiner(asyncio.get_running_loop())
        told = asyncio.Event()
        try:
            interrupts.is_armed = True
            process: Any = SimpleNamespace(kill=lambda _: os.write(examiner.fd, b"stacks"))
            for _ in range(2):
                examiner.examine(os.getpid(), process, lambda _: told.set())
                await told.wait()
                told.clear()
        finally:
            examiner.close()

    interrupts = Interrupts(SureHandle, "_run")
    run_interrupted(interrupts, program(), new_loop())
    assert interrupts.has_struck


@LOOPS
def test_a_watched_loop_is_watched_on(new_loop: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its thread would wait for ever for a callback, and report a block that is none."""

    async def program() -> None:
        interrupts.is_armed = True
        with watch_loop(0.02):
            await until(lambda: interrupts.has_struck)
            before = watchers[0]._number
            await until(lambda: watchers[0]._number > before + 1)

    interrupts = Interrupts(_LoopWatcher, "_ran")
    watchers: list[_LoopWatcher] = []
    original = _LoopWatcher.start

    def start(watcher: _LoopWatcher) -> None:
        watchers.append(watcher)
        original(watcher)

    monkeypatch.setattr(_LoopWatcher, "start", start)
    run_interrupted(interrupts, program(), new_loop())
    assert interrupts.has_struck
