"""Calls of the security tests, which run in workers."""

import os
import subprocess
import sys

_FDS = "import os; print([os.path.realpath('/proc/self/fd/' + fd) for fd in os.listdir('/proc/self/fd') if int(fd) > 2])"


async def echo(value: object) -> object:
    """Return the argument."""
    return value


async def fail(secret: str) -> None:
    """Raise an error that does not show its argument."""
    raise ValueError(f"{len(secret)} characters are too many")


def end(_secret: str) -> None:
    """Let the worker die."""
    os._exit(3)


def fds_of_a_child() -> str:
    """Return what a program sees of the worker's descriptors that gets all inheritable ones."""
    command = [sys.executable, "-S", "-c", _FDS]
    return subprocess.run(command, close_fds=False, capture_output=True, text=True, check=True).stdout


def fds_of_a_fork() -> str:
    """Return what a fork of the worker sees of its descriptors."""
    reading, writing = os.pipe()
    if os.fork() == 0:
        fds = [fd for fd in map(int, os.listdir("/proc/self/fd")) if fd > 2 and fd not in (reading, writing)]
        os.write(writing, repr([_target(fd) for fd in fds]).encode())
        os._exit(0)
    os.close(writing)
    with os.fdopen(reading) as said:
        found = said.read()
    os.wait()
    return found


def _target(fd: int) -> str:
    try:
        return os.readlink(f"/proc/self/fd/{fd}")
    except FileNotFoundError:  # that of the listing
        return ""


def modules_from(folder: str) -> list[str]:
    """Return the modules of the worker that were imported from a folder."""
    files = {name: getattr(module, "__file__", None) for name, module in list(sys.modules.items())}
    return [name for name, file in files.items() if file and file.startswith(folder)]
