"""CPU-bound threads leave their worker's loop its share of the GIL.

Without care for it, two threads that each ring every millisecond keep the loop from running for seconds, thousands of their
calls. So what is counted is calls, not time.
"""

import asyncio
from statistics import median

import percore
from tests import jobs

STEPS = 15_000  # about a millisecond
THREADS = 6
AT_MOST = 400  # calls: with 50 ms to answer it is some dozens


async def test_the_loop_answers_beside_six_busy_threads() -> None:
    async with percore.Runner(1, threads=THREADS) as runner:
        ended = 0

        async def keep_busy() -> None:
            nonlocal ended
            while True:
                await runner.run(jobs.burn, STEPS)
                ended += 1

        busy = [asyncio.create_task(keep_busy()) for _ in range(4 * THREADS)]
        try:
            await runner.map(jobs.burn, [STEPS] * 50)  # until all are at it
            passed_by = []
            for _ in range(15):
                before = ended
                await runner.run(jobs.aecho)
                passed_by.append(ended - before)
        finally:
            for task in busy:
                task.cancel()
            await asyncio.wait(busy)
    assert median(passed_by) < AT_MOST
