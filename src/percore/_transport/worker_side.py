"""The worker's side of a channel to a supervisor whose arena it maps."""

import asyncio
import os
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from percore._common.fault_points import POINTS, point
from percore._protocol.messages import LEASED, RELEASE, UNLEASED, Body, Payload, StartMarks
from percore._serialization.exceptions import dump_exception
from percore._serialization.pickler import dump
from percore._transport.channel import Channel
from percore._transport.codec import is_inline_value, pack_values, unpack_items
from percore._transport.doorbell import Bell, bell_of
from percore._transport.frames import RING_SIZE, Layout
from percore._transport.leases import Received
from percore._transport.memory import Memory
from percore._transport.payload_picklers import PayloadPicklers
from percore._transport.ring import RingReader, RingWriter
from percore._transport.slots import INLINE_LIMIT, Sink, SlotReader, SlotWriter


class WorkerSide(Channel):
    """The channel as the worker's calls use it: it sends answers and reads payloads. Any thread may call its own methods."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        rings: tuple[RingWriter, RingReader],
        bell: Bell,
        slots: tuple[SlotWriter, SlotReader],
        *,
        leases: int,
        main_by_value: bool = False,
    ) -> None:
        """As for `Channel`."""
        super().__init__(loop, rings, bell, slots, prompt=True, leases=leases)
        self._main_by_value = main_by_value
        self.pickler = PayloadPicklers(slots[0], main_by_value=main_by_value).take
        self.passes, self.unpack_items = is_inline_value, unpack_items
        self.load_shared, self.read = self.leases.receive_shared, slots[1].read
        self.leases.on_end = self._unleased
        self.own: dict[int, Callable[[int, Any], None]] = {RELEASE: self._release}

    def pickled(self, obj: object) -> bytes:
        sink = Sink(self.outgoing)
        dump(obj, sink, main_by_value=self._main_by_value, beside=sink)
        payload = sink.payload()
        try:
            return bytes(self.outgoing.read(payload))
        finally:
            self.outgoing.discard(payload)

    def pack_values(self, first: int, seconds: float, values: list[Any], pickled: list[int]) -> bytes | None:
        body = pack_values(first, seconds, values, pickled)
        return body if len(body) <= INLINE_LIMIT else None

    def load(self, payload: Payload) -> Received:
        """Return a payload, ready to be unpickled. If it has a lease, queue LEASED for the supervisor.

        LEASED is queued before any view exists whose end could end the lease. The views may be gone when unpickling returns, and
        the loop may then send UNLEASED before this thread does anything else. Messages leave the queue in order, whichever thread
        sends them.
        """
        received = self.leases.receive(payload)
        if received.is_leased:
            self.keep(LEASED, 0, payload)
        return received

    def send_exception(
        self,
        op: int,
        call_id: int,
        error: BaseException,
        send: Callable[[int, int, Body], None] | None = None,
        *,
        as_itself: bool = False,
    ) -> None:
        """Send a message with an exception. `send` as for `send_payload`, `as_itself` as for `dump_exception`."""
        sink = dump_exception(error, lambda: Sink(self.outgoing), main_by_value=self._main_by_value, as_itself=as_itself)
        self.send_payload(op, call_id, sink.payload(), send)

    def _unleased(self, payload: int) -> None:
        if self.is_open:
            self.send_lazily(UNLEASED, 0, payload)

    def _release(self, slot: int, used: int) -> None:
        self.outgoing.give(slot, used)
        if POINTS:
            point("worker.slot.released")


class WorkerEnd:
    """The worker's end of a link.

    Attributes:
        marks: where it notes which calls have begun.
        bell: its bell.
    """

    def __init__(self, layout: Layout, fds: Sequence[int]) -> None:
        """Map the memory. `fds`: those of the link, which this takes over.

        Raises:
            OSError: too little address space is left. The descriptors have been closed.
        """
        self._layout = layout
        left = list(fds)
        with ExitStack() as undo:
            undo.callback(lambda: [*map(os.close, left)])
            self._cell = Memory(left.pop(0), layout.cell_size, writable=True)
            undo.callback(self._cell.close)
            self._arena = Memory.of_reader(left.pop(0), layout.arena_size)
            undo.callback(self._arena.close)
            self._results = Memory(left.pop(0), layout.results_size, writable=True)
            undo.pop_all()
        self._memories = (self._cell, self._arena, self._results)
        for memory in self._memories:
            memory.close_fds()
        self._marks = layout.marks(self._cell)
        self.marks: StartMarks = self._marks
        self.bell = bell_of((left[0], left[1]))

    def channel(self, loop: asyncio.AbstractEventLoop, *, main_by_value: bool) -> WorkerSide:
        """Make the worker's side of the channel, which closes the bell."""
        layout, view = self._layout, self._cell.view
        return WorkerSide(
            loop,
            (RingWriter(view[RING_SIZE : 2 * RING_SIZE]), RingReader(view[:RING_SIZE])),
            self.bell,
            (SlotWriter(self._results, layout.slot_size, layout.max_message), SlotReader(self._arena, layout.slot_size)),
            leases=layout.leases,
            main_by_value=main_by_value,
        )

    def close(self) -> None:
        """Unmap."""
        self._marks.release()
        for memory in self._memories:
            memory.close()
