"""LoopPoolExecutor(max_threads=1): plain functions run in the main threads of the workers, and nothing else differs."""

import concurrent.futures
import os
import signal
from concurrent.futures.process import BrokenProcessPool
from typing import Any

import pytest

import percore
from percore import LoopPoolExecutor
from tests import executor_jobs, jobs
from tests.contract.pipes import Gate, Log, gate, log
from tests.e2e.executors import context, lines, members_of

__all__ = ["context", "gate", "log"]

pytestmark = pytest.mark.warm_fork_server

NOTE = "With LoopPoolExecutor(max_threads=1) it runs the plain functions instead."


def test_signal_handlers_work_in_plain_functions(context: Any) -> None:
    with LoopPoolExecutor(2, context, max_threads=1) as executor:
        results = [executor.submit(executor_jobs.raise_by_signal) for _ in range(4)]
        assert [future.result() for future in results] == [("SIGUSR1", True)] * 4
        assert executor.submit(executor_jobs.run_a_loop).result() == "from its own loop"
        assert executor.submit(jobs.aecho, "a task").result() == "a task"


def test_elsewhere_the_error_says_where_they_work() -> None:
    with LoopPoolExecutor(1) as executor:
        error = executor.submit(executor_jobs.raise_by_signal).exception()
        assert isinstance(error, ValueError)
        assert error.__notes__[0].endswith(NOTE)
        assert executor.submit(executor_jobs.araise_by_signal).result() == ("SIGUSR1", True)
    with LoopPoolExecutor(1, max_threads=1) as executor:
        error = executor.submit(executor_jobs.araise_by_signal).exception()
        assert isinstance(error, ValueError)
        assert error.__notes__[0].endswith(NOTE)


async def test_in_a_runner_the_error_says_where_they_work() -> None:
    async with percore.Runner(1, threads=1) as runner:
        with pytest.raises(ValueError, match="main thread") as caught:
            await runner.run(executor_jobs.raise_by_signal)
        assert caught.value.__notes__[0].endswith(NOTE)
        assert await runner.run(executor_jobs.araise_by_signal) == ("SIGUSR1", True)


def test_the_loop_runs_beside_a_plain_function(log: Log, gate: Gate) -> None:
    with LoopPoolExecutor(1, max_threads=1) as executor:
        held = executor.submit(jobs.wait, log.path, gate.path, "held")
        lines(log, 1)
        assert executor.submit(jobs.aecho, "beside").result() == "beside"
        gate.open()
        assert held.result() == "held"


def test_a_handler_that_raises_after_its_call_costs_the_worker_alone() -> None:
    with LoopPoolExecutor(1, max_threads=1) as executor:
        pid = executor.submit(executor_jobs.leave_a_handler).result()
        os.kill(pid, signal.SIGUSR1)
        _wait_for_the_end(executor, pid)
        assert executor.submit(executor_jobs.pid).result() != pid


@pytest.mark.parametrize("takes_the_pipe", [False, True])
def test_k9_sigterm_drains_the_worker(takes_the_pipe: bool, log: Log, gate: Gate) -> None:
    with LoopPoolExecutor(1, max_threads=1) as executor:
        pid = executor.submit(executor_jobs.take_the_wakeup_fd if takes_the_pipe else executor_jobs.pid).result()
        held = executor.submit(jobs.wait, log.path, gate.path, "held")
        lines(log, 1)
        more = executor.submit(executor_jobs.pid)
        os.kill(pid, signal.SIGTERM)
        assert more.result() != pid
        gate.open()
        assert held.result() == "held"


def test_a_call_may_handle_sigterm_itself(log: Log) -> None:
    with LoopPoolExecutor(1, max_threads=1) as executor:
        pid = executor.submit(executor_jobs.take_sigterm, log.path).result()
        os.kill(pid, signal.SIGTERM)
        assert lines(log, 1) == ["handled"]
        assert executor.submit(executor_jobs.pid).result() == pid


def test_k6_a_lifespan_that_fails_does_not_wait_for_a_plain_function(log: Log, gate: Gate) -> None:
    with LoopPoolExecutor(1, max_threads=1, lifespan=executor_jobs.fragile) as executor:
        held = executor.submit(jobs.wait, log.path, gate.path)
        lines(log, 1)
        executor.submit(executor_jobs.end_the_lifespan).exception()
        assert isinstance(held.exception(), BrokenProcessPool)
        assert executor.submit(jobs.echo, "afterwards").result() == "afterwards"


def test_what_no_worker_can_begin_at_once_can_be_cancelled(log: Log, gate: Gate) -> None:
    with LoopPoolExecutor(2, max_threads=1) as executor:
        futures = [executor.submit(jobs.wait, log.path, gate.path) for _ in range(30)]
        lines(log, 2)
        cancelled = [future.cancel() for future in futures]
        gate.open()
        assert sum(cancelled) == 28


def test_short_calls_are_queued_ahead(log: Log, gate: Gate) -> None:
    with LoopPoolExecutor(1, max_threads=1) as executor:
        executor.submit(jobs.echo, 1).result()
        jobs_of_it = executor._portal.jobs
        assert jobs_of_it is not None
        jobs_of_it.supervisor.functions.of(jobs.echo).cost.seconds = 0.001  # as if measured
        held = executor.submit(jobs.wait, log.path, gate.path)
        lines(log, 1)
        short = [executor.submit(jobs.echo, number) for number in range(10)]
        executor.submit(jobs.aecho, 1).result()  # handed over after them
        running = [future.running() for future in short]
        gate.open()
        assert running == [True] * 4 + [False] * 6
        assert held.exception() is None
        assert [future.result() for future in short] == list(range(10))


def test_libraries_find_the_processes(log: Log, gate: Gate) -> None:
    executor = LoopPoolExecutor(2, max_threads=1)
    assert (executor._max_workers, executor._processes) == (2, {})
    with executor:
        held = [executor.submit(jobs.wait, log.path, gate.path) for _ in range(2)]
        lines(log, 2)  # both are there
        gate.open()
        concurrent.futures.wait(held)
        processes = executor._processes
        assert set(processes) == {member.pid for member in members_of(executor)}
        assert all(process.is_alive() for process in processes.values())
        first, second = processes.values()
        first.kill()
        first.join()
        second.join(0)
        assert (first.is_alive(), second.is_alive()) == (False, True)
        second.terminate()
        second.join()
        assert executor.submit(jobs.echo, 1).result() == 1
    assert not any(process.is_alive() for process in processes.values())


def _wait_for_the_end(executor: LoopPoolExecutor, pid: int) -> None:
    process = executor._processes.get(pid)
    if process is not None:
        process.join()
