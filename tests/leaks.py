"""What a test may not leave behind: processes, threads, file descriptors, memfd mappings, names in /dev/shm.

    before = leaks.snapshot()
    ...
    left = leaks.since(before)      # sentences, empty when nothing is left

Processes are found by descent and, when their parent is gone, by a mark in the environment that every process of this
test session inherits. A descendant must be gone at once: somebody could have waited for it, and percore's close
promises to. An orphan ends by its own means (nobody can wait for it), so it is given a moment.

The other programs of the machine make names in /dev/shm as well, and the system does not record who made one. So a name
is a leak when a process of the tests holds it, open or mapped. A test that kills a process asks `names_held` before.
"""

import contextlib
import gc
import os
import select
import stat
import sys
import threading
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import psutil

MARK = "PERCORE_TEST_SESSION"
ORPHAN_PATIENCE = 3.0  # seconds: the kernel needs milliseconds, a machine under full load its turn
THREAD_PATIENCE = 1.0  # seconds for a thread whose work is done and that is only ending

# Parallel runs of pytest-xdist inherit one mark; what one of them leaves is none of the others' business.
_runner = os.environ.get("PYTEST_XDIST_WORKER", "")
if not os.environ.get(MARK, "").endswith(_runner or "-"):
    os.environ[MARK] = f"{os.getpid()}-{os.urandom(8).hex()}-{_runner}"

HAS_PROC = Path("/proc/self/fd").is_dir()
FD_FOLDER = "/proc/self/fd" if HAS_PROC else "/dev/fd"
SHM = Path("/dev/shm")


@dataclass(frozen=True, slots=True)
class Snapshot:
    """What there was before a test."""

    pids: frozenset[int]
    threads: frozenset[threading.Thread]
    fds: frozenset[tuple[int, str]]
    memfds: frozenset[str]
    shm: frozenset[str]


def snapshot() -> Snapshot:
    """Take stock. Costs about a millisecond."""
    return Snapshot(frozenset(psutil.pids()), frozenset(threading.enumerate()), _fds(), _memfd_mappings(), _shm())


def since(before: Snapshot) -> list[str]:
    """Tell what is there now and was not before, one sentence each.

    Leaked processes are killed, so that no other test meets them.
    """
    names = sorted(_shm() - before.shm)
    # First of all: a process that is left is killed, and then holds nothing any more.
    held = names_held((pid for pid in psutil.pids() if _is_ours(pid)), names) if names else []
    left = [*_threads_since(before), *_processes_since(before), *map(str, held)]
    if not _memory_since(before):
        return left
    # Only now: a full collection takes longer than most unit tests, and what is free without one is no leak either.
    gc.collect()
    return [*left, *_memory_since(before)]


def _memory_since(before: Snapshot) -> list[str]:
    return [
        *(f"file descriptor {fd} -> {target}" for fd, target in sorted(_fds() - before.fds)),
        *(f"mapping {line}" for line in sorted(_memfd_mappings() - before.memfds)),
    ]


def _fds() -> frozenset[tuple[int, str]]:
    found = set()
    for name in os.listdir(FD_FOLDER):
        with contextlib.suppress(OSError):  # the descriptor of the listing itself is closed by now
            found.add((int(name), _target(int(name))))
    # With its first callback libffi may open the file it lies in, its own or that of ctypes, once and for the life of the process.
    # Ray leaves the log of its last connection open.
    known = ("/libffi.so", "/_ctypes.", "/python-core-driver-")
    return frozenset((fd, target) for fd, target in found if not any(name in target for name in known))


def _target(fd: int) -> str:
    if HAS_PROC:
        return os.readlink(f"{FD_FOLDER}/{fd}")
    status = os.fstat(fd)
    return f"{stat.filemode(status.st_mode)} {status.st_dev}:{status.st_ino}"


