"""LoopPoolExecutor: what is set up in its workers, how they come and go, and what their deaths cost."""

import concurrent.futures
import functools
import gc
import multiprocessing
import os
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager, suppress
from typing import Any

import pytest

import percore
from percore import LoopPoolExecutor
from tests import executor_jobs, jobs
from tests.contract.pipes import Gate, Log, gate, log
from tests.e2e.executors import context, end_helpers, lines, members_of, mp_context
from tests.rows import repeated_rows

__all__ = ["context", "gate", "log", "mp_context"]

# Since Python 3.12 a fork of a process that has threads, as an executor's always is, is warned of.
pytestmark = pytest.mark.warm_fork_server


def traceback_of(error: BaseException | None) -> str:
    texts = []
    while error is not None:
        texts.append(str(error))
        error = error.__cause__
    return "\n".join(texts)


@contextmanager
def gc_held_back() -> Iterator[None]:
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


# What is set up


def test_the_initializer_runs_once_in_each_worker(context: Any) -> None:
    with LoopPoolExecutor(2, context, executor_jobs.initialize, ("name", 7)) as executor:
        assert set(executor.map(executor_jobs.initialized, ["name"] * 20)) == {(7,)}


def test_initargs_may_be_queues_of_multiprocessing(mp_context: Any) -> None:
    queue = mp_context.Queue()
    with LoopPoolExecutor(1, mp_context, executor_jobs.initialize, ("queue", queue)) as executor:
        executor.submit(executor_jobs.put, "through the queue").result()
        assert queue.get() == "through the queue"
    queue.close()
    queue.join_thread()


def test_a_lock_among_the_initargs_chooses_the_default_context() -> None:
    # As tqdm.contrib.concurrent.process_map gives its lock to each worker.
    lock = multiprocessing.RLock()
    with LoopPoolExecutor(1, initializer=executor_jobs.initialize, initargs=("lock", lock)) as executor:
        assert executor.submit(jobs.echo, 1).result() == 1
    del lock
    end_helpers()


def test_a_fork_of_the_program_collects_none_of_its_garbage() -> None:
    # A collection there would run finalizers of the program's objects, and write to every page that the two share.
    with gc_held_back(), LoopPoolExecutor(1, multiprocessing.get_context("fork")) as executor:
        executor_jobs.leave_garbage()
        assert executor.submit(executor_jobs.garbage_collected).result() == []


def test_tqdm_maps_over_it(monkeypatch: pytest.MonkeyPatch) -> None:
    from tqdm.contrib import concurrent as of_tqdm

    monkeypatch.setattr("tqdm.tqdm.monitor_interval", 0)
    monkeypatch.setattr("tqdm.std.TqdmDefaultWriteLock.mp_lock", multiprocessing.RLock(), raising=False)
    map_over: Any = vars(of_tqdm)["_executor_map"]
    results = map_over(LoopPoolExecutor, jobs.echo, range(10), max_workers=2, lock_name="mp_lock", disable=True)
    assert results == list(range(10))
    monkeypatch.undo()
    gc.collect()  # the lock takes its name away, before the resource tracker does
    end_helpers()


def test_each_thread_is_initialized_and_the_lifespan_is_there(log: Log) -> None:
    with LoopPoolExecutor(
        1,
        max_threads=1,
        thread_initializer=executor_jobs.initialize_thread,
        thread_initargs=(log.path, "thread"),
        lifespan=executor_jobs.session,
    ) as executor:
        assert list(executor.map(jobs.echo, range(5))) == list(range(5))
        assert executor.submit(executor_jobs.of_thread).result() == "thread"
        assert executor.submit(executor_jobs.session_state).result() == "session"
        assert executor.submit(executor_jobs.asession_state).result() == "session"
    assert log.rest() == ["thread"]


@pytest.mark.parametrize("broken", ["worker", "pool"])
@pytest.mark.parametrize("what", ["initializer", "thread_initializer"])
def test_b1_a_failing_initializer_breaks_the_executor(what: str, broken: Any) -> None:
    options: dict[str, Any] = {what: executor_jobs.fail_to_initialize}
    with LoopPoolExecutor(2, broken=broken, **options) as executor:
        futures = [executor.submit(jobs.echo, 0)]
        with suppress(BrokenProcessPool):  # the first worker may fail before the last of them is submitted
            for number in range(1, 30):
                futures.append(executor.submit(jobs.echo, number))  # noqa: PERF401  # the others are to be kept then
        for future in futures:
            error = future.exception()
            assert isinstance(error, BrokenProcessPool)
            assert "the initializer's own" in traceback_of(error)
            assert "in fail_to_initialize" in traceback_of(error)
        with pytest.raises(BrokenProcessPool) as caught:
            executor.submit(jobs.echo, 1)
        assert "in fail_to_initialize" in traceback_of(caught.value)
        assert executor._broken


