"""Where the progress of maps is shown: by rich at a terminal, by tqdm in a notebook, otherwise as lines of text.

The libraries are imported when they are first needed. Everything is written to standard error.
"""

from __future__ import annotations

import sys
import threading
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final, Literal, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable

    from percore._monitor.progress import Progress

_OFTEN: Final = 0.1
_MINUTE: Final = 60.0


class Display(Protocol):
    """Something that shows progress."""

    seconds: float
    """Seconds between two calls of `show`."""

    def show(self, progress: Progress, /) -> None:
        """Show this. The last time, `progress.is_over` is true: then release everything."""


def automatic() -> Display:
    """Return the display that suits the program: a notebook's, a terminal's, or lines."""
    chosen = choose(is_notebook=_is_notebook(), is_terminal=_is_terminal(), has=lambda name: find_spec(name) is not None)
    kinds: dict[str, Callable[[], Display]] = {"tqdm": Bar, "rich": RichBar, "line": Line, "lines": Lines}
    return kinds[chosen]()


def lines() -> Display:
    """Return a display of a line each minute."""
    return Lines()


def choose(*, is_notebook: bool, is_terminal: bool, has: Any) -> Literal["tqdm", "rich", "line", "lines"]:
    """Choose a display. `has(name)` says whether a library is installed."""
    if is_notebook and has("tqdm"):
        return "tqdm"
    if is_terminal:
        return "rich" if has("rich") else "tqdm" if has("tqdm") else "line"
    return "lines"


def _is_notebook() -> bool:
    ipython: Any = sys.modules.get("IPython")
    shell = None if ipython is None else ipython.get_ipython()
    return shell is not None and "IPKernelApp" in shell.config


def _is_terminal() -> bool:
    return sys.stderr is not None and sys.stderr.isatty()


class Lines:
    """A line each minute, and one at the end: for a log."""

    seconds = _MINUTE

    def show(self, progress: Progress) -> None:
        if progress.is_over or progress.seconds >= _MINUTE / 2:  # the first report has nothing to say
            _write(f"{progress}\n")


class Line:
    """One line of a terminal, written again and again."""

    seconds = _OFTEN

    def __init__(self) -> None:
        self._width = 0

    def show(self, progress: Progress) -> None:
        text = str(progress)
        _write("\r" + text.ljust(self._width) + "\n" * progress.is_over)
        self._width = len(text)


class Bar:
    """A bar of tqdm."""

    seconds = _OFTEN

    def __init__(self) -> None:
        self._bar: Any = None

    def show(self, progress: Progress) -> None:
        if self._bar is None:
            theirs: Any = import_module("tqdm.auto").tqdm
            make = type(theirs.__name__, (theirs,), {"monitor_interval": 0})  # else a thread would refresh it, for ever
            self._bar = make(desc=progress.function, total=progress.total, file=None if _is_notebook() else sys.stderr)
        self._bar.update(progress.done - self._bar.n)
        self._bar.set_postfix_str(_more(progress))
        if progress.is_over:
            self._bar.close()


class RichBar:
    """A line of the bars that rich shows. Maps that run at the same time share one display, since a terminal has room for one."""

    seconds = _OFTEN
    _lock: Final = threading.RLock()
    """Reentrant: while a bar is drawn, a garbage collection may end a map whose task nobody refers to."""
    _shared: Any = None
    _maps = 0
    """How many maps are shown now."""

    def __init__(self) -> None:
        self._task: Any = None

    def show(self, progress: Progress) -> None:
        with self._lock:
            if self._task is None:
                self._begin(progress)
            shown = RichBar._shared
            more = _more(progress)
            total = progress.done if progress.is_over and progress.total is None else progress.total
            shown.update(self._task, completed=progress.done, total=total, speed=progress.rate or 0.0, more=more)
            shown.refresh()
            if progress.is_over:
                self._end()

    def _begin(self, progress: Progress) -> None:
        if RichBar._maps == 0:
            RichBar._shared = _rich_bars()
            RichBar._shared.start()
        RichBar._maps += 1
        self._task = RichBar._shared.add_task(progress.function, total=progress.total, speed=0.0, more="")

    def _end(self) -> None:
        RichBar._maps -= 1
        if RichBar._maps == 0:
            shown, RichBar._shared = RichBar._shared, None
            shown.stop()


def _rich_bars() -> Any:
    rich: Any = import_module("rich.progress")
    console: Any = import_module("rich.console").Console(stderr=True)
    columns = (
        rich.TextColumn("{task.description}"),
        rich.BarColumn(),
        rich.MofNCompleteColumn(),
        rich.TextColumn("{task.fields[speed]:,.1f}/s"),
        rich.TimeElapsedColumn(),
        rich.TimeRemainingColumn(),
        rich.TextColumn("{task.fields[more]}"),
    )
    return rich.Progress(*columns, console=console, auto_refresh=False)


def _write(text: str) -> None:
    if sys.stderr is not None:  # a program without a console has none
        sys.stderr.write(text)
        sys.stderr.flush()


def _more(progress: Progress) -> str:
    """Return what bars do not show by themselves."""
    busy = "" if progress.is_over else f"{progress.busy} of {progress.workers} workers busy"
    return ", ".join(filter(None, (f"{progress.failed} failed" if progress.failed else "", busy)))
