"""A channel between two threads of this process: each side has an inbox, in which the other side puts messages.

    send      append the message; if the other side is not rung, note that it is, and ring it: its loop calls `_woken`
    receive   note that this side is not rung; then take messages until there are none

No message is left unseen. Appending and taking are atomic: a deque does each of them under its own lock, also without a GIL. So
either the message was appended before the receiver found the inbox empty, and then the receiver has taken it; or it was appended
after that, and then the sender finds the note that the receiver had made before, and rings. Two threads that send at once may both
ring: the second ring finds an empty inbox. Nothing else is shared: every other attribute has one writer, and its readers may see it
late.

Messages are taken one by one, each just before it is handled. So once a worker is given up, a message is either still here, and its
call has not begun, or the worker has taken it, and its call counts as begun.
"""

import asyncio
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from contextvars import Context, copy_context
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from percore._common.system import has_gil
from percore._engines.threads.references import Arrived, References, Whole
from percore._protocol.messages import Body, Message, Payload

if TYPE_CHECKING:
    from percore._protocol.interfaces import Ticket

Send = Callable[[int, int, Body], None]

_MOST: Final = 256
"""Messages at most that are taken at a time, before the loop turns to others."""


def _ignore(_error: BaseException) -> None:
    return


class _Side:
    """One side. Only its loop's thread calls the methods, unless their docstring says otherwise."""

    is_open = False
    on_frame: Callable[[Iterable[Message]], None]
    on_broken: Callable[[BaseException], None] = staticmethod(_ignore)
    on_batch: Callable[[], None] | None = None
    own: Final[dict[int, Callable[[int, Any], None]]] = {}

    def __init__(self, store: References) -> None:
        self.loop: asyncio.AbstractEventLoop
        self.inbox: deque[Message] = deque()
        self.rung = True
        """Whether `_woken` is about to be called. Until this side is open, nobody has to ring."""
        self.rung_at = monotonic()
        """When it was last rung."""
        self.read_at = 0.0
        """When it last began to take messages."""
        self.waited = 0.0
        """For how many seconds the last ring has waited."""
        self.is_reading = False
        """Whether it handles messages that it has taken."""
        self.taken = 0
        """How many messages it has taken."""
        self.store = store
        self.load: Callable[[Payload], Arrived] = store.received
        self.read: Callable[[Payload], bytes] = store.read
        self._context = Context()

    def open(
        self,
        on_frame: Callable[[Iterable[Message]], None],
        on_broken: Callable[[BaseException], None],
        on_batch: Callable[[], None] | None = None,
    ) -> None:
        """Begin to receive, in the present context. As `Channel.open`."""
        self.on_frame, self.on_broken, self.on_batch = on_frame, on_broken, on_batch
        self.is_open = True
        self._context = copy_context()
        self.loop.call_soon(self._woken, context=self._context)

    def ring(self) -> None:
        """Have the loop of this side take its messages. From any thread."""
        try:
            self.rung = True  # first: the loop's thread may take them at once
            self.rung_at = monotonic()
            with suppress(RuntimeError):  # the loop is closed: nobody will take them
                self.loop.call_soon_threadsafe(self._woken, context=self._context)
        except BaseException:  # such as a Ctrl-C: the next message rings
            self.rung = False
            raise

    def _woken(self) -> None:
        self.rung = False
        if not self.is_open:
            return
        self.is_reading = True
        self.read_at = now = monotonic()
        self.waited = now - self.rung_at
        try:
            if self.inbox:  # else the peer has only told that it has read
                self.on_frame(self._messages())
            self._all_read()
        except BaseException as error:
            self._break(error)
        finally:
            self.is_reading = False
        if self.inbox and not self.rung:
            self.loop.call_soon(self._woken, context=self._context)
            self.rung = True

    def _all_read(self) -> None:
        if self.is_open and self.on_batch is not None:
            self.on_batch()

    def _messages(self) -> Iterator[Message]:
        """Take what is here now. What comes meanwhile rings, and is taken once the loop has turned to others."""
        taken = 0
        popleft = self.inbox.popleft
        most = min(_MOST, len(self.inbox))
        try:
            while taken < most:
                yield popleft()
                taken += 1
        except IndexError:  # of popleft: the supervisor has taken the rest back
            return
        finally:
            self.taken += taken

    def _break(self, error: BaseException) -> None:
        """End the channel because of `error`, and raise it if it is a KeyboardInterrupt or the like."""
        if self.is_open:
            self.is_open = False
            self.on_broken(error)
        if not isinstance(error, Exception):
            raise error


def _sender(own: _Side, peer: _Side) -> Send:
    """Return the function that sends a message to the peer. It is one function, since every call passes it twice."""
    append = peer.inbox.append

    def send(op: int, call_id: int, body: Body) -> None:
        if own.is_open:  # else this side has ended, or was given up
            append((op, call_id, body))
            if not peer.rung:
                peer.ring()

    return send


