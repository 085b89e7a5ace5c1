"""`percore top` beside a program that was not prepared for it: as text, as JSON, and at a terminal with its keys."""

import json
import os
import pty
import signal
import subprocess
import sys
import termios
from collections.abc import Iterator

import pytest

from percore._attach.programs import ProgramGone, read
from percore._common.system import HAS_MEMFD
from tests.watching import page, pids, running, until

pytestmark = pytest.mark.skipif(not HAS_MEMFD, reason="pages are memfds")
TOP = [sys.executable, "-m", "percore", "top"]


@pytest.fixture(scope="module")
def program() -> Iterator[int]:
    """The pid of a program, which runs for all tests."""
    with running() as pid:
        yield pid


@pytest.fixture
def own_program() -> Iterator[int]:
    """The pid of a program of which a test may recycle workers."""
    with running() as pid:
        yield pid


def run(*arguments: object, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [*TOP, *map(str, arguments)]
    return subprocess.run(command, env=os.environ | variables, capture_output=True, text=True, check=False)


def test_programs_are_listed(program: int) -> None:
    assert any(line.split()[:2] == [str(program), "top_program.py"] for line in run(COLUMNS="200").stdout.splitlines())
    assert program in [one["pid"] for one in json.loads(run("--json").stdout)]


def test_one_view_as_text_and_as_json(program: int) -> None:
    text = run(program, "--once", COLUMNS="160").stdout
    assert "2 workers" in text
    assert "__main__.fetch" in text
    view = json.loads(run(program, "--json").stdout)
    assert {worker["figures"]["pid"] for worker in view["workers"]} == set(pids(program))
    assert all(worker["usage"]["rss"] > 0 for worker in view["workers"])
    functions = {one["figures"]["name"]: one for one in view["functions"]}
    assert functions["__main__.fetch"]["calls"] > 0
    assert functions["__main__.block"]["figures"]["running"] == 1
    assert any(call["name"] == "__main__.block" for worker in view["workers"] for call in worker["figures"]["current"])


def test_workers_that_are_threads_have_cpu_of_their_own() -> None:
    with running("threads") as pid:
        workers = json.loads(run(pid, "--json").stdout)["workers"]
    computes = [any(call["name"] == "__main__.compute" for call in one["figures"]["current"]) for one in workers]
    (busy,), (idle,) = (
        [one for one, is_busy in zip(workers, computes, strict=True) if is_busy is wanted] for wanted in (True, False)
    )
    assert busy["usage"]["cpu"] > idle["usage"]["cpu"]
    for one in (busy, idle):
        assert one["figures"]["pid"] is None
        assert one["usage"]["threads"] == len(one["figures"]["thread_ids"])
    assert busy["usage"]["threads"] >= 2  # its loop's, and the one that computes


def test_what_is_no_program_of_percore_is_told() -> None:
    done = run(max(1, os.getppid()), "--once")
    assert done.returncode == 1
    assert "has no runner that can be watched" in done.stderr
    with subprocess.Popen([sys.executable, "-c", ""]) as ended:
        ended.wait()
    assert f"process {ended.pid} has ended" in run(ended.pid).stderr
    with pytest.raises(ProgramGone):
        read(ended.pid)


@pytest.mark.parametrize("interval", ["1e10", "0", "soon"])
def test_an_interval_that_is_none_is_refused(interval: str) -> None:
    done = run("1", "--interval", interval)
    assert done.returncode == 2
    assert "a number of seconds from 0.1 to 3600" in done.stderr


class Terminal:
    """`percore top` at a terminal of its own."""

    def __init__(self, program: int) -> None:
        self._pid, self._fd = pty.fork()
        if not self._pid:
            os.environ |= {"TERM": "xterm", "COLUMNS": "150", "LINES": "200"}
            os.execv(sys.executable, [*TOP, str(program), "--interval", "0.1"])
        self._shown = ""

    def shows(self, text: str) -> None:
        """Wait until the terminal shows this, after what was waited for before."""
        while text not in self._shown:
            self._shown += os.read(self._fd, 65536).decode(errors="replace")
        self._shown = self._shown.partition(text)[2]

    def press(self, keys: str) -> None:
        os.write(self._fd, keys.encode())

    def terminate(self) -> None:
        os.kill(self._pid, signal.SIGTERM)

    def end(self) -> int:
        """Return the exit code, once the program has ended and left the terminal as it was."""
        try:
            while data := os.read(self._fd, 65536):
                self._shown += data.decode(errors="replace")
        except OSError:  # EIO: nobody has the other end any more
            pass
        assert "\x1b[?1049l" in self._shown  # it has left the alternate screen
        assert termios.tcgetattr(self._fd)[3] & (termios.ECHO | termios.ICANON) == termios.ECHO | termios.ICANON
        os.close(self._fd)
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])


def test_the_keys(own_program: int) -> None:
    program = own_program
    terminal = Terminal(program)
    terminal.shows("q quit")
    terminal.press("o")
    terminal.shows("sorted by %CPU")
    terminal.press("p")
    terminal.shows("paused")
    terminal.press("p")
    terminal.shows("q quit")
    blocked = next(worker for worker in page(program)["workers"] if any("block" in call["name"] for call in worker["current"]))
    terminal.press("s")
    terminal.shows("which worker")
    terminal.press(f"{blocked['index']}\n")
    terminal.shows("any key goes back")
    terminal.shows("in block")  # the frame of the function in its thread
    terminal.press("x")
    terminal.shows("q quit")
    other = 1 - blocked["index"]
    before = pids(program)[other]
    terminal.press("r")
    terminal.shows("which worker")
    terminal.press(f"{other}\n")
    terminal.shows("was asked to end")
    until(lambda: pids(program)[other] not in {before, None})
    terminal.press("s")
    terminal.shows("which worker")
    terminal.press("7\n")
    terminal.shows("there is no worker 7")
    terminal.press("q")
    assert terminal.end() == 0


def test_sigterm_leaves_the_terminal_as_it_was(program: int) -> None:
    terminal = Terminal(program)
    terminal.shows("q quit")
    terminal.terminate()
    assert terminal.end() == 128 + signal.SIGTERM


def test_a_stopped_program_is_told_as_blocked(program: int) -> None:
    os.kill(program, signal.SIGSTOP)
    try:
        until(lambda: json.loads(run(program, "--json").stdout)["blocked_for"] > 0)
    finally:
        os.kill(program, signal.SIGCONT)
