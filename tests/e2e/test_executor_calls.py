"""LoopPoolExecutor: calls, futures and maps, as concurrent.futures promises them."""

import asyncio
import concurrent.futures
import gc
import itertools
import os
import threading
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures.process import _RemoteTraceback
from typing import Any

import pytest

import percore
from percore import LoopPoolExecutor
from percore._attach.programs import ProgramGone, read
from percore._common.system import HAS_MEMFD
from tests import executor_jobs, jobs
from tests.contract.pipes import Gate, Log, gate, log
from tests.e2e.executors import lines
from tests.internals import is_at_rest
from tests.waiting import until

__all__ = ["gate", "log"]

pytestmark = pytest.mark.warm_fork_server


@pytest.fixture
def executor() -> Iterator[LoopPoolExecutor]:
    with LoopPoolExecutor(2, max_threads=2) as executor:
        yield executor


def test_it_is_an_executor(executor: LoopPoolExecutor) -> None:
    assert isinstance(executor, concurrent.futures.Executor)
    future = executor.submit(jobs.add, 1, 2, scale=3)
    assert type(future) is concurrent.futures.Future
    assert future.result() == 9
    assert executor.submit(jobs.aadd, 1, right=2).result() == 3
    assert executor.submit(jobs.later, 4).result() == 4
    assert repr(executor) == "<percore.LoopPoolExecutor max_workers=2 open>"
    executor.shutdown()
    assert repr(executor) == "<percore.LoopPoolExecutor max_workers=2 shut down>"


def test_its_names_are_those_of_the_standard_library() -> None:
    with pytest.raises(ValueError, match=r"^max_workers must be greater than 0$"):
        LoopPoolExecutor(0)
    with pytest.raises(ValueError, match=r"^max_workers must be greater than 0$"):
        LoopPoolExecutor(max_workers=-1)
    with pytest.raises(TypeError, match=r"^initializer must be a callable$"):
        LoopPoolExecutor(1, None, 3)  # type: ignore[arg-type]
    for name in ("initializer", "thread_initializer"):
        with pytest.raises(TypeError, match=f"^{name} must be a plain function, not an async one"):
            LoopPoolExecutor(1, **{name: jobs.aecho})  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"^max_tasks_per_child must be an integer$"):
        LoopPoolExecutor(1, max_tasks_per_child=1.5)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^max_tasks_per_child must be >= 1$"):
        LoopPoolExecutor(1, max_tasks_per_child=0)
    with pytest.raises(ValueError, match="max_threads"):
        LoopPoolExecutor(1, max_threads=0)
    with pytest.raises(TypeError, match="get_context"):
        LoopPoolExecutor(1, "spawn")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match='"worker" or "pool"'):
        LoopPoolExecutor(broken="never")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="lifespan"):
        LoopPoolExecutor(lifespan=3)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="belongs to the process"):
        LoopPoolExecutor(1).__reduce__()


@pytest.mark.parametrize(
    "error", [ValueError(3), SystemExit(3), KeyboardInterrupt("k"), GeneratorExit(), StopIteration(5), asyncio.CancelledError("c")]
)
def test_every_exception_arrives_as_itself(executor: LoopPoolExecutor, error: BaseException) -> None:
    for fn in (jobs.fail, jobs.afail):
        raised = executor.submit(fn, error).exception()
        assert raised is not None
        if fn is jobs.fail or not isinstance(error, StopIteration):  # PEP 479
            assert (type(raised), raised.args) == (type(error), error.args)
        end = raised
        while end.__cause__ is not None:
            end = end.__cause__
        assert type(end) is _RemoteTraceback
        assert "in fail" in str(end) or "in afail" in str(end)
    assert executor.submit(jobs.echo, 1).result() == 1


def test_what_cannot_travel_fails_its_future_alone(executor: LoopPoolExecutor) -> None:
    lock = threading.Lock()
    assert isinstance(executor.submit(jobs.echo, lock).exception(), TypeError)
    assert isinstance(executor.submit(jobs.lock, 1).exception(), TypeError)
    assert "make one in each worker" in str(executor.submit(jobs.lock, 1).exception().__notes__)  # type: ignore[union-attr]
    assert isinstance(executor.submit(executor_jobs.numbers).exception(), TypeError)
    assert isinstance(executor.submit(3).exception(), TypeError)  # type: ignore[call-overload]
    assert isinstance(executor.submit(jobs.echo, executor_jobs.FailsWhenLoaded()).exception(), LookupError)
    assert isinstance(executor.submit(executor_jobs.fails_when_loaded).exception(), percore.RemoteError)
    assert executor.submit(jobs.echo, 1).result() == 1


