"""Where the figures come from."""

from __future__ import annotations

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
    from collections.abc import Iterable

_LIBRARIES = ("percore", "uvloop", "aiomultiprocess", "anyio", "distex", "loky", "mpire", "wool", "aiohttp", "numpy")

BUSY = 0.25
"""A load average above this share of the CPUs when a run begins: something else is at work."""


def describe() -> dict[str, str]:
    """The machine, its load just now, the interpreter and the libraries that take part."""
    return {
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
        "python": f"{platform.python_implementation()} {platform.python_version()} ({platform.python_compiler()})",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": _processor(),
        "CPUs": f"{usable_cpus()} usable of {os.cpu_count()}",
        "memory": f"{psutil.virtual_memory().total / 2**30:.1f} GiB",
        "load": " ".join(f"{load:.2f}" for load in os.getloadavg()),
        "libraries": ", ".join(_versions(_LIBRARIES)),
        "commit": _commit(),
    }


def usable_cpus() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


def is_busy() -> bool:
    return os.getloadavg()[0] > BUSY * usable_cpus()


def _processor() -> str:
    information = Path("/proc/cpuinfo")
    if information.exists():
        for line in information.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or "unknown"


def _versions(names: Iterable[str]) -> Iterable[str]:
    for name in names:
        try:
            yield f"{name} {metadata.version(name)}"
        except metadata.PackageNotFoundError:
            yield f"{name} not installed"


def _commit() -> str:
    """The source's commit, and whether it was changed since."""
    command = ["git", "-C", str(Path(__file__).parents[1]), "describe", "--always", "--dirty"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "unknown: no git checkout"
