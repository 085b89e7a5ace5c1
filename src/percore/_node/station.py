"""A worker of a host, as the program elsewhere sees it: its messages, its exit, and how far its calls have come."""

from collections.abc import Callable
from math import inf
from typing import TYPE_CHECKING, Final, Protocol, cast

from percore._common.errors import shown
from percore._protocol.interfaces import Exit
from percore._protocol.messages import BATCH, BEGIN_BY, ONCE_OPS, PICKLED, READY, TERMS, Body, Message
from percore._transport.codec import encode
from percore._transport.wire import READ_COUNT, Kind, pack

if TYPE_CHECKING:
    from percore._engines.processes.engine import ProcessWorker
    from percore._transport.connection import Connection

KEPT: Final = 10
"""Beats after which the clocks are compared anew. There are ten in `lost_after` seconds."""

STEP: Final = 0.25
"""Seconds by which a beat is later than the best one before from which on the program's clock counts as one that stood still."""

_FATES = 1000
_BEGIN_BY = 4
"""The place of `begin_by` in the terms of a call."""


class Home(Protocol):
    """The host, as its workers' stations see it.

    Attributes:
        connection: that to the program.
        places: how many start marks each worker has.
        clock_ahead: what this machine's monotonic clock shows beyond the program's.
    """

    connection: "Connection"
    places: int
    clock_ahead: "ClockAhead"


class ClockAhead:
    """What this machine's monotonic clock shows beyond the program's, as the latest beats tell.

    A beat tells when it was sent. The one that took the least time is the best. Those of long ago count no more: two clocks run
    apart by seconds in a day.

    The clock of a suspended machine stands still. If that was the program's, each beat from then on is later than all before. If
    only one was late, the next one is better, and counts.
    """

    def __init__(self) -> None:
        self._before = self._least = inf
        self._beats = 0

    def heard(self, difference: float) -> None:
        """Take a beat: the time here when it came, less the time there when it was sent."""
        if difference > self.seconds + STEP:
            self._before, self._least, self._beats = inf, inf, 0
        elif self._beats == KEPT:
            self._before, self._least, self._beats = self._least, inf, 0
        self._beats += 1
        self._least = min(self._least, difference)

    @property
    def seconds(self) -> float:
        """The difference, at most. It is infinite before the first beat."""
        return min(self._before, self._least)


class Kept:
    """The ticket for a parcel that stays in this node's store until the program discards it."""

    def is_wanted(self) -> bool:
        return True

    def stored(self, parcel: int) -> bool:
        return True


class Station:
    """One worker of a host."""

    def __init__(self, host: Home, number: int, worker: "ProcessWorker") -> None:
        self.worker = worker
        self._host = host
        self._send, self._put, self._write = host.connection.send, host.connection.put, host.connection.write
        self._number = number
        self._channel = worker.channel
        self._calls: dict[int, int] = {}
        """The last call of each place."""
        self._sent = self._told = 0
        self._answers: list[Message] = []
        """What the program has not been told yet."""
        self._waited_since = 0.0
        self._channel.open(self._up, self._broke, self._look)

    # From the program

    def down(self, messages: list[Message]) -> None:
        """Pass messages on to the worker."""
        send = self._channel.send
        for op, call_id, body in messages:
            self._note(op, call_id)
            send(op, call_id, self._timed(op, body) if op in (BEGIN_BY, TERMS) else body)

    def down_parcel(self, op: int, call_id: int, parcel: int) -> None:
        """Pass on a message with a parcel of this node."""
        self._note(op, call_id)
        self._channel.send_parcel(op, call_id, parcel, Kept())

    def _note(self, op: int, call_id: int) -> None:
        self._sent += 1
        if op > 0 or op in ONCE_OPS or op == BATCH:
            self._calls[call_id % self._host.places] = call_id

    def _timed(self, op: int, body: Body) -> Body:
        """Translate a time of the program's clock into one of this machine's."""
        ahead = self._host.clock_ahead.seconds
        if op == BEGIN_BY:
            return None if body is None else cast("float", body) + ahead
        terms = list(cast("tuple[object, ...]", body))
        if len(terms) > _BEGIN_BY and terms[_BEGIN_BY] is not None:
            terms[_BEGIN_BY] = cast("float", terms[_BEGIN_BY]) + ahead
        return tuple(terms)

    def examine(self) -> None:
        self.worker.examine(lambda condition: self._send(Kind.CONDITION, self._number, pack(tuple(condition))))

    # To the program

    def _up(self, messages: list[Message]) -> None:
        """Pass messages on. `_look`, which the channel calls next, sends the last of them."""
        self._flush()
        answers = self._answers
        own = self._channel.own
        for message in messages:
            op, call_id, body = message
            if op in own:
                own[op](call_id, body)
                continue
            if op == READY:
                self.worker.ready(body)
            if type(body) is int and op in PICKLED:
                self._flush()
                self._pass_on(op, call_id, body)
            else:
                answers.append(message)

    def _flush(self) -> None:
        if self._answers:
            self._put(Kind.MESSAGES, self._number, encode(self._answers))
            self._answers.clear()

    def _pass_on(self, op: int, call_id: int, payload: int) -> None:
        """Send a large result. Its slot is free again when the socket has taken it: until then the worker may have to wait."""
        data = self._channel.read(payload)  # it may raise: then nothing was announced
        self._put(Kind.PAYLOAD_OF, self._number, pack((op, call_id)))
        self._put(Kind.PAYLOAD, self._number, data, let_go=lambda: self._channel.release(payload))

    def _look(self) -> None:
        """Send what waits, and tell the program if the worker has read on."""
        if not self._has_read_on():
            self._flush()
        elif self._answers:
            self._put(Kind.ANSWERS, self._number, READ_COUNT.pack(self._told), encode(self._answers))
            self._answers.clear()
        else:
            self._put(Kind.READ, self._number, pack((self._told,)))
        self._write()

    def _has_read_on(self) -> bool:
        """Count the messages that the worker has read. Return whether the program does not know it yet."""
        if self._channel.has_read():
            if self._told == self._sent:
                return False
            self._told = self._sent
        elif self._waited_since == self._channel.waits_since:
            return False
        self._waited_since = self._channel.waits_since
        return True

    def _broke(self, error: BaseException) -> None:
        self._flush()
        self._send(Kind.BROKEN, self._number, pack((shown(error)[:1000],)))

    def exited(self, end: Exit) -> None:
        """Pass on the last messages, then how far each call had come, then the exit."""
        try:
            self._channel.receive()
        finally:
            self._flush()
            fates = [(call_id, *self.worker.fate(call_id)) for call_id in self._calls.values()]
            for start in range(0, len(fates), _FATES):
                self._send(Kind.FATES, self._number, pack((fates[start : start + _FATES],)))
            self._send(Kind.EXIT, self._number, pack((end.code, end.why, end.place_lost, end.peak, self.worker.pid)))
            self.worker.close()


Step = Callable[[Station], None]
