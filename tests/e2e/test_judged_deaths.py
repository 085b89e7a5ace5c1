"""Deaths of workers as a judge sees them who stands outside: what calls tell themselves, what the program says, what is left."""

import contextlib
import json
import re
import signal
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from tests import cgroups
from tests.cgroups import Group
from tests.counts import times
from tests.e2e.deaths import HARD
from tests.faults import LIMIT, Program, Watch, Wire, count_lines
from tests.rows import repeats

# How an exit reaches uvloop, test_deaths shows.
both_loops = pytest.mark.parametrize("loop", ["asyncio", *repeats("uvloop")])

Start = Callable[..., Program]


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Start]:
    """Starts a program of `death_programs`, in which every warning is an error."""
    monkeypatch.setenv("PYTHONWARNINGS", "error")
    with contextlib.ExitStack() as programs:

        def start(*arguments: str) -> Program:
            program = Program(*arguments, stderr=tmp_path / "stderr", module="tests.e2e.death_programs")
            return programs.enter_context(program)

        yield start


def ends_well(program: Program, *complaints: str) -> None:
    """It served as before, has left nothing, and said nothing on standard error but lines of these forms."""
    unhandled, fds, threads, registered, children = program.told("left")
    assert (unhandled, fds, threads, registered, children) == ([], [], 0, 0, 0)
    assert program.end() == 0
    lines = program.stderr.splitlines()
    assert len(lines) == len(complaints), program.stderr
    for form in complaints:
        (line,) = [line for line in lines if re.fullmatch(f"percore: {form}", line)][:1] or pytest.fail(program.stderr)
        lines.remove(line)


# One after the other, and all at once


@both_loops
def test_k1_idle_workers_are_replaced_once_and_nothing_else_is_said(loop: str, start: Start, tmp_path: Path) -> None:
    program = start("idle", loop, str(tmp_path / "births"))
    pids = program.told("ready")
    with Watch(pids) as workers:
        for pid, signum in zip(pids, (signal.SIGKILL, signal.SIGSEGV, signal.SIGABRT), strict=True):
            workers.send(pid, signum)
        assert workers.wait_gone(HARD) == []
    assert program.told("replaced") == [3, 0, 0]
    ends_well(program, *(rf"worker {index} \(pid {pid}\) died by SIG\w+ \(.*\)" for index, pid in enumerate(pids)))
    assert count_lines(tmp_path / "births") == 6


def cpu_of(pid: int) -> float:
    used = psutil.Process(pid).cpu_times()
    return used.user + used.system


def is_at_rest(pid: int) -> bool:
    """Whether it uses next to no CPU; one that spins gets its share even of a loaded machine."""
    with Watch([pid]) as program:
        before = cpu_of(pid)
        assert program.wait_gone(0.5) == [pid]  # to look at for a while, not to wait for anything
        return cpu_of(pid) - before < 0.1


@both_loops
def test_peers_20_a_loop_whose_workers_are_all_dead_is_at_rest(loop: str, start: Start, tmp_path: Path) -> None:
    gate = Wire(tmp_path / "gate")
    try:
        program = start("all_at_once", loop, gate.path)
        (pids,) = program.told("ready")
        with Watch(pids) as workers:
            workers.kill()
            assert workers.wait_gone(HARD) == []
        program.expect("dead")
        assert is_at_rest(program.pid)
        gate.give(5)
        before, after = program.told("back")
        assert before == after
        assert is_at_rest(program.pid)
        gate.give(1)
        ends_well(program, *[r"worker \d \(pid \d+\) died by SIGKILL \(.*\)"] * 4)
    finally:
        gate.close()


# A ledger


@both_loops
def test_k2_a_death_costs_what_had_begun_in_that_worker(loop: str, start: Start, tmp_path: Path) -> None:
    gate = Wire(tmp_path / "gate")
    try:
        program = start("busy", loop, gate.path)
        lines: list[list[str]] = []
        while len([line for line in lines if line[0] == "begun"]) < 132 or not any(line[0] == "submitted" for line in lines):
            lines.append(program.line().split(maxsplit=1))
        count, pids = next(json.loads(line[1]) for line in lines if line[0] == "submitted")
        victim = pids[0]
        with Watch([victim]) as worker:
            worker.kill()
            assert worker.wait_gone(HARD) == []
        ledger = [tuple(map(int, line[1].split())) for line in lines if line[0] == "begun"]
        of_victim = {number for number, pid in ledger if pid == victim}
        assert len(of_victim) == 66
        died = {tuple(program.told("outcome")) for _ in of_victim}
        assert died == {(number, "died", True, 1, "SIGKILL", victim) for number in of_victim}
        gate.give(count)
        lines = []
        while not lines or lines[-1][0] != "ended":
            lines.append(program.line().split(maxsplit=1))
        ledger += [tuple(map(int, line[1].split())) for line in lines if line[0] == "begun"]
        ok = sorted(tuple(json.loads(line[1])) for line in lines if line[0] == "outcome")
        assert ok == [(number, "ok", zlib.crc32(b"%d" % number)) for number in range(count) if number not in of_victim]
        assert Counter(number for number, _ in ledger) == Counter(range(count))
        ends_well(program, rf"worker 0 \(pid {victim}\) died by SIGKILL \(.*\)")
    finally:
        gate.close()


