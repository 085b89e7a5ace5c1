"""What test_launch.py runs in other processes: entry points of workers, and a supervisor to be killed from outside.

python -m tests.e2e.launch_jobs STORY LAUNCHER
"""

import asyncio
import faulthandler
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable

from percore._engines.forkserver import ForkServerLauncher
from percore._engines.spawn import SpawnLauncher

Launcher = ForkServerLauncher | SpawnLauncher
CODES = {"exit 0": 0, "exit 3": 3, "kill 9": -9, "kill 11": -11}


def open_launcher(kind: str, function: str) -> Launcher:
    entry = f"{__name__ if __name__ != '__main__' else __spec__.name}:{function}"
    return ForkServerLauncher.open(entry) if kind == "forkserver" else SpawnLauncher(entry)


# Entry points of workers


def tell_world(boot: bytes, fds: list[int]) -> None:
    """Write what this process sees of the world to its fd, and a word to its standard output."""
    umask = os.umask(0)
    world = {
        "boot": boot.decode(),
        "environment": dict(os.environ),
        "cwd": os.getcwd(),
        "path": sys.path,
        "argv": sys.argv,
        "umask": umask,
        "affinity": sorted(os.sched_getaffinity(0)),
        "fds": sorted(set(map(int, os.listdir("/proc/self/fd"))) - {max(map(int, os.listdir("/proc/self/fd")))}),
        "inheritable": [fd for fd in fds if os.get_inheritable(fd)],
        "stdin": os.path.realpath("/proc/self/fd/0"),
        "blocked": sorted(map(int, signal.pthread_sigmask(signal.SIG_BLOCK, ()))),
    }
    sys.stdout.write(f"a word from {boot.decode()}\n")
    with open(fds[0], "w") as file:
        json.dump(world, file)


def obey(boot: bytes, fds: list[int]) -> None:
    """End as told: "exit 3", "kill 9"."""
    faulthandler.disable()  # -X dev tells of a SIGSEGV that is meant
    verb, number = boot.decode().split()
    if verb == "exit":
        os._exit(int(number))
    os.kill(os.getpid(), int(number))


def stay(boot: bytes, fds: list[int]) -> None:
    """Say ready; then be idle, or in a C call that keeps the GIL for longer than anybody waits."""
    os.write(fds[0], b"ready")
    if boot == b"gil":
        re.match(r"(a+)+$", "a" * 40 + "b")
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
    while True:
        signal.pause()


def refuse(boot: bytes, fds: list[int]) -> None:
    raise LookupError("the entry point failed on purpose")


# Stories of a supervisor


async def wait_readable(fd: int) -> None:
    loop = asyncio.get_running_loop()
    readable = asyncio.Event()
    loop.add_reader(fd, readable.set)
    try:
        async with asyncio.timeout(20):
            await readable.wait()
    finally:
        loop.remove_reader(fd)


async def start_ready(launcher: Launcher, boot: bytes, on_exit: Callable[[int | None], None]) -> int:
    """Launch a worker that stays; its pid once it is ready."""
    read_end, write_end = os.pipe()
    try:
        process = launcher.launch(boot, [write_end], on_exit)
        os.close(write_end)
        await wait_readable(read_end)
        assert os.read(read_end, 10) == b"ready"
    finally:
        os.close(read_end)
    # Its word may be here before the fork server's.
    while process.pid is None:  # noqa: ASYNC110  # turns of the loop that reads it, not time
        await asyncio.sleep(0)
    return process.pid


async def codes(kind: str) -> None:
    launcher = open_launcher(kind, "obey")
    told = []
    for word in CODES:
        exit_code = asyncio.get_running_loop().create_future()
        launcher.launch(word.encode(), [], exit_code.set_result)
        told.append(await exit_code)
    await launcher.aclose()
    sys.stdout.write(json.dumps(told))


async def children(kind: str) -> list[int]:
    launcher = open_launcher(kind, "stay")
    return [await start_ready(launcher, boot, lambda code: None) for boot in (b"idle", b"stopped", b"gil")]


def supervise(kind: str, *, fork: bool = False, thread: bool = False) -> None:
    """Start workers, tell their pids, and wait to be killed."""
    pids: list[int] = []
    if thread:
        starter = threading.Thread(target=lambda: pids.extend(asyncio.run(children(kind))))
        starter.start()
        starter.join()
    else:
        pids = asyncio.run(children(kind))
    story = {"workers": pids, "fork": os.fork() if fork else None}
    if story["fork"] != 0:
        sys.stdout.write(json.dumps(story) + "\n")
        sys.stdout.flush()
    while True:
        signal.pause()


def main(story: str, kind: str) -> None:
    match story:
        case "codes":
            asyncio.run(codes(kind))
        case "left":
            sys.stdout.write(json.dumps({"workers": asyncio.run(children(kind))}))
        case _:
            supervise(kind, fork=story == "fork", thread=story == "thread")


if __name__ == "__main__":
    main(*sys.argv[1:])
