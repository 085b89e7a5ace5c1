"""The near half of a relay: the engine that the supervisor sees, its workers and their channels."""

import asyncio
import signal
import socket
from collections.abc import Callable, Sequence
from itertools import count
from time import monotonic
from typing import Any, Final, cast

from percore import Runner
from percore._calls.worker_start import places_of
from percore._common.options import RunnerOptions
from percore._engines.processes.engine import ProcessEngine
from percore._monitor.usage import ProcessUsage, Usage
from percore._protocol.interfaces import UNBEGUN, Condition, Exit, Fate, Ticket, Worker
from percore._protocol.messages import Body, BrokenFrame, Message, Payload
from percore._serialization.pickler import MainInfo
from percore._transport.leases import Received
from tests.relay.far import Far
from tests.relay.store import RelayStore, received
from tests.relay.wire import Wire


class RelayChannel:
    """Sends messages to a station, and receives those of its worker."""

    own: Final[dict[int, Callable[[int, Any], None]]] = {}

    def __init__(self, number: int, wire: Wire, store: RelayStore) -> None:
        self.sent = self.received = 0
        self.is_open = False
        self.waits_since = 0.0
        self._number = number
        self._wire = wire
        self._store = store
        self._acknowledged = 0
        self._sent_at = self._lag = 0.0

    def open(
        self, on_frame: Callable[[list[Message]], None], on_broken: Callable[[BaseException], None], on_batch: Callable[[], None]
    ) -> None:
        self.on_frame, self.on_broken, self.on_batch = on_frame, on_broken, on_batch
        self.is_open = True

    def send(self, op: int, call_id: int, body: Body) -> None:
        self._say("message", op, call_id, body)

    def send_parcel(self, op: int, call_id: int, parcel: int, ticket: Ticket) -> None:
        if not self._store.place(parcel):
            self._store.wait(lambda: self._retry(op, call_id, parcel, ticket))
        elif ticket.stored(parcel):
            self._store.carry(parcel)
            self._say("parcel", op, call_id, parcel)

    def _retry(self, op: int, call_id: int, parcel: int, ticket: Ticket) -> None:
        if self.is_open and ticket.is_wanted():
            self.send_parcel(op, call_id, parcel, ticket)

    def _say(self, kind: str, op: int, call_id: int, body: Body) -> None:
        self._wire.send(kind, self._number, op, call_id, body)
        self.sent += 1
        self._sent_at = monotonic()
        self.waits_since = self.waits_since or self._sent_at

    def load(self, payload: Payload) -> Received:
        return received(self.read(payload))

    def read(self, payload: Payload) -> bytes:
        if type(payload) is not bytes:
            raise BrokenFrame(f"a payload that is a {type(payload).__name__}")
        return payload

    def release(self, payload: Payload) -> None:
        """Do nothing: the far half has released it in its worker."""

    def receive(self) -> None:
        """Do nothing: what arrives is delivered at once."""

    def has_read(self) -> bool:
        return self._acknowledged == self.sent

    def lag(self) -> float:
        return self._lag if self.has_read() else max(self._lag, monotonic() - self._sent_at)

    # What the engine hears

    def acknowledged(self, number: int) -> None:
        """The worker has read on, and at least the first `number` messages."""
        self._acknowledged = number
        now = monotonic()
        if self.has_read():
            self._lag = now - self._sent_at
        self.waits_since = 0.0 if self.has_read() else now

    def deliver(self, message: Message) -> None:
        """Deliver a message that has arrived."""
        self.received += 1
        self._guarded(lambda: self.on_frame([message]))

    def batch(self) -> None:
        """All that arrived together was delivered."""
        self._guarded(self.on_batch)

    def broke(self, error: BaseException) -> None:
        """Receive nothing more, and report why."""
        if self.is_open:
            self.is_open = False
            self.on_broken(error)

    def _guarded(self, step: Callable[[], None]) -> None:
        if self.is_open:
            try:
                step()
            except BaseException as error:
                self.broke(error)
                if not isinstance(error, Exception):
                    raise


class RelayWorker:
    """A worker of the far half."""

    def __init__(self, number: int, wire: Wire, channel: RelayChannel, on_exit: Callable[[Exit], None]) -> None:
        self.number = number
        self.channel = channel
        self.pid: int | None = None
        self.on_exit = on_exit
        self.fates: dict[int, Fate] = {}
        self.examined: list[Callable[[Condition], None]] = []
        self.ended = asyncio.Event()
        """Set when the worker has ended and `fates` is complete. Until then nobody here can tell."""
        self._wire = wire

    def ready(self, told: Body) -> None:
        self.pid = cast("int", told)

    def kill(self, signum: int = signal.SIGKILL) -> None:
        self._wire.send("kill", self.number, int(signum))

    def examine(self, told: Callable[[Condition], None]) -> None:
        self.examined.append(told)
        self._wire.send("examine", self.number)

    def fate(self, call_id: int) -> Fate:
        return self.fates.get(call_id, UNBEGUN) if self.ended.is_set() else Fate(begun=None)

    def close(self) -> None:
        self.channel.is_open = False


