"""Slots: where one large payload lies in shared memory while it travels.

A map is sparse and cut into equal slots of `max_message` bytes, so nothing ever grows and no length has to be known before it is
written: a pickler writes straight into a slot, one copy, and what does not fit is too large. The writer hands slots out, lowest
free first so that pages stay warm; a slot comes back when the other side says that it has been read.

No slot free is no failure: the payload stays in private bytes and is copied in when one is.

A slot may have several holders: the call whose arguments lie there, and each worker that has views of them. It is free when the
last one has given it back.
"""

import heapq
import threading
from collections import deque
from collections.abc import Callable
from pickle import PickleBuffer

from percore._errors import PayloadTooLarge
from percore._ipc.buffers import ALIGNMENT, BUFFER_LIMIT, table_of
from percore._ipc.memory import Memory
from percore._ipc.ring import BrokenFrame
from percore._ipc.room import MARGIN, room_left
from percore._messages import SLOT_BITS, SLOT_MASK, Payload

INLINE_LIMIT = 100_000
"""Bytes of a pickle up to which it travels in a frame. Above it a slot is faster (malloc takes fresh pages from 128 KiB on)."""

_FRAME_SIZE = 64 << 10
_FRAME_STARTS = (b"\x95", b"\x80\x05\x95")
"""A pickler writes its opcodes in frames of about 64 KiB, and bytes larger than that on their own, outside of any frame."""

WARM_LIMIT = 64 << 20
"""Bytes of touched pages a map may keep when all its slots are free."""


