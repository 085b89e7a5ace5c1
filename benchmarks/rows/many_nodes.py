"""The program's side of a thousand nodes, computed with the real scheduler: no host runs, and nothing is sent."""

from __future__ import annotations

import asyncio
import socket
import time
import tracemalloc
from collections import deque
from functools import partial
from random import Random
from typing import TYPE_CHECKING, Any

from benchmarks.contestants import always
from benchmarks.figures import Target
from benchmarks.harness import Row, row
from percore._engines.nodes.channel import NodeChannel
from percore._engines.nodes.worker import NodeWorker
from percore._protocol.messages import Kind
from percore._scheduler.dispatch import Dispatch
from percore._supervisor.pool_worker import PoolWorker
from percore._supervisor.timing import Turn
from percore._transport.connection import Connection
from percore._transport.wire import limits

if TYPE_CHECKING:
    from benchmarks.results import Sample

WORKERS_A_NODE = 8
CONCURRENCY, THREADS = 100, 5
NODES = (1, 10, 100, 1000)


class _Link:
    """In place of the connection to a node."""

    node = "a"
    is_lost = is_full = False


class _Call:
    kind = Kind.TASK
    key = None
    size = 1

    def done(self) -> bool:
        return False


class Cluster:
    """The workers of so many nodes as the supervisor holds them, and the dispatch that chooses among them.

    Attributes:
        memory: bytes that each worker takes here.
    """

    def __init__(self, nodes: int) -> None:
        loop = asyncio.get_running_loop()
        self.dispatch: Any = Dispatch(CONCURRENCY, THREADS)
        self.seats: list[PoolWorker] = []
        self._loop, self._turn, self._link = loop, Turn(loop), _Link()
        tracemalloc.start()
        self.seats += map(self._worker, range(WORKERS_A_NODE))
        self.memory = tracemalloc.get_traced_memory()[0] / WORKERS_A_NODE
        tracemalloc.stop()
        self.seats += map(self._worker, range(WORKERS_A_NODE, nodes * WORKERS_A_NODE))
        self.dispatch.seats += self.seats[:-1]  # each `seat` looks at all of them
        self.dispatch.seat(self.seats[-1])

    def _worker(self, index: int) -> PoolWorker:
        seat = PoolWorker(index, 1, self.dispatch, self._turn)
        channel = NodeChannel(index, self._link, None)  # type: ignore[arg-type]
        seat.worker = NodeWorker(self._loop, index, index, self._link, channel, print)  # type: ignore[arg-type]
        seat._channel = channel
        return seat

    def begin(self, each: int) -> None:
        """Let every worker hold so many calls."""
        for seat in self.seats:
            seat.load[Kind.TASK] = each
        self.dispatch.lowered()

    def decide(self, decisions: int, chance: Random) -> float:
        """Let calls of one node after the other end, and send others. Return the seconds of CPU time for each."""
        dispatch, seats, call = self.dispatch, self.seats, _Call()
        queue = dispatch.singles[Kind.TASK]
        dispatch.submitted(call, queue).load[Kind.TASK] += 1  # the first one compares all workers
        ended = deque(chance.choices(range(len(seats) // WORKERS_A_NODE), k=decisions // WORKERS_A_NODE))
        start, made = time.thread_time(), 0
        for node in ended:
            for seat in seats[node * WORKERS_A_NODE : (node + 1) * WORKERS_A_NODE]:
                seat.load[Kind.TASK] -= 1
                dispatch.lowered(seat)
                chosen = dispatch.submitted(call, queue)
                chosen.load[Kind.TASK] += 1
                made += 1
        return (time.thread_time() - start) / made


class Ends:
    """The two ends of a connection, as the program and a host have one."""

    def __init__(self) -> None:
        loop = asyncio.get_running_loop()
        with socket.create_server(("127.0.0.1", 0)) as server:
            here = socket.create_connection(server.getsockname())
            there, _ = server.accept()
        tracemalloc.start()
        self.here = Connection(loop, here, limits(0), lambda frame: None, lambda why: None)
        self.memory = tracemalloc.get_traced_memory()[0]
        tracemalloc.stop()
        self.there = Connection(loop, there, limits(0), lambda frame: None, lambda why: None)
        self._read = asyncio.Event()
        self.there.on_batch = self._read.set

    async def beat(self, times: int) -> float:
        """Send beats, each of which the other end reads. Return the seconds of CPU time for each, with the sending."""
        start = time.process_time()
        for _ in range(times):
            self.here.beat()
            await self._read.wait()
            self._read.clear()
        return (time.process_time() - start) / times

    def close(self) -> None:
        self.here.close()
        self.there.close()


@row(rounds=5, seconds=15, warm_ups=0)
def many_nodes(quick: bool) -> Row:
    """Choosing a worker among those of up to 1,000 nodes of 8 workers, each with 50 of 100 places taken.

    A call ends, and the next one is sent to the best worker: "a decision". The program keeps "memory a worker" and "memory a node"
    for them. "a beat" is what a node costs ten times in `lost_after` seconds: one beat sent, and one read.
    """

    async def once(nodes: int) -> Sample:
        cluster = Cluster(nodes)
        cluster.begin(CONCURRENCY // 2)
        decision = cluster.decide(800 if quick else 8000, Random(nodes))
        ends = Ends()
        beat = await ends.beat(200)
        ends.close()
        return {"a decision": decision, "a beat": beat, "memory a worker": cluster.memory, "memory a node": ends.memory}

    return Row(
        {f"percore, {nodes} nodes": always(partial(once, nodes)) for nodes in NODES},
        [Target("percore, 1000 nodes", "a decision", "percore, 1 nodes", at_most=8.0, towards=4.0)],
        units={"memory a worker": "{:,.0f} bytes".format, "memory a node": "{:,.0f} bytes".format},
    )
