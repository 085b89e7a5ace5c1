"""A channel sends messages to its peer and delivers the peer's messages, over two rings, two sets of slots, a bell and a loop.

The supervisor and the worker each hold one side of a channel, and both use this class. Theory of operation:

Sending     If the peer has read everything, a message goes into the ring at once, for latency. So does the second message of the
            same iteration of the loop. Later messages are queued until the iteration ends. Then `flush` moves them into the ring in
            few frames and rings the bell once, for throughput. `Haste` limits how many peers are rung at once to the number of
            CPUs. Threads of a worker use `send_from_thread`. The thread that gets the try-lock publishes the messages of all
            threads, and no thread ever waits for the lock.
Full ring   Messages that do not fit stay queued. The channel goes on reading, so it cannot deadlock even if both rings are full. No
            wake-up is lost:
            1. a flusher finds the ring full;
            2. the loop receives the peer's new position, and counts it before it tries to flush;
            3. that try fails, because the flusher still holds the lock;
            4. the flusher releases the lock, checks again for work, and now finds some.
            The same holds for a ring of the bell that is due for positions alone.
Consumed    The next ring of the bell also reports how many bytes were read. The supervisor routes calls by this number, so a worker
            (`prompt`) rings for it alone after an iteration that sends nothing. The supervisor does so once it owes a quarter of
            the ring, which always leaves room for the largest frame.
Payloads    A pickle too large for a frame lies in a slot. If no slot is free, the message waits for one; waiting messages get slots
            in order.
Broken      An exception between reading the bell and delivering the last message (a broken peer, a KeyboardInterrupt) loses
            positions or messages for good. The channel then delivers nothing more and calls `on_broken`, and the exception
            propagates unless it is an Exception. The owner ends the peer.
Fork        A forked child has a copy of every channel, of the loop with its readers, and of the queued messages. It shares the bell
            and the memory with its parent: if it read the bell, the parent would miss a ring, and if it wrote a frame, the frame
            would overwrite the parent's. So every channel is closed in the child right after the fork.
"""

import asyncio
import os
import sys
import threading
from collections import deque
from collections.abc import Callable
from time import monotonic
from typing import Final
from weakref import WeakSet

from percore._common.endings import Endings
from percore._common.fault_points import POINTS, point
from percore._common.steps import step
from percore._protocol.messages import Body, BrokenFrame, Message
from percore._transport.codec import decode, encode
from percore._transport.doorbell import Bell, Haste
from percore._transport.frames import HEAVY, checked, next_frame
from percore._transport.leases import Leases
from percore._transport.ring import HEADER_SIZE, OWED, RingReader, RingWriter
from percore._transport.slots import INLINE_LIMIT, SlotReader, SlotWriter

_LAZY = 0.002
"""How long a message nobody awaits may be held to share a wake-up, in seconds. To the peer, waking costs more than reading."""


def _ignore(_error: BaseException) -> None:
    return


def _unheard(count: int) -> None:
    raise BrokenFrame(f"{count} log records, and nobody is there to read any")


