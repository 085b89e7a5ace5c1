"""Sockets for every worker: servers in the workers, and connections that outlive the workers for which they came."""

import asyncio
import errno
import functools
import gc
import os
import signal
import socket
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path

import pytest

import percore
from percore import Runner
from percore._common.system import HAS_REUSEPORT
from percore._scheduler.replacement import LIMIT, RestartBudget
from tests import jobs
from tests.contract import life_jobs, listen_jobs
from tests.contract.conftest import MakeRunner, worker_of
from tests.contract.pipes import Gate, Log
from tests.faults import wait_stopped
from tests.internals import members_of, supervisor_of

pytestmark = pytest.mark.local_memory(
    because="workers on other nodes cannot serve on sockets of this machine: `listen` is refused there"
)
handed_over = pytest.mark.differs("spawn", because="sockets reach an interpreter in another way than a fork")
without_calls = pytest.mark.differs("fallbacks", because="without SO_REUSEPORT all workers serve on one socket")

TCP = "127.0.0.1:0"
IN_USE = os.strerror(errno.EADDRINUSE)
"""The C library's text."""


async def _connected(address: str) -> socket.socket:
    """A connection, which the system has accepted."""
    if address.startswith("unix:"):
        sock, name = socket.socket(socket.AF_UNIX), address.removeprefix("unix:")
    else:
        host, _, port = address.rpartition(":")
        sock, name = socket.socket(socket.AF_INET6 if host[0] == "[" else socket.AF_INET), (host.strip("[]"), int(port))  # type: ignore[assignment]
    sock.setblocking(False)
    try:
        await asyncio.get_running_loop().sock_connect(sock, name)
    except BaseException:
        sock.close()
        raise
    return sock


async def _asked(sock: socket.socket, line: str = "who") -> str:
    """The answer to a line. The connection is closed."""
    loop = asyncio.get_running_loop()
    with sock:
        await loop.sock_sendall(sock, line.encode())
        return (await loop.sock_recv(sock, 1000)).decode()


async def _ask(address: str, line: str = "who") -> str:
    return await _asked(await _connected(address), line)


async def _workers(address: str, count: int = 40) -> set[str]:
    """Who answers so many connections."""
    return set(await asyncio.gather(*(_ask(address) for _ in range(count))))


@asynccontextmanager
async def _asking(address: str, at_once: int = 4) -> AsyncIterator[list[str]]:
    """Ask all the time, over one new connection after the other. Each one must be answered."""
    answers: list[str] = []

    async def ask() -> None:
        while True:
            answer = await _ask(address)
            assert answer, "a connection was closed without an answer"
            answers.append(answer)

    async with asyncio.TaskGroup() as group:
        tasks = [group.create_task(ask()) for _ in range(at_once)]
        yield answers
        for task in tasks:
            task.cancel()


@contextmanager
def _own() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        yield sock


async def _refused(address: str) -> None:
    """Nobody listens at the address."""
    with pytest.raises((ConnectionRefusedError, FileNotFoundError)):
        await _ask(address)


@handed_over
@without_calls
@pytest.mark.apart(because="a worker that is a process has a pid, and an end, of its own")
async def test_each_worker_serves_on_each_address(make: MakeRunner, tmp_path: Path) -> None:
    with _own() as own:
        unix = f"unix:{tmp_path}/s"
        async with make(
            2, lifespan=listen_jobs.serve, listen=[TCP, "[::1]:0" if listen_jobs.has_ipv6() else TCP, unix, own]
        ) as runner:
            addresses = runner.addresses
            host, port = own.getsockname()
            assert addresses[2:] == (unix, f"{host}:{port}")
            found = await runner.broadcast(listen_jobs.sockets)
            for (one, other), address in zip(zip(*found, strict=True), addresses, strict=True):
                assert str(one["name"]) == str(other["name"])
                assert address.rpartition(":")[2] == str(one["name"][1]) or address == f"unix:{one['name']}"
                assert all(each["listens"] and not each["blocks"] and not each["is inherited"] for each in (one, other))
                assert await _workers(address) <= {"0 1", "1 1"}
            if HAS_REUSEPORT:
                assert await _workers(addresses[0]) == await _workers(addresses[1]) == {"0 1", "1 1"}
            assert percore.CurrentWorker(0, 1, 2) == percore.CurrentWorker(0, 1, 2, (own,))
            assert (await runner.run(jobs.awhere)).sockets == ()  # a copy
        for address in addresses[:3]:
            await _refused(address)
        assert not (tmp_path / "s").exists()
        (await _connected(addresses[3])).close()  # it is the user's, and listens


