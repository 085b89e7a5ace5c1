"""Injected faults: an exception, or other code, at the entry of one of the functions that are called meanwhile."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any


class Fault(OSError):
    """The injected exception."""


class Strike:
    """Strikes at the entry of one function, while it is on."""

    def __init__(self, at: int, counts: Callable[[CodeType], bool], does: Callable[[], object] | None = None) -> None:
        """`at`: which of the called functions that count, from 0. `does`: called there, as by a garbage collection; None: raise."""
        self._left = at
        self._counts = counts
        self._does = does
        self.is_armed = True
        """Whether `on` has an effect."""
        self.name = ""
        """The function that was hit; empty as long as none was."""

    def _called(self, frame: FrameType, event: str, _argument: Any) -> None:
        if event != "call" or not self._counts(frame.f_code):
            return
        if self._left == 0 and not self.name:
            self.name = frame.f_code.co_qualname
            if self._does is not None:
                self._does()
                return
            raise Fault(f"injected into {self.name}")
        self._left -= 1

    @contextlib.contextmanager
    def on(self) -> Iterator[None]:
        before = sys.gettrace()
        sys.settrace(self._called if self.is_armed and not self.name else before)
        try:
            yield
        finally:
            sys.settrace(before)
