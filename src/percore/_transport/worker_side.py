"""The worker's side of a channel to a supervisor whose arena it maps."""

import asyncio
from collections.abc import Callable
from typing import Any

from percore._common.fault_points import POINTS, point
from percore._protocol.messages import LEASED, RELEASE, UNLEASED, Body, Payload
from percore._serialization.exceptions import dump_exception
from percore._transport.channel import Channel
from percore._transport.doorbell import Bell
from percore._transport.leases import Received
from percore._transport.payload_picklers import PayloadPicklers
from percore._transport.ring import RingReader, RingWriter
from percore._transport.slots import Sink, SlotReader, SlotWriter


class WorkerSide(Channel):
    """What a worker sends its answers to, and gets its payloads from. Any thread may call the methods of this class."""

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
        self.load_shared = self.leases.receive_shared
        self.leases.on_end = self._unleased
        self.own: dict[int, Callable[[int, Any], None]] = {RELEASE: self._release}

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