@without_calls
async def test_a_runner_that_does_not_listen_has_no_sockets(make: MakeRunner) -> None:
    async with make(lifespan=listen_jobs.serve) as runner:
        assert (runner.addresses, await runner.run(listen_jobs.sockets)) == ((), [])
    with pytest.raises(percore.RunnerClosed):
        _ = runner.addresses
    with pytest.raises(percore.RunnerClosed, match="not started"):
        _ = make(listen=[TCP]).addresses


@handed_over
@without_calls
async def test_forks_of_a_worker_do_not_keep_its_address(make_real: MakeRunner) -> None:
    async with make_real(lifespan=listen_jobs.serve, listen=[TCP, TCP]) as runner:
        assert await runner.run(listen_jobs.sockets_in_fork) == 0
        assert await _ask(runner.addresses[1]) == "0 1"


# Deaths


@without_calls
async def test_connections_that_wait_outlive_their_worker(make_real: MakeRunner, tmp_path: Path) -> None:
    """A stopped worker accepts nothing. Its replacement does."""
    async with make_real(lifespan=listen_jobs.serve, listen=[TCP, f"unix:{tmp_path}/s"]) as runner:
        pid = (await runner.run(jobs.awhere)).pid
        os.kill(pid, signal.SIGSTOP)
        wait_stopped(pid)
        waiting = [await _connected(address) for address in runner.addresses * 20]
        asking = asyncio.gather(*map(_asked, waiting))
        worker_of(runner).kill()
        assert set(await asking) == {"0 2"}


@handed_over
@without_calls
async def test_a_killed_worker_costs_only_what_it_holds(make_real: MakeRunner, log: Log, gate: Gate) -> None:
    async with make_real(2, lifespan=functools.partial(listen_jobs.serve, log.path), listen=[TCP]) as runner:
        (address,) = runner.addresses
        held: list[asyncio.Task[str]] = []
        holders: list[str] = []
        while set(holders) != {"holds 0 1", "holds 1 1"} or len(held) < 10:
            held.append(asyncio.create_task(_ask(address, f"wait {gate.path}")))
            holders.append(await log.next())
        worker_of(runner).kill()
        while runner.statistics().workers[0].generation == 1:  # until its end is known, it may be about to accept
            await runner.run(jobs.aecho)
        while "0 2" not in await _workers(address):
            """Each one is answered."""
        gate.open()
        ends = await asyncio.gather(*held, return_exceptions=True)
        lost = [holder for holder, end in zip(holders, ends, strict=True) if end == "" or isinstance(end, ConnectionResetError)]
        answered = [end for end in ends if isinstance(end, str) and end]
        assert lost == [holder for holder in holders if holder == "holds 0 1"]
        assert answered == ["1 1"] * holders.count("holds 1 1")


async def test_other_workers_serve_while_a_replacement_starts(make_real: MakeRunner, log: Log, gate: Gate) -> None:
    lifespan = functools.partial(listen_jobs.serve_late, gate.path, log.path)
    async with make_real(2, lifespan=lifespan, listen=[TCP]) as runner:
        worker_of(runner).kill()
        assert await log.next() == "starts"
        assert await _workers(runner.addresses[0]) == {"1 1"}
        gate.open()
        while "0 2" not in await _workers(runner.addresses[0]):
            """It takes its share."""


async def test_a_worker_that_has_served_is_replaced_at_once_however_often_it_dies(make_real: MakeRunner) -> None:
    """It makes no calls, and is no worker that cannot start."""
    async with make_real(lifespan=listen_jobs.serve, listen=[TCP]) as runner:
        for generation in range(1, LIMIT + 2):
            while await _ask_dying(runner.addresses[0]) != f"0 {generation}":
                """The replacement starts."""
            worker_of(runner).kill()
        assert supervisor_of(runner).slots[0].budget.deaths == 0


