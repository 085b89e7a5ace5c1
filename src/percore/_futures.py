"""Futures of the standard library, as an executor ends them: whatever their owner has done to one meanwhile, nothing is raised."""

import logging
from concurrent.futures import Future, InvalidStateError
from concurrent.futures.process import _RemoteTraceback
from typing import Any, Final, cast

from percore._errors import RemoteTraceback

logger: Final = logging.getLogger("percore")


def begins(future: Future[Any]) -> bool:
    """Whether it runs from now on: nobody has cancelled it."""
    try:
        return future.set_running_or_notify_cancel()
    except RuntimeError:  # whoever has it has ended it himself, and the standard library has logged that
        return False


def resolve(future: Future[Any], value: Any, error: BaseException | None) -> None:
    """End it with a result, or with an error. Runs its callbacks; what they raise is logged."""
    try:
        if error is None:
            future.set_result(value)
        else:
            _end_as_theirs(error)
            future.set_exception(error)
    except InvalidStateError:  # whoever has it has ended it himself
        pass
    except BaseException:  # the standard library logs an Exception of a callback itself
        logger.exception("percore: a callback of %r raised", future)


def _end_as_theirs(error: BaseException) -> None:
    """The remote traceback as the standard library's class, where there is one."""
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
