"""What nodes do beyond the contract: one is lost, and the others have little room."""

import asyncio
import socket
import struct
import tracemalloc
from contextlib import suppress
from time import monotonic
from typing import Any

import pytest

import percore
from percore._engines.nodes import engine as nodes
from percore._engines.nodes.link import NodeLink
from percore._node import host as hosts
from percore._node.station import KEPT
from tests import jobs, log_jobs
from tests.contract.pipes import Gate, Log
from tests.hosts import NodesRunner, OneNodeRunner, engine_of, inner_hosts

pytest.importorskip("numpy")

from tests.contract import buffer_jobs as arrays
from tests.contract import share_jobs
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


@pytest.mark.parametrize("part", ["report", "forget"])
async def test_the_calls_of_a_lost_node_end_although_a_part_of_the_loss_fails(
    *, log: Log, gate: Gate, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, part: str
) -> None:
    """The log handlers of the user may raise, for example."""

    def fails(*_: object) -> None:
        raise RuntimeError("it fails")

    async with NodesRunner(2) as runner:
        calls = [runner.submit(jobs.await_, log.path, gate.path, place) for place in range(2)]
        await log.take(2)
        engine = engine_of(runner)
        with monkeypatch.context() as patch:
            patch.setattr(nodes if part == "report" else engine.store, part, fails)
            engine.links[1].connection.give_up("it was lost")
        assert "an internal error while a node was lost; percore goes on" in caplog.text
        ended, (other,) = await asyncio.wait(calls, return_when=asyncio.FIRST_COMPLETED)
        assert [type(call.exception()) for call in ended] == [percore.WorkerDied]
        await inner_hosts(engine)[1].ended
        gate.open()
        await other


async def test_a_search_for_nodes_that_fails_is_logged_and_made_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    searches: list[str] = []
    search = nodes.NodesEngine._search_once

    async def once(self: Any) -> list[str]:
        searches.append("begun")
        if len(searches) == 1:
            raise RuntimeError("it fails")
        return await search(self)

    async with NodesRunner(2) as runner:
        engine: Any = engine_of(runner)
        monkeypatch.setattr(nodes.NodesEngine, "_search_once", once)
        monkeypatch.setattr(nodes, "_PAUSE", 0.0)
        engine._find_nodes()
        await until(lambda: len(searches) == 2 and engine._search is None)
        assert await runner.map(jobs.aecho, range(4)) == list(range(4))
    (record,) = (one for one in caplog.records if one.exc_info)
    assert record.getMessage() == "percore: an internal error while nodes were searched for; percore goes on"


async def test_d3_a_node_is_lost_in_the_middle_of_a_reload(subtests: pytest.Subtests) -> None:
    """The reload ends, with its workers or with StartupFailed; the slots have workers, and the next reload works."""
    for index in range(2):
        with subtests.test(node=index):
            async with NodesRunner(2) as runner:
                calls = [runner.submit(jobs.aecho, place) for place in range(20)]
                lost = engine_of(runner).links[index]
                reload = asyncio.create_task(runner.reload())
                await until(lambda: any(slot.next is not None for slot in supervisor_of(runner).slots))
                lost.connection.cut()
                with suppress(percore.StartupFailed):
                    await reload
                await inner_hosts(engine_of(runner))[index].ended
                await until(lambda: [it.state for it in runner.statistics().workers] == ["ready"] * 2)
                for place, outcome in enumerate(await asyncio.gather(*calls, return_exceptions=True)):
                    assert outcome == place or isinstance(outcome, percore.WorkerDied)
                await runner.reload()
                assert await runner.map(jobs.aecho, range(10)) == list(range(10))


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
        assert (slots_used(runner), len(host.parcels)) == (8, 8)
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