class ThreadChannel(_Side):
    """The supervisor's side. Implements `Channel`."""

    def __init__(self, loop: asyncio.AbstractEventLoop, store: References) -> None:
        super().__init__(store)
        self.loop = loop
        self.is_open = True  # for sending: the supervisor opens it soon
        self.peer = WorkerSide(store, self)
        self.send = _sender(self, self.peer) if has_gil() else self._turn_sender()
        self._has_rung = False
        """Whether it has rung the worker in this iteration of its loop."""

    def _turn_sender(self) -> Send:
        """As `_sender`, for workers that run at once with this thread: they would be rung for nearly each message.

        The first message of an iteration of the loop rings at once, and those after it together, when the iteration ends.
        """
        peer, append = self.peer, self.peer.inbox.append

        def send(op: int, call_id: int, body: Body) -> None:
            if self.is_open:
                append((op, call_id, body))
                if not self._has_rung and not peer.rung:
                    peer.ring()
                    self.loop.call_soon(self._end_turn)
                    self._has_rung = True

        return send

    def _end_turn(self) -> None:
        self._has_rung = False
        peer = self.peer
        if peer.inbox and not peer.rung:
            peer.ring()

    @property
    def sent(self) -> int:
        return self.peer.taken + len(self.peer.inbox)

    @property
    def received(self) -> int:
        return self.taken

    @property
    def waits_since(self) -> float:
        return 0.0 if self.has_read() else max(self.peer.rung_at, self.peer.read_at)

    def send_parcel(self, op: int, call_id: int, parcel: int, ticket: "Ticket") -> None:
        if ticket.stored(parcel):
            self.send(op, call_id, parcel)

    def release(self, payload: Payload) -> None:
        """Do nothing: nobody but the receiver has it."""

    def receive(self) -> None:
        while self.inbox and self.is_open:
            self._woken()

    def catch_up(self) -> None:
        self._end_turn()
        if self.inbox:
            self.loop.call_soon(self._woken, context=self._context)

    def has_read(self) -> bool:
        peer = self.peer
        return not peer.inbox and not peer.is_reading  # in this order: a message that was taken is being handled

    def lag(self) -> float:
        peer = self.peer
        return peer.waited if self.has_read() else max(peer.waited, monotonic() - peer.rung_at)

    def close(self) -> None:
        """Receive nothing more. Idempotent."""
        self.is_open = False
        self.inbox.clear()


class WorkerSide(_Side):
    """The worker's side. Implements `WorkerChannel`. Its loop is set before it is opened."""

    def __init__(self, store: References, peer: ThreadChannel) -> None:
        super().__init__(store)
        self.peer = peer
        self._is_stopped = False
        self.send = self.send_later = self.send_from_thread = _sender(self, peer)
        self.passes = store.passes_value
        self.pickler = store.pickler
        self.pickled = store.pickled
        self.unpack_items = store.unpack_items
        self.pack_values = store.pack_values

    def load_shared(self, parcel: int, ended: Callable[[], None]) -> Whole:
        return self.store.load_shared(self.loop, parcel, ended)

    def keep(self, op: int, call_id: int, body: Body) -> None:
        if self.is_open:
            self.peer.inbox.append((op, call_id, body))

    def flush(self) -> None:
        """Ring the supervisor, unless it is rung."""
        peer = self.peer
        if not peer.rung:
            peer.ring()

    def is_flushed(self) -> bool:
        return True

    def send_payload(
        self, op: int, call_id: int, body: Body, send: Send | None = None, sent: Callable[[], None] | None = None
    ) -> None:
        (send or self.send)(op, call_id, body)
        if sent is not None:
            sent()

    def send_exception(
        self, op: int, call_id: int, error: BaseException, send: Send | None = None, *, as_itself: bool = False
    ) -> None:
        (send or self.send)(op, call_id, self.store.exception(error, as_itself=as_itself))

    def _woken(self) -> None:
        taken = self.taken
        super()._woken()
        if self.taken != taken:
            self.flush()  # the supervisor may wait until these messages are read

    def open(
        self,
        on_frame: Callable[[Iterable[Message]], None],
        on_broken: Callable[[BaseException], None],
        on_batch: Callable[[], None] | None = None,
    ) -> None:
        """As `WorkerChannel.open`; does nothing once it is stopped."""
        super().open(on_frame, on_broken, on_batch)
        if self._is_stopped:
            self.is_open = False

    def stop(self) -> None:
        """Receive nothing more, and send nothing more. Any thread may call this, also before it is opened."""
        self._is_stopped = True
        self.is_open = False
