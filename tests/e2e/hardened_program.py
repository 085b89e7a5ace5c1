"""A program with hardened workers, or with plain ones: `python -m tests.e2e.hardened_program 1`.

It writes what it and its workers see of themselves as a line of JSON, and ends when its input ends.
"""

import asyncio
import ctypes
import json
import multiprocessing
import os
import sys
from pathlib import Path
from typing import Any, Final

import percore

_GET_DUMPABLE: Final = 3


def of_itself() -> tuple[int, bool, bool]:
    """Return the pid of this process, whether it is closed, and whether it can never get more rights."""
    status = Path("/proc/self/status").read_text()
    return os.getpid(), ctypes.CDLL(None).prctl(_GET_DUMPABLE, 0, 0, 0, 0) == 0, "NoNewPrivs:\t1" in status


def of_a_child() -> bool:
    """Return whether a program that a call starts can never get more rights."""
    import subprocess

    return "NoNewPrivs:\t1" in subprocess.run(["/bin/cat", "/proc/self/status"], capture_output=True, text=True, check=True).stdout


async def main(harden: bool) -> None:
    """Tell, and wait for the end of the input."""
    told: dict[str, Any] = {"before": of_itself()}
    async with percore.Runner(1, start_method="spawn", harden=harden) as runner:
        told["spawn"] = await runner.run(of_itself)
    with percore.LoopPoolExecutor(1, multiprocessing.get_context("fork"), harden=harden) as executor:
        told["fork"] = await asyncio.wrap_future(executor.submit(of_itself))
    with percore.LoopPoolExecutor(1, harden=harden) as executor:
        told["executor"] = await asyncio.wrap_future(executor.submit(of_itself))
    async with percore.Runner(2, harden=harden, max_memory_per_worker=1 << 33, blocked_after=None) as runner:
        told["forkserver"] = await runner.run(of_itself)
        told["child"] = await runner.run(of_a_child)
        told["program"] = of_itself()
        usage = await runner.usage()
        told["roles"] = {one.role: one.pid for one in usage.processes}
        told["rss"] = min(one.rss for one in usage.processes)
        engine: Any = runner._supervisor.pool._engine
        told["memory"] = await engine.memory([member.worker for member in runner._supervisor.members], 1)
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()
        await asyncio.to_thread(sys.stdin.read)


if __name__ == "__main__":
    asyncio.run(main(sys.argv[1] == "1"))
