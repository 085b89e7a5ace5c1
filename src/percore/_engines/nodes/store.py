"""The store of an engine of nodes: payloads as bytes, of which each node has a copy from the first call there that needs it."""

import asyncio
from collections import deque
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from itertools import count
from typing import TYPE_CHECKING, Any, Final, cast

from percore._common.errors import as_error
from percore._common.options import RunnerOptions
from percore._protocol.messages import Payload
from percore._serialization.advice import can_pickle
from percore._serialization.pickler import MainInfo, dump
from percore._transport import codec
from percore._transport.buffers import has_buffers, places_in
from percore._transport.leases import Received
from percore._transport.links import slots_of
from percore._transport.payload_picklers import pickle_to_share
from percore._transport.slots import Sink

if TYPE_CHECKING:
    from percore._engines.nodes.node import Node
    from percore._transport.slots import SlotWriter

INLINE: Final = 64 << 10
"""Bytes of the largest pickle that travels in a message."""


def received(data: bytes, *, is_shared: bool = False) -> Received:
    """Read a payload. Its buffers are copied, or, of a shared object, read-only views."""
    pickled, places = places_in(data) if has_buffers(data) else (len(data), [])
    view = memoryview(data)
    return Received(data, pickled, [view[start:end] for start, end in places], is_leased=is_shared)


class NodesStore:
    """Implements `Store`. A parcel is the number of a payload; each node keeps it under that number until it is discarded here."""

    lacks_room = False

    def __init__(self, loop: asyncio.AbstractEventLoop, options: RunnerOptions, main: MainInfo) -> None:
        slots, _ = slots_of(options.max_message)
        self.room, self.most_shared = max(1, slots // 2), slots // 4
        self.passes = codec.is_inline
        self.heaviest_batch = codec.HEAVIEST_BATCH
        self.weigh, self.weigh_rows = codec.weigh, codec.weigh_rows
        self.pack_items, self.unpack_values = codec.pack_items, codec.unpack_values
        self.can_pickle = partial(can_pickle, main_by_value=main.by_value)
        self.limit = options.max_message
        self._loop = loop
        self._main_by_value = main.by_value
        self._numbers = count(1)
        self._kept: dict[int, bytes] = {}
        self._placed: set[int] = set()
        """Parcels for which every node has room."""
        self._carried: dict[int, set[Node]] = {}
        """The nodes that have a placed parcel."""
        self._waiters: deque[Callable[[], None]] = deque()

    @property
    def in_use(self) -> int:
        return len(self._kept)

    # Pickling

    def pickler(self) -> "NodesStore":
        return self

    def payload(self, obj: object) -> Payload:
        data = self.pickled(obj, beside=True)
        if len(data) <= INLINE:
            return data
        parcel = self.keep(data)
        if len(self._placed) < self.room // 2:  # the other half is for calls when they are sent: else functions could take it all
            self._placed.add(parcel)
        return parcel

    def pickled(self, obj: object, *, beside: bool = False) -> bytes:
        sink = Sink(cast("SlotWriter", self))
        dump(obj, sink, main_by_value=self._main_by_value, beside=sink if beside else None)
        return cast("bytes", sink.payload())

    def take(self) -> None:
        """Return no slot: pickles are bytes."""

    def kept(self, data: bytes) -> bytes:
        return data

    # Parcels

    def keep(self, pickle: bytes) -> int:
        parcel = next(self._numbers)
        self._kept[parcel] = pickle
        return parcel

    def adopt(self, pickle: memoryview | bytes) -> Payload:
        return bytes(pickle) if len(pickle) <= INLINE else self.keep(bytes(pickle))

    def unplaced(self, parcel: int) -> Payload:
        if parcel not in self._placed or len(self._placed) < self.room // 2:
            return parcel
        other = self.keep(self._kept[parcel])
        self.discard(parcel)
        return other

    def is_placed(self, parcel: int) -> bool:
        return parcel in self._placed

    def place(self, parcel: int) -> bool:
        """Make room for the parcel on all nodes. Return False if there is none."""
        if parcel not in self._placed:
            if len(self._placed) >= self.room:
                return False
            self._placed.add(parcel)
        return True

    def carry(self, parcel: int, link: "Node") -> None:
        """Send a placed parcel to a node, unless that has it."""
        nodes = self._carried.setdefault(parcel, set())
        if link not in nodes:
            nodes.add(link)
            link.keep(parcel, self._kept[parcel])

    def forget(self, link: "Node") -> None:
        """A node is lost."""
        for nodes in self._carried.values():
            nodes.discard(link)

    def wait(self, waiter: Callable[[], None]) -> None:
        """Have `waiter` called when there may be room, after those that came before it."""
        self._waiters.append(waiter)

    def has_room(self) -> None:
        """There may be room: call those that wait for it, each once at most."""
        for _ in range(len(self._waiters)):
            if len(self._placed) >= self.room:
                break
            self._waiters.popleft()()

    def size(self, parcel: int) -> int:
        return len(self._kept[parcel])

    def discard(self, parcel: int) -> None:
        del self._kept[parcel]
        for link in self._carried.pop(parcel, ()):
            link.drop(parcel)
        self._placed.discard(parcel)
        self.has_room()

    def carried_to(self, link: "Node") -> set[int]:
        """Return the parcels that a node has."""
        return {parcel for parcel, nodes in self._carried.items() if link in nodes}

    # Shared objects

    def share(self, obj: object, waiter: asyncio.Future[int]) -> None:
        pickle_to_share(obj, partial(self.pickled, beside=True), self._loop, partial(self._shared, waiter))

    def _shared(self, waiter: asyncio.Future[int], data: bytes | BaseException) -> None:
        if waiter.done():
            return
        if isinstance(data, BaseException):
            waiter.set_exception(as_error(data, "pickling"))
        elif len(self._placed) >= self.room:
            self.wait(lambda: self._shared(waiter, data))
        else:
            parcel = self.keep(data)
            self._placed.add(parcel)
            waiter.set_result(parcel)

    def load(self, parcel: int, ended: Callable[[], Any]) -> Received:
        with suppress(RuntimeError):  # the loop was closed
            self._loop.call_soon_threadsafe(ended)  # views keep the bytes themselves
        return received(self._kept[parcel], is_shared=True)
