"""Programs with workers on a Ray cluster: python -m tests.ray.programs STORY ADDRESS"""

import asyncio
import json
import os
import sys

import percore
from tests.ray import ray_jobs


async def waits(address: str) -> None:
    """Tell the processes of the hosts and workers, and wait."""
    async with percore.Runner(2, engine=percore.RayEngine(address)) as runner:
        calls = [runner.submit(ray_jobs.for_ever) for _ in range(2)]
        tell(json.dumps([process.pid for process in (await runner.usage()).processes if process.role != "supervisor"]))
        await asyncio.gather(*calls)


async def fails(address: str) -> None:
    """Tell why the runner cannot be started."""
    try:
        await percore.Runner(2, start_timeout=2.0, engine=percore.RayEngine(address)).start()
    except percore.StartupFailed as error:
        tell(str(error))


def tell(text: str) -> None:
    os.write(1, text.encode() + b"\n")


if __name__ == "__main__":
    asyncio.run({"waits": waits, "fails": fails}[sys.argv[1]](sys.argv[2]))
