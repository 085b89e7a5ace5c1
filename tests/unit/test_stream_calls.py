"""A stream as a pending call: how it ends for its consumer, its worker and its runner, whichever of them is first."""

import asyncio
import pickle
from collections.abc import AsyncGenerator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from percore._calls import streams
from percore._calls.functions import Function
from percore._calls.policy import DEFAULT, CallPlan
from percore._calls.streams import StreamCall
from percore._common.errors import RemoteError, RunnerClosed
from percore._protocol.messages import (
    CANCEL,
    CANCELLED,
    CREDIT,
    ENDED,
    ERROR,
    ITEM,
    ITEMS,
    RESULT,
    VALUE,
    BrokenFrame,
    Kind,
    Message,
)
from percore._scheduler import streaming
from percore._scheduler.dispatch import Dispatch
from percore._scheduler.phase import RunnerPhase
from percore._serialization.exceptions import dump_exception
from percore._supervisor.call_registry import CallRegistry
from percore._supervisor.outcomes import Outcomes
from percore._supervisor.pool_worker import PoolWorker
from percore._supervisor.stream_items import StreamItems
from percore._supervisor.timing import Turn
from percore._transport.codec import pack_values, unpack_values
from percore._transport.leases import Received
from tests.waiting import until

_steps: list[Any] = []


class Nowhere(bytearray):
    """A file for a pickler."""

    def write(self, data: bytes) -> None:
        self += data

    def contains(self, needle: bytes) -> bool:
        return needle in bytes(self)

    def reset(self) -> None:
        self.clear()

    def payload(self) -> bytes:
        return bytes(self)


