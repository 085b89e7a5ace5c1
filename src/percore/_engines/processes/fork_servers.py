"""The fork servers of this process: the one in use, and the retired ones, which are ending.

Each open runner has a share, and the last share to go ends them. From its first LoopPoolExecutor on, the program has a share, too,
until the interpreter ends: a program that opens one executor after another starts one fork server.

Loops in several threads share them, so one lock guards everything here. No code under the lock blocks for longer than
starting a program takes. A process forked from this one has no fork server; its first launch starts one.
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
import resource
import select
import signal
import socket
import sys
import threading
from typing import TYPE_CHECKING, Any, Final

from percore._common.hardening import Closed
from percore._common.log import report
from percore._engines.processes.descriptors import Fd, above_streams, hold, let_go, packet_pair, pipe
from percore._engines.processes.launch import end_child, environment, exit_code, last_line, open_child, search_path, start_python
from percore._worker_process.title import program_name
from percore._worker_process.world import MOST_REASON, REQUEST

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from percore._engines.processes.descriptors import Closable

_MAIN = "percore._worker_process.fork_server:main"
_PROGRAM = "the program"
"""The member that executors add: the program itself."""

_DEATH_PATIENCE = 1000  # milliseconds that the end of the interpreter waits for a killed process
_LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]


class NoRoom(Exception):
    """There is no room for a request until the fork server has taken earlier ones.

    No OSError: a BlockingIOError is also the answer of a system that starts no more processes.
    """


class ForkServerProcess:
    """One fork server process."""

    def __init__(self, preload: str) -> None:
        """Start the fork server. `preload` names the module that it imports before it answers.

        Raises:
            OSError: it could not be started; nothing is left behind.
        """
        self.fingerprint = fingerprint()
        self.living = 0  # launches whose end has not been reported
        self.is_lost = False  # it died by itself: `end` was not called before
        self.exitcode: int | None = None
        self.reason = ""
        """The end of the traceback with which it has failed, once that is known."""
        self.is_ended = False
        self._ctl, theirs = packet_pair()
        kept: list[Closable] = [self._ctl]
        given: list[Closable] = [theirs]
        pid: int | None = None
        try:
            supervisor = hold(Fd(above_streams(os.pidfd_open(os.getpid()))))
            given.append(supervisor)
            read_end, self._lifeline = pipe()
            given.append(read_end)
            kept.append(self._lifeline)
            fds = [theirs.fileno(), supervisor.fileno(), read_end.fileno()]
            data = (search_path(), [preload], program_name(), _preloads_of_program(), Closed.is_program)
            self.pid = pid = start_python(_MAIN, data, fds, stdout=False)
            self.pidfd = open_child(pid)
        except BaseException:
            let_go(*kept)
            if pid is not None:
                end_child(pid)
            raise
        finally:
            let_go(*given)

    def send(self, fds: Sequence[Closable]) -> None:
        """Send a request with copies of these descriptors.

        Raises:
            NoRoom: there is no room for it.
            OSError: the fork server is dead.
        """
        numbers = [fd.fileno() for fd in fds]
        try:
            socket.send_fds(self._ctl, [REQUEST.pack(len(numbers))], numbers)
        except OSError as error:
            # unix(7): a user may have as many descriptors in transit as RLIMIT_NOFILE says, and root any number.
            if error.errno in (errno.EAGAIN, errno.ETOOMANYREFS):
                raise NoRoom from None
            raise

    def hear(self) -> None:
        """Read why it has died, if it could tell that."""
        for _ in range(2):  # the first may say that it has left requests unread
            with contextlib.suppress(OSError):  # it has told nothing, or its socket is closed here
                self.reason = self.reason or self._ctl.recv(MOST_REASON).decode(errors="replace")

    def end(self) -> None:
        """Kill it. It has nothing to clean up, and SIGKILL works even while it is stopped."""
        if self.is_ended:
            return
        self.hear()
        # PermissionError: this program has given up rights that it had at the start. Then the lifeline kills it.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            signal.pidfd_send_signal(self.pidfd.number, signal.SIGKILL)
        let_go(self._ctl, self._lifeline)
        self.is_ended = True  # last: whoever sees it waits for the death, and a Ctrl-C may come before

    def wait_dead(self) -> None:
        """Wait until it is dead, after `end`. Blocks."""
        poller = select.poll()
        poller.register(self.pidfd.number, select.POLLIN)
        poller.poll(_DEATH_PATIENCE)

    def is_stopped(self) -> bool:
        """Whether it is stopped (SIGSTOP). It does not answer until it is continued."""
        return os.waitid(os.P_PIDFD, self.pidfd.number, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None

    def reap(self) -> bool:
        """Reap it if it has ended. Return whether it is reaped; then no fd of it is open."""
        if self.is_ended and self.pidfd.number >= 0:
            try:
                gone = os.waitid(os.P_PIDFD, self.pidfd.number, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
            except ChildProcessError:  # other code has reaped it
                gone = True
            if gone:
                self.exitcode = exit_code(self.pidfd.number)
                let_go(self.pidfd)
        return self.pidfd.number < 0


class ForkServers:
    """The launchers that share the fork server, the fork server in use, and the retired ones."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Reset everything. A forked process does this, because another thread may have held the lock at the fork."""
        # Re-entrant: a garbage collection under it may run a `__del__` of the user that closes or starts a runner.
        self._lock = threading.RLock()
        self._members: set[object] = set()
        self._current: ForkServerProcess | None = None
        self._retired: list[ForkServerProcess] = []  # they get no new requests, and each ends with the last of its workers
        self.untold: list[ForkServerProcess] = []  # they died by themselves and are reaped, but `tell` has not reported them yet

    def are_held(self) -> bool:
        """Whether this thread is in the middle of a step: other threads wait until it has ended."""
        return self._lock._is_owned()  # type: ignore[attr-defined, no-any-return]  # as `threading.Condition` asks

    def join(self, member: object) -> None:
        with self._lock:
            self._members.add(member)

    def pids(self) -> list[int]:
        """The pids of the fork servers that are alive, as far as is known. The one in use comes first."""
        with self._lock:
            return [one.pid for one in (self._current, *self._retired) if one is not None and not (one.is_ended or one.is_lost)]

    def is_member(self, member: object) -> bool:
        return member in self._members

    def leave(self, member: object) -> list[ForkServerProcess]:
        """Give up a share, and with the last share end all fork servers.

        Return those that are ending. The caller waits until they are dead, and reaps them by `give_back`.
        """
        with self._lock:
            last = self._members == {member}
            self._members.discard(member)
            if last:
                self._retired, self._current = [*self._retired, *filter(None, [self._current])], None
                for server in self._retired:
                    server.end()
            ending = [server for server in self._retired if server.is_ended]
            self._retired = [server for server in self._retired if not server.is_ended]
            return ending

    def give_back(self, ending: Iterable[ForkServerProcess]) -> None:
        """Reap the servers that have ended. Later launches and exits reap the rest."""
        with self._lock:
            self._retired += ending
            self._reap()
        self.tell()

    def send(self, preload: str, fds: Sequence[Closable]) -> ForkServerProcess:
        """Send a request to a fork server that fits the current environment, and count the launch as living.

        Starts a fork server if none fits.

        Raises:
            NoRoom: it has to take earlier requests first.
            OSError: the fork server could not be started, or takes no requests.
        """
        with self._lock:
            self._reap()
            server = self._suitable(preload)
            try:
                server.send(fds)
            except ConnectionError:  # it died since the last request
                server.is_lost = True
                self._retire(server)
                server = self._suitable(preload)
                self._send_again(server, fds)
            server.living += 1
            return server

    def _send_again(self, server: ForkServerProcess, fds: Sequence[Closable]) -> None:
        try:
            server.send(fds)
        except ConnectionError as error:
            server.is_lost = True
            self._retire(server)
            why = last_line(server.reason)
            raise OSError(error.errno, f"the fork server died as soon as it was started{why}") from None

    def warm_up(self, preload: str) -> None:
        """Start a fork server that fits the current environment, if there is none.

        Raises:
            OSError: it could not be started.
        """
        with self._lock:
            self._reap()
            self._suitable(preload)

    def keep(self, preload: str) -> None:
        """As `warm_up`, and keep the fork servers until `keep_no_longer`, even if no runner is open.

        Raises:
            OSError: it could not be started.
        """
        self.join(_PROGRAM)
        self.warm_up(preload)

    def keep_no_longer(self) -> None:
        """Undo `keep`. If no runner is open, end the fork servers and reap them. Blocks while they die."""
        ending = self.leave(_PROGRAM)
        try:
            for server in ending:
                server.wait_dead()
        finally:
            self.give_back(ending)

    def will_answer(self, server: ForkServerProcess | None) -> bool:
        """Whether it is alive, as far as is known, and not stopped. If so, a missing answer means only that it is slow."""
        with self._lock:
            if server is None or server.pidfd.number < 0:
                return False
            with contextlib.suppress(ChildProcessError):  # other code has reaped it
                return not server.is_stopped()
            return False

    def retire(self, server: ForkServerProcess | None) -> None:
        """Send it no more requests, because it is dead or does not answer."""
        with self._lock:
            if server is not None and server is self._current:
                self._retire(server)

    def renew(self) -> None:
        """Start a new fork server for the next launch, which imports all modules anew. The old one ends with its last worker."""
        with self._lock:
            if self._current is not None:
                self._retire(self._current)

    def lost(self, server: ForkServerProcess | None) -> None:
        """Record that it has closed its sockets: it is dead or dying."""
        with self._lock:
            if server is not None:
                server.is_lost |= not server.is_ended
                server.hear()
                if server is self._current:
                    self._retire(server)

    def done(self, server: ForkServerProcess | None) -> None:
        """Record that the end of one of its launches has been reported."""
        with self._lock:
            if server is not None:
                assert server.living > 0, "a launch has ended twice: the fork server would end under its workers"
                server.living -= 1
                if server in self._retired and not server.living:
                    server.end()
            self._reap()

    def _suitable(self, preload: str) -> ForkServerProcess:
        if self._current is not None and not _fits(self._current):
            self._retire(self._current)
        if self._current is None:
            started = ForkServerProcess(preload)
            if self._current is not None:  # started by a `__del__` meanwhile
                self._retire(self._current)
            self._current = started
        return self._current

    def _retire(self, server: ForkServerProcess) -> None:
        self._retired, self._current = [*self._retired, server], None  # in one step: a Ctrl-C between two would lose it
        if not server.living:
            server.end()

    def _reap(self) -> None:
        reaped = [server for server in self._retired if server.reap()]
        self._retired = [server for server in self._retired if server not in reaped]
        self.untold += [server for server in reaped if server.is_lost]

    def tell(self) -> None:
        """Log the fork servers that died by themselves.

        The user's log handlers run, so do not call this under the lock or while the end of a worker is being handled.
        """
        while True:
            try:
                server = self.untold.pop()
            except IndexError:  # perhaps another thread has just told the last one
                return
            from percore._common.worker_errors import how

            reason = f":\n{server.reason}".rstrip() if server.reason else ""
            end = how(server.exitcode)
            report(logging.WARNING, "the fork server (pid %d) died %s, and its workers with it%s", server.pid, end, reason)


