"""A program to be watched by `percore top` and `percore record`, and its page."""

import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from percore._attach.programs import programs, read

PROGRAM = Path(__file__).with_name("e2e") / "top_program.py"


def until(is_so: Callable[[], object], pause: float = 0.01) -> None:
    """Wait until it is so, in the other processes. `pause`: more, where a look costs the CPU time that they need."""
    while not is_so():
        time.sleep(pause)


@contextmanager
def running(engine: str = "processes") -> Iterator[int]:
    """Run a program that has published its first page, and yield its pid."""
    command = [sys.executable, "-W", "ignore:engine=:RuntimeWarning", str(PROGRAM), engine]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        try:
            until(lambda: process.poll() is not None or process.pid in [one.pid for one in programs()], pause=0.05)
            until(lambda: any(one["name"].endswith("fetch") for one in page(process.pid)["functions"]))
            yield process.pid
        finally:
            assert process.stdin is not None
            process.stdin.close()
            assert process.wait() == 0


def page(pid: int) -> dict[str, Any]:
    (only,) = read(pid)
    statistics: dict[str, Any] = only["statistics"]
    return statistics


def pids(pid: int) -> list[int | None]:
    return [worker["pid"] for worker in page(pid)["workers"]]
