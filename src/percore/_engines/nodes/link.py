"""The link to one node: the connection to its host, what arrives there, and its loss.

Invariants between the program's half (engine, link, channel, worker, store) and the host's (host, station):

- Reading. A station counts the messages that it has passed on, and tells the count when its worker has read all of them (READ, or
  ANSWERS). It never exceeds those sent here, and never falls.
- Ends. Each worker that was started here is told as ended once: by EXIT, its last frame, or because its node is lost. The link is
  in `NodesEngine.links` as long as its connection is open, so no worker is started on a node that nobody will tell as lost. A frame
  about a worker that has ended here is a mistake of the host; a frame about one that has ended there is none of the program's, and
  is dropped.
- Loss. A frame of which the socket has taken a part may have arrived: whether its calls have begun is unknown. The calls of all
  other frames have not begun, nor have those sent between the loss and the ends, which follow in the next iteration of the loop.
- Memory. A slot here is free when its parcel is discarded and no connection sends it; a slot of the node, when it is dropped here
  (DROP) and no worker there uses it; a worker's slot, when the host's socket has taken its result, whether or not that arrives.
- Closing. The engine closes when all workers have ended. A loss from then on changes nothing: the host is ended in any case.
"""

import asyncio
import pickle
import socket
from collections.abc import Callable
from itertools import count
from typing import Any, Final

from percore._common.endings import settle, settle_by
from percore._common.sure_handles import surely_soon
from percore._engines.nodes.channel import NodeChannel
from percore._engines.nodes.node import Sender
from percore._engines.nodes.places import Place
from percore._engines.nodes.store import NodesStore
from percore._engines.nodes.worker import NodeWorker
from percore._engines.processes.log_receiver import handle, levels
from percore._protocol.host_orders import Greeting, HostOrders
from percore._protocol.interfaces import Condition, Exit, Fate
from percore._protocol.messages import PICKLED, BrokenFrame
from percore._transport.codec import decode
from percore._transport.connection import Connection
from percore._transport.wire import OF_HOST, READ_COUNT, Frame, Kind, limits, pack, unpack

BEATS: Final = 10
"""Beats in `lost_after` seconds."""
_GREETING: Final = (str, str, int)


class Refused(Exception):
    """The host cannot run workers for this program."""