def test_b1_in_processes_of_multiprocessing(mp_context: Any) -> None:
    with LoopPoolExecutor(2, mp_context, executor_jobs.fail_to_initialize, (1,)) as executor:
        error = executor.submit(jobs.echo, 1).exception()
        assert isinstance(error, BrokenProcessPool)
        assert "in fail_to_initialize" in traceback_of(error)


def test_b1_a_lifespan_that_fails_or_a_worker_that_dies_at_once(context: Any) -> None:
    for lifespan in (jobs.no_resource, jobs.deadly):
        with LoopPoolExecutor(2, context, lifespan=lifespan) as executor:
            assert isinstance(executor.submit(jobs.echo, 1).exception(), BrokenProcessPool)
            with pytest.raises(BrokenProcessPool):
                executor.submit(jobs.echo, 1)


def test_what_cannot_be_handed_to_a_worker_breaks_the_executor() -> None:
    lock = threading.Lock()
    cannot = "cannot be pickled (TypeError: cannot pickle '_thread.lock' object)"
    given: list[tuple[dict[str, Any], str]] = [
        ({"initargs": (1, lock), "initializer": print}, "initargs: print(): argument 2 is a lock, which " + cannot),
        ({"initializer": lambda: lock}, f"initializer {cannot}; use a function of a module, and give what it needs as arguments"),
        ({"lifespan": lambda: lock}, f"lifespan {cannot}; use a function of a module, and make in it what cannot be sent"),
        ({"thread_initializer": print, "thread_initargs": (lock,)}, f"thread_initializer {cannot}; use a function of a module"),
    ]
    for options, said in given:
        with LoopPoolExecutor(1, **options) as executor:
            error = executor.submit(jobs.echo, 1).exception()
            assert isinstance(error, BrokenProcessPool)
            assert str(error).startswith(said)
            assert isinstance(error.__cause__, TypeError)


@pytest.mark.parametrize("max_threads", [1, 3])
def test_max_threads_bounds_what_runs_at_once(max_threads: int, log: Log, gate: Gate) -> None:
    with LoopPoolExecutor(1, max_threads=max_threads) as executor:
        futures = [executor.submit(executor_jobs.overlap, log.path, gate.path) for _ in range(4)]
        assert sorted(lines(log, max_threads)) == [str(number + 1) for number in range(max_threads)]
        gate.open()
        assert max(future.result() for future in futures) == max_threads


@pytest.mark.parametrize(
    ("fn", "limit"),
    [
        *[(executor_jobs.pid, 1), (jobs.awhere, 3)],
        *repeated_rows((executor_jobs.pid, 3), (jobs.awhere, 1)),
        *repeated_rows(*((fn, limit) for fn in (executor_jobs.pid, jobs.awhere) for limit in (2, 7))),
    ],
)
def test_t3_a_worker_begins_no_more_calls_than_it_may(limit: int, fn: Callable[[], Any]) -> None:
    with LoopPoolExecutor(2, max_tasks_per_child=limit, max_threads=2) as executor:
        futures: list[Any] = [executor.submit(fn) for _ in range(30)]
        found = [getattr(future.result(), "pid", future.result()) for future in futures]
    assert max(found.count(pid) for pid in set(found)) <= limit


def test_t3_with_spawn_and_fork() -> None:
    with LoopPoolExecutor(1, multiprocessing.get_context("spawn"), max_tasks_per_child=2, broken="pool") as executor:
        found = [executor.submit(executor_jobs.pid).result() for _ in range(5)]
    assert [found.count(pid) for pid in dict.fromkeys(found)] == [2, 2, 1]
    with pytest.raises(ValueError, match="fork"):
        LoopPoolExecutor(1, multiprocessing.get_context("fork"), max_tasks_per_child=2)
    end_helpers()


def test_t3_a_worker_that_has_made_way_is_no_more_among_the_processes(log: Log, gate: Gate) -> None:
    # CPython's own test of `max_tasks_per_child` counts them. Libraries expect no more of them than `max_workers`.
    lifespan = functools.partial(executor_jobs.slow_to_leave, log.path, gate.path)
    with LoopPoolExecutor(1, max_tasks_per_child=1, lifespan=lifespan) as executor:
        first, second = (executor.submit(executor_jobs.pid).result() for _ in range(2))
        found = set(executor._processes)  # while the first worker waits at the gate, and perhaps the second one, too
        assert (first != second, first in found, len(found) <= 1) == (True, False, True)
        gate.open()


# Deaths


def test_k2_a_death_fails_what_had_begun_there_and_nothing_else(context: Any, log: Log, gate: Gate) -> None:
    with LoopPoolExecutor(2, context, max_threads=1) as executor:
        held = [executor.submit(jobs.wait, log.path, gate.path, number) for number in range(2)]
        lines(log, 2)
        waiting = [executor.submit(jobs.echo, number) for number in range(40)]
        member = members_of(executor)[0]
        assert member.pid is not None
        os.kill(member.pid, signal.SIGKILL)
        done, rest = concurrent.futures.wait(held, return_when=concurrent.futures.FIRST_COMPLETED)
        (dead,) = done
        error = dead.exception()
        assert isinstance(error, percore.WorkerDied)
        assert (error.pid, error.signal, error.started) == (member.pid, "SIGKILL", True)
        gate.open()
        assert [future.result() for future in rest] == [1 if held[0] in done else 0]
        assert [future.result() for future in waiting] == list(range(40))
        assert executor._broken is False


