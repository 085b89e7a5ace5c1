"""Processes that are launched: their world, their end, and the end of whoever launched them."""

import asyncio
import contextlib
import errno
import json
import os
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

import percore
from percore._engines.processes import fork_server_launcher, launch, multiprocessing_launcher
from percore._engines.processes.descriptors import Fd, kept_in_forks, let_go, pipe
from percore._engines.processes.fork_server_launcher import ForkedProcess, ForkServerLauncher
from percore._engines.processes.fork_servers import ForkServerProcess, fingerprint, servers
from tests.e2e import launch_jobs
from tests.e2e.launch_jobs import CODES, Launcher, open_launcher, start_ready
from tests.e2e.limit_programs import kinds
from tests.e2e.scripts import python
from tests.rows import repeated_rows
from tests.waiting import until

ROOT = Path(__file__).parents[2]
both = pytest.mark.parametrize("kind", ["forkserver", "spawn"])
awaited = pytest.mark.differs("uvloop", because="an exit is awaited through the loop's descriptors and threads")
with_any_server = pytest.mark.warm_fork_server  # it is about the children, whichever fork server they come from


class End:
    """An on_exit that can be waited for, and that fails when it is called twice."""

    def __init__(self) -> None:
        self._code: asyncio.Future[int | None] = asyncio.get_running_loop().create_future()

    def __call__(self, code: int | None) -> None:
        self._code.set_result(code)

    def told(self) -> bool:
        return self._code.done()

    async def code(self) -> int | None:
        return await asyncio.wait_for(self._code, 20)


@pytest.fixture(autouse=True)
def no_launcher_left_open() -> Iterator[None]:
    """A test that failed keeps its fork server to itself."""
    before = set(servers._members)
    yield
    for launcher in set(servers._members) - before:
        for server in servers.leave(launcher):
            os.waitid(os.P_PIDFD, server.pidfd.number, os.WEXITED | os.WNOWAIT)
            server.reap()


def server_pidfd() -> int:
    assert servers._current is not None
    return servers._current.pidfd.number


def pidfds(pids: list[int]) -> dict[int, int]:
    return {pid: os.pidfd_open(pid) for pid in pids}


def wait_gone(watched: dict[int, int], seconds: float) -> list[int]:
    """The pids that are not gone within that time. Closes the pidfds."""
    deadline = time.monotonic() + seconds
    alive = []
    for pid, fd in watched.items():
        poller = select.poll()
        poller.register(fd, select.POLLIN)
        if not poller.poll(max(0.0, deadline - time.monotonic()) * 1000):
            alive.append(pid)
        os.close(fd)
    return alive


async def world_of_child(launcher: Launcher, boot: str) -> Any:
    read_end, write_end = os.pipe()
    end = End()
    with open(read_end, "rb") as answer:  # noqa: ASYNC230  # a pipe, read when its writer has ended
        try:
            launcher.launch(boot.encode(), [write_end], end)
        finally:
            os.close(write_end)
        assert await end.code() == 0
        return json.loads(answer.read())


@contextlib.contextmanager
def stdout_to(path: Path) -> Iterator[None]:
    """Fd 1 of this process is that file meanwhile."""
    saved = os.dup(1)
    file = os.open(path, os.O_WRONLY | os.O_CREAT)
    os.dup2(file, 1)
    os.close(file)
    try:
        yield
    finally:
        os.dup2(saved, 1)
        os.close(saved)


@contextlib.contextmanager
def umask(mask: int) -> Iterator[None]:
    before = os.umask(mask)
    try:
        yield
    finally:
        os.umask(before)


