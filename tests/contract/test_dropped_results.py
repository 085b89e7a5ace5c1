"""What the program has dropped is free soon after, though all threads sleep: also without a GIL.

There, an object that one thread has made and another one has dropped is freed when its maker runs again. See `reclaiming`. Without
figures (PERCORE_METRICS=0) no thread wakes for another reason, and a look at the memory that makes no objects starts no collection.
"""

import asyncio
import os
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.contract import buffer_jobs
from tests.contract.conftest import REAL, MakeRunner
from tests.internals import is_leased
from tests.waiting import until
from tests.watching import until as until_elsewhere

NUMBERS = 8 << 20
SIZE = 8 * NUMBERS
"""Larger than what malloc keeps for later."""

PROCESS = psutil.Process(os.getpid())


async def drop_elsewhere(dropped: list[object], is_held: Callable[[], bool]) -> None:
    """Drop objects in a thread that has not made them, and wait there until they are freed. The thread of the loop sleeps."""

    def drop_and_wait() -> None:
        assert is_held()
        dropped.clear()
        until_elsewhere(lambda: not is_held())

    await asyncio.to_thread(drop_and_wait)


@pytest.mark.parametrize("engine", [REAL[0]], indirect=True)
async def test_a_slot_is_free_when_another_thread_has_dropped_its_array(make: MakeRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERCORE_METRICS", "0")
    async with make() as runner:
        results: list[object] = [await runner.run(buffer_jobs.anumbers, 0, NUMBERS)]
        await drop_elsewhere(results, lambda: is_leased(runner))


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="this system does not tell whether a thread sleeps")
@pytest.mark.parametrize("engine", ["threads"], indirect=True)
async def test_what_a_worker_s_loop_has_made_is_freed_when_another_thread_has_dropped_it(
    make: MakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PERCORE_METRICS", "0")
    async with make() as runner:
        most = PROCESS.memory_info().rss + SIZE // 2
        await runner.run(buffer_jobs.akeep_numbers, NUMBERS)
        (thread,) = runner.statistics().workers[0].thread_ids
        await until(lambda: Path(f"/proc/self/task/{thread}/stat").read_text().rpartition(")")[2].split()[0] == "S")
        await drop_elsewhere(buffer_jobs.kept, lambda: PROCESS.memory_info().rss > most)