class Acting:
    """Runs the step of the test when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _act, ()


def _act() -> str:
    _steps[-1]()
    return "unpickled"


class Stage:
    """A stream in a worker that is played by the test."""

    def __init__(self, prefetch: int = 4) -> None:
        self.loop = asyncio.get_running_loop()
        dispatch: Dispatch[Any, PoolWorker] = Dispatch(10, 4)
        self.member = member = PoolWorker(0, 1, dispatch, Turn(self.loop))
        self.sent: list[Any] = []
        self.released: list[Any] = []
        channel = SimpleNamespace(
            own={}, is_open=True, send=lambda *message: self.sent.append(message), release=self.released.append, load=_received
        )
        member.attach(cast("Any", SimpleNamespace(channel=channel)), cast("Any", SimpleNamespace(held={})))
        shares = cast("Any", SimpleNamespace(held={}, store=SimpleNamespace(unpack_values=unpack_values, has_objects=False)))
        calls = CallRegistry(Turn(self.loop), dispatch, shares, RunnerPhase(), cast("Any", None), {member})
        self._receive: Any = Outcomes(calls, StreamItems(calls)).receiver(member)
        self.dones = self.rooms = 0
        self.call = call = StreamCall(self.loop, prefetch, CallPlan(DEFAULT, prefetch=prefetch))
        call.on_done = self._done
        call.function = function = Function(len, Kind.TASK)
        call.accepted = 0
        function.number = 7
        member.defined.add(7)
        call.kind, call.body = Kind.TASK, (1,)
        call.owner = cast("Any", SimpleNamespace(cancelled=self._cancelled, has_room=self._has_room))

    def _done(self) -> None:
        self.dones += 1

    def _has_room(self) -> None:
        self.rooms += 1

    def _cancelled(self, call: StreamCall) -> None:
        if call.member is not None:
            self.sent.append((CANCEL, call.call_id, None))

    async def begin(self, call: StreamCall) -> None:
        call.submitted()
        self.member.send(call)
        self.sent.clear()

    def items(self) -> AsyncGenerator[Any]:
        return self.call.items(self.begin)

    async def open(self, *values: Any) -> AsyncGenerator[Any]:
        """The iterator of a stream that waits for its second item."""
        items = self.items()
        first = asyncio.ensure_future(anext(items))
        await asyncio.sleep(0)
        self.give(0, *values)
        assert await first == 0
        return items

    async def used_up(self) -> AsyncGenerator[Any]:
        """The iterator of a stream with a prefetch of two, whose consumer has taken one item and whose worker has sent three."""
        items = await self.open(1)
        await asyncio.sleep(0)
        self.give(2)
        return items

    def receive(self, op: int, body: object = None) -> None:
        message: Message = (op, self.call.call_id, body)
        self._receive([message])

    def give(self, *values: Any) -> None:
        """Items arrive: scalars as they are, all others pickled."""
        places = [place for place, value in enumerate(values) if type(value) not in (int, str)]
        packed = [pickle.dumps(value) if place in places else value for place, value in enumerate(values)]
        self.receive(ITEMS, pack_values(0, -1.0, packed, places))

    def fail(self, error: BaseException) -> None:
        self.receive(ERROR, dump_exception(error, Nowhere, main_by_value=False).payload())


def _received(payload: bytes) -> Received:
    return Received(payload, len(payload), (), is_leased=False)


async def test_items_then_the_end() -> None:
    stage = Stage()
    items = await stage.open(1, [2])
    stage.receive(ITEM, pickle.dumps({3: 4}))
    stage.receive(ENDED)
    assert [item async for item in items] == [1, [2], {3: 4}]
    assert (stage.dones, stage.member.done, stage.member.failed, stage.member.calls) == (1, 1, 0, {})
    assert [message[::2] for message in stage.sent] == []
    await stage.call.gone()


async def test_credits_are_granted_while_the_stream_is_open() -> None:
    stage = Stage()
    items = await stage.open(1, 2)
    assert [await anext(items), await anext(items)] == [1, 2]
    assert stage.sent == [(CREDIT, stage.call.call_id, 3)]  # of all that were taken
    stage.give(3, 4, 5)
    assert [await anext(items), await anext(items)] == [3, 4]
    assert len(stage.sent) == 1  # the consumer may take the last item at once
    await asyncio.sleep(0)
    assert stage.sent[1:] == [(CREDIT, stage.call.call_id, 2)]
    assert await anext(items) == 5
    await items.aclose()
    assert stage.sent[2:] == [(CANCEL, stage.call.call_id, None)]


async def test_no_credits_are_granted_once_the_stream_is_closed() -> None:
    stage = Stage()
    items = await stage.open(1, 2)
    assert await anext(items) == 1
    await items.aclose()
    await asyncio.sleep(0)
    assert stage.sent == [(CANCEL, stage.call.call_id, None)]


async def test_more_items_than_were_granted_break_the_channel() -> None:
    stage = Stage()
    items = await stage.open(1)
    with pytest.raises(BrokenFrame, match="5 items of a stream, of which 4 were granted"):
        stage.give(2, 3, 4)
    await items.aclose()


async def test_a_result_of_a_stream_breaks_the_channel() -> None:
    stage = Stage()
    items = await stage.open(1)
    with pytest.raises(BrokenFrame, match="a result of len, which is a stream"):
        stage.receive(VALUE, 1)
    await items.aclose()


async def test_v9_a_result_of_a_stream_that_was_left_ends_whoever_waits_for_its_end() -> None:
    for body in (1, b"N."):
        stage = Stage()
        items = await stage.open()
        await items.aclose()
        gone = asyncio.ensure_future(stage.call.gone())
        await asyncio.sleep(0)
        stage.receive(VALUE if body == 1 else RESULT, body)
        async with asyncio.timeout(10):
            await gone
        assert (stage.member.calls, stage.member.load) == ({}, [0, 0, 0])


async def test_a_consumer_that_leaves_drops_what_still_arrives_unread() -> None:
    stage = Stage()
    items = await stage.open(1)
    await items.aclose()
    _steps.append(lambda: pytest.fail("it was unpickled"))
    stage.give(Acting())
    stage.receive(ITEM, pickle.dumps(Acting()))
    assert len(stage.released) == 1
    waiting = asyncio.ensure_future(stage.call.gone())
    await asyncio.sleep(0)
    assert not waiting.done()
    stage.receive(CANCELLED)
    await waiting
    assert (stage.dones, stage.member.calls) == (1, {})


async def test_unpickling_an_item_may_end_the_stream() -> None:
    stage = Stage()
    items = await stage.open(1)
    _steps.append(stage.call.close)
    stage.give(Acting(), 2)
    with pytest.raises(StopAsyncIteration):
        await anext(items)
    stage.receive(CANCELLED)
    await stage.call.gone()
    assert stage.dones == 1


async def test_unpickling_an_item_may_end_the_stream_and_fail() -> None:
    stage = Stage()
    items = await stage.open(1)

    def close_and_fail() -> None:
        stage.call.close()
        raise LookupError("unreadable")

    _steps.append(close_and_fail)
    stage.give(Acting(), 2)
    assert stage.dones == 1
    assert stage.sent == [(CANCEL, stage.call.call_id, None)]
    with pytest.raises(StopAsyncIteration):
        await anext(items)
    stage.receive(CANCELLED)
    await stage.call.gone()


async def test_an_item_that_cannot_be_unpickled_ends_the_stream_at_its_place() -> None:
    def fail() -> None:
        raise LookupError("unreadable")

    for op in (ITEMS, ITEM):
        stage = Stage(8)
        items = await stage.open(1)
        _steps.append(fail)
        if op == ITEMS:
            stage.give(2, Acting(), 3)
        else:
            stage.give(2)
            stage.receive(ITEM, pickle.dumps(Acting()))
        assert stage.sent == [(CANCEL, stage.call.call_id, None)]
        stage.give(4)
        assert [await anext(items), await anext(items)] == [1, 2]
        with pytest.raises(RemoteError, match="the item could not be unpickled here"):
            await anext(items)
        stage.receive(CANCELLED)
        await stage.call.gone()
        assert stage.dones == 1


async def test_a_runner_that_closes_hands_over_what_still_arrives() -> None:
    stage = Stage(8)
    items = await stage.open(1)
    stage.call.cut(lambda: RunnerClosed("closing"))
    stage.call.cut(lambda: RunnerClosed("closing"))
    assert stage.sent == [(CANCEL, stage.call.call_id, None)]
    stage.give(2)
    stage.receive(CANCELLED)
    assert [await anext(items), await anext(items)] == [1, 2]
    with pytest.raises(RunnerClosed):
        await anext(items)
    assert stage.dones == 1


async def test_a_runner_that_closes_ends_a_stream_that_no_worker_has() -> None:
    stage = Stage()
    stage.call.submitted()
    stage.call.cut(lambda: RunnerClosed("closing"))
    assert (stage.dones, stage.call.done()) == (1, True)
    with pytest.raises(RunnerClosed, match="closing"):
        await anext(stage.items())


async def test_a_stream_that_is_handed_back_while_the_runner_closes_does_not_begin_again() -> None:
    stage = Stage()
    items = await stage.open()
    stage.call.cut(lambda: RunnerClosed("closing"))
    stage.member.take(stage.call.call_id)
    assert stage.call.done()
    with pytest.raises(RunnerClosed):
        await anext(items)


async def test_a_late_error_goes_to_whoever_waits_for_the_end_or_to_the_loop() -> None:
    reports: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: reports.append(context))
    for waiters in (0, 1, 2):
        stage = Stage()
        items = await stage.open()
        await items.aclose()
        waiting = [asyncio.ensure_future(stage.call.gone()) for _ in range(waiters)]
        await asyncio.sleep(0)
        stage.fail(LookupError("late"))
        ends = await asyncio.gather(*waiting, return_exceptions=True)
        assert [type(end) for end in ends] == [LookupError, type(None)][:waiters]
        assert [type(report["exception"]) for report in reports] == ([] if waiters else [LookupError])
        reports.clear()


async def test_a_late_error_whose_only_waiter_is_cancelled_goes_to_the_loop() -> None:
    reports: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: reports.append(context))
    stage = Stage()
    items = await stage.open()
    await items.aclose()
    waiting = asyncio.ensure_future(stage.call.gone())
    await asyncio.sleep(0)
    stage.fail(LookupError("late"))
    waiting.cancel()
    await asyncio.wait([waiting])
    assert [type(report["exception"]) for report in reports] == [LookupError]


async def test_a_stream_that_is_closed_before_it_begins_was_never_submitted() -> None:
    stage = Stage()
    stage.call.close()
    stage.call.close()
    assert stage.sent == []
    assert [item async for item in stage.items()] == []
    await stage.call.gone()


# Its place


async def test_a_generator_whose_consumer_is_slow_gives_its_place_back_until_the_next_grant() -> None:
    stage = Stage(2)
    items = await stage.used_up()
    load = stage.member.load
    assert load[Kind.TASK] == 1
    await until(lambda: stage.rooms == 1)
    assert load[Kind.TASK] == 0
    stage.sent.clear()
    assert await anext(items) == 1
    await asyncio.sleep(0)
    assert load[Kind.TASK] == 1
    assert stage.sent == [(CREDIT, stage.call.call_id, 1)]
    stage.give(3)
    await until(lambda: stage.rooms == 2)
    stage.receive(ENDED)
    assert [item async for item in items] == [2, 3]
    stage.member.check_empty()


async def test_a_fast_consumer_costs_a_generator_no_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(streams, "PATIENCE", 1000.0)  # a loop that stands still for a moment makes any consumer slow
    stage = Stage(2)
    items = await stage.open(1)
    assert await anext(items) == 1
    for _ in range(3):
        stage.give(2, 3)
        assert [await anext(items), await anext(items)] == [2, 3]
    stage.call._look()  # as the timer does
    assert stage.rooms == 0
    assert stage.member.load[Kind.TASK] == 1
    await items.aclose()


async def test_a_generator_that_has_to_end_has_its_place() -> None:
    for end in (
        StreamCall.close,
        lambda call: call.cut(lambda: RunnerClosed("closing")),
        lambda call: call.abandon(LookupError("unreadable")),
    ):
        stage = Stage(2)
        items = await stage.used_up()
        stage.sent.clear()
        await until(lambda stage=stage: stage.rooms == 1)
        end(stage.call)
        assert stage.member.load[Kind.TASK] == 1
        assert stage.sent == [(CANCEL, stage.call.call_id, None)]
        await items.aclose()
        stage.receive(CANCELLED)
        stage.member.check_empty()


async def test_a_death_or_an_end_while_it_is_aside_leaves_no_count_behind() -> None:
    stage = Stage(2)
    items = await stage.used_up()
    await until(lambda: stage.rooms == 1)
    stage.member.take(stage.call.call_id)
    stage.member.check_empty()
    await items.aclose()
    await asyncio.sleep(2 * streaming.PATIENCE)
    stage.member.check_empty()


async def test_a_generator_whose_own_calls_a_closing_cut_off_is_not_told() -> None:
    """RunnerClosed from its nested calls is no failure of the generator."""
    told: list[Any] = []
    asyncio.get_running_loop().set_exception_handler(lambda _loop, context: told.append(context["exception"]))
    call = Stage().call
    call.failed_late(RunnerClosed("the runner was closed"))
    assert told == []
    failure = ValueError("its own")
    call.failed_late(failure)
    assert told == [failure]
