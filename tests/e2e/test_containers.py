"""Surroundings that containers and careless hosts give a program, judged from outside of it."""

import contextlib
import math
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests import cgroups
from tests.cgroups import Group
from tests.e2e.container_programs import UNSHARE
from tests.e2e.family import Family
from tests.faults import LIMIT, Program, Wire, complaints
from tests.rows import repeated_rows

HARD = 2.0
MODULE = "tests.e2e.container_programs"
both_methods = pytest.mark.parametrize("method", ["forkserver", "spawn"])
# Each loop and each method, not each with each.
both_kinds = pytest.mark.parametrize(("loop", "method"), [("asyncio", "forkserver"), ("uvloop", "spawn")])


def need(kind: str) -> None:
    """Skip where this user may not make such a namespace."""
    if shutil.which("unshare") is None:
        pytest.skip("there is no unshare(1) here")
    done = subprocess.run([*UNSHARE[kind], "true"], capture_output=True, text=True, timeout=LIMIT, check=False)
    if done.returncode:
        pytest.skip(f"unshare is refused here: {done.stderr.strip()}")


@contextlib.contextmanager
def judged(*arguments: str, stderr: Path) -> Iterator[Program]:
    """A program that ends in order, in silence, and leaves nobody."""
    family = Family()
    with family.marked():
        program = Program(*arguments, stderr=stderr, module=MODULE)
    with program:
        yield program
        assert program.end() == 0, program.stderr
        assert family.wait_gone(HARD) == []


def silent(program: Program) -> None:
    """It has told of deaths at most."""
    lines = program.stderr.splitlines()
    assert all(" died " in line or "fork server" in line for line in lines), program.stderr


@both_kinds
def test_p9_the_first_process_of_a_container(loop: str, method: str, tmp_path: Path) -> None:
    need("pid")
    with judged("unshared", "pid", "first_process", loop, method, stderr=tmp_path / "stderr") as program:
        first, second, *others = program.told("codes")
        assert (first, second) == (-signal.SIGKILL, 3)
        assert set(others) <= {-signal.SIGKILL, None}
        assert program.told("program") == 7
        assert program.told("serves")
        assert program.told("left") == []
        assert program.told("child") == 0
    silent(program)


@both_methods
def test_t2_a_process_that_gets_the_pid_of_a_dead_worker_is_left_alone(method: str, tmp_path: Path) -> None:
    need("pid")
    with judged("unshared", "pid", "bystander", "asyncio", method, stderr=tmp_path / "stderr") as program:
        for way in ("reload", "close") if method == "forkserver" else ("close",):
            if not program.told(way):
                pytest.skip("nobody may choose process ids here")
            assert program.told("lives")
    silent(program)


@pytest.mark.parametrize(
    ("story", "method"),
    [("thief", "spawn"), ("ignored", "forkserver"), *repeated_rows(("thief", "forkserver"), ("ignored", "spawn"))],
)
def test_p9_children_that_somebody_else_reaps(story: str, method: str, tmp_path: Path) -> None:
    with judged(story, "asyncio", method, stderr=tmp_path / "stderr") as program:
        codes = program.told("codes")
        assert set(codes[:2]) <= {-signal.SIGKILL, None}
        assert set(codes[2:]) <= {3, None}
        assert program.told("serves")
    silent(program)


@both_kinds
def test_p9_programs_of_the_users_beside_dying_workers(loop: str, method: str, tmp_path: Path) -> None:
    with judged("beside", loop, method, stderr=tmp_path / "stderr") as program:
        assert program.told("programs") == list(range(20))
        assert program.told("codes") == [-signal.SIGKILL] * 2
        assert program.told("left") == []
    silent(program)


@both_methods
def test_peers_28_nobody_forks_the_program(method: str, tmp_path: Path) -> None:
    with judged("forks", "asyncio", method, stderr=tmp_path / "stderr") as program:
        assert program.line() == "serves true", "and nothing before it"
        assert program.line() == ("threads [1]" if method == "forkserver" else "threads []")
        assert program.line() == "over"
    silent(program)


@both_kinds
def test_peers_29_handlers_of_the_program_are_not_called_in_workers(loop: str, method: str, tmp_path: Path) -> None:
    with judged("handlers", loop, method, stderr=tmp_path / "stderr") as program:
        assert program.line() == f"codes {[-signal.SIGUSR2, -signal.SIGHUP, -signal.SIGKILL]}"
        assert program.line() == 'drained "in order"'
        assert program.line() == "serves true"
        handled = sorted(program.told("handled") for _ in range(3))
        assert handled == [[program.pid, name] for name in ("SIGHUP", "SIGTERM", "SIGUSR2")]
    silent(program)


def test_p9_a_small_dev_shm(tmp_path: Path) -> None:
    need("shm")
    with judged("unshared", "shm", "small_shm", "asyncio", stderr=tmp_path / "stderr") as program:
        assert program.told("size") == 64 << 20
        assert program.told("same")
        assert program.told("names") == []
    assert program.stderr == ""


@pytest.fixture
def cpus() -> Iterator[Group]:
    with cgroups.group("cpu") as made:
        yield made


@pytest.fixture
def gate(tmp_path: Path) -> Iterator[Wire]:
    with contextlib.closing(Wire(tmp_path / "gate")) as gate:
        yield gate


def judge_starved(program: Program, workers: int) -> None:
    assert program.told("results", 10 * LIMIT)
    assert program.told("same", 10 * LIMIT)
    assert program.told("restarts", 10 * LIMIT) == 0
    for _ in range(workers):
        program.expect("left", 10 * LIMIT)


@pytest.mark.timeout(200)
def test_a_cgroup_quota_says_how_many_workers_there_are_and_costs_none(cpus: Group, gate: Wire, tmp_path: Path) -> None:
    cpus.limit_cpus(1.0)
    with judged("in_cgroup", str(cpus.procs), "starved", "asyncio", gate.path, stderr=tmp_path / "stderr") as program:
        workers = program.told("workers", 10 * LIMIT)
        assert workers == 1
        before = cpus.throttled()
        cpus.limit_cpus(0.05)
        gate.give(1)
        judge_starved(program, workers)
        assert cpus.throttled() > before
        cpus.limit_cpus(math.ceil(os.cpu_count() or 1))
    assert complaints(program.stderr) == ""
