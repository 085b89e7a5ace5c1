"""Too little of something: memory, descriptors, threads, room in the ring, or readers at its other end."""

import asyncio
import contextlib
import errno
import json
import os
import resource
import signal
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import percore
from percore._common.system import IS_FREE_THREADED
from tests import cgroups
from tests.cgroups import Group
from tests.counts import LONG, times
from tests.e2e import limit_calls as calls
from tests.faults import LIMIT, Program, Watch, wait_stopped
from tests.rows import repeats

LOOPS = pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
PAIRS = pytest.mark.parametrize(("loop", "method"), [("asyncio", "forkserver"), ("uvloop", "spawn")])

as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root may mount")


@pytest.fixture
def program(tmp_path: Path) -> Iterator[Callable[..., Program]]:
    """Starts a story; it has to end in order, with nothing on standard error and nobody left."""
    started: list[Program] = []
    with contextlib.ExitStack() as stack:

        def start(*arguments: object) -> Program:
            made = Program(*map(str, arguments), stderr=tmp_path / f"stderr-{len(started)}", module="tests.e2e.limit_programs")
            started.append(stack.enter_context(made))
            return made

        yield start


def ends_well(program: Program, seconds: float = LIMIT) -> None:
    """It ends with 0 and is silent, and with it everybody that it has started."""
    with Watch(program.descendants()) as descendants:
        assert program.end(seconds) == 0, program.stderr
        assert descendants.wait_gone(LIMIT) == []
    assert program.stderr == ""


def lines(program: Program, word: str, count: int) -> list[Any]:
    return [program.told(word) for _ in range(count)]


# T3


# With four workers those of 2 are closed in the midst of it.
LIMITS = (
    [(loop, (limit,)) for loop in ("asyncio", "uvloop") for limit in (1, 2, 3, 7)]
    if LONG
    else [("asyncio", (2, 7)), ("uvloop", (1,))]
)
WORKERS = range(1, 9) if LONG else (4,)


@pytest.mark.long
@pytest.mark.timeout(times(300, 3000))
@pytest.mark.parametrize(("loop", "limits"), LIMITS, ids=str)
def test_t3_every_call_ends_once_over_recycling_deaths_and_closing(
    loop: str, limits: tuple[int, ...], program: Callable[..., Program], tmp_path: Path
) -> None:
    kind = ["asyncio", "uvloop"].index(loop)
    places = [(limit, workers) for limit in limits for workers in WORKERS if not LONG or workers % 2 == kind]
    count = times(25, 3200)
    shapes = [(limit, workers, count, (limit + workers) % 3 == 0) for limit, workers in places]
    running = program("recycled", loop, tmp_path, os.environ.get("CHAOS_SEED", "1"), json.dumps(shapes))
    for _ in shapes:
        told = running.told("shape", times(3, 30) * LIMIT)  # some thousand starts of workers take as long as they take
        assert told["strikes left"] == 0
        assert told["members"] == 0
        check_history(tmp_path, told["name"], count, is_cut=told["cut"])
    ends_well(running)


def check_history(folder: Path, name: str, count: int, *, is_cut: bool) -> None:
    """What the program was told of its calls, against what the calls have written themselves."""
    entries = [line.split() for line in (folder / f"ledger-{name}").read_text().splitlines()]
    began = [int(number) for number, _, _ in entries]
    assert len(set(began)) == len(began), "a call has run twice"
    outcomes = {int(line.split()[0]): line.split()[1:] for line in (folder / f"outcomes-{name}").read_text().splitlines()}
    assert sorted(outcomes) == list(range(len(outcomes)))
    assert len(outcomes) >= count
    words = {" ".join(outcome) for outcome in outcomes.values()}
    assert words <= {"value", "WorkerDied True", *(["RunnerClosed"] if is_cut else [])}
    assert {number for number, outcome in outcomes.items() if outcome == ["value"]} <= set(began)
    died = sum(outcome[0] == "WorkerDied" for outcome in outcomes.values())
    assert died < count // 4, "a death has cost more than what had begun"
    assert is_cut or len({generation for _, _, generation in entries}) > 1


# M2


