"""Start workers by percore's own fork server: one for all runners of this process, ended with the last of them.

Every request carries an end of a socket of its own, and its answers come there: so the workers of several loops in
several threads share nothing but the lock around sending a request.

A fork server that dies takes its workers along (it holds their lifelines). The next launch starts a new one; a request
it had not answered is sent again unasked, once, unless its worker was heard of already (the fork server died between
the fork and its answer). One that was started under another user, other limits or in another cgroup than now gets no
more requests and lives on until its workers are gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
from typing import TYPE_CHECKING

from percore._engines.fds import (
    Fd,
    above_streams,
    anonymous_file,
    duplicate,
    hold,
    let_go,
    open_file,
    packet_pair,
    pipe,
)
from percore._engines.launch import ENTRY, Watched, interpreter, is_stream, world_for_fork
from percore._engines.servers import servers
from percore._platform import HAS_PIDFD
from percore._reports import report
from percore._worker.world import BORN, EXITED, FAILED, REPORT, receive

if TYPE_CHECKING:
    import socket
    from collections.abc import Callable, Sequence

    from percore._engines.servers import Server

_NOTHING_YET, _SILENCE = -1, -2  # beside the kinds of report: none came, none will come
_ORPHAN_PATIENCE = 0.01  # seconds that init may take to reap a worker without fork server: only then its code is told
_ANSWER_PATIENCE = 1.0  # seconds a fork server may take to bear a worker that is to be killed anyway, or to reap one


class ForkServerLauncher:
    """Starts workers as forks of the fork server of this process. Made by `open`."""

    def __init__(self, entry: str) -> None:
        self._entry = entry
        self.preload = entry.partition(":")[0]

    @classmethod
    def open(cls, entry: str = ENTRY) -> ForkServerLauncher:
        """Take a share in the fork server, which is started by `warm_up` or the first launch, and ended with the last share.

        Raises:
            RuntimeError: this system has no pidfds; or there is no interpreter to start it with.
        """
        interpreter()
        if not HAS_PIDFD:
            raise RuntimeError('start_method="forkserver" needs pidfds (Linux 5.3); use start_method="spawn" here')
        launcher = cls(entry)
        servers.join(launcher)
        return launcher

    def warm_up(self) -> None:
        """Have the fork server come up before the first launch asks it for a worker.

        Where it cannot be started that is no error yet: the launch tries again, and tells.
        """
        with contextlib.suppress(OSError):
            servers.warm_up(self.preload)

    def launch(self, boot: bytes, fds: Sequence[int], on_exit: Callable[[int | None], None]) -> ForkedProcess:
        """Start a worker with the surroundings of this moment, from the running loop. See `percore._engine.Launcher`.

        Raises:
            OSError: nothing could be started; nothing is left behind.
            RuntimeError: the launcher is closed.
        """
        if not self.is_open():
            raise RuntimeError("this launcher is closed")
        return ForkedProcess(asyncio.get_running_loop(), self, _Request(self._entry, boot, fds), on_exit)

    def helpers(self) -> dict[int, str]:
        """The fork servers of this process, which its other runners use as well."""
        return dict.fromkeys(servers.pids(), "fork server")

    def is_open(self) -> bool:
        return servers.is_member(self)

    async def aclose(self) -> None:
        """Give the share back. With the last one the fork server ends, and with it what workers it still has.

        Idempotent. When this returns it is reaped; cancelled, it is ended all the same, and reaped by the next launch
        or close.
        """
        ending = servers.leave(self)
        try:
            for server in ending:
                await _wait_dead(server.pidfd)
        finally:
            servers.give_back(ending)


async def _wait_dead(pidfd: Fd) -> None:
    loop = asyncio.get_running_loop()
    dead = asyncio.Event()
    loop.add_reader(pidfd.number, dead.set)
    try:
        await dead.wait()
    finally:
        loop.remove_reader(pidfd.number)


class _Request:
    """All that a worker is to get, kept until a fork server has answered: another one may have to be asked.

    `fds` go with the request, `lifeline` stays: its closing kills the worker.
    """

    def __init__(self, entry: str, boot: bytes, fds: Sequence[int]) -> None:
        read_end, self.lifeline = pipe()
        self.fds: list[Fd] = []
        try:
            self.fds.append(anonymous_file(world_for_fork(entry, boot).dump()))
            # O_PATH: entering a directory asks for fewer rights than reading it.
            self.fds.append(open_file(".", os.O_PATH | os.O_DIRECTORY))
            for fd in (1, 2):
                self.fds.append(duplicate(fd) if is_stream(fd) else open_file(os.devnull, os.O_RDWR))
            self.fds.append(read_end)
            for fd in fds:
                self.fds.append(duplicate(fd))
        except BaseException:
            let_go(read_end, self.lifeline, *self.fds)
            raise

    def answered(self) -> None:
        let_go(*self.fds)


class ForkedProcess(Watched):
    """A worker born from the fork server: asked for, then alive with a pid, then gone."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        launcher: ForkServerLauncher,
        request: _Request,
        on_exit: Callable[[int | None], None],
    ) -> None:
        super().__init__(loop, on_exit)
        self._launcher = launcher
        self._request = request
        self._server: Server | None = None
        self._report: socket.socket | None = None
        self._asked = 0
        self._wanted: int | None = None  # the signal of a kill that came before the pid
        self._is_late = False
        self._has_spoken = False
        try:
            self._ask()
        except BaseException:
            request.answered()
            let_go(request.lifeline)
            raise

    def kill(self, signum: int = signal.SIGKILL) -> None:
        """Send a signal. Once the process is gone: nothing. Before the pid is known: on arrival.

        A fork server that does not answer then (somebody stopped it) is not waited for: the launch counts as ended, the
        next one starts another fork server, and a worker that is born after all finds its lifeline cut.
        """
        if self.pid is not None or self._gone:
            super().kill(signum)
            return
        self._wanted = signum  # the last one counts: what escalates ends with SIGKILL
        if signum == signal.SIGKILL:
            let_go(self._request.lifeline)  # where the loop is closed, nobody hears of a birth any more
            if self._timer is None and not self._loop.is_closed():
                self._timer = self._loop.call_later(_ANSWER_PATIENCE, self._give_up)

    def spoke(self) -> None:
        """As Process.spoke: the request is not sent again, whatever becomes of its fork server."""
        self._has_spoken = True

    def _give_up(self) -> None:
        # One that nobody has stopped is only slow, as when it comes up on a loaded machine: who closes then is told nothing.
        level = logging.DEBUG if servers.will_answer(self._server) else logging.WARNING
        report(level, "the fork server does not answer; a new one is started for the next worker")
        servers.retire(self._server)
        self._finish(None)

    def _ask(self) -> None:
        ours, theirs = packet_pair()
        try:
            self._server = servers.send(self._launcher.preload, [theirs, *self._request.fds])
        except BaseException:
            let_go(ours)
            raise
        finally:
            let_go(theirs)
        self._asked += 1
        self._report = ours
        self._loop.add_reader(ours.fileno(), self._on_report)

    def _on_report(self) -> None:
        kind, value, fds = self._read_report()
        if kind == BORN:
            self._on_birth(value, fds)
        elif kind == EXITED:
            self._finish(value)  # reaped by its fork server: as dead as a pidfd could tell
        elif kind == FAILED:
            report(logging.WARNING, "the fork server could not start a worker: %s", os.strerror(value))
            self._finish(None)
        elif kind == _SILENCE:
            self._on_silence()

    def _on_birth(self, pid: int, fds: list[int]) -> None:
        self._request.answered()
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if not fds:
            # This process is out of fds and the kernel dropped the pidfd. A worker whose death could not be seen must
            # not live; that it has ended is told by the fork server, or by its silence.
            self.pid = pid
            let_go(self._request.lifeline)
            return
        self._watch(pid, hold(Fd(above_streams(fds[0]))))
        if self._wanted is not None:
            super().kill(self._wanted)

    def _on_silence(self) -> None:
        """The fork server is dead. Its workers are dying: those with a pidfd are told dead by that."""
        if self.pid is not None:
            if self._pidfd is None:
                self._finish(None)
            return
        # 1. the fork server dies  2. a request is sent to it  3. its sockets close: only now we know. Or a request
        # kills fork servers: so once more, not for ever. And not where the worker has run, before its fork server could tell
        # of it: another one would find its calls in the memory that is meant for it, and run them again.
        if self._has_spoken or self._asked > 1 or not self._launcher.is_open():
            self._finish(None)
            return
        servers.done(self._server)
        try:
            self._ask()
        except OSError as error:
            report(logging.WARNING, "could not start a new fork server: %s", error)
            self._server = None
            self._finish(None)

    def _read_report(self) -> tuple[int, int, list[int]]:
        if self._report is None:
            return _SILENCE, 0, []
        try:
            data, fds = receive(self._report, REPORT.size, 1)
        except BlockingIOError:
            return _NOTHING_YET, 0, []
        if data:
            kind, value = REPORT.unpack(data)
            return kind, value, fds
        self._close_report()
        servers.lost(self._server)
        return _SILENCE, 0, []

    def _known_code(self, pidfd: Fd) -> int | None:
        kind, value, _ = self._read_report()
        return value if kind == EXITED else super()._known_code(pidfd)

    def _patience(self) -> float:
        return _ORPHAN_PATIENCE if self._report is None else super()._patience()

    def _after_patience(self, pidfd: Fd) -> None:
        """A fork server that is stopped tells no code for now; one that a loaded machine keeps waiting is given more time."""
        code = self._known_code(pidfd)
        if code is None and not self._is_late and self._report is not None and servers.will_answer(self._server):
            self._is_late = True
            self._timer = self._loop.call_later(_ANSWER_PATIENCE, self._after_patience, pidfd)
        else:
            self._finish(code)

    def _close_report(self) -> None:
        if self._report is not None:
            self._loop.remove_reader(self._report.fileno())
            let_go(self._report)
            self._report = None

    def _release(self) -> None:
        super()._release()
        self._close_report()
        self._request.answered()
        let_go(self._request.lifeline)
        servers.done(self._server)
        if servers.untold and not self._loop.is_closed():
            self._loop.call_soon(servers.tell)
