"""Slots: regions of shared memory, each of which holds one large payload while it travels.

A sparse map is cut into equal slots of `max_message` bytes. Nothing ever grows, and the length of a payload need not be known
before it is written: a pickler writes straight into a slot, which is the only copy, and raises if the payload is larger than the
slot. The writer hands out the lowest free slot first, so that the touched pages are reused. A slot is free again when the other
side reports that it has read the payload.

If no slot is free, the payload stays in private bytes and is copied into a slot once one is free.

A slot may have several holders: the call whose arguments lie there, and each worker that has views of them. The slot is free when
its last holder has given it back.
"""

import heapq
import threading
from collections import deque
from collections.abc import Callable
from pickle import PickleBuffer
from typing import Final

from percore._common.errors import PayloadTooLarge
from percore._common.steps import step
from percore._common.system import MARGIN, room_left
from percore._protocol.messages import BrokenFrame, Payload
from percore._transport.buffers import ALIGNMENT, BUFFER_LIMIT, table_of
from percore._transport.memory import Memory

SLOT_BITS: Final = 10
SLOT_MASK: Final = (1 << SLOT_BITS) - 1
"""A payload in a slot is named by a number: length << SLOT_BITS | slot."""

INLINE_LIMIT = 100_000
"""Pickles of up to this many bytes travel in a frame. Above it a slot is faster, as malloc takes fresh pages from 128 KiB on."""

_FRAME_SIZE = 64 << 10
_FRAME_STARTS = (b"\x95", b"\x80\x05\x95")
"""How frames begin. A pickler writes its opcodes in frames of about 64 KiB, and larger bytes objects outside of any frame."""

WARM_LIMIT = 64 << 20
"""Bytes of touched pages that a map may keep while all its slots are free."""


