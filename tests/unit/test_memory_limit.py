"""When a worker is replaced that has too much memory, and what counts as its memory."""

import asyncio
import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest

from percore._monitor import memory as of_monitor
from percore._monitor.memory import memory_of, own_bytes
from percore._scheduler.memory_limit import LONGEST_WAIT, MemoryLimit, Verdict
from percore._supervisor.memory_watch import MemoryWatch
from percore._transport.memory import Memory

KEEP, RENEW, ADVISE = Verdict.KEEP, Verdict.RENEW, Verdict.RENEW_AND_ADVISE
MIB = 2**20


def test_a_worker_that_grows_over_the_limit_is_replaced_once() -> None:
    limit = MemoryLimit(100)
    assert [limit.sampled(1, size, now, is_free=True) for now, size in enumerate([50, 60, 70, 100, 101])] == [*[KEEP] * 4, RENEW]
    assert limit.sampled(1, 120, 5, is_free=False) is KEEP  # its replacement starts
    assert [limit.sampled(2, size, now, is_free=True) for now, size in enumerate([50, 60, 101], 6)] == [KEEP, KEEP, RENEW]


def test_a_worker_is_not_replaced_while_another_of_its_slot_is_left() -> None:
    limit = MemoryLimit(100)
    assert [limit.sampled(1, size, now, is_free=True) for now, size in enumerate([50, 60, 101])] == [KEEP, KEEP, RENEW]
    for now in range(3, 30):
        assert limit.sampled(2, 50 if now < 6 else 200, now, is_free=False) is KEEP
    assert limit.sampled(2, 200, 30, is_free=True) is RENEW


def test_workers_that_are_over_it_from_their_start_are_replaced_ever_more_rarely() -> None:
    limit = MemoryLimit(100)
    generation, renewals = 1, list[int]()
    for now in range(400):
        if (verdict := limit.sampled(generation, 200, now, is_free=True)) is not KEEP:
            assert verdict is (ADVISE if renewals else RENEW)
            renewals.append(now)
            generation += 1
    assert [after - before for before, after in pairwise(renewals)][:8] == [2, 4, 8, 16, 32, 60, 60, 60]
    assert LONGEST_WAIT == 60


def test_a_worker_that_is_small_at_first_ends_the_waiting() -> None:
    limit = MemoryLimit(100)
    assert limit.sampled(1, 200, 0, is_free=True) is RENEW
    assert limit.sampled(2, 200, 1, is_free=True) is KEEP
    assert limit.sampled(2, 200, 2, is_free=True) is ADVISE
    assert [limit.sampled(3, size, 3, is_free=True) for size in (50, 50, 200)] == [KEEP, KEEP, RENEW]


def test_one_that_has_given_memory_back_stays() -> None:
    limit = MemoryLimit(100)
    assert [limit.sampled(1, size, 0, is_free=False) for size in (50, 50, 50, 200)] == [KEEP] * 4
    assert [limit.sampled(1, size, 1, is_free=True) for size in (50, 100, 101)] == [KEEP, KEEP, RENEW]


def test_a_replacement_that_could_not_start_is_tried_ever_more_rarely() -> None:
    limit = MemoryLimit(100)
    verdicts = [limit.sampled(1, 50 if now < 3 else 200, now, is_free=True) for now in range(40)]
    times = [now for now, verdict in enumerate(verdicts) if verdict is not KEEP]
    assert times == [3, 4, 6, 10, 18, 34]


def test_only_a_free_slot_is_renewed_and_only_over_the_limit() -> None:
    for seed in range(200):
        random, limit, generation = Random(seed), MemoryLimit(100), 1
        for now in range(200):
            size, is_free = random.choice([50, 100, 101, 150]), random.random() < 0.7
            verdict = limit.sampled(generation, size, now, is_free=is_free)
            assert verdict is KEEP or (is_free and size > 100)
            generation += random.random() < (0.9 if verdict is not KEEP else 0.05)


