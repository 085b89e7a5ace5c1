"""The credits of a stream, without a worker: the producer is never further ahead than it may be, and never waits for ever."""

import random

import pytest

from percore._protocol.messages import BrokenFrame
from percore._scheduler.streaming import Credits


class Pipe:
    """A producer and a consumer, between which grants and items take their time."""

    def __init__(self, prefetch: int) -> None:
        self.prefetch = prefetch
        self.credits = Credits(prefetch)
        self.allowed = prefetch
        self.grants: list[int] = []
        self.produced = 0
        self.messages = 0

    def produce(self) -> bool:
        if self.produced == self.allowed:
            return False
        self.produced += 1
        assert self.produced - self.credits.taken <= self.prefetch
        self.credits.arrive(1)
        return True

    def take(self) -> bool:
        if self.credits.taken == self.credits.arrived:
            return False
        self.credits.taken += 1
        if self.credits.taken >= self.credits.due_at:
            self.grants.append(self.credits.grant())
            self.messages += 1
        return True

    def hear(self) -> bool:
        if not self.grants:
            return False
        self.allowed += self.grants.pop(0)
        return True


@pytest.mark.parametrize("prefetch", [1, 2, 3, 4, 5, 16, 17, 1000])
def test_in_any_order_of_events_the_producer_is_ahead_by_prefetch_at_most_and_goes_on(prefetch: int) -> None:
    decide = random.Random(prefetch)
    for _ in range(20):
        pipe = Pipe(prefetch)
        for _ in range(20 * prefetch):
            decide.choice([pipe.produce, pipe.take, pipe.hear])()
        before = pipe.produced
        while pipe.take() or pipe.hear():
            pass
        assert pipe.produce(), "everything was taken and heard, and the producer waits for ever"
        assert pipe.produced > before or not before
        assert pipe.credits.granted - pipe.credits.taken <= prefetch


@pytest.mark.parametrize(("prefetch", "items_of_a_grant"), [(1, 1), (2, 1), (3, 1), (4, 2), (16, 8), (17, 8), (1000, 500)])
def test_grants_share_messages(prefetch: int, items_of_a_grant: int) -> None:
    pipe = Pipe(prefetch)
    for _ in range(10 * items_of_a_grant):
        assert pipe.produce()
        assert pipe.take()
        pipe.hear()
    assert pipe.messages == 10
    assert pipe.allowed == pipe.produced + prefetch


def test_a_worker_that_sends_more_than_it_was_granted_is_broken() -> None:
    credits_ = Credits(4)
    credits_.arrive(3)
    with pytest.raises(BrokenFrame, match="5 items of a stream, of which 4 were granted"):
        credits_.arrive(2)
