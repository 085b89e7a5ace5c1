"""When a worker is asked for calls back: at once where its work is long or unknown, and not at all while short batches advance."""

import asyncio
from dataclasses import dataclass, field
from math import inf
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

import pytest

from percore._calls.calls import Awaited
from percore._calls.items import Batch
from percore._protocol.messages import Kind
from percore._scheduler.batching import Batches, Run
from percore._scheduler.queues import Queue
from percore._scheduler.recalls import Recall
from percore._scheduler.windows import Cost
from percore._supervisor import rebalancing as module
from percore._supervisor.rebalancing import ANSWERS, BRIEF, Rebalancing

if TYPE_CHECKING:
    from percore._scheduler.dispatch import Dispatch


@dataclass
class Worker:
    """What is asked for calls back."""

    calls: dict[int, Any]
    done: int = 0
    asked: list[int] = field(default_factory=list)

    def ask_back(self, wanted: int, _times_ahead: int) -> None:
        self.asked.append(wanted)


@dataclass
class Decisions:
    """A dispatch that would always have this worker asked."""

    worker: Worker
    dry: bool = True
    times_ahead: int = 1

    def is_dry(self) -> bool:
        return self.dry

    def recall(self) -> Recall[Any] | None:
        return Recall(self.worker, 5) if self.dry else None


class Loop:
    """Calls nothing before it is told to."""

    def __init__(self) -> None:
        self.soon: list[tuple[asyncio.Handle, float]] = []
        self._loop = asyncio.new_event_loop()
        self._loop.close()

    def call_soon(self, callback: Any) -> asyncio.Handle:
        return self.call_later(0.0, callback)

    def call_later(self, delay: float, callback: Any) -> asyncio.Handle:
        handle = asyncio.Handle(callback, (), self._loop)
        self.soon.append((handle, delay))
        return handle

    def run(self) -> float:
        """Call what is next. How long it had to wait."""
        handle, delay = self.soon.pop(0)
        assert not handle.cancelled()
        handle._run()
        return delay


def batch_of(items: int, seconds: float | None) -> Batch:
    """So many items, each known to take so long."""
    cost = Cost()
    if seconds is not None:
        cost.measured(1, seconds)
    queue: Queue[Any, Any] = Queue(Kind.THREAD, Batches(lambda run: run, 65_536, cost))
    flow = SimpleNamespace(function=SimpleNamespace(kind=Kind.THREAD), queue=queue)
    return Batch(cast("Any", flow), Run(0, list(range(items)), True, 5), None)


def single(kind: int) -> Any:
    call = Awaited()
    call.kind = kind
    return call


def recalls_of(*calls: Any) -> tuple[Rebalancing, Loop, Decisions]:
    loop, decisions = Loop(), Decisions(Worker(dict(enumerate(calls))))
    return Rebalancing(cast("Any", loop), cast("Dispatch[Any, Any]", decisions)), loop, decisions


def test_maps_may_pull_before_anybody_is_asked() -> None:
    recalls, loop, decisions = recalls_of(single(Kind.THREAD))
    recalls.look()
    recalls.look()
    assert decisions.worker.asked == []
    assert len(loop.soon) == 1
    decisions.dry = False  # they have
    assert loop.run() == 0
    assert decisions.worker.asked == []


def test_nobody_looks_while_something_waits() -> None:
    recalls, loop, decisions = recalls_of(single(Kind.THREAD))
    decisions.dry = False
    recalls.look()
    assert loop.soon == []


@pytest.mark.parametrize(
    "calls",
    [
        [single(Kind.THREAD)],
        [batch_of(1000, 1e-6), single(Kind.THREAD)],
        [batch_of(10, None)],
        [batch_of(10, 1.0)],
        [batch_of(1500, 1e-6), batch_of(1501, 1e-6)],
        [batch_of(10, 1.0), single(Kind.TASK)],
    ],
    ids=["a call", "a call behind a batch", "not measured", "long", "together", "beside a coroutine"],
)
def test_work_that_is_long_or_unknown_is_asked_for_at_once(calls: list[Any]) -> None:
    recalls, loop, decisions = recalls_of(*calls)
    recalls.look()
    assert loop.run() == 0
    assert decisions.worker.asked == [5]


def test_others_are_looked_for_when_a_worker_has_not_answered() -> None:
    recalls, loop, decisions = recalls_of(single(Kind.THREAD))
    recalls.look()
    assert loop.run() == 0
    assert loop.run() == ANSWERS  # it has not read the question: it is silent by now
    assert loop.run() == 0
    assert decisions.worker.asked == [5, 5]
    assert loop.run() == ANSWERS
    decisions.dry = False  # it has answered
    assert loop.run() == 0
    assert loop.soon == []


@pytest.mark.parametrize("calls", [[batch_of(1000, 1e-6)], [single(Kind.TASK), batch_of(1000, 1e-6)]])
def test_a_worker_that_advances_is_left_its_short_batches(calls: list[Any]) -> None:
    recalls, loop, decisions = recalls_of(*calls)
    recalls.look()
    assert loop.run() == 0
    for done in (100, 200, 300):
        decisions.worker.done = done
        assert loop.run() == BRIEF
    assert decisions.worker.asked == []


def test_a_worker_that_has_done_nothing_for_long_is_asked_whatever_was_measured() -> None:
    recalls, loop, decisions = recalls_of(batch_of(1000, 1e-6))
    recalls.look()
    loop.run()
    assert loop.run() == BRIEF
    assert decisions.worker.asked == [5]
    assert loop.run() == ANSWERS  # the next time it is a matter of measuring again
    loop.run()
    assert decisions.worker.asked == [5]


def test_nobody_is_asked_any_more_after_the_end() -> None:
    recalls, loop, decisions = recalls_of(single(Kind.THREAD))
    recalls.look()
    recalls.stop()
    recalls.stop()
    assert loop.soon.pop()[0].cancelled()
    recalls.look()  # workers end, and with them calls
    assert loop.soon == []
    assert decisions.worker.asked == []


def test_what_has_not_been_measured_may_take_any_time() -> None:
    worker = Worker({0: batch_of(1, None), 1: batch_of(1, 1e-6)})
    assert module._seconds(cast("Any", worker)) == inf