async def _ask_dying(address: str) -> str:
    """The answer of a worker that may die before it has one; then it is empty."""
    with suppress(BrokenPipeError, ConnectionResetError):
        return await _ask(address)
    return ""


@without_calls
async def test_a_slot_that_is_given_up_has_no_connections(make_real: MakeRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    died = RestartBudget.died
    monkeypatch.setattr(RestartBudget, "died", lambda budget: None if died(budget) is None else 0.0)
    async with make_real(2, lifespan=listen_jobs.serve_once, listen=[TCP]) as runner:
        worker_of(runner).kill()
        while runner.statistics().workers[0].state != "failed":
            assert await runner.run(jobs.aecho, 1) == 1
        assert await _workers(runner.addresses[0]) == {"1 1"}


async def test_a_runner_that_breaks_refuses_connections(make_real: MakeRunner, monkeypatch: pytest.MonkeyPatch) -> None:
    died = RestartBudget.died
    monkeypatch.setattr(RestartBudget, "died", lambda budget: None if died(budget) is None else 0.0)
    async with make_real(lifespan=listen_jobs.serve_once, listen=[TCP]) as runner:
        address = runner.addresses[0]
        worker_of(runner).kill()
        with pytest.raises(percore.RunnerBroken):
            await _call_for_ever(runner)
        await _refused(address)


async def test_servers_that_fail_as_soon_as_they_are_ready_break_the_runner(
    make_real: MakeRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    died = RestartBudget.died
    monkeypatch.setattr(RestartBudget, "died", lambda budget: None if died(budget) is None else 0.0)
    async with make_real(lifespan=life_jobs.always_fails, listen=[TCP]) as runner:
        broken: asyncio.Queue[percore.RunnerBroken] = asyncio.Queue()
        fail = supervisor_of(runner).fail

        def fail_and_tell(error: percore.RunnerBroken) -> None:
            fail(error)
            broken.put_nowait(error)

        monkeypatch.setattr(supervisor_of(runner), "fail", fail_and_tell)
        worker_of(runner).kill()
        assert "the token server is gone" in str(await broken.get())


async def _call_for_ever(runner: Runner) -> None:
    while True:
        await runner.run(jobs.aecho)


# Changes of the pool


@pytest.mark.own_fork_server  # a reload starts another one
@without_calls
async def test_reloads_and_resizes_fail_no_request(make_real: MakeRunner, tmp_path: Path) -> None:
    async with make_real(2, lifespan=listen_jobs.serve, listen=[TCP, f"unix:{tmp_path}/s"]) as runner:
        tcp, unix = runner.addresses
        async with _asking(tcp) as answers, _asking(unix, 2) as others:
            await runner.reload()
            assert await _workers(tcp) <= {"0 1", "1 1", "0 2", "1 2"}
            await runner.resize(4)
            while not {"0 2", "1 2", "2 1", "3 1"} <= set(answers):
                await _ask(tcp)
            await runner.resize(1)
            while len(members_of(runner)) > 1:  # those that were removed accept what waits, and end
                await _ask(tcp)
            assert await _workers(tcp) == await _workers(unix) == {"0 2"}
            await runner.resize(2)
            while "1 3" not in answers:
                await _ask(tcp)
            os.kill((await runner.broadcast(jobs.awhere))[0].pid, signal.SIGTERM)
            while "0 3" not in answers:
                await _ask(tcp)
            await runner.resize(1)
            await runner.resize(2)  # perhaps while the worker that was removed has the socket
            while "1 4" not in answers:
                await _ask(tcp)
        assert answers
        assert others


@without_calls
async def test_a_request_in_a_removed_worker_is_answered(make_real: MakeRunner, log: Log, gate: Gate) -> None:
    async with make_real(2, lifespan=functools.partial(listen_jobs.serve, log.path), listen=[TCP], kill_after=60) as runner:
        (address,) = runner.addresses
        held: list[asyncio.Task[str]] = []
        holders: list[str] = []
        while set(holders) != {"holds 0 1", "holds 1 1"}:
            held.append(asyncio.create_task(_ask(address, f"wait {gate.path}")))
            holders.append(await log.next())
        await runner.resize(1)
        gate.open()
        assert [f"holds {answer}" for answer in await asyncio.gather(*held)] == holders
        while len(members_of(runner)) > 1:
            await runner.run(jobs.aecho)
        assert await _workers(address) == {"0 1"}


# Starts and ends


@without_calls
async def test_an_address_that_cannot_be_had_fails_the_start(make: MakeRunner, tmp_path: Path) -> None:
    with _own() as own:
        name = "{}:{}".format(*own.getsockname())
        unix = f"unix:{tmp_path}/s"
        runner = make(2, listen=[unix, TCP, name])
        with pytest.raises(OSError, match=f"percore cannot listen on {name}: {IN_USE}") as caught:
            await runner.start()
        assert caught.value.errno == errno.EADDRINUSE
        assert not (tmp_path / "s").exists()
        async with make(listen=[unix]):
            with pytest.raises(OSError, match=f"percore cannot listen on {unix}: {IN_USE}"):
                await make(listen=[unix]).start()


@pytest.mark.parametrize("lifespan", [listen_jobs.fails], ids=["lifespan"])
@handed_over
async def test_a_start_that_fails_leaves_the_address_free(make: MakeRunner, lifespan: object) -> None:
    with socket.socket() as sock:  # a port that was free a moment ago
        sock.bind(("127.0.0.1", 0))
        name = "{}:{}".format(*sock.getsockname())
    with pytest.raises(percore.StartupFailed, match="ConnectionError: 2"):
        await make(2, lifespan=lifespan, listen=[name, TCP]).start()
    async with make(2, lifespan=listen_jobs.serve, listen=[name]) as runner:
        assert await _workers(name) <= {"0 1", "1 1"}
        assert runner.addresses == (name,)


@without_calls
async def test_a_close_lets_requests_end_and_then_refuses(make: MakeRunner, log: Log, gate: Gate) -> None:
    async with make(lifespan=functools.partial(listen_jobs.serve, log.path), listen=[TCP], kill_after=60) as runner:
        (address,) = runner.addresses
        held = asyncio.create_task(_ask(address, f"wait {gate.path}"))
        assert await log.next() == "holds 0 1"
        closing = asyncio.create_task(runner.aclose())
        while True:  # until the server has stopped
            try:
                await _ask(address)
            except ConnectionError:
                break
        assert not held.done()
        gate.open()
        assert await held == "0 1"
        await closing
        await _refused(address)


async def test_a_cancelled_close_refuses_connections(make_real: MakeRunner, log: Log, gate: Gate) -> None:
    runner = make_real(2, lifespan=functools.partial(listen_jobs.serve, log.path), listen=[TCP], kill_after=60)
    await runner.start()
    (address,) = runner.addresses
    held = asyncio.create_task(_ask(address, f"wait {gate.path}"))
    await log.next()
    closing = asyncio.create_task(runner.aclose())
    await asyncio.sleep(0)
    closing.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert (await asyncio.gather(held, return_exceptions=True))[0] in ("", *_resets(held))
    await _refused(address)


def _resets(task: "asyncio.Task[str]") -> list[BaseException]:
    error = task.exception()
    return [error] if isinstance(error, ConnectionResetError) else []


@without_calls
async def test_a_runner_that_is_dropped_refuses_connections(make_real: MakeRunner, log: Log, gate: Gate) -> None:
    runner = make_real(lifespan=listen_jobs.serve, listen=[TCP])
    await runner.start()
    (address,), assembly = runner.addresses, runner._assembly
    call = runner.submit(jobs.await_, log.path, gate.path)
    assert await log.next()
    with pytest.warns(ResourceWarning, match="unclosed"):  # noqa: PT031
        del runner
        gc.collect()
    await asyncio.wait([call])
    assert isinstance(call.exception(), percore.RunnerClosed)
    await _refused(address)
    assert assembly is not None
    await assembly.engine.aclose()