def test_a_call_that_waits_can_be_cancelled_and_one_that_runs_cannot(log: Log, gate: Gate) -> None:
    with LoopPoolExecutor(1, max_threads=1) as executor:
        first = executor.submit(jobs.wait, log.path, gate.path, "first")
        asyncio.run(log.next())
        waiting = [executor.submit(jobs.tell, log.path, place) for place in range(20)]
        assert first.running()
        assert not first.cancel()
        assert not waiting[-1].running()
        cancelled = [future for future in waiting if future.cancel()]
        assert waiting[-1] in cancelled
        assert waiting[-1].cancelled()
        gate.open()
        assert first.result() == "first"
        done, _ = concurrent.futures.wait(waiting)
        assert done == set(waiting)
        told = [future.result() for future in waiting if not future.cancelled()]
        assert told == sorted(told)
        assert len(told) == 20 - len(cancelled)


def test_callbacks_may_do_anything(executor: LoopPoolExecutor, caplog: pytest.LogCaptureFixture) -> None:
    results: concurrent.futures.Future[int] = concurrent.futures.Future()

    def again(future: concurrent.futures.Future[int]) -> None:  # as joblib dispatches its batches
        if future.result() < 20:
            executor.submit(jobs.add, future.result(), 1).add_done_callback(again)
        else:
            results.set_result(future.result())
        if future.result() == 5:
            raise SystemExit("of a callback")

    executor.submit(jobs.echo, 0).add_done_callback(again)
    assert results.result() == 20
    assert "a callback of" in caplog.text


def test_whoever_ends_a_future_himself_costs_nobody_else(log: Log, gate: Gate) -> None:
    with LoopPoolExecutor(1, max_threads=1) as executor:
        executor.submit(jobs.wait, log.path, gate.path)
        asyncio.run(log.next())
        waiting = [executor.submit(jobs.echo, place) for place in range(20)]
        waiting[-2].set_result("his own")
        gate.open()
        assert waiting[-1].result() == 19
        assert waiting[-2].result() == "his own"


def test_a_callback_may_shut_it_down(executor: LoopPoolExecutor) -> None:
    ended = threading.Event()

    def end(_: Any) -> None:
        executor.shutdown()
        ended.set()

    executor.submit(jobs.echo, 0).add_done_callback(end)
    ended.wait()
    with pytest.raises(RuntimeError, match="cannot schedule new futures after shutdown"):
        executor.submit(jobs.echo, 1)


def test_futures_of_two_executors_are_waited_for_together(executor: LoopPoolExecutor, log: Log, gate: Gate) -> None:
    with concurrent.futures.ThreadPoolExecutor(1) as other:
        futures: dict[Any, str] = {executor.submit(jobs.echo, 1): "ours", other.submit(jobs.echo, 2): "theirs"}
        assert {futures[future] for future in concurrent.futures.as_completed(futures)} == {"ours", "theirs"}
        held = executor.submit(jobs.wait, log.path, gate.path)
        done, rest = concurrent.futures.wait([held, *futures], return_when=concurrent.futures.FIRST_COMPLETED)
        assert (done, rest) == (set(futures), {held})
        with pytest.raises(TimeoutError):
            held.result(timeout=0)
        gate.open()
        held.result()


def test_nothing_holds_arguments_or_results(executor: LoopPoolExecutor) -> None:
    adder = jobs.Adder(1)
    gone = threading.Event()
    watch = weakref.ref(adder, lambda _: gone.set())
    executor.submit(jobs.echo, adder).result()
    del adder
    gc.collect()
    assert gone.wait(20)
    assert watch() is None
    for result in executor.map(jobs.Adder, range(3)):
        freed = threading.Event()
        reference = weakref.ref(result, lambda _, freed=freed: freed.set())  # type: ignore[misc]  # mypy cannot infer it
        del result
        assert freed.wait(20)  # without a GIL when the thread that has made it runs again
        assert reference() is None


# Maps


def test_map(executor: LoopPoolExecutor) -> None:
    assert list(executor.map(jobs.add, range(10), range(20))) == [2 * number for number in range(10)]
    assert list(executor.map(jobs.aadd, range(10), range(10), chunksize=4)) == [2 * number for number in range(10)]
    for size in (1, 3, 10, 100):
        assert list(executor.map(jobs.add, range(10), range(10), chunksize=size)) == [2 * number for number in range(10)]
    assert list(executor.map(lambda number: number + 1, range(5), chunksize=2)) == [1, 2, 3, 4, 5]
    assert list(executor.map(jobs.add)) == []


def test_a_map_pickles_its_function_once_and_lets_go_of_it(executor: LoopPoolExecutor) -> None:
    counted = CountsPickling()
    gone = threading.Event()
    watch = weakref.ref(counted, lambda _: gone.set())
    assert list(executor.map(counted, range(100))) == list(range(100))
    assert counted.times == 1
    first = executor.map(counted, range(100))
    assert next(first) == 0
    del first  # what waits still has it
    assert list(executor.map(counted, range(3))) == [0, 1, 2]
    del counted
    gc.collect()
    executor.submit(jobs.echo, 1).result()
    assert gone.wait(20)
    assert watch() is None
    with pytest.raises(TypeError):
        list(executor.map(CountsPickling(threading.Lock()), range(3)))


