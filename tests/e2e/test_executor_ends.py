"""LoopPoolExecutor: how it ends, how programs end that have one, and what is left then: nothing."""

import contextlib
import functools
import gc
import os
import re
import signal
import threading
import warnings
import weakref
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

import pytest

from percore import LoopPoolExecutor
from percore._common.system import default_start_method
from percore._executor import portal
from tests import executor_jobs, jobs
from tests.contract.pipes import Gate, Log, gate, log
from tests.e2e.executors import lines
from tests.e2e.family import Family
from tests.e2e.scripts import output_of, python
from tests.faults import Program
from tests.rows import repeats

__all__ = ["gate", "log"]

pytestmark = pytest.mark.warm_fork_server

HARD = 5.0

ENDS = ("percore", "fork", *repeats("forkserver", "spawn"))
"""A program ends with multiprocessing's children in the same way, however they were started. What a fork inherits is the most."""
ALONE = ("percore", *repeats("fork", "forkserver", "spawn"))
"""For an end that another story tells with multiprocessing's children as well."""


def told(story: str, method: str, folder: Path) -> list[str]:
    """What a program says that ends well, complains of nothing and leaves nobody behind."""
    family = Family()
    with family.marked():
        program = Program(story, method, stderr=folder / "stderr", module="tests.e2e.executor_programs")
    lines = []
    with program:
        while line := program.line():
            lines.append(line)
        assert program.end() == 0, program.stderr
        assert family.wait_gone(HARD) == []
    assert program.stderr == ""
    return lines


# In a program that goes on


@pytest.mark.parametrize("cancel_futures", [False, True])
def test_x1_each_future_has_ended_when_shutdown_returns(cancel_futures: bool) -> None:
    executor = LoopPoolExecutor(2, max_threads=1)
    futures = [executor.submit(jobs.echo, number) for number in range(10_000)]
    executor.shutdown(cancel_futures=cancel_futures)
    assert all(future.done() for future in futures)
    done = [future.result() for future in futures if not future.cancelled()]
    assert done == list(range(len(done)))
    assert cancel_futures or len(done) == 10_000
    assert len(done) > 0


@pytest.mark.parametrize(("call", "collects"), [(jobs.echo, False), (jobs.aecho, True), (jobs.later, True)])
def test_a_worker_collects_garbage_at_its_end_if_tasks_may_have_failed_unnoticed(call: Any, collects: bool, tmp_path: Path) -> None:
    with LoopPoolExecutor(1) as executor:
        executor.submit(executor_jobs.tell_of_collections, str(tmp_path / "collected")).result()
        executor.submit(call, 1).result()
    assert (tmp_path / "collected").exists() is collects


def test_x2_two_shutdowns_are_one(gate: Gate) -> None:
    executor = LoopPoolExecutor(2)
    held = executor.submit(jobs.pass_gate, gate.path)
    threads = [threading.Thread(target=executor.shutdown) for _ in range(4)]
    for thread in threads:
        thread.start()
    executor.shutdown(wait=False)
    gate.open()
    for thread in threads:
        thread.join()
    assert held.done()
    executor.shutdown()
    executor.shutdown(wait=False, cancel_futures=True)


def test_x2_shut_down_before_and_while_it_starts() -> None:
    executor = LoopPoolExecutor(1)
    executor.shutdown()
    executor = LoopPoolExecutor(1)
    future = executor.submit(jobs.echo, 1)
    executor.shutdown()
    assert future.result() == 1
    with contextlib.suppress(LookupError), LoopPoolExecutor(1) as executor:
        future = executor.submit(jobs.echo, 2)
        raise LookupError
    assert future.result() == 2


def test_what_has_not_begun_is_cancelled_however_early(gate: Gate) -> None:
    executor = LoopPoolExecutor(1, max_threads=1)
    futures = [executor.submit(jobs.pass_gate, gate.path) for _ in range(100)]
    executor.shutdown(wait=False, cancel_futures=True)
    gate.open()
    executor.shutdown()
    assert all(future.done() for future in futures)
    assert 90 <= sum(future.cancelled() for future in futures) < 100


