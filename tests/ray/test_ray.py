"""Workers on a real Ray cluster of two nodes: `make test-ray`, in a network of loopback alone."""

import asyncio
import os
import socket
from collections.abc import Iterator
from typing import Any

import pytest

import percore
from percore import Runner
from percore._engines.nodes.engine import NodesEngine
from percore._places.ray import RayPlaces
from tests.hosts import engine_of
from tests.waiting import until

cluster_utils = pytest.importorskip("ray.cluster_utils")


@pytest.fixture(scope="module")
def cluster() -> Iterator[Any]:
    if {name for _, name in socket.if_nameindex()} != {"lo"}:
        pytest.skip("Ray listens on every interface: `make test-ray` gives it a network of loopback alone")
    cluster = cluster_utils.Cluster(initialize_head=True, head_node_args={"num_cpus": 1, "include_dashboard": False})
    cluster.second = cluster.add_node(num_cpus=1)
    yield cluster
    cluster.shutdown()


async def node_of_call() -> int:
    return os.getppid()


async def echo(value: object) -> object:
    return value


async def for_ever() -> None:
    await asyncio.Event().wait()


@pytest.mark.timeout(300)
async def test_calls_run_on_both_nodes_and_one_is_lost(cluster: Any) -> None:
    """The first calls, payloads and shared objects are as on one machine. A killed raylet ends the calls of its node alone."""

    class RayRunner(Runner):
        _make_engine = staticmethod(lambda loop, options, main: NodesEngine(loop, options, main, RayPlaces(cluster.address)))

    async with RayRunner(2, start_timeout=200) as runner:
        links = engine_of(runner).links[:]
        assert len({link.node for link in links}) == 2
        assert len(set(await runner.broadcast(node_of_call))) == 2  # each has a fork server of its own
        assert await runner.map(echo, range(100)) == [*range(100)]
        large = os.urandom(3_000_000)
        assert await runner.run(echo, large) == large
        calls = [runner.submit(for_ever) for _ in range(20)]
        await until(lambda: sum(worker.running for worker in runner.statistics().workers) == 20)
        cluster.remove_node(cluster.second, allow_graceful=False)
        died, running = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        await until(lambda: len(engine_of(runner).links) == 1)
        await until(lambda: sum(call.done() for call in calls) == 10)
        died, running = {call for call in calls if call.done()}, {call for call in calls if not call.done()}
        for call in died:
            error = call.exception()
            assert isinstance(error, percore.WorkerDied)
            assert (error.exitcode, error.started) == (None, True)
            assert "was lost" in error.detail
        assert await runner.run(echo, 1) == 1
        for call in running:
            call.cancel()
        await asyncio.gather(*running, return_exceptions=True)
