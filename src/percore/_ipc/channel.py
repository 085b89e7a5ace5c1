"""A channel: ring, slots, bell and loop become `send` and received messages.

Both sides use this class. Theory of operation:

Sending     A message to a peer that has read everything goes into the ring at once (latency), and so does the next one of an
            iteration of the loop; what follows is queued, and `flush` moves it into the ring when the iteration ends, in few frames
            and with one ring of the bell (throughput). Of many peers no more are rung at once than can run at once (`Haste`).
            Threads of a worker use `send_from_thread`: whoever gets the try-lock publishes what everybody has queued, and nobody
            ever waits for it.
Full ring   What does not fit stays queued. Reading goes on, so both directions full at once cannot deadlock. No wake-up is lost:
            1. a flusher finds the ring full; 2. the loop hears that the peer has read, and counts it before it tries to flush;
            3. that try fails, because the flusher still holds the lock; 4. the flusher lets go of the lock and looks again whether
            there is something to do, and now there is. The same holds for a ring that is due for positions alone.
Consumed    What was read is told with the next ring. Where the other side routes by it (`prompt`), an iteration that sends nothing
            rings for it alone; otherwise once a quarter of the ring is owed, which always leaves room for the largest frame.
Payloads    A pickle too large for a frame lies in a slot. Where no slot is free it waits, in order, for the next one.
Broken      Any exception between reading the bell and the last message (a broken peer, a KeyboardInterrupt) leaves positions or
            messages lost for good: `on_broken` is called, nothing is delivered any more, and the exception goes on if it is not an
            Exception. The owner ends the peer.
Fork        A process that is forked from this one has a copy of every channel, of the loop with its readers, and of what is queued.
            But the bell and the memory are not copied: a bell that the fork reads is lost here, a frame that it writes lies over
            one of ours. So in a fork no channel is open, whatever the fork does.
"""

import asyncio
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Final, Protocol
from weakref import WeakSet

from percore._ipc.codec import decode, encode
from percore._ipc.doorbell import Bell
from percore._ipc.exports import Endings
from percore._ipc.leases import Leases
from percore._ipc.ring import HEADER_SIZE, OWED, BrokenFrame, RingReader, RingWriter, largest_frame
from percore._ipc.slots import INLINE_LIMIT, SlotReader, SlotWriter
from percore._messages import Body, Message
from percore._points import POINTS, point

RING_SIZE = 1 << 19
MAX_FRAME = RING_SIZE // 2
"""Bytes of a frame of several messages."""
LARGEST_FRAME: Final = largest_frame(RING_SIZE)
"""Bytes of a frame of one. `_messages` and its test tell how large each kind of message can be: none comes near."""
_BATCH = 256
_LAZY = 0.002
"""How long a message nobody awaits may be held to share a wake-up, in seconds: a wake-up costs the peer more than reading it."""
_HEAVY = 1 << 17


def _ignore(_error: BaseException) -> None:
    return


def _checked(data: bytes, op: int) -> bytes:
    """A frame that fits into the ring.

    Raises:
        ValueError: it never will. To wait for that would stop the channel without a word.
    """
    if len(data) > LARGEST_FRAME:
        raise ValueError(f"a message ({op}) of {len(data)} bytes: the largest that fits into the ring has {LARGEST_FRAME}")
    return data


def _unheard(count: int) -> None:
    raise BrokenFrame(f"{count} log records, and nobody is there to read any")


class Ticket(Protocol):
    """Whose private pickle waits for a slot."""

    def is_wanted(self) -> bool:
        """Whether it still has to be sent."""

    def stored(self, payload: int) -> bool:
        """It lies in a slot now, which is the owner's to free once the other side has read it; False: it is not wanted any more."""


class Haste:
    """How many peers are rung at once, shared by the channels of a runner. Of each bell that is heard it begins anew.

    To ring wakes a process, which is the dearest part of a message. Where no CPU is left for it to run on, it is better woken for
    all that this iteration of the loop has for it.
    """

    __slots__ = ("limit", "rung")

    def __init__(self, limit: int) -> None:
        """`limit`: the number of CPUs."""
        self.limit = limit
        self.rung = 0


