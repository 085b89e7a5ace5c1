"""What test_launch.py runs in other processes: entry points of workers, and a supervisor to be killed from outside.

python -m tests.e2e.launch_jobs STORY LAUNCHER
"""

import asyncio
import faulthandler
import gc
import json
import os
import re
import signal
import sys
import threading
from collections.abc import Callable, Iterable
from pathlib import Path

from percore._engines.processes.fork_server_launcher import ForkServerLauncher
from percore._engines.processes.spawn_launcher import SpawnLauncher

Launcher = ForkServerLauncher | SpawnLauncher
CODES = {"exit 0": 0, "exit 3": 3, "kill 9": -9, "kill 11": -11}
STATES = (b"idle", b"stopped", b"gil")  # "stopped" is idle until the test stops it


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
        "collects": gc.isenabled(),
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


async def codes(kind: str) -> list[int | None]:
    _expect_a_slow_machine()
    launcher = open_launcher(kind, "obey")
    told: list[int | None] = []
    for word in CODES:
        exit_code = asyncio.get_running_loop().create_future()
        launcher.launch(word.encode(), [], exit_code.set_result)
        told.append(await exit_code)
    await launcher.aclose()
    return told


async def children(kind: str, boots: Iterable[bytes]) -> list[int]:
    _expect_a_slow_machine()
    launcher = open_launcher(kind, "stay")
    return [await start_ready(launcher, boot, lambda code: None) for boot in boots]


def _expect_a_slow_machine() -> None:
    asyncio.get_running_loop().slow_callback_duration = 60  # what a loop in dev mode says of one is no result


def supervise(kind: str, story: str) -> None:
    """Start workers, tell their pids, and wait to be killed."""
    pids: list[int] = []
    boots = (b"idle",) if story == "idle" else STATES
    starter = threading.Thread(target=lambda: pids.extend(asyncio.run(children(kind, boots))))
    if story == "thread":
        starter.start()
        starter.join()
    else:
        starter.run()
    told = {"workers": pids, "fork": os.fork() if story == "fork" else None}
    if told["fork"] != 0:
        sys.stdout.write(json.dumps(told) + "\n")
        sys.stdout.flush()
    while True:
        signal.pause()


def main(story: str, kind: str, file: str = "") -> None:
    match story:
        case "codes":
            sys.stdout.write(json.dumps(asyncio.run(codes(kind))))
        case "codes-to-file":
            Path(file).write_text(json.dumps(asyncio.run(codes(kind))))
        case "left":
            sys.stdout.write(json.dumps({"workers": asyncio.run(children(kind, STATES))}))
        case _:
            supervise(kind, story)


if __name__ == "__main__":
    main(*sys.argv[1:])
