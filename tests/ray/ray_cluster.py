"""Workers on a real Ray cluster of two nodes: `make test-ray`, in a network of loopback alone."""

import asyncio
import json
import os
import platform
import shutil
import signal
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
import ray

import percore
from percore import RayEngine, Runner
from tests import jobs
from tests.contract.pipes import Gate, Log, gate, log
from tests.faults import LIMIT, Program, Watch
from tests.ray import ray_jobs
from tests.ray.cluster import CPUS, NODES, VARIABLE
from tests.tls import authority, issued, needs_openssl
from tests.waiting import until

__all__ = ["gate", "log"]

pytestmark = pytest.mark.timeout(120)

ADDRESS, DESCRIPTOR = json.loads(os.environ[VARIABLE])


def order(what: str, value: Any) -> Any:
    """Have the cluster changed."""
    with socket.socket(fileno=os.dup(DESCRIPTOR)) as mine, mine.makefile("rw") as lines:
        print(json.dumps([what, value]), file=lines, flush=True)
        return json.loads(lines.readline())


@pytest.fixture(autouse=True, scope="module")
def warm_ray() -> None:
    """Connect once: descriptors that Ray keeps for ever are no test's leak."""
    ray.init(ADDRESS, configure_logging=False)
    ray.shutdown()


@pytest.fixture(autouse=True)
def no_host_is_left() -> Iterator[None]:
    """They end by themselves, once they have no connection or no actor."""
    yield
    with Watch(hosts()) as ending:
        assert ending.wait_gone(LIMIT) == []
    assert not hosts()
    assert not ray.is_initialized()


@pytest.fixture
def connected() -> Iterator[None]:
    """The program's own connection to Ray."""
    ray.init(ADDRESS, configure_logging=False, log_to_driver=False)
    yield
    ray.shutdown()


def hosts() -> list[int]:
    """The hosts of all nodes, which Ray's actors have started."""
    found = []
    for process in psutil.process_iter(["cmdline"]):
        line = process.info["cmdline"] or []
        if "-c" in line and any("percore._node.main" in part for part in line) and process.status() != psutil.STATUS_ZOMBIE:
            found.append(process.pid)
    return found


async def all_are_free() -> None:
    """Wait until Ray counts every CPU as free: it hears of the end of a test's actors later than their processes end."""
    ray.init(ADDRESS, configure_logging=False, log_to_driver=False)
    try:
        await until(lambda: ray.available_resources().get("CPU") == NODES * CPUS)
    finally:
        ray.shutdown()


async def test_every_verb_is_as_on_one_machine(caplog: pytest.LogCaptureFixture) -> None:
    engine = RayEngine(ADDRESS, runtime_env={"env_vars": {"FLAVOUR": "plum"}})
    async with Runner(engine=engine, lifespan=ray_jobs.lifespan) as runner:
        workers = runner.statistics().workers
        assert len(workers) == NODES * CPUS  # the CPUs that are free
        assert sorted(len([one for one in workers if one.node == node]) for node in {one.node for one in workers}) == [CPUS] * NODES
        told = await runner.broadcast(ray_jobs.state)
        assert [one[1] for one in told] == [one.node for one in workers]
        assert {(one[0], one[2]) for one in told} == {("open", "plum")}
        assert await runner.map(jobs.aadd, range(500)) == [*range(500)]
        assert [item async for item in runner.stream(ray_jobs.items, 100)] == [*range(100)]
        large = os.urandom(3_000_000)
        assert await runner.run(jobs.aecho, large) == large
        shared = await runner.share(large)
        assert await runner.broadcast(ray_jobs.value_of, shared) == [len(large)] * len(workers)
        shared.close()
        keyed = runner.options(key="one host")
        assert len({worker.pid for worker in await asyncio.gather(*(keyed.run(jobs.awhere) for _ in range(20)))}) == 1
        assert await runner.run(ray_jobs.nested, 10) == 45
        call = runner.submit(ray_jobs.for_ever)
        await until(lambda: sum(one.running for one in runner.statistics().workers) == 1)
        call.cancel()
        await until(lambda: sum(one.running for one in runner.statistics().workers) == 0)
        with pytest.raises(ZeroDivisionError):
            await runner.run(jobs.fail, ZeroDivisionError())
        await runner.run(ray_jobs.says, "hello")
        await until(lambda: any(record.getMessage() == "hello" for record in caplog.records))
        (record,) = (record for record in caplog.records if record.getMessage() == "hello")
        assert record.__dict__["node"] in {one.node for one in workers}
        roles = [process.role for process in (await runner.usage()).processes]
        assert len([role for role in roles if role.startswith("host ")]) == NODES