def test_workers_are_killed_however_early(gate: Gate) -> None:
    executor = LoopPoolExecutor(1, max_threads=1)
    futures = [executor.submit(jobs.pass_gate, gate.path) for _ in range(100)]
    executor.kill_workers()
    executor.shutdown()
    assert all(future.cancelled() or isinstance(future.exception(), BrokenProcessPool) for future in futures)


@pytest.mark.parametrize("broken", ["worker", "pool"])
def test_workers_are_killed_while_a_shutdown_waits_for_their_lifespans(broken: Any, log: Log, gate: Gate) -> None:
    lifespan = functools.partial(executor_jobs.slow_to_leave, log.path, gate.path)
    executor = LoopPoolExecutor(2, lifespan=lifespan, broken=broken)
    assert executor.submit(jobs.echo, 1).result() == 1
    executor.shutdown(wait=False)
    assert lines(log, 2) == ["leaving"] * 2
    executor.kill_workers()
    executor.shutdown()


def test_workers_are_killed_after_a_pool_has_broken() -> None:
    executor = LoopPoolExecutor(4, broken="pool")
    assert isinstance(executor.submit(executor_jobs.exit_now, 3).exception(), BrokenProcessPool)
    executor.kill_workers()
    executor.shutdown()


@pytest.mark.parametrize(("limit", "shuts"), [(None, False), (1, False), (1, True)])  # 1: the second call runs in a replacement
def test_x3_collected_while_it_is_busy(limit: int | None, shuts: bool, gate: Gate) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        executor = LoopPoolExecutor(1, max_threads=1, max_tasks_per_child=limit)
        futures = [executor.submit(jobs.pass_gate, gate.path), executor.submit(jobs.echo, 1)]
        thread = executor._portal.thread
        gone = weakref.ref(executor)
        if shuts:
            executor.shutdown(wait=False)
        del executor
        gc.collect()
        assert gone() is None
        gate.open()
        assert futures[1].result() == 1
        assert thread is not None
        thread.join()


def test_x4_misuse_is_told_at_once() -> None:
    executor = LoopPoolExecutor(1)
    with executor:
        executor.submit(jobs.echo, 1).result()
    for _ in range(2):
        with pytest.raises(RuntimeError, match=r"^cannot schedule new futures after shutdown$"):
            executor.submit(jobs.echo, 1)
        with pytest.raises(RuntimeError, match=r"^cannot schedule new futures after shutdown$"):
            executor.map(jobs.echo, [1])


def test_x6_nested_three_deep() -> None:
    with LoopPoolExecutor(1) as executor:
        assert executor.submit(nested, 2).result() == "bottom"


def nested(depth: int) -> str:
    if not depth:
        return "bottom"
    with LoopPoolExecutor(1) as executor:
        return executor.submit(nested, depth - 1).result()


def test_a_call_that_waits_for_a_worker_that_died_is_not_forgotten_by_shutdown(gate: Gate) -> None:
    executor = LoopPoolExecutor(1, max_threads=1)
    dead: Any = executor.submit(executor_jobs.exit_now, 1)
    rest = [executor.submit(jobs.echo, number) for number in range(20)]
    executor.shutdown()
    assert dead.exception() is not None
    assert [future.result() for future in rest] == list(range(20))


# Programs


@pytest.mark.parametrize("method", ENDS)
def test_what_is_pending_is_done_when_the_interpreter_ends(method: str, tmp_path: Path) -> None:
    lines = told("pending_at_the_end", method, tmp_path)
    assert sorted(lines) == ["call-0", "call-1", "call-2", "call-3", "call-4", "call-5", "end"]


@pytest.mark.parametrize("method", ALONE)
@pytest.mark.parametrize(
    ("story", "said"),
    [
        ("shut_without_waiting", ["apple", "end"]),
        ("collected_while_busy", ["apple", "end"]),
        ("ended_in_a_thread", ["apple", "pear"]),
    ],
)
def test_x3_a_program_ends_when_its_calls_have(story: str, said: list[str], method: str, tmp_path: Path) -> None:
    assert sorted(told(story, method, tmp_path)) == said


