"""What test_frozen freezes. It notes each start of itself. Light: all that it imports is packed."""

import asyncio
import multiprocessing
import os
import sys

import percore


def say(*values: object) -> None:
    sys.stdout.write(" ".join(map(str, values)) + "\n")


async def double(number: int) -> int:
    return 2 * number


def triple(number: int) -> int:
    return 3 * number


async def nested(number: int) -> list[int]:
    async with percore.Runner(1) as runner:
        return await runner.map(triple, [number])


async def run(method: str) -> None:
    async with percore.Runner(2, start_method=method) as runner:  # type: ignore[arg-type]
        say(await runner.map(double, range(3)), await runner.map(triple, range(3)), await runner.run(nested, 3))
    with percore.LoopPoolExecutor(1) as executor:
        say(executor.submit(double, 4).result())


if __name__ == "__main__":
    with open(os.environ["STARTS"], "a") as starts:
        starts.write("start\n")
    if "NO_SUPPORT" not in os.environ:
        multiprocessing.freeze_support()
    asyncio.run(run(sys.argv[1]))
