"""A worker as the supervisor keeps it: how long it has been silent, what it knows, and how many calls it may begin."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from percore._calls.functions import Function
from percore._calls.shared_objects import Share, Shares
from percore._protocol.interfaces import UNBEGUN, Fate, Ticket
from percore._protocol.messages import DEFINE_TASK, DEFINE_THREAD, FORGET, SHARE, Body, Kind, Message
from percore._scheduler.dispatch import Dispatch
from percore._scheduler.places import ROOM_OF_NONE
from percore._supervisor.limited_worker import LimitedWorker
from percore._supervisor.pool_worker import PoolWorker
from percore._supervisor.timing import Turn

NOW = 100.0


class FrozenTurn(Turn):
    def __init__(self) -> None:
        super().__init__(cast(asyncio.AbstractEventLoop, SimpleNamespace(time=lambda: NOW)))

    def time(self) -> float:
        return NOW


def member_that_waits(*, since: float) -> PoolWorker:
    """A member whose worker has read nothing since then; 0: it has read everything."""
    dispatch: Dispatch[Any, PoolWorker] = Dispatch(10, 4)
    member = PoolWorker(0, 1, dispatch, FrozenTurn())
    channel = SimpleNamespace(send=None, waits_since=since)
    member.attach(cast(Any, SimpleNamespace(channel=channel)), cast(Any, SimpleNamespace(held={})))
    return member


@pytest.mark.parametrize(("seconds", "steps"), [(0.0, 0), (0.002, 0), (0.006, 1), (0.011, 2), (0.021, 3), (0.081, 5)])
def test_a_step_of_silence_is_twice_as_long_as_the_one_before(seconds: float, steps: int) -> None:
    assert member_that_waits(since=NOW - seconds).silence() == steps


def test_a_worker_that_has_read_everything_is_not_silent() -> None:
    assert member_that_waits(since=0).silence() == 0


def test_a_worker_that_was_sent_something_late_in_a_long_iteration_is_not_silent() -> None:
    # The time of a turn is that of its beginning; the channel noted the real time at which it wrote, here 200 ms later.
    assert member_that_waits(since=NOW + 0.2).silence() == 0


# Functions and shared objects


class Wire:
    """A channel that cannot send one of its messages."""

    def __init__(self, fails_on: int | None = None) -> None:
        self.sent: list[Message] = []
        self._fails_on = fails_on

    def send(self, op: int, number: int, body: Body) -> None:
        if op == self._fails_on:
            self._fails_on = None
            raise MemoryError
        self.sent.append((op, number, body))

    def send_parcel(self, op: int, number: int, parcel: int, ticket: Ticket) -> None:
        assert ticket.is_wanted()
        assert ticket.stored(parcel)
        self.send(op, number, parcel)


class Caller:
    """A call of a function, with this argument."""

    call_id = 0
    member: Any = None
    key = plan = None
    size = outstanding = 1

    def __init__(self, function: Function) -> None:
        self.function = function
        self.kind = function.kind
        self.body = (1,)

    def left(self) -> None: ...


def member_on(wire: Wire, shares: Any = None) -> PoolWorker:
    dispatch: Dispatch[Any, PoolWorker] = Dispatch(10, 4)
    member = PoolWorker(0, 1, dispatch, FrozenTurn())
    member.attach(cast(Any, SimpleNamespace(channel=wire)), shares or cast(Any, SimpleNamespace(held={})))
    return member


def function_of(kind: int, payload: bytes | int) -> Function:
    function = Function(len, kind)
    function.number, function.payload = 7, payload
    return function


@pytest.mark.parametrize(("kind", "op"), [(Kind.TASK, DEFINE_TASK), (Kind.THREAD, DEFINE_THREAD)])
@pytest.mark.parametrize("payload", [b"pickle.", 5])
def test_a_function_is_told_once_before_its_first_call(kind: int, op: int, payload: bytes | int) -> None:
    """A parcel goes through `send_parcel`: a channel that keeps payloads elsewhere finds every one of them there."""
    wire = Wire()
    member = member_on(wire)
    calls = [cast(Any, Caller(function_of(kind, payload))) for _ in range(2)]
    for call in calls:
        member.send(call)
    assert wire.sent == [(op, 7, payload), *((7, call.call_id, (1,)) for call in calls)]


@pytest.mark.parametrize("payload", [b"pickle.", 5])
def test_a_function_that_could_not_be_told_is_told_with_the_next_call(payload: bytes | int) -> None:
    wire = Wire(fails_on=DEFINE_TASK)
    member = member_on(wire)
    call = cast(Any, Caller(function_of(Kind.TASK, payload)))
    with pytest.raises(MemoryError):
        member.send(call)
    member.give_up(call)
    assert not member.calls
    member.send(call)
    assert wire.sent == [(DEFINE_TASK, 7, payload), (7, call.call_id, (1,))]


def test_a_shared_object_that_could_not_be_told_is_neither_forgotten_there_nor_lost() -> None:
    """The worker does not know its number: FORGET would end it."""
    loop = asyncio.new_event_loop()
    try:
        store: Any = SimpleNamespace(most_shared=1, most_kept=1, load=None, discard=None)
        wire, shares = Wire(fails_on=SHARE), Shares(loop, store)
        member = member_on(wire, shares)
        function = function_of(Kind.TASK, b"pickle.")
        share = Share(shares, 9)
        _, met = shares.met_in(Share.travel, share)
        shares.hold(function, met)
        call = cast(Any, Caller(function))
        with pytest.raises(MemoryError):
            member.send(call)
        assert not share.members
        member.send(call)
        member.send(call)
        assert wire.sent[:2] == [(SHARE, share.number, 9), (DEFINE_TASK, 7, b"pickle.")]
        shares.drop(function)
        assert wire.sent[-1] == (FORGET, share.number, None)
    finally:
        loop.close()


# The limit of calls


@pytest.mark.parametrize("fails_on", [7, "low"])
def test_a_call_that_could_not_be_sent_does_not_count_for_the_limit(fails_on: int | str) -> None:
    faults = [MemoryError()] if fails_on == "low" else []

    def low(_member: LimitedWorker) -> None:
        if faults:
            raise faults.pop()

    dispatch: Dispatch[Any, PoolWorker] = Dispatch(10, 4)
    member = LimitedWorker(0, 1, dispatch, FrozenTurn(), 1, low, lambda _call: pytest.fail("it was below the limit"))
    wire = Wire(fails_on=7 if fails_on == 7 else None)
    member.attach(cast(Any, SimpleNamespace(channel=wire)), cast(Any, SimpleNamespace(held={})))
    call = cast(Any, Caller(function_of(Kind.TASK, b"pickle.")))
    with pytest.raises(MemoryError):
        member.send(call)
    for sent in list(member.calls.values()):
        member.give_up(sent)
    assert (member.tickets, member.is_spent, member.load) == (1, False, [0, 0, 0])
    member.send(call)
    assert (member.tickets, member.is_spent) == (0, True)
    assert min(member.load[:2]) >= ROOM_OF_NONE


# Statistics


def test_calls_count_by_their_number_where_nobody_knows_how_far_they_have_come() -> None:
    """As if the worker had read everything."""
    wire = Wire()
    member = member_on(wire)
    member.worker = cast(Any, SimpleNamespace(channel=SimpleNamespace(has_read=lambda: False), fate=lambda _id: Fate(None)))
    for _ in range(3):
        member.send(cast(Any, Caller(function_of(Kind.THREAD, b"pickle."))))
    assert member.statistics(2, may_look=True) == (2, 1)
    member.worker = cast(Any, SimpleNamespace(channel=SimpleNamespace(has_read=lambda: False), fate=lambda _id: UNBEGUN))
    assert member.statistics(2, may_look=True) == (0, 3)


# Calls that give their places back


def test_a_call_is_aside_until_its_last_reason_has_gone() -> None:
    member = member_that_waits(since=0)
    member.tell = lambda *_: None
    call: Any = SimpleNamespace(
        function=SimpleNamespace(number=1), kind=Kind.TASK, body=(), plan=None, key=None, outstanding=1, left=lambda: None
    )
    member.defined.add(1)
    member.send(call)
    assert member.step_aside(call)
    assert member.step_aside(call)
    assert member.load == [0, 0, 0]
    member.come_back(call)
    assert member.load == [0, 0, 0]
    member.come_back(call)
    assert member.load == [1, 0, 0]
    assert member.step_aside(call)
    member.take(call.call_id)  # it ends while it is aside
    member.come_back(call)
    assert (member.load, member._aside) == ([0, 0, 0], [0, 0])