class CountsPickling:
    def __init__(self, lock: Any = None) -> None:
        self.times = 0
        self.lock = lock

    def __getstate__(self) -> dict[str, Any]:
        self.times += 1
        return {"times": 0, "lock": self.lock}

    def __call__(self, value: int) -> int:
        return value


def test_map_checks_when_it_is_called(executor: LoopPoolExecutor) -> None:
    with pytest.raises(ValueError, match="chunksize must be >= 1"):
        executor.map(jobs.echo, [1], chunksize=0)
    with pytest.raises(ValueError, match="buffersize must be None or > 0"):
        executor.map(jobs.echo, [1], buffersize=0)
    with pytest.raises(TypeError, match="buffersize must be an integer or None"):
        executor.map(jobs.echo, [1], buffersize="1")  # type: ignore[call-overload]


def test_a_map_raises_the_first_error_at_its_place(executor: LoopPoolExecutor) -> None:
    results = executor.map(divmod, [1, 1, 1, 1], [2, 3, 0, 5])
    assert [next(results), next(results)] == [(0, 1), (0, 1)]
    with pytest.raises(ZeroDivisionError):
        next(results)
    assert list(results) == []
    with pytest.raises(TimeoutError):
        list(executor.map(jobs.echo, [1], timeout=-1))


@pytest.mark.parametrize("chunksize", [1, 3])
def test_a_bounded_map_takes_one_more_for_each_result(executor: LoopPoolExecutor, chunksize: int) -> None:
    taken: list[int] = []

    def numbers() -> Iterator[int]:
        for number in itertools.count():
            taken.append(number)
            yield number

    results = executor.map(jobs.echo, numbers(), buffersize=4, chunksize=chunksize)
    assert len(taken) == 4 * chunksize
    assert next(results) == 0
    assert len(taken) == 5 * chunksize
    assert list(itertools.islice(results, 20)) == list(range(1, 21))
    results.close()  # type: ignore[attr-defined]


def test_the_results_of_a_map_do_not_hold_the_executor() -> None:
    executor = LoopPoolExecutor(1)
    results = executor.map(jobs.echo, range(10))
    thread = executor._portal.thread
    collected = weakref.ref(executor)
    del executor
    gc.collect()
    assert collected() is None
    assert list(results) == list(range(10))
    assert thread is not None
    thread.join()


# Statistics and usage


def roles(usage: percore.Usage) -> list[str]:
    return [process.role for process in usage.processes]


def test_statistics_count_what_runs_and_what_waits(log: Log, gate: Gate) -> None:
    with LoopPoolExecutor(1, max_threads=1) as executor:
        assert executor.statistics() == percore.Statistics(0, 0, 0, 0, 0, 0, ())
        held = [executor.submit(jobs.wait, log.path, gate.path, place) for place in range(20)]
        lines(log, 1)
        counted = executor.statistics()
        assert (counted.running, counted.queued, counted.done) == (1, 19, 0)
        assert [worker.state for worker in counted.workers] == ["ready"]
        assert [(one.name, one.begun, one.ended, one.running) for one in counted.functions] == [("tests.jobs.wait", 1, 0, 1)]
        assert [one.name for one in counted.workers[0].current] == ["tests.jobs.wait"]
        seen: concurrent.futures.Future[percore.Statistics] = concurrent.futures.Future()
        held[-1].add_done_callback(lambda _: seen.set_result(executor.statistics()))
        gate.open()
        assert seen.result().done == 20  # asked in the thread of the loop
        (function,) = seen.result().functions
        assert (function.begun, function.ended, function.failed, function.running) == (20, 20, 0, 0)
        assert function.wait is not None
        with pytest.raises(ValueError, match="broken"):
            executor.submit(jobs.fail, ValueError("broken")).result()
        assert [one.failed for one in executor.statistics().functions] == [0, 1]
    for ask in (executor.statistics, executor.usage):
        with pytest.raises(RuntimeError, match=r"^cannot schedule new futures after shutdown$"):
            ask()


def test_usage_of_the_processes(log: Log, gate: Gate) -> None:
    with LoopPoolExecutor(1) as executor:
        assert roles(executor.usage()) == ["supervisor"]
        held = executor.submit(jobs.wait, log.path, gate.path)
        lines(log, 1)
        used = executor.usage()
        refused: concurrent.futures.Future[percore.Usage] = concurrent.futures.Future()
        held.add_done_callback(lambda _: refused.set_exception(_error_of(executor.usage)))
        gate.open()
        assert roles(used) == ["supervisor", "fork server", "worker 0"]
        with pytest.raises(RuntimeError, match="Call it in another thread"):
            refused.result()


