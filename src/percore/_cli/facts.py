"""The facts about this machine that `percore doctor` judges: read here, judged in `findings`."""

import asyncio
import os
import platform
import resource
import sys
import tempfile
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from time import perf_counter
from typing import Final

import percore
from percore._common.options import allowed_cpus, cpu_quota, text_of, usable_cpus
from percore._common.system import (
    HAS_EVENTFD,
    HAS_MEMFD,
    HAS_PIDFD,
    HAS_REUSEPORT,
    HAS_SETSIG,
    IS_FREE_THREADED,
    default_start_method,
    room_left,
    uvloop_wanted,
)

_SYS_PTRACE: Final = 19
"""The number of the capability CAP_SYS_PTRACE."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What happened when percore started a worker and made a call.

    Attributes:
        seconds: from the start to the result of the first call; None: it failed.
        descriptors: how many descriptors each worker takes in the program.
        rss: bytes of physical memory of the worker; None: unknown.
        error: the error, if it failed.
    """

    seconds: float | None
    descriptors: int = 0
    rss: int | None = None
    error: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """What this machine, this Python and this environment are like.

    Attributes:
        python: name and version of the interpreter.
        is_free_threaded: whether it is a build without a GIL.
        system: name and version of the system's kernel.
        is_linux: whether it is Linux.
        cpus: CPUs of the machine.
        allowed: CPUs that the CPU affinity allows.
        quota: CPU quota of the cgroup; infinity: none.
        workers: workers that a Runner starts by default.
        start_method: the default start method.
        memfd, eventfd, pidfd, setsig, reuseport: whether the system has these.
        uvloop: the version of uvloop; None: it is not installed; empty: it was switched off.
        files: limit of open descriptors; None: no limit.
        processes: limit of processes of this user or this cgroup, the smaller one; None: no limit.
        address_space: limit of the address space in bytes; None: no limit.
        file_size: limit of the size of files in bytes, which holds for shared memory, too; None: no limit.
        room: bytes of memory that are left to the machine and its cgroups; None: unknown.
        temporary: bytes free where temporary files are, which hold shared memory on systems without memfd.
        shm: bytes free in /dev/shm; None: there is none.
        ptrace_scope: the setting of the security module Yama; None: it is not in use.
        may_trace: whether this process has the capability SYS_PTRACE.
        threads_variable: whether OMP_NUM_THREADS is set.
        variables: the environment variables of percore that are set, with their values.
        trial: what happened when percore was tried.
    """

    python: str
    is_free_threaded: bool
    system: str
    is_linux: bool
    cpus: int
    allowed: int
    quota: float
    workers: int
    start_method: str
    memfd: bool
    eventfd: bool
    pidfd: bool
    setsig: bool
    reuseport: bool
    uvloop: str | None
    files: int | None
    processes: int | None
    address_space: int | None
    file_size: int | None
    room: int | None
    temporary: int
    shm: int | None
    ptrace_scope: int | None
    may_trace: bool
    threads_variable: bool
    variables: dict[str, str]
    trial: Trial


def read_facts() -> Facts:
    """Read the facts. Starts a worker."""
    return Facts(
        python=f"{platform.python_implementation()} {platform.python_version()}",
        is_free_threaded=IS_FREE_THREADED,
        system=f"{platform.system()} {platform.release()}",
        is_linux=sys.platform == "linux",
        cpus=os.cpu_count() or 1,
        allowed=allowed_cpus(),
        quota=cpu_quota(),
        workers=usable_cpus(),
        start_method=default_start_method(),
        memfd=HAS_MEMFD,
        eventfd=HAS_EVENTFD,
        pidfd=HAS_PIDFD,
        setsig=HAS_SETSIG,
        reuseport=HAS_REUSEPORT,
        uvloop=_uvloop(),
        files=_limit(resource.RLIMIT_NOFILE),
        processes=_processes(),
        address_space=_limit(resource.RLIMIT_AS),
        file_size=_limit(resource.RLIMIT_FSIZE),
        room=room_left(),
        temporary=_temporary(),
        shm=_free("/dev/shm"),
        ptrace_scope=_number("/proc/sys/kernel/yama/ptrace_scope"),
        may_trace=_may_trace(),
        threads_variable="OMP_NUM_THREADS" in os.environ,
        variables={name: value for name, value in sorted(os.environ.items()) if name.startswith("PERCORE_")},
        trial=_tried(),
    )


def _uvloop() -> str | None:
    if not uvloop_wanted():
        return ""
    try:
        return version("uvloop")
    except PackageNotFoundError:
        return None


def _limit(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


def _number(path: str) -> int | None:
    try:
        return int(text_of(path))
    except (OSError, ValueError):  # it is not there, or says "max"
        return None


def _processes() -> int | None:
    limits = [_limit(resource.RLIMIT_NPROC)]
    with suppress(OSError):
        for line in text_of("/proc/self/cgroup").splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or "pids" in controllers.split(","):
                root = "/sys/fs/cgroup" if not controllers else "/sys/fs/cgroup/pids"
                limits += [_number(f"{root}{folder}/pids.max") for folder in ("", path.rstrip("/"))]
    return min((limit for limit in limits if limit is not None), default=None)


def _free(path: str) -> int | None:
    try:
        status = os.statvfs(path)
    except OSError:
        return None
    return status.f_bavail * status.f_frsize


def _temporary() -> int:
    try:
        return _free(tempfile.gettempdir()) or 0
    except FileNotFoundError:  # no folder in which a file can be made: all are full, or can only be read
        return 0


def _may_trace() -> bool:
    with suppress(OSError, StopIteration, ValueError):
        line = next(line for line in text_of("/proc/self/status").splitlines() if line.startswith("CapEff:"))
        return bool(int(line.split()[1], 16) >> _SYS_PTRACE & 1)
    return False


# The trial


def _tried() -> Trial:
    try:
        return asyncio.run(_try())
    except Exception as error:
        return Trial(seconds=None, error=f"{type(error).__name__}: {error}")


async def _try() -> Trial:
    began = perf_counter()
    async with percore.Runner(workers=1, start_timeout=30) as runner:
        await runner.run(len, "ab")
        seconds = perf_counter() - began
        before = _descriptors()
        await runner.resize(2)
        descriptors = _descriptors() - before
        sizes = [one.rss for one in (await runner.usage()).processes if one.role.startswith("worker")]
    return Trial(seconds=seconds, descriptors=descriptors, rss=max(sizes, default=None))


def _descriptors() -> int:
    with suppress(OSError):
        return len(os.listdir("/dev/fd"))
    return 0