ROLLUP = """\
55d0c8a00000-7ffd1b5ff000 ---p 00000000 00:00 0                          [rollup]
Rss:               18872 kB
Pss:                7300 kB
Shared_Clean:       9000 kB
Private_Clean:       100 kB
Private_Dirty:      4156 kB
Anonymous:          7000 kB
Private_Hugetlb:    2048 kB
"""
SMAPS = """\
55d0c8a00000-55d0c8b00000 r-xp 00000000 fe:00 12345                      /opt/percore-env/bin/python 3 (deleted)
Rss:                  10 kB
Private_Clean:        10 kB
Private_Dirty:         0 kB
Anonymous:             0 kB
VmFlags: rd ex mr mw me
7f1000000000-7f1040000000 rw-s 00000000 00:01 1027                       /memfd:percore (deleted)
Private_Clean:         4 kB
Private_Dirty:     60000 kB
Anonymous:             0 kB
7f2000000000-7f2040000000 rw-p 00000000 00:01 1028                       /memfd:percore (deleted)
Private_Clean:         0 kB
Private_Dirty:       128 kB
Anonymous:            64 kB
7f3000000000-7f3040000000 rw-s 00000000 00:1f 77                         /tmp/percore-k3x_1 (deleted)
Private_Dirty:      4096 kB
Anonymous:             0 kB
7f4000000000-7f4040000000 rw-p 00000000 00:00 0
Private_Dirty:      1000 kB
Anonymous:          1000 kB
7f5000000000-7f5040000000 rw-s 00000000 00:01 9                          /dev/zero (deleted)
Private_Dirty:       500 kB
Anonymous:             0 kB
"""


def test_private_memory_counts_and_shared_memory_of_percore_does_not() -> None:
    assert own_bytes(ROLLUP.splitlines()) == (100 + 4156 + 2048) * 1024
    assert own_bytes(SMAPS.splitlines()) == (10 + 64 + 1000 + 500) * 1024


@pytest.fixture
def memory() -> Iterator[Memory]:
    memory = Memory.create(96 * MIB)
    yield memory
    memory.close()


@pytest.mark.skipif(not Path("/proc/self/smaps_rollup").exists(), reason="the system has no smaps_rollup")
def test_pages_of_shared_memory_that_only_one_process_has_touched_do_not_count(memory: Memory) -> None:
    before = memory_of(os.getpid(), 0)
    assert before is not None
    piece = b"x" * MIB  # small: the allocator may keep the memory of a large one for a moment
    for start in range(0, 64 * MIB, MIB):
        memory.view[start : start + MIB] = piece
    after = memory_of(os.getpid(), 0)
    assert after is not None
    assert after - before < 32 * MIB  # though nobody else has mapped it
    mine = mmap.mmap(-1, 64 * MIB, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    for _ in range(64):
        mine.write(piece)
    assert (memory_of(os.getpid(), 0) or 0) - after > 32 * MIB
    mine.close()


def test_a_process_that_has_ended_has_no_memory() -> None:
    child = subprocess.Popen([sys.executable, "-c", ""])
    os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOWAIT)
    assert memory_of(child.pid, 0) is None  # it was not reaped yet
    child.wait()
    assert memory_of(child.pid, 0) is None


def test_without_proc_psutil_reads_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(_: str) -> list[str]:
        raise FileNotFoundError

    monkeypatch.setattr(of_monitor, "_lines", missing)
    assert (memory_of(os.getpid(), 0) or 0) > MIB


@pytest.mark.parametrize("steps", [0, 1])
async def test_a_program_that_cancels_all_tasks_and_goes_on_keeps_its_limit(steps: int) -> None:
    async def memory(_workers: object, _enough: int) -> list[int | None]:
        await asyncio.Event().wait()
        return []

    loop = asyncio.get_running_loop()
    pool, engine = SimpleNamespace(members=set()), SimpleNamespace(memory=memory)
    watch = MemoryWatch(loop, *cast(Any, (pool, engine, None, MIB)))
    watch._begin()
    for _ in range(steps):
        await asyncio.sleep(0)
    (sampling,) = asyncio.all_tasks() - {asyncio.current_task()}
    sampling.cancel()
    await asyncio.wait([sampling])
    await asyncio.sleep(0)
    assert watch._timer is not None
    watch.look_members()
    assert watch._timer is None