def _memfd_mappings() -> frozenset[str]:
    """Mappings of memfds, whose descriptors may be closed already: address range, inode and name."""
    if not HAS_PROC:
        return frozenset()
    with open("/proc/self/maps", encoding="utf-8", errors="surrogateescape") as maps:
        text = maps.read()
    if "/memfd:" not in text:
        return frozenset()
    fields = [line.split(maxsplit=5) for line in text.splitlines() if "/memfd:" in line]
    return frozenset(f"{addresses} inode {inode} {name}" for addresses, _, _, _, inode, name in fields)


def _shm() -> frozenset[str]:
    return frozenset(os.listdir(SHM)) if SHM.is_dir() else frozenset()


def names_held(pids: Iterable[int], names: Iterable[str] | None = None) -> list[Path]:
    """The names in /dev/shm, all or these, that one of these processes has open or mapped."""
    files = {}
    for name in _shm() if names is None else names:
        with contextlib.suppress(FileNotFoundError):
            files[_identity(os.stat(SHM / name))] = SHM / name
    held = set().union(*map(_files_held, pids)) if files else set()
    return sorted(path for file, path in files.items() if file in held and path.exists())


def _files_held(pid: int) -> set[tuple[int, int, int]]:
    """Device and inode of each file that a process has open or mapped; nothing for one that is gone or somebody else's."""
    held = set()
    with contextlib.suppress(OSError):
        for entry in os.scandir(f"/proc/{pid}/fd"):
            with contextlib.suppress(OSError):
                held.add(_identity(os.stat(entry.path)))
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            # Not the path: sem_open maps a file before it gives it its name.
            device, inode = line.split(maxsplit=5)[3:5]
            major, minor = (int(number, 16) for number in device.split(":"))
            held.add((major, minor, int(inode)))
    return held


def _identity(status: os.stat_result) -> tuple[int, int, int]:
    return os.major(status.st_dev), os.minor(status.st_dev), status.st_ino


def _threads_since(before: Snapshot) -> Iterator[str]:
    for thread in threading.enumerate():
        if thread in before.threads:
            continue
        with contextlib.suppress(RuntimeError):  # one that is about to be started, or not the threading module's own
            thread.join(THREAD_PATIENCE)
        if thread.is_alive():
            yield f"thread {thread.name}"


def _processes_since(before: Snapshot) -> Iterator[str]:
    descendants, orphans = [], []
    for pid in psutil.pids():
        if pid in before.pids:
            continue
        with contextlib.suppress(psutil.NoSuchProcess):
            process = psutil.Process(pid)
            if _descends(process):
                descendants.append(process)
            elif _marked(process):
                orphans.append(process)
    lasting = [process for process in orphans if not _ends(process)]
    for process in [*descendants, *lasting]:
        kind = "process" if process in descendants else "orphaned process"
        yield f"{kind} {process.pid} {_described(process)}"
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
            _ends(process)


def _is_ours(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return pid == os.getpid() or _descends(process := psutil.Process(pid)) or _marked(process)
    return False


def _descends(process: psutil.Process) -> bool:
    return any(parent.pid == os.getpid() for parent in process.parents())


def _marked(process: psutil.Process) -> bool:
    with contextlib.suppress(psutil.AccessDenied):  # somebody else's; also what an ending process answers
        return process.environ().get(MARK) == os.environ[MARK]
    return False


def _ends(process: psutil.Process) -> bool:
    """Whether it ends in time. A zombie has ended: what adopted it may never reap it, as in many a container."""
    with contextlib.suppress(psutil.TimeoutExpired):
        if sys.platform != "linux":
            process.wait(ORPHAN_PATIENCE)
            return True
    try:
        fd = os.pidfd_open(process.pid)
    except ProcessLookupError:
        return True
    try:
        poll = select.poll()
        poll.register(fd, select.POLLIN)
        return bool(poll.poll(ORPHAN_PATIENCE * 1000))
    finally:
        os.close(fd)


def _described(process: psutil.Process) -> str:
    try:
        return f"{process.status()}: {' '.join(process.cmdline())}"
    except psutil.ZombieProcess:
        return "zombie, never waited for"
    except psutil.NoSuchProcess:
        return "gone meanwhile"
