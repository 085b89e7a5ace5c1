"""The environment that a worker takes over from its supervisor, and the lifelines that kill a worker along with its supervisor.

A worker starts as a fork of a fork server that was started earlier, or in a fresh interpreter. In both cases it must run in the
supervisor's environment as of the launch. The supervisor captures that environment and sends it as a `World`.

A lifeline is a pipe. If its read end is armed (F_SETSIG), the kernel sends SIGKILL when the last write end closes. This needs no
thread and no Python code here. It works in a process that is stopped, that blocks all signals, or that is in a C call holding the
GIL.

- Each pipe belongs to one process only: F_SETOWN is a property of the open file description, and a second owner would replace the
  first.
- No process ever writes to such a pipe: a single byte would also kill the reader.
"""

from __future__ import annotations

import array
import contextlib
import errno
import fcntl
import gc
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

from percore._common.system import HAS_SETSIG

# Requests to a fork server and its reports, apart from the fds that travel with them.
REQUEST = struct.Struct("<I")  # number of fds: report, world, cwd, stdout, stderr, lifeline, then the worker's own
REPORT = struct.Struct("<BiQ")  # kind, value, and in EXITED the most bytes of memory that the worker had in use
BORN, EXITED, FAILED = 1, 2, 3  # value: pid (with its pidfd), exit code, errno (no worker was started)
MOST_REASON = 4000  # bytes of the traceback that a fork server which fails sends back on the socket of the requests
MAX_FDS = 253  # per message (SCM_MAX_FD)

HELD_BACK = (signal.SIGINT, signal.SIGTERM)  # blocked by the supervisor until the new process has its own handlers

lifelines: list[int] = []
"""Read ends of this process's lifelines (see `die_with`)."""


class World(NamedTuple):
    """The supervisor's environment at the launch of a worker. A field is None if the worker inherits it through exec.

    `path` must stay the first field: a fresh interpreter sets sys.path from it before it can import percore.
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
    """A helper process of a frozen program, pickled. `multiprocessing.freeze_support()` unpickles it and calls `_bootstrap`."""

    has_begun = False
    """Whether this process is a helper."""

    def __init__(self, target: str, data: tuple[object, ...], fds: list[int]) -> None:
        self._target = target
        self._data = data
        self._fds = fds

    def _bootstrap(self, parent_sentinel: int) -> None:
        """Do what `python -c BOOT data fd...` would do."""
        Helper.has_begun = True
        os.close(parent_sentinel)
        gc.disable()
        sys.argv[:] = ["-c", "", *map(str, self._fds)]
        sys.path[:] = self._data[0]  # type: ignore[call-overload]  # each target's data begin with it
        module, _, name = self._target.partition(":")
        getattr(importlib.import_module(module), name)(self._data)


def receive(sock: socket.socket, size: int, most: int) -> tuple[bytes, list[int]]:
    """Receive a message of up to `size` bytes, with up to `most` fds. The fds are not inheritable.

    Empty data means that the other side is gone. socket.recv_fds would not do: Python 3.11 ignores its flags, and the fds would be
    inheritable.

    Raises:
        BlockingIOError: there is no message, or the system has no memory for it just now; the socket stays readable.
    """
    fds = array.array("i")
    try:
        data, ancillary, _, _ = sock.recvmsg(size, socket.CMSG_LEN(most * fds.itemsize), socket.MSG_CMSG_CLOEXEC)
    except ConnectionResetError:
        return b"", []
    except OSError as error:
        if error.errno in (errno.ENOMEM, errno.ENOBUFS):
            raise BlockingIOError(*error.args) from error
        raise
    for level, kind, payload in ancillary:
        if level == socket.SOL_SOCKET and kind == socket.SCM_RIGHTS:
            fds.frombytes(payload[: len(payload) // fds.itemsize * fds.itemsize])
    return data, fds.tolist()


def read_world(fd: int) -> World:
    """Read a world from `fd` and close it. Reads by position, because the file offset is shared with the process that wrote it.

    Raises:
        EOFError: the file was cut short meanwhile.
    """
    size = os.fstat(fd).st_size
    data = bytearray()
    while len(data) < size and (piece := os.pread(fd, size - len(data), len(data))):  # one read gives 2 GiB at most
        data += piece
    os.close(fd)
    return World(*marshal.loads(data))


def enter(world: World) -> None:
    """Apply `world` to this process, except the fields that are None. Then set the signal handlers and unblock the signals."""
    if world.umask is not None:
        os.umask(world.umask)
    if world.affinity is not None:
        # If the cpuset has shrunk since the capture, the kernel refuses the old mask. Then the kernel's own choice is right.
        with contextlib.suppress(OSError):
            os.sched_setaffinity(0, world.affinity)
    if world.environment is not None:
        _set_environment(world.environment)
    sys.argv[:] = world.argv
    sys.path[:] = world.path
    # Path finders inherited by the fork cache old directory listings. importlib.invalidate_caches() would work, too, but it imports
    # importlib.metadata, which takes many times longer than listing the directories again.
    sys.path_importer_cache.clear()
    take_signals()


def call_entry(world: World, fds: list[int]) -> None:
    """Import and call the entry point: `percore._worker_process.main.run`, which does not return, or a test's function."""
    module, _, name = world.entry.partition(":")
    entry = getattr(importlib.import_module(module), name)
    gc.enable()  # a fresh interpreter has imported all this without collections
    entry(world.boot, fds)


