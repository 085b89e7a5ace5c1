"""A program that knows nothing of `percore top`: it calls two functions until its input ends. Its argument is an engine."""

import asyncio
import sys
import threading
import time
from typing import Any

import percore

ENDS = threading.Event()


async def fetch(number: int) -> int:
    await asyncio.sleep(0.05)
    return number


def block(seconds: float) -> None:
    time.sleep(seconds)


def compute(seconds: float) -> None:
    """Use the CPU until the program's input ends, for this long at most: nobody can kill a thread."""
    end = time.monotonic() + seconds
    while time.monotonic() < end and not ENDS.is_set():
        pass


async def main() -> None:
    loop = asyncio.get_running_loop()
    ended = loop.run_in_executor(None, sys.stdin.read)
    engine: Any = sys.argv[1] if len(sys.argv) > 1 else "processes"
    async with percore.Runner(workers=2, kill_after=0.1, engine=engine) as runner:
        stuck = runner.submit(block if engine == "processes" else compute, 3600)
        while not ended.done():
            await runner.map(fetch, range(20))
        ENDS.set()
        stuck.cancel()
        await runner.aclose(grace=0)


if __name__ == "__main__":
    asyncio.run(main())
