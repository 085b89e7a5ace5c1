"""percore's log messages, and the isolation of internal errors (of percore or of the system) in steps that must all run."""

import logging
import os
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Final, Protocol

_logger: Final = logging.getLogger("percore")
_reporter: Final = logging.NullHandler()


class Subject(Protocol):
    """A worker that a message is about."""

    index: int

    @property
    def pid(self) -> int | None: ...


def report(
    level: int, text: str, *args: object, of: Subject | None = None, exc_info: BaseException | None = None, stacklevel: int = 2
) -> None:
    """Log a message of the program's process. Its record has the attributes `worker` (an index, or None) and `pid`.

    An Exception from the user's handlers or filters is not raised, since supervision must go on. It is reported in the way
    `logging` reports errors of handlers.

    Args:
        level: the level.
        text: the message.
        args: for the placeholders in `text`.
        of: the worker that the message is about. None: it is about the program.
        exc_info: an exception to log with its traceback.
        stacklevel: 2 for the caller of this function, as `logging` counts.
    """
    text = "percore: " + text  # without configuration, `logging` writes only the text, which must name its source
    try:
        if _logger.isEnabledFor(level):
            about = {"worker": None, "pid": os.getpid()} if of is None else {"worker": of.index, "pid": of.pid}
            _logger.log(level, text, *args, exc_info=exc_info, extra=about, stacklevel=stacklevel)
    except Exception:
        _reporter.handleError(logging.LogRecord(_logger.name, level, __file__, 0, text, args, None))


class Faults(AbstractContextManager[None]):
    """Context manager that isolates steps from each other: an exception from one step does not prevent the others.
        faults = Faults("worker 1 was replaced")
        for call in calls:
            with faults:
                end(call)
        faults.finish()

    Each Exception is logged with its traceback. `finish` raises the first exception that is no Exception, such as a
    KeyboardInterrupt.
    """

    def __init__(self, when: str) -> None:
        """`when`: completes the log message "an internal error while ..."."""
        self.when = when
        self._interrupt: BaseException | None = None
        self.last: BaseException | None = None
        """The exception of the last step; None if it raised none."""

    def __enter__(self) -> None:
        self.last = None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> bool:
        if error is None:
            return False
        self.note(error)
        return True

    def surely(self, step: Callable[[], object]) -> None:
        """Run a step that may safely run twice, and run it again if it fails."""
        with self:
            step()
        if self.last is not None:
            with self:
                step()

    def run(self, *steps: Callable[[], object]) -> None:
        """Run each of these steps, then `finish`."""
        for step in steps:
            with self:
                step()
        self.finish()

    def note(self, error: BaseException) -> None:
        """Log an exception that a step has raised, or keep it for `finish` if it is no Exception."""
        self.last = error
        if not isinstance(error, Exception):
            self._interrupt = self._interrupt or error
            return
        try:
            report(logging.ERROR, "an internal error while %s; percore goes on", self.when, exc_info=error)
        except BaseException as other:  # such as a KeyboardInterrupt while a log handler runs
            self._interrupt = self._interrupt or other

    def finish(self) -> None:
        """Raise the first exception that is no Exception, if any. To be called after the last step.

        Raises:
            BaseException: that exception.
        """
        interrupt, self._interrupt, self.last = self._interrupt, None, None  # break the reference cycle through its traceback
        if interrupt is not None:
            raise interrupt