def test_what_waits_is_cancelled_by_a_shutdown_that_does_not_wait(tmp_path: Path) -> None:
    lines = told("cancelled_without_waiting", "percore", tmp_path)
    assert lines.count("cancelled") == 1
    assert 1 <= lines.count("apple") < 50


@pytest.mark.parametrize("method", ["percore", *repeats("spawn")])
def test_x5_a_fork_of_the_program_has_workers_of_its_own(method: str, tmp_path: Path) -> None:
    lines = told("in_a_fork", method, tmp_path)
    assert sorted(lines) == sorted(["before", *["held"] * 4, "child", "child later", "fork", "code 7", "after"])


@pytest.mark.parametrize("method", ALONE)
def test_a_fork_may_use_one_that_was_not_used_before(method: str, tmp_path: Path) -> None:
    lines = told("forked_before_its_first_use", method, tmp_path)
    assert sorted(lines) == sorted([*["fork", "code 7"] * 2, "pending", "code 7", "program"])


def test_a_fork_in_the_midst_of_a_start_has_no_locked_lock() -> None:
    # 1. another thread starts an executor  2. this thread forks  3. its copy has the lock, and no thread that opens it
    with portal._start_lock, warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        pid = os.fork()
        if pid == 0:
            thread = threading.Thread(target=LoopPoolExecutor(1).shutdown, daemon=True)
            thread.start()
            thread.join(10)
            os._exit(int(thread.is_alive()))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


@pytest.mark.skipif(default_start_method() != "forkserver", reason="no fork server here")
def test_executors_use_one_fork_server_which_ends_with_the_interpreter(tmp_path: Path) -> None:
    lines = told("one_after_another", "percore", tmp_path)
    assert lines == ["kept", "the fork's is reaped", "code 0", "kept", "the program's is reaped"]


@pytest.mark.parametrize("method", ENDS)
@pytest.mark.parametrize("story", ["killed", "killed_in_a_call"])
def test_p1_nobody_survives_the_program(story: str, method: str, tmp_path: Path) -> None:
    family = Family()
    with family.marked():
        program = Program(story, method, stderr=tmp_path / "stderr", module="tests.e2e.executor_programs")
    with program:
        program.expect("calls")
        assert family.alive()
        program.process.send_signal(signal.SIGKILL)
        program.process.wait()
        assert family.wait_gone(HARD) == []


def test_a_call_after_the_interpreter_s_shutdown_is_refused(tmp_path: Path) -> None:
    text = """\
import atexit
from percore import LoopPoolExecutor
@atexit.register
def run_last():
    try:
        executor.submit(id, None)
    except RuntimeError:
        print("runtime-error")
        raise
if __name__ == "__main__":
    executor = LoopPoolExecutor(1)
    executor.submit(id, 42).result()
"""
    done = python("-c", text, cwd=tmp_path)
    assert "RuntimeError: cannot schedule new futures" in done.err
    assert done.out == "runtime-error\n"


def test_a_script_without_a_guard_is_told(tmp_path: Path) -> None:
    script = "import percore\ndef f(): pass\nprint(percore.LoopPoolExecutor(1).submit(f).exception())\n"
    assert "if __name__ == '__main__':" in output_of(script, tmp_path)


def test_both_sides_of_the_first_diff_of_the_page_on_migrating_say_the_same(tmp_path: Path) -> None:
    page = (Path(__file__).resolve().parents[2] / "docs" / "migrating.md").read_text()
    first, *_ = re.findall(r"```diff\n(.*?)```", page, re.DOTALL)
    call = "\nif __name__ == '__main__':\n    import sys\n    main(sys.argv[1:])\n"
    before, after = ("".join(line[1:] + "\n" for line in first.splitlines() if line[:1] != other) + call for other in "+-")
    assert "ProcessPoolExecutor" in before
    assert "LoopPoolExecutor" in after
    for number in range(40):
        (tmp_path / f"{number:02}.txt").write_text(str(number))
    names = [f"{number:02}.txt" for number in range(40)]
    said = output_of(after, tmp_path, *names)
    assert said.count("\n") == 40
    assert said == output_of(before, tmp_path, *names)
