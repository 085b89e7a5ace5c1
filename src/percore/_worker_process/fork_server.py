"""The fork server: a small process with all modules imported, which forks once per worker.

    supervisor  -- ctl (SEQPACKET): a request with the worker's fds -->  fork server  -- fork -->  worker
         ^                                                                  |
         +--------- report (SEQPACKET, one per request): pid + pidfd, later the exit code

If it fails, its traceback goes to standard error, which may be closed, and back on ctl: the errors of the supervisor show it.

Invariants:

- It has one thread and runs no user code, except that it imports the modules which the program has named to
  `multiprocessing.set_forkserver_preload`. So it always answers, and a fork copies no held lock. (On systems without F_SETSIG
  there is also the lifeline's thread, which holds no lock.)
- It ends when the supervisor ends (it polls the supervisor's pidfd), when `ctl` is closed, and when its own lifeline is cut. The
  lifeline works even while it is stopped. When it ends, the lifelines of its workers are cut, and they end, too.
- A worker closes all inherited fds of the fork server: an open write end of a sibling's lifeline would keep that sibling alive.
  It keeps the fds that the program's modules have opened while they were imported.
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

from percore._common.fault_points import POINTS, point
from percore._common.hardening import close_process
from percore._common.system import HAS_SETSIG, uvloop_wanted
from percore._worker_process.title import set_title
from percore._worker_process.world import (
    BORN,
    EXITED,
    FAILED,
    HELD_BACK,
    MAX_FDS,
    MOST_REASON,
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


_OPEN_FDS = "/proc/self/fd"


class Birth(NamedTuple):
    """The fds of a worker right after the fork: those from the supervisor, and the lifeline to the fork server."""

    fds: list[int]
    lifeline: int


class Child(NamedTuple):
    pid: int
    report: socket.socket
    lifeline: int


class ForkServer:
    """The loop of the fork server. It may hold a socket object only if both sides of a fork close it explicitly."""

    def __init__(self, ctl: int, supervisor: int, *, may_have_threads: bool) -> None:
        self._ctl = _socket(ctl)
        self._may_have_threads = may_have_threads
        self._supervisor = supervisor
        self._children: dict[int, Child] = {}  # by pidfd
        self._poller = select.poll()
        self._poller.register(ctl, select.POLLIN)
        self._poller.register(supervisor, select.POLLIN)

    def serve(self) -> Birth:
        """Answer requests for ever. Returns only in a new worker, once after each fork."""
        while True:
            for fd, _ in self._poller.poll():
                if fd == self._supervisor:
                    os._exit(0)
                if fd != self._ctl.fileno():
                    self._on_exit(fd)
                elif (birth := self._on_request()) is not None:
                    return birth

    def _on_request(self) -> Birth | None:
        try:
            data, fds = receive(self._ctl, REQUEST.size, MAX_FDS)
        except BlockingIOError:
            return None
        if not data:
            os._exit(0)
        if POINTS:
            point("forkserver.request")
        if len(fds) < REQUEST.unpack(data)[0]:  # this process has too many open fds: the kernel dropped the rest
            self._refuse(fds, errno.EMFILE)
            return None
        try:
            lifeline = os.pipe()
        except OSError as error:
            self._refuse(fds, error.errno or errno.EMFILE)
            return None
        return self._fork(fds, *lifeline)

    def _fork(self, fds: list[int], lifeline: int, write_end: int) -> Birth | None:
        # The fork server ignores these signals. They stay blocked until the worker has set its own handlers, so that a signal sent
        # to the worker earlier is delivered then.
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, HELD_BACK)
        try:
            pid = _fork_process(warns_of_threads=self._may_have_threads)
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
            os.kill(child.pid, signal.SIGKILL)  # our child, not reaped yet: no other process can have this pid
            os.waitpid(child.pid, 0)
            _tell(child.report, FAILED, error.errno or errno.EMFILE)
            child.report.close()
            os.close(child.lifeline)
            return
        self._children[pidfd] = child
        self._poller.register(pidfd, select.POLLIN)
        if not _tell(child.report, BORN, child.pid, [pidfd]):
            signal.pidfd_send_signal(pidfd, signal.SIGKILL)  # the supervisor does not wait for it, or cannot know it
        if POINTS:
            point("forkserver.born")

    def _on_exit(self, pidfd: int) -> None:
        self._poller.unregister(pidfd)
        child = self._children.pop(pidfd)
        _, status, used = os.wait4(child.pid, 0)
        if POINTS:
            point("forkserver.reaped")
        _tell(child.report, EXITED, os.waitstatus_to_exitcode(status), peak=used.ru_maxrss * 1024)
        child.report.close()
        _close((pidfd, child.lifeline))

    def _refuse(self, fds: list[int], code: int) -> None:
        """Answer a request with an error. If the fd of the report did not arrive either, the supervisor reads EOF instead."""
        if fds:
            with _socket(fds[0]) as report:
                _tell(report, FAILED, code)
        _close(fds[1:])

    def _forget(self) -> None:
        """In a new worker, close the socket objects. Their finalizers would later close fds that have been reused by then."""
        self._ctl.close()
        for child in self._children.values():
            child.report.close()


def main(data: tuple[list[str], list[str], str, list[str], bool]) -> None:
    """Run the fork server. Called first there: `python -c BOOT data ctl supervisor lifeline`.

    `data`: the search path, the modules of percore to import, the name of the program, its modules to import, and whether it is
    closed to others.
    """
    ctl, supervisor, lifeline = map(int, sys.argv[2:])
    for fd in (ctl, supervisor, lifeline):
        os.set_inheritable(fd, False)
    _take_signals()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, HELD_BACK)
    die_with(lifeline)
    _, modules, program, of_program, is_closed = data
    try:
        if is_closed:
            close_process()
        kept = _preload(modules, of_program)
        _take_signals()  # again: the program's modules may have set handlers, for themselves
        set_title("fork server", program, "percore-server")
        birth = ForkServer(ctl, supervisor, may_have_threads=bool(of_program) or not HAS_SETSIG).serve()
    except BaseException:
        _tell_why(ctl)
        raise
    _become_worker(birth, kept)


def _take_signals() -> None:
    # A terminal or a service manager signals the whole process group. This process ignores the signal and ends with its supervisor.
    for signum in HELD_BACK:
        signal.signal(signum, signal.SIG_IGN)
    # If it were ignored (as inherited through exec), all exit codes would be lost, and nobody could wait for a worker.
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)


def _tell_why(ctl: int) -> None:
    """Send the end of the traceback of the current error to the supervisor."""
    import traceback

    with contextlib.suppress(OSError):  # it is gone, or this is a new worker, which has closed the socket
        os.write(ctl, traceback.format_exc().encode(errors="backslashreplace")[-MOST_REASON:])


def _preload(modules: Iterable[str], of_program: Iterable[str]) -> list[int]:
    """Import these modules, and close what ties this process to the program.

    Return the fds that the program's modules have opened.
    """
    for name in modules:
        importlib.import_module(name)
    if uvloop_wanted():
        with contextlib.suppress(ModuleNotFoundError):  # used only if it is installed
            importlib.import_module("uvloop")
    kept = _import_of_program(of_program)
    # Up to here a traceback reaches the user's stderr. From here on this process keeps no pipe, terminal or mount point open. Flush
    # first: otherwise every worker would flush the buffered output of the imports.
    sys.stdout.flush()
    if sys.stderr is not None:
        sys.stderr.flush()
    null = os.open(os.devnull, os.O_RDWR)
    os.dup2(null, 1)
    os.dup2(null, 2)
    if null > 2:
        os.close(null)
    os.chdir("/")
    # Each worker clears this cache (`world.enter`). Clear it here first, so that workers do not write to pages shared with this
    # process, which would copy each page.
    sys.path_importer_cache.clear()
    gc.freeze()
    gc.enable()
    return kept


def _import_of_program(modules: Iterable[str]) -> list[int]:
    """Import the program's modules. One that fails is reported on standard error, and the workers import it again."""
    if not modules:
        return []
    before = _open_fds()
    for name in modules:
        try:
            importlib.import_module(name)
        except ImportError:  # as multiprocessing does: the program may name modules that are not installed
            continue
        except BaseException:
            sys.excepthook(*sys.exc_info())
    return list(_open_fds() - before)


