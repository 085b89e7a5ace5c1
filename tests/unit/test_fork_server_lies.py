"""Reports and descriptors that no healthy fork server sends: that launch ends, once, and nothing else happens.

The launcher's side is real, with its sockets and a real loop. The test has the other end of the socket of each request.
"""

import asyncio
import errno
import os
import random
import signal
import socket
import subprocess
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Final

import pytest

from percore._engines.processes.engine import ProcessWorker
from percore._engines.processes.fork_server_launcher import ForkedProcess, _Request
from percore._engines.processes.fork_servers import NoRoom, servers
from percore._engines.processes.launch import ENTRY
from percore._protocol.messages import BrokenFrame
from percore._worker_process.world import BORN, EXITED, FAILED, REPORT, World, read_world
from tests.counts import times
from tests.waiting import until

pytestmark = pytest.mark.asyncio_only

KINDS: Final = (BORN, BORN, BORN, EXITED, FAILED, 0, 4, 255)
VALUES: Final = (0, 1, -1, -9, 77, 2**31 - 1, -(2**31))


class Launch:
    """A launch whose fork server is the test."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.ends: list[int | None] = []
        sent: list[int] = []

        def send(_preload: str, fds: list[Any]) -> None:
            sent.append(os.dup(fds[0].fileno()))

        with monkeypatch.context() as patched:
            patched.setattr(servers, "send", send)
            launcher: Any = type("Launcher", (), {"preload": ""})()
            self.process = ForkedProcess(asyncio.get_running_loop(), launcher, _Request(ENTRY, b"", []), self.ends.append)
        self.server = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET, 0, sent[0])

    def tell(self, data: bytes, *fds: int) -> None:
        """Send a report. The test keeps no descriptor."""
        try:
            socket.send_fds(self.server, [data], fds)
        except (BrokenPipeError, ConnectionResetError):  # it listens no more
            pass
        finally:
            for fd in fds:
                os.close(fd)

    @property
    def is_cut(self) -> bool:
        """Whether the lifeline is cut, so that a worker which was forked all the same dies."""
        return self.process._request.lifeline.number < 0

    async def over(self) -> None:
        """Let the fork server be silent for ever, and wait for the end of the launch."""
        self.server.close()
        async with asyncio.timeout(30):
            await until(self._has_ended)

    def _has_ended(self) -> bool:
        self.process.kill()  # as a close does
        return bool(self.ends)


@pytest.fixture
def launch(monkeypatch: pytest.MonkeyPatch) -> Callable[[], Launch]:
    return lambda: Launch(monkeypatch)


def dead() -> int:
    """The pidfd of a process that has ended."""
    with subprocess.Popen(["true"]) as child:
        return os.pidfd_open(child.pid)


def pipe() -> int:
    """The read end of a pipe that is readable for ever, as the pidfd of a dead process."""
    read_end, write_end = os.pipe()
    os.close(write_end)
    return read_end


DESCRIPTORS: Final[dict[str, Callable[[], int]]] = {
    "none": lambda: -1,
    "a file": lambda: os.open(os.devnull, os.O_RDONLY),
    "a pipe": pipe,
    "an eventfd": lambda: os.eventfd(0),
    "a pidfd": dead,
}


def report(kind: int, value: int) -> bytes:
    return REPORT.pack(kind, value, 0)


async def test_v9_what_is_no_report_ends_the_launch(launch: Callable[[], Launch], subtests: pytest.Subtests) -> None:
    for name, data in {
        "half of one": report(BORN, 77)[:7],
        "no kind": report(9, 0),
        "a pid of a group": report(BORN, -1),
        "no pid": report(BORN, 0),
    }.items():
        for what, opened in DESCRIPTORS.items():
            with subtests.test(report=name, descriptor=what):
                one = launch()
                one.tell(data, *([] if what == "none" else [opened()]))
                await until(lambda one=one: one.is_cut)
                await one.over()
                assert one.ends == [None]


async def test_v9_a_descriptor_that_is_no_pidfd_watches_nothing(launch: Callable[[], Launch], subtests: pytest.Subtests) -> None:
    """Else its first event would count as a death, or its signals go nowhere."""
    for what in ("a file", "a pipe", "an eventfd"):
        with subtests.test(descriptor=what):
            one = launch()
            one.tell(report(BORN, 77), DESCRIPTORS[what]())
            await until(lambda one=one: one.is_cut)
            assert not one.ends
            one.process.kill(signal.SIGTERM)
            one.tell(report(EXITED, -9))
            await one.over()
            assert one.ends == [-9]


async def test_v9_a_fork_server_that_tells_no_end_of_a_worker_without_pidfd_is_not_awaited(launch: Callable[[], Launch]) -> None:
    one = launch()
    one.tell(report(BORN, 77))
    await until(lambda: one.process.pid == 77)
    one.process.kill()  # as a close does
    async with asyncio.timeout(30):
        await until(lambda: one.ends)
    assert one.ends == [None]
    one.server.close()


async def test_v9_a_second_birth_is_no_report(launch: Callable[[], Launch]) -> None:
    one = launch()
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE) as child:  # noqa: ASYNC220  # it takes a millisecond
        one.tell(report(BORN, child.pid), os.pidfd_open(child.pid))
        await until(lambda: one.process.pid == child.pid)
        one.tell(report(BORN, 1), dead())
        await until(lambda: one.is_cut)
        assert (one.process.pid, one.ends) == (child.pid, [])
        child.kill()
    await one.over()
    assert len(one.ends) == 1


async def test_a_request_that_fails_when_it_is_sent_again_ends_the_launch(
    monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    """Nobody but the launch itself hears of it: it is a timer of the loop."""
    launcher: Any = type("Launcher", (), {"preload": ""})()
    for error in (OSError(errno.EAGAIN, "no more"), KeyError("HOME"), RuntimeError("no interpreter")):
        with subtests.test(error=error):
            answers: list[Exception] = [error, NoRoom()]

            def send(_preload: str, _fds: list[Any], answers: list[Exception] = answers) -> None:
                raise answers.pop()

            monkeypatch.setattr(servers, "send", send)
            ends: list[int | None] = []
            process = ForkedProcess(asyncio.get_running_loop(), launcher, _Request(ENTRY, b"", []), ends.append)
            async with asyncio.timeout(10):
                await until(lambda ends=ends: bool(ends))
            assert ends == [None]
            assert not process.is_lost
            assert process.refusal.startswith(f"the fork server could not start it: {error}")
            assert ("ulimit -u" in process.refusal) is isinstance(error, OSError)


def test_a_launch_that_was_not_sent_when_its_loop_was_closed_is_killed_in_silence(monkeypatch: pytest.MonkeyPatch) -> None:
    """As by the finalizer of a runner that was dropped, which runs when it likes."""
    launcher: Any = type("Launcher", (), {"preload": ""})()
    request, ends = _Request(ENTRY, b"", []), list[int | None]()

    async def launch() -> ForkedProcess:
        return ForkedProcess(asyncio.get_running_loop(), launcher, request, ends.append)

    def send(_preload: str, _fds: list[Any]) -> None:
        raise NoRoom

    monkeypatch.setattr(servers, "send", send)
    process = asyncio.run(launch())
    process.kill()
    process.kill()
    assert {fd.number for fd in (request.lifeline, *request.fds)} == {-1}
    assert not ends


async def test_a_launch_that_is_interrupted_when_its_request_was_sent_watches_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the loop would find the end of its socket readable for ever."""
    launcher: Any = type("Launcher", (), {"preload": ""})()
    loop, watched = asyncio.get_running_loop(), list[int]()
    add_reader = loop.add_reader
    request, ends = _Request(ENTRY, b"", []), list[int | None]()

    def interrupt() -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    def watch(fd: int, *args: Any) -> None:
        watched.append(fd)
        add_reader(fd, *args)

    monkeypatch.setattr(servers, "send", lambda _preload, _fds: None)
    monkeypatch.setattr(loop, "add_reader", watch)
    monkeypatch.setattr(request, "sent", interrupt)
    with pytest.raises(KeyboardInterrupt):
        ForkedProcess(loop, launcher, request, ends.append)
    (fd,) = watched
    assert not loop.remove_reader(fd)
    assert not ends