async def test_a_killed_worker_and_a_killed_host(log: Log, gate: Gate) -> None:
    await all_are_free()  # else both workers may get places on one node
    async with Runner(2, engine=RayEngine(ADDRESS)) as runner:
        calls = [runner.submit(jobs.await_, log.path, gate.path, place) for place in range(2)]
        await log.take(2)
        first, second = runner.statistics().workers
        assert first.node != second.node  # spread
        assert first.pid is not None
        assert second.pid is not None
        os.kill(first.pid, signal.SIGSEGV)
        ended, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        with pytest.raises(percore.WorkerDied) as caught:
            await ended.pop()
        assert (caught.value.signal, caught.value.pid, caught.value.node) == ("SIGSEGV", first.pid, first.node)
        host = psutil.Process(second.pid).parent()
        while host is not None and host.pid not in hosts():
            host = host.parent()
        assert host is not None
        with Watch([second.pid]) as watch:
            host.kill()
            with pytest.raises(percore.WorkerDied):
                await asyncio.gather(*calls)
            while not all(call.done() for call in calls):
                await asyncio.wait(calls)
            assert watch.wait_gone(LIMIT) == []
        assert {call.exception().node for call in calls} == {first.node, second.node}  # type: ignore[union-attr]
        gate.open()
        again = runner.options(retries=1)
        assert await asyncio.gather(*(again.run(jobs.await_, log.path, gate.path, place) for place in range(4))) == [0, 1, 2, 3]
        await until(lambda: {one.node for one in runner.statistics().workers if one.state == "ready"} == {first.node})


async def test_a_node_joins_and_its_raylet_dies(log: Log, gate: Gate) -> None:
    """`resize` uses the new node. Its death ends the calls that run there; the others go on, and its slot moves."""
    async with Runner(NODES * CPUS, engine=RayEngine(ADDRESS)) as runner:
        before = {one.node for one in runner.statistics().workers}
        joined = await asyncio.to_thread(order, "add", {"num_cpus": 1})
        try:
            await runner.resize(NODES * CPUS + 1)
            (new,) = (one for one in runner.statistics().workers if one.node not in before)
            calls = {runner.submit(jobs.await_, log.path, gate.path, place): place for place in range(NODES * CPUS + 1)}
            await log.take(len(calls))
            await asyncio.to_thread(order, "kill", joined)  # nobody reaps it, so Ray takes it for alive
            ended, _ = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        finally:
            await asyncio.to_thread(order, "remove", joined)
        with pytest.raises(percore.WorkerDied, match="was lost") as caught:
            await ended.pop()
        error = caught.value
        assert (error.exitcode, error.started, error.node) == (None, True, new.node)
        await until(lambda: [one.state for one in runner.statistics().workers] == ["ready"] * (NODES * CPUS + 1))
        assert {one.node for one in runner.statistics().workers} == before
        gate.open()
        (dead,) = (place for call, place in calls.items() if call.done() and call.exception() is error)
        rest = [(call, place) for call, place in calls.items() if place != dead]
        assert await asyncio.gather(*(call for call, _ in rest)) == [place for _, place in rest]


def test_the_death_of_the_program_ends_everything(tmp_path: Path) -> None:
    with (
        Program("waits", ADDRESS, stderr=tmp_path / "stderr", module="tests.ray.programs") as program,
        Watch(json.loads(program.line())) as everybody,
    ):
        assert len(everybody) >= 2 * NODES
        os.kill(program.pid, signal.SIGKILL)
        assert everybody.wait_gone(LIMIT) == []


@needs_openssl
def test_where_ray_has_tls_the_connections_have_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Both sides use Ray's certificates, and verify those of the other."""
    certificate, key, ca = issued(tmp_path, authority(tmp_path))
    monkeypatch.setenv("RAY_USE_TLS", "1")
    for name, value in [("SERVER_CERT", certificate), ("SERVER_KEY", key), ("CA_CERT", ca)]:
        monkeypatch.setenv(f"RAY_TLS_{name}", value)
    with Program("secure", "", stderr=tmp_path / "stderr", module="tests.ray.programs") as program:
        assert json.loads(program.line(100)) == [3, "TLSv1.3", True]
        assert program.end() == 0


