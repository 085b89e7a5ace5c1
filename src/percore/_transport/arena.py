"""The arena: the store of an engine whose workers map the supervisor's memory.

A parcel of the arena is a number. It is positive for a pickle in a slot. It is negative for a large pickle that found no free slot:
that one stays in private bytes until it is sent, and then waits for a slot.
"""

import asyncio
from functools import partial
from itertools import count

from percore._common.endings import Endings, settle, settle_by
from percore._common.errors import as_error
from percore._common.fault_points import POINTS, point
from percore._common.sure_handles import surely_from_thread
from percore._protocol.messages import Payload
from percore._serialization.advice import can_pickle
from percore._serialization.pickler import dump
from percore._transport import codec
from percore._transport.leases import Leases
from percore._transport.memory import Memory
from percore._transport.payload_picklers import PayloadPicklers, pickle_to_share
from percore._transport.slots import INLINE_LIMIT, SLOT_BITS, Sink, SlotWriter


class Arena(SlotWriter):
    """Implements `Store` over slots that all workers can read."""

    def __init__(
        self, memory: Memory, slot_size: int, limit: int, loop: asyncio.AbstractEventLoop, *, main_by_value: bool = False
    ) -> None:
        """As for `SlotWriter`."""
        super().__init__(memory, slot_size, limit)
        self._loop = loop
        self._main_by_value = main_by_value
        self._private: dict[int, bytes] = {}
        self._numbers = count(-1, -1)
        self.passes = codec.is_inline
        self.has_objects = False
        self.heaviest_batch = codec.HEAVIEST_BATCH
        self.weigh, self.weigh_rows = codec.weigh, codec.weigh_rows
        self.pack_items, self.unpack_values = codec.pack_items, codec.unpack_values
        # `sparing` reserves half of the slots for calls at the moment they are sent. Otherwise waiting calls and held functions
        # could occupy all slots, and a call that is due before them could not be sent.
        self.can_pickle = partial(can_pickle, main_by_value=main_by_value)
        self.pickler = PayloadPicklers(self, main_by_value=main_by_value, sparing=True).take
        self.room = max(1, self.count // 2)  # the leases of workers and of those that they replace may take the rest
        # Leases take half of the slots at most (`Links.link`). Whatever the user keeps, one slot is left for arguments in transit.
        self.most_shared, self.most_functions = self.count // 4, self.count // 8
        self.most_kept = max(self.most_shared, self.count // 2 - 1 - self.most_functions)
        self.load = Leases(self.reader(), Endings(loop), 0).receive_shared

    # Parcels

    def kept(self, data: bytes) -> Payload:
        """Return the payload for a pickle outside of the slots. If it is too large for a message, it becomes a parcel."""
        if len(data) <= INLINE_LIMIT:
            return data
        parcel = next(self._numbers)
        self._private[parcel] = data
        return parcel

    def keep(self, pickle: memoryview | bytes | bytearray) -> int:
        parcel = self.store(pickle)
        if parcel is None:
            raise RuntimeError(f"there is no room for another pickle of {len(pickle)} bytes")
        return parcel

    def adopt(self, pickle: memoryview | bytes) -> Payload:
        if len(pickle) <= INLINE_LIMIT:
            return bytes(pickle)
        parcel = None if self.is_scarce() else self.store(pickle)
        return self.kept(bytes(pickle)) if parcel is None else parcel

    def unplaced(self, parcel: int) -> Payload:
        if parcel < 0 or not self.is_scarce():
            return parcel
        data = bytes(self.read(parcel))
        self.discard(parcel)
        return self.kept(data)

    def is_placed(self, parcel: int) -> bool:
        return parcel >= 0

    def place(self, parcel: int) -> int | None:
        """Return the parcel in a slot: this one, or a new one for a private pickle. None if no slot is free for it."""
        if parcel >= 0:
            return parcel
        placed = self.store(self._private[parcel])
        if placed is not None:
            self._private.pop(parcel, None)
            if POINTS:
                point("supervisor.slot.filled")
        return placed

    def size(self, parcel: int) -> int:
        return len(self._private[parcel]) if parcel < 0 else parcel >> SLOT_BITS

    def discard(self, payload: Payload) -> None:
        if isinstance(payload, int) and payload < 0:
            self._private.pop(payload, None)
        else:
            super().discard(payload)

    # Pickles of other kinds

    def pickled(self, obj: object) -> bytes:
        sink = Sink(self)
        dump(obj, sink, main_by_value=self._main_by_value)
        payload = sink.payload()
        try:
            return bytes(self._private[payload] if type(payload) is int and payload < 0 else self.read(payload))
        finally:
            self.discard(payload)

    # Shared objects

    def share(self, obj: object, waiter: "asyncio.Future[int]") -> None:
        pickle_to_share(obj, self._pickled_beside, self._loop, partial(self._shared, waiter))

    def _pickled_beside(self, obj: object) -> Payload:
        sink = Sink(self)
        dump(obj, sink, main_by_value=self._main_by_value, beside=sink)
        return sink.payload()

    def _shared(self, waiter: "asyncio.Future[int]", pickled: Payload | BaseException) -> None:
        if waiter.done():
            was_refused = waiter.cancelled() or waiter.exception() is not None  # else a Ctrl-C came when this had told it
            if was_refused and not isinstance(pickled, BaseException):
                self.discard(pickled)
            return
        if isinstance(pickled, BaseException):
            settle_by(waiter, as_error(pickled, "pickling"))
            return
        # Calls refer to the object, so it has to be in a slot: if it has none, because it is small or none was free, wait for one.
        parcel = self.store(pickled) if isinstance(pickled, bytes) else self.place(pickled)
        if parcel is None:
            self.wait(lambda: self._share_later(waiter, pickled))
        elif not settle(waiter, parcel):  # it was cancelled meanwhile
            self.discard(parcel)

    def _share_later(self, waiter: "asyncio.Future[int]", pickled: Payload) -> bool:
        """Try again. Runs in the thread that gave a slot back."""
        surely_from_thread(self._loop, self._shared, waiter, pickled)
        return False
