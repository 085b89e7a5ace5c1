"""The fork server is killed at each of its steps: its workers go with it, another one takes over, each call ends as it should."""

import asyncio
import contextlib
import errno
import os
import signal
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

import percore
from percore._common.system import default_start_method
from percore._engines.processes import fork_servers as fork_servers_module
from percore._engines.processes.descriptors import Fd
from percore._worker_process.world import MOST_REASON
from tests.e2e import fault_calls as calls
from tests.e2e import held
from tests.faults import LIMIT, Wire
from tests.sweep.places import SERVER

pytestmark = pytest.mark.skipif(default_start_method() != "forkserver", reason="no fork server here")


class Plans:
    """What is to happen once, somewhere (see percore._common.fault_points)."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.hits = Wire(folder / "hits")

    def kill_at(self, place: str) -> None:
        (self._folder / place).write_text("kill")


@pytest.fixture
def plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Plans]:
    folder = tmp_path / "points"
    folder.mkdir()
    monkeypatch.setenv("PERCORE_POINTS", str(folder))
    plans = Plans(folder)
    yield plans
    plans.hits.close()


def pids_of(runner: percore.Runner) -> set[int | None]:
    return {worker.pid for worker in runner.statistics().workers}


async def all_new(runner: percore.Runner, before: set[int | None]) -> None:
    async with asyncio.timeout(LIMIT):
        while pids_of(runner) & before or any(worker.state != "ready" for worker in runner.statistics().workers):
            with contextlib.suppress(percore.WorkerDied):
                await runner.run(calls.accept)
        assert await runner.map(calls.accept, range(100)) == [1] * 100


@pytest.mark.parametrize("place", SERVER)
async def test_killed_while_it_replaces_a_worker(place: str, plans: Plans, wire: Wire, tmp_path: Path) -> None:
    ledger = tmp_path / "ledger"
    async with percore.Runner(2) as runner:
        before = pids_of(runner)
        victim = next(iter(before))
        assert victim is not None
        stays = [runner.submit(calls.stay, wire.path) for _ in range(20)]
        for _ in stays:  # what has not begun would stay in the replacement
            await wire.worker()
        plans.kill_at(place)
        os.kill(victim, signal.SIGKILL)
        futures = [runner.submit(calls.write_down, str(ledger), number) for number in range(500)]
        assert (await plans.hits.line()).startswith(f"{place} kill")
        async with asyncio.timeout(LIMIT):
            ends = await asyncio.gather(*futures, return_exceptions=True)
            deaths = await asyncio.gather(*stays, return_exceptions=True)
        assert {type(death) for death in deaths} == {percore.WorkerDied}
        ran = list(map(int, ledger.read_text().split()))
        assert len(ran) == len(set(ran)), "no call runs twice"
        for number, end in enumerate(ends):
            assert end == number or isinstance(end, percore.WorkerDied)
            assert number in ran or isinstance(end, percore.WorkerDied)
        await all_new(runner, before)


@pytest.mark.asyncio_only
@pytest.mark.parametrize("place", ["forkserver.request", "forkserver.forked", "forkserver.born"])
async def test_killed_in_the_first_start(place: str, plans: Plans) -> None:
    """Before a worker was told of, its place is lost: another worker starts, with memory of its own.

    After it, that is a worker's death, which fails a first start, unless the worker was faster and ready by then.
    """
    plans.kill_at(place)
    runner = percore.Runner(1)
    async with asyncio.timeout(LIMIT):
        try:
            await runner.start()
        except percore.StartupFailed:
            assert place == "forkserver.born"
        else:
            # A worker that was ready by then may die with its first call.
            assert await runner.options(retries=1).run(calls.accept) == 0
            assert runner.statistics().workers[0].generation == 2
        assert (await plans.hits.line()).startswith(f"{place} kill")
        await runner.aclose()


@pytest.mark.asyncio_only
async def test_killed_before_it_comes_up(tmp_path: Path) -> None:
    with held.interpreters(tmp_path) as interpreters:
        runner = percore.Runner(2)
        starting = asyncio.create_task(runner.start())
        await interpreters.arrive(1)
        (server,) = psutil.Process().children()
        server.kill()
        await interpreters.arrive(1)
        interpreters.let_go(1)
        async with asyncio.timeout(LIMIT):
            await starting
            assert await runner.map(calls.accept, range(100)) == [1] * 100
            await runner.aclose()


@pytest.mark.asyncio_only
async def test_its_own_death_is_named_and_usage_shows_it(wire: Wire, caplog: pytest.LogCaptureFixture) -> None:
    async with percore.Runner(2) as runner:
        before = pids_of(runner)
        (server,) = fork_servers(await runner.usage())
        assert server in {child.pid for child in psutil.Process().children()}
        stays = [runner.submit(calls.stay, wire.path) for _ in range(2)]
        for _ in stays:
            await wire.worker()
        os.kill(server, signal.SIGKILL)
        deaths = await asyncio.gather(*stays, return_exceptions=True)
        await all_new(runner, before)
        (other,) = fork_servers(await runner.usage())
        assert other != server
    # What became of a worker whose parent has died is told by Linux from 6.15 on.
    assert all(isinstance(death, percore.WorkerDied) and death.exitcode in (None, -signal.SIGKILL) for death in deaths)
    (said,) = [text for record in caplog.records if (text := record.getMessage()).startswith("percore: the fork server ")]
    how = "by SIGKILL (perhaps out of memory, or killed by an operator)"
    assert said == f"percore: the fork server (pid {server}) died {how}, and its workers with it"


@pytest.mark.asyncio_only
async def test_one_that_ends_with_its_last_runner_is_not_reported(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("DEBUG", "percore")
    for _ in range(2):
        async with percore.Runner(2) as runner:
            assert await runner.run(calls.accept) == 0
    assert "fork server" not in caplog.text


def fork_servers(usage: percore.Usage) -> list[int]:
    return [one.pid for one in usage.processes if one.role == "fork server"]


@pytest.mark.asyncio_only
async def test_the_error_of_a_start_has_the_traceback_of_a_fork_server_that_fails(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Its own standard error is closed by then."""
    monkeypatch.setenv("PERCORE_POINTS", "forkserver.request=fail")
    async with asyncio.timeout(LIMIT):
        with pytest.raises(percore.StartupFailed) as caught:
            async with percore.Runner(1):
                pytest.fail("it started")
    text = str(caught.value)
    assert "its fork server died before it told of the worker: OSError: failed on purpose" in text
    assert "Traceback (most recent call last)" in caught.value.detail
    assert "in _on_request" in caught.value.detail
    assert len(caught.value.detail) <= MOST_REASON
    died = [message for message in caplog.messages if "with exit code 1, and its workers with it:" in message]
    assert died
    assert all("in _on_request" in message for message in died)


