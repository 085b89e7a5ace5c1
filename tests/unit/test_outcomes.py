"""Outcomes as they arrive: whichever way a message takes, each kind of call ends alike and leaves its worker."""

import asyncio
import pickle
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from percore._calls.calls import Awaited, Call, Planned
from percore._calls.functions import Function
from percore._calls.policy import CallPlan, Policy
from percore._common.errors import RemoteError
from percore._protocol.messages import RESULT, VALUE, Kind, Message
from percore._scheduler.dispatch import Dispatch
from percore._scheduler.phase import RunnerPhase
from percore._supervisor.call_registry import CallRegistry
from percore._supervisor.outcomes import Outcomes
from percore._supervisor.pool_worker import PoolWorker
from percore._supervisor.timing import Turn

_unpickled: list[Callable[[], object]] = []


class Acting:
    """Runs the step of the test when it is unpickled."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _act, ()


def _act() -> str:
    _unpickled[-1]()
    return "unpickled"


class Stage:
    """A worker with one call, and the function that takes its messages."""

    def __init__(self, loop: asyncio.AbstractEventLoop, make: "Callable[[asyncio.AbstractEventLoop], Any]") -> None:
        dispatch: Dispatch[Any, PoolWorker] = Dispatch(10, 4)
        self.member = member = PoolWorker(0, 1, dispatch, Turn(loop))
        channel = SimpleNamespace(own={}, is_open=True, send=lambda *_: None)
        member.attach(cast(Any, SimpleNamespace(channel=channel)), cast(Any, SimpleNamespace(held={})))
        shares, progress = cast(Any, SimpleNamespace(held={}, store=SimpleNamespace(has_objects=False))), cast(Any, None)
        calls = CallRegistry(Turn(loop), dispatch, shares, RunnerPhase(), progress, {member})
        self._receive: Callable[[list[Message]], None] = Outcomes(calls).receiver(member)
        self.call = call = make(loop)
        call.function = function = Function(len, Kind.TASK)
        call.accepted = 0
        function.number = 7
        member.defined.add(7)
        call.kind, call.body = Kind.TASK, (1,)
        member.send(call)

    @property
    def future(self) -> "asyncio.Future[Any]":
        return cast("asyncio.Future[Any]", getattr(self.call, "future", self.call))

    def receive(self, op: int, body: object) -> None:
        """Take this outcome, with which the call must have left."""
        self._receive([(op, self.call.call_id, body)])
        assert (self.member.calls, self.member.load, self.member.done) == ({}, [0, 0, 0], 1)
        assert self.call.done()


def awaited(loop: asyncio.AbstractEventLoop) -> Awaited:
    call = Awaited()
    call.future, call.is_over = loop.create_future(), False
    return call


def planned(loop: asyncio.AbstractEventLoop, plan: CallPlan | None = None) -> Planned:
    call = Planned()
    call.future, call.is_over, call.key, call.plan = loop.create_future(), False, None, plan
    return call


def timed(loop: asyncio.AbstractEventLoop) -> Planned:
    return planned(loop, CallPlan(Policy(timeout=1.0)))


def submitted(loop: asyncio.AbstractEventLoop) -> Call:
    call = Call(loop=loop)
    call.key = call.plan = None
    call.owner = cast(Any, SimpleNamespace(cancelled=lambda _call: None))
    return call


@pytest.fixture
def loop() -> Iterator[asyncio.AbstractEventLoop]:
    loop = asyncio.new_event_loop()
    yield loop
    loop.close()


@pytest.mark.parametrize("make", [awaited, planned, timed, submitted])
class TestShortWay:
    def test_a_result_is_delivered(self, loop: asyncio.AbstractEventLoop, make: Any) -> None:
        for op, body, value in ((VALUE, 5, 5), (RESULT, pickle.dumps([5]), [5])):
            stage = Stage(loop, make)
            stage.receive(op, body)
            assert stage.future.result() == value

    def test_c3_a_result_that_nobody_waits_for_is_not_unpickled(self, loop: asyncio.AbstractEventLoop, make: Any) -> None:
        stage = Stage(loop, make)
        _unpickled.append(lambda: pytest.fail("it was unpickled"))
        stage.future.cancel()
        stage.receive(RESULT, pickle.dumps(Acting()))
        assert (stage.future.cancelled(), stage.member.failed) == (True, 0)

    def test_c3_a_call_that_is_cancelled_while_its_result_is_unpickled(self, loop: asyncio.AbstractEventLoop, make: Any) -> None:
        stage = Stage(loop, make)
        _unpickled.append(stage.future.cancel)
        stage.receive(RESULT, pickle.dumps(Acting()))
        assert stage.future.cancelled()

    def test_s4_a_result_that_cannot_be_unpickled(self, loop: asyncio.AbstractEventLoop, make: Any) -> None:
        stage = Stage(loop, make)
        _unpickled.append(lambda: 1 // 0)
        stage.receive(RESULT, pickle.dumps(Acting()))
        assert isinstance(stage.future.exception(), RemoteError)
        assert stage.member.failed == 1
