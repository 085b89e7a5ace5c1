"""The memory of results that the program has dropped is free soon after, though their workers sleep: also without a GIL.

There, an object that one thread has made and another one has dropped is freed when its maker runs again. See `reclaiming`.
"""

import asyncio
from typing import Any

import pytest

import percore
from tests import jobs
from tests.contract.conftest import REAL, MakeRunner

SIZE = 64 << 20
"""Four times the size of results from which on a second may pass."""


async def memory(runner: percore.Runner) -> int:
    """What the program and its workers have for themselves."""
    sizes = [one.uss for one in (await runner.usage()).processes]
    assert None not in sizes
    return sum(size or 0 for size in sizes)


@pytest.mark.parametrize("engine", [REAL[0], "threads"], indirect=True)
async def test_a_large_result_is_freed_while_its_worker_sleeps(make: MakeRunner) -> None:
    async with make() as runner:
        for fn in (jobs.apattern, jobs.pattern):
            await runner.run(fn, 1 << 20)
            before = await memory(runner)
            results: list[Any] = [await runner.run(fn, SIZE)]
            results[0].count(b"x")  # memory that was not read may not be there
            assert await memory(runner) >= before + SIZE // 2
            await asyncio.to_thread(results.clear)  # neither the thread that has made it, nor that of the loop
            while await memory(runner) > before + SIZE // 4:
                pass