class Channel:
    """One side of a channel. All methods are the loop's alone, except `send_from_thread`."""

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        rings: tuple[RingWriter, RingReader],
        bell: Bell,
        slots: tuple[SlotWriter, SlotReader],
        *,
        prompt: bool,
        leases: int = 0,
    ) -> None:
        """`leases`: slots of the other side that may go on being used after they were read."""
        self.loop = loop
        self.tx, self.rx = rings
        self.outgoing, self.incoming = slots
        assert not leases or leases < self.incoming.count, "views that somebody keeps could hold all slots"
        self.leases = Leases(self.incoming, Endings(loop), leases)
        self.on_frame: Callable[[list[Message]], None]
        self.on_broken: Callable[[BaseException], None] = _ignore
        self.on_batch: Callable[[], None] | None = None
        self.on_logged: Callable[[int], None] = _unheard
        """Called with how many log records the peer has written, before the messages that it has sent after them."""
        self.haste = Haste(sys.maxsize)
        """To be replaced where there are several peers."""
        self.full_count = 0
        self._bell = bell
        self._prompt = prompt
        self._queue: deque[Message] = deque()
        self._heavy = 0
        self._frame: bytes | None = None
        self._lock = threading.Lock()
        self._told = 0
        self._rung_at = self._lag = 0.0
        self.waits_since = 0.0
        """While the peer has something to read: since when it has read nothing."""
        self._ends_turn = self._is_lazy = False
        self.is_open = False
        self._bell_waits = False
        self._is_ring_due = False

    def open(
        self,
        on_frame: Callable[[list[Message]], None],
        on_broken: Callable[[BaseException], None],
        on_batch: Callable[[], None] | None = None,
    ) -> None:
        """Begin to receive. `on_frame` takes the messages of a frame, up to one that ends the channel.

        `on_batch` is called when all that had been published was delivered, or a full bell takes writes.
        """
        self.on_frame = on_frame
        self.on_broken = on_broken
        self.on_batch = on_batch
        self.is_open = True
        _opened.add(self)
        self.loop.add_reader(self._bell.fileno(), self._on_bell)

    # Sending

    def send(self, op: int, call_id: int, body: Body) -> None:
        """Send a message; it is in the ring at the latest when this iteration of the loop ends, unless the ring is full."""
        if self._ends_turn:  # in company, then
            self._queue.append((op, call_id, body))
            if type(body) is bytes:
                self._heavy += len(body)
            return
        tx, haste = self.tx, self.haste
        if (
            tx.written != tx.acknowledged
            or self._queue
            or self._frame
            or haste.rung >= haste.limit
            or POINTS
            or not self.is_open
            or not self._lock.acquire(False)
        ):
            self._send_in_turn(op, call_id, body)
            return
        # The peer waits for us: nothing to gain by waiting for more. This is `flush` for one message, in as few calls as can be:
        # after a wait every function is cold, and costs a microsecond.
        try:
            data = encode([(op, call_id, body)])
            if tx.size - tx.written + tx.acknowledged < len(data) + HEADER_SIZE:  # threads have filled it since we looked
                self._frame = _checked(data, op)
            else:
                published = tx.write(data)
                self._rung_at = self.waits_since = monotonic()
                haste.rung += 1
                consumed = self.rx.read - self._told
                self._told += consumed
                if not self._bell.ring(published, consumed):
                    self._wait_for_bell()
        except BaseException as error:
            self._break(error)
            if not isinstance(error, Exception):
                raise
        finally:
            self._lock.release()
        if self._queue or self._is_ring_due:  # a thread may have tried meanwhile
            self.flush()

    def _send_in_turn(self, op: int, call_id: int, body: Body) -> None:
        self.send_later(op, call_id, body)
        if self.haste.rung < self.haste.limit or self.tx.written != self.tx.acknowledged:  # else it is not even awake
            self.flush()

    def _enqueue(self, op: int, call_id: int, body: Body) -> None:
        self._queue.append((op, call_id, body))
        if type(body) is bytes:
            self._heavy += len(body)

    def send_from_thread(self, op: int, call_id: int, body: Body) -> None:
        """As `send`, from any thread; the message is in the ring on return, unless another thread is about to do that."""
        self._enqueue(op, call_id, body)
        self.flush()

    def keep(self, op: int, call_id: int, body: Body) -> None:
        """As `send_from_thread`, but the message travels with the next one that is sent, or with the next `flush`."""
        self._enqueue(op, call_id, body)

    def send_later(self, op: int, call_id: int, body: Body) -> None:
        """As `send`, but together with what else this iteration of the loop sends."""
        self._enqueue(op, call_id, body)
        if not self._ends_turn:
            self._ends_turn = True
            self.loop.call_soon(self._end_turn)

    def send_lazily(self, op: int, call_id: int, body: Body) -> None:
        """As `send`, but together with what is sent next, within two milliseconds."""
        self._enqueue(op, call_id, body)
        if not self._is_lazy:
            self._is_lazy = True
            self.loop.call_later(_LAZY, self._end_lazy)

    def _end_lazy(self) -> None:
        self._is_lazy = False
        self.flush()

    def send_payload(
        self,
        op: int,
        call_id: int,
        body: Body,
        send: Callable[[int, int, Body], None] | None = None,
        ticket: Ticket | None = None,
    ) -> None:
        """Send a message whose body may be a private pickle too large for a frame; that waits for a slot."""
        if type(body) is bytes and len(body) > INLINE_LIMIT:
            payload = self.outgoing.store(body)
            if payload is None:
                self.outgoing.wait(lambda: self._retry_payload(op, call_id, body, ticket))
                return
            if ticket is not None and not ticket.stored(payload):
                self.outgoing.discard(payload)
                return
            body = payload
            if POINTS:
                point(f"{self._side}.slot.filled")
        (send or self.send)(op, call_id, body)

    def _retry_payload(self, op: int, call_id: int, body: Body, ticket: Ticket | None) -> bool:
        if not self.is_open or (ticket is not None and not ticket.is_wanted()):
            return False
        # In whatever thread gave the slot back.
        self.send_payload(op, call_id, body, self.send_from_thread, ticket)
        return True

    def _end_turn(self) -> None:
        self._ends_turn = False
        self.flush()

    def flush(self) -> None:
        """Move what is queued into the ring, as far as it fits, and ring."""
        try:
            while self.is_open and (self._is_ring_due or self._has_work()) and self._lock.acquire(False):
                try:
                    if self._has_work():
                        self._publish()
                    else:
                        self._ring(0)
                finally:
                    self._lock.release()
        except BaseException as error:
            self._break(error)
            if not isinstance(error, Exception):
                raise

    def is_flushed(self) -> bool:
        """Whether all that was sent has been published. Asked on the loop, while no thread sends."""
        return not (self._queue or self._frame is not None or self._bell_waits or self.outgoing.is_awaited())

    def has_read(self) -> bool:
        """Whether the peer has read all that was sent. If it has not, a prompt peer tells when it has: `on_batch` is called."""
        return self.tx.written == self.tx.acknowledged and not self._queue and self._frame is None

    def lag(self) -> float:
        """Seconds from the last ring to the news that the peer has read what it was for; until now, where it has not."""
        return self._lag if self.tx.written == self.tx.acknowledged else max(self._lag, monotonic() - self._rung_at)

    def _has_work(self) -> bool:
        frame = self._frame
        if frame is not None:
            return self.tx.free() >= len(frame) + HEADER_SIZE
        return bool(self._queue)

    def _publish(self) -> None:
        published = 0
        had_read = self.tx.written == self.tx.acknowledged
        while self._frame is not None or self._queue:
            frame = self._frame or self._next_frame()
            if self.tx.free() < len(frame) + HEADER_SIZE:
                self._frame = frame
                self.full_count += 1
                break
            self._frame = None
            published += self.tx.write(frame)
            self._rung_at = monotonic()
        if had_read:
            self.waits_since = self._rung_at
        if POINTS:
            point(f"{self._side}.frame.written")
        self._ring(published)
        if POINTS:
            point(f"{self._side}.bell.rung")

    @property
    def _side(self) -> str:
        return "worker" if self._prompt else "supervisor"

    def _ring(self, published: int) -> None:
        self._is_ring_due = False
        consumed = self.rx.read - self._told
        self._told += consumed
        if not self._bell.ring(published, consumed):
            self._wait_for_bell()

    def _wait_for_bell(self) -> None:
        if not self._bell_waits:
            self._bell_waits = True
            self.loop.call_soon_threadsafe(self._watch_bell)

    def _next_frame(self) -> bytes:
        """One frame of what is queued: all of it where that is little, else as much as fits."""
        queue = self._queue
        if self._heavy < _HEAVY:
            count = min(len(queue), _BATCH)
        else:
            # By index: threads may append meanwhile, which an iterator would not survive.
            count, size = 0, 0
            while count < min(len(queue), _BATCH):
                body = queue[count][2]
                size += len(body) if type(body) is bytes else 0
                if count and size > _HEAVY:
                    break
                count += 1
        messages = [queue.popleft() for _ in range(count)]
        data = encode(messages)
        while len(data) > MAX_FRAME and len(messages) > 1:
            half = len(messages) // 2
            queue.extendleft(reversed(messages[half:]))
            messages = messages[:half]
            data = encode(messages)
        _checked(data, messages[0][0])
        self._heavy = 0 if not queue else max(0, self._heavy - sum(len(m[2]) for m in messages if type(m[2]) is bytes))
        return data

    def _watch_bell(self) -> None:
        if self.is_open:
            self.loop.add_writer(self._bell.out_fileno(), self._bell_takes_writes)

    def _bell_takes_writes(self) -> None:
        self.loop.remove_writer(self._bell.out_fileno())
        self._bell_waits = False
        self._ring_alone()
        if self.is_open and self.on_batch is not None:
            self.on_batch()

    # Receiving

    def _on_bell(self) -> None:
        self.receive()
        if self._queue or self._frame is not None:
            self.flush()
        owed = self.rx.read - self._told
        if owed and (self._prompt or owed > self.rx.size // OWED):
            self.loop.call_soon(self._tell_consumed)

    def _tell_consumed(self) -> None:
        if self.is_open and self.rx.read != self._told:
            self._ring_alone()

    def _ring_alone(self) -> None:
        """Ring for positions alone."""
        self._is_ring_due = True
        self.flush()

    def receive(self) -> None:  # noqa: C901, PLR0912  # one function, since each more costs every message a microsecond
        """Read the bell once and deliver all that was published. Also for the last words of a peer that has died."""
        if not self.is_open:
            return
        rx, tx = self.rx, self.tx
        self.haste.rung = 0
        try:
            try:
                published, consumed, logged = self._bell.read()
            except BlockingIOError:
                return
            if POINTS:
                point(f"{self._side}.bell.read")
            rx.end += published
            tx.acknowledged += consumed
            if consumed:
                self.waits_since = now = monotonic()
                if tx.acknowledged == tx.written:
                    self._lag = now - self._rung_at
            if published < 0 or consumed < 0 or logged < 0 or rx.end - rx.read > rx.size or tx.acknowledged > tx.written:
                raise BrokenFrame(f"the peer published {published} and consumed {consumed} bytes")
            if logged:
                self.on_logged(logged)
                if not self.is_open:
                    return
            while rx.read != rx.end:
                self.on_frame(decode(rx.next()))
                if not self.is_open:  # one of its messages, or what it made us send, has ended the channel
                    return
            if self.on_batch is not None:
                self.on_batch()
        except BaseException as error:
            self._break(error)
            if not isinstance(error, Exception):
                raise

    def _break(self, error: BaseException) -> None:
        if self.is_open:
            self.stop()
            self.on_broken(error)

    def stop(self) -> None:
        """Receive nothing more. Idempotent."""
        if self.is_open:
            self.is_open = False
            if not self.loop.is_closed():
                self.loop.remove_reader(self._bell.fileno())
                if self._bell_waits:
                    self.loop.remove_writer(self._bell.out_fileno())

    def close(self) -> None:
        """Stop, and let go of bell and rings. Idempotent."""
        self.stop()
        self._bell.close()
        self.tx.release()
        self.rx.release()
        self._queue.clear()

    def disown(self) -> None:
        """This is a fork of the process that opened it, which goes on using it: touch neither the bell nor the memory."""
        self.is_open = False
        # The copied loop shares one epoll with ours: ending, it would take descriptors out of it that it has open, too.
        self._bell.close()
        self.outgoing.disown()


_opened: Final[WeakSet[Channel]] = WeakSet()


def _disown_all() -> None:
    for channel in list(_opened):
        channel.disown()


os.register_at_fork(after_in_child=_disown_all)
