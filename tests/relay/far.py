"""The far half of a relay: it runs the workers with an engine of its own, and passes on their messages."""

import asyncio
import socket
from collections.abc import Callable
from dataclasses import astuple
from typing import Any

from percore._common.errors import shown
from percore._protocol.interfaces import Engine, Exit, Worker
from percore._protocol.messages import BATCH, ONCE_OPS, PICKLED, READY, Body, Message
from tests.relay.wire import Wire


class Station:
    """One worker of the far half."""

    def __init__(self, far: "Far", number: int, worker: Worker) -> None:
        self.worker = worker
        self._far = far
        self._wire = far.wire
        self._number = number
        self._channel = worker.channel
        self._calls: dict[int, int] = {}
        """The last call of each place."""
        self._sent = self._told = 0
        self._waited_since = 0.0
        self._channel.open(self._up, lambda error: self._wire.send("broken", number, shown(error)), self._look)

    def down(self, op: int, call_id: int, body: Body) -> None:
        """Pass a message on to the worker."""
        self._note(op, call_id)
        self._channel.send(op, call_id, body)

    def down_parcel(self, op: int, call_id: int, number: int) -> None:
        """Pass on a message with a payload that has arrived. It stays here until the near half discards it."""
        self._note(op, call_id)
        self._channel.send_parcel(op, call_id, self._far.parcels[number], Kept())

    def _note(self, op: int, call_id: int) -> None:
        self._sent += 1
        if op > 0 or op in ONCE_OPS or op == BATCH:
            self._calls[call_id % self._far.places] = call_id

    def _up(self, messages: list[Message]) -> None:
        for op, call_id, body in messages:
            if op in self._channel.own:
                self._channel.own[op](call_id, body)
                continue
            if op == READY:
                self.worker.ready(body)
            if op in PICKLED and type(body) is int:
                self._wire.send_parts(self._number, self._channel.read(body))
                self._channel.release(body)
                self._wire.send("pickled", self._number, op, call_id)
            else:
                self._wire.send("message", self._number, op, call_id, body)

    def _look(self) -> None:
        """Tell the near half if the worker has read on."""
        if self._channel.has_read():
            if self._told == self._sent:
                return
            self._told = self._sent
        elif self._waited_since == self._channel.waits_since:
            return
        self._waited_since = self._channel.waits_since
        self._wire.send("read", self._number, self._told)

    def examine(self) -> None:
        self.worker.examine(lambda condition: self._wire.send("condition", self._number, *condition))

    def exited(self, end: Exit) -> None:
        """Pass on the last messages, then how far each call had come, then the exit."""
        try:
            self._channel.receive()
        finally:
            fates = [(call_id, *self.worker.fate(call_id)) for call_id in self._calls.values()]
            for start in range(0, len(fates), 1000):
                self._wire.send("fates", self._number, fates[start : start + 1000])
            self._wire.send("exit", self._number, *end, self.worker.pid)
            self.worker.close()


class Kept:
    """The ticket for a parcel that stays in the far half's store."""

    def is_wanted(self) -> bool:
        return True

    def stored(self, parcel: int) -> bool:
        return True


class Far:
    """The far half: the owner of an engine that runs the workers where it is.

    Attributes:
        ended: done when the engine was closed.
        sockets: copies of the sockets of the workers that are to be started, by their numbers.
        parcels: the parcel of each payload, by its number in the near half.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: socket.socket, engine: Engine, places: int) -> None:
        """`places`: how many start marks each worker has."""
        self.places = places
        self.ended: asyncio.Future[None] = loop.create_future()
        self.parcels: dict[int, int] = {}
        self.sockets: dict[int, list[socket.socket]] = {}
        heard: dict[str, Callable[..., None]] = {
            "start": self._start,
            "message": lambda number, *message: self._to(number, lambda station: station.down(*message)),
            "parcel": lambda number, *message: self._to(number, lambda station: station.down_parcel(*message)),
            "examine": lambda number: self._to(number, Station.examine),
            "kill": lambda number, signum: self._to(number, lambda station: station.worker.kill(signum)),
            "renew": lambda _: self.engine.renew(),
            "resize": lambda _, workers: self.engine.resize(workers),
            "keep": lambda number: self.parcels.update({number: self.engine.store.keep(bytes(self.wire.parts.pop(number)))}),
            "drop": lambda number: self.engine.store.discard(self.parcels.pop(number)),
            "usage": lambda number, roles: self._do(self._usage(number, roles), is_reading=True),
            "memory": lambda number, workers, enough: self._do(self._memory(number, workers, enough), is_reading=True),
            "end": lambda _: self._do(self._end()),
        }
        self.wire = Wire(loop, sock, heard, self._lost)
        self._loop = loop
        self.engine = engine
        self._stations: dict[int, Station] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._readings: set[asyncio.Task[None]] = set()

    def _start(self, number: int, index: int, generation: int) -> None:
        sockets = self.sockets.pop(number, [])
        try:
            worker = self.engine.start(index, generation, lambda end: self._exited(number, end), sockets)
        except OSError as error:
            self.wire.send("exit", number, *Exit(None, f"it could not be started: {shown(error)}"), None)
        else:
            assert worker is not None, "processes always have a place"
            self._stations[number] = Station(self, number, worker)
        finally:
            for sock in sockets:
                sock.close()

    def _to(self, number: int, step: Callable[[Station], None]) -> None:
        station = self._stations.get(number)
        if station is not None:  # else the worker has ended, and the near half is about to hear of it
            step(station)

    def _exited(self, number: int, end: Exit) -> None:
        try:
            self._stations.pop(number).exited(end)
        finally:
            if not self.wire.is_open and not self._stations:
                self._do(self._end())

    def _do(self, work: Any, *, is_reading: bool = False) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        if is_reading:
            self._readings.add(task)
            task.add_done_callback(self._readings.discard)

    async def _usage(self, number: int, roles: list[tuple[str, int]]) -> None:
        workers = [(role, self._stations[one].worker) for role, one in roles if one in self._stations]
        usage = await self.engine.usage(workers)
        self.wire.send("usage", number, [astuple(process) for process in usage.processes])

    async def _memory(self, number: int, workers: list[int], enough: int) -> None:
        known = [one for one in workers if one in self._stations]
        sizes = dict(zip(known, await self.engine.memory([self._stations[one].worker for one in known], enough), strict=True))
        self.wire.send("memory", number, [sizes.get(one) for one in workers])

    def _lost(self) -> None:
        """The near half is gone: nobody needs the workers any more."""
        for station in self._stations.values():
            station.worker.kill()
        if not self._stations:
            self._do(self._end())

    async def _end(self) -> None:
        if not self.ended.done():
            await asyncio.gather(*self._readings)
            kept = self.engine.store.in_use
            await self.engine.aclose()
            self.wire.close()
            if kept == len(self.parcels):
                self.ended.set_result(None)
            else:
                self.ended.set_exception(AssertionError(f"the store keeps {kept} payloads, and the near half {len(self.parcels)}"))
