"""Links: the memory that connects a supervisor with its workers, as the supervisor maps it, and its sides of the channels.

    Links ── the arena, which all workers of a runner share; the sizes of all memory
      └── Link ── one worker: its rings, its start marks, its memory for results, the bells, and the channel over them

A worker maps its end with the descriptors of its link (`WorkerEnd`).
"""

import asyncio
import errno
import os
import resource
import time
from collections.abc import Callable
from contextlib import ExitStack

from percore._common.options import RunnerOptions
from percore._protocol.interfaces import UNBEGUN, Fate
from percore._protocol.messages import MARK_WORDS
from percore._transport.arena import Arena
from percore._transport.doorbell import bell_fds, bell_of
from percore._transport.frames import RING_SIZE, Layout
from percore._transport.memory import Memory, has_address_space
from percore._transport.ring import RingReader, RingWriter
from percore._transport.slots import SLOT_MASK, SlotReader
from percore._transport.supervisor_side import SupervisorSide

_PAGE = resource.getpagesize()
_LEAST_SLOT = 1 << 20


class Links:
    """The memory of one runner.

    Attributes:
        layout: its sizes, for the next worker.
        store: the store of all workers.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, options: RunnerOptions, places: int, *, main_by_value: bool) -> None:
        """Map the arena. A limit of the address space or of file sizes reduces the number of slots; so do many workers.

        `places`: how many start marks a worker has. `main_by_value`: whether workers cannot import `__main__`.

        Raises:
            OSError: out of descriptors; or not even one slot fits in the arena, or in each worker's memory for results. Then the
                text says what to do.
        """
        self._loop = loop
        self._memory, self.layout = _mapped(options, places)
        self._leased = 0
        """Slots of the arena that the workers may lease, together."""
        self.store = Arena(self._memory, self.layout.slot_size, options.max_message, loop, main_by_value=main_by_value)

    def link(self) -> "Link":
        """Make the link to a worker.

        Raises:
            OSError: out of descriptors or address space; nothing is left behind.
        """
        # Leases may take half of the arena: those of the workers a quarter, and those of workers that drain as much. A worker
        # copies the arrays that it may not lease.
        most = self._memory.size // self.layout.slot_size // 2 - self._leased
        layout = self.layout._replace(leases=max(0, min(self.layout.leases, most)))
        link = Link(self._loop, self._memory, layout, self.store, self._closed)
        self._leased += layout.leases
        return link

    def _closed(self, leases: int) -> None:
        self._leased -= leases

    def resize(self, workers: int) -> None:
        """Cut the memory of later workers for this number of workers.

        Raises:
            OSError: the address space has no room for the results of so many.
        """
        layout = self.layout
        results = _results(layout.arena_size // layout.slot_size, layout.slot_size, layout.max_message, workers)
        self.layout = layout._replace(
            results_size=results * layout.slot_size, leases=_leases(layout.arena_size, layout.slot_size, workers)
        )

    def close(self) -> None:
        """Release the arena. All links must be closed."""
        self._memory.close()


def slots_of(max_message: int) -> tuple[int, int]:
    """Return how many slots an arena has where no limit reduces it, and how many bytes each of them has."""
    slot_size = -(-max(max_message, _LEAST_SLOT) // _PAGE) * _PAGE
    return min(max(2**40 // slot_size, 16), SLOT_MASK + 1), slot_size


def map_arena(max_message: int, part: int = 1) -> tuple[Memory, int]:
    """Map memory for an arena, or for a part of one: half of it (2), for example. Return it, and the size of a slot.

    Raises:
        OSError: there is no room for one slot; the text says what to do.
    """
    wanted, slot_size = slots_of(max_message)
    wanted = max(1, wanted // part)
    budget, _ = resource.getrlimit(resource.RLIMIT_AS)
    if budget != resource.RLIM_INFINITY:
        wanted = min(wanted, budget // 4 // slot_size)
    memory, reason = None, f"RLIMIT_AS is {budget} bytes"
    while wanted and memory is None:
        try:
            memory = Memory.create(wanted * slot_size)
        except OSError as error:
            if error.errno in (errno.EMFILE, errno.ENFILE):  # fewer slots need no fewer descriptors
                raise
            wanted //= 2
            reason = str(error)
    if memory is None:
        raise OSError(
            f"no room for one message of max_message={max_message} bytes ({reason}): "
            "raise the limit (ulimit -v, ulimit -f), or make the runner with a smaller max_message"
        )
    return memory, slot_size


def _mapped(options: RunnerOptions, places: int) -> tuple[Memory, Layout]:
    """Map the arena, and return it with the sizes of all memory."""
    memory, slot_size = map_arena(options.max_message)
    try:
        results = _results(memory.size // slot_size, slot_size, options.max_message, options.workers)
    except OSError:
        memory.close()
        raise
    leases = _leases(memory.size, slot_size, options.workers)
    return memory, Layout(places, memory.size, results * slot_size, slot_size, options.max_message, leases)


def _leases(arena_size: int, slot_size: int, workers: int) -> int:
    """Return how many slots of the arena each worker may lease.

    All of them may lease a quarter of it, and shared objects take a quarter (Arena): half is left for arguments in transit, and for
    the leases of workers that are being replaced.
    """
    return arena_size // slot_size // 4 // workers


def _results(most: int, slot_size: int, max_message: int, workers: int) -> int:
    """Return how many result slots, at most `most`, each of these workers has.

    Raises:
        OSError: the address space has no room for one each.
    """
    budget, _ = resource.getrlimit(resource.RLIMIT_AS)
    results = min(max(2**36 // slot_size, 4), 64)
    if budget != resource.RLIM_INFINITY:
        results = max(1, min(results, budget // 4 // workers // slot_size))
    results = _fitting(min(results, most), workers * slot_size)
    if not results:
        raise OSError(
            f"the address space has no room for the results of {workers} workers with "
            f"max_message={max_message} bytes: make the runner with a smaller max_message or fewer workers, or raise "
            "the limit (ulimit -v) if there is one"
        )
    return results


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


class Link:
    """The link to one worker.

    Attributes:
        channel: the supervisor's side of the channel.
        fds: descriptors for the worker: the cell, the arena (read-only), the results, and two of its bell.
        layout: the sizes of its memory, for the worker.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, arena: Memory, layout: Layout, store: Arena, on_close: Callable[[int], None]
    ) -> None:
        """Use `Links.link`. `on_close` is called once, with the number of leases."""
        self.layout = layout
        self._on_close: Callable[[int], None] | None = on_close
        with ExitStack() as undo:
            self._cell = Memory.create(layout.cell_size)
            undo.callback(self._cell.close)
            # Not writable through this mapping: a fork of the program would overwrite results that are meant for this process.
            self._results = Memory.create_for_writer(layout.results_size)
            undo.callback(self._results.close)
            self._arena_fd = arena.reader_fd()
            undo.callback(os.close, self._arena_fd)
            own, self._worker_bell = bell_fds()
            for fd in self._worker_bell:
                undo.callback(os.close, fd)
            bell = bell_of(own)
            undo.callback(bell.close)
            self.fds = (self._cell.fd, self._arena_fd, self._results.fd, *self._worker_bell)
            self._places = layout.places
            self._marks = layout.marks(self._cell)
            view = self._cell.view
            rings = RingWriter(view[:RING_SIZE]), RingReader(view[RING_SIZE : 2 * RING_SIZE])
            results = SlotReader(self._results, layout.slot_size)
            own_leases = _most_of(results.count)
            self.channel = SupervisorSide(loop, rings, bell, (store, results), leases=own_leases, lent=layout.leases)
            undo.pop_all()

    def close_fds(self) -> None:
        """Close the descriptors for the worker, which has them by now, or was not started. Call it once."""
        self._cell.close_fds()
        self._results.close_fds()
        for fd in (self._arena_fd, *self._worker_bell):
            os.close(fd)

    def fate(self, call_id: int) -> Fate:
        """Read a call's start mark."""
        marks, word = self._marks, call_id % self._places * MARK_WORDS
        if marks[word] != call_id:
            return UNBEGUN
        return Fate(True, time.monotonic() - float(marks[word + 1]) / 1e9, int(marks[word + 2]))

    def close(self) -> None:
        """Close the channel and unmap. Idempotent."""
        self.channel.close()
        self._marks.release()
        self._results.close()
        self._cell.close()
        if self._on_close is not None:
            on_close, self._on_close = self._on_close, None
            on_close(self.layout.leases)
