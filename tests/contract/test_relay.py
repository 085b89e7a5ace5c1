"""What a relay does beyond the contract: it loses its connection, and its far half has little room."""

import asyncio

import pytest

import percore
from tests import jobs
from tests.contract.pipes import Gate, Log
from tests.relay.near import RelayRunner

pytest.importorskip("numpy")

from tests.contract import buffer_jobs as arrays
from tests.internals import relay_of, slots_used, supervisor_of

FEW_SLOTS = {"max_message": 1 << 36}
"""The far half has 16 slots, and the near half uses 8 of them at most."""


@pytest.mark.warm_fork_server(imports="numpy")
async def test_a_lost_connection_ends_the_workers_and_their_calls(log: Log, gate: Gate) -> None:
    """Nobody knows how far the calls had come. The far half ends by itself."""
    async with RelayRunner(1) as runner:
        calls = [runner.submit(jobs.await_, log.path, gate.path, place) for place in range(3)]
        await log.take(3)
        relay_of(runner).cut()
        for call in calls:
            with pytest.raises(percore.WorkerDied, match="its relay was lost") as caught:
                await call
            assert caught.value.started
        assert await runner.usage() == percore.Usage(())
        await relay_of(runner).far.ended


@pytest.mark.warm_fork_server(imports="numpy")
async def test_payloads_that_have_no_room_wait_in_the_near_half(log: Log, gate: Gate) -> None:
    """So a cancellation reaches calls that were sent, although others before it wait."""
    async with RelayRunner(1, concurrency=20, **FEW_SLOTS) as runner:  # type: ignore[arg-type]
        view = runner.options(retries=1)  # each call keeps its payload to the end
        calls = [view.submit(arrays.await_with, log.path, gate.path, place, arrays.numbers(place)) for place in range(12)]
        await log.take(8)
        sharing = asyncio.create_task(runner.share(arrays.numbers(1)))
        await asyncio.sleep(0)
        assert (slots_used(runner), len(relay_of(runner).far.parcels)) == (12, 8)
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
        await runner.run(jobs.aecho, 1)  # what this half has discarded before, the other one has discarded when it comes there
        assert not relay_of(runner).far.parcels
