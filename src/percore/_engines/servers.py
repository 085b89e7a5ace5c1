"""The fork servers of this process: the one in use, and those that are ending.

Several loops in several threads share them, so everything here happens under one lock, and nothing under it blocks for
longer than starting a program takes. A process forked from this one has none (its first launch starts its own).
"""

from __future__ import annotations

import contextlib
import logging
import os
import resource
import signal
import socket
import threading
from typing import TYPE_CHECKING

from percore._engines.fds import Fd, above_streams, hold, let_go, packet_pair, pipe
from percore._engines.launch import exit_code, open_child, search_path, start_python
from percore._reports import report
from percore._worker.world import REQUEST

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from percore._engines.fds import Closable

_MAIN = "percore._worker.forkserver:main"
_LIMITS = [getattr(resource, name) for name in dir(resource) if name.startswith("RLIMIT_")]


class Server:
    """One fork server process."""

    def __init__(self, preload: str) -> None:
        """Start it. `preload` names the module it imports before it answers.

        Raises:
            OSError: it could not be started; nothing is left behind.
        """
        self.fingerprint = fingerprint()
        self.living = 0  # launches whose end has not been told
        self.is_lost = False  # it has died, and nobody here has ended it
        self.exitcode: int | None = None
        self.is_ended = False
        self._ctl, theirs = packet_pair()
        kept: list[Closable] = [self._ctl]
        given: list[Closable] = [theirs]
        try:
            supervisor = hold(Fd(above_streams(os.pidfd_open(os.getpid()))))
            given.append(supervisor)
            read_end, self._lifeline = pipe()
            given.append(read_end)
            kept.append(self._lifeline)
            fds = [theirs.fileno(), supervisor.fileno(), read_end.fileno()]
            self.pid = start_python(_MAIN, (search_path(), [preload]), fds, stdout=False)
            self.pidfd = open_child(self.pid)
        except BaseException:
            let_go(*kept)
            raise
        finally:
            let_go(*given)

    def send(self, fds: Sequence[Closable]) -> None:
        numbers = [fd.fileno() for fd in fds]
        socket.send_fds(self._ctl, [REQUEST.pack(len(numbers))], numbers)

    def end(self) -> None:
        """Kill it: it has nothing to put in order, and a stopped one would not notice anything gentler."""
        if self.is_ended:
            return
        self.is_ended = True
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(self.pidfd.number, signal.SIGKILL)
        let_go(self._ctl, self._lifeline)

    def is_stopped(self) -> bool:
        """Whether somebody has stopped it: it says nothing until it is continued."""
        return os.waitid(os.P_PIDFD, self.pidfd.number, os.WSTOPPED | os.WNOHANG | os.WNOWAIT) is not None

    def reap(self) -> bool:
        """Whether it is ended and reaped, now or earlier. Then no fd is left."""
        if self.is_ended and self.pidfd.number >= 0:
            try:
                gone = os.waitid(os.P_PIDFD, self.pidfd.number, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
            except ChildProcessError:  # by somebody else
                gone = True
            if gone:
                self.exitcode = exit_code(self.pidfd.number)
                let_go(self.pidfd)
        return self.pidfd.number < 0


class Servers:
    """Who has a share in the fork server, and which one answers now."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Start anew, as in a forked process, where another thread may have held the lock at the fork."""
        self._lock = threading.Lock()
        self._members: set[object] = set()
        self._current: Server | None = None
        self._retired: list[Server] = []  # without new requests; each ends with the last of its workers
        self.untold: list[Server] = []  # that have died by themselves and are reaped

    def join(self, member: object) -> None:
        with self._lock:
            self._members.add(member)

    def pids(self) -> list[int]:
        """The fork servers that live, as far as is known: the one in use first."""
        with self._lock:
            return [one.pid for one in (self._current, *self._retired) if one is not None and not (one.is_ended or one.is_lost)]

    def is_member(self, member: object) -> bool:
        return member in self._members

    def leave(self, member: object) -> list[Server]:
        """The fork servers that ended with the last share, to be reaped by the caller (see `give_back`)."""
        with self._lock:
            last = self._members == {member}
            self._members.discard(member)
            if not last:
                return []
            ending = [*self._retired, *filter(None, [self._current])]
            self._retired, self._current = [], None
            for server in ending:
                server.end()
            return ending

    def give_back(self, ending: Iterable[Server]) -> None:
        """Reap what has ended; the rest is reaped on the way of a later launch or exit."""
        with self._lock:
            self._retired += ending
            self._reap()
        self.tell()

    def send(self, preload: str, fds: Sequence[Closable]) -> Server:
        """Send a request to a fork server of the surroundings of now, started if need be; count it as living.

        Raises:
            OSError: none could be started, or it takes no requests.
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
                server.send(fds)
            server.living += 1
            return server

    def warm_up(self, preload: str) -> None:
        """Start a fork server of the surroundings of now, if there is none.

        Raises:
            OSError: it could not be started.
        """
        with self._lock:
            self._reap()
            self._suitable(preload)

    def will_answer(self, server: Server | None) -> bool:
        """Whether it lives, as far as is known, and is not stopped: then it is slow at worst."""
        with self._lock:
            if server is None or server.pidfd.number < 0:
                return False
            with contextlib.suppress(ChildProcessError):  # reaped by somebody else
                return not server.is_stopped()
            return False

    def retire(self, server: Server | None) -> None:
        """Send it no more requests; it is dead or does not answer."""
        with self._lock:
            if server is not None and server is self._current:
                self._retire(server)

    def lost(self, server: Server | None) -> None:
        """It has closed its sockets: it is dead, or dies."""
        with self._lock:
            if server is not None:
                server.is_lost |= not server.is_ended
                if server is self._current:
                    self._retire(server)

    def done(self, server: Server | None) -> None:
        """The end of one of its launches has been told."""
        with self._lock:
            if server is not None:
                server.living -= 1
                if server in self._retired and not server.living:
                    server.end()
            self._reap()

    def _suitable(self, preload: str) -> Server:
        if self._current is not None and self._current.fingerprint != fingerprint():
            self._retire(self._current)
        if self._current is None:
            self._current = Server(preload)
        return self._current

    def _retire(self, server: Server) -> None:
        self._current = None
        self._retired.append(server)
        if not server.living:
            server.end()

    def _reap(self) -> None:
        reaped = [server for server in self._retired if server.reap()]
        self._retired = [server for server in self._retired if server not in reaped]
        self.untold += [server for server in reaped if server.is_lost]

    def tell(self) -> None:
        """Report those that died by themselves. Neither under the lock nor in the midst of a death: the user's log handlers run."""
        while self.untold:
            server = self.untold.pop()
            from percore._broken import how

            report(logging.WARNING, "the fork server (pid %d) died %s, and its workers with it", server.pid, how(server.exitcode))


_READ_ONCE = ("LD_", "MALLOC_", "PERCORE_POINTS", "PERCORE_WITHOUT", "PYTHON")
"""Beginnings of variables that are read when a process or an interpreter starts: a fork cannot catch up on them."""


def fingerprint() -> tuple[object, ...]:
    """What a worker cannot take over from afar: two processes that differ in it must not bear each other's workers."""
    try:
        with open("/proc/self/cgroup", "rb") as file:
            cgroup = file.read()
    except OSError:
        cgroup = b""  # no /proc: nobody could tell
    limits = tuple(map(resource.getrlimit, _LIMITS))
    variables = frozenset(item for item in os.environ.items() if item[0].startswith(_READ_ONCE))
    return os.getresuid(), os.getresgid(), tuple(os.getgroups()), limits, cgroup, variables


servers = Servers()
os.register_at_fork(after_in_child=servers.forget)
