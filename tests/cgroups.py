"""Control groups of a test's own, of version 1 or 2, as root or in a tree that was delegated to this user."""

import itertools
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Final, Literal

import pytest

from tests.faults import LIMIT, Watch

ROOT: Final = Path("/sys/fs/cgroup")
PERIOD: Final = 100_000
"""Microseconds of a CPU quota."""

Controller = Literal["cpu", "memory"]

_numbers: Final = itertools.count()


class Group:
    """A group that has a controller."""

    def __init__(self, folder: Path, *, is_second: bool) -> None:
        self.folder = folder
        self._is_second = is_second

    @property
    def procs(self) -> Path:
        """The file to which a process writes its number to become a member."""
        return self.folder / "cgroup.procs"

    def add(self, pid: int) -> None:
        self.procs.write_text(str(pid))

    def limit_memory(self, size: int) -> None:
        """So many bytes, and no swap beyond them."""
        names = ("memory.max", "memory.swap.max") if self._is_second else ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes")
        self._write(names[0], size)
        if (self.folder / names[1]).exists():
            self._write(names[1], 0 if self._is_second else size)

    def limit_cpus(self, count: float) -> None:
        """So many CPUs' worth of time."""
        if self._is_second:
            self._write("cpu.max", f"{int(count * PERIOD)} {PERIOD}")
        else:
            self._write("cpu.cfs_period_us", PERIOD)
            self._write("cpu.cfs_quota_us", int(count * PERIOD))

    def throttled(self) -> int:
        """How often its members had to wait for their quota."""
        return int((self.folder / "cpu.stat").read_text().split("nr_throttled")[1].split()[0])

    def _write(self, name: str, value: object) -> None:
        (self.folder / name).write_text(str(value))


@contextmanager
def group(controller: Controller) -> Iterator[Group]:
    """Make a group below the one of this process or below one of its ancestors, and remove it. Skip where none can be made."""
    made = _make(controller)
    yield made
    with Watch(map(int, made.procs.read_text().split())) as left:
        assert left.wait_gone(LIMIT) == []
    made.folder.rmdir()


def _make(controller: Controller) -> Group:
    reasons = []
    for parent, is_second in _parents(controller):
        folder = parent / f"percore-test-{os.getpid()}-{next(_numbers)}"
        try:
            folder.mkdir()
        except OSError as error:
            reasons.append(str(error))
            continue
        made = Group(folder, is_second=is_second)
        # Of version 2, a group has the controllers that its parent hands on; and a process may go where its user may write in both
        # groups and in their common ancestor.
        if (folder / ("memory.max" if controller == "memory" else "cpu.max")).exists() or not is_second:
            return made
        reasons.append(f"{parent} hands no {controller} controller on")
        folder.rmdir()
    pytest.skip(f"no control group with the {controller} controller can be made here: {'; '.join(reasons) or 'there are none'}")


def _parents(controller: Controller) -> Iterator[tuple[Path, bool]]:
    """Yield the folders of the groups of this process, and their ancestors', and whether they are of version 2."""
    with suppress(OSError):
        for line in Path("/proc/self/cgroup").read_text(errors="surrogateescape").splitlines():
            _, names, path = line.split(":", 2)
            if names and controller not in names.split(","):
                continue
            root = ROOT / controller if names else ROOT
            own = root / path.lstrip("/")
            for folder in (own, *own.parents):
                yield folder, not names
                if folder == root:
                    break
