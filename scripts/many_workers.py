"""Starts very many workers, lets each of them run calls, and closes them: `python scripts/many_workers.py 1000`.

It says beforehand which limits of the system are too low, and afterwards what a worker takes.
"""

import argparse
import asyncio
import os
import resource
import sys
import time
from typing import Final

import percore

DESCRIPTORS: Final = 18
"""Descriptors of the program for each worker: ten, and of those beyond some hundred those of a start that waits for its turn."""

SPARE: Final = 200
BYTES: Final = 8 << 20
"""Memory of a worker that has run nothing, roundly."""


def main() -> int:
    """Run it. Return 1 if a limit is too low, or a call was lost."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("workers", type=int, nargs="?", default=1000)
    parser.add_argument("--calls", type=int, default=1000)
    asked = parser.parse_args()
    lacking = list(what_lacks(asked.workers))
    if lacking:
        print("\n".join(f"many_workers: {one}" for one in lacking), file=sys.stderr)
        return 1
    return asyncio.run(run(asked.workers, asked.calls))


def what_lacks(workers: int) -> list[str]:
    """Return the limits that are too low for so many workers, each with what would raise it. Raise what may be raised."""
    found = []
    files = workers * DESCRIPTORS + SPARE
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < files:
        found.append(f"RLIMIT_NOFILE is {hard} at most, and {workers} workers need about {files}: ulimit -Hn {files}")
    elif soft != resource.RLIM_INFINITY and soft < files:
        resource.setrlimit(resource.RLIMIT_NOFILE, (files, hard))
    processes, _ = resource.getrlimit(resource.RLIMIT_NPROC)
    if processes != resource.RLIM_INFINITY and processes < 3 * workers and os.getuid():
        found.append(f"RLIMIT_NPROC is {processes}, and {workers} workers may have three threads each: ulimit -u {3 * workers}")
    with open("/proc/sys/kernel/pid_max") as file:
        most = int(file.read())
    if most < 4 * workers:
        found.append(f"the system has only {most} process ids: sysctl kernel.pid_max={4 * workers}")
    with open("/proc/meminfo") as file:
        free = next(int(line.split()[1]) * 1024 for line in file if line.startswith("MemAvailable:"))
    if free < workers * BYTES:
        found.append(f"{free >> 20} MiB of memory are available, and {workers} workers need about {workers * BYTES >> 20} MiB")
    return found


def pid_of() -> int:
    """Return the process id of the worker."""
    return os.getpid()


def descriptors() -> int:
    """Return how many descriptors this process has."""
    return len(os.listdir("/proc/self/fd"))


async def run(workers: int, calls: int) -> int:
    """Start the workers, run the calls, close, and print what it took."""
    before = descriptors()
    runner = percore.Runner(workers, concurrency=1, threads=1, start_timeout=600.0, kill_after=60.0)
    began = time.monotonic()
    await runner.start()
    started = time.monotonic()
    try:
        each = await runner.broadcast(pid_of)
        answered = time.monotonic()
        values = await runner.map(abs, range(-calls, 0))
        ended = time.monotonic()
        there = descriptors()
        usage = await runner.usage()
    finally:
        await runner.aclose()
    closed = time.monotonic()
    own = [one.uss for one in usage.processes if one.role.startswith("worker") and one.uss is not None]
    print(
        f"{workers} workers: start {started - began:.1f} s, a call in each {answered - started:.2f} s, "
        f"{calls} calls {ended - answered:.2f} s, close {closed - ended:.1f} s"
    )
    print(f"descriptors of the program: {(there - before) / workers:.1f} a worker; left after the close: {descriptors() - before}")
    print(f"memory of a worker: {sum(own) / max(1, len(own)) / 2**20:.1f} MiB")
    return int(len(set(each)) != workers or values != list(range(calls, 0, -1)) or descriptors() > before)


if __name__ == "__main__":
    sys.exit(main())
