"""A worker's station in its host: what it passes on to the program."""

import random
from collections.abc import Callable
from typing import Any

import pytest

from percore._node.station import KEPT, ClockAhead, Station
from percore._protocol.messages import RESULT, VALUE, BrokenFrame
from percore._transport.codec import decode
from percore._transport.wire import READ_COUNT, Kind, unpack
from tests.counts import times

SLOT = 77


class Connection:
    def __init__(self) -> None:
        self.said: list[tuple[int, Any]] = []
        self.kept: list[Callable[[], None]] = []

    def put(self, kind: int, number: int, *data: Any, let_go: Callable[[], None] | None = None) -> None:
        assert number == 5
        self.said.append((kind, data[0] if len(data) == 1 else b"".join(data)))
        self.kept += [let_go] if let_go else []

    send = put

    def write(self) -> None:
        self.said.append((0, None))


class Worker:
    """A worker and its channel, with one result in a slot."""

    own: Any = {}  # noqa: RUF012
    waits_since = 0.0

    def __init__(self) -> None:
        self.channel = self
        self.reads = True
        self.released: list[int] = []

        self.station: Any = None

    def open(self, on_frame: Any, on_broken: Any, on_batch: Any) -> None:
        self.on_frame, self.on_broken, self.on_batch = on_frame, on_broken, on_batch

    def read(self, payload: int) -> memoryview:
        if payload != SLOT:
            raise BrokenFrame("it lies outside of the slots")
        return memoryview(b"a result")

    def release(self, payload: int) -> None:
        self.released.append(payload)

    def has_read(self) -> bool:
        return self.reads

    def send(self, *_message: object) -> None: ...


@pytest.fixture
def made() -> tuple[Any, Any]:
    connection, worker = Connection(), Worker()
    home: Any = type("Home", (), {"connection": connection, "places": 10, "clock_ahead": ClockAhead()})
    worker.station = Station(home, 5, worker)  # type: ignore[arg-type]
    return connection, worker


def test_a_result_is_sent_from_its_slot_in_order_and_the_slot_is_free_when_it_was_sent(made: tuple[Any, Any]) -> None:
    connection, worker = made
    worker.on_frame([(VALUE, 1, 1), (RESULT, 2, SLOT), (VALUE, 3, 3)])
    worker.on_batch()
    kinds = [kind for kind, _ in connection.said]
    assert kinds == [Kind.MESSAGES, Kind.PAYLOAD_OF, Kind.PAYLOAD, Kind.MESSAGES, 0]
    assert (decode(connection.said[0][1]), decode(connection.said[3][1])) == ([(VALUE, 1, 1)], [(VALUE, 3, 3)])
    assert (unpack(connection.said[1][1], int, int), bytes(connection.said[2][1])) == ([RESULT, 2], b"a result")
    assert worker.released == []
    connection.kept.pop()()
    assert worker.released == [SLOT]


def test_answers_tell_with_them_what_the_worker_has_read(made: tuple[Any, Any]) -> None:
    connection, worker = made

    def said() -> list[tuple[int, Any]]:
        found: list[tuple[int, Any]] = connection.said[:]
        connection.said.clear()
        return found

    worker.station.down([(1, 8, (0,)), (1, 9, (0,))])
    worker.reads = False
    worker.on_frame([(VALUE, 8, 1)])
    worker.on_batch()
    ((messages, data), _) = said()
    assert (messages, decode(data)) == (Kind.MESSAGES, [(VALUE, 8, 1)])
    worker.reads = True
    worker.on_frame([(VALUE, 9, 2)])
    worker.on_frame([(VALUE, 7, 3)])
    worker.on_batch()
    (messages, data), (answers, more), _ = said()
    assert (messages, decode(data)) == (Kind.MESSAGES, [(VALUE, 9, 2)])  # the frames of a ring stay apart
    assert (answers, READ_COUNT.unpack_from(more), decode(more[READ_COUNT.size :])) == (Kind.ANSWERS, (2,), [(VALUE, 7, 3)])
    worker.station.down([(1, 8, (0,))])
    worker.on_batch()  # it has read, and says nothing
    ((read, data), _) = said()
    assert (read, unpack(data, int)) == (Kind.READ, [3])
    worker.on_frame([(VALUE, 8, 1)])
    worker.on_broken(BrokenFrame("it is broken"))  # before `on_batch`: what came before is not lost
    assert [kind for kind, _ in said()] == [Kind.MESSAGES, Kind.BROKEN]


def test_a_result_that_is_not_there_is_not_announced(made: tuple[Any, Any]) -> None:
    """Its worker is broken. The next result of another one comes over the same connection."""
    connection, worker = made
    with pytest.raises(BrokenFrame, match="outside"):
        worker.on_frame([(RESULT, 2, SLOT + 1)])
    assert connection.said == []


@pytest.mark.long
def test_a_host_knows_how_far_its_clock_is_ahead_for_months() -> None:
    """Its clock gains 50 microseconds in each second. A beat takes a while, and now and then seconds, until the next one comes."""
    chance, ahead, known = random.Random(1), 1000.0, ClockAhead()
    for beat in range(times(20_000, 3_000_000)):
        ahead += 50e-6
        late = chance.choice((0.0002, 0.001, 0.01, 3.0 if beat % 7 else 0.0002))
        known.heard(ahead + late)
        assert beat < KEPT or -0.01 < known.seconds - ahead < max(0.01, late + 1e-6)


def test_a_host_knows_of_a_suspended_machine_with_the_next_beat() -> None:
    known = ClockAhead()
    for ahead in (5.0, -60.0, 5.0):  # the host's machine is suspended, then the program's
        for _ in range(2 * KEPT):
            known.heard(ahead)
            assert known.seconds == ahead