# What cannot be used


async def failure(engine: RayEngine, **options: Any) -> str:
    with pytest.raises(percore.StartupFailed) as caught:
        await Runner(**{"workers": 2, "start_timeout": 20.0} | options, engine=engine).start()
    return str(caught.value)


def altered(folder: Path, old: str, new: str) -> RayEngine:
    """An engine whose nodes have a percore with another text in its `__init__`."""
    package = folder / "percore"
    shutil.copytree(Path(percore.__file__).parent, package, ignore=shutil.ignore_patterns("__pycache__"))
    text = (package / "__init__.py").read_text()
    assert old in text
    (package / "__init__.py").write_text(text.replace(old, new))
    return RayEngine(ADDRESS, runtime_env={"env_vars": {"PYTHONPATH": str(folder)}})


async def test_another_version_of_percore(tmp_path: Path) -> None:
    text = await failure(altered(tmp_path, f'__version__ = "{percore.__version__}"', '__version__ = "0.0.7"'))
    assert "percore 0.0.7" in text
    assert f"percore {percore.__version__}: install the same on all nodes" in text
    assert "node " in text
    assert "(127.0.0.1:" in text


async def test_no_percore(tmp_path: Path) -> None:
    missing = "raise ModuleNotFoundError(\"No module named 'percore'\", name='percore')\nimport sys\n"
    text = await failure(altered(tmp_path, "import sys\n", missing))
    assert "could not start a host" in text
    assert f"it needs percore {percore.__version__}" in text


@pytest.mark.usefixtures("connected")
async def test_no_free_cpu_and_the_programs_own_connection() -> None:
    """The runners use the connection of the program, and leave it open."""
    assert ray.get(remote_start(ADDRESS)) == "RuntimeError: this is a Ray task or actor"
    group = ray.util.placement_group([{"CPU": CPUS}] * NODES, strategy="STRICT_SPREAD")
    await asyncio.to_thread(ray.get, group.ready())
    for workers in (2, None):
        text = await failure(RayEngine(), workers=workers, start_timeout=2.0)
        assert "no node of the Ray cluster has a free CPU, and none got one in 1.6 s (all its CPUs: " in text
    ray.util.remove_placement_group(group)
    async with Runner(1, engine=RayEngine()) as runner:
        assert await runner.run(jobs.aadd, 1, 2) == 3
    assert ray.is_initialized()
    text = await failure(RayEngine(resources={"GPU": 1}), start_timeout=2.0)
    assert "has a free CPU and {'GPU': 1}" in text


def remote_start(address: str) -> Any:
    def start() -> str:
        async def main() -> str:
            try:
                await Runner(1, engine=RayEngine(address)).start()
            except percore.StartupFailed as error:
                return str(error).partition("cannot be used: ")[2].partition(".")[0]
            return "it started"

        return asyncio.run(main())

    return ray.remote(start).options(num_cpus=0).remote()


async def test_another_version_of_python(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray compares the two."""
    here = ray.__version__, "3.99.1"
    monkeypatch.setattr("ray._private.utils.compute_version_info", lambda: here)
    text = await failure(RayEngine(ADDRESS))
    assert f"Ray at {ADDRESS} cannot be used: RuntimeError: Version mismatch" in text
    assert "Python: 3.99.1" in text
    assert f"Python: {platform.python_version()}" in text


async def test_no_cluster(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        port = unused.getsockname()[1]
        text = await failure(RayEngine(f"127.0.0.1:{port}"))
        assert f"Ray at 127.0.0.1:{port} cannot be used: ConnectionRefusedError" in text
        unused.listen()
        # In a program of its own: Ray goes on trying in a thread, which does not keep a program from its end.
        with Program("fails", f"127.0.0.1:{port}", stderr=tmp_path / "stderr", module="tests.ray.programs") as program:
            assert f"Ray at 127.0.0.1:{port} did not answer within 1.6 s" in program.line()
            assert program.end() == 0
