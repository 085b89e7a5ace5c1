"""A program over two nodes whose hosts are processes, to be killed: python -m tests.e2e.node_programs LOST_AFTER"""

import asyncio
import json
import os
import sys

from tests.hosts import engine_of, host_runner


class Mine:
    """A class of `__main__`, which no node has."""

    def __init__(self, value: int) -> None:
        self.value = value


async def sleep(mine: Mine) -> None:
    os.write(1, b"began\n")
    await asyncio.sleep(1000 * mine.value)


async def twice(mine: Mine) -> Mine:
    return Mine(2 * mine.value)


async def main() -> None:
    async with host_runner(lost_after=float(sys.argv[1]))(2) as runner:
        doubled = await runner.run(twice, Mine(2))
        calls = [runner.submit(sleep, doubled) for _ in range(2)]
        workers = [worker.pid for worker in runner.statistics().workers]
        hosts = [host.pid for host in engine_of(runner)._places.hosts.values()]  # type: ignore[attr-defined]
        os.write(1, json.dumps([doubled.value, type(doubled) is Mine, hosts, workers]).encode() + b"\n")
        await asyncio.gather(*calls)


if __name__ == "__main__":
    asyncio.run(main())
