"""The supervisor's side of a channel to a worker that maps the arena and the supervisor's rings."""

import asyncio
from collections.abc import Callable
from typing import Any

from percore._common.fault_points import POINTS, point
from percore._protocol.interfaces import Ticket
from percore._protocol.messages import LEASED, RELEASE, UNLEASED, Body, BrokenFrame, Payload
from percore._transport.arena import Arena
from percore._transport.channel import Channel
from percore._transport.codec import decode
from percore._transport.doorbell import Bell
from percore._transport.ring import RingReader, RingWriter
from percore._transport.slots import SLOT_BITS, SLOT_MASK, SlotReader


class SupervisorSide(Channel):
    """Implements `percore._protocol.interfaces.Channel`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        rings: tuple[RingWriter, RingReader],
        bell: Bell,
        slots: tuple[Arena, SlotReader],
        *,
        leases: int,
        lent: int,
    ) -> None:
        """As for `Channel`. `lent`: how many slots of the arena the worker may lease."""
        super().__init__(loop, rings, bell, slots, prompt=False, leases=leases)
        self._arena = slots[0]
        self._lent = lent
        self._held: list[int] = []
        """Parcels whose slots back arrays in the worker. There are a few at most."""
        self.own: dict[int, Callable[[int, Any], None]] = {LEASED: self._hold, UNLEASED: self._let_go}
        self.load = self.leases.receive
        self.read = slots[1].read
        self.leases.on_end = self.release

    def send_parcel(self, op: int, call_id: int, parcel: int, ticket: Ticket) -> None:
        """Send a message with a parcel. One without a slot waits until one is free, in order with others."""
        self._send_parcel(op, call_id, parcel, ticket, self.send)

    def _send_parcel(self, op: int, call_id: int, parcel: int, ticket: Ticket, send: Callable[[int, int, Body], None]) -> None:
        placed = self._arena.place(parcel)
        if placed is None:
            self._arena.wait(lambda: self._retry(op, call_id, parcel, ticket))
        elif ticket.stored(placed):
            send(op, call_id, placed)
        elif placed != parcel:  # else its owner has discarded it
            self._arena.discard(placed)

    def _retry(self, op: int, call_id: int, parcel: int, ticket: Ticket) -> bool:
        """Try again. Runs in the thread that gave a slot back."""
        if not self.is_open or not ticket.is_wanted():
            return False
        try:
            self._send_parcel(op, call_id, parcel, ticket, self.send_from_thread)
        except BaseException as error:  # nobody would try again
            self._break(error)
        return True

    def release(self, payload: Payload) -> None:
        """Tell the worker that a result has been read, so that its slot is free."""
        if type(payload) is int and self.is_open:
            if POINTS:
                point("supervisor.slot.released")
            slot = payload & SLOT_MASK
            # Workers take the lowest free slot. A low number means that the worker has enough free slots; a high one, that it
            # may need this slot soon.
            send = self.send_lazily if slot < self.incoming.count // 4 else self.send_later
            send(RELEASE, slot, payload >> SLOT_BITS)

    def _deliver(self) -> None:
        """Hand over all that has arrived together: so the load of a worker falls once."""
        rx = self.rx
        if rx.read == rx.end:
            return
        messages = decode(rx.next())
        try:
            while rx.read != rx.end:
                messages += decode(rx.next())
        finally:  # those before a broken frame have arrived
            self.on_frame(messages)

    # Messages of the worker's side

    def _hold(self, _zero: int, parcel: Body) -> None:
        """Arrays in the worker use this slot: hold it until the worker has dropped them or has died."""
        if type(parcel) is not int:
            raise BrokenFrame(f"{type(parcel).__name__} was leased, which is no slot")
        if len(self._held) >= self._lent:  # it could keep all slots from the other workers
            raise BrokenFrame(f"more than {self._lent} slots were leased")
        self._arena.hold(parcel)
        self._held.append(parcel)

    def _let_go(self, _zero: int, parcel: Body) -> None:
        if type(parcel) is not int or parcel not in self._held:
            raise BrokenFrame("the end of a lease that was never begun")
        self._held.remove(parcel)
        self._arena.discard(parcel)

    def close(self) -> None:
        """Close the channel, and release the slots that arrays of the dead worker used. Idempotent."""
        while self._held:
            self._arena.discard(self._held.pop())
        super().close()
