"""The futures of an executor: each ends, whatever its outcome is and whatever has been done to it."""

import asyncio
import traceback
from concurrent.futures import CancelledError, Future
from types import SimpleNamespace
from typing import Any

import pytest

from percore._common.errors import RemoteTraceback
from percore._executor.futures import begins, resolve
from percore._executor.jobs import Job, Jobs
from percore._executor.life import ExecutorLife
from percore._protocol.messages import Kind
from percore._serialization.exception_state import CAUSE
from tests import jobs


def arrived(error: BaseException) -> BaseException:
    """Return the error as it arrives from a worker."""
    CAUSE.__set__(error, RemoteTraceback("Traceback (most recent call last):\n  in the worker"))
    return error


@pytest.mark.parametrize("error", [ValueError("plain"), jobs.FrozenError("refuses attributes")])
def test_an_error_ends_its_future_with_the_traceback_as_the_standard_library_shows_it(error: Exception) -> None:
    future: Future[Any] = Future()
    assert begins(future)
    resolve(future, None, arrived(error))
    assert future.done()
    assert future.exception() is error
    assert "\nconcurrent.futures.process._RemoteTraceback: " in "\n" + "".join(traceback.format_exception(error))


def test_what_the_user_has_done_to_a_future_stays(subtests: pytest.Subtests) -> None:
    for name, outcome in {"value": (1, None), "error": (None, OSError("late"))}.items():
        with subtests.test(name=name):
            future: Future[Any] = Future()
            future.set_result("the user's")
            assert not begins(future)
            resolve(future, *outcome)
            assert future.result() == "the user's"
    cancelled: Future[Any] = Future()
    cancelled.cancel()
    assert not begins(cancelled)
    with pytest.raises(CancelledError):
        cancelled.result()


class Failing:
    """A supervisor that fails when the next calls are handed over."""

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self.slots = [None]
        self.dispatch = SimpleNamespace(room_for=lambda _kind: 2)

    @property
    def phase(self) -> Any:
        raise OSError("an error of percore")


async def test_outcomes_reach_their_futures_although_the_next_calls_cannot_be_handed_over() -> None:
    loop, looks, reported = asyncio.get_running_loop(), list[None](), list[dict[str, Any]]()
    loop.set_exception_handler(lambda _, context: reported.append(context))
    supervisor: Any = Failing(loop)
    keeper: Any = SimpleNamespace(look=lambda: looks.append(None))
    running = Jobs(supervisor, ExecutorLife(), keeper, is_pool=False)
    futures: list[Future[Any]] = [Future(), Future()]
    for number, future in enumerate(futures):
        assert begins(future)
        job = Job(running, future, None, 0.0)
        job.kind = Kind.TASK
        running.ended(job, number, None)
    await asyncio.sleep(0)
    assert [future.result(0) for future in futures] == [0, 1]
    assert (len(looks), [str(context["exception"]) for context in reported]) == (1, ["an error of percore"])