_READ_ONCE = (b"LD_", b"MALLOC_", b"PERCORE_POINTS", b"PERCORE_WITHOUT", b"PYTHON")
"""Prefixes of variables that are read only when a process or an interpreter starts. A fork cannot take over their new values."""


_SHORT: Final = (errno.EMFILE, errno.ENFILE, errno.ENOMEM)


def _fits(server: ForkServerProcess) -> bool:
    """Whether it has the properties that its workers must have. It counts as fitting while they cannot be read."""
    try:
        return server.fingerprint == fingerprint()
    except OSError:  # the launch needs descriptors, too, and tells of their lack
        return True


def fingerprint() -> tuple[object, ...]:
    """Return the properties that a worker can only inherit. A fork server that differs in them must not fork workers for us.

    Raises:
        OSError: no descriptor or no memory is left to read them.
    """
    try:
        with open("/proc/self/cgroup", "rb") as file:
            cgroup = file.read()
    except OSError as error:
        if error.errno in _SHORT:
            raise
        cgroup = b""  # no /proc: the cgroup is unknown
    limits = tuple(map(resource.getrlimit, _LIMITS))
    variables = frozenset(item for item in environment().items() if item[0].startswith(_READ_ONCE))
    user = os.getresuid(), os.getresgid(), tuple(os.getgroups())
    return user, limits, cgroup, variables, tuple(_preloads_of_program()), Closed.is_program


def _preloads_of_program() -> list[str]:
    """The modules that the program has named to `multiprocessing.set_forkserver_preload`.

    Without `__main__`, which stands in that list by default: workers import the script only if a call needs it.
    """
    of_multiprocessing: Any = getattr(sys.modules.get("multiprocessing.forkserver"), "_forkserver", None)
    names: list[str] = getattr(of_multiprocessing, "_preload_modules", [])
    return [str.__str__(name) for name in names if name != "__main__"]


servers = ForkServers()
os.register_at_fork(after_in_child=servers.forget)
