"""The program's side of a channel to a worker on a node."""

from collections import deque
from collections.abc import Callable
from functools import partial
from itertools import count
from time import monotonic
from typing import TYPE_CHECKING, Any, Final

from percore._engines.nodes.store import NodesStore
from percore._protocol.interfaces import Ticket
from percore._protocol.messages import Body, BrokenFrame, Message, Payload, is_call
from percore._transport.buffers import has_buffers, places_in
from percore._transport.codec import decode
from percore._transport.frames import next_frame
from percore._transport.leases import Received
from percore._transport.wire import Kind, pack

if TYPE_CHECKING:
    from percore._engines.nodes.node import Node

_HEAVY: Final = 512


class NodeChannel:
    """Implements `Channel` over the connection that all workers of a node share.

    A large result arrives in memory of its own, under a number, and is released with it.

    Attributes:
        unsent: the calls that were still here when the connection broke. They have not begun.
    """

    own: Final[dict[int, Callable[[int, Any], None]]] = {}

    def __init__(self, number: int, link: "Node", store: NodesStore) -> None:
        self.sent = self.received = 0
        self.is_open = False
        self.waits_since = 0.0
        self.unsent: set[int] = set()
        self._number = number
        self._link = link
        self._store = store
        self._large: dict[int, bytearray | bytes] = {}
        """The large results that are not released yet."""
        self._numbers = count(1)
        self._queue: deque[Message] = deque()
        self._is_heavy = False
        self._acknowledged = 0
        self._sent_at = self._lag = 0.0

    def open(
        self, on_frame: Callable[[list[Message]], None], on_broken: Callable[[BaseException], None], on_batch: Callable[[], None]
    ) -> None:
        self.on_frame, self.on_broken, self.on_batch = on_frame, on_broken, on_batch
        self.is_open = True

    def send(self, op: int, call_id: int, body: Body) -> None:
        queue = self._queue
        if not queue:
            self._link.wants(self)
        queue.append((op, call_id, body))
        self.sent += 1
        if type(body) is bytes and len(body) > _HEAVY:
            self._is_heavy = True

    def send_parcel(self, op: int, call_id: int, parcel: int, ticket: Ticket) -> None:
        store = self._store
        if not store.is_placed(parcel) and self._link.is_full:  # one that is placed is sent now, in order
            store.wait_for_link(lambda: self._retry(op, call_id, parcel, ticket))
            return
        placed = store.place(parcel)
        if placed is None:
            store.wait(lambda: self._retry(op, call_id, parcel, ticket))
        elif ticket.stored(placed):
            store.carry(placed, self._link)
            self.flush()
            self.sent += 1
            unsent = (lambda: self.unsent.add(call_id)) if is_call(op) else None
            self._link.send(Kind.PARCEL, self._number, pack((op, call_id, placed)), unsent=unsent)
            self._mark()
        elif placed != parcel:  # else its owner has discarded it
            store.discard(placed)

    def _retry(self, op: int, call_id: int, parcel: int, ticket: Ticket) -> None:
        if self.is_open and ticket.is_wanted():
            self._guarded(lambda: self.send_parcel(op, call_id, parcel, ticket))  # if it fails, nobody would try again

    def flush(self) -> None:
        """Give what waits to the connection, in frames. The next `Connection.write` sends them."""
        queue = self._queue
        try:
            while queue:
                data, _ = next_frame(queue, is_heavy=self._is_heavy)
                self._link.put(Kind.MESSAGES, self._number, data, unsent=partial(self._unsend, data))
        except BaseException as error:  # such as Ctrl-C: messages may have left the queue that nobody sends any more
            self.broke(error)
            raise
        self._is_heavy = False
        self._mark()

    def _mark(self) -> None:
        self._sent_at = monotonic()
        self.waits_since = self.waits_since or self._sent_at

    def _unsend(self, data: bytes) -> None:
        """The messages of this frame were not sent, and never will be."""
        self.unsent.update(call_id for op, call_id, _ in decode(data) if is_call(op))

    def lost(self) -> None:
        """The connection broke."""
        self.flush()
        self.is_open = False

    def load(self, payload: Payload) -> Received:
        data = self.read(payload)
        if not has_buffers(data):
            return Received(data, len(data), (), is_leased=False)
        pickled, places = places_in(data)
        is_own = type(payload) is int and not data.readonly  # type: ignore[union-attr]  # then it lies in memory of its own
        if is_own:
            self.release(payload)
        view = memoryview(data)
        return Received(data, pickled, [view[start:end] for start, end in places], is_leased=is_own)

    def read(self, payload: Payload) -> memoryview | bytes:
        if type(payload) is bytes:
            return payload
        data = self._large.get(payload) if type(payload) is int else None
        if data is None:
            raise BrokenFrame(f"a payload that is not there: {type(payload).__name__}")
        return memoryview(data)

    def release(self, payload: Payload) -> None:
        """Drop a large result. The host has released it in its worker already."""
        if type(payload) is int:
            self._large.pop(payload, None)

    def receive(self) -> None:
        """Do nothing: what arrives is delivered at once."""

    def catch_up(self) -> None:
        self._link.catch_up()
        self._store.has_room()

    def has_read(self) -> bool:
        return self._acknowledged == self.sent

    def lag(self) -> float:
        return self._lag if self.has_read() else max(self._lag, monotonic() - self._sent_at)

    # What the link hears

    def acknowledged(self, number: int) -> None:
        """The worker has read on, and at least the first `number` messages.

        Raises:
            BrokenFrame: these are more than were sent, or fewer than before.
        """
        if not self._acknowledged <= number <= self.sent:
            raise BrokenFrame(f"a worker that has read {number} messages of {self.sent}")
        self._acknowledged = number
        now = monotonic()
        if self.has_read():
            self._lag = now - self._sent_at
        self.waits_since = 0.0 if self.has_read() else now

    def deliver(self, messages: list[Message]) -> None:
        """Deliver messages that have arrived together."""
        self.received += len(messages)
        self._guarded(lambda: self.on_frame(messages))

    def deliver_large(self, op: int, call_id: int, data: bytearray | bytes) -> None:
        """Deliver a message with a large result."""
        number = next(self._numbers)
        self._large[number] = data
        self.deliver([(op, call_id, number)])

    def batch(self) -> None:
        """All that arrived together was delivered."""
        self._guarded(self.on_batch)

    def broke(self, error: BaseException) -> None:
        """Receive nothing more, and report why."""
        if self.is_open:
            self.is_open = False
            self.on_broken(error)

    def close(self) -> None:
        """Receive nothing more, and drop what was not read. Idempotent."""
        self.is_open = False
        self._large.clear()

    def _guarded(self, step: Callable[[], None]) -> None:
        if self.is_open:
            try:
                step()
            except BaseException as error:
                self.broke(error)
                if not isinstance(error, Exception):
                    raise
