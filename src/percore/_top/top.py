"""The command `percore top`: lists programs, shows one once, or shows it again and again and takes keys."""

import json
import os
import select
import signal
import sys
import termios
import time
import tty
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from functools import partial
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from percore._attach.programs import ProgramGone, programs, read, why_refused
from percore._attach.stacks import NoStacks, is_worker, stacks_of
from percore._monitor.views import Model, View, Worker
from percore._top.screen import draw, orders, printable

_HINT: Final = "s stacks of a worker   r recycle a worker   o sort   w functions by worker   p pause   q quit"
_BETWEEN: Final = 0.6
"""Seconds between the two readings of `--once`: the program writes its page every half second while it has calls."""


def top(pid: int | None, *, interval: float, once: bool, as_json: bool, by_worker: bool) -> int:
    """Run the command. Return its exit status: 1 if there is no such program."""
    console = Console()
    if pid is None:
        return _list(console, as_json=as_json)
    model = Model(pid)
    try:
        view = model.view(read(pid))
        if once or as_json or sys.stdin is None or not sys.stdin.isatty() or not console.is_terminal:
            show = _json if as_json else partial(_text, console, by_worker=by_worker)
            return _without_terminal(model, show, None if once or as_json else interval)
        _Screen(console, model, interval, by_worker=by_worker).run(view)
    except ProgramGone:
        return _gone(pid)
    except PermissionError:
        return _failed(f"process {pid} {why_refused(pid)}: percore top shows what the system shows to this user")
    return 0


def _list(console: Console, *, as_json: bool) -> int:
    found = programs()
    if as_json:
        print(json.dumps([asdict(one) for one in found]))
        return 0
    if not found:
        return _failed(
            "no program of this user runs a percore runner that can be watched: none runs, it has PERCORE_METRICS=0, its first "
            "half second is not over, or its system has no memfd; or it has Runner(harden=True), and only root sees it"
        )
    for one in found:
        line = Text(printable(f"{one.pid:>8}  {one.name}  {one.command}"))
        if console.is_terminal:
            line.truncate(console.width, overflow="ellipsis")
        console.print(line, soft_wrap=True)  # one line for each, of any length
    console.print(Text("watch one of them: percore top PID", style="dim"))
    return 0


def _without_terminal(model: Model, show: Callable[[View], None], interval: float | None) -> int:
    """Show a view; unless `interval` is None, one after the other until the program ends."""
    while True:
        time.sleep(max(interval or 0.0, _BETWEEN))
        show(model.view(read(model.pid)))
        if interval is None:
            return 0


def _json(view: View) -> None:
    print(json.dumps(asdict(view)), flush=True)


def _text(console: Console, view: View, *, by_worker: bool) -> None:
    console.print(draw(view, console.width, by_worker=by_worker))
    console.file.flush()


def _gone(pid: int) -> int:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return _failed(f"process {pid} has ended")
    except PermissionError:
        pass
    return _failed(
        f"process {pid} has no runner that can be watched: it has closed it or has not started one for half a second yet, has "
        "PERCORE_METRICS=0, or its system has no memfd"
    )


def _failed(text: str) -> int:
    print(f"percore top: {text}", file=sys.stderr)
    return 1


