"""The engine of real processes: each worker is one process with its own shared memory."""

import asyncio
import errno
import os
import pickle
import resource
import signal
import socket
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple

from percore._calls.worker_start import pickled_initializer, pickled_option, places_of, start_of
from percore._common.options import RunnerOptions, usable_cpus
from percore._common.worker_errors import mebibytes
from percore._engines.processes.examination import Examiner
from percore._engines.processes.launch import Launcher, Process, advice_on, last_line
from percore._engines.processes.log_receiver import LogReceiver, levels
from percore._engines.processes.oom_kills import Counts, OomKills, counts
from percore._protocol.interfaces import Condition, Exit, Worker
from percore._protocol.messages import Body, pid_told
from percore._protocol.worker_start import ExecutorSettings, Given, WorkerStart
from percore._serialization.pickler import MainInfo
from percore._transport.doorbell import Haste
from percore._transport.links import Link, Links
from percore._transport.memory import keep_heap_warm
from percore._worker_process import multiprocessing_state
from percore._worker_process.boot import Boot
from percore._worker_process.log_forwarding import Levels

if TYPE_CHECKING:
    from percore._monitor.usage import ProcessUsage, Usage, UsageMeter

_LOST: Final = "its fork server died before it told of the worker"
_UNKNOWN: Final = "exit status unknown: its fork server died or was stopped, or another part of the program reaped it"


class Guest(NamedTuple):
    """What an engine needs to run the workers of a program elsewhere.

    Attributes:
        start, loop_factory, debug: what its workers are started with.
        levels: the settings of the program's logging, when a worker is started.
        handle_record: gets the index of a worker and each of its log records.
    """

    start: WorkerStart
    loop_factory: bytes
    debug: bool
    levels: Callable[[], Levels]
    handle_record: Callable[[int, bytes], None]


class ProcessWorker:
    """A worker in a process of its own."""

    node = None
    thread_ids = ()

    def __init__(self, link: Link, logs: LogReceiver, process: Process, examiner: Examiner) -> None:
        self.channel = link.channel
        self.fate = link.fate
        self._told_pid: int | None = None
        self._link = link
        self._logs = logs
        self.hold_logs = logs.hold
        self._process = process
        self._examiner = examiner
        self._is_killed = False

    @property
    def pid(self) -> int | None:
        # A worker may report that it is ready before its launcher knows the pid. Until then, use the pid that the worker sent.
        return self._told_pid if self._process.pid is None else self._process.pid

    def ready(self, told: Body) -> None:
        self._told_pid = pid_told(told)

    def kill(self, signum: int = signal.SIGKILL) -> None:
        self._is_killed |= signum == signal.SIGKILL
        self._process.kill(signum)

    def examine(self, told: Callable[[Condition], None]) -> None:
        if self.pid is not None:
            self._examiner.examine(self.pid, self._process, told)

    def end(self, code: int | None, kills: OomKills, before: Counts) -> Exit:
        """Return how the process has ended. `before`: the counts of the kernel's kills at its start."""
        if self._process.is_lost:
            reason = self._process.reason_lost
            return Exit(None, _LOST + last_line(reason), place_lost=True, report=reason.rstrip())
        why, peak = self._process.refusal or (_UNKNOWN if code is None else ""), self._process.peak
        if code == -signal.SIGKILL and not self._is_killed:
            why = kills.explain(before)
            if why and peak is not None:
                why += f"; it had up to {mebibytes(peak)}"
        return Exit(code, why, peak=peak)

    def close(self) -> None:
        self._examiner.forget(self._process)
        self._link.close()
        self._logs.close()


