"""How an executor ends: every order of shutdowns, kills and deaths, a given number of turns of its loop apart.

The portal runs in the test's own thread, over workers that live in its loop. So an order is the same each time.
"""

import asyncio
import contextlib
import gc
import os
import re
import signal
import threading
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import asynccontextmanager
from itertools import permutations
from types import SimpleNamespace
from typing import Any

import pytest

import percore
from percore._common.system import new_loop
from percore._common.worker_errors import RunnerBroken
from percore._engines.processes import fork_servers
from percore._executor import portal
from percore._executor.life import ABRUPTLY, ExecutorPhase
from percore._executor.portal import Portal
from percore._runner.assembly import Assembly
from tests.fakes import FakeEngine, FakeRunner, FakeWorker

NEVER = 1000.0
"""Seconds after which the runner itself would kill: no test waits for that."""

_gates: list[asyncio.Event] = []


@asynccontextmanager
async def slow_to_enter() -> AsyncIterator[None]:
    await _gates[-1].wait()
    yield


@asynccontextmanager
async def slow_to_leave() -> AsyncIterator[None]:
    yield
    await _gates[-1].wait()


@asynccontextmanager
async def slow_to_enter_but_the_first() -> AsyncIterator[None]:
    if percore.current_worker().index:
        await _gates[-1].wait()
    yield


async def pass_the_gate() -> str:
    await _gates[-1].wait()
    return "passed"


async def pass_the_gate_in_spite_of_cancellation() -> str:
    while not _gates[-1].is_set():
        with contextlib.suppress(asyncio.CancelledError):
            await _gates[-1].wait()
    return "passed"


class PoolWorker(FakeWorker):
    """SIGTERM ends it, as that of a pool."""

    def kill(self, signum: int = signal.SIGKILL) -> None:
        self._die(-signum)


class PoolEngine(FakeEngine):
    worker_class = PoolWorker


class Stage:
    """An executor without its thread."""

    def __init__(self, workers: int, *, is_pool: bool = False, lifespan: Callable[[], Any] | None = None) -> None:
        options = FakeRunner(workers, lifespan=lifespan, concurrency=2, kill_after=NEVER)._options
        make_engine = PoolEngine if is_pool else FakeEngine
        self.portal = Portal(lambda loop, observer: Assembly(loop, options, make_engine, observer=observer), is_pool=is_pool)
        self._loop = asyncio.new_event_loop()
        self.portal._loop = self._loop
        self.portal._pid = os.getpid()
        self.portal.thread = threading.current_thread()
        self._gate = asyncio.Event()
        _gates.append(self._gate)
        self.futures: list[Future[Any]] = []
        self.done_then: list[bool] = []
        """Which futures were done at the event "note"."""

    def submit(self, count: int, fn: Callable[[], Any] = pass_the_gate) -> None:
        """Calls that end when the gate opens."""
        for _ in range(count):
            future: Future[Any] = Future()
            self.futures.append(future)
            self.portal.submit((future, fn, (), {}))

    def act(self, event: str) -> None:
        """Do what `event` names."""
        running = self.portal.jobs
        if event == "die":
            for member in list(running.supervisor.members)[:1] if running is not None else ():
                member.worker.kill()
        elif event == "die while it starts":
            assert running is not None
            (starting,) = (member for member in running.supervisor.members if not member.is_ready)
            starting.worker.kill(signal.SIGTERM)
        elif event == "note":
            self.done_then = [future.done() for future in self.futures]
        elif event == "break":
            assert running is not None
            running.supervisor.fail(RunnerBroken(10, 3))
        else:
            portal = self.portal
            acts: dict[str, Callable[[], None]] = {
                "shut": portal.shut,
                "cancel": lambda: portal.shut(cancel=True),
                "kill": lambda: portal.kill(signal.SIGKILL),
                "terminate": lambda: portal.kill(signal.SIGTERM),
                "open": self._gate.set,
                "submit": lambda: self.submit(1),
            }
            acts[event]()

    def play(self, *script: "tuple[int, str]") -> None:
        """Run until the executor is over, and do each event so many turns of the loop after the one before."""
        loop = self._loop
        is_late = False
        failed: list[dict[str, Any]] = []
        loop.set_exception_handler(lambda _loop, context: failed.append(context))

        def step(index: int, turns: int) -> None:
            if turns:
                loop.call_soon(step, index, turns - 1)
                return
            self.act(script[index][1])
            if index + 1 < len(script):
                loop.call_soon(step, index + 1, script[index + 1][0])

        def stop() -> None:
            nonlocal is_late
            is_late = True
            loop.stop()

        loop.call_soon(step, 0, script[0][0])
        watchdog = loop.call_later(20, stop)  # a failure that says more than the time limit of the test
        try:
            self.portal._run(loop)
        finally:
            watchdog.cancel()
            _gates.remove(self._gate)
        assert not is_late, f"the executor did not end: {script}"
        assert not failed, script
        for future in self.futures:
            self.check(future)
        assert self.portal.life.phase is ExecutorPhase.OVER
        assert self.portal.jobs is None or self.portal.jobs.is_idle()

    def check(self, future: "Future[Any]") -> None:
        """It has ended as a future of an executor may."""
        assert future.done()
        if not future.cancelled() and (error := future.exception()) is not None:
            assert isinstance(error, BrokenProcessPool) or str(error) == "cannot schedule new futures after shutdown"


