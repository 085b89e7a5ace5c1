"""A host: it runs workers on its node, with a process engine of its own, for a program that may be on another machine.

    program ── one connection ── Host ── a Station for each worker ── process engine ── worker

It makes no decisions. Invariants:

- Frames arrive in order, each exactly once, and so do the messages of each worker, in both directions.
- EXIT is the last frame of a worker: its last messages come before it, and how far its calls had come.
- The program numbers payloads, and the host has a parcel for each of them until the program drops it.
- Without the program no worker runs: when the connection breaks the host kills all of them at once, and when nothing was heard for
  four fifths of `lost_after` seconds, so that none runs on when the program takes the node for lost. Then the host ends.
"""

import asyncio
import pickle
import time
from dataclasses import astuple
from typing import TYPE_CHECKING, Any, Final

from percore._calls.worker_start import places_of
from percore._common.endings import wake
from percore._common.errors import shown
from percore._common.log import report
from percore._common.options import RunnerOptions
from percore._engines.processes.engine import Guest, ProcessEngine
from percore._node.main_source import main_here
from percore._node.station import ClockAhead, Station, Step
from percore._protocol.host_orders import HostOrders, greeting
from percore._protocol.interfaces import Exit
from percore._protocol.messages import BrokenFrame, takes_parcel
from percore._transport.codec import decode
from percore._transport.connection import Connection, time_of
from percore._transport.slots import SLOT_BITS
from percore._transport.wire import Frame, Kind, limits, unpack
from percore._transport.wire import pack as packed

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable

    from percore._worker_process.log_forwarding import Levels

_INFO: Final = 20
_BEATS: Final = 10
"""Beats in `lost_after` seconds."""
_PATIENCE: Final = 0.8
"""The part of `lost_after` for which a host waits for its program."""
_SECOND_LOOK: Final = 0.05
_TEXT: Final = 2000