@LOOPS
def test_m2_when_its_loop_closes_the_input_is_closed(loop: str, program: Callable[..., Program]) -> None:
    """`asyncio.run` ends a program that has left a map and a runner open."""
    running = program("left_open", loop)
    assert running.told("first") == 0
    with Watch(running.descendants()) as descendants:
        running.expect("closed")
        running.expect("end")
        assert running.end() == 0
        assert descendants.wait_gone(LIMIT) == []
    assert running.stderr == ""


# R1: sizes around every limit of 2**31 and 2**32

GIGABYTE = 1 << 30
# One size each way: they touch 13 GB of fresh pages as it is, which is all the time that this takes.
LARGE = [("down", (1 << 31) + 1), ("up", (1 << 32) + 1)] if LONG else [("down", (1 << 26) + 1), ("up", (1 << 26) + 1)]


def available() -> int:
    with open("/proc/meminfo", encoding="ascii") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:"))


@pytest.mark.long
@pytest.mark.timeout(200)
@pytest.mark.asyncio_only
@pytest.mark.parametrize(("way", "size"), LARGE)
async def test_r1_lengths_that_need_more_than_32_bits(way: str, size: int) -> None:
    if available() < 2 * size + 2 * GIGABYTE:
        pytest.skip(f"{size} bytes on their way need {2 * size + 2 * GIGABYTE} bytes of memory: {available()} are available")
    async with percore.Runner(1, max_message=8 * GIGABYTE) as runner:
        if way == "down":
            assert await runner.run(calls.has_letters, calls.sparse_with_letters(size), size)
        else:
            assert calls.has_letters(await runner.run(calls.sparse_with_letters, size), size)


# R3