def take_streams(out: int, err: int) -> None:
    """Replace standard output and standard error by these fds, and close the fds."""
    for number, fd in ((1, out), (2, err)):
        os.dup2(fd, number)
        os.close(fd)
    # Python chose the buffering of sys.stdout when it opened the stream, for a different file.
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=os.isatty(1))


def die_with(*pipes: int) -> None:
    """Make these pipes the lifelines of this process: it is killed as soon as the last write end of any of them closes.

    If one closed before this call, the process is killed at once. On systems without F_SETSIG a thread waits for the end of the
    pipes. That thread cannot act while the process is stopped or while a C call holds the GIL.
    """
    lifelines[:] = pipes
    if not HAS_SETSIG:
        threading.Thread(target=_die_after, args=(pipes,), name="percore-lifeline", daemon=True).start()
        return
    for pipe in pipes:
        fcntl.fcntl(pipe, fcntl.F_SETOWN, os.getpid())
        fcntl.fcntl(pipe, fcntl.F_SETSIG, signal.SIGKILL)
        fcntl.fcntl(pipe, fcntl.F_SETFL, fcntl.fcntl(pipe, fcntl.F_GETFL) | os.O_ASYNC)
    # If the writer died before the pipe was armed, no signal will come. So poll once, after arming.
    if _poller(pipes).poll(0):
        os.kill(os.getpid(), signal.SIGKILL)


def spawned(data: tuple[object, ...]) -> None:
    """Start a worker in a fresh interpreter. Called first there: `python -c BOOT world lifeline fd...`."""
    lifeline, *fds = map(int, sys.argv[2:])
    for fd in (lifeline, *fds):
        os.set_inheritable(fd, False)
    die_with(lifeline)
    world = World(*data)  # type: ignore[arg-type]  # written by World.dump of the same percore version
    enter(world)
    call_entry(world, fds)


def _poller(pipes: tuple[int, ...]) -> select.poll:
    poller = select.poll()
    for pipe in pipes:
        poller.register(pipe, 0)  # poll always reports POLLHUP, the end of the writers
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
    # A handler instead of SIG_IGN: exec keeps SIG_IGN, and a program that the user starts from here must still obey Ctrl-C.
    signal.signal(signal.SIGINT, _do_nothing)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    # If the supervisor ignores SIGCHLD, exec keeps that, and the exit codes of a worker's own children would be lost.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_BACK)


def _do_nothing(signum: int, frame: object) -> None:
    """Ignore SIGINT. The supervisor handles Ctrl-C and closes its workers."""
