"""Maps that show their progress: `python -m tests.e2e.progress_program`."""

import asyncio
import sys

import percore
from tests import jobs


async def main() -> None:
    async with percore.Runner(2) as runner:
        maps = [runner.map(jobs.echo, range(100), progress=True), runner.map(jobs.length, [b"abc"] * 50, progress=True)]
        sys.stdout.write(f"{sum(map(len, await asyncio.gather(*maps)))}\n")


if __name__ == "__main__":
    asyncio.run(main())
