"""The futures of an executor: a call as it is submitted, and the outcome of a future. Importing this module is cheap."""

from __future__ import annotations

import logging
import threading
from concurrent.futures import CancelledError, Future, InvalidStateError
from typing import TYPE_CHECKING, Any, TypeAlias, cast

from percore._common.errors import RemoteTraceback
from percore._common.log import report

if TYPE_CHECKING:
    from collections.abc import Callable

    from percore._calls.functions import Function
    from percore._common.tracing import Span, Tracing


Request: TypeAlias = "tuple[Future[Any], Callable[..., Any], tuple[Any, ...], dict[str, Any]]"


class Held:
    """A function that is pickled by value and shared by many calls. It is pickled once, and forgotten when no call needs it."""

    __slots__ = ("_forget", "fn", "function")

    def __init__(self, fn: Callable[..., Any], forget: Callable[[Function], None]) -> None:
        """`forget`: called when no call needs the function any more, from any thread, at any point of its code."""
        self._forget = forget
        self.fn = fn
        self.function: Function | None = None
        """Its registration with the supervisor. Only the loop's thread sets it."""

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self.fn(*args, **kwargs)

    def __del__(self) -> None:
        if self.function is not None:
            self._forget(self.function)


class TracedFuture(Future[Any]):
    """The future of a call, with its span."""

    span: Span


class EarlyFuture(TracedFuture):
    """The future of a call that a `__del__` has submitted, in the middle of the executor's start in this thread."""

    def __init__(self, has_started: Callable[[], bool]) -> None:
        super().__init__()
        self._has_started = has_started
        self._of_start = threading.get_ident()

    def result(self, timeout: float | None = None) -> Any:
        """As that of every future.

        Raises:
            RuntimeError: the thread that starts the executor waits for the result, in the middle of that.
        """
        self._check()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """As `result`."""
        self._check()
        return super().exception(timeout)

    def _check(self) -> None:
        if threading.get_ident() == self._of_start and not self._has_started() and not self.done():
            raise waits_in_step()


def waits_in_step() -> RuntimeError:
    """Return the error of a wait that would never end."""
    return RuntimeError(
        "a __del__ that a garbage collection has run waits for an executor, in the middle of a step of percore that has to end "
        "first: wait before, in a `with` block or a method that closes the object"
    )


def traced_future(tracing: Tracing, fn: Callable[..., Any]) -> TracedFuture:
    """Return a new future for a call of `fn`, whose span ends with the future."""
    future = TracedFuture()
    trace(future, tracing, fn)
    return future


def trace(future: TracedFuture, tracing: Tracing, fn: Callable[..., Any]) -> None:
    future.span = tracing.begin(fn.fn if type(fn) is Held else fn)
    future.add_done_callback(_ended)


def _ended(future: Any) -> None:
    future.span.ended(CancelledError() if future.cancelled() else future.exception())


def begins(future: Future[Any]) -> bool:
    """Mark the future as running. False: it was cancelled or has already ended, so the call must not run."""
    try:
        return future.set_running_or_notify_cancel()
    except RuntimeError:  # the user has ended it; the standard library has logged that
        return False


def withdraw(future: Future[Any]) -> None:
    """Cancel the future of a call that has not begun. This runs its callbacks; an exception of a callback is logged."""
    try:
        future.cancel()
    except BaseException as raised:  # as in `resolve`
        _report_callback(future, raised)
    if future.cancelled():
        begins(future)  # notifies `concurrent.futures.wait` and `as_completed`


def resolve(future: Future[Any], value: Any, error: BaseException | None) -> None:
    """End a future with a result or an error. This runs its callbacks; an exception of a callback is logged."""
    try:
        if error is None:
            future.set_result(value)
        else:
            _end_as_theirs(error)
            future.set_exception(error)
    except InvalidStateError:  # the user has ended it
        pass
    except BaseException as raised:  # a callback raised it; the standard library itself logs only Exceptions
        _report_callback(future, raised)


def _report_callback(future: Future[Any], raised: BaseException) -> None:
    report(logging.ERROR, "a callback of %r raised", future, exc_info=raised)


def _end_as_theirs(error: BaseException) -> None:
    """Replace the RemoteTraceback in the error's `__cause__` chain, if it has one, by the standard library's _RemoteTraceback.

    This runs no user code: the class of the error may refuse to set attributes (a frozen dataclass), and the future must end.
    """
    from percore._serialization.exception_state import CAUSE  # imported by now; the first call need not wait for it

    seen = set()
    while id(error) not in seen:
        seen.add(id(error))
        cause = CAUSE.__get__(error)
        if type(cause) is RemoteTraceback:
            from concurrent.futures.process import _RemoteTraceback  # likewise

            CAUSE.__set__(error, _RemoteTraceback(cast(Any, str(cause))))
            return
        if cause is None:
            return
        error = cause
