"""Runners that are left open, runners within workers, and programs in odd surroundings, judged from outside."""

import json
import os
import signal
import sys
from pathlib import Path

import psutil
import pytest

from tests.e2e.scripts import execute, python
from tests.faults import ROOT, Program, Watch, complaints, terminal
from tests.rows import repeated_rows, repeats

HARD = 2.0
MODULE = "tests.e2e.misuse_programs"


# Left open


@pytest.mark.parametrize(
    ("loop", "method", "how"),
    [
        ("asyncio", "forkserver", "dropped"),
        ("asyncio", "spawn", "used"),
        ("uvloop", "forkserver", "used"),
        ("uvloop", "forkserver", "kept"),
    ],
)
def test_x3_a_loop_that_is_closed_under_an_open_runner(loop: str, method: str, how: str, tmp_path: Path) -> None:
    with Program("left", loop, method, how, stderr=tmp_path / "stderr", module=MODULE) as program:
        with Watch(program.told("workers")) as workers:
            if how == "used":
                assert program.told("refused") == [True, True]
            if how != "kept":
                assert program.told("untouched") is True
                assert workers.wait_gone(HARD) == []
                assert program.told("another") == 7
            assert program.end() == 0
            assert workers.wait_gone(HARD) == []
        assert program.stderr.count("ResourceWarning: unclosed <percore.Runner open workers=2 ready=2 in_flight=") == 1
        assert "Event loop is closed" not in program.stderr
        assert "Traceback" not in program.stderr


def test_x3_a_loop_that_is_closed_under_workers_that_are_threads(tmp_path: Path) -> None:
    with Program("left_with_threads", stderr=tmp_path / "stderr", module=MODULE) as program:
        assert program.end() == 0
        assert program.stderr.count("ResourceWarning: unclosed <percore.Runner open workers=2 ready=2 in_flight=") == 1
        assert "Traceback" not in program.stderr


# Runners within workers


def tree(program: Program) -> list[int]:
    """Every process below the program, when the deepest of them are at work."""
    for _ in range(2):
        assert program.line().split()[0] in ("deepest", "thread"), program.stderr
    return program.descendants()


@pytest.mark.parametrize(
    ("how", "loop"),
    [("killed", "asyncio"), ("a worker killed", "uvloop"), ("interrupted", "asyncio"), ("interrupted twice", "uvloop")],
)
def test_x6_workers_of_workers_end_with_the_first_of_them(how: str, loop: str, tmp_path: Path) -> None:
    with (
        terminal() as (ours, theirs),
        Program("on_terminal", "nested_and_staying", loop, terminal=theirs, stderr=tmp_path / "stderr", module=MODULE) as program,
        Watch() as everybody,
    ):
        for pid in tree(program):
            everybody.add(pid)
        assert len(everybody) >= 3 + 3 + 2  # of each: fork server and workers
        if how == "killed":
            program.process.kill()
        elif how == "a worker killed":
            os.kill(worker_with_workers(program), signal.SIGKILL)
        else:
            os.write(ours, b"\x03")
            if how == "interrupted twice":
                program.expect("cancelled")
                os.write(ours, b"\x03")
        assert everybody.wait_gone(3 * HARD) == []
        code = program.end()
        assert code == {"killed": -signal.SIGKILL, "a worker killed": 1}.get(how, -signal.SIGINT)
        if "interrupted" in how:
            assert program.stderr.rstrip().endswith("KeyboardInterrupt")
            assert "percore/_worker" not in program.stderr  # it is the program's own traceback, and the only one


def worker_with_workers(program: Program) -> int:
    """The worker of the program itself that has workers of its own."""
    (server,) = psutil.Process(program.pid).children()
    (worker,) = (child for child in server.children() if child.children())
    return worker.pid


@pytest.mark.parametrize("loop", ["asyncio", *repeats("uvloop")])
def test_x6_closing_ends_workers_of_workers_in_order(loop: str, tmp_path: Path) -> None:
    with (
        terminal() as (ours, theirs),
        Program("on_terminal", "nested", loop, terminal=theirs, stderr=tmp_path / "stderr", module=MODULE) as program,
        Watch() as everybody,
    ):
        for pid in tree(program):
            everybody.add(pid)
        os.write(ours, b"close\n")
        program.expect("cancelled")
        assert program.told("ended") == "RunnerClosed"
        assert program.end() == 0
        assert everybody.wait_gone(HARD) == []
        assert complaints(program.stderr) == ""


def test_x6_a_worker_that_ends_takes_workers_along_that_it_has_left_open(tmp_path: Path) -> None:
    with (
        Program("on_terminal", "nested_and_left_open", "asyncio", stderr=tmp_path / "stderr", module=MODULE) as program,
        Watch(program.told("left")) as left,
    ):
        assert program.told("nested") == [0, 2, 4, 6]
        assert program.end() == 0
        assert left.wait_gone(HARD) == []


# Odd surroundings


@pytest.mark.parametrize(
    ("story", "loop", "method"),
    [
        ("without_streams", "asyncio", "forkserver"),  # uvloop cannot: libuv refuses to close its own descriptors below 3
        ("with_closed_objects", "asyncio", "spawn"),
        ("gone_away", "uvloop", "forkserver"),
        ("with_all_warnings", "uvloop", "forkserver"),
        *repeated_rows(("without_streams", "asyncio", "spawn"), ("with_all_warnings", "asyncio", "spawn")),
    ],
)
def test_x7_odd_surroundings(story: str, loop: str, method: str, tmp_path: Path) -> None:
    result = tmp_path / "result"
    options = ["-X", "dev", "-W", "error"] if story == "with_all_warnings" else []
    done = execute([sys.executable, *options, "-m", MODULE, story, loop, method, result], cwd=ROOT)
    assert (done.code, done.err) == (0, ""), done.err
    assert json.loads(result.read_text()) == [["", "/dev/null"], ["", "/dev/null"], 0]


def test_peers_31_a_megabyte_on_the_standard_error_of_workers() -> None:
    size = 1 << 20
    done = python("-m", MODULE, "much_on_stderr", "asyncio", "forkserver", str(size), cwd=ROOT)
    assert (done.code, done.out) == (0, f"written {[size] * 3}\n")
    assert len(done.err) == 3 * (size + len("and a word\n"))
    assert done.err.count("and a word\n") == 3
    assert done.err.count("e") == 3 * (size - 1)