def test_a_fork_server_that_dies_at_once_tells_why(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice in a row it does not even take the request."""
    servers = fork_servers_module.ForkServers()
    started: list[Any] = []

    class Dead:
        living, is_lost, is_ended = 0, False, False
        fingerprint = fork_servers_module.fingerprint()
        pidfd = Fd(-1)

        def __init__(self, _preload: str) -> None:
            self.reason = "Traceback (most recent call last):\n  ...\nno module\n"
            started.append(self)

        def send(self, _fds: object) -> None:
            raise BrokenPipeError(errno.EPIPE, "Broken pipe")

        def end(self) -> None:
            self.is_ended = True

        def reap(self) -> bool:
            return self.is_ended

    monkeypatch.setattr(fork_servers_module, "ForkServerProcess", Dead)
    with pytest.raises(OSError, match="died as soon as it was started: no module"):
        servers.send("preload", ())
    assert len(started) == 2
    assert all(one.is_ended for one in started)


@pytest.mark.asyncio_only
async def test_one_that_dies_of_every_request_fails_a_first_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PERCORE_POINTS", "forkserver.request=kill")
    async with asyncio.timeout(LIMIT):
        with pytest.raises(percore.StartupFailed, match="its fork server died"):
            async with percore.Runner(1):
                pytest.fail("it started")


def test_r6_a_fork_server_stays_when_no_descriptor_is_left_to_see_whether_it_fits(
    monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests
) -> None:
    def no_file(path: Any, *arguments: Any) -> Any:
        if path == "/proc/self/cgroup":
            raise OSError(code, os.strerror(code))
        return open(path, *arguments)

    class Serving:
        living, is_lost, is_ended, reason = 0, False, False, ""
        pidfd = Fd(-1)

        def __init__(self, _preload: str) -> None:
            self.fingerprint = fork_servers_module.fingerprint()
            started.append(self)

        def send(self, _fds: object) -> None: ...

        def end(self) -> None:
            self.is_ended = True

        def reap(self) -> bool:
            return self.is_ended

    monkeypatch.setattr(fork_servers_module, "ForkServerProcess", Serving)
    for code in (errno.EMFILE, errno.ENFILE, errno.ENOMEM):
        with subtests.test(os.strerror(code)), monkeypatch.context() as patch:
            servers, started = fork_servers_module.ForkServers(), list[Any]()
            servers.send("preload", ())
            patch.setattr(fork_servers_module, "open", no_file, raising=False)
            servers.send("preload", ())
            assert len(started) == 1
            assert not started[0].is_ended
            servers.renew()
            with pytest.raises(OSError, match=os.strerror(code)):
                servers.send("preload", ())
            patch.undo()
            servers.send("preload", ())
            assert len(started) == 2


def test_r8_an_executor_whose_thread_cannot_start_leaves_no_fork_server(monkeypatch: pytest.MonkeyPatch) -> None:
    """The limit that forbids the thread may end the fork server, too, and nobody would reap it."""
    servers, pids = fork_servers_module.ForkServers(), list[int]()
    begin = threading.Thread.start

    def start(thread: threading.Thread) -> None:
        if thread.name.startswith("percore-executor"):
            pids.extend(servers.pids())
            raise RuntimeError("can't start new thread")
        begin(thread)

    monkeypatch.setattr(fork_servers_module, "servers", servers)
    monkeypatch.setattr(threading.Thread, "start", start)
    executor = percore.LoopPoolExecutor(1)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        executor.submit(abs, -7)
    (pid,) = pids
    with pytest.raises(ChildProcessError):
        os.waitpid(pid, os.WNOHANG)
    assert servers.pids() == []