class RelayEngine:
    """The near half, and the only part that knows where the far half is: here, in this loop."""

    sees_starts = False
    on_place: Callable[[], None]
    """Never called: the far half always has a place."""

    def __init__(self, loop: asyncio.AbstractEventLoop, options: RunnerOptions, main: MainInfo) -> None:
        engine = ProcessEngine(loop, options, main)
        self._loop = loop
        self.store = RelayStore(loop, options, main, engine.store)
        ours, theirs = socket.socketpair()
        self.far = Far(loop, theirs, engine, places_of(options))
        heard: dict[str, Callable[..., None]] = {
            "message": lambda number, *message: self._deliver(number, message),
            "pickled": lambda number, *message: self._deliver(number, (*message, bytes(self._wire.parts.pop(number)))),
            "read": self._read,
            "broken": lambda number, text: self._workers[number].channel.broke(BrokenFrame(text)),
            "fates": lambda number, fates: self._workers[number].fates.update({call_id: Fate(*fate) for call_id, *fate in fates}),
            "condition": lambda number, *condition: self._workers[number].examined.pop(0)(Condition(*condition)),
            "exit": self._exited,
            "usage": self._measured,
            "memory": self._measured,
        }
        self._wire: Wire
        self.store.wire = self._wire = Wire(loop, ours, heard, self._lost)
        self._wire.on_read = self._batch
        self.is_lost = False
        self._workers: dict[int, RelayWorker] = {}
        self._touched: dict[RelayChannel, None] = {}
        self._numbers = count(1)
        self._readings: dict[int, asyncio.Future[list[Any]]] = {}

    def start(self, index: int, generation: int, on_exit: Callable[[Exit], None], sockets: Sequence[socket.socket]) -> RelayWorker:
        if self.is_lost:
            raise OSError("the far half is gone")
        number = next(self._numbers)
        worker = self._workers[number] = RelayWorker(number, self._wire, RelayChannel(number, self._wire, self.store), on_exit)
        if sockets:  # no frame can carry them; both halves are here
            self.far.sockets[number] = [sock.dup() for sock in sockets]
        self._wire.send("start", number, index, generation)
        return worker

    def _deliver(self, number: int, message: tuple[Any, ...]) -> None:
        channel = self._workers[number].channel
        self._touched[channel] = None
        channel.deliver(cast("Message", message))

    def _read(self, number: int, messages: int) -> None:
        channel = self._workers[number].channel
        self._touched[channel] = None
        channel.acknowledged(messages)

    def _batch(self) -> None:
        while self._touched:
            self._touched.popitem()[0].batch()

    def _exited(self, number: int, code: int | None, why: str, place_lost: bool, peak: int | None, pid: int | None) -> None:
        worker = self._workers.pop(number)
        worker.pid = worker.pid if pid is None else pid
        worker.ended.set()
        worker.on_exit(Exit(code, why, place_lost, peak))

    def _lost(self) -> None:
        self.is_lost = True
        for worker in self._workers.values():
            self._loop.call_soon(worker.on_exit, Exit(None, "its relay was lost", place_lost=True))
        self._workers.clear()
        for number in list(self._readings):
            self._measured(number, [])

    def renew(self) -> None:
        self._wire.send("renew", 0)

    def resize(self, workers: int) -> None:
        self._wire.send("resize", 0, workers)

    async def usage(self, workers: Sequence[tuple[str, Worker]]) -> Usage:
        if self.is_lost:
            return Usage(())
        number = next(self._numbers)
        reading = self._readings[number] = self._loop.create_future()
        self._wire.send("usage", number, [(role, cast("RelayWorker", worker).number) for role, worker in workers])
        return Usage(tuple(ProcessUsage(*row) for row in await reading))

    async def memory(self, workers: Sequence[Worker], enough: int) -> list[int | None]:
        if self.is_lost:
            return [None for _ in workers]
        number = next(self._numbers)
        reading = self._readings[number] = self._loop.create_future()
        self._wire.send("memory", number, [cast("RelayWorker", worker).number for worker in workers], enough)
        return list(await reading)

    def _measured(self, number: int, rows: list[Any]) -> None:
        reading = self._readings.pop(number)
        if not reading.done():
            reading.set_result(rows)

    def cut(self) -> None:
        """Break the connection."""
        self._wire.cut()

    async def aclose(self) -> None:
        assert not self._workers, "a worker has not ended"
        self._wire.send("end", 0)
        await self.far.ended
        self._wire.close()
        assert not self._wire.parts, "a payload without a message"
        assert self.is_lost or self.store.carried == self.far.parcels.keys(), "one half has a payload that the other has discarded"


class RelayRunner(Runner):
    """A runner whose workers are reached through a relay."""

    _make_engine = RelayEngine