@both_loops
def test_k12_whatever_a_call_raises_its_worker_and_the_program_live_on(loop: str, start: Start) -> None:
    program = start("grid", loop)
    kinds = {
        "sys.exit": ["RemoteError", "SystemExit"],
        "SystemExit": ["RemoteError", "SystemExit"],
        "KeyboardInterrupt": ["RemoteError", "KeyboardInterrupt"],
        "GeneratorExit": ["RemoteError", "GeneratorExit"],
        "StopIteration": ["RuntimeError", ""],
        "CancelledError": ["RemoteError", "asyncio.exceptions.CancelledError"],
        "BaseException": ["RemoteError", "__main__._Own"],
    }
    for fn, told in (("_raise", kinds), ("_raise_in_task", kinds | {"cancel itself": kinds["CancelledError"]})):
        for kind, names in told.items():
            *raised, restarts = program.told("raised")
            assert (raised[:2], raised[2], restarts) == ([fn, kind], names[0], 0)
            assert raised[3].endswith(names[1].rpartition(".")[2])
    for fn in ("_raise", "_raise_in_task"):
        for kind in ("exit", "libc exit"):
            assert program.told("exited") == [fn, kind, "WorkerDied", 0]
    assert program.told("mapped") == [names[0] for names in kinds.values()]
    ends_well(program, *[r"worker 0 \(pid \d+\) died with exit code 0"] * 4)


# Memory


MOST = 256 << 20
"""Bytes of the memory group."""


@pytest.fixture
def memory_group() -> Iterator[Group]:
    with cgroups.group("memory") as made:
        made.limit_memory(MOST)
        yield made


@both_loops
def test_k15_a_worker_that_eats_all_memory_dies_and_not_its_supervisor(
    loop: str, memory_group: Group, start: Start, tmp_path: Path
) -> None:
    gate = Wire(tmp_path / "gate")
    try:
        program = start("hungry", loop, gate.path)
        memory_group.add(program.pid)
        gate.give(1)
        kind, name, text, memory = program.told("eaten")
        assert (kind, name) == ("WorkerDied", "SIGKILL")
        # The fork server tells the peak. From Linux 6.15 on the pidfd may tell the exit code before that.
        had = "" if memory is None else "; it had up to 2"
        assert f"died by SIGKILL (killed by the kernel: out of memory{had}" in text
        assert memory is None or 128 << 20 < memory <= MOST
        assert program.told("beside") is False
        ends_well(program, r"worker \d \(pid \d+\) died by SIGKILL \(killed by the kernel: out of memory(; it had up to .* MiB)?\)")
    finally:
        gate.close()


# Bugs of peers


@pytest.mark.long
@pytest.mark.timeout(120)
@both_loops
def test_peers_2_workers_killed_amid_large_replies_hold_up_no_other(loop: str, start: Start) -> None:
    kills = times(6, 200)
    program = start("large_replies", loop, str(kills))
    for _ in range(kills):
        (pid,) = program.told("kill")
        with Watch([pid]) as worker:
            worker.kill()
            assert worker.wait_gone(LIMIT) == []
    told, restarts = program.told("told")
    assert (told["wrong"], restarts) == (0, kills)
    assert told["ok"] >= 8 * kills
    assert told["died"] <= 8 * kills
    ends_well(program, *[r"worker \d \(pid \d+\) died by SIGKILL \(.*\)"] * kills)


@pytest.mark.parametrize("kind", ["daemonic", "waited for"])
def test_peers_19_a_child_that_a_call_left_behind_does_not_hold_up_the_end(
    kind: str, start: Start, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONWARNINGS", "ignore::DeprecationWarning")  # of the fork beside threads
    gate = Wire(tmp_path / "gate")
    try:
        program = start("wedged", "asyncio", kind, gate.path)
        with Watch([program.told("child")]) as child:
            try:
                gate.give(1)
                assert program.told("left", LIMIT) == [[], [], 0, 0, 0]
                assert program.end() == 0
                if kind == "daemonic":
                    assert child.wait_gone(HARD) == []
            finally:
                child.kill()
            assert child.wait_gone(HARD) == []
        assert program.stderr == ""
    finally:
        gate.close()
