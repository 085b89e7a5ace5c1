"""What nodes do beyond the contract: one is lost, and the others have little room."""

import asyncio

import pytest

import percore
from tests import jobs, log_jobs
from tests.contract.pipes import Gate, Log
from tests.hosts import NodesRunner, OneNodeRunner, engine_of, inner_hosts

pytest.importorskip("numpy")

from tests.contract import buffer_jobs as arrays
from tests.internals import slots_used, supervisor_of
from tests.waiting import until

FEW_SLOTS = {"max_message": 1 << 36}
"""A host has 16 slots, and the program uses 8 of them at most."""


@pytest.mark.warm_fork_server(imports="numpy")
async def test_a_lost_node_ends_its_calls_and_its_slots_move(log: Log, gate: Gate) -> None:
    """Nobody knows how far the calls had come. The host ends by itself."""
    async with NodesRunner(2) as runner:
        calls = [runner.submit(jobs.await_, log.path, gate.path, place) for place in range(4)]
        await log.take(4)
        first, _ = engine_of(runner).links
        lost = {worker.pid for worker in first.workers.values()}
        first.connection.cut()
        outcomes = asyncio.gather(*calls, return_exceptions=True)
        await inner_hosts(engine_of(runner))[0].ended
        await until(lambda: [it.state for it in runner.statistics().workers] == ["ready"] * 2)
        assert [link.node for link in engine_of(runner).links] == ["b"]
        assert [worker.node for worker in runner.statistics().workers] == ["b", "b"]
        gate.open()
        died = [error for error in await outcomes if isinstance(error, percore.WorkerDied)]
        assert len(died) == 2
        for error in died:
            assert (error.started, error.exitcode, error.node, {error.pid}) == (True, None, "a", lost)
            assert "its node a was lost" in error.detail
        assert await runner.run(jobs.aecho, 1) == 1


@pytest.mark.warm_fork_server(imports="numpy")
async def test_slots_are_dealt_to_nodes_in_turn_and_each_part_names_its_node(caplog: pytest.LogCaptureFixture) -> None:
    async with NodesRunner(3) as runner:
        here = await runner.broadcast(percore.current_worker)
        await runner.broadcast(log_jobs.say, "here")
        statistics = runner.statistics()
        records = [record.__dict__ for record in caplog.records if record.getMessage() == "here"]
        usage = await runner.usage()
    assert [worker.node for worker in here] == ["a", "b", "a"]
    assert [worker.node for worker in statistics.workers] == ["a", "b", "a"]
    assert [line.split()[-1] for line in str(statistics).splitlines()[:4]] == ["node", "a", "b", "a"]
    assert {(record["worker"], record["process"], record["node"]) for record in records} == {
        (worker.index, worker.pid, worker.node) for worker in here
    }
    assert {(one.role, one.pid) for one in usage.processes} >= {(f"worker {worker.index}", worker.pid) for worker in here}
    assert {one.role for one in usage.processes} >= {"supervisor", "host a", "host b"}


@pytest.mark.warm_fork_server(imports="numpy")
async def test_payloads_that_have_no_room_wait_in_the_program(log: Log, gate: Gate) -> None:
    """So a cancellation reaches calls that were sent, although others before it wait."""
    async with OneNodeRunner(1, concurrency=20, **FEW_SLOTS) as runner:  # type: ignore[arg-type]
        view = runner.options(retries=1)  # each call keeps its payload to the end
        calls = [view.submit(arrays.await_with, log.path, gate.path, place, arrays.numbers(place)) for place in range(12)]
        await log.take(8)
        (host,) = inner_hosts(engine_of(runner))
        sharing = asyncio.create_task(runner.share(arrays.numbers(1)))
        await asyncio.sleep(0)
        assert (slots_used(runner), len(host.parcels)) == (12, 8)
        (member,) = supervisor_of(runner).members
        assert len(member.parked) == 4
        calls.pop().cancel()
        calls.pop(0).cancel()
        await log.take(1)
        gate.open()
        assert await asyncio.gather(*calls) == [True] * 10
        (await sharing).close()
        assert await runner.run(arrays.ause_up, 1, arrays.numbers(1))
        while slots_used(runner):
            await runner.run(jobs.aecho, 1)
        await runner.run(jobs.aecho, 1)  # what the program has discarded before, the host has discarded when it comes there
        assert not host.parcels
