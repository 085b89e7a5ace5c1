"""How an executor starts and ends the standard library's futures.

Users may set or cancel a future themselves at any time. The functions here raise nothing if they have done so.
"""

import logging
from concurrent.futures import Future, InvalidStateError
from concurrent.futures.process import _RemoteTraceback
from typing import Any, Final, cast

from percore._errors import RemoteTraceback

logger: Final = logging.getLogger("percore")


def begins(future: Future[Any]) -> bool:
    """Mark the future as running. False: it was cancelled or has already ended, so the call must not run."""
    try:
        return future.set_running_or_notify_cancel()
    except RuntimeError:  # the user has ended it; the standard library has logged that
        return False


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
    except BaseException:  # a callback raised it; the standard library itself logs only Exceptions
        logger.exception("percore: a callback of %r raised", future)


def _end_as_theirs(error: BaseException) -> None:
    """Replace the RemoteTraceback in the error's `__cause__` chain, if it has one, by the standard library's _RemoteTraceback."""
    seen = set()
    while id(error) not in seen:
        seen.add(id(error))
        cause = error.__cause__
        if type(cause) is RemoteTraceback:
            suppress = error.__suppress_context__
            error.__cause__ = _RemoteTraceback(cast(Any, str(cause)))
            error.__suppress_context__ = suppress
            return
        if cause is None:
            return
        error = cause
