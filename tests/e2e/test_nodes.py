"""Nodes whose hosts are processes: what becomes of calls and workers when a host, a worker or the program dies or freezes."""

import asyncio
import json
import os
import signal
import sys
from collections.abc import Collection
from pathlib import Path
from typing import Any

import psutil
import pytest

import percore
from percore import Runner
from percore._engines.nodes import engine as nodes
from percore._engines.nodes.engine import NodesEngine
from percore._engines.nodes.places import NoPlace, Place
from percore._node.main_source import main_here
from percore._places.local import LOCAL, LocalPlaces
from percore._protocol.host_orders import Greeting
from tests import jobs
from tests.contract.pipes import Gate, Log, gate, log
from tests.e2e.family import Family
from tests.faults import LIMIT, Program, Watch
from tests.hosts import InnerPlaces, NodesRunner, _factory, engine_of, host_runner
from tests.waiting import until

__all__ = ["gate", "log"]


def hosts_of(runner: Runner) -> dict[str, int]:
    places: Any = engine_of(runner)._places
    return {name: host.pid for name, host in places.hosts.items()}


def workers_of(runner: Runner) -> list[int]:
    return [worker.pid for worker in runner.statistics().workers if worker.pid is not None]


def node_of(runner: Runner, pid: int) -> str:
    return next(link.node for link in engine_of(runner).links for worker in link.workers.values() if worker.pid == pid)


async def both_ready(runner: Runner) -> None:
    async with asyncio.timeout(LIMIT):
        await until(lambda: [worker.state for worker in runner.statistics().workers] == ["ready"] * 2)


async def test_a_dead_worker_and_a_dead_host(log: Log, gate: Gate, caplog: pytest.LogCaptureFixture) -> None:
    """A worker's death is told as on one machine. A host's ends its calls, and its slot moves to the other node.

    A host's own log records arrive, too: here of its fork server.
    """
    async with host_runner()(2) as runner:
        calls = [runner.submit(jobs.await_, log.path, gate.path, place) for place in range(2)]
        await log.take(2)
        victim = workers_of(runner)[1]
        os.kill(victim, signal.SIGSEGV)
        ended, (other,) = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        with pytest.raises(percore.WorkerDied) as caught:
            await ended.pop()
        assert (caught.value.exitcode, caught.value.pid, caught.value.started) == (-signal.SIGSEGV, victim, True)
        await both_ready(runner)
        orphan = workers_of(runner)[0]
        node = node_of(runner, orphan)
        with Watch([orphan]) as watch:
            os.kill(hosts_of(runner)[node], signal.SIGKILL)
            with pytest.raises(percore.WorkerDied, match=f"its node {node} was lost") as lost:
                await other
            assert (lost.value.exitcode, lost.value.pid, lost.value.started) == (None, orphan, True)
            assert watch.wait_gone(LIMIT) == []
        gate.open()
        again = runner.options(retries=1)
        assert await asyncio.gather(*(again.run(jobs.await_, log.path, gate.path, place) for place in range(4))) == [0, 1, 2, 3]
        await both_ready(runner)
        assert node not in {node_of(runner, pid) for pid in workers_of(runner)}
        (left,) = engine_of(runner).links
        (server,) = psutil.Process(hosts_of(runner)[left.node]).children()
        server.kill()
        async with asyncio.timeout(LIMIT):
            await until(lambda: any("the fork server" in text for text in caplog.messages))
        (record,) = [record.__dict__ for record in caplog.records if "the fork server" in record.getMessage()]
        assert (record["node"], record["worker"], record["process"]) == (left.node, None, hosts_of(runner)[left.node])
        await both_ready(runner)


async def test_slots_are_dealt_by_the_weights_of_the_nodes() -> None:
    class Weighed(Runner):
        _make_engine = _factory(lambda: InnerPlaces(2, 1, 3), 60.0)

    async with Weighed(4) as runner:
        assert [worker.node for worker in runner.statistics().workers] == ["b", "b", "a", "b"]


async def test_a_frozen_host_is_lost_and_its_workers_end_when_it_thaws(log: Log, gate: Gate) -> None:
    async with host_runner(lost_after=3.0)(2) as runner:
        calls = [runner.options(retries=1).submit(jobs.await_, log.path, gate.path, place) for place in range(2)]
        await log.take(2)
        host = hosts_of(runner)["b"]
        link = next(link for link in engine_of(runner).links if link.node == "b")
        (worker,) = link.workers.values()
        assert worker.pid is not None
        with Watch([host, worker.pid]) as frozen:
            os.kill(host, signal.SIGSTOP)
            await log.take(1)  # the call that was there runs on the other node
            os.kill(host, signal.SIGCONT)
            assert frozen.wait_gone(LIMIT) == []
        gate.open()
        assert await asyncio.gather(*calls) == [0, 1]