class ProcessEngine:
    """Starts workers through a launcher."""

    sees_starts = True
    no_place = ""

    def __init__(  # noqa: PLR0913, PLR0917  # the ways to use it
        self,
        loop: asyncio.AbstractEventLoop,
        options: RunnerOptions,
        main: MainInfo,
        launcher: Launcher | None = None,
        executor_settings: ExecutorSettings | None = None,
        given: Given | None = None,
        guest: Guest | None = None,
    ) -> None:
        """Map the arena.

        `launcher`: replaces the launcher of the start method. `executor_settings`: how an executor's workers differ from a
        Runner's. `given`: their initializer, unless it comes with the process. `guest`: the program elsewhere whose workers these
        are; of the options then only the sizes count.

        Raises:
            OSError: there is not enough memory for even one message.
            Exception: any error from pickling the options or the initializer.
        """
        self.on_place: Callable[[], None]
        """Never called: a process finds a place, or fails to start."""
        with ExitStack() as undo:
            self._links = links = Links(loop, options, places_of(options), main_by_value=main.by_value)
            undo.callback(links.close)
            self.store = links.store
            self._examiner = Examiner(loop)
            undo.callback(self._examiner.close)
            if executor_settings is not None and given is not None:
                executor_settings = executor_settings._replace(initializer=pickled_initializer(given, self.store))
            if guest is None:
                loop_factory = pickled_option("loop_factory", options.loop_factory, self.store)
                start, debug = start_of(options, self.store, executor_settings), loop.get_debug()
            else:
                start, loop_factory, debug, *_ = guest
            self._boot = Boot(start, links.layout, debug, main.as_tuple(), loop_factory, harden=options.harden)
            self._launcher = _launcher(options) if launcher is None else launcher
            undo.pop_all()
        self._passes_on = executor_settings is None or not executor_settings.has_main
        """Whether this engine passes multiprocessing's state to the workers. If not, multiprocessing itself does."""
        self._levels = levels if guest is None else guest.levels
        self._handle_record = None if guest is None else guest.handle_record
        self._lost: set[int] = set()
        """The slots whose last worker was lost: nobody knows whether it was ever started."""
        self._meter: UsageMeter | None = None
        self._kills = OomKills()
        self._haste = Haste(usable_cpus())
        keep_heap_warm()

    def start(
        self, index: int, generation: int, on_exit: Callable[[Exit], None], sockets: Sequence[socket.socket]
    ) -> ProcessWorker:
        with _advice_on_limits():
            return self._start(index, generation, on_exit, sockets)

    def _start(
        self, index: int, generation: int, on_exit: Callable[[Exit], None], sockets: Sequence[socket.socket]
    ) -> ProcessWorker:
        logs = LogReceiver(index, self._handle_record)
        try:
            start = self._boot.start._replace(index=index, generation=generation)
            boot = self._boot._replace(start=start, levels=self._levels(), sockets=len(sockets))
            # Also if multiprocessing passes it on: otherwise a fork would start a tracker itself.
            tracker = multiprocessing_state.tracker()
            if self._passes_on:
                boot = boot._replace(
                    parent=multiprocessing_state.parent(), authkey=multiprocessing_state.authkey(), has_tracker=tracker is not None
                )
            more = [tracker] if self._passes_on and tracker is not None else []
            more += [sock.fileno() for sock in sockets]
            before = counts()
            worker = self._launch(boot, more, logs, lambda code: on_exit(self._ended(index, worker.end(code, self._kills, before))))
            return worker
        except BaseException:
            logs.close()
            raise
        finally:
            logs.close_fds()

    def _launch(self, boot: Boot, more: Sequence[int], logs: LogReceiver, on_exit: Callable[[int | None], None]) -> ProcessWorker:
        link = self._links.link()
        link.channel.on_logged = logs.receive
        link.channel.haste = self._haste
        stacks = -1
        try:
            stacks = os.dup(self._examiner.fd)  # a worker that multiprocessing forks has closed what is held
            boot = boot._replace(layout=link.layout)
            process = self._launcher.launch(pickle.dumps(boot), (*link.fds, *logs.fds, stacks, *more), on_exit)
        except BaseException:
            link.close()
            raise
        finally:
            link.close_fds()
            if stacks >= 0:
                os.close(stacks)
        return ProcessWorker(link, logs, process, self._examiner)

    def _ended(self, index: int, end: Exit) -> Exit:
        """A lost place is no failed start. The second one in a row is: then this very start may be what kills fork servers."""
        if not end.place_lost:
            self._lost.discard(index)
            return end
        is_first = index not in self._lost
        self._lost.add(index)
        return end._replace(place_lost=is_first)

    def rouse(self) -> None:
        """Do nothing: its workers are no threads of this process."""

    def renew(self) -> None:
        self._launcher.renew()

    def resize(self, workers: int) -> None:
        self._links.resize(workers)

    async def usage(self, workers: Sequence[tuple[str, Worker]]) -> "Usage":
        roles = {worker.pid: role for role, worker in workers if worker.pid is not None}
        if self._meter is None:
            from percore._monitor.usage import UsageMeter

            self._meter = UsageMeter()
        return await self._meter.read({os.getpid(): "supervisor"} | self._launcher.helpers() | roles)

    async def usage_elsewhere(self, workers: Sequence[tuple[str, Worker]]) -> "Sequence[ProcessUsage]":
        """Return nothing: all workers are on this machine."""
        return ()

    async def memory(self, workers: Sequence[Worker], enough: int) -> list[int | None]:
        from percore._monitor.memory import memory_of
        from percore._monitor.threads import in_thread

        pids = [worker.pid for worker in workers]
        return await in_thread("percore-memory", lambda: [None if pid is None else memory_of(pid, enough) for pid in pids])

    async def aclose(self) -> None:
        try:
            await self._launcher.aclose()
        finally:
            self._examiner.close()
            self._links.close()


@contextmanager
def _advice_on_limits() -> Iterator[None]:
    """Add to the error of a process that may open no more files, or start no more processes, which limit to raise."""
    try:
        yield
    except OSError as error:
        if error.errno == errno.EAGAIN:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN) + advice_on(errno.EAGAIN)) from error
        if error.errno != errno.EMFILE:
            raise
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        raise OSError(
            errno.EMFILE, f"this program may have {limit} files open, and each worker takes about ten: raise the limit (ulimit -n)"
        ) from error


def _launcher(options: RunnerOptions) -> Launcher:
    if options.start_method == "spawn":
        from percore._engines.processes.spawn_launcher import SpawnLauncher

        return SpawnLauncher()
    from percore._engines.processes.fork_server_launcher import ForkServerLauncher

    return ForkServerLauncher.open()
