"""A program that knows nothing of `percore top`: it calls two functions until its input ends."""

import asyncio
import sys
import time

import percore


async def fetch(number: int) -> int:
    await asyncio.sleep(0.01)
    return number


def block(seconds: float) -> None:
    time.sleep(seconds)


async def main() -> None:
    loop = asyncio.get_running_loop()
    ended = loop.run_in_executor(None, sys.stdin.read)
    async with percore.Runner(workers=2, kill_after=0.1) as runner:
        stuck = runner.submit(block, 3600)
        while not ended.done():
            await runner.map(fetch, range(20))
        stuck.cancel()
        await runner.aclose(grace=0)


if __name__ == "__main__":
    asyncio.run(main())