def test_k2_calls_that_kill_their_worker_heal_again_and_again() -> None:
    with LoopPoolExecutor(2) as executor:
        for code in (3, 4, 5):
            error = executor.submit(executor_jobs.exit_now, code).exception()
            assert isinstance(error, percore.WorkerDied)
            assert error.exitcode == code
            assert list(executor.map(jobs.echo, range(20))) == list(range(20))


def test_in_a_pool_one_death_breaks_it_all(context: Any, log: Log, gate: Gate) -> None:
    with LoopPoolExecutor(2, context, max_threads=1, broken="pool") as executor:
        held = executor.submit(jobs.wait, log.path, gate.path)
        lines(log, 1)
        others = [executor.submit(jobs.wait, log.path, gate.path) for _ in range(30)]
        lines(log, 1)  # both workers run a call
        dying: concurrent.futures.Future[Any] = executor.submit(executor_jobs.exit_now, 3)
        dead = members_of(executor)[0]
        assert dead.pid is not None
        os.kill(dead.pid, signal.SIGTERM)  # which kills there
        for future in (held, dying, *others):
            assert isinstance(future.exception(), BrokenProcessPool)
        with pytest.raises(BrokenProcessPool) as caught:
            executor.submit(jobs.echo, 1)
        for error in (held.exception(), dying.exception(), caught.value):
            assert error is not None
            assert f"(pid {dead.pid}) terminated abruptly by SIGTERM\n" in str(error.__cause__)
        assert executor._broken


@pytest.mark.parametrize("value", [executor_jobs.FailsWhenLoaded(), executor_jobs.DiesWhenLoaded()])
def test_in_a_pool_arguments_that_cannot_be_unpickled_break_it(value: Any, capfd: pytest.CaptureFixture[str]) -> None:
    with LoopPoolExecutor(1, broken="pool") as executor:
        assert isinstance(executor.submit(jobs.echo, value).exception(), BrokenProcessPool)
        with pytest.raises(BrokenProcessPool):
            executor.submit(jobs.echo, 1)


def test_in_a_pool_a_result_that_cannot_be_unpickled_breaks_it() -> None:
    with LoopPoolExecutor(1, broken="pool") as executor:
        error = executor.submit(executor_jobs.fails_when_loaded).exception()
        assert isinstance(error, BrokenProcessPool)
        assert isinstance(error.__cause__, LookupError)


def test_sigterm_drains_a_worker_and_nothing_fails(log: Log, gate: Gate) -> None:
    with LoopPoolExecutor(1, max_threads=1) as executor:
        held = executor.submit(jobs.wait, log.path, gate.path, "held")
        lines(log, 1)
        more = [executor.submit(jobs.echo, number) for number in range(10)]
        (member,) = members_of(executor)
        assert member.pid is not None
        os.kill(member.pid, signal.SIGTERM)
        assert [future.result() for future in more] == list(range(10))
        gate.open()
        assert held.result() == "held"


@pytest.mark.parametrize("broken", ["worker", "pool"])
def test_kill_workers(broken: Any, log: Log, gate: Gate) -> None:
    executor = LoopPoolExecutor(2, max_threads=1, broken=broken)
    executor.kill_workers()  # of which there are none yet
    executor = LoopPoolExecutor(2, max_threads=1, broken=broken)
    held = [executor.submit(jobs.wait, log.path, gate.path) for _ in range(40)]
    lines(log, 2)
    executor.kill_workers()
    concurrent.futures.wait(held)
    assert isinstance(held[0].exception(), BrokenProcessPool)
    assert held[-1].cancelled()
    with pytest.raises(RuntimeError):
        executor.submit(jobs.echo, 1)
    executor.shutdown()


def test_terminate_workers(log: Log, gate: Gate) -> None:
    with LoopPoolExecutor(1, max_threads=1, broken="pool") as executor:
        held = executor.submit(jobs.wait, log.path, gate.path)
        lines(log, 1)
        executor.terminate_workers()
        assert isinstance(held.exception(), BrokenProcessPool)
    with LoopPoolExecutor(1, max_threads=1) as executor:
        held = executor.submit(jobs.wait, log.path, gate.path, "drained")
        lines(log, 1)
        executor.terminate_workers()
        gate.open()
        assert held.result() == "drained"


def test_workers_of_multiprocessing_may_have_children(mp_context: Any) -> None:
    with LoopPoolExecutor(1, mp_context) as executor:
        assert executor.submit(nested).result() == 5


def nested() -> Any:
    with LoopPoolExecutor(1) as executor:
        return executor.submit(jobs.add, 2, 3).result()