def test_the_death_of_the_program_ends_everything(tmp_path: Path) -> None:
    """At once, since the connections break. Before that, functions and classes of `__main__` were found on the nodes."""
    family = Family()
    with family.marked():
        program = Program("60", stderr=tmp_path / "stderr", module="tests.e2e.node_programs")
    with program:
        lines = sorted(program.line() for _ in range(3))
        value, is_mine, hosts, workers = json.loads(lines[0])
        assert (value, is_mine, lines[1:]) == (4, True, ["began", "began"])
        with Watch([*hosts, *workers]) as everybody:
            assert len(everybody) == 4
            os.kill(program.pid, signal.SIGKILL)
            assert everybody.wait_gone(LIMIT) == []
    assert family.wait_gone(LIMIT) == []


def test_a_stopped_program_is_gone_for_its_nodes(tmp_path: Path) -> None:
    """Its machine may be cut off: the workers end before it could take the nodes for lost, although no connection breaks."""
    with Program("1.5", stderr=tmp_path / "stderr", module="tests.e2e.node_programs") as program:
        told = json.loads(min(program.line() for _ in range(3)))
        with Watch([*told[2], *told[3]]) as everybody:
            os.kill(program.pid, signal.SIGSTOP)
            assert everybody.wait_gone(LIMIT) == []


# The start


async def start_error(places: Any, **options: Any) -> str:
    class Here(Runner):
        _make_engine = _factory(lambda: places, 60.0)

    with pytest.raises(percore.StartupFailed) as caught:
        await Here(1, **options).start()
    return str(caught.value)


async def test_other_versions_are_told_with_both(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "greeting", lambda pid: Greeting("cpython 3.99", "0.0.1", pid))
    text = await start_error(InnerPlaces(2))
    assert "node a (127.0.0.1:" in text
    assert f"it has cpython 3.{os.sys.version_info[1]} and percore {percore.__version__}" in text  # type: ignore[attr-defined]
    assert "this program cpython 3.99 and percore 0.0.1: install the same on all nodes" in text


class Unreachable(InnerPlaces):
    """Says that its hosts listen where nobody does, or where somebody else does."""

    def __init__(self, port: int) -> None:
        super().__init__(1)
        self.port = port

    async def place(self, token: bytes, used: Collection[str], workers: int) -> list[Place | NoPlace]:
        return [place._replace(port=self.port) for place in await super().place(token, used, workers) if isinstance(place, Place)]


async def test_a_port_that_cannot_be_reached_is_told_with_its_node() -> None:
    server = await asyncio.start_server(lambda _, writer: writer.close(), LOCAL)
    port = server.sockets[0].getsockname()[1]
    text = await start_error(Unreachable(port))
    assert f"node a ({LOCAL}:{port})" in text
    server.close()
    await server.wait_closed()
    text = await start_error(Unreachable(port))
    assert f"node a ({LOCAL}:{port}) cannot be reached" in text
    assert "let connections from this machine to all its ports through" in text


class Slow(Unreachable):
    """Takes a third of the time that a start has."""

    async def place(self, token: bytes, used: Collection[str], workers: int) -> list[Place | NoPlace]:
        until = asyncio.get_running_loop().time() + 0.3
        placed = await super().place(token, used, workers)
        await asyncio.sleep(until - asyncio.get_running_loop().time())
        return placed


async def test_a_peer_that_never_answers_is_told_in_time() -> None:
    writers: list[asyncio.StreamWriter] = []
    server = await asyncio.start_server(lambda _, writer: writers.append(writer), LOCAL)
    text = await start_error(Slow(server.sockets[0].getsockname()[1]), start_timeout=1)
    assert "did not answer in time" in text
    for writer in writers:
        writer.close()
    server.close()
    await server.wait_closed()


async def test_a_host_that_does_not_start_is_told() -> None:
    text = await start_error(LocalPlaces(1, python="/bin/true"))
    assert "the host of node a ended with exit code 0 before it listened" in text


async def test_what_cannot_work_on_nodes_is_refused() -> None:
    with pytest.raises(ValueError, match=r"listen=\.\.\. needs workers on this machine"):
        await NodesRunner(1, listen=["127.0.0.1:0"]).start()
    with pytest.raises(ValueError, match="harden=True closes processes of this machine"):
        await NodesRunner(1, harden=True).start()


