"""Leases: slots that the receiver goes on using after it has read them, because arrays lie there.

A buffer that arrives is a view of the slot it travelled in. The slot is leased until the last such view has gone; a finaliser knows
that (`exports`), and the loop tells the writer. Leases are limited: a receiver that already holds as many as it may copies further
buffers out, so that views that somebody keeps never stop the traffic.
"""

import pickle
import threading
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from percore._ipc.buffers import has_buffers, places_in
from percore._ipc.exports import Endings, export, parts_of
from percore._ipc.slots import SlotReader
from percore._messages import SLOT_MASK, Payload


class Received:
    """A payload that has arrived, to be unpickled once.

    Attributes:
        size: its bytes.
        is_leased: whether its slot is in use for longer than the unpickling takes.
    """

    __slots__ = ("_buffers", "_data", "_pickled", "is_leased", "size")

    def __init__(self, data: memoryview | bytes, pickled: int, buffers: Sequence[memoryview | bytes], *, is_leased: bool) -> None:
        """`pickled`: bytes of the pickle in `data`. `buffers`: what travels beside it, to be copied unless it is leased."""
        self.size = len(data)
        self.is_leased = is_leased
        self._data = data
        self._pickled = pickled
        self._buffers = buffers

    def load(self) -> Any:
        """Unpickle it.

        Raises:
            MemoryError: there is too little for a copy of its buffers.
            BaseException: whatever the user's objects raise.
        """
        data, buffers = self._data, self._buffers
        self._data, self._buffers = b"", ()
        if not buffers:
            try:
                return pickle.loads(data)
            finally:
                if isinstance(data, memoryview):
                    data.release()
        if not self.is_leased:
            buffers = [memoryview(bytearray(buffer)) for buffer in buffers]
        return pickle.loads(data[: self._pickled], buffers=buffers)


class Leases:
    """Reads what the other side has put into its slots. From any thread, but for its making."""

    def __init__(self, slots: SlotReader, endings: Endings, limit: int) -> None:
        """At most `limit` slots are leased at a time."""
        self._slots = slots
        self._endings = endings
        self._limit = limit if slots.may_lease else 0
        self._lock = threading.Lock()  # for arithmetic alone
        self._leased: set[int] = set()
        self.on_end: Callable[[int], None]
        """Called with the payload of each lease, in the loop, when it has ended."""

    def receive(self, payload: Payload) -> Received:
        """A payload that the other side sent; its slot stays as it is until the other side is told otherwise.

        Where it is leased the other side has to be told so before, and hears of its end from `on_end`.

        Raises:
            BrokenFrame: it does not lie in a slot, or its buffers do not lie in it.
        """
        data = self._slots.read(payload)
        if not has_buffers(data):
            return Received(data, len(data), (), is_leased=False)
        pickled, places = places_in(data)
        if isinstance(data, bytes) or type(payload) is not int or not self._begin(payload & SLOT_MASK):
            return Received(data, pickled, [data[start:end] for start, end in places], is_leased=False)
        try:
            seen = export(self._slots.own(payload), self._endings, partial(self._end, payload))
        except BaseException:  # no memory even for that: then there is no view whose end would be heard of
            self._give_up(payload & SLOT_MASK)
            raise
        return Received(data, pickled, parts_of(seen, places), is_leased=True)

    def receive_shared(self, payload: int, ended: Callable[[], None]) -> Received:
        """A payload that others read as well: its buffers can only be read. `ended` is called when the last view has gone."""
        data = self._slots.read(payload)
        assert isinstance(data, memoryview)
        pickled, places = places_in(data) if has_buffers(data) else (len(data), [])
        if self._slots.may_lease:
            seen = export(self._slots.own(payload), self._endings, ended)[: len(data)].toreadonly()
        else:  # what can only be read cannot be exported either
            seen = memoryview(bytes(data))
            self._endings.add(ended)
        # All of it is read through that one view: its last use is the end, also where there are no buffers.
        return Received(seen, pickled, parts_of(seen, places, readonly=True), is_leased=True)

    @property
    def count(self) -> int:
        """How many slots are leased."""
        return len(self._leased)

    def _begin(self, slot: int) -> bool:
        with self._lock:
            # One that is leased already (of an attempt before this one, or of a function that two threads unpickle at once) has
            # been written to, and what is written now would be forgotten with that.
            if len(self._leased) >= self._limit or slot in self._leased:
                return False
            self._leased.add(slot)
            return True

    def _end(self, payload: int) -> None:
        self._slots.forget(payload)
        self._give_up(payload & SLOT_MASK)
        self.on_end(payload)

    def _give_up(self, slot: int) -> None:
        with self._lock:
            self._leased.discard(slot)
