"""Nested calls: when they go first, which of them does, and when a call that waits for its nested calls may come back."""

from dataclasses import dataclass

import pytest

from percore._protocol.messages import Kind
from percore._scheduler.levels import DEEPEST, LEAST_ASIDE, Family, Levels

TASK, THREAD = Kind.TASK, Kind.THREAD


@dataclass
class Queue:
    depth: int
    waiting: int = 0
    ended: int = 0
    is_listed: bool = True

    def __len__(self) -> int:
        return self.waiting


def levels(*queues: tuple[int, int], places: tuple[int, int] = (100, 2)) -> Levels[Queue]:
    """Give levels with a queue for each of these kinds and depths."""
    made: Levels[Queue] = Levels(places)
    for kind, depth in queues:
        made.add(kind, Queue(depth))
    return made


def test_each_kind_and_depth_has_a_queue_and_the_deepest_share_one() -> None:
    made = levels((TASK, 1), (THREAD, 1), (TASK, DEEPEST))
    first, last = made.get(1, TASK), made.get(DEEPEST, TASK)
    assert first is not None
    assert first is not made.get(1, THREAD)
    assert made.get(2, TASK) is made.get(DEEPEST, THREAD) is None
    assert last is not None
    assert made.get(DEEPEST + 1, TASK) is made.get(10 * DEEPEST, TASK) is last


def test_the_deepest_queue_of_the_kind_is_the_first_one() -> None:
    made = levels((TASK, 2), (TASK, 10), (THREAD, 11), (TASK, 1), (TASK, 9))
    assert [queue.depth for queue in made.listed(TASK)] == [10, 9, 2, 1]
    assert [queue.depth for queue in made.listed(THREAD)] == [11]
    deepest = made.get(10, TASK)
    assert deepest is not None
    deepest.is_listed = False
    assert [queue.depth for queue in made.listed(TASK)] == [9, 2, 1]


@pytest.mark.parametrize(("kind", "most"), [(TASK, 100), (THREAD, LEAST_ASIDE)])
def test_nested_calls_go_first_while_as_many_calls_are_aside_as_there_are_places(kind: int, most: int) -> None:
    made = levels()
    made.moved(kind, 3 * most - 1)
    assert not made.is_strained(kind, 3)
    made.moved(kind, 1)
    assert made.is_strained(kind, 3)
    assert not made.is_strained(kind, 4)  # a worker has come
    assert not made.is_strained(1 - kind, 3)  # each kind has places of its own
    made.moved(kind, -1)
    assert not made.is_strained(kind, 3)


def test_without_workers_the_places_of_one_count() -> None:
    made = levels()
    assert not made.is_strained(TASK, 0)
    made.moved(TASK, 100)
    assert made.is_strained(TASK, 0)


def test_cancelled_calls_are_not_awaited() -> None:
    made = levels((TASK, 1), (THREAD, 2))
    assert not made.is_awaited()
    queue = made.get(2, THREAD)
    assert queue is not None
    queue.waiting = 2
    assert made.is_awaited()
    queue.ended = 2
    assert not made.is_awaited()


def test_only_the_last_answer_waits_for_the_place() -> None:
    family = Family(waits_for_place=True)
    assert [family.asks(number) for number in (1, 2)] == [None, None]
    assert family.answered(1, has_place=False)  # the call cannot end by it
    assert not family.is_over
    assert not family.answered(2, has_place=False)
    assert (family.held, family.is_over) == (2, False)
    assert family.asks(3) == 2  # the call waits for another one, and gives its place up
    assert family.answered(3, has_place=True)
    assert family.is_over


def test_a_call_on_a_thread_gets_every_answer_at_once() -> None:
    family = Family(waits_for_place=False)
    family.asks(1)
    assert family.answered(1, has_place=False)
    assert family.is_over


def test_a_nested_call_is_dropped_once_whether_it_runs_or_its_answer_is_held() -> None:
    family = Family(waits_for_place=True)
    family.asks(1)
    family.asks(2)
    assert family.dropped(1)
    assert not family.dropped(1)
    assert not family.answered(2, has_place=False)
    assert family.dropped(2)
    assert not family.dropped(2)
    assert family.is_over
