"""Injected faults: an exception, or other code, at the entry of one of the functions called meanwhile, or after a built-in one."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from types import CodeType, FrameType
from typing import Any


class Fault(OSError):
    """The injected exception."""


class Strike:
    """Strikes at the entry of one function, while it is on."""

    def __init__(
        self, at: int, counts: Callable[[CodeType], bool], does: Callable[[], object] | None = None, *, after_builtins: bool = False
    ) -> None:
        """`at`: which of the called functions that count, from 0. `does`: called there, as by a garbage collection; None: raise.

        `after_builtins`: as a Ctrl-C does, when a built-in function that one of these functions has called returns.
        """
        self._left = at
        self._counts = counts
        self._does = does
        self._event = "c_return" if after_builtins else "call"
        self.is_armed = True
        """Whether `on` has an effect."""
        self.name = ""
        """The function that was hit; empty as long as none was."""

    def _called(self, frame: FrameType, event: str, _argument: Any) -> None:
        if event != self._event or not self._counts(frame.f_code):
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
        hooks: tuple[Callable[[], Any], Callable[[Any], object]]
        hooks = (sys.gettrace, sys.settrace) if self._event == "call" else (sys.getprofile, sys.setprofile)
        before, put = hooks[0](), hooks[1]
        put(self._called if self.is_armed and not self.name else before)
        try:
            yield
        finally:
            put(before)
