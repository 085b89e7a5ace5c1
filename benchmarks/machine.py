"""The machine: its description for the record, the CPUs that processes may use, and what processes consume."""

from __future__ import annotations

import enum
import os
import platform
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

import psutil

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

_LIBRARIES = ("percore", "uvloop", "aiomultiprocess", "anyio", "distex", "loky", "mpire", "wool", "aiohttp", "numpy")

BUSY = 0.25
"""A load average above this share of the CPUs, when a run begins, means that other work is running."""

_USABLE = sorted(os.sched_getaffinity(0)) if sys.platform == "linux" else [*range(os.cpu_count() or 1)]
"""Before anything was pinned."""


def describe() -> dict[str, str]:
    """The machine, its current load, the interpreter and the libraries that take part."""
    return {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "python": f"{platform.python_implementation()} {platform.python_version()} ({platform.python_compiler()})",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": _processor(),
        "CPUs": f"{usable_cpus()} usable of {os.cpu_count()}",
        "memory": f"{psutil.virtual_memory().total / 2**30:.1f} GiB",
        "load": " ".join(f"{load:.2f}" for load in os.getloadavg()),
        "libraries": ", ".join(map(_version, _LIBRARIES)),
        "commit": _commit(),
    }


def differences(before: Mapping[str, str], now: Mapping[str, str]) -> list[str]:
    """In words, where this machine differs from the record's in a way that changes absolute times."""
    differing = (name for name in ("python", "processor", "CPUs") if before.get(name) != now[name])
    return [f"{name}: {now[name]}, on record {before.get(name)}" for name in differing]


def usable_cpus() -> int:
    return len(_USABLE)


def is_busy() -> bool:
    return os.getloadavg()[0] > BUSY * usable_cpus()


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or "unknown")


def _version(library: str) -> str:
    try:
        return f"{library} {metadata.version(library)}"
    except metadata.PackageNotFoundError:
        return f"{library} not installed"


def _commit() -> str:
    """The source's commit, and whether it was changed since."""
    command = ["git", "-C", str(Path(__file__).parents[1]), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown: no git checkout"


# CPUs


class Pin(enum.Enum):
    """The CPUs of a row's processes. Without two CPUs, or on other systems than Linux, nothing is pinned.

    A round trip takes several times as long across two CPUs as on one, and the kernel places two processes as it likes. Rows
    whose figure depends on this place all contestants alike.
    """

    NOTHING = "wherever they like"
    TWO = "everything on the same two CPUs"
    APART = "this process on one CPU, all others on a second one"

    def apply(self) -> None:
        """Pin every thread of this process and of all processes that it has started."""
        if self is Pin.NOTHING or sys.platform != "linux" or len(_USABLE) < 2:
            return
        here, there = _USABLE[:2]
        ours, theirs = ({here}, {there}) if self is Pin.APART else ({here, there}, {here, there})
        _pin(psutil.Process(), ours)
        for child in psutil.Process().children(recursive=True):
            _pin(child, theirs)


def _pin(process: psutil.Process, cpus: set[int]) -> None:
    try:
        threads = [thread.id for thread in process.threads()]
    except psutil.NoSuchProcess:
        return
    for thread in threads:
        if sys.platform == "linux":
            try:
                os.sched_setaffinity(thread, cpus)
            except ProcessLookupError:
                continue  # it has ended meanwhile


# Processes


def descendants() -> set[int]:
    """All processes that this one has started, and those that they have."""
    return {child.pid for child in psutil.Process().children(recursive=True)}


def uss_of(pid: int | None = None) -> int:
    """The memory that this process alone has; without a pid, the calling process."""
    uss: int = psutil.Process(pid).memory_full_info().uss
    return uss


def cpu_of_all(pids: Iterable[int]) -> float:
    """Seconds that the threads of these processes have run, to the nanosecond."""
    files = (file for pid in pids for file in Path(f"/proc/{pid}/task").glob("*/schedstat"))
    return sum(int(file.read_text().split()[0]) for file in files) / 1e9


def forget_peaks(pids: Iterable[int]) -> None:
    """Start the peaks of their memory again from the present."""
    for pid in pids:
        Path(f"/proc/{pid}/clear_refs").write_text("5")


def peak_of_all(pids: Iterable[int]) -> int:
    """The sum of their peaks since then. Memory that several processes share counts for each."""
    return sum(_bytes_in(f"/proc/{pid}/status", "VmHWM:") for pid in pids)


def pss_of_all(pids: Iterable[int]) -> int:
    """The memory of all of them together: a page that several processes share counts once."""
    return sum(_bytes_in(f"/proc/{pid}/smaps_rollup", "Pss:") for pid in pids)


def _bytes_in(file: str, name: str) -> int:
    lines = Path(file).read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(name)) << 10