@pytest.mark.long
@pytest.mark.timeout(times(50, 1500))
async def test_v9_any_reports_end_a_launch_once(launch: Callable[[], Launch]) -> None:
    chance = random.Random(9)
    for _ in range(times(100, 20_000)):
        one = launch()
        story = []
        for _ in range(chance.randrange(4)):
            data, what = report(chance.choice(KINDS), chance.choice(VALUES)), chance.choice([*DESCRIPTORS])
            if not chance.randrange(4):
                data = chance.choice((data[: chance.randrange(len(data))], data + b"more", chance.randbytes(chance.randrange(40))))
            story.append((data, what))
            one.tell(data, *([] if what == "none" else [DESCRIPTORS[what]()]))
            if chance.randrange(2):
                await asyncio.sleep(0)
        try:
            await one.over()
            assert len(one.ends) == 1
        except BaseException as error:
            error.add_note(f"the fork server said {story}")
            raise


@pytest.mark.parametrize("told", [None, "1", 1.5, True, 0, -1, b"", (1,)])
def test_v9_a_worker_that_is_ready_tells_its_pid(told: Any) -> None:
    """Until its launcher knows the pid, statistics show it, and its stacks are read by it."""
    link: Any = type("Link", (), {"channel": None, "fate": None})()
    logs: Any = type("Logs", (), {"hold": None})()
    process: Any = type("Process", (), {"pid": None})()
    worker = ProcessWorker(link, logs, process, None)  # type: ignore[arg-type]
    with pytest.raises(BrokenFrame):
        worker.ready(told)
    assert worker.pid is None
    worker.ready(77)
    assert worker.pid == 77


def test_a_world_that_was_cut_short_is_read_to_its_end_and_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    world = World([], [], None, None, None, "module:function", b"boot")
    file = tmp_path / "world"
    file.write_bytes(world.dump())
    assert read_world(os.open(file, os.O_RDONLY)) == world
    size = len(world.dump())
    os.truncate(file, size - 4)
    monkeypatch.setattr(os, "fstat", lambda _: SimpleNamespace(st_size=size))  # as before it was cut
    with pytest.raises(EOFError):
        read_world(os.open(file, os.O_RDONLY))