@with_any_server
@both
@awaited
async def test_a_child_sees_the_world_of_the_moment_of_its_launch(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    launcher = open_launcher(kind, "tell_world")
    pids = []
    for turn in ("first", "second"):
        folder = tmp_path / turn
        folder.mkdir()
        monkeypatch.setenv("PERCORE_LAUNCH_TURN", turn)
        monkeypatch.setenv(f"PERCORE_LAUNCH_{turn}", "\udcff")
        monkeypatch.chdir(folder)
        monkeypatch.setattr(sys, "path", [*sys.path, turn, ""])
        monkeypatch.setattr(sys, "argv", ["program", turn])
        with stdout_to(folder / "out"), umask(0o27 if turn == "first" else 0o77):
            world = await world_of_child(launcher, turn)
        if kind == "forkserver":
            pids.append(server_pidfd())
        assert world["environment"] == dict(os.environ)
        assert world["cwd"] == str(folder)
        assert world["path"] == sys.path
        assert world["argv"] == ["program", turn]
        assert world["umask"] == (0o27 if turn == "first" else 0o77)
        assert world["affinity"] == sorted(os.sched_getaffinity(0))
        assert world["boot"] == turn
        assert world["stdin"] == os.devnull
        assert world["inheritable"] == []
        assert world["blocked"] == []
        assert world["collects"]
        # 0 to 2, its lifelines, its one fd: nothing of the fork server, of a sibling or of this process.
        assert len(world["fds"]) <= (6 if kind == "forkserver" else 5)
        assert (folder / "out").read_text() == f"a word from {turn}\n"
        monkeypatch.delenv(f"PERCORE_LAUNCH_{turn}")
    assert len(set(pids)) <= 1, "both were born from the same fork server"
    await launcher.aclose()


@with_any_server
@both
async def test_a_deleted_working_directory_is_kept(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = open_launcher(kind, "obey")
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    monkeypatch.syspath_prepend(str(ROOT))
    end = End()
    launcher.launch(b"exit 3", [], end)
    assert await end.code() == 3
    await launcher.aclose()


@with_any_server
@both
@awaited
async def test_exit_codes(kind: str) -> None:
    launcher = open_launcher(kind, "obey")
    ends = []
    for word in CODES:
        ends.append(End())
        launcher.launch(word.encode(), [], ends[-1])
        assert not ends[-1].told()
    assert [await end.code() for end in ends] == list(CODES.values())
    await launcher.aclose()


@with_any_server
@both
@awaited
async def test_p9_ignored_sigchld_never_gives_a_wrong_exit_code(kind: str) -> None:
    before = signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    try:
        launcher = open_launcher(kind, "obey")
        for word, code in CODES.items():
            end = End()
            launcher.launch(word.encode(), [], end)
            assert await end.code() in ({code} if kind == "forkserver" else {code, None})
        await launcher.aclose()
    finally:
        signal.signal(signal.SIGCHLD, before)


@with_any_server
@both
@awaited
async def test_kill_before_the_pid_is_known_and_after_the_end(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        fork_server_launcher, "_ANSWER_PATIENCE", 20.0
    )  # on a loaded machine it takes more than a second to come up
    launcher = open_launcher(kind, "stay")
    null = os.open(os.devnull, os.O_WRONLY)
    end = End()
    process = launcher.launch(b"idle", [null], end)
    os.close(null)
    process.kill(signal.SIGTERM)
    process.kill()
    assert await end.code() == -9
    process.kill()
    await launcher.aclose()


@both
async def test_a_failing_entry_point_shows_its_traceback(kind: str, capfd: pytest.CaptureFixture[str]) -> None:
    launcher = open_launcher(kind, "refuse")
    end = End()
    launcher.launch(b"", [], end)
    assert await end.code() == 1
    assert "the entry point failed on purpose" in capfd.readouterr().err
    await launcher.aclose()


@both
async def test_nothing_leaks_when_nothing_can_be_started(kind: str) -> None:
    launcher = open_launcher(kind, "obey")
    before = len(os.listdir("/proc/self/fd"))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    for spare in range(16):
        resource.setrlimit(resource.RLIMIT_NOFILE, (before - 1 + spare, hard))
        try:
            with contextlib.suppress(OSError):
                end = End()
                launcher.launch(b"exit 3", [], end)
                assert await end.code() in (3, None)
        finally:
            resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
        await launcher.aclose()
        assert len(os.listdir("/proc/self/fd")) <= before
        launcher = open_launcher(kind, "obey")
    await launcher.aclose()


@awaited
async def test_a_killed_fork_server_takes_its_workers_along_and_the_next_launch_works() -> None:
    launcher = open_launcher("forkserver", "stay")
    ends = [End(), End()]
    for end in ends:
        await start_ready(launcher, b"idle", end)
    first = servers._current
    signal.pidfd_send_signal(server_pidfd(), signal.SIGKILL)
    assert [await end.code() in (-9, None) for end in ends] == [True, True]
    last = End()
    await start_ready(launcher, b"idle", last)
    assert servers._current is not first
    await launcher.aclose()
    assert await last.code() in (-9, None)


@awaited
async def test_what_a_fork_server_had_not_answered_when_it_was_killed_is_lost_and_not_sent_again() -> None:
    """It may have forked the worker, which may have written to its memory: no other process may get that."""
    launcher = open_launcher("forkserver", "stay")
    first = End()
    await start_ready(launcher, b"idle", first)
    signal.pidfd_send_signal(server_pidfd(), signal.SIGSTOP)
    null = os.open(os.devnull, os.O_WRONLY)
    second = End()
    process = launcher.launch(b"idle", [null], second)
    os.close(null)
    signal.pidfd_send_signal(server_pidfd(), signal.SIGKILL)
    assert await second.code() is None
    assert process.is_lost
    assert await first.code() in (-9, None)
    await launcher.aclose()


async def test_a_fork_server_that_dies_of_every_request_ends_the_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERCORE_POINTS", "forkserver.request=kill")
    launcher = open_launcher("forkserver", "obey")
    end = End()
    launcher.launch(b"exit 3", [], end)
    assert await end.code() is None
    monkeypatch.delenv("PERCORE_POINTS")
    again = End()
    launcher.launch(b"exit 3", [], again)
    assert await again.code() == 3
    await launcher.aclose()


@awaited
async def test_a_stopped_fork_server_holds_up_no_kill() -> None:
    launcher = open_launcher("forkserver", "obey")
    warm = End()
    launcher.launch(b"exit 3", [], warm)
    assert await warm.code() == 3
    signal.pidfd_send_signal(server_pidfd(), signal.SIGSTOP)
    end = End()
    process = launcher.launch(b"exit 3", [], end)
    process.kill()
    assert await end.code() is None
    last = End()
    launcher.launch(b"exit 3", [], last)
    assert await last.code() == 3
    await launcher.aclose()


async def born(launcher: Launcher, end: End) -> ForkedProcess:
    """A child of the fork server, whose pid is known."""
    null = os.open(os.devnull, os.O_WRONLY)
    process = launcher.launch(b"idle", [null], end)
    os.close(null)
    assert isinstance(process, ForkedProcess)
    await until(lambda: process.pid is not None)
    return process


@awaited
async def test_a_slow_fork_server_is_given_time_to_tell_a_code(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "_CODE_PATIENCE", 0.0)
    launcher, end = open_launcher("forkserver", "stay"), End()
    process = await born(launcher, end)
    report, looks, loop = process._report, list[Fd](), asyncio.get_running_loop()
    assert report is not None
    loop.remove_reader(report.fileno())  # what it says does not come for now
    with monkeypatch.context() as patch:
        patch.setattr(process, "_known_code", looks.append)
        process.kill()
        await until(lambda: len(looks) >= 2)  # when the child is dead, and when patience is over
    assert not end.told()
    loop.add_reader(report.fileno(), process._on_report)
    assert await end.code() == -9
    await launcher.aclose()


async def test_a_stopped_fork_server_is_not_waited_for_when_its_child_dies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fork_server_launcher, "_ANSWER_PATIENCE", 1000.0)
    launcher, end = open_launcher("forkserver", "stay"), End()
    process = await born(launcher, end)
    signal.pidfd_send_signal(server_pidfd(), signal.SIGSTOP)
    os.waitid(os.P_PIDFD, server_pidfd(), os.WSTOPPED | os.WNOWAIT)  # noqa: ASYNC222  # until it is
    process.kill()
    assert await end.code() is None
    signal.pidfd_send_signal(server_pidfd(), signal.SIGCONT)
    await launcher.aclose()


def test_a_fork_keeps_no_lifeline_while_another_thread_starts_a_program() -> None:
    """Otherwise that fork keeps the workers alive after the program has ended."""
    ends = pipe()
    entered, forked = threading.Event(), threading.Event()

    def start() -> None:
        with kept_in_forks():
            entered.set()
            forked.wait()

    thread = threading.Thread(target=start)
    thread.start()
    entered.wait()
    pid = os.fork()
    if not pid:
        os._exit(sum(end.number >= 0 for end in ends))
    forked.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    with kept_in_forks():
        pid = os.fork()
        if not pid:
            os._exit(sum(end.number >= 0 for end in ends))
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 2
    let_go(*ends)


def test_a_kill_counts_although_the_loop_is_closed_and_hears_of_no_birth() -> None:
    read_end, write_end = os.pipe()

    async def launched() -> tuple[ForkServerLauncher, ForkedProcess]:
        launcher = ForkServerLauncher.open(f"{launch_jobs.__name__}:stay")
        return launcher, launcher.launch(b"idle", [write_end], lambda _code: None)

    loop = asyncio.new_event_loop()
    launcher, process = loop.run_until_complete(launched())  # its fork server is about to be started
    loop.close()
    os.close(write_end)
    process.kill()
    process._request.sent()  # what the loop would have let go of
    assert process._report is not None
    let_go(process._report)
    poller = select.poll()
    poller.register(read_end, 0)
    assert poller.poll(20_000) == [(read_end, select.POLLHUP)]  # nobody has the other end any more
    os.close(read_end)
    asyncio.run(launcher.aclose())


async def test_other_limits_get_a_fork_server_of_their_own() -> None:
    launcher = open_launcher("forkserver", "stay")
    first, second = End(), End()
    await start_ready(launcher, b"idle", first)
    old = servers._current
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0 if soft else min(hard, 1), hard) if hard else (0, 0))
    changed = resource.getrlimit(resource.RLIMIT_CORE) != (soft, hard)
    try:
        await start_ready(launcher, b"idle", second)
        assert (servers._current is not old) == changed
        assert not first.told()
    finally:
        resource.setrlimit(resource.RLIMIT_CORE, (soft, hard))
    await launcher.aclose()
    # Orphans: their code is known only if init is quick, and the kernel tells it.
    assert {await first.code(), await second.code()} <= {-9, None}


