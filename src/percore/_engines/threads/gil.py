"""The GIL, as the engine of threads sees it: whether it lets only one thread run, and which import has turned it on."""

import logging
import sys
from importlib.machinery import EXTENSION_SUFFIXES
from typing import Final

from percore._common.log import report
from percore._common.system import IS_FREE_THREADED, has_gil

_MOST_NAMES: Final = 5


class GilWatch:
    """Watches whether an import turns the GIL on: Python does so for an extension module that was not made to run without it."""

    def __init__(self) -> None:
        self._is_watching = not has_gil()
        self._before = _extensions() if self._is_watching else set()

    def look(self) -> None:
        """Tell that the GIL is on again, with the names of the modules that have come since the last look. Once."""
        if not self._is_watching:
            return
        now = _extensions()
        if not has_gil():
            self._before = now
            return
        self._is_watching = False
        names = sorted(now - self._before)
        shown = ", ".join(names[:_MOST_NAMES]) + (" and others" if len(names) > _MOST_NAMES else "")
        report(
            logging.WARNING,
            "an import has turned the GIL on again, so only one thread runs at a time from now on%s",
            f": {shown}" if names else "",
        )


def _extensions() -> set[str]:
    """Return the names of the extension modules that are loaded."""
    suffixes = tuple(EXTENSION_SUFFIXES)
    found = ((name, getattr(module, "__file__", None)) for name, module in list(sys.modules.items()))
    return {name for name, file in found if isinstance(file, str) and file.endswith(suffixes)}


def one_at_a_time() -> str:
    """Return why only one thread runs at a time; empty if they run at once."""
    if not has_gil():
        return ""
    if IS_FREE_THREADED:
        return "the GIL of this Python is on: an import, or PYTHON_GIL=1, has turned it on"
    return "this Python has a GIL: use a free-threaded one, such as python3.14t"
