"""Where the figures come from."""

from __future__ import annotations

import os
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable

_LIBRARIES = ("percore", "uvloop", "distex")


def describe() -> dict[str, str]:
    """The machine, its load just now, the interpreter and the libraries that take part."""
    return {
        "python": f"{platform.python_implementation()} {platform.python_version()} ({platform.python_compiler()})",
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "processor": _processor(),
        "CPUs": f"{_usable_cpus()} usable of {os.cpu_count()}",
        "load": " ".join(f"{load:.2f}" for load in os.getloadavg()),
        "libraries": ", ".join(_versions(_LIBRARIES)),
    }


def _usable_cpus() -> int:
    return len(os.sched_getaffinity(0)) if sys.platform == "linux" else os.cpu_count() or 1


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