@pytest.mark.warm_fork_server(imports="numpy")
async def test_a_shared_object_is_sent_once_to_each_node_that_needs_it() -> None:
    """It lies there in one slot, which the workers of the node map, until it is closed."""
    async with NodesRunner(4, max_message=1 << 24) as runner:
        store = engine_of(runner).store
        hosts = inner_hosts(engine_of(runner))
        shared = await runner.share(arrays.numbers(1, 1 << 20))
        assert [len(host.parcels) for host in hosts] == [0, 0]
        assert await runner.run(share_jobs.item_of, shared, 7) == 8
        assert sorted(len(host.parcels) for host in hosts) == [0, 1]
        assert await runner.broadcast(share_jobs.item_of, shared, 7) == [8] * 4
        assert [list(host.parcels) for host in hosts] == [list(store.carried_to(link)) for link in engine_of(runner).links]
        assert [len(host.parcels) for host in hosts] == [1, 1]
        assert [host.engine.store.in_use for host in hosts] == [1, 1]
        shared.close()
        while store.in_use:
            await runner.broadcast(jobs.aecho, 1)
        await runner.broadcast(jobs.aecho, 1)
        assert [host.engine.store.in_use for host in hosts] == [0, 0]


@pytest.mark.warm_fork_server(imports="numpy")
async def test_large_payloads_are_not_copied_into_python_s_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """From a slot here into a slot of the node, and from a worker's slot into the memory that the result keeps."""
    size = 1 << 20
    async with OneNodeRunner(1) as runner:
        (host,) = inner_hosts(engine_of(runner))
        kept: list[object] = []
        monkeypatch.setattr(host.engine.store, "keep", kept.append)
        array = await runner.run(arrays.anumbers, 5, size)
        assert arrays.is_numbers(5, array)
        assert (array.flags.writeable, array.flags.owndata) == (True, False)
        assert await runner.run(arrays.is_a_view, array)
        del array
        assert kept == []
        (channel,) = [worker.channel for worker in engine_of(runner).links[0].workers.values()]
        assert await runner.run(jobs.aecho, bytes(size)) == bytes(size)
        assert channel._large == {}


async def test_a_host_that_was_suspended_hears_its_program_or_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    """The monotonic clock stands still meanwhile. The program may have taken the node for lost, without a word that arrives."""
    async with OneNodeRunner(1) as runner:
        (link,) = engine_of(runner).links
        (first,) = inner_hosts(engine_of(runner))
        engine_of(runner)._pulse.end()
        suspended = 0.0
        monkeypatch.setattr(hosts, "_clock", lambda: monotonic() + suspended)

        def resume(after: float) -> None:
            nonlocal suspended
            for time in (suspended, after):
                suspended = time
                assert first._watch is not None
                first._watch.cancel()
                first._look()

        resume(100.0)
        link.connection.beat_here()
        await until(lambda: first._last > monotonic())
        assert await runner.run(jobs.aecho, 1) == 1
        resume(200.0)
        await first.ended
        assert await runner.run(jobs.aecho, 2) == 2


async def test_a_host_whose_clock_has_gained_half_a_minute_begins_calls_in_time() -> None:
    """Two clocks run apart, by seconds in a day, and that of a suspended machine stands still."""
    async with OneNodeRunner(1) as runner:
        (link,) = engine_of(runner).links
        (host,) = inner_hosts(engine_of(runner))
        host._beat(0, memoryview(struct.pack("<d", monotonic() + 30.0)))  # weeks ago
        for _ in range(2 * KEPT):
            link.connection.beat_here()
        assert await runner.options(queue_timeout=5.0).run(jobs.aecho, 1) == 1


@pytest.mark.warm_fork_server(imports="numpy")
async def test_a_host_that_cannot_read_usage_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    async with OneNodeRunner(1) as runner:
        (host,) = inner_hosts(engine_of(runner))

        async def usage(_: object) -> None:
            raise OSError("no /proc")

        monkeypatch.setattr(host.engine, "usage", usage)
        with pytest.raises(RuntimeError, match=r"^node a cannot tell: OSError\('no /proc'\)$"):
            await runner.usage()
        assert await runner.run(jobs.aecho, 1) == 1


async def test_a_reading_ends_with_the_runner_although_its_host_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nodes, "_END", 0.05)
    runner = OneNodeRunner(1)
    await runner.start()
    (host,) = inner_hosts(engine_of(runner))
    asked, answers = asyncio.Event(), asyncio.Event()

    async def usage(_: object) -> Any:
        asked.set()
        await answers.wait()
        raise OSError("too late")

    monkeypatch.setattr(host.engine, "usage", usage)
    reading = asyncio.create_task(runner.usage())
    await asked.wait()
    closing = asyncio.create_task(runner.aclose())
    assert len((await reading).processes) == 1  # that of the program
    answers.set()
    await closing