def _error_of(fn: Callable[[], Any]) -> BaseException | None:
    with pytest.raises(RuntimeError) as caught:
        fn()
    return caught.value


@pytest.mark.parametrize("lifespan", [None, jobs.no_resource])
def test_usage_is_answered_whatever_becomes_of_the_executor(lifespan: Any) -> None:
    executor = LoopPoolExecutor(1, lifespan=lifespan)
    executor.submit(jobs.echo, 1)
    with concurrent.futures.ThreadPoolExecutor(8) as threads:
        asked = [threads.submit(executor.usage) for _ in range(8)]
        executor.shutdown()
        for future in asked:
            if future.exception() is None:
                assert roles(future.result())[0] == "supervisor"
            else:
                assert isinstance(future.exception(), RuntimeError)


# Threads and loops


def test_sixteen_threads_and_two_loops_use_one_executor(executor: LoopPoolExecutor) -> None:  # noqa: C901  # all of it at once
    counts: dict[str, int] = dict.fromkeys(["results", "cancelled"], 0)
    lock = threading.Lock()
    failures: list[BaseException] = []

    def count(what: str, number: int) -> None:
        with lock:
            counts[what] += number

    def submitting(place: int) -> None:
        futures = [executor.submit(jobs.add if number % 2 else jobs.aadd, place, number) for number in range(200)]
        count("cancelled", sum(future.cancel() for future in futures[::5]))
        for number, future in enumerate(futures):
            if not future.cancelled():
                assert future.result() == place + number
                count("results", 1)

    async def awaiting(place: int) -> None:
        loop = asyncio.get_running_loop()

        async def one(number: int) -> None:
            future = loop.run_in_executor(executor, jobs.add, place, number)
            if number % 5 == 0:
                future.cancel()
                count("cancelled", 1)
            else:
                assert await future == place + number
                count("results", 1)

        async with asyncio.TaskGroup() as group:
            for number in range(200):
                group.create_task(one(number))

    def guarded(fn: Any, *args: Any) -> None:
        try:
            fn(*args)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=guarded, args=(submitting, place)) for place in range(16)]
    threads += [threading.Thread(target=guarded, args=(lambda: asyncio.run(awaiting(100)),)) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert counts["results"] + counts["cancelled"] == 18 * 200
    assert executor.submit(jobs.echo, 1).result() == 1


async def test_a_loop_awaits_its_futures() -> None:
    with LoopPoolExecutor(1) as executor:
        assert await asyncio.wrap_future(executor.submit(jobs.aecho, 1)) == 1
        loop = asyncio.get_running_loop()
        assert await asyncio.gather(*(loop.run_in_executor(executor, jobs.add, number, 1) for number in range(50))) == list(
            range(1, 51)
        )
        with pytest.raises(LookupError):
            await loop.run_in_executor(executor, jobs.fail, LookupError())
        if type(loop).__module__.startswith("asyncio"):
            with pytest.raises(TypeError, match="ThreadPoolExecutor"):
                loop.set_default_executor(executor)  # type: ignore[arg-type, unused-ignore]


@pytest.mark.asyncio_only
async def test_a_handler_of_aiohttp_uses_it() -> None:
    from aiohttp import ClientSession, web

    from tests.serving import answering, serving

    with LoopPoolExecutor(1) as executor:

        async def handle(request: web.Request) -> web.Response:
            total = await asyncio.get_running_loop().run_in_executor(executor, jobs.add, 1, int(request.query["number"]))
            return web.Response(text=str(total))

        async with (
            serving(answering("/", handle)) as url,
            ClientSession() as session,
            session.get(f"{url}/?number=4") as response,
        ):
            assert await response.text() == "5"


@pytest.mark.skipif(not HAS_MEMFD, reason="pages are memfds")
def test_percore_top_can_show_it(executor: LoopPoolExecutor) -> None:
    def pages() -> list[dict[str, Any]]:
        try:
            return read(os.getpid())
        except ProgramGone:
            return []

    while not pages():
        executor.submit(jobs.echo, 1).result()
    executor.shutdown()
    assert not pages()


async def test_a_result_that_the_program_drops_is_freed_although_no_call_follows(executor: LoopPoolExecutor) -> None:
    """Without a GIL, the executor's thread frees what it has made, and it would sleep until the next call."""
    result = executor.submit(executor_jobs.heavy).result()
    assert executor._portal.jobs is not None
    await until(is_at_rest, executor._portal.jobs.supervisor)  # from now on nothing else wakes that thread
    watched = weakref.ref(result)
    del result
    await until(lambda: watched() is None)
