"""engine="threads": what the workers that are threads of the program promise, and what no thread can.

The functions are closures: they run in this process.
"""

import asyncio
import logging
import multiprocessing
import re
import signal
import sys
import threading
import time
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from contextvars import ContextVar
from pathlib import Path
from typing import Any

import pytest

import percore
from percore import LoopPoolExecutor, RemoteError, Runner, StartupFailed, ThreadsEngine, WorkerDied, testing
from percore._common import engines
from percore._common.engines import EngineChoice
from percore._engines.threads import choice, gil
from tests import jobs
from tests.contract.conftest import worker_of
from tests.counts import times
from tests.waiting import until

pytestmark = pytest.mark.asyncio_only


def runner_of(workers: int = 1, **options: Any) -> Runner:
    return Runner(workers, engine="threads", **options)


# What crosses


async def test_what_another_thread_drops_last_is_freed_although_its_maker_sleeps(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GIL its maker alone frees it, when it runs again: here the loop of the worker, which has nothing to do."""
    monkeypatch.setenv("PERCORE_METRICS", "0")  # whoever measures wakes the worker, too
    loop, gone = asyncio.get_running_loop(), asyncio.Event()
    held: list[Any] = []

    async def make() -> Any:
        return jobs.Adder(1), threading.get_native_id()

    def drop(maker: int) -> None:
        while Path(f"/proc/self/task/{maker}/stat").read_text().rpartition(")")[2].split()[0] != "S":
            time.sleep(0)
        held.clear()

    async with runner_of() as runner:
        one, maker = await runner.run(make)
        weakref.finalize(one, loop.call_soon_threadsafe, gone.set)
        held.append(one)
        del one
        thread = threading.Thread(target=drop, args=(maker,))
        thread.start()
        async with asyncio.timeout(20):
            await gone.wait()
    thread.join()


async def test_every_object_crosses_as_it_is() -> None:
    thing, lock = {"rows": [[1, 2]]}, threading.Lock()

    async def agive(value: Any) -> Any:
        return value

    async def items() -> AsyncIterator[Any]:
        yield thing
        yield lock
        yield asyncio.sleep(0)

    async with runner_of(2) as runner:
        assert await runner.run(jobs.echo, thing) is thing
        assert await runner.run(jobs.aecho, lock) is lock
        assert await runner.submit(agive, value=thing) is thing
        assert await runner.run(lambda value: value, value=lock) is lock
        assert all(one is thing for one in await runner.map(jobs.echo, [thing] * 1000))
        assert all(one is lock for one in await runner.broadcast(jobs.echo, lock))
        assert all(one is thing for one in await runner.starmap(jobs.aecho, [(thing,)] * 3))
        async with runner.stream(items) as stream:
            given = [item async for item in stream]
        assert given[0] is thing
        assert given[1] is lock
        given[2].close()
        not_awaited = await runner.run(agive, asyncio.sleep(0))  # a coroutine function's result is never awaited
        not_awaited.close()
        assert await runner.run(jobs.later, thing) is thing  # and what a plain function returns is


async def test_nested_calls_pass_objects_too() -> None:
    thing = [object()]

    async def caller() -> tuple[Any, ...]:
        runner = percore.current_runner()
        streamed = [item async for item in runner.stream(numbers_of)]
        return await runner.run(jobs.echo, thing), await runner.map(jobs.aecho, [thing] * 3), streamed

    async def numbers_of() -> AsyncIterator[Any]:
        yield thing
        yield 1

    def plain() -> Any:
        return percore.current_runner().run_sync(jobs.echo, value=thing)

    async def fails() -> None:
        await percore.current_runner().options(retries=1, retry_on=OSError).run(raise_error)

    error = OSError("here")

    def raise_error() -> None:
        raise error

    async with runner_of(2) as runner:
        once, mapped, streamed = await runner.run(caller)
        assert all(one is thing for one in (once, *mapped, streamed[0]))
        assert await runner.run(plain) is thing
        with pytest.raises(OSError, match="here") as caught:
            await runner.run(fails)
        assert caught.value is error


async def test_an_exception_is_the_very_one_and_keeps_its_traceback() -> None:
    error = ValueError(threading.Lock())

    def fails() -> None:
        raise error

    async with runner_of() as runner:
        with pytest.raises(ValueError, match="lock") as caught:
            await runner.run(fails)
        assert caught.value is error
        assert caught.value.__cause__ is None
        inner = [entry for entry in caught.traceback if str(entry.path) == __file__][-1]
        assert inner.name == "fails"
        assert not [entry for entry in caught.traceback if "_worker" in str(entry.path)]
        with pytest.raises(RuntimeError, match="StopIteration"):
            await runner.run(jobs.fail, StopIteration)


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt(), GeneratorExit(), asyncio.CancelledError()], ids=repr)
async def test_no_call_ends_the_program(error: BaseException) -> None:
    async with runner_of() as runner:
        for fn in (jobs.fail, jobs.afail):
            with pytest.raises(RemoteError) as caught:
                await runner.run(fn, error)
            assert caught.value.type_name.endswith(type(error).__name__)
            assert "in fail" in str(caught.value.__cause__) or "in afail" in str(caught.value.__cause__)
        assert await runner.run(jobs.echo, 1) == 1
        assert runner.statistics().restarts == 0


async def test_share_gives_the_object_itself_also_after_its_close_to_calls_that_have_it() -> None:
    thing, gate, begun = {"a": 1}, threading.Event(), threading.Event()

    def read(shared: percore.Shared[Any], *, other: percore.Shared[Any] | None = None) -> Any:
        begun.set()
        gate.wait()
        return shared.value, other and other.value

    async with runner_of() as runner:
        shared = await runner.share(thing)
        assert shared.value is thing
        call = runner.submit(read, shared, other=shared)
        await until(begun.is_set)
        shared.close()
        gate.set()
        assert [one is thing for one in await call] == [True, True]
        with pytest.raises(RuntimeError, match="was closed"):
            await runner.run(read, shared)
        another = await runner.share(thing)
        with pytest.raises(RuntimeError, match="only in the program"):
            await runner.run(lambda one: one.close(), another)
        with pytest.raises(TypeError, match="cannot be pickled"):
            await runner.run(lambda one: one.__reduce__(), another)
        mapped = await runner.map(lambda one: one.value, [another] * 50)
        assert all(one is thing for one in mapped)


async def test_with_copy_pickle_each_side_has_objects_of_its_own() -> None:
    thing = {"rows": [1, 2]}
    async with Runner(2, engine=ThreadsEngine(copy="pickle"), lifespan=lambda: kept(thing)) as runner:
        changed = await runner.run(jobs.append, thing["rows"], 3)
        assert (changed, thing) == ([1, 2, 3], {"rows": [1, 2]})
        assert await runner.run(jobs.aappend, items=thing["rows"], item=3) == [1, 2, 3]
        for one in await runner.map(jobs.echo, [thing] * 100):
            assert one == thing
            assert one is not thing
        with pytest.raises(TypeError, match="cannot pickle"):
            await runner.run(jobs.echo, threading.Lock())
        with pytest.raises(ValueError, match="here") as caught:
            await runner.run(jobs.fail, ValueError("here"))
        assert "in fail" in str(caught.value.__cause__)
        shared = await runner.share(thing)
        assert await runner.run(lambda one: one.value, shared) == thing
        assert await runner.run(jobs.state) is not None
        assert shared.value is thing


@asynccontextmanager
async def kept(value: Any) -> AsyncIterator[Any]:
    yield value


# Inside a worker


async def test_a_worker_has_its_own_loop_lifespan_and_context() -> None:
    loops, variable = set(), ContextVar[int]("variable", default=0)
    states: list[Any] = []

    @asynccontextmanager
    async def lifespan() -> AsyncIterator[object]:
        loops.add(asyncio.get_running_loop())
        yield states

    async def told() -> Any:
        assert asyncio.get_running_loop() in loops
        inner = await asyncio.to_thread(percore.state, list)
        return percore.state() is states and inner is states, percore.current_worker().index, variable.get()

    variable.set(5)
    async with runner_of(2, lifespan=lifespan) as runner:
        assert sorted(await runner.broadcast(told)) == [(True, 0, 0), (True, 1, 0)]
        assert await runner.run(lambda: percore.state() is states)
        assert len(loops) == 2
        with pytest.raises(RuntimeError, match="only in a worker"):
            percore.current_worker()
        assert [one.pid for one in runner.statistics().workers] == [None, None]
        assert "supervisor" in str(await runner.usage())
        await runner.reload()
        assert await runner.run(told)
    assert asyncio.get_running_loop() not in loops
    assert all(loop.is_closed() for loop in loops)


async def test_it_is_a_guest_of_the_process() -> None:
    handlers, interval = logging.getLogger().handlers[:], sys.getswitchinterval()
    signals = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    streams, main = (sys.stdin, sys.stdout, sys.stderr), sys.modules["__main__"]

    def look() -> float:
        jobs.burn(300_000)  # long enough for a shorter interval, in a process of its own
        return sys.getswitchinterval()

    async with runner_of(2, threads=2) as runner:
        assert await asyncio.gather(*(runner.run(look) for _ in range(8))) == [interval] * 8
        assert (sys.stdin, sys.stdout, sys.stderr) == streams
        assert sys.modules["__main__"] is main
        assert logging.getLogger().handlers == handlers
        assert {number: signal.getsignal(number) for number in signals} == signals
    assert sys.getswitchinterval() == interval


async def test_what_a_call_leaves_in_its_loop_ends_with_the_worker_and_the_program_s_tasks_go_on() -> None:
    ended: list[str] = []

    async def stay(name: str) -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            ended.append(name)

    async def leave() -> None:
        left.append(asyncio.create_task(stay("left behind")))

    left: list[asyncio.Task[None]] = []
    own = asyncio.create_task(stay("own"))
    async with runner_of() as runner:
        await runner.run(leave)
        assert not ended
    assert ended == ["left behind"]
    assert not own.done()
    own.cancel()
    with pytest.raises(asyncio.CancelledError):
        await own


# Ends


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt])
async def test_what_a_task_raises_in_a_worker_s_loop_ends_that_worker_alone(
    error: type[BaseException], caplog: pytest.LogCaptureFixture
) -> None:
    async def fail() -> None:
        raise error(3)

    async def leave_failing(after: int) -> None:
        left.extend(asyncio.create_task(fail()) for _ in range(after))
        await asyncio.sleep(3600)

    left: list[asyncio.Task[None]] = []
    async with runner_of(2) as runner:
        with pytest.raises(WorkerDied, match=f"its event loop raised {error.__name__}") as caught:
            await runner.run(leave_failing, 3)
        assert (caught.value.pid, caught.value.started) == (None, True)
        assert await runner.run(jobs.aecho, 1) == 1
        await until(lambda: all(one.state == "ready" for one in runner.statistics().workers))
        assert runner.statistics().given_up == 0
    assert "the event loop of worker" in caplog.text


async def test_what_a_loop_raises_at_its_end_ends_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    async def fail_at_the_end() -> None:
        try:
            await asyncio.sleep(3600)
        finally:
            raise SystemExit(3)

    async def leave() -> None:
        left.append(asyncio.create_task(fail_at_the_end()))

    left: list[asyncio.Task[None]] = []
    async with runner_of() as runner:
        await runner.run(leave)
        worker_of(runner).kill()
        assert await runner.run(jobs.aecho, 1) == 1
        assert runner.statistics().given_up == 0
    # The task is cancelled when the loop ends, or before, if the worker hears of the kill while its loop still runs.
    assert re.search("the event loop of (a worker raised at its end|worker 0 raised)", caplog.text)


async def test_a_loop_that_cannot_be_made_fails_the_start() -> None:
    def refuse() -> Any:
        raise SystemExit("no loop today")

    with pytest.raises(StartupFailed, match="SystemExit: no loop today"):
        await runner_of(2, loop_factory=refuse).start()


async def test_without_a_thread_the_start_fails_and_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(StartupFailed, match="no thread can be started for the worker"):
        await runner_of(2).start()


@contextmanager
def blocked() -> Iterator[tuple[Callable[..., Any], threading.Event, threading.Event]]:
    """A coroutine function that blocks its loop until the event is set, and the event that says that it has begun."""
    gate, begun = threading.Event(), threading.Event()

    async def block(_: object = None) -> str:
        begun.set()
        gate.wait()
        return "late"

    try:
        yield block, begun, gate
    finally:
        gate.set()


async def test_a_worker_that_does_not_end_is_given_up(caplog: pytest.LogCaptureFixture) -> None:
    counted: list[int] = []

    async def count(number: int) -> int:
        counted.append(number)
        return number

    def plain(number: int) -> int:
        counted.append(number)
        return number

    with blocked() as (block, begun, gate):
        async with runner_of(1, threads=1, kill_after=0.05) as runner:
            stuck = asyncio.create_task(runner.options(hard_timeout=0.05).run(block))
            await until(begun.is_set)
            waiting = [runner.submit(count, number) for number in range(20)] + [runner.submit(plain, 20)]
            with pytest.raises(TimeoutError):
                await stuck
            assert await asyncio.gather(*waiting) == [*range(21)]  # they had not begun: its replacement has run them
            found = runner.statistics()
            assert (found.given_up, found.workers[0].generation, found.restarts) == (1, 2, 1)
            thread = next(one for one in threading.enumerate() if one.name == "percore-worker-0" and not gate.is_set())
        gate.set()
        await asyncio.to_thread(thread.join)
    assert sorted(counted) == [*range(21)]
    assert "not ended within kill_after" in caplog.text or "hard_timeout" in caplog.text


async def test_what_a_killed_worker_runs_waits_for_no_nested_call() -> None:
    begun = threading.Event()

    async def endless() -> None:
        begun.set()
        await asyncio.sleep(3600)

    async def items() -> AsyncIterator[None]:
        await endless()
        yield

    def runs() -> None:
        percore.current_runner().run_sync(endless)

    def maps() -> None:
        list(percore.current_runner().starmap(endless, [()]))

    def streams() -> None:
        list(percore.current_runner().stream(items))

    for caller in (runs, maps, streams):
        begun.clear()
        async with runner_of(1, kill_after=0.05) as runner:
            call = runner.submit(caller)
            await asyncio.to_thread(begun.wait)
            threads = [one for one in threading.enumerate() if one.name.startswith("percore-")]
            worker_of(runner).kill()
            with pytest.raises(WorkerDied):
                await call
            for thread in threads:
                await asyncio.to_thread(thread.join)


async def test_the_function_that_blocks_a_worker_is_named(caplog: pytest.LogCaptureFixture) -> None:
    with blocked() as (block, begun, gate):
        async with runner_of(1, blocked_after=0.05) as runner:
            longer = [runner.submit(asyncio.sleep, 3600) for _ in range(2)]
            call = runner.submit(block)
            await until(begun.is_set)
            waiting = runner.submit(len, "abc")
            await until(lambda: runner.statistics().workers[0].blocked_by)
            assert str(runner.statistics().workers[0].blocked_by).endswith("blocked.<locals>.block")
            assert "its event loop is blocked by " in caplog.text
            gate.set()
            assert (await call, await waiting) == ("late", 3)
            for one in longer:
                one.cancel()


async def test_its_started_calls_end_with_worker_died_that_says_so() -> None:
    with blocked() as (block, begun, gate):
        runner = runner_of(1, kill_after=0.05)
        await runner.start()
        call = runner.submit(block)
        await until(begun.is_set)
        worker_of(runner).kill()
        with pytest.raises(WorkerDied, match="its thread runs on, because a thread cannot be killed") as caught:
            await call
        died = caught.value
        assert (died.pid, died.exitcode, died.signal, died.started) == (None, None, None, True)
        await runner.aclose()
        assert not gate.is_set()  # it is blocked still, and the close did not wait for it
        gate.set()


async def test_a_close_gives_up_what_does_not_end(caplog: pytest.LogCaptureFixture) -> None:
    with blocked() as (block, begun, gate):
        runner = runner_of(2, kill_after=0.05)
        await runner.start()
        call = runner.submit(block)
        await until(begun.is_set)
        await runner.aclose(grace=0)
        with pytest.raises(percore.RunnerClosed):
            await call
        assert not gate.is_set()


async def _kill(runner: Runner) -> None:
    worker_of(runner).kill()


async def _raise(runner: Runner) -> None:
    """Let the loop of the worker raise."""

    async def leave() -> None:
        left.append(asyncio.create_task(fail()))

    async def fail() -> None:
        raise SystemExit(3)

    left: list[asyncio.Task[None]] = []
    with suppress(WorkerDied):
        await runner.run(leave)


@pytest.mark.parametrize("end", [_kill, _raise])
async def test_plain_functions_run_on_after_an_end_and_what_waits_behind_them_runs_elsewhere(end: Any) -> None:
    gate, begun, ran = threading.Event(), threading.Event(), []

    def wait(number: int) -> int:
        begun.set()
        gate.wait()
        ran.append(number)
        return number

    async with runner_of(1, threads=1) as runner:
        call = runner.submit(wait, 0)
        await until(begun.is_set)
        later = [runner.submit(wait, number) for number in range(1, 4)]
        mapped = asyncio.create_task(runner.map(wait, range(10, 20)).collect())
        await asyncio.sleep(0)
        await end(runner)
        with pytest.raises(WorkerDied, match="its thread runs on"):
            await call
        assert runner.statistics().given_up == 1
        gate.set()
        assert await asyncio.gather(*later) == [1, 2, 3]
        assert await mapped == [*range(10, 20)]
        assert await runner.run(jobs.echo, 1) == 1
    await until(lambda: 0 in ran)  # the gate is open for the thread of the worker that has ended, too
    assert sorted(ran) == [0, 1, 2, 3, *range(10, 20)]  # each once


@pytest.mark.parametrize("end", [_kill, _raise])
async def test_a_batch_is_parted_where_its_worker_ends(end: Any) -> None:
    gate, begun, ran = threading.Event(), threading.Event(), []

    def wait(number: int) -> int:
        ran.append(number)
        if number == 20:
            begun.set()
            gate.wait()
        return number

    async with runner_of(1, threads=1, retries=0) as runner:
        await runner.map(jobs.echo, range(1000))
        found = asyncio.create_task(runner.map(wait, range(400), return_exceptions=True).collect())
        await until(begun.is_set)
        await end(runner)
        results = await found
        gate.set()
    died = [place for place, one in enumerate(results) if isinstance(one, WorkerDied)]
    assert [one for one in results if not isinstance(one, WorkerDied)] == [n for n in range(400) if n not in died]
    assert 20 in died
    assert len(ran) == len(set(ran)) == 400
    assert set(died) <= set(ran)


async def test_a_worker_that_is_killed_before_it_has_a_loop_ends() -> None:
    gate, begun = threading.Event(), threading.Event()

    def factory() -> asyncio.AbstractEventLoop:
        begun.set()
        gate.wait()
        return asyncio.new_event_loop()

    runner = runner_of(1, loop_factory=factory, start_timeout=0.05)
    start = asyncio.create_task(runner.start())
    await until(begun.is_set)
    with pytest.raises(StartupFailed, match="not ready within start_timeout"):
        await start
    gate.set()


async def test_signals_are_those_of_a_process_as_far_as_a_thread_can() -> None:
    async with runner_of(1) as runner:
        first = worker_of(runner)
        first.kill(signal.SIGSTOP)
        call = runner.submit(jobs.aecho, 1)
        first.kill(signal.SIGCONT)
        assert await call == 1
        with testing.stopped(runner):
            call = runner.submit(jobs.aecho, 2)
        assert await call == 2
        first.kill(signal.SIGTERM)
        await until(lambda: runner.statistics().restarts == 1 and runner.statistics().workers[0].state == "ready")
        assert await runner.run(jobs.aecho, 3) == 3
        first.kill()  # it has ended
        testing.kill(runner)
        assert await runner.run(jobs.aecho, 4) == 4
        last = worker_of(runner)
        last.kill()
        last.kill(signal.SIGSTOP)  # nobody would let it go on
        assert await runner.run(jobs.aecho, 5) == 5
        await asyncio.to_thread(last.join)
        assert runner.statistics().given_up == 0


async def test_die_ends_the_worker_of_the_call_and_not_the_program() -> None:
    async def adie() -> None:
        testing.die()

    async with runner_of(1) as runner:
        for fn in (testing.die, adie):
            with pytest.raises(WorkerDied):
                await runner.run(fn)
        assert await runner.run(jobs.echo, 1) == 1


async def test_a_channel_that_breaks_ends_its_worker(caplog: pytest.LogCaptureFixture) -> None:
    async with runner_of(1) as runner:
        found = worker_of(runner)
        call = runner.submit(asyncio.sleep, 3600)
        await asyncio.sleep(0)
        found.channel.send(-999, 0, None)  # no worker knows it
        with pytest.raises(WorkerDied):
            await call
        assert await runner.run(jobs.echo, 1) == 1
    assert "the channel of worker 0 broke" in caplog.text


# Options


def test_what_a_thread_cannot_keep_is_refused_in_words() -> None:
    cases = {
        "start_method says how processes are started": {"start_method": "spawn"},
        "max_message limits what is pickled": {"max_message": 10_000},
        "max_memory_per_worker needs processes": {"max_memory_per_worker": 1 << 30},
        "harden=True closes the processes of workers": {"harden": True},
    }
    for text, given in cases.items():
        with pytest.raises(ValueError, match=text):
            Runner(1, engine="threads", **given)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match='copy must be "never" or "pickle"'):
        ThreadsEngine(copy="deep")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cannot be ended"):
        LoopPoolExecutor(1, broken="pool", engine="threads")
    with pytest.raises(ValueError, match="mp_context starts processes"):
        LoopPoolExecutor(1, multiprocessing.get_context("spawn"), engine="threads")
    assert repr(ThreadsEngine()) == "percore.ThreadsEngine(copy='never')"


async def test_one_thread_at_a_time_is_said_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(choice, "_told", False)
    monkeypatch.setattr(gil, "has_gil", lambda: True)
    with pytest.warns(RuntimeWarning, match="only one thread runs at a time, because"):
        await _start_and_close()
    await _start_and_close()  # warnings are errors
    monkeypatch.setattr(gil, "has_gil", lambda: False)
    monkeypatch.setattr(choice, "_told", False)
    await _start_and_close()


async def _start_and_close() -> None:
    async with runner_of() as runner:
        assert await runner.run(jobs.echo, 1) == 1


def test_auto_is_threads_where_they_run_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    for has_gil, kind in ((True, type(None)), (False, ThreadsEngine)):
        monkeypatch.setattr(engines, "has_gil", lambda has_gil=has_gil: has_gil)
        assert type(engines.engine_of("auto")) is kind


def test_an_import_that_turns_the_gil_on_is_named(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    state = {"gil": False}
    monkeypatch.setattr(gil, "has_gil", lambda: state["gil"])
    watch = gil.GilWatch()
    watch.look()
    state["gil"] = True
    module = type(sys)("slow_extension")
    module.__file__ = "/nowhere/slow_extension.so"
    monkeypatch.setitem(sys.modules, "slow_extension", module)
    watch.look()
    watch.look()
    assert caplog.text.count("an import has turned the GIL on again") == 1
    assert "slow_extension" in caplog.text
    gil.GilWatch().look()  # it was on before
    assert caplog.text.count("turned the GIL on") == 1
    assert "free-threaded" in gil.one_at_a_time() or "PYTHON_GIL" in gil.one_at_a_time()


def test_an_executor_on_threads() -> None:
    thing = object()
    started: list[int] = []
    with LoopPoolExecutor(2, initializer=started.append, initargs=(1,), max_threads=1, engine="threads") as executor:
        assert executor.submit(jobs.echo, thing).result() is thing
        assert list(executor.map(jobs.aecho, [thing] * 3)) == [thing] * 3
        with pytest.raises(SystemExit):
            executor.submit(jobs.fail, SystemExit(3)).result()
        assert executor.submit(jobs.echo, 1).result() == 1
        assert len(executor.usage().processes) == 1
    assert started == [1, 1]


def test_an_engine_that_is_for_runners_alone_is_refused_by_executors() -> None:
    with pytest.raises(ValueError, match="is an engine for"):
        LoopPoolExecutor(1, engine=EngineChoice())


@pytest.mark.long
@pytest.mark.timeout(600)
async def test_kills_at_any_moment_lose_no_call_and_run_none_twice() -> None:
    """While threads switch as often as they can, and workers are killed all the time."""
    ran: dict[int, int] = {}
    lock = threading.Lock()

    def note(number: int) -> int:
        with lock:
            ran[number] = ran.get(number, 0) + 1
        return number

    async def anote(number: int) -> int:
        note(number)
        if number % 3 == 0:
            await asyncio.sleep(0)
        return number

    before, kills, count = sys.getswitchinterval(), 0, times(600, 100_000)
    sys.setswitchinterval(1e-6)
    try:
        async with runner_of(2, threads=2) as runner:
            calls = [asyncio.ensure_future(runner.run(anote if number % 2 else note, number)) for number in range(count)]
            mapped = asyncio.ensure_future(runner.map(note, range(count, 2 * count), return_exceptions=True).collect())
            while not all(call.done() for call in calls):
                await asyncio.sleep(0)
                if kills < count // 100:
                    kills += 1
                    with suppress(ProcessLookupError):
                        testing.kill(runner, kills % 2)
            results = [*await asyncio.gather(*calls, return_exceptions=True), *await mapped]
    finally:
        sys.setswitchinterval(before)
    for number, result in enumerate(results):
        assert result == number or isinstance(result, WorkerDied), result
        assert ran.get(number, 0) == 1 or (ran.get(number, 0) == 0 and isinstance(result, WorkerDied)), (number, result)