async def test_a_close_that_asyncio_run_cancels_leaves_nothing() -> None:
    """It cancels all tasks, percore's own, too. A fixture looks for threads and mappings."""
    runner = OneNodeRunner(1)
    await runner.start()
    closing = asyncio.create_task(runner.aclose())
    engine = engine_of(runner)
    await until(lambda: engine._is_closed)
    (task,) = (task for task in asyncio.all_tasks() if task.get_name() == "percore-close")
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await closing
    assert engine.links == []


async def test_a_host_that_is_lost_with_its_answer_gets_no_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    """1. the host says how much room it has, and dies  2. one turn of the loop reads both  3. the engine goes on with the room."""

    def answered(link: NodeLink, number: int, data: memoryview) -> None:
        answer(link, number, data)
        link.connection.give_up("it was lost with its answer")

    answer = NodeLink._answer
    monkeypatch.setattr(NodeLink, "_answer", answered)
    with pytest.raises(percore.StartupFailed, match=r"node a .* its host has ended: .* it was lost with its answer"):
        await OneNodeRunner(1).start()


async def test_a_host_that_is_told_its_end_twice_at_once_ends() -> None:
    """The program asks for the end, and dies in the same moment."""
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()):
        theirs, _ = server.accept()
        host = hosts.Host(asyncio.get_running_loop(), theirs, 1)
        host._over("")
        host._over("its connection was closed")
        await host.ended


# A slow link

FOUR_RESULTS = {"max_message": 1 << 34}
"""A worker has four slots for large results."""

LARGE = 8 << 20


@pytest.mark.warm_fork_server(imports="numpy")
async def test_a_link_that_takes_nothing_stops_the_worker_and_fills_no_memory() -> None:
    """Results stay in the worker's slots, of which there are four; those that the sockets have taken are the kernel's."""
    async with OneNodeRunner(1, concurrency=16, **FOUR_RESULTS) as runner:  # type: ignore[arg-type]
        (link,) = engine_of(runner).links
        (host,) = inner_hosts(engine_of(runner))
        loop = asyncio.get_running_loop()
        await runner.run(arrays.anumbers, 1, 10)
        loop.remove_reader(link.connection._sock)
        tracemalloc.start()
        calls = [runner.submit(arrays.anumbers, place, LARGE // 8) for place in range(16)]
        (station,) = host._stations.values()
        await until(lambda: host.connection.is_full)
        waiting = len([1 for piece, *_ in host.connection._pieces if len(piece) > LARGE // 2])
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert waiting <= 4
        assert held < LARGE // 2
        assert not station.worker.channel._queue
        loop.add_reader(link.connection._sock, link.connection._readable)
        assert all(arrays.is_numbers(place, array) for place, array in enumerate(await asyncio.gather(*calls)))


@pytest.mark.warm_fork_server(imports="numpy")
async def test_a_host_that_reads_nothing_leaves_arguments_in_their_slots(caplog: pytest.LogCaptureFixture) -> None:
    """What has no slot waits, and can be cancelled. Nobody takes the worker for blocked."""
    async with OneNodeRunner(1, concurrency=16, blocked_after=0.05, **FOUR_RESULTS) as runner:  # type: ignore[arg-type]
        (link,) = engine_of(runner).links
        (host,) = inner_hosts(engine_of(runner))
        loop = asyncio.get_running_loop()
        await runner.run(arrays.ause_up, 1, arrays.numbers(1))
        loop.remove_reader(host.connection._sock)
        sent = [arrays.numbers(place, LARGE // 8) for place in range(8)]
        tracemalloc.start()
        calls = [runner.submit(arrays.ause_up, place, array) for place, array in enumerate(sent)]
        await until(lambda: link.connection.is_full)
        held, _ = tracemalloc.get_traced_memory()
        tracemalloc.stop()
        assert held < LARGE // 2
        calls.pop().cancel()
        await until(lambda: [text for text in caplog.messages if "nothing for" in text])
        assert caplog.messages[-1].endswith("the connection to its node is slow")
        loop.add_reader(host.connection._sock, host.connection._readable)
        assert all(await asyncio.gather(*calls))