class _Screen:
    """The refreshing view, and its keys."""

    def __init__(self, console: Console, model: Model, interval: float, *, by_worker: bool = False) -> None:
        self._console = console
        self._model = model
        self._interval = interval
        self._order = ""
        self._by_worker = by_worker
        self._hint = _HINT
        self._is_paused = False
        self._asks = ""
        """The key whose worker is to be chosen by its number; empty: none."""
        self._number = ""

    def run(self, view: View) -> None:
        """Show the program until `q`, Ctrl-C or its end.

        Raises:
            ProgramGone: it has ended.
        """
        with single_keys(), Live(console=self._console, screen=True, auto_refresh=False, vertical_overflow="crop") as live:
            while True:
                live.update(self._drawn(view), refresh=True)
                key = key_within(self._interval)
                if key == "q":
                    return
                if self._asks:
                    self._choose(key, view, live)
                elif key:
                    self._pressed(key)
                if not self._is_paused:
                    view = self._model.view(read(self._model.pid))

    def _drawn(self, view: View) -> RenderableType:
        return draw(view, self._console.width, self._order, self._hint, by_worker=self._by_worker)

    def _pressed(self, key: str) -> None:
        if key == "p":
            self._is_paused = not self._is_paused
            self._hint = "paused: p goes on" if self._is_paused else _HINT
        elif key == "o":
            names = ["", *orders()]
            self._order = names[(names.index(self._order) + 1) % len(names)]
            self._hint = f"sorted by {self._order}" if self._order else _HINT
        elif key == "w":
            self._by_worker = not self._by_worker
        elif key in ("s", "r"):
            self._asks, self._number = key, ""
            self._hint = f"{'stacks of' if key == 's' else 'recycle'} which worker? its number (with two runners: PID), then Enter"

    def _choose(self, key: str, view: View, live: Live) -> None:
        if key.isdecimal():
            self._number += key
            self._hint = f"{self._hint.partition(':')[0]}: {self._number}"
            return
        if not key:
            return
        asked, self._asks, self._hint = self._asks, "", _HINT
        if key not in ("\n", "\r"):
            return
        name = "index" if len({one.runner for one in view.workers}) == 1 else "pid"  # runners number their workers alike
        worker = next((one for one in view.workers if str(one.figures[name]) == self._number), None)
        if worker is None or not (worker.figures["pid"] or worker.figures.get("thread_ids")):
            self._hint = f"there is no worker {self._number or '(no number)'}"
        elif worker.figures.get("thread_ids"):
            self._hint = f"worker {self._number} is a thread of the program: percore top can ask and end processes alone"
        elif worker.node:
            self._hint = f"worker {self._number} is on node {worker.node}: percore top can ask and end those of this machine alone"
        elif asked == "s":
            self._show_stacks(worker, live)
        else:
            self._hint = recycle(worker)

    def _show_stacks(self, worker: Worker, live: Live) -> None:
        pid = worker.figures["pid"]
        try:
            stacks = stacks_of(pid)
        except NoStacks as error:
            self._hint = str(error)
            return
        lines, height = printable(stacks).splitlines(), max(1, self._console.height - 2)
        for first in range(0, len(lines), height):
            goes = "shows more, q goes back" if first + height < len(lines) else "goes back"
            head = Text(f"worker {worker.figures['index']} ({pid}): any key {goes}", style="bold", no_wrap=True)
            shown = Text("\n".join(lines[first : first + height]), no_wrap=True, overflow="ellipsis")
            live.update(Group(head, shown), refresh=True)
            while not (key := key_within(3600.0)):
                pass
            if key == "q":
                return


def recycle(worker: Worker) -> str:
    """Ask a worker to end, as SIGTERM does to any: it finishes its calls, and another one takes its place. Return what was done."""
    index, pid = worker.figures["index"], worker.figures["pid"]
    if not is_worker(pid):  # the page may be old, and the system gives process ids again
        return f"worker {index} ({pid}) has ended already"
    try:
        os.kill(pid, signal.SIGTERM)
    except ProcessLookupError:
        return f"worker {index} ({pid}) has ended already"
    except PermissionError:
        return f"worker {index} ({pid}) belongs to another user"
    return f"worker {index} ({pid}) was asked to end"


# Keys


@contextmanager
def single_keys() -> Iterator[None]:
    """Pass on each key at once and do not show it, until the block ends. Ctrl-C raises KeyboardInterrupt as before.

    SIGTERM ends the program by SystemExit, so that the terminal is as before.
    """
    before = termios.tcgetattr(sys.stdin)
    on_sigterm = signal.signal(signal.SIGTERM, _exit)
    try:
        tty.setcbreak(sys.stdin)
        yield
    finally:
        termios.tcsetattr(sys.stdin, termios.TCSADRAIN, before)
        signal.signal(signal.SIGTERM, on_sigterm)


def _exit(signum: int, _frame: object) -> None:
    sys.exit(128 + signum)


def key_within(seconds: float) -> str:
    """Return the next key, or an empty string if none was pressed within so many seconds."""
    end = time.monotonic() + seconds
    while (left := end - time.monotonic()) > 0:
        ready, _, _ = select.select([sys.stdin], [], [], min(left, 3600.0))
        if ready:
            pressed = os.read(sys.stdin.fileno(), 1).decode(errors="replace")
            return pressed or "q"  # the terminal has gone
    return ""
