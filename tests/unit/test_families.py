"""The nested calls of a worker's calls, with a channel that the test plays."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

from percore._protocol.messages import ANSWER_RESULT, DROP, TAKEN
from percore._worker.families import Child, Families


class Post:
    """A channel. It notes what is sent."""

    def __init__(self) -> None:
        self.sent: list[tuple[int, int]] = []
        self.loop = self

    def call_soon_threadsafe(self, call: Callable[[], object]) -> None:
        call()

    def send_from_thread(self, op: int, number: int, _body: Any) -> None:
        self.sent.append((op, number))

    send_later = send_from_thread


def families_of(post: Post) -> Families:
    plain = SimpleNamespace(has_expired=lambda _: False, threads=SimpleNamespace(runs=lambda _: True))
    return Families(*cast(Any, (post, plain, None, None, set())))


def test_an_answer_that_meets_its_withdrawal_in_another_thread_is_told_to_nobody_and_gives_its_slot_back() -> None:
    post, told = Post(), list[Child]()
    families = families_of(post)
    family = families.of(1)
    child = family.child(Child, told.append)
    family.children[child.number] = families.children[child.number] = child
    lock = family.lock

    @contextmanager
    def taken_after_a_drop() -> Iterator[None]:
        """1. the loop has found the child  2. a thread drops it  3. the loop gets the lock."""
        family.lock = lock
        assert family.drop(child)
        with lock:
            yield

    family.lock = cast(Any, taken_after_a_drop())
    families.handlers[ANSWER_RESULT](child.number, 7)
    assert told == []
    assert post.sent == [(DROP, child.number), (TAKEN, child.number)]
    assert not families.children


def test_families_that_tasks_of_ended_calls_ask_for_do_not_pile_up() -> None:
    families = families_of(Post())
    families.runs = lambda call_id: call_id % 10 == 0
    for call_id in range(1000):
        families.of(call_id)
        assert len(families.open) <= 64 + 2 * call_id // 10 + 2
    assert set(range(0, 1000, 10)) <= set(families.open)
    assert families._noted == set(families.open)