# No node


class Closing(InnerPlaces):
    """Has nodes until it is closed."""

    is_closed = False

    async def place(self, token: bytes, used: Collection[str], workers: int) -> list[Place | NoPlace]:
        if self.is_closed:
            raise NoPlace("there is no node left")
        return await super().place(token, used, workers)


class ClosingRunner(Runner):
    _make_engine = _factory(lambda: Closing(2), 60.0)


def cut_all(engine: NodesEngine) -> None:
    for link in engine.links[:]:
        link.connection.cut()


async def test_calls_wait_for_a_node_when_none_is_left(
    log: Log, gate: Gate, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(nodes, "_PAUSE", 0.001)
    async with ClosingRunner(2, start_timeout=1.5) as runner:
        call = runner.options(retries=1).submit(jobs.await_, log.path, gate.path, 1)
        await log.take(1)
        cut_all(engine_of(runner))
        await log.take(1)
        gate.open()
        assert await call == 1
        places: Any = engine_of(runner)._places
        places.is_closed = True
        call = runner.submit(jobs.aecho, 1)
        await call
        cut_all(engine_of(runner))
        await until(lambda: not engine_of(runner).links)
        call = runner.submit(jobs.aecho, 2)
        await until(lambda: engine_of(runner).no_place)
        places.is_closed = False
        assert await call == 2
        places.is_closed = True
        cut_all(engine_of(runner))
        with pytest.raises(percore.RunnerBroken, match=r"found within start_timeout=1\.5 s: there is no node left") as broken:
            await runner.run(jobs.aecho, 1)
        assert broken.value.deaths == 0
        assert caplog.messages.count("percore: no node can be used: there is no node left") == 2


# Hosts that hang


async def test_a_program_that_cancels_all_tasks_and_goes_on_finds_nodes_later() -> None:
    async def find() -> None:
        await asyncio.Event().wait()

    loop = asyncio.get_running_loop()
    engine: Any = NodesEngine.__new__(NodesEngine)
    vars(engine).update(_loop=loop, _search=None, _again=None, _is_closed=False, _find=find)
    engine._find_nodes()
    engine._search.cancel()
    await asyncio.wait([engine._search])
    await asyncio.sleep(0)
    assert engine._search is None
    engine._again.cancel()


async def test_a_host_that_never_says_where_it_listens_stops_no_close(tmp_path: Path) -> None:
    hangs = tmp_path / "python"
    hangs.write_text("#!/bin/sh\nexec sleep 1000\n")
    hangs.chmod(0o700)
    text = await start_error(LocalPlaces(1, python=str(hangs)), start_timeout=0.5)
    assert "no node could be used within 0.45 s" in text


async def test_one_host_that_does_not_start_leaves_the_others(tmp_path: Path) -> None:
    fails = tmp_path / "python"
    fails.write_text(f'#!/bin/sh\nmkdir {tmp_path}/first 2> /dev/null && exit 3\nexec {sys.executable} "$@"\n')
    fails.chmod(0o700)
    places = LocalPlaces(2, python=str(fails))
    placed = await places.place(bytes(32), (), 2)
    assert sorted(type(one).__name__ for one in placed) == ["NoPlace", "Place"]
    await places.aclose()


# `__main__`


async def test_a_host_removes_the_source_that_it_was_given(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    orders = NodesEngine._orders_for

    def of_a_script(*args: Any) -> Any:
        return orders(*args)._replace(main=("script", "/nowhere/script.py"), source=b"x = 1\n")

    def folders() -> list[str]:
        return [name for name in os.listdir(tmp_path) if name.startswith("percore-")]

    monkeypatch.setattr(NodesEngine, "_orders_for", of_a_script)
    async with host_runner(1)(1) as runner:
        assert [os.listdir(tmp_path / folder) for folder in folders()] == [["script.py"]]
        assert await runner.run(jobs.aecho, 1) == 1
    assert folders() == []


def test_a_script_that_the_node_lacks_runs_from_its_source(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text("x = 1\n")
    there = main_here(("script", str(script)), b"x = 1\n")
    assert (there.kind, there.target) == ("script", str(script))
    for source in (b"x = 2\n", b"x = 3\n"):
        other = main_here(("script", str(script)), source)
        assert other.target != str(script)
        assert Path(other.target).name == "script.py"
        assert Path(other.target).read_bytes() == source
    assert main_here(("module", "pkg.mod"), None) == ("module", "pkg.mod")
