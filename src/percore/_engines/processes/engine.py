"""The engine of real processes: each worker is one process with its own shared memory."""

import asyncio
import os
import resource
import signal
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any, cast

from percore._calls.context_variables import references
from percore._common.options import RunnerOptions, usable_cpus
from percore._engines.processes.launch import Launcher, Process
from percore._engines.processes.log_receiver import LogReceiver, levels
from percore._monitor.usage import Usage, UsageMeter
from percore._protocol.interfaces import UNBEGUN, Exit, Fate, Worker
from percore._protocol.messages import Body
from percore._scheduler.dispatch import places_for, room_of
from percore._serialization.pickler import MainInfo
from percore._transport.arena import Arena
from percore._transport.channel import RING_SIZE, Haste
from percore._transport.doorbell import bell_fds, bell_of
from percore._transport.memory import Memory, has_address_space, keep_heap_warm
from percore._transport.ring import RingReader, RingWriter
from percore._transport.slots import SLOT_MASK, SlotReader
from percore._transport.supervisor_side import SupervisorSide
from percore._worker.executor_worker import ExecutorSettings, Given
from percore._worker.plain_calls import MARK_WORDS
from percore._worker_process import multiprocessing_state
from percore._worker_process.main import Boot, cell_size, marks_of

_PAGE = resource.getpagesize()
_LEAST_SLOT = 1 << 20


