"""Leases: slots that the receiver keeps using after it has read them, because arrays lie there.

A large buffer arrives as a view of the slot it travelled in, without a copy. The receiver leases the slot until the last such view
is freed. Then a finaliser schedules a callback in the loop, and the callback tells the writer. The number of leases is
limited. A receiver at its limit copies further buffers out of their slots, so views that the user keeps never use up all slots.

An array that is unpickled from a view keeps no reference to the view, but one to the object that exports the memory. So neither the
end of the view nor its `release` means that the memory is unused. `export` therefore puts an object of its own in between. That
object exports the memory, and is freed after everything that refers to it.
"""

import pickle
import threading
from collections.abc import Callable, Sequence
from functools import cache, lru_cache, partial
from importlib.util import find_spec
from pickle import PickleBuffer
from typing import Any, Final
from weakref import ref

from percore._common.endings import Ended, Endings
from percore._common.steps import step
from percore._protocol.messages import Payload
from percore._transport.buffers import has_buffers, places_in
from percore._transport.slots import SLOT_MASK, SlotReader


class Received:
    """A payload that has arrived. It can be unpickled once.

    Attributes:
        size: the size of the payload in bytes.
        is_leased: whether its slot stays in use after the payload is unpickled.
    """

    __slots__ = ("_buffers", "_data", "_pickled", "is_leased", "size")

    def __init__(self, data: memoryview | bytes, pickled: int, buffers: Sequence[memoryview | bytes], *, is_leased: bool) -> None:
        """The first `pickled` bytes of `data` are the pickle. `buffers` are those beside it, which `load` copies if not leased."""
        self.size = len(data)
        self.is_leased = is_leased
        self._data = data
        self._pickled = pickled
        self._buffers = buffers

    def load(self, loads: Callable[[memoryview | bytes], Any] = pickle.loads, /) -> Any:
        """Unpickle the payload and return the object. `loads` unpickles a payload without buffers.

        Raises:
            MemoryError: there is too little memory to copy the buffers.
            BaseException: any exception that the user's code raises in unpickling.
        """
        data, buffers = self._data, self._buffers
        self._data, self._buffers = b"", ()
        if not buffers:
            try:
                return loads(data)
            finally:
                if isinstance(data, memoryview):
                    data.release()
        if not self.is_leased:
            buffers = [memoryview(bytearray(buffer)) for buffer in buffers]
        return pickle.loads(data[: self._pickled], buffers=buffers)


@step
class Leases:
    """Reads the payloads that the other side has put into its slots. All methods may be called from any thread."""

    def __init__(self, slots: SlotReader, endings: Endings, limit: int) -> None:
        """Lease at most `limit` slots at a time."""
        self._slots = slots
        self._endings = endings
        self._limit = limit if slots.may_lease else 0
        self._lock = threading.Lock()  # for arithmetic alone
        self._leased: set[int] = set()
        self.on_end: Callable[[int], None]
        """Called in the loop with the payload of each lease that has ended."""

    def receive(self, payload: Payload) -> Received:
        """Read a payload that the other side sent. The other side leaves its slot alone until this side releases it.

        If the result is leased, the caller must tell the other side so before it releases the slot. `on_end` then tells the other
        side of the end of the lease.

        Raises:
            BrokenFrame: the payload does not lie in a slot, or a buffer does not lie in the payload.
        """
        data = self._slots.read(payload)
        if not has_buffers(data):
            return Received(data, len(data), (), is_leased=False)
        pickled, places = places_in(data)
        if isinstance(data, bytes) or type(payload) is not int or not self._begin(payload & SLOT_MASK):
            return Received(data, pickled, [data[start:end] for start, end in places], is_leased=False)
        try:
            seen = export(self._slots.own(payload), self._endings, partial(self._end, payload))
        except BaseException:  # out of memory: there is no view, and so no end of a view
            self._give_up(payload & SLOT_MASK)
            raise
        return Received(data, pickled, parts_of(seen, places), is_leased=True)

    def receive_shared(self, payload: int, ended: Callable[[], None]) -> Received:
        """Read a payload that other processes read too. Its buffers are read-only.

        `ended` is called in the loop when the last view of the payload is freed, or soon if this raises.
        """
        try:
            data = self._slots.read(payload)
            assert isinstance(data, memoryview)
            pickled, places = places_in(data) if has_buffers(data) else (len(data), [])
            # ctypes cannot export read-only memory
            may_export = self._slots.may_lease and can_export()
            whole = export(self._slots.own(payload), self._endings, ended) if may_export else memoryview(bytes(data))
        except BaseException:  # there is no view, and so no end of a view
            self._endings.add(ended)
            raise
        if not may_export:
            self._endings.add(ended)
        seen = whole[: len(data)].toreadonly()
        # The pickle is read through the exported view as well, so `ended` is called even if there are no buffers.
        return Received(seen, pickled, parts_of(seen, places, readonly=True), is_leased=True)

    @property
    def count(self) -> int:
        """The number of leased slots."""
        return len(self._leased)

    def _begin(self, slot: int) -> bool:
        if not can_export():
            return False
        with self._lock:
            # The slot may be leased already: by an earlier attempt, or if two threads unpickle one function at once. Then its first
            # holder may have written to it, and the end of the first lease would discard what a second holder writes.
            if len(self._leased) >= self._limit or slot in self._leased:
                return False
            self._leased.add(slot)
            return True

    def _end(self, payload: int) -> None:
        self._slots.forget(payload)
        self.on_end(payload)
        self._give_up(payload & SLOT_MASK)  # last: the other side must hear of this end before it hears of another lease

    def _give_up(self, slot: int) -> None:
        with self._lock:
            self._leased.discard(slot)


# Views with a callback for when the last of them is freed


def parts_of(exported: memoryview, places: Sequence[tuple[int, int]], *, readonly: bool = False) -> list[memoryview]:
    """Return views of these places (start, end) of `exported`, which `export` has returned or which is a view of bytes.

    Each view may be used in another thread; `Memory.part` says why that matters.
    """
    views = [PickleBuffer(exported.obj).raw()[start:end] for start, end in places]
    return [view.toreadonly() for view in views] if readonly else views


@cache
def can_export() -> bool:
    """Whether this Python has ctypes. Without it every buffer is copied out of its slot."""
    return find_spec("_ctypes") is not None


_watched: Final[dict[int, ref[Any]]] = {}


@lru_cache(16)
def _array_of(size: int) -> Any:
    import ctypes  # seldom needed, and not cheap to import

    return ctypes.c_char * size  # cached, because making the class takes longer than using it; all slots of a runner share one


def export(view: memoryview, endings: Endings, ended: Ended) -> memoryview:
    """Return another view of the writable memory of `view`. The loop calls `ended` when no object refers to it any more.

    A ctypes array exports the memory. A Python class with `__buffer__` (3.12) would keep the view that it exports from, and both
    may be garbage-collected together. If the collector clears the view first, the process crashes (gh-77894, up to 3.12.6 and
    3.13.0).
    """

    def gone(watch: ref[Any]) -> None:
        _watched.pop(id(watch), None)
        endings.add(ended)

    array = _array_of(len(view)).from_buffer(view)
    watch = ref(array, gone)
    _watched[id(watch)] = watch  # keyed by id: a weak reference is hashable only if its object is
    return PickleBuffer(array).raw()  # raw() gives format B; a view of the array itself would have the format of characters
