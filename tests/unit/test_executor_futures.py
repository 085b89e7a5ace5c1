"""The futures of an executor: each ends, whatever its outcome is and whatever has been done to it."""

import traceback
from concurrent.futures import CancelledError, Future
from typing import Any

import pytest

from percore._common.errors import RemoteTraceback
from percore._executor.futures import begins, resolve
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