ENDS = ("shut", "cancel", "kill", "terminate", "die")
READY = 40
"""Turns of the loop in which the start of fake workers is over, and more."""


def scripts(events: int, begin: int, gaps: Iterable[int]) -> Iterator[tuple[tuple[int, str], ...]]:
    """Every order of so many different ends, the first after `begin` turns, the others `gaps` apart, and what has to follow."""
    for order in permutations(ENDS, events):
        for gap in gaps:
            script = [(begin if not index else gap, event) for index, event in enumerate(order)]
            if "kill" not in order:  # then it need not wait for calls and lifespans
                script += [(gap, "shut"), (READY, "open")]
            yield tuple(script)


@pytest.fixture(autouse=True)
def collected() -> Iterator[None]:
    """Killed fake workers let go of their memory when they are collected, and that takes two rounds."""
    yield
    gc.collect()
    gc.collect()


@pytest.mark.parametrize(
    ("workers", "calls", "is_pool"),
    [
        pytest.param(3, 10, False, id="worker"),
        pytest.param(1, 0, True, id="pool"),
        pytest.param(1, 0, False, id="worker without calls", marks=pytest.mark.full),
        pytest.param(3, 10, True, id="pool with calls", marks=pytest.mark.full),
    ],
)
class TestOrders:
    def test_two_ends_of_a_running_one(self, workers: int, calls: int, is_pool: bool) -> None:
        for script in scripts(2, READY, (0, 1, 2, 3, 5, 8)):
            stage = Stage(workers, is_pool=is_pool, lifespan=slow_to_leave)
            stage.submit(calls)
            stage.play(*script)

    def test_two_ends_of_a_running_one_without_a_lifespan(self, workers: int, calls: int, is_pool: bool) -> None:
        for script in scripts(2, READY, range(5)):
            stage = Stage(workers, is_pool=is_pool)
            stage.submit(calls)
            stage.play(*script)

    def test_three_ends_of_a_running_one(self, workers: int, calls: int, is_pool: bool) -> None:
        for script in scripts(3, READY, (0, 4)):
            stage = Stage(workers, is_pool=is_pool, lifespan=slow_to_leave)
            stage.submit(calls)
            stage.play(*script)

    def test_two_ends_of_one_that_starts(self, workers: int, calls: int, is_pool: bool) -> None:
        for begin in (0, 1, 3, 6):
            for script in scripts(2, begin, (0, 2)):
                stage = Stage(workers, is_pool=is_pool, lifespan=slow_to_enter)
                stage.submit(calls)
                stage.play(*script)

    def test_one_whose_workers_cannot_be_started_any_more(self, workers: int, calls: int, is_pool: bool) -> None:
        for gap in (0, 1, 2, 4, 8):
            stage = Stage(workers, is_pool=is_pool)
            stage.submit(calls)
            stage.play((READY, "break"), (gap, "submit"), (gap, "shut"), (READY, "open"))
            assert any(isinstance(future.exception(), RunnerBroken) for future in stage.futures)

    def test_a_call_submitted_too_late_ends_all_the_same(self, workers: int, calls: int, is_pool: bool) -> None:
        # 1. a thread has passed `check`  2. another one ends the executor  3. the first one submits
        for end in ENDS:
            for gap in (0, 1, 2, 4, 8):
                stage = Stage(workers, is_pool=is_pool)
                stage.submit(calls)
                stage.play((READY, end), (gap, "submit"), (READY, "open"), (0, "shut"))


