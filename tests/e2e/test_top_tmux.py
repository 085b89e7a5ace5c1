"""`percore top` in a real terminal: tmux, whose panes change their size, with and without colours."""

import os
import shlex
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from percore._common.system import HAS_MEMFD
from tests.watching import page, running, until

pytestmark = [
    pytest.mark.skipif(not HAS_MEMFD, reason="pages are memfds"),
    pytest.mark.skipif(shutil.which("tmux") is None, reason="no tmux here: apt install tmux"),
]
RED = "\x1b[1m\x1b[31m"
"""Bold and red, as tmux writes it."""


class Pane:
    """A terminal of tmux with one program in it."""

    def __init__(self, socket: Path) -> None:
        self._socket = socket

    def tmux(self, *arguments: str) -> str:
        command = ["tmux", "-S", str(self._socket), "-f", os.devnull, *arguments]
        environment = {name: value for name, value in os.environ.items() if name not in ("TMUX", "NO_COLOR", "COLUMNS", "LINES")}
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout

    def shown(self) -> str:
        return self.tmux("capture-pane", "-p")

    def styled(self) -> str:
        return self.tmux("capture-pane", "-p", "-e")

    def shows(self, *texts: str) -> None:
        def is_shown() -> bool:
            shown = self.shown()
            return all(text in shown for text in texts)

        until(is_shown, pause=0.05)  # a look is a process

    def press(self, keys: str) -> None:
        self.tmux("send-keys", "-l", keys)

    def resize(self, width: int, height: int) -> None:
        self.tmux("resize-window", "-x", str(width), "-y", str(height))


@contextmanager
def top(folder: Path, program: int, **variables: str) -> Iterator[Pane]:
    """Run `percore top` in a pane of 150 columns."""
    pane = Pane(folder / "tmux")
    environment = [f"{name}={value}" for name, value in variables.items()]
    command = ["env", *environment, sys.executable, "-m", "percore", "top", str(program), "--interval", "0.1"]
    # The shell that follows keeps the pane when `percore top` has ended.
    pane.tmux("new-session", "-d", "-x", "150", "-y", "40", f"{shlex.join(command)}; echo ended with $?; exec cat")
    try:
        yield pane
    finally:
        pane.tmux("kill-server")


@pytest.fixture(scope="module")
def program() -> Iterator[int]:
    with running() as pid:
        yield pid


def fits(lines: list[str], width: int) -> bool:
    """Whether this is a screen of `percore top` drawn for this width. Its first line is the program: nothing has scrolled."""
    has_memory = any("USS" in line for line in lines)
    return "top_program.py" in lines[0] and has_memory == (width >= 100) and max(map(len, lines)) <= width


@pytest.mark.timeout(120)  # tmux is asked again and again, by a process each time
def test_every_size_and_the_keys(program: int, tmp_path: Path) -> None:
    with top(tmp_path, program) as pane:
        pane.shows("top_program.py", "USS", "__main__.fetch", "q quit")
        for width, height in ((40, 20), (300, 60), (40, 4), (150, 40)):
            pane.resize(width, height)
            until(lambda width=width: fits(pane.shown().splitlines(), width), pause=0.05)  # type: ignore[misc]
        pane.press("w")
        pane.shows("  worker 0", "  worker 1")
        blocked = next(worker for worker in page(program)["workers"] if any("block" in one["name"] for one in worker["current"]))
        pane.press("s")
        pane.shows("which worker")
        pane.press(f"{blocked['index']}\n")
        pane.shows("any key", "in block")
        pane.press("q")
        pane.shows("q quit")
        pane.press("q")
        pane.shows("ended with 0")
        assert "top_program.py" not in pane.shown()  # the screen of before is back


def test_a_blocked_program_is_red_and_told_without_colors_too(program: int, tmp_path: Path) -> None:
    plain_folder = tmp_path / "plain"
    plain_folder.mkdir()
    with top(tmp_path, program) as colored, top(plain_folder, program, NO_COLOR="1") as plain:
        for pane in (colored, plain):
            pane.shows("__main__.fetch")
        os.kill(program, signal.SIGSTOP)
        try:
            for pane in (colored, plain):
                pane.shows("event loop has been blocked for")
            assert RED in colored.styled()
            assert not any(f"\x1b[{color}m" in plain.styled() for color in range(30, 38))
        finally:
            os.kill(program, signal.SIGCONT)
        until(lambda: "has been blocked" not in colored.shown(), pause=0.05)
