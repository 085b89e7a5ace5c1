"""The tasks of a worker: each call that gets one is answered, however its task begins and ends."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from percore._protocol.messages import ERROR, MARK_WORDS, VALUE
from percore._transport.codec import is_inline_value
from percore._worker.answers import Answers
from percore._worker.plain_calls import NoNested
from percore._worker.tasks import Tasks
from percore._worker.terms import SentTerms, Variables

EAGER: Any = getattr(asyncio, "eager_task_factory", None)


class Post:
    """A channel. It notes what is sent."""

    def __init__(self) -> None:
        self.loop = asyncio.get_running_loop()
        self.pickler = self.pack_values = SimpleNamespace
        self.passes = is_inline_value
        self.sent: list[tuple[int, int, Any]] = []
        self.is_answered = asyncio.Event()

    def send(self, op: int, call_id: int, body: Any) -> None:
        self.sent.append((op, call_id, body))
        self.is_answered.set()

    def send_exception(self, op: int, call_id: int, error: BaseException, send: Any) -> None:
        send(op, call_id, type(error))


def tasks_of(post: Post) -> Tasks:
    marks, channel = memoryview(bytearray(8 * MARK_WORDS * 8)).cast("Q"), cast("Any", post)
    tasks = Tasks(channel, marks, Answers(channel), Variables(()), SentTerms(), lambda: None)
    tasks.families, tasks.streams = cast("Any", NoNested()), {}
    return tasks


async def test_an_awaitable_of_a_thread_that_is_cancelled_at_once_is_answered() -> None:
    """Code of a call may cancel all tasks. A task that is cancelled before its first step would never run, and answer nobody."""
    post = Post()
    tasks, me = tasks_of(post), asyncio.current_task()
    tasks.hand_over(1, post.loop.create_future(), None)
    post.loop.call_soon(lambda: [task.cancel() for task in asyncio.all_tasks() if task is not me])
    await post.is_answered.wait()
    assert post.sent == [(ERROR, 1, asyncio.CancelledError)]
    assert not tasks.has_any()


@pytest.mark.skipif(EAGER is None, reason="Python 3.11 has no eager tasks")
async def test_an_awaitable_that_ends_at_once_in_a_loop_with_eager_tasks_leaves_nothing() -> None:
    """A task that has ended when it is entered among those that run would keep a worker that drains from its end."""
    post = Post()
    tasks, done = tasks_of(post), post.loop.create_future()
    done.set_result(7)
    post.loop.set_task_factory(EAGER)
    try:
        tasks.hand_over(1, done, None)
        await post.is_answered.wait()
    finally:
        post.loop.set_task_factory(None)
    assert post.sent == [(VALUE, 1, 7)]
    assert not tasks.has_any()