class SlotWriter:
    """The writing end of a map of slots. Slots may be taken and given back from any thread."""

    def __init__(self, memory: Memory, slot_size: int, limit: int) -> None:
        """Cut `memory` into slots. `limit`: bytes of the largest payload, at most `slot_size`."""
        self.slot_size = slot_size
        self.limit = limit
        self.count = min(memory.size // slot_size, SLOT_MASK + 1)
        assert self.count, "no slot: what needs one would wait for ever"
        assert limit <= slot_size, "what is written into a slot could reach into the next one"
        self._memory = memory
        # Held for arithmetic only: never over user code, a system call, or a wait. Re-entrant all the same: from 3.12 on a garbage
        # collection may begin behind any call, and a `__del__` that it runs may submit or cancel something.
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
        """The lowest free slot, or None."""
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

    def is_scarce(self) -> bool:
        """Whether one slot more would be in use than half of them."""
        return (self.in_use + 1) * 2 > self.count

    def hold(self, payload: int) -> None:
        """The slot of this payload has one holder more.

        Raises:
            BrokenFrame: there is no such payload.
        """
        slot, length = payload & SLOT_MASK, payload >> SLOT_BITS
        with self._lock:
            if slot >= self.count or not self._holders[slot] or not 0 <= length <= self.slot_size:
                raise BrokenFrame(f"{length} bytes in slot {slot} are held, which is not in use")
            self._holders[slot] += 1

    def give(self, slot: int, used: int) -> None:
        """A holder gives `slot` back, of which `used` bytes were written. It was the last: offer it to the waiters.

        Raises:
            BrokenFrame: it was not in use.
        """
        with self._lock:
            if not self._is_ours:
                return
            if not 0 <= slot < self.count or not self._holders[slot]:
                raise BrokenFrame(f"slot {slot} was released and is not in use")
            self._holders[slot] -= 1
            if self._holders[slot]:
                return
            self._warm += max(0, used - self._touched[slot])
            self._touched[slot] = max(self._touched[slot], used)
            cooled = self._cool(slot) if self._warm > WARM_LIMIT else []
        for start, end in cooled:
            # Before anyone can take these slots: what they write there would be given back as well.
            self._memory.give_back(start, end)
        with self._lock:
            for start, _ in cooled:
                if start // self.slot_size != slot:
                    heapq.heappush(self._freed, start // self.slot_size)
            heapq.heappush(self._freed, slot)
            self.in_use -= 1
        self._offer()

    def _cool(self, slot: int) -> list[tuple[int, int]]:
        """Which pages are to go back, so that no more stay warm than may: those of higher free slots, used last, and of this one.

        The slots are taken out of the free ones; what was warm at their beginning may stay so.
        """
        cooled = []
        higher = sorted((other for other in self._freed if other > slot and self._touched[other]), reverse=True)
        for other in (*higher, slot):
            if self._warm <= WARM_LIMIT:
                break
            if other != slot:
                try:
                    self._freed.remove(other)
                except ValueError:  # taken just now, by a collection
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
        """Have `waiter` called when a slot comes back, after those that wait already. It says whether it had a use for the slot.

        No wake-up is lost: 1. a thread finds no slot free; 2. the last one in use comes back, and nobody waits; 3. the thread
        waits, and looks again.
        """
        self._waiters.append(waiter)
        with self._lock:
            is_free = self._is_ours and (bool(self._freed) or self._fresh < self.count)
        if is_free:
            self._offer()

    def disown(self) -> None:
        """This is a fork of the process that made it, which goes on using the memory: hand out no slot, and give no page back."""
        self._lock = threading.RLock()  # another thread may have held it at the fork
        self._is_ours = False

    def is_awaited(self) -> bool:
        """Whether a payload waits for a slot."""
        return bool(self._waiters)

    def _offer(self) -> None:
        """A slot is free: tell the waiters in order, until one has a use for it."""
        while self._waiters:
            try:
                waiter = self._waiters.popleft()
            except IndexError:  # another thread was offering, too
                return
            if waiter():
                return

    def warm(self, slot: int) -> int:
        """Bytes at the beginning of a slot whose pages are there."""
        return self._touched[slot]

    def view(self, slot: int) -> memoryview:
        """The memory of one slot. A view of its own each time, as in `read`: see `Memory.part`."""
        start = slot * self.slot_size
        return self._memory.part(start, start + self.slot_size)

    def store(self, data: bytes) -> int | None:
        """Copy `data` into a free slot: the payload that names it, or None when no slot is free."""
        assert len(data) <= self.slot_size, "it would reach into the next slot"
        slot = self.take()
        if slot is None:
            return None
        start = slot * self.slot_size
        self._memory.view[start : start + len(data)] = data
        return len(data) << SLOT_BITS | slot

    def read(self, payload: Payload) -> memoryview | bytes:
        """The bytes of a payload of one's own."""
        if isinstance(payload, bytes):
            return payload
        start = (payload & SLOT_MASK) * self.slot_size
        return self._memory.part(start, start + (payload >> SLOT_BITS))

    def reader(self) -> "SlotReader":
        """The reading end, in this process."""
        return SlotReader(self._memory, self.slot_size)

    def discard(self, payload: Payload) -> None:
        """The payload is of no use any more: its slot, if it has one, is free."""
        if isinstance(payload, int):
            self.give(payload & SLOT_MASK, payload >> SLOT_BITS)


class SlotReader:
    """The reading end."""

    __slots__ = ("_memory", "_slot_size", "count")

    def __init__(self, memory: Memory, slot_size: int) -> None:
        self._memory = memory
        self._slot_size = slot_size
        self.count = min(memory.size // slot_size, SLOT_MASK + 1)

    @property
    def may_lease(self) -> bool:
        """Whether what lies there may be written to by whoever receives it."""
        return not self._memory.own.readonly

    def own(self, payload: int) -> memoryview:
        """The whole slot of a payload that `read` has found, where it may be used for longer, and written to."""
        start = (payload & SLOT_MASK) * self._slot_size
        return self._memory.own_part(start, start + self._slot_size)

    def read(self, payload: Payload) -> memoryview | bytes:
        """The bytes of a payload that the other side sent.

        Raises:
            BrokenFrame: it names memory outside its slot.
        """
        if isinstance(payload, bytes):
            return payload
        slot, length = payload & SLOT_MASK, payload >> SLOT_BITS
        if slot >= self.count or not 0 <= length <= self._slot_size:
            raise BrokenFrame(f"payload of {length} bytes in slot {slot}: there are {self.count} slots of {self._slot_size} bytes")
        start = slot * self._slot_size
        return self._memory.part(start, start + length)

    def forget(self, payload: int) -> None:
        """Whatever was written here over a payload is gone: the next one in its slot will be seen."""
        start = (payload & SLOT_MASK) * self._slot_size
        self._memory.forget_writes(start, start + (payload >> SLOT_BITS))


class Sink:
    """The file a pickler writes to: small pickles become bytes, large ones go straight into a slot.

    A pickler hands a small pickle over in one write, which is only kept; a second write, or a large one, means that a slot is
    worth it. Where none may be taken the bytes stay private.
    """

    __slots__ = (
        *("_frames", "_is_sparing", "_limit", "_parts", "_position", "_slot", "_slots", "_small", "_sure", "_view"),
        *("buffers", "head", "lacks_room"),
    )

    def __init__(self, slots: SlotWriter, *, private: bool = False, sparing: bool = False) -> None:
        """With `private`, no slot is taken however large the pickle is; `sparing`: when slots are scarce, none is."""
        self._slots = slots
        self._limit = slots.limit
        self._small = min(INLINE_LIMIT, slots.limit)
        self._is_sparing = sparing
        self.head: bytes | None = None
        """All that was written, as long as that is one small piece."""
        self._position = 0
        self._slot: int | None = None
        self._view: memoryview | None = None
        self._parts: list[bytes] | None = [] if private else None
        self._frames: list[tuple[int, int]] = []
        self.buffers: list[memoryview] = []
        """What is to travel beside the pickle."""
        self._sure = self._limit
        """How far may be written without a second look."""
        self.lacks_room = False
        """Whether there was too little memory for what was written last."""

    def write(self, data: bytes | bytearray | memoryview | PickleBuffer, /) -> None:
        """Append `data`.

        Raises:
            PayloadTooLarge: it does not fit; `reset` must follow.
            MemoryError: there is too little memory for it; likewise.
        """
        if self._view is None and self._parts is None:
            if self.head is None and type(data) is bytes and len(data) <= self._small:
                self.head = data
                return
            self._grow_large()
        if type(data) is bytes and (len(data) <= _FRAME_SIZE or data.startswith(_FRAME_STARTS)):
            self._frames.append((self._position, self._position + len(data)))
        if isinstance(data, PickleBuffer):
            data = data.raw()
        elif not isinstance(data, bytes):
            data = memoryview(data).cast("B")
        end = self._position + len(data)
        if end > self._sure:
            self._reach(end)
        if self._view is not None:
            self._view[self._position : end] = data
        elif self._parts is not None:
            self._parts.append(bytes(data))
        self._position = end

    def keep(self, buffer: PickleBuffer) -> bool:
        """For the pickler: whether this buffer is to be part of the pickle. If not, it is copied by `write_buffers`."""
        try:
            data = buffer.raw()
        except BufferError:  # not contiguous, which the pickler says better
            return True
        if data.nbytes < BUFFER_LIMIT:
            return True
        self.buffers.append(data)
        return False

    def write_buffers(self) -> None:
        """The pickle is complete: append what was kept beside it.

        Raises:
            PayloadTooLarge, MemoryError: as `write`.
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
        """Make sure that there is room: whoever writes to pages that the system cannot give is killed, and all its process does."""
        if end > self._limit:
            raise PayloadTooLarge(self._limit)
        room, needed = room_left(), end - max(self._position, self._sure - MARGIN) + MARGIN
        if room is not None and room < needed:
            self.lacks_room = True
            raise MemoryError(f"a message of at least {end} bytes does not fit into the memory that is left, {room} bytes")
        self._sure = min(self._limit, end + MARGIN)

    def contains(self, needle: bytes) -> bool:
        """Whether the pickle that was written has `needle` in its frames; large data outside of them is not looked at."""
        if self.head is not None:
            return needle in self.head
        if self._parts is not None:
            return any(needle in part for part in self._parts)
        return self._view is not None and any(needle in bytes(self._view[start:end]) for start, end in self._frames)

    def reset(self) -> None:
        """Forget everything written; a slot that was taken is free again."""
        slot, used = self._slot, self._position
        private = self._parts is not None and slot is None and self.head is None
        self.head, self._view, self._slot, self._position = None, None, None, 0
        self._parts = [] if private else None
        self._frames = []
        self.buffers = []
        self._sure = self._limit
        if slot is not None:
            self._slots.give(slot, used)

    def payload(self) -> Payload:
        """What was written, ready to travel: bytes, or the slot that holds it, which is then the caller's to discard."""
        if self.head is not None:
            return self.head
        if self._slot is not None:
            return self._position << SLOT_BITS | self._slot
        return b"".join(self._parts or ())