def _clock() -> float:
    """Return a time in seconds that goes on while the machine is suspended, where the system has one."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if hasattr(time, "CLOCK_BOOTTIME") else time.monotonic()


class Host:
    """Serves one program over a connection that is proven.

    Attributes:
        ended: done when the connection and the engine are closed, and every worker has ended.
        parcels: the parcel in this node's store of each of the program's.
        places: how many start marks each worker has.
        clock_ahead: what this machine's monotonic clock shows beyond the program's.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop, sock: Any, pid: int) -> None:
        self.ended: asyncio.Future[None] = loop.create_future()
        self.parcels: dict[int, int] = {}
        self._arriving: int | None = None
        """The parcel that is being received."""
        self.places = 0
        self.clock_ahead = ClockAhead()
        self._loop = loop
        self._engine: ProcessEngine | None = None
        self._stations: dict[int, Station] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._levels: Levels = (0, ())
        self._watch: asyncio.TimerHandle | None = None
        self._is_over = self._is_ending = False
        self._handlers: dict[int, Callable[[int, Any], None]] = {
            Kind.BEAT: self._beat,
            Kind.MESSAGES: self._messages,
            Kind.SETUP: self._set_up,
            Kind.START: self._start,
            Kind.KEEP: self._keep,
            Kind.DROP: lambda number, _: self.engine.store.discard(self._known(number, pop=True)),
            Kind.PARCEL: self._parcel,
            Kind.KILL: self._kill,
            Kind.EXAMINE: lambda number, _: self._to(number, Station.examine),
            Kind.RENEW: lambda number, _: self.engine.renew(),
            Kind.RESIZE: self._resize,
            Kind.USAGE: lambda number, data: self._do(self._answer(number, self._usage, *unpack(data, list))),
            Kind.MEMORY: lambda number, data: self._do(self._answer(number, self._memory, *unpack(data, list, int))),
            Kind.END: lambda number, _: self._over(""),
        }
        most = {kind: size for kind, size in limits(0).items() if kind in self._handlers}
        self.connection = Connection(loop, sock, most, self._heard, self._over)
        self.connection.decoder.room = self._room_for
        self.connection.on_room = lambda: self._hold_logs(False)
        self.connection.send(Kind.HELLO, 0, packed(tuple(greeting(pid))))

    @property
    def engine(self) -> ProcessEngine:
        if self._engine is None:
            raise BrokenFrame("a frame before SETUP")
        return self._engine

    def _heard(self, frame: Frame) -> None:
        self._handlers[frame.kind](frame.number, frame.data)

    def _beat(self, _zero: int, data: memoryview) -> None:
        self.clock_ahead.heard(time.monotonic() - time_of(data))

    # The start

    def _set_up(self, _zero: int, data: memoryview) -> None:
        if self._engine is not None:
            raise BrokenFrame("a second SETUP")
        try:
            orders: HostOrders = pickle.loads(data)
            self.take_over(orders)
            options = RunnerOptions.checked(**orders.sizes)
            self.places = places_of(options)
            guest = Guest(
                orders.start._replace(node=orders.node), orders.loop_factory, orders.debug, lambda: self._levels, self._log
            )
            self._engine = ProcessEngine(self._loop, options, main_here(orders.main, orders.source), guest=guest)
        except Exception as error:
            self.connection.send(Kind.REFUSED, 0, packed((shown(error)[:_TEXT],)))
            return
        self.connection.decoder.most |= {int(Kind.KEEP): limits(options.max_message)[Kind.KEEP]}
        self.connection.send(Kind.ANSWER, 0, packed((self._engine.store.room,)))
        self._lost_after = orders.lost_after
        self._last, self._seen = _clock(), 0
        self._look()

    def take_over(self, orders: HostOrders) -> None:
        """Let this process have what its workers take over from it. A host that shares its program's process has it."""

    def _look(self) -> None:
        """Beat, and end when the program was not heard for too long."""
        self.connection.beat_here()
        now = _clock()
        if self.connection.heard != self._seen:
            self._last, self._seen = now, self.connection.heard
        if now - self._last > _PATIENCE * self._lost_after:
            # After a freeze the timer may come before what waits in the socket: look again when that was read.
            self._watch = self._loop.call_later(_SECOND_LOOK, self._look_again)
        else:
            self._watch = self._loop.call_later(self._lost_after / _BEATS, self._look)

    def _look_again(self) -> None:
        if self.connection.heard == self._seen:
            self.connection.give_up(f"nothing was heard of it for {_clock() - self._last:.1f} s")
        else:
            self._look()

    def _start(self, number: int, data: memoryview) -> None:
        if number in self._stations or self._is_over:
            raise BrokenFrame("a worker that is there" if number in self._stations else "a worker after the end")
        index, generation, self._levels = unpack(data, int, int, tuple)
        try:
            worker = self.engine.start(index, generation, lambda end: self._exited(number, end), ())
        except OSError as error:
            why = f"it could not be started: {shown(error)}"
            self.connection.send(Kind.EXIT, number, packed((None, why, False, None, None)))
        else:
            self._stations[number] = Station(self, number, worker)

    # The program's frames

    def _to(self, number: int, step: Step) -> None:
        station = self._stations.get(number)
        if station is not None:  # else the worker has ended, and the program is about to hear of it
            step(station)

    def _messages(self, number: int, data: memoryview) -> None:
        messages = decode(data)
        self._to(number, lambda station: station.down(messages))

    def _keep(self, number: int, data: memoryview) -> None:
        arriving, self._arriving = self._arriving, None
        if arriving is None:
            self._check_new(number)
            arriving = self.engine.store.keep(data)
        self.parcels[number] = arriving

    def _check_new(self, number: int) -> None:
        if number in self.parcels:
            raise BrokenFrame("a parcel that is there")

    def _room_for(self, kind: int, number: int, length: int) -> memoryview | bytearray:
        """Return memory for a large frame. A parcel is received in the slot in which workers will see it."""
        if kind != Kind.KEEP:
            return bytearray(length)
        self._check_new(number)
        store = self.engine.store
        slot = store.take()
        if slot is None:
            raise BrokenFrame("a parcel for which there is no room")
        self._arriving = length << SLOT_BITS | slot
        return store.view(slot)[:length]

    def _known(self, number: int, *, pop: bool = False) -> int:
        if number not in self.parcels:
            raise BrokenFrame("a parcel that is not there")
        return self.parcels.pop(number) if pop else self.parcels[number]

    def _parcel(self, number: int, data: memoryview) -> None:
        op, call_id, parcel = unpack(data, int, int, int)
        if not takes_parcel(op):
            raise BrokenFrame(f"a message ({op}) that has no parcel")
        here = self._known(parcel)
        self._to(number, lambda station: station.down_parcel(op, call_id, here))

    def _kill(self, number: int, data: memoryview) -> None:
        (signum,) = unpack(data, int)
        self._to(number, lambda station: station.worker.kill(signum))

    def _resize(self, workers: int, _data: memoryview) -> None:
        try:
            self.engine.resize(workers)
        except OSError as error:  # later workers have the memory of before
            report(_INFO, "%s", shown(error))

    def _do(self, work: Any) -> None:
        task = self._loop.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _answer(self, number: int, read: "Callable[..., Awaitable[list[Any]]]", *about: Any) -> None:
        """Send what a question asks for, or, as a text, why it cannot be told."""
        found: list[Any] | str
        try:
            found = await read(*about)
        except Exception as error:
            found = shown(error)[:_TEXT]
        self.connection.send(Kind.ANSWER, number, packed((found,)))

    async def _usage(self, roles: list[tuple[str, int]]) -> list[Any]:
        workers = [(role, self._stations[one].worker) for role, one in roles if one in self._stations]
        usage = await self.engine.usage(workers)
        return [astuple(process) for process in usage.processes]

    async def _memory(self, workers: list[int], enough: int) -> list[Any]:
        known = [one for one in workers if one in self._stations]
        sizes = dict(zip(known, await self.engine.memory([self._stations[one].worker for one in known], enough), strict=True))
        return [sizes.get(one) for one in workers]

    # Logs

    def _log(self, index: int, data: bytes) -> None:
        self.connection.send(Kind.LOG, index, data)
        if self.connection.is_full:
            self._hold_logs(True)

    def _hold_logs(self, is_held: bool) -> None:
        for station in self._stations.values():
            station.worker.hold_logs(is_held)

    # The end

    def _exited(self, number: int, end: Exit) -> None:
        try:
            self._stations.pop(number).exited(end)
        finally:
            self._look_ended()

    def leave(self, why: str) -> None:
        """Kill all workers, and then end: nobody needs them any more. Idempotent."""
        if not self._is_over:
            self.connection.close()
            self._over(why)

    def _over(self, why: str) -> None:
        """The program is gone, or has asked for the end: nobody needs the workers any more."""
        if why and self._engine is not None:
            report(_INFO, "the program is gone: %s", why)
        self._is_over = True
        arriving, self._arriving = self._arriving, None
        if arriving is not None:
            self.engine.store.discard(arriving)
        for station in self._stations.values():
            station.worker.kill()
        self._look_ended()

    def _look_ended(self) -> None:
        if self._is_over and not self._stations and not self._is_ending:
            self._is_ending = True  # two ends would wait for each other
            self._do(self._end())

    async def _end(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        others = self._tasks - {asyncio.current_task()}
        await asyncio.gather(*others, return_exceptions=True)
        engine, self._engine = self._engine, None
        if engine is not None:
            await self.close_engine(engine)
        self.connection.close()
        wake(self.ended)

    async def close_engine(self, engine: ProcessEngine) -> None:
        """Close the engine, whose workers have ended."""
        await engine.aclose()