@dataclass(frozen=True, slots=True)
class CommonMemory:
    """The memory of the arena, which all workers of a runner share, and the sizes of it and of each worker's own memory.

    Attributes:
        memory: the memory of the arena.
        results_size: bytes of each worker's memory for result slots.
        slot_size: bytes of every slot.
        leases: how many slots of the arena one worker may keep in use after it has read them.
    """

    memory: Memory
    results_size: int
    slot_size: int
    leases: int

    @classmethod
    def create(cls, options: RunnerOptions) -> "CommonMemory":
        """Map the arena. A limit of the address space or of file sizes reduces the number of slots; so do many workers.

        Raises:
            OSError: not even one slot fits in the arena, or in each worker's memory for results. The text says what to do.
        """
        slot_size = -(-max(options.max_message, _LEAST_SLOT) // _PAGE) * _PAGE
        wanted = min(max(2**40 // slot_size, 16), SLOT_MASK + 1)
        budget, _ = resource.getrlimit(resource.RLIMIT_AS)
        if budget != resource.RLIM_INFINITY:
            wanted = min(wanted, budget // 4 // slot_size)
        memory, reason = None, f"RLIMIT_AS is {budget} bytes"
        while wanted and memory is None:
            try:
                memory = Memory.create(wanted * slot_size)
            except OSError as error:
                wanted //= 2
                reason = str(error)
        if memory is None:
            raise OSError(
                f"no room for one message of max_message={options.max_message} bytes ({reason}): "
                "raise the limit (ulimit -v, ulimit -f), or make the runner with a smaller max_message"
            )
        results = min(max(2**36 // slot_size, 4), 64)
        if budget != resource.RLIM_INFINITY:
            results = max(1, min(results, budget // 4 // options.workers // slot_size))
        results = _fitting(min(results, wanted), options.workers * slot_size)
        if not results:
            memory.close()
            raise OSError(
                f"the address space has no room for the results of {options.workers} workers with "
                f"max_message={options.max_message} bytes: make the runner with a smaller max_message or fewer workers, or raise "
                "the limit (ulimit -v) if there is one"
            )
        # Leases may take a quarter of the arena, and shared objects a quarter (Arena): half is left for arguments in transit.
        return cls(memory, results * slot_size, slot_size, memory.size // slot_size // 4 // options.workers)

    def close(self) -> None:
        """Release the memory."""
        self.memory.close()


def _fitting(slots: int, one_each: int) -> int:
    """Return how many result slots, at most `slots`, each worker can have. 0: not even one slot each fits the address space.

    `one_each`: bytes of one slot for every worker. Four times the space is required, because a worker's results are mapped twice
    (`Memory.of_reader`), and while the worker is replaced its successor has result slots too. If only one slot is left, a single
    mapping is enough: nothing in that slot is leased then.
    """
    while slots > 1 and not has_address_space(4 * slots * one_each):
        slots //= 2
    return slots if slots > 1 or has_address_space(one_each) else 0


def _most_of(slots: int) -> int:
    """The number of result slots that may be leased; the rest is for results in transit."""
    return slots * 3 // 4


def fate_of(marks: memoryview, place: int, call_id: int) -> Fate:
    """Read a call's start mark."""
    word = place * MARK_WORDS
    if marks[word] != call_id:
        return UNBEGUN
    return Fate(True, time.monotonic() - float(marks[word + 1]) / 1e9, int(marks[word + 2]))


class Cell:
    """The memory and bells of one worker, on the supervisor's side."""

    def __init__(self, places: int, shared: CommonMemory) -> None:
        """Create the memory and the bells.

        Raises:
            OSError: out of descriptors or address space; nothing is left behind.
        """
        self.places = places
        with ExitStack() as undo:
            self.memory = Memory.create(cell_size(places))
            undo.callback(self.memory.close)
            # Not writable through this mapping: a fork of the program would overwrite results that are meant for this process.
            self.results = Memory.create_for_writer(shared.results_size)
            undo.callback(self.results.close)
            self.ours, self.theirs = bell_fds()
            undo.pop_all()

    def link(self, loop: asyncio.AbstractEventLoop, arena: Arena) -> SupervisorSide:
        """The supervisor's side of the channel."""
        view = self.memory.view
        rings = RingWriter(view[:RING_SIZE]), RingReader(view[RING_SIZE : 2 * RING_SIZE])
        slots = arena, SlotReader(self.results, arena.slot_size)
        return SupervisorSide(loop, rings, bell_of(self.ours), slots, leases=_most_of(slots[1].count))

    def close(self) -> None:
        """Unmap."""
        self.results.close()
        self.memory.close()


class ProcessWorker:
    """A worker in a process of its own."""

    def __init__(self, cell: Cell, channel: SupervisorSide, logs: LogReceiver, process: Process) -> None:
        self.channel = channel
        self._told_pid: int | None = None
        self._cell = cell
        self._logs = logs
        self._process = process
        self._marks = marks_of(cell.memory, cell.places)

    @property
    def pid(self) -> int | None:
        # A worker may report that it is ready before its launcher knows the pid. Until then, use the pid that the worker sent.
        return self._told_pid if self._process.pid is None else self._process.pid

    def ready(self, told: Body) -> None:
        self._told_pid = cast("int", told)
        self._process.spoke()

    def kill(self, signum: int = signal.SIGKILL) -> None:
        self._process.kill(signum)

    def fate(self, place: int, call_id: int) -> Fate:
        return fate_of(self._marks, place, call_id)

    def close(self) -> None:
        self.channel.close()
        self._logs.close()
        self._marks.release()
        self._cell.close()


def make_boot(options: RunnerOptions, shared: CommonMemory, arena: Arena, main: MainInfo, *, debug: bool) -> Boot:
    """Make the boot data that all workers of a runner share. `ProcessEngine.start` sets index, generation and logger levels.

    Raises:
        ValueError: workers cannot find one of the context variables.
        Exception: lifespan, loop_factory or thread_initializer cannot be pickled.
    """

    def pickled(value: Any) -> bytes:
        return b"" if value is None else arena.pickled(value)

    return Boot(
        index=0,
        generation=0,
        places=places_for(room_of(options.concurrency, options.threads)),
        threads=options.threads,
        arena_size=shared.memory.size,
        results_size=shared.results_size,
        slot_size=shared.slot_size,
        max_message=options.max_message,
        leases=shared.leases,
        debug=debug,
        main=main.as_tuple(),
        loop_factory=pickled(options.loop_factory),
        lifespan=pickled(options.lifespan),
        thread_initializer=pickled(options.thread_initializer),
        contextvars=references(options.contextvars),
        levels=(0, ()),
    )


class ProcessEngine:
    """Starts workers through a launcher."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        options: RunnerOptions,
        main: MainInfo,
        launcher: Launcher | None = None,
        executor_settings: ExecutorSettings | None = None,
        given: Given | None = None,
    ) -> None:
        """Map the arena.

        `launcher`: replaces the launcher of the start method. `executor_settings`: how an executor's workers differ from a
        Runner's. `given`: their initializer, unless it comes with the process.

        Raises:
            OSError: there is not enough memory for even one message.
            Exception: any error from pickling the options or the initializer.
        """
        self._loop = loop
        self._shared = shared = CommonMemory.create(options)
        try:
            self.store = Arena(shared.memory, shared.slot_size, options.max_message, loop, main_by_value=main.by_value)
            if executor_settings is not None and given is not None:
                executor_settings = executor_settings._replace(initializer=self.store.pickled(given))
            boot = make_boot(options, shared, self.store, main, debug=loop.get_debug())
            self._boot = replace(boot, executor_settings=None if executor_settings is None else tuple(executor_settings))
            self._launcher = _launcher(options) if launcher is None else launcher
        except BaseException:
            shared.close()
            raise
        self._passes_on = executor_settings is None or not executor_settings.has_main
        """Whether this engine passes multiprocessing's state to the workers. If not, multiprocessing itself does."""
        self._meter = UsageMeter()
        self._haste = Haste(usable_cpus())
        keep_heap_warm()

    def start(self, index: int, generation: int, on_exit: Callable[[Exit], None]) -> ProcessWorker:
        logs = LogReceiver(index)
        try:
            boot = replace(self._boot, index=index, generation=generation, levels=levels())
            tracker = (
                multiprocessing_state.tracker()
            )  # also if multiprocessing passes it on: otherwise a fork would start a tracker itself
            if self._passes_on:
                boot = replace(boot, authkey=multiprocessing_state.authkey(), has_tracker=tracker is not None)
            more = [tracker] if self._passes_on and tracker is not None else []
            return self._start(boot.pack(), (*logs.fds, *more), logs, lambda code: on_exit(Exit(code)))
        except BaseException:
            logs.close()
            raise
        finally:
            logs.close_fds()

    def _start(self, boot: bytes, more: Sequence[int], logs: LogReceiver, on_exit: Callable[[int | None], None]) -> ProcessWorker:
        cell = Cell(self._boot.places, self._shared)
        arena_fd = -1
        try:
            arena_fd = self._shared.memory.reader_fd()
            fds = (cell.memory.fd, arena_fd, cell.results.fd, *cell.theirs, *more)
            process = self._launcher.launch(boot, fds, on_exit)
        except BaseException:
            cell.close()
            for fd in cell.ours:
                os.close(fd)
            raise
        finally:
            for fd in (arena_fd, *cell.theirs):
                if fd >= 0:
                    os.close(fd)
        cell.memory.close_fds()
        cell.results.close_fds()
        channel = cell.link(self._loop, self.store)
        channel.on_logged = logs.receive
        channel.haste = self._haste
        return ProcessWorker(cell, channel, logs, process)

    async def usage(self, workers: Sequence[tuple[str, Worker]]) -> Usage:
        roles = {worker.pid: role for role, worker in workers if worker.pid is not None}
        return await self._meter.read({os.getpid(): "supervisor"} | self._launcher.helpers() | roles)

    async def aclose(self) -> None:
        try:
            await self._launcher.aclose()
        finally:
            self._shared.close()


def _launcher(options: RunnerOptions) -> Launcher:
    if options.start_method == "spawn":
        from percore._engines.processes.spawn_launcher import SpawnLauncher

        return SpawnLauncher()
    from percore._engines.processes.fork_server_launcher import ForkServerLauncher

    return ForkServerLauncher.open()
