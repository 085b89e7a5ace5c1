"""Faults of percore itself, or of what it stands on, where it has to go on all the same."""

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager
from types import TracebackType

from percore._reports import report


class Faults(AbstractContextManager[None]):
    """Keeps steps apart: whatever one of them raises, the others are taken.

        faults = Faults("worker 1 was replaced")
        for call in calls:
            with faults:
                end(call)
        faults.finish()

    Each fault is logged with its traceback. One that is no Exception, such as a KeyboardInterrupt, is raised by `finish`.
    """

    def __init__(self, when: str) -> None:
        """`when`: what percore did, for the log: "while ..."."""
        self.when = when
        self._interrupt: BaseException | None = None
        self.last: BaseException | None = None
        """What the last step has raised."""

    def __enter__(self) -> None:
        self.last = None

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> bool:
        if error is None:
            return False
        self.note(error)
        return True

    def surely(self, step: Callable[[], object]) -> None:
        """Take a step that can be taken again: once more, if it fails."""
        with self:
            step()
        if self.last is not None:
            with self:
                step()

    def note(self, error: BaseException) -> None:
        """A step has raised this."""
        self.last = error
        if not isinstance(error, Exception):
            self._interrupt = self._interrupt or error
            return
        try:
            report(logging.ERROR, "an internal error while %s; percore goes on", self.when, exc_info=error)
        except BaseException as other:  # an interrupt in the midst of a handler
            self._interrupt = self._interrupt or other

    def finish(self) -> None:
        """All steps were taken.

        Raises:
            BaseException: the first fault that is no Exception.
        """
        interrupt, self._interrupt, self.last = self._interrupt, None, None  # whose traceback has the frame that has this object
        if interrupt is not None:
            raise interrupt