async def test_the_fork_server_ends_with_the_last_launcher() -> None:
    one, other = (open_launcher("forkserver", "obey") for _ in range(2))
    end = End()
    one.launch(b"exit 0", [], end)
    assert await end.code() == 0
    watched = os.dup(server_pidfd())
    await one.aclose()
    await one.aclose()
    with pytest.raises(RuntimeError, match="closed"):
        one.launch(b"exit 0", [], End())
    again = End()
    other.launch(b"exit 3", [], again)
    assert await again.code() == 3
    await other.aclose()
    with pytest.raises(ChildProcessError):  # reaped
        os.waitid(os.P_PIDFD, watched, os.WEXITED | os.WNOHANG)  # noqa: ASYNC222  # does not wait
    os.close(watched)


@pytest.mark.parametrize("failing", [1, 2])
def test_a_pipe_that_finds_no_number_above_the_streams_is_closed(failing: int, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0

    def above(fd: int) -> int:
        nonlocal calls
        calls += 1
        if calls == failing:  # as it does: a lower descriptor is closed in any case
            os.close(fd)
            raise OSError(errno.EMFILE, "too many open files")
        copy = os.dup(fd)
        os.close(fd)
        return copy

    monkeypatch.setattr(multiprocessing_launcher, "above_streams", above)
    before = os.listdir("/proc/self/fd")
    with pytest.raises(OSError, match="too many open files"):
        multiprocessing_launcher._lifeline()
    assert os.listdir("/proc/self/fd") == before


async def test_a_close_reaps_a_retired_fork_server_though_others_use_the_new_one() -> None:
    staying, closing = (open_launcher("forkserver", "stay") for _ in range(2))
    end = End()
    pid = await start_ready(closing, b"idle", end)
    retired = servers.pids()[0]
    closing.renew()
    last = End()
    await start_ready(staying, b"idle", last)
    os.kill(pid, signal.SIGKILL)
    await end.code()  # the last worker of the retired one, which is killed now
    await closing.aclose()
    assert not psutil.pid_exists(retired)
    assert len(servers.pids()) == 1
    await staying.aclose()
    assert servers.pids() == []
    assert await last.code() in (-9, None)


async def test_a_fork_server_that_was_warmed_up_answers_the_first_launch() -> None:
    launcher = open_launcher("forkserver", "obey")
    assert isinstance(launcher, ForkServerLauncher)
    launcher.warm_up()
    warm = server_pidfd()
    end = End()
    launcher.launch(b"exit 3", [], end)
    assert server_pidfd() == warm
    assert await end.code() == 3
    await launcher.aclose()


async def test_executors_keep_the_fork_server_until_nobody_has_a_share() -> None:
    servers.keep("tests.e2e.launch_jobs")
    watched = os.dup(server_pidfd())
    launcher = open_launcher("forkserver", "obey")
    end = End()
    launcher.launch(b"exit 3", [], end)
    assert await end.code() == 3
    await launcher.aclose()
    assert servers.pids()
    launcher = open_launcher("forkserver", "obey")
    servers.keep_no_longer()
    assert servers.pids()
    await launcher.aclose()
    assert not servers.pids()
    servers.keep("tests.e2e.launch_jobs")
    (pid,) = servers.pids()
    servers.keep_no_longer()
    servers.keep_no_longer()
    for kind, number in (os.P_PIDFD, watched), (os.P_PID, pid):
        with pytest.raises(ChildProcessError):  # reaped
            os.waitid(kind, number, os.WEXITED | os.WNOHANG)  # noqa: ASYNC222  # does not wait
    os.close(watched)


_PRELOADED = """
import os
import signal
import threading

PID = os.getpid()
FILE = open(__file__)
for signum in (signal.SIGINT, signal.SIGTERM):
    signal.signal(signum, signal.SIG_DFL)
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
threading.Thread(target=threading.Event().wait, daemon=True).start()
"""
_PRELOADING = """
import asyncio
import multiprocessing
import os
import signal
import sys
from contextlib import suppress

import percore


def where():
    # Not imported here: this asks for what the fork server has imported.
    heavy = sys.modules.get("heavy")
    return heavy and (heavy.PID == os.getppid(), heavy.FILE.seek(0))


async def runner():
    async with percore.Runner(2) as runner:
        server = await runner.run(os.getppid)
        for signum in (signal.SIGINT, signal.SIGTERM):
            os.kill(server, signum)
        with suppress(percore.WorkerDied):
            await runner.run(os._exit, 3)
        assert {await runner.run(os.getppid) for _ in range(20)} == {server}
        return await runner.run(where)


def executor():
    with percore.LoopPoolExecutor(1, max_threads=1) as executor:
        return executor.submit(where).result()


if __name__ == "__main__":
    print(executor())
    multiprocessing.set_forkserver_preload(["__main__", "missing", "broken", "heavy"])
    print(executor(), asyncio.run(runner()))
    multiprocessing.set_forkserver_preload(["__main__"])
    print(executor())
"""


def test_a_fork_server_imports_what_the_program_has_named_to_multiprocessing(tmp_path: Path) -> None:
    """Descriptors, threads and signal handlers of such modules do no harm. One that raises is reported once."""
    (tmp_path / "heavy.py").write_text(_PRELOADED)
    (tmp_path / "broken.py").write_text("import heavy\nraise ValueError('by its author')\n")
    (tmp_path / "program.py").write_text(_PRELOADING)
    done = python("-W", "error::DeprecationWarning", "program.py", cwd=tmp_path)
    assert (done.code, done.out.splitlines()) == (0, ["None", "(True, 0) (True, 0)", "None"]), done.err
    assert done.err.count("Traceback") == done.err.count("ValueError: by its author") == 1, done.err


def test_a_fork_server_that_the_program_may_no_longer_signal_dies_by_its_lifeline(monkeypatch: pytest.MonkeyPatch) -> None:
    """A program that has given up root may not signal a process that it started as root."""

    def refuse(pidfd: int, signum: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    servers.keep("tests.e2e.launch_jobs")
    (pid,) = servers.pids()
    monkeypatch.setattr(signal, "pidfd_send_signal", refuse)
    servers.keep_no_longer()
    with pytest.raises(ChildProcessError):  # reaped
        os.waitid(os.P_PID, pid, os.WEXITED | os.WNOHANG)


@both
@pytest.mark.asyncio_only
async def test_a_worker_that_the_program_may_no_longer_signal_is_killed_by_its_lifeline(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else a close would wait for ever for a worker that does not end."""

    def refuse(pidfd: int, signum: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    launcher, end = open_launcher(kind, "stay"), End()
    process = launcher.launch(b"idle", [1], end)
    await until(lambda: process.pid is not None)
    with monkeypatch.context() as patched:
        patched.setattr(signal, "pidfd_send_signal", refuse)
        process.kill(signal.SIGTERM)
        process.kill()
        process.kill()
    assert await end.code() == -signal.SIGKILL
    await launcher.aclose()


@pytest.mark.asyncio_only
async def test_requests_that_a_fork_server_has_no_room_for_are_sent_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Hundreds of workers that start at once fill the socket before the fork server has forked the first, or have more descriptors
    in transit than an ordinary user may have files open."""
    launcher = open_launcher("forkserver", "obey")
    send, full = socket.send_fds, [errno.EAGAIN, errno.ETOOMANYREFS] * 2

    def is_full(*args: Any) -> Any:
        if full:
            code = full.pop()
            raise OSError(code, os.strerror(code))
        return send(*args)

    monkeypatch.setattr(socket, "send_fds", is_full)
    end = End()
    process = launcher.launch(b"exit 3", [], end)
    assert await end.code() == 3
    assert process.pid is not None
    assert not full
    full[:] = [errno.EAGAIN] * 1000
    killed = End()
    process = launcher.launch(b"exit 3", [], killed)
    process.kill(signal.SIGTERM)
    process.kill()
    process.kill()
    assert await killed.code() is None, "no fork server has heard of it"
    assert process.pid is None
    assert not process.is_lost
    await launcher.aclose()


@pytest.mark.asyncio_only
async def test_a_request_that_was_sent_holds_one_end_of_a_pipe_and_of_a_socket() -> None:
    """Many workers that start at once need no more descriptors than they do later."""
    launcher = ForkServerLauncher.open(f"{launch_jobs.__name__}:obey")
    launcher.warm_up()
    (server,) = servers.pids()
    os.kill(server, signal.SIGSTOP)
    before, end = kinds(), End()
    launcher.launch(b"exit 3", [0, 1, 2], end)
    assert sorted((kinds() - before).elements()) == ["pipe", "socket"]
    os.kill(server, signal.SIGCONT)
    assert await end.code() == 3
    await launcher.aclose()


@pytest.mark.asyncio_only
async def test_a_launch_that_the_loop_cannot_watch_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    launcher = open_launcher("forkserver", "obey")
    loop = asyncio.get_running_loop()

    def refuse(*_args: object) -> None:
        raise OSError(errno.ENOSPC, "no room for another watch")

    with monkeypatch.context() as patch:
        patch.setattr(loop, "add_reader", refuse)
        with pytest.raises(OSError, match="another watch"):
            launcher.launch(b"exit 3", [], End())
    assert servers._current is not None
    assert servers._current.living == 0
    end = End()
    launcher.launch(b"exit 3", [], end)
    assert await end.code() == 3
    await launcher.aclose()


async def test_a_finalizer_may_use_the_fork_servers_while_one_is_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """A garbage collection may run it in that very thread."""
    launcher = ForkServerLauncher.open()
    start_python, finalized = launch.start_python, list[bool]()

    def interrupted(*args: Any, **options: Any) -> int:
        if not finalized:
            finalized.append(True)
            other = ForkServerLauncher.open()
            other.warm_up()
            servers.give_back(servers.leave(other))
        return start_python(*args, **options)

    monkeypatch.setattr("percore._engines.processes.fork_servers.start_python", interrupted)
    launcher.warm_up()
    assert finalized
    assert len(servers.pids()) == 1
    await launcher.aclose()


def test_a_fork_server_whose_end_is_interrupted_is_ended_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The next close would wait for ever for the death of one that nobody has killed."""

    def interrupt(pidfd: int, signum: int) -> None:
        monkeypatch.undo()
        raise KeyboardInterrupt

    server = ForkServerProcess("tests.e2e.launch_jobs")
    monkeypatch.setattr(signal, "pidfd_send_signal", interrupt)
    with pytest.raises(KeyboardInterrupt):
        server.end()
    server.end()
    server.wait_dead()
    assert server.reap()


@both
async def test_a_signal_whose_handler_raises_while_a_process_is_started_leaves_none(
    kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A Ctrl-C that comes meanwhile is held back, and delivered when the process runs and nobody knows its pid."""
    launcher = open_launcher(kind, "obey")
    before, set_mask = kinds(), signal.pthread_sigmask

    def interrupt(how: int, mask: Any) -> Any:
        result = set_mask(how, mask)
        if how == signal.SIG_SETMASK:
            monkeypatch.undo()
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(signal, "pthread_sigmask", interrupt)
    with pytest.raises(KeyboardInterrupt):
        launcher.launch(b"exit 3", [], End())
    assert kinds() == before
    assert psutil.Process().children() == []
    end = End()
    launcher.launch(b"exit 3", [], end)
    assert await end.code() == 3
    await launcher.aclose()


def test_variables_that_another_thread_deletes_cost_no_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    """1. the names are listed  2. another thread deletes one  3. its value is read."""

    class Deleted(dict[bytes, bytes]):
        def __getitem__(self, name: bytes) -> bytes:
            if name == b"PYTHON_GONE":
                raise KeyError(name)
            return super().__getitem__(name)

    monkeypatch.setenv("PYTHON_STAYS", "1")
    monkeypatch.setenv("PYTHON_GONE", "1")
    deleted = Deleted(os.environ._data)  # type: ignore[attr-defined]
    with monkeypatch.context() as patched:
        for environ in (os.environ, os.environb):
            patched.setattr(environ, "_data", deleted)
        text = str(fingerprint())
    assert "PYTHON_STAYS" in text
    assert "PYTHON_GONE" not in text


async def test_a_start_that_fails_before_its_first_launch_ends_the_fork_server_it_has_started() -> None:
    ended: list[list[ForkServerProcess]] = []
    leave = servers.leave

    def noted(member: object) -> list[ForkServerProcess]:
        ended.append(leave(member))
        return ended[-1]

    runner = percore.Runner(1, lifespan=partial(nullcontext, threading.Lock()), start_method="forkserver")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(servers, "leave", noted)
        with pytest.raises(TypeError, match="pickle"):
            await runner.start()
    assert [server.pidfd.number for [server] in ended] == [-1]  # one, and it is reaped


@pytest.mark.asyncio_only
async def test_a_start_that_has_made_its_engine_and_nothing_more_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As when no descriptor is left with which to import what an option needs."""
    async with percore.Runner(1):
        pass
    from percore._supervisor.supervisor import Supervisor

    def refuse(*_args: object) -> None:
        raise ImportError("no descriptor left")

    before = kinds()
    with monkeypatch.context() as patched:
        patched.setattr(Supervisor, "_admission", refuse)
        with pytest.raises(ImportError):
            await percore.Runner(1, max_pending=1).start()
        with percore.LoopPoolExecutor(1) as executor:
            patched.setattr(Supervisor, "__init__", refuse)
            assert str(executor.submit(abs, -1).exception()) == "no descriptor left"
    servers.keep_no_longer()
    assert kinds() == before


async def test_what_a_runner_stands_on_is_imported_after_its_fork_server_has_been_started() -> None:
    # asyncio itself imports pathlib since 3.15.
    program = (
        "import sys, asyncio; known = {*sys.modules}; import percore; percore.Runner(1); new = {*sys.modules} - known; "
        "print('percore._supervisor.supervisor' in new, 'pathlib' in new)"
    )
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-S", "-c", program],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
    )
    await asyncio.get_running_loop().shutdown_default_executor()
    assert done.stdout == b"False False\n", done.stderr


NAMING = """
import asyncio, sys, threading, percore

async def name_it():
    percore.Runner
    print("concurrent.futures.process" in sys.modules)

if sys.argv[1] == "loop":
    asyncio.run(name_it())
elif sys.argv[1] == "thread":
    thread = threading.Thread(target=asyncio.run, args=(name_it(),))
    thread.start()
    thread.join()
else:
    percore.Runner
    print("concurrent.futures.process" in sys.modules)
"""


@pytest.mark.parametrize(("where", "is_imported"), [("loop", False), ("thread", True), ("nowhere", True)])
async def test_the_dearest_import_waits_for_start_where_the_main_thread_cannot_end_before(where: str, is_imported: bool) -> None:
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-S", "-c", NAMING, where],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
    )
    await asyncio.get_running_loop().shutdown_default_executor()
    assert done.stdout == f"{is_imported}\n".encode(), done.stderr


LATE = """
import threading, percore

def name_it():
    threading.main_thread().join()
    try:
        percore.Runner
    except RuntimeError as error:
        print(error)

threading.Thread(target=name_it).start()
"""


async def test_named_for_the_first_time_when_the_main_thread_has_ended_it_says_what_to_do() -> None:
    done = await asyncio.to_thread(
        subprocess.run,
        [sys.executable, "-S", "-c", LATE],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        capture_output=True,
        text=True,
    )
    await asyncio.get_running_loop().shutdown_default_executor()
    assert "write `from percore import Runner` in code that the main thread runs" in done.stdout, done.stderr


@awaited
async def test_two_loops_in_two_threads_share_the_fork_server() -> None:
    async def several() -> list[int | None]:
        launcher = open_launcher("forkserver", "obey")
        codes = []
        for word in CODES:
            end = End()
            launcher.launch(word.encode(), [], end)
            codes.append(await end.code())
        await launcher.aclose()
        return codes

    both_codes = await asyncio.gather(several(), *(asyncio.to_thread(asyncio.run, several()) for _ in range(2)))
    await asyncio.get_running_loop().shutdown_default_executor()
    assert both_codes == [list(CODES.values())] * 3


@awaited
async def test_p9_a_stolen_child_never_gives_a_wrong_exit_code() -> None:
    launcher = open_launcher("spawn", "obey")
    end = End()
    process = launcher.launch(b"exit 3", [], end)
    assert process.pid is not None
    _, status = os.waitpid(process.pid, 0)  # noqa: ASYNC222  # the thief, before the loop can notice
    assert os.waitstatus_to_exitcode(status) == 3
    assert await end.code() in (3, None)
    await launcher.aclose()


# The fork server needs pidfds. With them a spawned interpreter differs from a fork only until it runs percore.
@pytest.mark.parametrize(
    ("kind", "without"),
    [
        ("forkserver", ""),
        ("forkserver", "memfd"),
        ("forkserver", "setsig"),
        ("spawn", "pidfd"),
        ("spawn", "pidfd,memfd,setsig"),
        *(pytest.param("spawn", without, marks=pytest.mark.full) for without in ("", "memfd", "setsig")),
    ],
)
def test_exit_codes_without_what_other_systems_lack_in_silence(kind: str, without: str) -> None:
    command = [sys.executable, "-X", "dev", "-W", "error", "-m", launch_jobs.__name__, "codes", kind]
    done = subprocess.run(
        command, cwd=ROOT, env={**os.environ, "PERCORE_WITHOUT": without}, capture_output=True, text=True, timeout=40
    )
    assert (done.stderr, done.returncode) == ("", 0)
    assert json.loads(done.stdout) == list(CODES.values())


@both
def test_x3_a_loop_that_ends_without_aclose_leaves_nobody_and_prints_nothing(kind: str) -> None:
    command = [sys.executable, "-X", "dev", "-W", "error", "-m", launch_jobs.__name__, "left", kind]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=40)
    assert (done.stderr, done.returncode) == ("", 0)
    for pid in json.loads(done.stdout)["workers"]:
        with contextlib.suppress(ProcessLookupError):
            assert wait_gone(pidfds([pid]), 2) == []


@contextlib.contextmanager
def supervisor(story: str, kind: str, without: str = "") -> Iterator[tuple[int, list[int]]]:
    """A supervisor amid its story: its pid, and those of its children, which must all be gone afterwards."""
    command = [sys.executable, "-m", launch_jobs.__name__, story, kind]
    environment = {**os.environ, "PERCORE_WITHOUT": without}
    with subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        try:
            told = json.loads(process.stdout.readline())
            workers = told["workers"]
            server = {psutil.Process(pid).ppid() for pid in workers} - {process.pid}
            watched = pidfds([*workers, *server])
            fork = os.pidfd_open(told["fork"]) if told["fork"] else None
            yield process.pid, list(watched)
            process.kill()
            process.wait()
            left = wait_gone(watched, 2)
            if fork is not None:
                signal.pidfd_send_signal(fork, signal.SIGKILL)
                assert wait_gone({told["fork"]: fork}, 2) == []
            assert left == []
        finally:
            process.kill()


@pytest.mark.parametrize(
    ("kind", "story"),
    [
        *[("forkserver", "plain"), ("forkserver", "fork"), ("forkserver", "thread"), ("spawn", "plain")],
        *repeated_rows(("spawn", "fork"), ("spawn", "thread")),
    ],
)
def test_a_killed_supervisor_takes_every_child_along(kind: str, story: str) -> None:
    with supervisor(story, kind) as (_, pids):
        os.kill(pids[1], signal.SIGSTOP)
        assert len(pids) == (4 if kind == "forkserver" else 3)


def test_a_killed_supervisor_takes_a_stopped_fork_server_along() -> None:
    with supervisor("plain", "forkserver") as (_, pids):
        os.kill(pids[3], signal.SIGSTOP)
        os.kill(pids[1], signal.SIGSTOP)


@both
def test_a_killed_supervisor_takes_an_idle_child_along_where_no_signal_can_be_sent(kind: str) -> None:
    without = "memfd,setsig" if kind == "forkserver" else "pidfd,memfd,setsig"
    with supervisor("idle", kind, without) as (_, pids):
        assert len(pids) == (2 if kind == "forkserver" else 1)


@both
def test_x7_a_supervisor_without_standard_streams(kind: str, tmp_path: Path) -> None:
    program = f"exec {sys.executable} -m {launch_jobs.__name__} codes-to-file {kind} {tmp_path / 'told'} <&- >&- 2>&-"
    subprocess.run(["/bin/sh", "-c", program], cwd=ROOT, check=True, timeout=40)
    assert json.loads((tmp_path / "told").read_text()) == list(CODES.values())


async def test_ctrl_c_reaches_no_child(capfd: pytest.CaptureFixture[str]) -> None:
    for kind in ("forkserver", "spawn"):
        launcher = open_launcher(kind, "stay")
        end = End()
        pid = await start_ready(launcher, b"idle", end)
        for target in {pid, psutil.Process(pid).ppid()} - {os.getpid()}:
            os.kill(target, signal.SIGINT)
        other = End()
        other_pid = await start_ready(launcher, b"idle", other)
        assert not end.told()
        for worker in (pid, other_pid):
            os.kill(worker, signal.SIGKILL)
        assert await end.code() == -9
        assert await other.code() == -9
        await launcher.aclose()
    assert capfd.readouterr().err == ""
