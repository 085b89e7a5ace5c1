"""The fork server: a small process that has everything imported and turns into workers, one fork each.

    supervisor  -- ctl (SEQPACKET): a request with the worker's fds -->  fork server  -- fork -->  worker
         ^                                                                  |
         +--------- report (SEQPACKET, one per request): pid + pidfd, later the exit code

What must stay true:

- One thread, and it never runs user code: it always answers, and a fork copies no lock that somebody holds.
- It ends when the supervisor ends (its pidfd), when `ctl` is closed, and when its own lifeline is cut (then even while
  it is stopped). Its end cuts the lifeline of each of its workers: they end too.
- A worker keeps no fd of it: a write end of a sibling's lifeline would keep that sibling alive.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib
import os
import select
import signal
import socket
import sys
from typing import TYPE_CHECKING, NamedTuple

from percore._platform import HAS_SETSIG, uvloop_wanted
from percore._points import POINTS, point
from percore._worker.world import (
    BORN,
    EXITED,
    FAILED,
    HELD_BACK,
    MAX_FDS,
    REPORT,
    REQUEST,
    call_entry,
    die_with,
    enter,
    read_world,
    receive,
    take_streams,
)

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable


class Birth(NamedTuple):
    """What a worker has right after the fork: its fds as the supervisor sent them, and the lifeline from here."""

    fds: list[int]
    lifeline: int


class Child(NamedTuple):
    pid: int
    report: socket.socket
    lifeline: int


class ForkServer:
    """The loop of the fork server. Holds socket objects only where both sides of a fork close them by name."""

    def __init__(self, ctl: int, supervisor: int) -> None:
        self._ctl = _socket(ctl)
        self._supervisor = supervisor
        self._children: dict[int, Child] = {}  # by pidfd
        self._poller = select.poll()
        self._poller.register(ctl, select.POLLIN)
        self._poller.register(supervisor, select.POLLIN)

    def serve(self) -> Birth:
        """Answer requests for ever. Comes back only in a new worker, after each fork once."""
        while True:
            for fd, _ in self._poller.poll():
                if fd == self._supervisor:
                    os._exit(0)
                if fd != self._ctl.fileno():
                    self._on_exit(fd)
                elif (birth := self._on_request()) is not None:
                    return birth

    def _on_request(self) -> Birth | None:
        data, fds = receive(self._ctl, REQUEST.size, MAX_FDS)
        if not data:
            os._exit(0)
        if POINTS:
            point("forkserver.request")
        if len(fds) < REQUEST.unpack(data)[0]:  # this process is out of fds: the kernel dropped the rest
            self._refuse(fds, errno.EMFILE)
            return None
        try:
            lifeline = os.pipe()
        except OSError as error:
            self._refuse(fds, error.errno or errno.EMFILE)
            return None
        return self._fork(fds, *lifeline)

    def _fork(self, fds: list[int], lifeline: int, write_end: int) -> Birth | None:
        # A worker that is told to end before it has handlers of its own does so once it has: here the signals are ignored.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)
        try:
            pid = _fork_process()
        except OSError as error:
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)
            _close((lifeline, write_end))
            self._refuse(fds, error.errno or errno.EAGAIN)
            return None
        if pid == 0:
            self._forget()
            return Birth(fds, lifeline)
        signal.pthread_sigmask(signal.SIG_SETMASK, mask)
        _close((lifeline, *fds[1:]))
        if POINTS:
            point("forkserver.forked")
        self._announce(Child(pid, _socket(fds[0]), write_end))
        return None

    def _announce(self, child: Child) -> None:
        try:
            pidfd = os.pidfd_open(child.pid)
        except OSError as error:
            os.kill(child.pid, signal.SIGKILL)  # ours and not reaped: the number cannot mean anybody else
            os.waitpid(child.pid, 0)
            _tell(child.report, FAILED, error.errno or errno.EMFILE)
            child.report.close()
            os.close(child.lifeline)
            return
        self._children[pidfd] = child
        self._poller.register(pidfd, select.POLLIN)
        if not _tell(child.report, BORN, child.pid, [pidfd]):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)  # nobody waits for it any more
        if POINTS:
            point("forkserver.born")

    def _on_exit(self, pidfd: int) -> None:
        self._poller.unregister(pidfd)
        child = self._children.pop(pidfd)
        _, status = os.waitpid(child.pid, 0)
        if POINTS:
            point("forkserver.reaped")
        _tell(child.report, EXITED, os.waitstatus_to_exitcode(status))
        child.report.close()
        _close((pidfd, child.lifeline))

    def _refuse(self, fds: list[int], code: int) -> None:
        """End a request without a worker. Where not even the report came through, its end (EOF) is the answer."""
        if fds:
            with _socket(fds[0]) as report:
                _tell(report, FAILED, code)
        _close(fds[1:])

    def _forget(self) -> None:
        """In a new worker: close what is open as an object: its finaliser would close a number that is new by then."""
        self._ctl.close()
        for child in self._children.values():
            child.report.close()


def main(data: tuple[list[str], list[str]]) -> None:
    """First function of percore in the fork server: `python -c BOOT data ctl supervisor lifeline`."""
    ctl, supervisor, lifeline = map(int, sys.argv[2:])
    for fd in (ctl, supervisor, lifeline):
        os.set_inheritable(fd, False)
    # The signals of a terminal or a service manager go to the whole group; this process ends with its supervisor.
    for signum in HELD_BACK:
        signal.signal(signum, signal.SIG_IGN)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)  # ignored (it comes through exec), all exit codes would be lost
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_BACK)
    die_with(lifeline)
    _preload(data[1])
    birth = ForkServer(ctl, supervisor).serve()
    _become_worker(birth)


def _preload(modules: Iterable[str]) -> None:
    gc.disable()  # the user waits for this; what imports leave is little (some 70 kB), and frozen with the rest
    for name in modules:
        importlib.import_module(name)
    if uvloop_wanted():
        with contextlib.suppress(ModuleNotFoundError):  # wanted where installed
            importlib.import_module("uvloop")
    # Up to here a traceback reached the user's stderr. From here on no pipe, no terminal and no mount is kept busy, and
    # what an import printed must not be in a buffer that every worker would flush.
    sys.stdout.flush()
    if sys.stderr is not None:
        sys.stderr.flush()
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    os.dup2(null, 2)
    if null > 2:
        os.close(null)
    os.chdir("/")
    # Each worker drops this (`world.enter`), and to write to pages that it has in common with this process costs it a copy of each.
    sys.path_importer_cache.clear()
    gc.freeze()
    gc.enable()


def _become_worker(birth: Birth) -> None:
    world_file, cwd, out, err, lifeline, *fds = birth.fds[1:]
    _close_all_but((birth.lifeline, *birth.fds[1:]))
    die_with(birth.lifeline, lifeline)
    if POINTS:
        point("worker.forked")
    take_streams(out, err)
    os.fchdir(cwd)
    os.close(cwd)
    world = read_world(world_file)
    enter(world)
    call_entry(world, fds)


def _close_all_but(keep: Collection[int]) -> None:
    """Close every fd but the standard streams and these."""
    # The highest open number bounds the work: where Python was built without close_range(2), closerange() up to the
    # limit of open files is a million system calls in some containers.
    try:
        highest = max(map(int, os.listdir("/proc/self/fd")))
    except OSError:
        highest = os.sysconf("SC_OPEN_MAX")
    low = 3
    for fd in sorted(keep):
        if low < fd:  # an empty range is not asked for: closerange(0, 0) closes everything
            os.closerange(low, fd)
        low = fd + 1
    os.closerange(low, highest + 1)


def _fork_process() -> int:
    """As os.fork(), which warns of threads. There is one where F_SETSIG is not to be had: it waits in poll and holds no lock."""
    if HAS_SETSIG:
        return os.fork()
    import warnings

    with warnings.catch_warnings():  # left on both sides of the fork: what user code does in a worker is warned of
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _tell(report: socket.socket, kind: int, value: int, fds: Collection[int] = ()) -> bool:
    """Whether somebody is there to hear it. Two messages at most go through one report: it is never full."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        socket.send_fds(report, [REPORT.pack(kind, value)], list(fds))
        return True
    return False


def _socket(fd: int) -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, fileno=fd)


def _close(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)