class NodeLink:
    """One node. Use it in the loop.

    Attributes:
        node: its name.
        address: where its host is, as a text.
        weight: how many workers are meant to run there, beside the weights of the other nodes.
        workers: its workers that have not ended, by number.
        is_lost: whether the connection broke.
        over: done when the connection broke or was closed, with the reason.
    """

    def __init__(
        self,
        loop: asyncio.AbstractEventLoop,
        sock: socket.socket,
        place: Place,
        store: NodesStore,
        on_lost: Callable[["NodeLink", str], None],
    ) -> None:
        self.node = place.node
        self.weight = place.weight
        self.address = f"{place.address}:{place.port}"
        self.workers: dict[int, NodeWorker] = {}
        self.is_lost = False
        self.over: asyncio.Future[str] = loop.create_future()
        self._loop = loop
        self._store = store
        self._on_lost = on_lost
        self._greeted: asyncio.Future[Greeting] = loop.create_future()
        self._numbers = count(1)
        self._answers: dict[int, asyncio.Future[list[Any]]] = {}
        self._dirty: list[Sender] = []
        self._announced: tuple[int, int, int] | None = None
        """The worker, the op and the call of the payload that comes next."""
        self._touched: dict[NodeChannel, None] = {}
        self._watch: asyncio.TimerHandle | None = None
        self._lost_after = 0.0
        self._heard = self._missed = 0
        self._handlers: dict[int, Callable[[int, Any], None]] = {
            Kind.BEAT: lambda number, data: None,
            Kind.HELLO: self._hello,
            Kind.REFUSED: self._refused,
            Kind.MESSAGES: self._messages,
            Kind.ANSWERS: self._answers_of,
            Kind.PAYLOAD_OF: self._payload_of,
            Kind.PAYLOAD: self._payload,
            Kind.READ: self._read,
            Kind.LOG: self._log,
            Kind.BROKEN: self._broken,
            Kind.CONDITION: self._condition,
            Kind.FATES: self._fates,
            Kind.EXIT: self._exited,
            Kind.ANSWER: self._answer,
        }
        most = {kind: size for kind, size in limits(store.limit).items() if kind in self._handlers}
        self.connection = Connection(loop, sock, most, self._frame, self._broke)
        self.connection.on_batch = self._batch
        self.connection.on_room = store.has_room
        self.send, self.put = self.connection.send, self.connection.put

    @property
    def is_full(self) -> bool:
        return self.connection.is_full

    # The start

    async def greet(self) -> Greeting:
        """Wait for what the host tells of itself."""
        return await self._greeted

    async def set_up(self, orders: HostOrders) -> int:
        """Give the host its orders. Return how many payloads it can keep.

        Raises:
            Refused: it cannot run workers.
        """
        answer = self._question(0)
        self._lost_after = orders.lost_after
        self.connection.beat_here()
        self.send(Kind.SETUP, 0, pickle.dumps(orders))
        found = await answer
        if self.is_lost:  # perhaps with the answer: TLS may have both in one turn of the loop
            raise Refused(f"its host has ended: the connection broke, {self.over.result()}")
        self._look()
        return int(found[0])

    def _question(self, number: int) -> asyncio.Future[list[Any]]:
        answer = self._answers[number] = self._loop.create_future()
        if self.is_lost:
            answer.set_result([])
        return answer

    def _look(self) -> None:
        """Count the beats that did not come. (A loop that was blocked for long counts one, whatever waits in the socket.)"""
        if self.connection.heard != self._heard:
            self._heard, self._missed = self.connection.heard, 0
        elif self._missed >= BEATS:
            self.connection.give_up(f"nothing was heard of it for {self._lost_after:g} s")
            return
        self._missed += 1
        self._watch = self._loop.call_later(self._lost_after / BEATS, self._look)

    def start(self, index: int, generation: int, on_exit: Callable[[Exit], None]) -> NodeWorker:
        """Have the host start a worker."""
        assert not self.is_lost, "nobody would tell the end of this worker"
        number = next(self._numbers)
        channel = NodeChannel(number, self, self._store)
        worker = self.workers[number] = NodeWorker(self._loop, number, index, self, channel, on_exit)
        self.send(Kind.START, number, pack((index, generation, levels())))
        return worker

    # Sending

    def wants(self, sender: Sender) -> None:
        """Have a channel flushed at the end of this iteration of the loop."""
        if not self._dirty:
            self._loop.call_soon(self._flush)
        self._dirty.append(sender)

    def _flush(self) -> None:
        dirty, self._dirty = self._dirty, []
        try:
            while dirty:
                dirty.pop(0).flush()
        except BaseException:  # it has broken that channel; the others go on
            self._dirty += dirty
            self._loop.call_soon(self._flush)
            raise
        self.connection.write()

    def catch_up(self) -> None:
        """Send what was to be sent soon, and go on counting beats, in case the loop has lost that."""
        if self._dirty:
            self._flush()
        watch = self._watch
        if watch is not None and not self.is_lost and self._loop.time() - watch.when() > self._lost_after:
            watch.cancel()
            self._look()

    def keep(self, parcel: int, data: memoryview | bytes, let_go: Callable[[], None]) -> None:
        """Give the host a payload. `let_go` is called when its memory is not needed any more."""
        self.put(Kind.KEEP, parcel, data, let_go=let_go)

    def drop(self, parcel: int) -> None:
        """Take a payload back. Messages that name it were sent before."""
        for channel in self._dirty:
            channel.flush()
        self.send(Kind.DROP, parcel)

    async def ask(self, kind: Kind, *values: Any) -> list[Any]:
        """Return the host's answer to a question. Empty: the node was lost.

        Raises:
            RuntimeError: the host cannot tell.
        """
        number = next(self._numbers)
        self.send(kind, number, pack(values))
        answer = await self._question(number)
        if answer and isinstance(answer[0], str):
            raise RuntimeError(f"node {self.node} cannot tell: {answer[0]}")
        return list(answer[0]) if answer else []

    # What arrives

    def _frame(self, frame: Frame) -> None:
        self._handlers[frame.kind](frame.number, frame.data)

    def _hello(self, _version: int, data: memoryview) -> None:
        if not self._greeted.done():
            settle(self._greeted, Greeting(*unpack(data, *_GREETING)))

    def _refused(self, _zero: int, data: memoryview) -> None:
        answer = self._answers.get(0)
        (text,) = unpack(data, str)
        if answer is not None:
            settle_by(answer, Refused(text))

    def _worker(self, number: int) -> NodeWorker:
        worker = self.workers.get(number)
        if worker is None:
            raise BrokenFrame("a frame about a worker that there is not")
        self._touched[worker.channel] = None
        return worker

    def _messages(self, number: int, data: memoryview) -> None:
        self._worker(number).channel.deliver(decode(data))

    def _answers_of(self, number: int, data: memoryview) -> None:
        if len(data) < READ_COUNT.size:
            raise BrokenFrame("answers without a number of messages")
        channel = self._worker(number).channel
        channel.deliver(decode(data[READ_COUNT.size :]))
        channel.acknowledged(*READ_COUNT.unpack_from(data))

    def _payload_of(self, number: int, data: memoryview) -> None:
        op, call_id = unpack(data, int, int)
        if self._announced is not None or op not in PICKLED:
            raise BrokenFrame("a payload is announced in place of another one, or for a message that has none")
        self._announced = number, op, call_id

    def _payload(self, number: int, data: memoryview | bytearray) -> None:
        announced, self._announced = self._announced, None
        if announced is None or announced[0] != number:
            raise BrokenFrame("a payload that was not announced")
        self._worker(number).channel.deliver_large(*announced[1:], data if type(data) is bytearray else bytes(data))

    def _read(self, number: int, data: memoryview) -> None:
        self._worker(number).channel.acknowledged(*unpack(data, int))

    def _log(self, index: int, data: memoryview) -> None:
        if index == OF_HOST:
            handle(None, bytes(data), node=self.node)
            return
        try:
            handle(index, bytes(data), node=self.node)
        except BrokenFrame as error:  # it is the worker that is broken, and not its host
            for worker in list(self.workers.values()):
                if worker.index == index:
                    worker.channel.broke(error)

    def _broken(self, number: int, data: memoryview) -> None:
        (text,) = unpack(data, str)
        self._worker(number).channel.broke(BrokenFrame(text))

    def _condition(self, number: int, data: memoryview) -> None:
        self._worker(number).told(Condition(*unpack(data, str, str, (int, type(None)), str)))

    def _fates(self, number: int, data: memoryview) -> None:
        (fates,) = unpack(data, list)
        self._worker(number).fates.update({call_id: Fate(*fate) for call_id, *fate in fates})

    def _exited(self, number: int, data: memoryview) -> None:
        optional = (int, type(None))
        code, why, place_lost, peak, pid = unpack(data, optional, str, bool, optional, optional)
        worker = self._worker(number)
        del self.workers[number]
        worker.pid = worker.pid if pid is None else pid
        worker.exited(Exit(code, why, place_lost, peak))

    def _answer(self, number: int, data: memoryview) -> None:
        answer = self._answers.pop(number, None)
        values = unpack(data, object)
        if answer is not None:
            settle(answer, values)

    def _batch(self) -> None:
        while self._touched:
            self._touched.popitem()[0].batch()

    # The end

    def _ended(self, why: str) -> None:
        """Nothing arrives any more."""
        if self._watch is not None:
            self._watch.cancel()
        self.is_lost = True
        settle(self.over, why)
        for answer in list(self._answers.values()):
            settle(answer, [])

    def _broke(self, why: str) -> None:
        self._ended(why)
        if not self._greeted.done():
            settle_by(self._greeted, Refused(f"its host has ended: the connection broke, {why}"))
        try:
            for worker in list(self.workers.values()):
                worker.channel.lost()
        finally:
            self._on_lost(self, why)

    def end_workers(self, why: str) -> None:
        """Report the ends of all workers: the node is lost."""
        workers, self.workers = self.workers, {}
        for worker in workers.values():
            surely_soon(self._loop, worker.exited, Exit(None, f"its node {self.node} was lost: {why}", place_lost=True))

    async def aclose(self, seconds: float) -> bool:
        """Ask the host to end. All workers have ended. Return whether it has done so in this time."""
        self.send(Kind.END, 0)
        if self._watch is not None:
            self._watch.cancel()
        try:
            async with asyncio.timeout(seconds):
                await self.over
        except TimeoutError:
            return False
        finally:
            self.close()
        return True

    def close(self) -> None:
        """Close the connection, and leave no question without an answer. It has no workers. Idempotent."""
        self.connection.close()
        self._ended("it was closed")