@step
class Channel:
    """One side of a channel.

    `send_from_thread`, `keep`, `flush`, and `send_payload` with one of the first two as its `send`, may be called from any thread.
    All other methods may be called on the loop only.
    """

    # A side adds some, and of an instance with more than thirty attributes CPython looks up each of them in a dictionary.
    __slots__ = (
        "__dict__", "__weakref__", "_bell", "_bell_waits", "_ends_turn", "_frame", "_heavy", "_is_lazy", "_is_ring_due", "_lag",
        "_lock", "_prompt", "_queue", "_rung_at", "_told", "full_count", "haste", "incoming", "is_open", "leases", "loop",
        "on_batch", "on_broken", "on_frame", "on_logged", "outgoing", "rx", "tx", "waits_since"
    )  # fmt: skip

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
        """`leases` is how many slots of the other side may stay in use after they were read."""
        self.loop = loop
        self.tx, self.rx = rings
        self.outgoing, self.incoming = slots
        assert not leases or leases < self.incoming.count, "views that somebody keeps could hold all slots"
        self.leases = Leases(self.incoming, Endings(loop), leases)
        self.on_frame: Callable[[list[Message]], None]
        self.on_broken: Callable[[BaseException], None] = _ignore
        self.on_batch: Callable[[], None] | None = None
        self.on_logged: Callable[[int], None] = _unheard
        """Called with the number of log records the peer has written, before the messages that it sent after them."""
        self.haste = Haste(sys.maxsize)
        """Unlimited. A supervisor replaces it with one that the channels of all its workers share."""
        self.full_count = 0
        self._bell = bell
        self._prompt = prompt
        self._queue: deque[Message] = deque()
        self._heavy = 0
        """Bytes of the bodies in the queue, or a few less: threads count without the lock."""
        self._frame: bytes | None = None
        self._lock = threading.Lock()
        self._told = 0
        self._rung_at = self._lag = 0.0
        self.waits_since = 0.0
        """While the peer has unread messages, the time since which it has read nothing; 0 if the ring holds none."""
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
        """Begin to receive.

        The channel calls `on_frame` with messages that have arrived, until a call stops the channel; `on_broken` with the exception
        if the channel breaks; and `on_batch` after everything published was delivered, or when a full bell takes writes again.
        """
        self.on_frame = on_frame
        self.on_broken = on_broken
        self.on_batch = on_batch
        self.is_open = True
        _opened.add(self)
        self.loop.add_reader(self._bell.fileno(), self._on_bell)

    @property
    def sent(self) -> int:
        """How many bytes were written into the ring."""
        return self.tx.written

    @property
    def received(self) -> int:
        """How many bytes were read from the peer's ring."""
        return self.rx.read

    # Sending

    def send(self, op: int, call_id: int, body: Body) -> None:  # noqa: PLR0912  # a function more costs a message a microsecond
        """Send a message. It is in the ring when this iteration of the loop ends, or earlier, unless the ring is full."""
        if self._ends_turn:  # the flush at the end of the iteration sends it together with others
            self._queue.append((op, call_id, body))
            if type(body) is bytes:
                self._heavy += len(body)
            return
        tx, haste = self.tx, self.haste
        try:
            is_idle = (
                tx.written == tx.acknowledged
                and not self._frame
                and haste.rung < haste.limit
                and not POINTS
                and self.is_open
                and self._lock.acquire(False)
            )
        except BaseException as error:  # Ctrl-C, perhaps when the lock was taken and nobody knew it yet
            self._break(error)
            return
        if not is_idle:
            self._send_in_turn(op, call_id, body)
            return
        # The peer is idle, so holding the message back gains nothing. This is `flush` for one message, in as few calls as possible:
        # after a wait each call of a function costs a microsecond, because its code is no longer in the CPU's caches.
        try:
            if self._queue:  # messages that nobody awaits, which go with this one
                self._enqueue(op, call_id, body)
                haste.rung += 1
                self._publish()
            elif tx.size - tx.written + tx.acknowledged < len(data := encode([(op, call_id, body)])) + HEADER_SIZE:
                # Threads have filled the ring since the check.
                self._frame = checked(data, op)
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
        finally:
            self._lock.release()
        if self._queue or self._is_ring_due:  # a thread may have tried to flush meanwhile
            self.flush()

    def _send_in_turn(self, op: int, call_id: int, body: Body) -> None:
        self.send_later(op, call_id, body)
        if self.haste.rung < self.haste.limit or self.tx.written != self.tx.acknowledged:  # else the peer is not even awake
            self.flush()

    def _enqueue(self, op: int, call_id: int, body: Body) -> None:
        self._queue.append((op, call_id, body))
        if type(body) is bytes:
            self._heavy += len(body)

    def send_from_thread(self, op: int, call_id: int, body: Body) -> None:
        """Like `send`, from any thread.

        On return the message is in the ring, unless the ring is full or another thread is about to publish it.
        """
        self._enqueue(op, call_id, body)
        self.flush()

    def keep(self, op: int, call_id: int, body: Body) -> None:
        """Like `send_from_thread`, but leave the message queued until the next one is sent or `flush` is called.

        A worker's side flushes when it has delivered what has arrived.
        """
        self._enqueue(op, call_id, body)

    def send_later(self, op: int, call_id: int, body: Body) -> None:
        """Like `send`, but together with the other messages of this iteration of the loop."""
        self._enqueue(op, call_id, body)
        if not self._ends_turn:
            self.loop.call_soon(self._end_turn)
            self._ends_turn = True  # only now: if the line above raises, such as a Ctrl-C, the next message schedules the flush

    def send_lazily(self, op: int, call_id: int, body: Body) -> None:
        """Like `send`, but together with the next message that is sent, or alone after two milliseconds."""
        self._enqueue(op, call_id, body)
        if not self._is_lazy:
            self.loop.call_later(_LAZY, self._end_lazy)
            self._is_lazy = True  # only now, as in `send_later`

    def _end_lazy(self) -> None:
        self._is_lazy = False
        self.flush()

    def catch_up(self) -> None:
        """Do what the loop was to do soon, in case it has lost that."""
        self._ends_turn = self._is_lazy = False
        if self._bell_waits:
            self._watch_bell()
        self.flush()

    def send_payload(
        self,
        op: int,
        call_id: int,
        body: Body,
        send: Callable[[int, int, Body], None] | None = None,
        sent: Callable[[], None] | None = None,
    ) -> None:
        """Send a message whose body may be a pickle too large for a frame.

        Such a pickle is copied into a slot. If no slot is free, the message is sent once one is. `send` is the method that sends
        it; the default is `Channel.send`. `sent` is called after that.
        """
        if type(body) is bytes and len(body) > INLINE_LIMIT:
            payload = self.outgoing.store(body)
            if payload is None:
                self.outgoing.wait(lambda: self._retry_payload(op, call_id, body, sent))
                return
            body = payload
            if POINTS:
                point(f"{self._side}.slot.filled")
        (send or self.send)(op, call_id, body)
        if sent is not None:
            sent()

    def _retry_payload(self, op: int, call_id: int, body: Body, sent: Callable[[], None] | None) -> bool:
        if not self.is_open:
            return False
        # This runs in the thread that gave the slot back.
        self.send_payload(op, call_id, body, self.send_from_thread, sent)
        return True

    def _end_turn(self) -> None:
        self._ends_turn = False
        self.flush()

    def flush(self) -> None:
        """Move the queued messages into the ring, as far as they fit, and ring the bell."""
        try:
            while self.is_open and (self._is_ring_due or self._has_work()) and self._lock.acquire(False):
                consumed = 0
                try:
                    if self._has_work():
                        self._publish()
                    else:
                        consumed = self._take_owed()
                finally:
                    self._lock.release()
                # Without the lock. Otherwise: 1. this thread rings, and waits for the GIL afterwards  2. another thread queues the
                # result of a call, and does not get the lock  3. the process dies, and the result with it.
                if consumed:
                    self._ring(0, consumed)
        except BaseException as error:
            self._break(error)

    def is_flushed(self) -> bool:
        """Whether everything sent has been published. Call it on the loop, while no thread sends."""
        return not (self._queue or self._frame is not None or self._bell_waits or self.outgoing.is_awaited())

    def has_read(self) -> bool:
        """Whether the peer has read everything sent. If not, and if the peer is prompt, `on_batch` is called when it has."""
        return self.tx.written == self.tx.acknowledged and not self._queue and self._frame is None

    def lag(self) -> float:
        """Seconds the peer took to report that it had read the last frame, or, if it has not yet, at least the time since then."""
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
            frame = self._frame
            if frame is None:
                frame, taken = next_frame(self._queue, is_heavy=self._heavy >= HEAVY)
                self._heavy = max(0, self._heavy - taken) if self._queue else 0
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
        self._ring(published, self._take_owed())
        if POINTS:
            point(f"{self._side}.bell.rung")

    @property
    def _side(self) -> str:
        return "worker" if self._prompt else "supervisor"

    def _ring(self, published: int, consumed: int) -> None:
        if not self._bell.ring(published, consumed):
            self._wait_for_bell()

    def _take_owed(self) -> int:
        """Return how many bytes were read since the peer was last told, and count them as told."""
        self._is_ring_due = False
        consumed = self.rx.read - self._told
        self._told += consumed
        return consumed

    def _wait_for_bell(self) -> None:
        if not self._bell_waits:
            self._bell_waits = True
            self.loop.call_soon_threadsafe(self._watch_bell)

    def _watch_bell(self) -> None:
        if self.is_open:
            self.loop.add_writer(self._bell.out_fileno(), self._bell_takes_writes)

    def _bell_takes_writes(self) -> None:
        self.loop.remove_writer(self._bell.out_fileno())
        self._bell_waits = False
        self._ring(0, 0)
        if self.is_open and self.on_batch is not None:
            self.on_batch()

    # Receiving

    def _on_bell(self) -> None:
        self.receive()
        # Without a frame that waits, a supervisor's queue has lazy messages, and others that the end of this iteration sends.
        if self._frame is not None or (self._queue and (self._prompt or not self._is_lazy)):
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

    def receive(self) -> None:  # noqa: C901, PLR0912  # each further function would cost every message a microsecond
        """Read the bell once and deliver everything published. Also used for the last messages of a peer that has died."""
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
                    self.waits_since = 0.0
            if published < 0 or consumed < 0 or logged < 0 or rx.end - rx.read > rx.size or tx.acknowledged > tx.written:
                raise BrokenFrame(f"the peer published {published} and consumed {consumed} bytes")
            if logged:
                self.on_logged(logged)
                if not self.is_open:
                    return
            self._deliver()
            if not self.is_open:  # one of the messages, or sending a reply to it, has stopped the channel
                return
            if self.on_batch is not None:
                self.on_batch()
        except BaseException as error:
            self._break(error)

    def _deliver(self) -> None:
        """Hand over what has arrived, frame by frame: what a thread tells the peer as read has then been handed over."""
        rx = self.rx
        while self.is_open and rx.read != rx.end:
            self.on_frame(decode(rx.next()))

    def _break(self, error: BaseException) -> None:
        """End the channel because of `error`, and raise it if it is a KeyboardInterrupt or the like."""
        if self.is_open:
            self.stop()
            self.on_broken(error)
        if not isinstance(error, Exception):
            raise error

    def stop(self) -> None:
        """Receive nothing more. Idempotent."""
        if self.is_open:
            self.is_open = False
            if not self.loop.is_closed():
                self.loop.remove_reader(self._bell.fileno())
                if self._bell_waits:
                    self.loop.remove_writer(self._bell.out_fileno())

    def close(self) -> None:
        """Stop, close the bell and release the rings. Idempotent."""
        self.stop()
        self._bell.close()
        self.tx.release()
        self.rx.release()
        self._queue.clear()

    def disown(self) -> None:
        """Close this copy in a forked child. The parent goes on using the channel, so touch neither the bell nor the memory."""
        self.is_open = False
        # The loops of parent and child share one epoll. At its end the child's loop removes the descriptors that the child still
        # has open from it, for the parent as well. So close them here.
        self._bell.close()
        self.outgoing.disown()


_opened: Final[WeakSet[Channel]] = WeakSet()


def _disown_all() -> None:
    for channel in list(_opened):
        channel.disown()


os.register_at_fork(after_in_child=_disown_all)