def test_a_worker_that_dies_while_it_starts_ends_the_call_of_another_one_at_once() -> None:
    """The call ends only with its worker, which the runner itself would kill after `kill_after`."""
    stage = Stage(2, is_pool=True, lifespan=slow_to_enter_but_the_first)
    stage.submit(1, pass_the_gate_in_spite_of_cancellation)
    stage.play((READY, "die while it starts"), (READY, "note"), (0, "open"))
    assert stage.done_then == [True]
    error = stage.futures[0].exception()
    assert str(error) == ABRUPTLY
    assert error is not None
    end = r"by SIGTERM \(terminated while it was starting\)\n"
    assert re.search(rf"worker 1 \(pid \d+\) terminated abruptly {end}", str(error.__cause__))


class Start:
    """The first call of an executor, which starts its thread. `steps`: what happens meanwhile."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.steps: list[str] = []
        options = FakeRunner(1)._options
        self.portal = Portal(
            lambda loop, observer: Assembly(loop, options, FakeEngine, observer=observer), self._warm_up, is_pool=False
        )
        self._on_import: Callable[[], None] = lambda: None
        monkeypatch.setattr(portal, "_import_modules", self._import)

    def _warm_up(self) -> None:
        self.steps.append("fork server")

    def _import(self) -> None:
        self.steps.append("imports")
        self._on_import()

    def once(self, on_import: Callable[[], None]) -> None:
        def call() -> None:
            self._on_import = lambda: None
            on_import()

        self._on_import = call

    def submit(self) -> Future[Any]:
        future: Future[Any] = Future()
        self.portal.submit((future, os.getpid, (), {}))
        return future

    def end(self) -> None:
        self.portal.shut()
        self.portal.join()


def test_the_fork_server_starts_before_the_imports(monkeypatch: pytest.MonkeyPatch) -> None:
    start = Start(monkeypatch)
    assert start.submit().result() == os.getpid()
    start.end()
    assert start.steps == ["fork server", "imports"]


def test_an_interrupted_start_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    start = Start(monkeypatch)
    start.once(interrupt)
    with pytest.raises(KeyboardInterrupt):
        start.submit()
    assert start.submit().result() == os.getpid()
    start.end()
    assert start.steps == ["fork server", "imports", "fork server", "imports"]


def test_a_finalizer_may_submit_while_the_first_call_starts_the_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    start = Start(monkeypatch)
    inner: list[Future[Any]] = []
    start.once(lambda: inner.append(start.submit()))
    assert start.submit().result() == os.getpid()
    assert inner[0].result() == os.getpid()
    start.end()
    assert start.steps == ["fork server", "imports"]


def interrupt() -> None:
    raise KeyboardInterrupt


def test_an_interrupted_call_does_not_keep_later_ones_from_waking_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    start = Start(monkeypatch)
    assert start.submit().result() == os.getpid()
    with monkeypatch.context() as interrupted:
        interrupted.setattr(start.portal, "_wake", lambda _callback: interrupt())
        with pytest.raises(KeyboardInterrupt):
            start.submit()
    assert start.submit().result(20) == os.getpid()
    start.end()


@pytest.mark.parametrize("has_begun", [True, False])
def test_an_interrupt_while_the_thread_begins_leaves_an_executor_that_works(
    monkeypatch: pytest.MonkeyPatch, has_begun: bool
) -> None:
    """Thread.start waits for the new thread, and a Ctrl-C ends that wait."""
    start = Start(monkeypatch)
    begins, real_start = threading.Event(), threading.Thread.start
    threads: list[threading.Thread] = []

    class Interrupted(threading.Thread):
        def start(self) -> None:
            real_start(self)
            if has_begun:
                begins.wait(20)
            raise KeyboardInterrupt

        def run(self) -> None:
            threads.append(self)
            if has_begun:
                start.portal._has_launched = Noting(begins)
            else:
                begins.wait(20)
            super().run()

    class Noting(threading.Event):
        def __init__(self, noted: threading.Event) -> None:
            super().__init__()
            self._noted = noted

        def set(self) -> None:
            self._noted.set()
            super().set()

    with monkeypatch.context() as interrupted:
        interrupted.setattr(threading, "Thread", Interrupted)
        with pytest.raises(KeyboardInterrupt):
            start.submit()
    begins.set()
    assert start.submit().result(20) == os.getpid()
    start.end()
    for thread in threads:
        thread.join(20)
        assert not thread.is_alive()


def test_a_finalizer_s_call_ends_though_the_thread_cannot_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    def submit_and_fail() -> None:
        inner.append(start.submit())
        raise OSError("no descriptor is left")

    start = Start(monkeypatch)
    inner: list[Future[Any]] = []
    start.once(submit_and_fail)
    with pytest.raises(OSError, match="no descriptor"):
        start.submit()
    assert "no descriptor" in str(inner[0].exception(20))
    assert start.submit().result(20) == os.getpid()
    start.end()


def test_a_callback_that_exits_does_not_end_the_executor_before_its_workers(caplog: pytest.LogCaptureFixture) -> None:
    def leave(_future: Future[Any]) -> None:
        raise SystemExit(3)

    stage = Stage(1)
    stage.submit(10)
    for future in stage.futures:
        future.add_done_callback(leave)
    stage.play((READY, "cancel"), (READY, "open"))
    assert any(future.cancelled() for future in stage.futures)
    assert [future.result() for future in stage.futures if not future.cancelled()]
    assert {record.getMessage().partition(" <")[0] for record in caplog.records} == {"percore: a callback of"}


def test_code_that_is_pickled_for_the_start_may_submit_and_waits_for_nothing() -> None:
    stage = Stage(1)
    made = stage.portal._assemble
    assert made is not None

    def assemble(loop: asyncio.AbstractEventLoop, observer: Any) -> Assembly:
        stage.submit(1)
        stage.portal.wait_launched()
        return made(loop, observer)

    stage.portal._assemble = assemble
    stage.play((READY, "open"), (0, "shut"))
    assert [future.result() for future in stage.futures] == ["passed"]


WAITS = "a __del__ that a garbage collection has run waits for an executor, in the middle of a step"


@pytest.mark.parametrize("is_traced", [False, True])
def test_a_finalizer_that_waits_in_the_middle_of_a_start_is_refused(monkeypatch: pytest.MonkeyPatch, *, is_traced: bool) -> None:
    """The start would wait for it, and it for a thread that has not been started."""

    def make_loop() -> asyncio.AbstractEventLoop:
        monkeypatch.undo()
        future = executor.submit(abs, -7)
        early.append(future)
        for wait in (future.result, future.exception, executor.shutdown):
            with pytest.raises(RuntimeError, match=WAITS):
                wait()
        others.append(threads.submit(future.result))
        return new_loop()

    early, others, threads = list[Future[int]](), list[Future[int]](), ThreadPoolExecutor(1)
    monkeypatch.setattr(portal, "new_loop", make_loop)
    spans: list[str] = []
    span = SimpleNamespace(parent=None, begun=lambda *_: None, ended=lambda error: spans.append(str(error)))
    executor = percore.LoopPoolExecutor(1, engine="threads")
    if is_traced:
        executor._tracing = SimpleNamespace(begin=lambda _fn: span)
    assert executor.submit(abs, -5).result() == 5
    assert (early[0].result(), early[0].exception(), others[0].result()) == (7, None, 7)
    executor.shutdown()
    threads.shutdown()
    assert spans == ["None"] * 2 * is_traced


def test_a_finalizer_that_waits_in_the_middle_of_a_step_of_the_fork_servers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its executor's thread would wait for the lock that this thread holds."""

    def start(_preload: str) -> Any:
        with pytest.raises(RuntimeError, match=WAITS):
            executor.shutdown()
        return SimpleNamespace(fingerprint=())

    executor = percore.LoopPoolExecutor(1, engine="threads")
    assert executor.submit(abs, -7).result() == 7
    servers = fork_servers.ForkServers()
    monkeypatch.setattr(fork_servers, "servers", servers)
    monkeypatch.setattr(fork_servers, "ForkServerProcess", start)
    servers.warm_up("preload")
    executor.shutdown()
    assert executor._portal.life.phase is ExecutorPhase.OVER
