"""The world of a worker: what it takes over from its supervisor when it is born, and how it dies with it.

A worker is born from a fork server that was started some time ago or from a fresh interpreter. Either way it has to see
the supervisor's surroundings of the moment it was launched, so they are captured there and travel as a `World`.

How it dies: the kernel sends SIGKILL when the last write end of a pipe closes, if its read end was armed so
(F_SETSIG). That needs no thread and no Python here: it holds for a process that is stopped, that blocks all signals or
that sits in a C call with the GIL held.

- Each pipe belongs to one process alone: F_SETOWN is a property of the open file description, a second owner would
  replace the first.
- Nobody ever writes to such a pipe: a single byte kills as well.
"""

from __future__ import annotations

import array
import contextlib
import fcntl
import importlib
import io
import marshal
import os
import select
import signal
import socket
import struct
import sys
import threading
import time
from typing import NamedTuple

from percore._platform import HAS_SETSIG

# What a fork server is asked and answers, apart from the fds that come along.
REQUEST = struct.Struct("<I")  # how many fds: report, world, cwd, stdout, stderr, lifeline, then the worker's own
REPORT = struct.Struct("<Bi")  # kind, value
BORN, EXITED, FAILED = 1, 2, 3  # value: pid (its pidfd comes along), exit code, errno (there is no worker)
MAX_FDS = 253  # of one message (SCM_MAX_FD)

HELD_BACK = (signal.SIGINT, signal.SIGTERM)  # blocked by the supervisor until the new process has its own handlers

lifelines: list[int] = []
"""The pipes by which this process dies (see `die_with`)."""


class World(NamedTuple):
    """Surroundings of the supervisor at one moment. None: an exec has brought it along already.

    `path` stays the first field: a fresh interpreter sets sys.path from it before percore can be found.
    """

    path: list[str]
    argv: list[str]
    environment: dict[bytes, bytes] | None
    umask: int | None
    affinity: list[int] | None
    entry: str  # "module:function", called with `boot` and the list of the worker's fds
    boot: bytes

    def dump(self) -> bytes:
        return marshal.dumps(tuple(self))


class Helper:
    """A helper process of a frozen program, as that reads it: `multiprocessing.freeze_support()` calls its `_bootstrap`."""

    has_begun = False
    """Whether this process is one."""

    def __init__(self, target: str, data: tuple[object, ...], fds: list[int]) -> None:
        self._target = target
        self._data = data
        self._fds = fds

    def _bootstrap(self, parent_sentinel: int) -> None:
        """Be what `python -c BOOT data fd...` would be."""
        Helper.has_begun = True
        os.close(parent_sentinel)
        sys.argv[:] = ["-c", "", *map(str, self._fds)]
        sys.path[:] = self._data[0]  # type: ignore[call-overload]  # each target's data begin with it
        module, _, name = self._target.partition(":")
        getattr(importlib.import_module(module), name)(self._data)


def receive(sock: socket.socket, size: int, most: int) -> tuple[bytes, list[int]]:
    """A message and at most so many fds that came with it, none of them inheritable. No bytes: the other side is gone.

    Not by socket.recv_fds: 3.11 ignores the flags it is given, and the fds would be inheritable.
    """
    fds = array.array("i")
    try:
        data, ancillary, _, _ = sock.recvmsg(size, socket.CMSG_LEN(most * fds.itemsize), socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:
        return b"", []
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) // fds.itemsize * fds.itemsize])
    return data, fds.tolist()


def read_world(fd: int) -> World:
    """The world in this file, which is closed. Reads by position: the offset is shared with whoever wrote it."""
    size = os.fstat(fd).st_size
    data = bytearray()
    while len(data) < size:  # one read gives 2 GiB at most
        data += os.pread(fd, size - len(data), len(data))
    os.close(fd)
    return World(*marshal.loads(data))


def enter(world: World) -> None:
    """Take over what this world tells; what an exec brought (None) stays. Ends with this process open to signals."""
    if world.umask is not None:
        os.umask(world.umask)
    if world.affinity is not None:
        # A cpuset that shrank between capture and now refuses the old mask: then the kernel's own choice is right.
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, world.affinity)
    if world.environment is not None:
        _set_environment(world.environment)
    sys.argv[:] = world.argv
    sys.path[:] = world.path
    # Finders of an older process remember directories as they were. importlib.invalidate_caches() would do as well but
    # imports importlib.metadata, many times dearer than looking anew.
    sys.path_importer_cache.clear()
    take_signals()


def call_entry(world: World, fds: list[int]) -> None:
    """Import and call the entry point: `percore._worker.main.run`, which does not come back, or a test's function."""
    module, _, name = world.entry.partition(":")
    getattr(importlib.import_module(module), name)(world.boot, fds)


def take_streams(out: int, err: int) -> None:
    """Put these two in the place of standard output and error and close them."""
    for number, fd in ((1, out), (2, err)):
        os.dup2(fd, number)
        os.close(fd)
    # Python chose line buffering for a terminal when it made the stream, on another file than this one.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=os.isatty(1))


def die_with(*pipes: int) -> None:
    """Be killed as soon as the last write end of any of these pipes is closed, also when that was before this call.

    Where the system cannot send a signal then (no F_SETSIG), a thread waits for it: not while the process is stopped or
    a C call holds the GIL.
    """
    lifelines[:] = pipes
    if not HAS_SETSIG:
        threading.Thread(target=_die_after, args=(pipes,), name="percore-lifeline", daemon=True).start()
        return
    for pipe in pipes:
        fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    # 1. the writer dies  2. we arm: no edge comes any more  3. so look once, after arming.
    if _poller(pipes).poll(0):
        os.kill(os.getpid(), signal.SIGKILL)


def spawned(data: tuple[object, ...]) -> None:
    """First function of percore in a fresh interpreter: `python -c BOOT world lifeline fd...`."""
    lifeline, *fds = map(int, sys.argv[2:])
    for fd in (lifeline, *fds):
        os.set_inheritable(fd, False)
    die_with(lifeline)
    world = World(*data)  # type: ignore[arg-type]  # written by World.dump of this very version
    enter(world)
    call_entry(world, fds)


def _poller(pipes: tuple[int, ...]) -> select.poll:
    poller = select.poll()
    for pipe in pipes:
        poller.register(pipe, 0)  # the end of the writers (POLLHUP) is always told
    return poller


def _die_after(pipes: tuple[int, ...]) -> None:
    _poller(pipes).poll()
    os.kill(os.getpid(), signal.SIGKILL)


def _set_environment(wanted: dict[bytes, bytes]) -> None:
    for name in os.environb.keys() - wanted.keys():
        del os.environb[name]
    for name, value in wanted.items():
        if os.environb.get(name) != value:
            os.environb[name] = value
    time.tzset()


def take_signals() -> None:
    # A handler, not SIG_IGN: a program that the user starts from here must still obey Ctrl-C, and exec keeps SIG_IGN.
    signal.signal(signal.SIGINT, _do_nothing)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # Ignored by the supervisor it would come through exec, and the exit codes of a worker's own children would be lost.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_BACK)


def _do_nothing(signum: int, frame: object) -> None:
    """SIGINT in a worker: Ctrl-C on a terminal is for the supervisor, which then closes its workers."""