def _open_fds() -> set[int]:
    """Return the open fds. Empty if the system does not tell."""
    with contextlib.suppress(OSError):
        # The fd of the listing itself is closed by now.
        return {int(name) for name in os.listdir(_OPEN_FDS) if os.path.exists(f"{_OPEN_FDS}/{name}")}
    return set()


def _become_worker(birth: Birth, kept: Collection[int]) -> None:
    world_file, cwd, out, err, lifeline, *fds = birth.fds[1:]
    _close_all_but((birth.lifeline, *birth.fds[1:], *kept))
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
    # Stop at the highest open fd. If Python was built without close_range(2), closerange() up to the limit of open files would make
    # a million system calls in some containers.
    highest = max(_open_fds(), default=os.sysconf("SC_OPEN_MAX"))
    low = 3
    for fd in sorted(keep):
        if low < fd:  # skip empty ranges: closerange(0, 0) closes everything
            os.closerange(low, fd)
        low = fd + 1
    os.closerange(low, highest + 1)


def _fork_process(*, warns_of_threads: bool) -> int:
    """Call os.fork() without its warning about threads.

    On systems without F_SETSIG there is one other thread (the lifeline's). It waits in poll and holds no lock. Modules of the
    program may have started others, for which the program answers.
    """
    if not warns_of_threads:
        return os.fork()
    import warnings

    with warnings.catch_warnings():  # both sides of the fork leave this block: user code in a worker is warned as usual
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


def _tell(report: socket.socket, kind: int, value: int, fds: Collection[int] = (), peak: int = 0) -> bool:
    """Send a report. It never blocks: a report gets at most two messages.

    Return False if that fails, above all because the supervisor has closed its end. One worker is lost then, and no other.
    """
    with contextlib.suppress(OSError):
        socket.send_fds(report, [REPORT.pack(kind, value, peak)], list(fds))
        return True
    return False


def _socket(fd: int) -> socket.socket:
    return socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, fileno=fd)


def _close(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)
