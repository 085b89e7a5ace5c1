"""The nested calls of a worker's calls, with a channel that the test plays."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, cast

from percore._protocol.messages import ANSWER_RESULT, ASK, DROP, TAKEN
from percore._protocol.nested_calls import NestedRequest
from percore._worker.families import Child, Families
from percore._worker.threads import Threads


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


def test_families_of_plain_calls_that_have_ended_leave_nothing() -> None:
    families = families_of(Post())
    for call_id in range(10):
        families.of(call_id)
        families.left(call_id)
    assert not families.open
    assert not families._noted


REQUEST = NestedRequest(*cast(Any, [None] * len(NestedRequest._fields)))


def test_a_collection_that_makes_and_drops_nested_calls_while_an_answer_is_taken_does_not_hang() -> None:
    post = Post()
    families = families_of(post)
    family = families.of(1)
    answered, other = (family.child(Child, lambda _: None) for _ in range(2))
    for child in (answered, other):
        family.ask(REQUEST, child)
    forget = families.forget

    def forget_in_a_collection(child: Child) -> None:
        families.forget = forget  # type: ignore[method-assign]
        family.drop(other)
        family.ask(REQUEST, family.child(Child, lambda _: None))
        forget(child)

    families.forget = forget_in_a_collection  # type: ignore[method-assign]
    families.handlers[ANSWER_RESULT](answered.number, 7)
    assert answered.answer == (ANSWER_RESULT, 7)
    assert post.sent == [(ASK, 1), (ASK, 2), (DROP, 2), (ASK, 3)]


def test_a_collection_that_waits_for_a_nested_call_in_the_midst_of_another_one_is_refused() -> None:
    """It would wait for ever: the loop takes the lock that its own thread holds, or another thread the gate."""
    post = Post()
    family = families_of(post).of(1)
    refused: list[str] = []

    def wait_in_a_collection() -> None:
        try:
            family.wait(lambda: None)
        except RuntimeError as error:
            refused.append(str(error))

    def send(op: int, number: int, _body: Any) -> None:
        wait_in_a_collection()

    @contextmanager
    def gate() -> Iterator[None]:
        wait_in_a_collection()
        yield

    child = family.child(Child, lambda _: None)
    family.ask(REQUEST, child, send)
    post.send_from_thread = send  # type: ignore[method-assign]
    assert family.drop(child)
    threads: Any = SimpleNamespace(
        _running={1}, _beside=(), _gate=gate(), _aside=set(), pacing=None, waiting={}, _admit=lambda: None
    )
    assert Threads.step_aside(threads, 1)
    assert len(refused) == 3
    assert all(text.startswith("a __del__ that a garbage collection has run waits for a call") for text in refused)
