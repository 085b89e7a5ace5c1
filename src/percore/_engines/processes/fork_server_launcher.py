"""Start workers by percore's own fork server. All runners of this process share it, and it ends with the last of them.

Every request carries one end of a socket pair made for it, and the fork server answers on that socket. So workers of
several loops in several threads share only the lock around sending a request.

When a fork server dies, its workers die too, because it holds their lifelines. The next launch starts a new one. A
request that the dead fork server had not answered is not sent again: nobody knows whether it has forked the worker,
which may have written to its memory until its lifeline was cut. Such a process counts as lost (`Process.is_lost`), and
its worker gets another one, with memory of its own. A fork server that was started under another user, other limits or
another cgroup than the current ones gets no more requests, and ends when its workers have gone.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
from typing import TYPE_CHECKING

from percore._common.log import report
from percore._common.system import HAS_PIDFD
from percore._engines.processes.descriptors import (
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
from percore._engines.processes.fork_servers import NoRoom, servers
from percore._engines.processes.launch import ENTRY, Watched, advice_on, interpreter, is_stream, world_for_fork
from percore._worker_process.world import BORN, EXITED, FAILED, REPORT, receive

if TYPE_CHECKING:
    import asyncio
    import socket
    from collections.abc import Callable, Sequence

    from percore._common.sure_handles import SureHandle
    from percore._engines.processes.fork_servers import ForkServerProcess

_NOTHING_YET, _SILENCE = -1, -2  # results beside the kinds of report: none has come yet; none will come
_ORPHAN_PATIENCE = 0.01  # seconds that init may take to reap a worker without a fork server: the exit code is known only then
_SOON, _LATER = 0.005, 0.2  # seconds until a request is sent again that the fork server had no room for: at first, and at most
_ANSWER_PATIENCE = 1.0  # seconds that a fork server may take to fork a worker that is to be killed anyway, or to reap one


class ForkServerLauncher:
    """Starts workers as forks of the fork server of this process. Create one with `open`."""

    def __init__(self, entry: str) -> None:
        self._entry = entry
        self.preload = entry.partition(":")[0]

    @classmethod
    def open(cls, entry: str = ENTRY) -> ForkServerLauncher:
        """Take a share in the fork server. `warm_up` or the first launch starts it, and it ends with the last share.

        Raises:
            RuntimeError: this system has no pidfds, or there is no interpreter to start the fork server with.
        """
        interpreter()
        if not HAS_PIDFD:
            raise RuntimeError('start_method="forkserver" needs pidfds (Linux 5.3); use start_method="spawn" here')
        launcher = cls(entry)
        servers.join(launcher)
        return launcher

    def warm_up(self) -> None:
        """Start the fork server before the first launch needs it.

        A failure is ignored here: the launch tries again, and raises if that fails too.
        """
        with contextlib.suppress(OSError):
            servers.warm_up(self.preload)

    def launch(self, boot: bytes, fds: Sequence[int], on_exit: Callable[[int | None], None]) -> ForkedProcess:
        """As `Launcher.launch`, in the environment of this moment. Call it from the running loop."""
        if not self.is_open():
            raise RuntimeError("this launcher is closed")
        import asyncio

        return ForkedProcess(asyncio.get_running_loop(), self, _Request(self._entry, boot, fds), on_exit)

    def renew(self) -> None:
        """As `Launcher.renew`. The other runners of this process start their next workers from the new fork server, too."""
        servers.renew()

    def helpers(self) -> dict[int, str]:
        """The fork servers of this process, which its other runners use too."""
        return dict.fromkeys(servers.pids(), "fork server")

    def is_open(self) -> bool:
        return servers.is_member(self)

    async def aclose(self) -> None:
        """Give the share back. With the last share, the fork server is killed, together with any workers that it still has.

        Idempotent. When this returns, the fork server is reaped, and so are those that were retired and have no workers. If this
        is cancelled, the fork server is killed all the same, and the next launch or close reaps it.
        """
        ending = servers.leave(self)
        try:
            for server in ending:
                await _wait_dead(server)
        finally:
            servers.give_back(ending)


async def _wait_dead(server: ForkServerProcess) -> None:
    import asyncio

    loop = asyncio.get_running_loop()
    dead, fd = asyncio.Event(), server.pidfd.number
    try:
        loop.add_reader(fd, dead.set)
    except OSError:  # the loop can watch no more; the fork server is killed already
        server.wait_dead()
        return
    try:
        await dead.wait()
    finally:
        loop.remove_reader(fd)


class _Request:
    """The data and descriptors of one worker.

    `fds` are sent with the request, and kept until then: many workers that start at once would otherwise need three times the
    descriptors that they need later. `lifeline` stays here: closing it kills the worker.
    """

    def __init__(self, entry: str, boot: bytes, fds: Sequence[int]) -> None:
        read_end, self.lifeline = pipe()
        self.fds: list[Fd] = []
        try:
            self.fds.append(anonymous_file(world_for_fork(entry, boot).dump()))
            # O_PATH: entering a directory requires fewer permissions than reading it.
            self.fds.append(open_file(".", os.O_PATH | os.O_DIRECTORY))
            for fd in (1, 2):
                self.fds.append(duplicate(fd) if is_stream(fd) else open_file(os.devnull, os.O_RDWR))
            self.fds.append(read_end)
            for fd in fds:
                self.fds.append(duplicate(fd))
        except BaseException:
            let_go(read_end, self.lifeline, *self.fds)
            raise

    def sent(self) -> None:
        """Close the descriptors: they are on their way, or nobody wants them any more. Idempotent."""
        let_go(*self.fds)


class ForkedProcess(Watched):
    """A worker forked by the fork server. Its states: requested, alive with a pid, gone."""

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
        self._server: ForkServerProcess | None = None
        self._report: socket.socket | None = None
        self._wanted: int | None = None  # the signal of a `kill` before the pidfd was known
        self._retry: SureHandle | None = None
        """Runs while the request is to be sent again: the fork server has not taken those before it yet."""
        self._is_late = False
        try:
            self._ask()
        except BaseException:
            self._release()
            raise

    def kill(self, signum: int = signal.SIGKILL) -> None:
        """Send a signal. Once the process is gone, do nothing. Before the pidfd is known, send it as soon as the pidfd arrives.

        After SIGKILL, the fork server has limited time to answer. If it does not (somebody may have stopped it), the
        launch counts as ended, and the next launch starts another fork server. A worker that is forked after all finds
        its lifeline closed, and dies.
        """
        if self._pidfd is not None or self._gone:
            super().kill(signum)
            return
        self._wanted = signum  # the last signal counts: an escalation ends with SIGKILL
        if signum == signal.SIGKILL:
            if self._retry is not None:  # no fork server knows of it
                self._retry.cancel()
                if self._loop.is_closed():
                    self._release()
                else:
                    self._retry = self._later(0.0, self._finish, None)
                return
            self._cut()  # if the loop is closed, the report of the fork is never read
            if self._timer is None and not self._loop.is_closed():
                self._timer = self._later(_ANSWER_PATIENCE, self._give_up)

    def _give_up(self) -> None:
        # If it is not stopped, it is only slow, for example while it starts on a loaded machine: no warning then.
        level = logging.DEBUG if servers.will_answer(self._server) else logging.WARNING
        report(level, "the fork server does not answer; a new one is started for the next worker")
        servers.retire(self._server)
        self._finish(None)

    def _ask(self, pause: float = _SOON) -> None:
        """Send the request, or let it be sent later. After any exception the launch has to end: it is unknown what was sent."""
        self._report, theirs = packet_pair()
        try:
            self._server = servers.send(self._launcher.preload, [theirs, *self._request.fds])
            self._loop.add_reader(self._report.fileno(), self._on_report)
        except NoRoom:  # many workers start at once, and the socket to the fork server is full
            self._close_report()
            self._retry = self._later(pause, self._ask_again, min(2 * pause, _LATER))
            return
        finally:
            let_go(theirs)
        self._request.sent()

    def _ask_again(self, pause: float) -> None:
        retry = self._retry
        if retry is None:  # a Ctrl-C has ended this launch
            return
        try:
            self._retry = None
            retry.cancel()  # first: nothing is sent twice
            self._ask(pause)
        except BaseException as error:  # nobody else ends this launch
            self._refused(f"{error}{advice_on(getattr(error, 'errno', None))}")
            if not isinstance(error, Exception):
                raise

    def _refused(self, why: str) -> None:
        self.refusal = f"the fork server could not start it: {why}"
        report(logging.WARNING, "the fork server could not start a worker: %s", why)
        self._finish(None)

    def _on_report(self) -> None:
        kind, value, fds = self._read_report()
        if kind == BORN:
            self._on_birth(value, fds)
        elif kind == EXITED:
            self._finish(value)  # the fork server has reaped it, so there is no need to wait for the pidfd
        elif kind == FAILED:
            self._refused(os.strerror(value) + advice_on(value))
        elif kind == _SILENCE:
            self._on_silence()

    def _on_birth(self, pid: int, fds: list[int]) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        self.pid = pid
        try:
            # No descriptor: this process is out of them, so the kernel dropped the pidfd.
            is_watched = bool(fds) and self._watch(pid, _pidfd_of(fds[0]))
        except OSError as error:
            report(logging.WARNING, "the worker (pid %d) cannot be watched: %s", pid, error)
            is_watched = False
        if not is_watched:
            # Its death could not be noticed, so it must not live. The fork server reports its end, or closes the socket by dying.
            self._cut()
        elif self._wanted is not None:
            super().kill(self._wanted)

    def _on_silence(self) -> None:
        """The fork server is dead or broken, and the worker is dying. A pidfd, where there is one, reports the death."""
        if self.pid is not None:
            if self._pidfd is None:
                self._finish(None)
            return
        self.is_lost = self._wanted is None
        self.reason_lost = "" if self._server is None else self._server.reason
        self._finish(None)

    def _read_report(self) -> tuple[int, int, list[int]]:
        if self._report is None:
            return _SILENCE, 0, []
        try:
            data, fds = receive(self._report, REPORT.size, 1)
        except BlockingIOError:
            return _NOTHING_YET, 0, []
        if len(data) == REPORT.size:
            kind, value, peak = REPORT.unpack(data)
            is_birth = kind == BORN and value > 0 and self.pid is None
            if is_birth or (kind in (EXITED, FAILED) and not fds):
                self.peak = peak or None
                return kind, value, fds
        for fd in fds:
            os.close(fd)
        self._close_report()
        if data:  # no report: the fork server is broken, and if it has forked a worker, that one must not live
            self._cut()
            servers.retire(self._server)
        else:
            servers.lost(self._server)
        return _SILENCE, 0, []

    def _known_code(self, pidfd: Fd) -> int | None:
        kind, value, _ = self._read_report()
        return value if kind == EXITED else super()._known_code(pidfd)

    def _patience(self) -> float:
        return _ORPHAN_PATIENCE if self._report is None else super()._patience()

    def _after_patience(self, pidfd: Fd) -> None:
        """Give a fork server that is only slow one more period to report the exit code; a stopped one will not report it."""
        code = self._known_code(pidfd)
        if code is None and not self._is_late and self._report is not None and servers.will_answer(self._server):
            self._is_late = True
            before, self._timer = self._timer, self._later(_ANSWER_PATIENCE, self._after_patience, pidfd)
            if before is not None:
                before.cancel()
        else:
            self._finish(code)

    def _close_report(self) -> None:
        if self._report is not None:
            self._loop.remove_reader(self._report.fileno())
            let_go(self._report)
            self._report = None

    def _cut(self) -> None:
        let_go(self._request.lifeline)

    def _release(self) -> None:
        super()._release()
        if self._retry is not None:
            self._retry.cancel()
            self._retry = None
        self._close_report()
        self._request.sent()
        self._cut()
        server, self._server = self._server, None
        servers.done(server)
        if servers.untold and not self._loop.is_closed():
            self._loop.call_soon(servers.tell)


def _pidfd_of(fd: int) -> Fd:
    """Take over a descriptor that is said to be the pidfd of a worker.

    Raises:
        OSError: it is none; it is closed.
    """
    pidfd = hold(Fd(above_streams(fd)))
    try:
        with contextlib.suppress(ProcessLookupError, PermissionError):  # the worker has ended, or has become another user
            signal.pidfd_send_signal(pidfd.number, 0)
    except OSError:
        let_go(pidfd)
        raise
    return pidfd