@pytest.mark.long
@pytest.mark.timeout(120)
@pytest.mark.parametrize(
    ("loop", "bell", "max_pending"),
    [("asyncio", "", 0), ("uvloop", "eventfd", 0), ("asyncio", "", 1000)],
    ids=["eventfd", "socket", "max_pending"],
)
def test_r3_a_worker_that_is_stopped_reads_it_all_when_it_is_continued(
    loop: str, bell: str, max_pending: int, program: Callable[..., Program], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERCORE_WITHOUT", bell)
    count = times(5000, 100_000) if not max_pending else times(3000, 20_000)
    running = program("stopped", loop, count, max_pending)
    pid = running.told("stop")
    with Watch([pid]) as worker:
        worker.send(pid, signal.SIGSTOP)
        wait_stopped(pid)
        os.kill(running.pid, signal.SIGUSR2)
        submitted = running.told("submitted")
        assert submitted["accepted"] == (max_pending or count)
        assert bool(submitted["full"]) == (not max_pending)
        worker.send(pid, signal.SIGCONT)
    assert running.told("results", 3 * LIMIT) is True
    assert running.told("serves") is True
    ends_well(running)


@pytest.mark.parametrize("fn", [calls.with_letters, calls.with_letters_in_task])
async def test_r3_a_loop_that_stands_while_its_worker_floods_it_loses_nothing(fn: Any, tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "wire")
    async with percore.Runner(1, threads=4) as runner:
        await runner.run(calls.tell_when_full, str(tmp_path / "wire"))
        futures = [runner.submit(fn, 50_000 + number) for number in range(300)]
        await asyncio.sleep(0)  # they are sent
        # And the loop stands until the worker has found its ring full.
        assert (tmp_path / "wire").read_bytes() == b"full\n"
        for number, future in enumerate(futures):
            assert await future == calls.with_letters(50_000 + number)
        assert runner.statistics().restarts == 0


# R4


@pytest.fixture
def cgroup() -> Iterator[Group]:
    """A memory cgroup of 256 MiB."""
    with cgroups.group("memory") as made:
        made.limit_memory(256 << 20)
        yield made


# Its allocator writes to the memory of a `bytes(n)`, and reserves gigabytes of address space.
with_gil_alone = pytest.mark.skipif(IS_FREE_THREADED, reason="without a GIL there are no bytes that take no memory")


@with_gil_alone
def test_r4_what_is_larger_than_the_memory_of_its_cgroup_fails_alone(cgroup: Group, program: Callable[..., Program]) -> None:
    running = program("short_of_memory", "asyncio", cgroup.folder)
    assert running.told("up") == "MemoryError"
    assert running.told("down") == "MemoryError"
    assert running.told("serves") is True
    assert running.told("slots") == 0
    ends_well(running)


@with_gil_alone
def test_r4_what_is_larger_than_the_address_space_fails_alone(program: Callable[..., Program]) -> None:
    running = program("short_of_memory", "uvloop", "")
    assert running.told("up") == "MemoryError"
    assert running.told("down") in ("MemoryError", "PayloadTooLarge")
    assert running.told("serves") is True
    assert running.told("slots") == 0
    ends_well(running)


# R5


SIZES = (0, 1000, 70_000, 1 << 20, 66 << 20)


def works(program: Program, *, but: int = -1) -> None:
    """Every size goes through, there and back; but the one is allowed to be told that there is no room."""
    for size in SIZES:
        told = program.told("size")
        assert told == [size, "True", "True"] or (size == but and told == [size, "MemoryError", "MemoryError"]), told
    assert program.told("serves") is True
    assert program.told("left") == []
    ends_well(program)


@as_root
@pytest.mark.parametrize("lack", [*repeats("shm 64k", "shm readonly", "shm noexec"), "shm absent"])
def test_r5_nothing_needs_dev_shm(lack: str, program: Callable[..., Program]) -> None:
    works(program("without", "asyncio", lack))


@pytest.mark.parametrize("code", [errno.ENOSYS, *repeats(errno.EPERM)], ids=errno.errorcode.get)
def test_r5_without_memfd_there_are_files(code: int, program: Callable[..., Program]) -> None:
    works(program("refused", "asyncio", code))


@pytest.fixture
def disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The folder for temporary files is one of its own, where the program may mount something smaller."""
    folder = tmp_path / "disk"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))


@as_root
def test_r5_without_memfd_what_the_disk_has_no_room_for_fails_alone(disk: None, program: Callable[..., Program]) -> None:
    works(program("refused", "asyncio", errno.ENOSYS, "tmp 64m"), but=66 << 20)


@as_root
def test_r5_without_memfd_and_room_for_a_worker_the_start_fails(disk: None, program: Callable[..., Program]) -> None:
    running = program("refused", "asyncio", errno.ENOSYS, "tmp 1m")
    assert "No space left on device" in running.told("refused")
    assert running.told("left") == []
    ends_well(running)


# R8


@pytest.mark.asyncio_only
@pytest.mark.own_fork_server
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
async def test_r8_a_limit_on_the_size_of_files_fails_a_start_and_leaves_nothing(method: Any) -> None:
    """It holds for memory without a name, too."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 20, hard))
    try:
        with pytest.raises((OSError, percore.StartupFailed), match="File too large"):
            await percore.Runner(1, start_method=method).start()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    async with percore.Runner(1, start_method=method) as runner:
        assert await runner.run(abs, -1) == 1


# R6


ENOUGH = 45
"""Descriptors with which everything can be started."""


@pytest.mark.long
@pytest.mark.timeout(120)
@PAIRS
def test_r6_without_descriptors_a_start_fails_and_leaves_nothing(loop: str, method: str, program: Callable[..., Program]) -> None:
    count = times(6, ENOUGH)
    running = program("no_descriptors_at_start", loop, method, count)
    told = lines(running, "start", count)
    assert [spare for spare, _, _ in told] == list(range(count))
    assert {outcome for _, outcome, _ in told} <= {"True", "StartupFailed", "OSError"}
    assert told[0][1] != "True"
    assert told[-1][1] == "True" or count < ENOUGH
    assert [left for _, _, left in told] == [[]] * count
    ends_well(running)


@pytest.mark.long
@pytest.mark.timeout(120)
@PAIRS
def test_r6_without_descriptors_a_replacement_is_tried_again(loop: str, method: str, program: Callable[..., Program]) -> None:
    count = times(3, ENOUGH)
    running = program("no_descriptors_at_respawn", loop, method, count)
    told = lines(running, "respawn", count)
    assert [spare for spare, *_ in told] == list(range(count))
    assert told[0][1] is True
    assert [line[2:4] for line in told] == [[True, True]] * count
    # A fork server under other limits has no worker any more and has ended: the next launch reaps it.
    assert all(left in ([], ["anon_inode"]) for *_, left in told)
    ends_well(running)


@pytest.mark.asyncio_only
@pytest.mark.parametrize("method", ["forkserver", "spawn"])
async def test_r7_a_loop_that_can_watch_no_more_fails_a_start_and_leaves_nothing(
    method: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As when epoll has no memory left: the first time that percore asks it to watch something, the second time, and so on."""
    loop, refusals = asyncio.get_running_loop(), 0
    add_reader = loop.add_reader
    while True:
        refusals += 1
        asked = 0

        def refuse_one(fd: Any, callback: Any, *args: Any) -> None:
            nonlocal asked
            asked += 1
            if asked == refusals:  # noqa: B023  # of this turn
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            add_reader(fd, callback, *args)

        monkeypatch.setattr(loop, "add_reader", refuse_one)
        with contextlib.suppress(percore.StartupFailed):
            async with asyncio.timeout(LIMIT), percore.Runner(1, start_method=method) as runner:
                assert await runner.run(abs, -1) == 1
                break
    assert refusals > 2
    assert ("cannot be watched" in caplog.text) is (method == "forkserver")


def test_r6_large_results_need_no_descriptors(program: Callable[..., Program]) -> None:
    running = program("no_descriptors_for_results", "uvloop")
    assert running.told("serves") is True
    ends_well(running)


# L3


@pytest.fixture
def fifo(tmp_path: Path) -> Iterator[int]:
    os.mkfifo(tmp_path / "wire")
    fd = os.open(tmp_path / "wire", os.O_RDWR)
    yield fd
    os.close(fd)


def told_on(fifo: int, count: int) -> set[int]:
    """The pids that so many calls have told."""
    data = b""
    while data.count(b"\n") < count:
        data += os.read(fifo, 4096)
    return set(map(int, data.split()))


@PAIRS
def test_l3_threads_that_never_end_hold_up_nothing_else(
    loop: str, method: str, fifo: int, program: Callable[..., Program], tmp_path: Path
) -> None:
    running = program("hogged", loop, tmp_path / "wire", method)
    assert running.told("plain") is True
    running.expect("hogs")
    (pid,) = told_on(fifo, 2)
    with Watch([pid]) as worker:
        assert running.told("coroutines") is True
        assert running.told("cancelled") is True
        assert running.told("usage") == (3 if method == "forkserver" else 2)  # the program, its worker, its fork server
        assert running.told("behind") is False
        assert running.told("closed") == ["RunnerClosed"] * 3
        assert worker.wait_gone(LIMIT) == []
    ends_well(running)


def test_l3_a_call_that_waits_for_another_thread_of_its_worker(fifo: int, program: Callable[..., Program], tmp_path: Path) -> None:
    running = program("waiting_for_itself", "asyncio", tmp_path / "wire")
    told_on(fifo, 1)
    assert running.told("through") == 3
    assert running.told("closed") == "RunnerClosed"
    ends_well(running)


# Peers


@pytest.mark.parametrize(
    ("loop", "how", "code"),
    [
        ("uvloop", "in order", 0),
        ("asyncio", "worker", 0),
        ("uvloop", "exit", 3),
        ("asyncio", "kill", -signal.SIGKILL),
        ("uvloop", "open", 0),
    ],
)
def test_peers_26_nothing_is_left_and_nothing_is_said_however_it_ends(
    loop: str, how: str, code: int, program: Callable[..., Program], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    temporary = tmp_path / "tmp"
    temporary.mkdir()
    monkeypatch.setenv("TMPDIR", str(temporary))
    running = program("ends", loop, how)
    running.expect("ready")
    with Watch(running.descendants()) as descendants:
        assert running.end() == code, running.stderr
        assert descendants.wait_gone(LIMIT) == []
    assert running.stderr == ""
    assert list(temporary.iterdir()) == []
