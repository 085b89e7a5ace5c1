"""A stream between two workers, as the supervisor sees it: its credits, its place, and its end."""

from typing import TYPE_CHECKING, Any, cast

import pytest

from percore._calls.meters import UNMETERED
from percore._calls.nested import ForeignFunction, NestedStream
from percore._calls.policy import CallPlan, Policy
from percore._common.errors import RunnerClosed
from percore._common.worker_errors import WorkerDied
from percore._protocol.messages import BrokenFrame, Kind
from percore._scheduler.queues import Queue

if TYPE_CHECKING:
    from collections.abc import Callable

DIED = WorkerDied(1, -9, "jobs.pages", 0.5)


class Ends:
    """The asker, the owner and the worker of a stream. It notes what they are told."""

    def __init__(self, prefetch: int) -> None:
        self.told: list[Any] = []
        plan = CallPlan(Policy(prefetch=prefetch), prefetch=prefetch)
        queue: Any = Queue(Kind.TASK, depth=1)
        self.stream = NestedStream(
            cast(Any, self), cast(Any, self), 1, ForeignFunction("pages", "jobs", Kind.TASK, UNMETERED), queue, None, plan
        )
        self.stream.member = self

    def items(self, _: NestedStream, values: list[Any], pickled: list[int]) -> None:
        self.told.append((values, pickled))

    def item(self, _: NestedStream, data: bytes) -> None:
        self.told.append(data)

    def returned(self, _: NestedStream, value: object) -> None:
        self.told.append(("ended", value))

    def failed(self, _: NestedStream, error: BaseException) -> None:
        self.told.append(error)

    def sent(self, _: NestedStream, data: bytes, *, is_error: bool) -> None:
        self.told.append((data, is_error))

    def cancelled(self, _: NestedStream) -> None:
        self.told.append("cancelled")

    def step_aside(self, _: NestedStream) -> bool:
        self.told.append("aside")
        return True

    def come_back(self, _: NestedStream) -> None:
        self.told.append("back")


def test_a_generator_that_may_produce_no_more_gives_its_place_back() -> None:
    ends = Ends(3)
    ends.stream.arrived([1, b"p"], [1])
    assert ends.told == [([1, b"p"], [1])]
    ends.stream.item(b"q")
    assert ends.told[1:] == ["aside", b"q"]
    assert ends.stream.taken(2) == 2
    assert ends.told[3:] == ["back"]
    ends.stream.arrived([5], [])
    assert ends.told[4:] == [([5], [])]
    assert ends.stream.taken(2) == 2
    assert not ends.stream.is_aside


def test_neither_end_may_exceed_its_credits() -> None:
    ends = Ends(2)
    with pytest.raises(BrokenFrame, match="not all had arrived"):
        ends.stream.taken(1)
    ends = Ends(2)
    ends.stream.arrived([1], [])
    with pytest.raises(BrokenFrame, match="not all had arrived"):
        ends.stream.taken(0)
    with pytest.raises(BrokenFrame, match="of which 2 were granted"):
        ends.stream.arrived([2, 3], [])
    with pytest.raises(BrokenFrame, match="which is a stream"):
        ends.stream.set_result(1)
    with pytest.raises(BrokenFrame, match="which is a stream"):
        ends.stream.forward(b"", is_error=False)


def test_items_that_nobody_takes_are_counted_and_dropped() -> None:
    ends = Ends(4)
    ends.stream.cancel()
    ends.stream.arrived([1], [])
    ends.stream.item(b"p")
    ends.stream.ended()
    assert ends.told == ["cancelled"]
    assert ends.stream.credits.arrived == 2


@pytest.mark.parametrize(
    ("closes", "how", "told"),
    [
        (False, "ended", ("ended", None)),
        (True, "ended", ("ended", None)),
        (False, "cut", RunnerClosed),
        (True, "cut", ("ended", None)),
        (False, "died", WorkerDied),
        (True, "died", ("ended", None)),
        (True, "returned", ("ended", None)),
        (False, "returned", None),
        (True, "failed", (b"error", True)),
    ],
)
def test_how_it_ends(closes: bool, how: str, told: Any) -> None:  # a case
    ends = Ends(4)
    ends.stream.is_closing = closes
    steps: dict[str, Callable[[], object]] = {
        "ended": ends.stream.ended,
        "cut": ends.stream.cut_off,
        "died": lambda: ends.stream.set_exception(DIED),
        "returned": ends.stream.left,
        "failed": lambda: ends.stream.forward(b"error", is_error=True),
    }
    steps[how]()
    if told is None:
        assert ends.told == []
        assert not ends.stream.done()
    else:
        (one,) = ends.told
        assert one == told or type(one) is told
        assert ends.stream.done()
