"""Tells whether the kernel has killed a worker because memory ran out.

The kernel counts such kills for each cgroup and for the machine, and counts a kill before it sends the signal. A worker's end by
SIGKILL, which nobody here has sent, is explained by a kill that was counted during its life and that explains no other end.
"""

from contextlib import suppress
from typing import Final, NamedTuple

from percore._common.options import text_of

_OF_CGROUP: Final = "killed by the kernel: out of memory"
_OF_MACHINE: Final = "probably killed by the kernel: the machine has run out of memory"
_ROOT: Final = "/sys/fs/cgroup"


class Counts(NamedTuple):
    """How many processes the kernel has killed for lack of memory.

    Attributes:
        file: the file that counts those of this process's cgroup; empty: there is none.
        cgroup: those of the cgroup.
        machine: those of the machine; None if the system does not tell.
    """

    file: str
    cgroup: int
    machine: int | None


def counts() -> Counts:
    """Read the counts of this moment, which takes some ten microseconds."""
    machine = _count("/proc/vmstat")
    for file in _files():
        cgroup = _count(file)
        if cgroup is not None:
            return Counts(file, cgroup, machine)
    return Counts("", 0, machine)


def _files() -> list[str]:
    """Return the names of the files that may count the kills of this process's cgroup, the best first."""
    files: list[str] = []
    with suppress(OSError, ValueError):
        for line in text_of("/proc/self/cgroup").splitlines():
            _, controllers, path = line.split(":", 2)
            # In a container the path may be the host's. Then the root is the container's cgroup.
            if not controllers:
                files += [f"{_ROOT}{path.rstrip('/')}/memory.events", f"{_ROOT}/memory.events"]
            elif "memory" in controllers.split(","):
                folder = f"{_ROOT}/memory"
                files = [f"{folder}{path.rstrip('/')}/memory.oom_control", f"{folder}/memory.oom_control", *files]
    return files


def _count(file: str) -> int | None:
    with suppress(OSError, ValueError):
        for line in text_of(file).splitlines():
            name, _, number = line.partition(" ")
            if name == "oom_kill":
                return int(number)
    return None


class OomKills:
    """The kills of workers of one engine. Each counted kill explains one end."""

    def __init__(self) -> None:
        self._explained = Counts("", 0, 0)
        """Up to these counts, kills are known to be those of ends that were explained."""

    def explain(self, before: Counts) -> str:
        """Return why a worker has ended that was started at these counts, as a clause. Empty: no counted kill explains it."""
        return self._explain(before, counts())

    def _explain(self, before: Counts, now: Counts) -> str:
        if now.file and now.file == before.file:  # the count of the cgroup has the worker's kill too
            floor = max(before.cgroup, self._explained.cgroup if self._explained.file == now.file else 0)
            if now.cgroup <= floor:
                return ""
            self._explained = Counts(now.file, floor + 1, self._explained.machine)
            return _OF_CGROUP
        if now.machine is None or before.machine is None:
            return ""
        floor = max(before.machine, self._explained.machine or 0)
        if now.machine <= floor:
            return ""
        self._explained = self._explained._replace(machine=floor + 1)
        return _OF_MACHINE
