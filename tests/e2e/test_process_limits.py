"""R8: a user who may start no more processes and threads (RLIMIT_NPROC), as processes that have no rights of root meet it."""

import os
import re
import shutil
import subprocess
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from tests.faults import LIMIT, Program, Watch
from tests.rows import repeats

UNUSED = str(1_000_000 + os.getpid())
"""A user without any process; the tests of another run beside this one have another."""

LIMITED = re.compile(r"this user may have \d+ processes and threads, .* raise the limit \(ulimit -u, pids\.max\)")


@cache
def other_user() -> tuple[str, ...]:
    """How a command is run by a user of its own, who has no rights but to read what the tests may read. Empty: it cannot."""
    ways = (
        ("setpriv", f"--reuid={UNUSED}", f"--regid={UNUSED}", "--clear-groups", *(
            f"--{name}=-all,+dac_read_search" for name in ("inh-caps", "ambient-caps", "bounding-set")
        )),
        ("unshare", "--user", "--map-root-user"),  # an ordinary user counts anew in a namespace
    )  # fmt: skip
    for command in ways[os.geteuid() != 0 :][:1]:
        if shutil.which(command[0]) and not subprocess.run([*command, "true"], capture_output=True, check=False).returncode:
            return command
    return ()


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Callable[[str, str], Program]]:
    prefix = other_user()
    if not prefix:
        pytest.skip("needs setpriv as root, or user namespaces: root is not limited, and the limit counts all processes of a user")
    started: list[Program] = []

    def start(story: str, method: str) -> Program:
        path = tmp_path / f"stderr-{len(started)}"
        started.append(Program(story, method, stderr=path, module="tests.e2e.process_limit_programs", prefix=prefix))
        return started[-1]

    yield start
    for one in started:
        with one:
            pass


def ends_well(program: Program) -> None:
    with Watch(program.descendants()) as descendants:
        assert program.end() == 0, program.stderr
        assert descendants.wait_gone(LIMIT) == []
    assert program.stderr == ""


both = pytest.mark.parametrize("method", ["forkserver", "spawn"])
either = pytest.mark.parametrize("method", ["forkserver", *repeats("spawn")])


@both
def test_r8_without_processes_a_start_says_so_at_once_and_leaves_nothing(
    method: str, program: Callable[[str, str], Program]
) -> None:
    """First nothing can be started, then some of the workers, then all of them but no thread, then everything."""
    running = program("start", method)
    told: list[Any] = []
    while not told or told[-1][2] != "7":
        told.append(running.told("start"))
        assert told[-1][4:] == [[], 0], "something is left"
    failed = [failure for _, failure, *_ in told if failure]
    without_threads = [line for line in told[len(failed) :] if line[2] != "7"]
    assert len(failed) == (3 if method == "forkserver" else 2)
    assert all("not ready within" not in failure and LIMITED.search(failure) for failure in failed), failed
    assert [line[2:4] for line in without_threads] == [["RuntimeError", "14"]] * len(without_threads)
    assert without_threads
    ends_well(running)


@either
def test_r8_a_worker_that_can_start_no_thread_says_so_and_starts_them_later(
    method: str, program: Callable[[str, str], Program]
) -> None:
    running = program("thread", method)
    failure, serves = running.told("thread")
    assert failure.startswith("no thread can be started: ")
    assert LIMITED.search(failure)
    assert serves is True
    ends_well(running)


@both
def test_r8_a_replacement_that_the_system_refuses_is_tried_again(method: str, program: Callable[[str, str], Program]) -> None:
    running = program("respawn", method)
    refusals, served = running.told("respawn")
    assert refusals
    assert LIMITED.search(refusals[0])
    assert served == "14"
    ends_well(running)


@either
def test_r8_a_reload_and_a_resize_that_the_system_refuses_leave_the_workers_in_service(
    method: str, program: Callable[[str, str], Program]
) -> None:
    running = program("changes", method)
    for name, workers in (("reload", 2), ("resize", 3)):
        failure, *rest = running.told(name)
        assert failure.startswith(f"the {name} stopped, and the workers in service go on")
        assert LIMITED.search(failure)
        assert rest == [True, True, [], workers, True]
    ends_well(running)


def test_r8_an_executor_s_worker_without_a_thread_for_its_loop_says_so(program: Callable[[str, str], Program]) -> None:
    running = program("executor", "forkserver")
    failures, result = running.told("executor")
    assert "worker 0 could not start: RuntimeError: no thread can be started: " in failures[-1]
    assert all(LIMITED.search(failure) or failure == "can't start new thread" for failure in failures)
    assert result == 7
    ends_well(running)
