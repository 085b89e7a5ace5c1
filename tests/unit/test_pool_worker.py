"""A worker as the supervisor keeps it: for how long it has been silent."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from percore._scheduler.dispatch import Dispatch
from percore._supervisor.pool_worker import PoolWorker, Turn

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