@step
class SlotWriter:
    """The writing end of a map of slots. Slots may be taken and given back from any thread."""

    # An arena adds some, and of an instance with more than thirty attributes CPython looks up each of them in a dictionary.
    __slots__ = (
        "__dict__", "__weakref__", "_freed", "_fresh", "_holders", "_is_ours", "_lock", "_memory", "_touched", "_waiters", "_warm",
        "count", "in_use", "limit", "slot_size"
    )  # fmt: skip

    def __init__(self, memory: Memory, slot_size: int, limit: int) -> None:
        """Cut `memory` into slots. `limit` is the size of the largest payload in bytes, at most `slot_size`."""
        self.slot_size = slot_size
        self.limit = limit
        self.count = min(memory.size // slot_size, SLOT_MASK + 1)
        assert self.count, "no slot: what needs one would wait for ever"
        assert limit <= slot_size, "what is written into a slot could reach into the next one"
        self._memory = memory
        # Held for arithmetic only: never over user code, a system call, or a wait. It is re-entrant all the same: from 3.12 on a
        # garbage collection may start after any call, and a `__del__` that it runs may submit or cancel a call.
        self._lock = threading.RLock()
        self._freed: list[int] = []
        self._fresh = 0
        self._holders = [0] * self.count
        self._touched = [0] * self.count
        self._warm = 0
        self._is_ours = True
        self.in_use = 0
        self._waiters: deque[Callable[[], bool]] = deque()

    def take(self) -> int | None:
        """Take the lowest free slot and return its number, or None if no slot is free."""
        with self._lock:
            if not self._is_ours:
                return None
            if self._freed:
                slot = heapq.heappop(self._freed)
            elif self._fresh < self.count:
                slot = self._fresh
                self._fresh += 1
            else:
                return None
            self._holders[slot] = 1
            self.in_use += 1
            return slot

    def has_free(self) -> bool:
        """Whether a slot is free."""
        return self._is_ours and (bool(self._freed) or self._fresh < self.count)

    def is_scarce(self) -> bool:
        """Whether more than half of the slots would be in use if one more were taken."""
        return (self.in_use + 1) * 2 > self.count

    def hold(self, payload: int) -> None:
        """Add a holder to the slot of `payload`.

        Raises:
            BrokenFrame: there is no such payload.
        """
        slot, length = payload & SLOT_MASK, payload >> SLOT_BITS
        with self._lock:
            if slot >= self.count or not self._holders[slot] or not 0 <= length <= self.slot_size:
                raise BrokenFrame(f"{length} bytes in slot {slot} are held, which is not in use")
            self._holders[slot] += 1

    def give(self, slot: int, used: int) -> None:
        """Remove a holder from `slot`, of which `used` bytes were written. With the last one, free the slot and call the waiters.

        Raises:
            BrokenFrame: the slot was not in use.
        """
        with self._lock:
            if not self._is_ours:
                return
            if not 0 <= slot < self.count or not self._holders[slot]:
                raise BrokenFrame(f"slot {slot} was released and is not in use")
            self._holders[slot] = holders = self._holders[slot] - 1
            if holders:
                return
            touched = self._touched[slot]
            if used > touched:
                self._warm += used - touched
                self._touched[slot] = used
            cooled = self._cool(slot) if self._warm > WARM_LIMIT else None
            if cooled is None:
                heapq.heappush(self._freed, slot)
                self.in_use -= 1
        if cooled is not None:
            self._give_pages(slot, cooled)
        if self._waiters:
            self._offer()

    def _give_pages(self, slot: int, cooled: list[tuple[int, int]]) -> None:
        """Give back the pages that `_cool` has chosen, and then free `slot` and the other slots that they are of."""
        for start, end in cooled:
            # Before any thread can take these slots: giving the pages back would also discard a new payload.
            self._memory.give_back(start, end)
        with self._lock:
            for start, _ in cooled:
                if start // self.slot_size != slot:
                    heapq.heappush(self._freed, start // self.slot_size)
            heapq.heappush(self._freed, slot)
            self.in_use -= 1

    def _cool(self, slot: int) -> list[tuple[int, int]]:
        """Return the ranges of pages to give back, so that at most WARM_LIMIT bytes stay warm.

        They come from free slots above `slot`, highest first because those are used least, and then from `slot` itself. The slots
        are removed from the free ones meanwhile. A slot may keep the first of its warm pages.
        """
        cooled = []
        higher = sorted((other for other in self._freed if other > slot and self._touched[other]), reverse=True)
        for other in (*higher, slot):
            if self._warm <= WARM_LIMIT:
                break
            if other != slot:
                try:
                    self._freed.remove(other)
                except ValueError:  # a `__del__` that ran in a garbage collection has just taken it
                    continue
            touched = self._touched[other]
            keep = max(0, touched - (self._warm - WARM_LIMIT))
            self._touched[other] = keep
            self._warm -= touched - keep
            start = other * self.slot_size
            cooled.append((start + keep, start + touched))
        heapq.heapify(self._freed)
        return cooled

    def wait(self, waiter: Callable[[], bool]) -> None:
        """Have `waiter` called when a slot is given back, after the waiters that came before it.

        `waiter` returns whether it had a use for the slot; if not, the next waiter is called. It may be called in any thread, also
        before `wait` returns.

        No wake-up is lost: 1. a thread finds no slot free; 2. the last slot in use is given back while no waiter is registered; 3.
        the thread registers its waiter, and then checks again for a free slot.
        """
        self._waiters.append(waiter)
        with self._lock:
            is_free = self.has_free()
        if is_free:
            self._offer()

    def disown(self) -> None:
        """Stop handing out slots and giving back pages: this is a copy in a forked child, and the parent uses the memory."""
        self._lock = threading.RLock()  # another thread may have held the old lock at the fork
        self._is_ours = False

    def is_awaited(self) -> bool:
        """Whether a waiter is registered."""
        return bool(self._waiters)

    def _offer(self) -> None:
        """Call the waiters in order, because a slot is free, until one has a use for it."""
        while self._waiters:
            try:
                waiter = self._waiters.popleft()
            except IndexError:  # another thread has just taken the last waiter
                return
            try:
                if waiter():
                    return
            except BaseException:  # such as Ctrl-C: its channel has broken, and the slot is still free
                self._offer()
                raise

    def warm(self, slot: int) -> int:
        """Return how many bytes at the beginning of `slot` lie in pages that were touched already."""
        return self._touched[slot]

    def view(self, slot: int) -> memoryview:
        """Return the memory of one slot, as a new view each time; `Memory.part` says why."""
        start = slot * self.slot_size
        return self._memory.part(start, start + self.slot_size)

    def store(self, data: bytes | bytearray | memoryview) -> int | None:
        """Copy `data` into a free slot and return the payload that names it, or None if no slot is free."""
        assert len(data) <= self.slot_size, "it would reach into the next slot"
        slot = self.take()
        if slot is None:
            return None
        start = slot * self.slot_size
        try:
            self._memory.view[start : start + len(data)] = data
        except BaseException:  # Ctrl-C, for which a long copy leaves much time
            self.give(slot, len(data))
            raise
        return len(data) << SLOT_BITS | slot

    def kept(self, data: bytes) -> Payload:
        """Return the payload for a pickle outside of the slots: the bytes themselves."""
        return data

    def read(self, payload: Payload) -> memoryview | bytes:
        """Return the bytes of a payload that this side has written."""
        if isinstance(payload, bytes):
            return payload
        start = (payload & SLOT_MASK) * self.slot_size
        return self._memory.part(start, start + (payload >> SLOT_BITS))

    def reader(self) -> "SlotReader":
        """Return a reading end of the same slots, for this process."""
        return SlotReader(self._memory, self.slot_size)

    def discard(self, payload: Payload) -> None:
        """Give the slot of `payload` back, if it has one."""
        if isinstance(payload, int):
            self.give(payload & SLOT_MASK, payload >> SLOT_BITS)


@step
class SlotReader:
    """The reading end of a map of slots."""

    __slots__ = ("_memory", "_slot_size", "count")

    def __init__(self, memory: Memory, slot_size: int) -> None:
        self._memory = memory
        self._slot_size = slot_size
        self.count = min(memory.size // slot_size, SLOT_MASK + 1)

    @property
    def may_lease(self) -> bool:
        """Whether a receiver may write to the payloads in these slots."""
        return not self._memory.own.readonly

    def own(self, payload: int) -> memoryview:
        """Return the whole slot of a payload that `read` has checked, as memory that may be kept for longer and written to."""
        start = (payload & SLOT_MASK) * self._slot_size
        return self._memory.own_part(start, start + self._slot_size)

    def read(self, payload: Payload) -> memoryview | bytes:
        """Return the bytes of a payload that the other side sent.

        Raises:
            BrokenFrame: the payload names memory outside its slot, or is no payload.
        """
        if isinstance(payload, bytes):
            return payload
        if not isinstance(payload, int):
            raise BrokenFrame(f"a {type(payload).__name__} in place of a payload")
        slot, length = payload & SLOT_MASK, payload >> SLOT_BITS
        if slot >= self.count or not 0 <= length <= self._slot_size:
            raise BrokenFrame(f"payload of {length} bytes in slot {slot}: there are {self.count} slots of {self._slot_size} bytes")
        start = slot * self._slot_size
        return self._memory.part(start, start + length)

    def forget(self, payload: int) -> None:
        """Discard what this process wrote over `payload`, so that it sees the next payload in the slot."""
        start = (payload & SLOT_MASK) * self._slot_size
        self._memory.forget_writes(start, start + (payload >> SLOT_BITS))


@step
class Sink:
    """The file that a pickler writes to. It turns small pickles into bytes, and writes large ones straight into a slot.

    A pickler hands over a small pickle in a single write, and the sink only keeps those bytes. At a second write, or a large one,
    the sink takes a slot. If it may not take one, or none is free, it keeps private bytes.
    """

    __slots__ = (
        *("_frames", "_is_sparing", "_limit", "_parts", "_position", "_slot", "_slots", "_small", "_sure", "_view"),
        *("buffers", "head", "lacks_room"),
    )

    def __init__(self, slots: SlotWriter, *, sparing: bool = False) -> None:
        """Take slots from `slots`, with `sparing` only while `slots.is_scarce()` is false."""
        self._slots = slots
        self._limit = slots.limit
        self._small = min(INLINE_LIMIT, slots.limit)
        self._is_sparing = sparing
        self.head: bytes | None = None
        """Everything written, as long as that is one small piece."""
        self._position = 0
        self._slot: int | None = None
        self._view: memoryview | None = None
        self._parts: list[bytes] | None = None
        self._frames: list[tuple[int, int]] = []
        self.buffers: list[memoryview] = []
        """Large buffers that are to travel beside the pickle."""
        self._sure = self._limit
        """The position up to which `write` need not check whether there is room."""
        self.lacks_room = False
        """Whether a write failed for lack of memory."""

    def write(self, data: bytes | bytearray | memoryview | PickleBuffer, /) -> None:
        """Append `data`.

        Raises:
            PayloadTooLarge: the pickle would exceed the limit; call `reset` then.
            MemoryError: the system has too little memory left for it; call `reset` then.
        """
        if self._view is None and self._parts is None:
            if self.head is None and type(data) is bytes and len(data) <= self._small:
                self.head = data
                return
            self._grow_large()
        start = self._position
        if type(data) is bytes:
            end = start + len(data)
            if end - start <= _FRAME_SIZE or data.startswith(_FRAME_STARTS):
                self._frames.append((start, end))
        else:
            data = data.raw() if isinstance(data, PickleBuffer) else memoryview(data).cast("B")
            end = start + len(data)
        if end > self._sure:
            self._reach(end)
        if self._view is not None:
            self._view[start:end] = data
        elif self._parts is not None:
            self._parts.append(bytes(data))
        self._position = end

    def keep(self, buffer: PickleBuffer) -> bool:
        """Return whether `buffer` is to be part of the pickle. If not, `write_buffers` copies it. The pickler calls this."""
        try:
            data = buffer.raw()
        except BufferError:  # not contiguous: the pickler raises a better error
            return True
        if data.nbytes < BUFFER_LIMIT:
            return True
        self.buffers.append(data)
        return False

    def write_buffers(self) -> None:
        """Append the buffers that `keep` set aside, and the table that finds them. Call it once the pickle is complete.

        Raises:
            PayloadTooLarge, MemoryError: as for `write`.
        """
        if self._view is None and self._parts is None:
            self._grow_large()
        pickled, places = self._position, []
        for data in self.buffers:
            if gap := -self._position % ALIGNMENT:
                self.write(bytes(gap))
            places.append((self._position, data.nbytes))
            self.write(data)
        self.buffers = []
        self.write(table_of(pickled, places))

    def _grow_large(self) -> None:
        self._slot = None if self._is_sparing and self._slots.is_scarce() else self._slots.take()
        if self._slot is None:
            self._parts = []
        else:
            self._view = self._slots.view(self._slot)
            self._sure = min(self._limit, self._slots.warm(self._slot) + MARGIN)
        head, self.head = self.head, None
        if head is not None:
            self.write(head)

    def _reach(self, end: int) -> None:
        """Check that there is room up to `end`. If the system has no page left, writing to fresh memory kills the process."""
        if end > self._limit:
            raise PayloadTooLarge(self._limit)
        room, needed = room_left(), end - max(self._position, self._sure - MARGIN) + MARGIN
        if room is not None and room < needed:
            self.lacks_room = True
            raise MemoryError(f"a message of at least {end} bytes does not fit into the memory that is left, {room} bytes")
        self._sure = min(self._limit, end + MARGIN)

    def contains(self, needle: bytes) -> bool:
        """Return whether `needle` occurs in the frames of the pickle. Large data outside of frames is not searched."""
        if self.head is not None:
            return needle in self.head
        if self._parts is not None:
            return any(needle in part for part in self._parts)
        return self._view is not None and any(needle in bytes(self._view[start:end]) for start, end in self._frames)

    def reset(self) -> None:
        """Forget everything written, and give back the slot if one was taken."""
        slot, used = self._slot, self._position
        self.head, self._view, self._slot, self._parts, self._position = None, None, None, None, 0
        self._frames = []
        self.buffers = []
        self._sure = self._limit
        if slot is not None:
            self._slots.give(slot, used)

    def payload(self) -> Payload:
        """Return what was written as a payload: bytes, or the slot that holds it, which the caller must then discard."""
        if self.head is not None:
            return self.head
        if self._slot is not None:
            return self._position << SLOT_BITS | self._slot
        return self._slots.kept(b"".join(self._parts or ()))
