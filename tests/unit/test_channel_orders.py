"""Every order of steps of the two sides of a channel, over real rings, slots and bells that are as small as can be.

Each side has a loop of its own, whose steps the test chooses: one iteration, one timer, one reading of the bell. Three calls and
their results have to cross, two of them in slots. From the first state on, each step that is possible is taken in each state, until
no new state is found. For each of them the test asks:

- Do all results arrive, once each, if both sides go on fairly? If not, a wake-up was lost, or the two wait for each other.
- If the worker dies right here, does everything that it has published arrive, and is no slot left?

A state is a path of steps, taken again from the start, because memory and descriptors cannot be copied. Two paths to the same
positions, queues, slots and timers are one state. `make long` looks at all of them, 13,914 in the three sizes.
"""

import os
import select
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Final, TypeVar, cast

import pytest

from percore._protocol.messages import RESULT, UNPICKLED, Message
from percore._transport import arena as arena_module
from percore._transport import channel as channel_module
from percore._transport import frames
from percore._transport.arena import Arena
from percore._transport.codec import decode
from percore._transport.doorbell import Bell, bell_fds, bell_of
from percore._transport.memory import Memory
from percore._transport.ring import RingReader, RingWriter, largest_frame
from percore._transport.slots import SlotReader, SlotWriter
from percore._transport.supervisor_side import SupervisorSide
from percore._transport.worker_side import WorkerSide
from tests.counts import times

SIZES: Final = [(56, 1), (56, 4), (192, 1)]
"""Bytes of a ring and slots of each side: one frame and one slot for all; releases that wait for company; room for many frames."""

SLOT: Final = 4096
INLINE: Final = 16
CALL: Final = 1
BODIES: Final = {1: b"small", 2: b"a" * 40, 3: b"b" * 40}
"""The arguments and the result of each call: those of 1 travel in the frame, the others in a slot."""


class StepLoop:
    """An event loop whose steps the test takes."""

    def __init__(self) -> None:
        self.soon: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self.timers: deque[tuple[Callable[..., object], tuple[Any, ...]]] = deque()
        self.reader: Callable[[], object] | None = None

    def call_soon(self, callback: Callable[..., object], *args: Any) -> None:
        self.soon.append((callback, args))

    call_soon_threadsafe = call_soon

    def call_later(self, _delay: float, callback: Callable[..., object], *args: Any) -> None:
        self.timers.append((callback, args))

    def add_reader(self, _fd: int, callback: Callable[[], object]) -> None:
        self.reader = callback

    def remove_reader(self, _fd: int) -> None:
        self.reader = None

    def is_closed(self) -> bool:
        return False

    def iterate(self) -> None:
        """Run what is due now."""
        for _ in range(len(self.soon)):
            callback, args = self.soon.popleft()
            callback(*args)

    def expire(self) -> None:
        """Run the first timer."""
        callback, args = self.timers.popleft()
        callback(*args)


class SeenBell:
    """A bell whose contents can be seen without being read."""

    def __init__(self, bell: Bell) -> None:
        self._bell = bell
        self.other: SeenBell
        self.waiting = (0, 0)
        """Bytes published and consumed that this side has not read yet."""
        self.fileno, self.out_fileno, self.close, self.log = bell.fileno, bell.out_fileno, bell.close, bell.log

    def ring(self, published: int, consumed: int) -> bool:
        waiting = self.other.waiting
        self.other.waiting = waiting[0] + published, waiting[1] + consumed
        return self._bell.ring(published, consumed)

    def read(self) -> tuple[int, int, int]:
        self.waiting = 0, 0
        return self._bell.read()

    def rings(self) -> bool:
        return bool(select.select([self.fileno()], [], [], 0)[0])


class Ticket:
    """A call that waits for a slot."""

    def __init__(self, parcels: dict[int, int], number: int) -> None:
        self._parcels = parcels
        self._number = number

    def stored(self, parcel: int) -> bool:
        self._parcels[self._number] = parcel
        return True

    def is_wanted(self) -> bool:
        return True


class World:
    """The two sides, their memory, and what has happened so far."""

    def __init__(self, ring: int, slots: int, leases: int = 0) -> None:
        self.loops = StepLoop(), StepLoop()
        loops = cast("Any", self.loops)
        size = slots * SLOT
        cell, arguments, results_here = Memory.create(2 * ring), Memory.create(size), Memory.create_for_writer(size)
        arguments_there = Memory.of_reader(arguments.reader_fd(), size)
        results = Memory(os.dup(results_here.fd), size, writable=True)
        self.memories = cell, arguments, arguments_there, results, results_here
        self.bells = [SeenBell(bell_of(fds)) for fds in bell_fds()]
        self.bells[0].other, self.bells[1].other = self.bells[1], self.bells[0]
        up, down = (cast("Bell", bell) for bell in self.bells)
        self.arena = Arena(arguments, SLOT, SLOT, loops[0])
        self.results = SlotWriter(results, SLOT, SLOT)
        view = cell.view
        self.supervisor = SupervisorSide(
            *(loops[0], (RingWriter(view[:ring]), RingReader(view[ring:])), up, (self.arena, SlotReader(results_here, SLOT))),
            leases=leases,
            lent=leases,
        )
        self.worker = WorkerSide(
            loops[1],
            (RingWriter(view[ring:]), RingReader(view[:ring])),
            down,
            (self.results, SlotReader(arguments_there, SLOT)),
            leases=leases,
        )
        self.parcels: dict[int, int] = {}
        self.unsent = deque(BODIES)
        self.unread: deque[tuple[int, Any]] = deque()
        self.unanswered: deque[int] = deque()
        self.got: list[int] = []
        self.broken: list[BaseException] = []
        self.supervisor.open(self._outcomes, self.broken.append)
        self.worker.open(self._calls, self.broken.append)
        self.is_dead = False

    # What the two do with messages

    def _calls(self, messages: list[Message]) -> None:
        for op, number, body in messages:
            if op in self.worker.own:
                self.worker.own[op](number, body)
            else:
                self.unread.append((number, body))

    def _outcomes(self, messages: list[Message]) -> None:
        for op, number, body in messages:
            if op == UNPICKLED:
                self.arena.discard(self.parcels.pop(number))
                continue
            assert op == RESULT
            payload = cast("Any", body)
            assert bytes(self.supervisor.read(payload)) == BODIES[number], "another call's result, or half of one"
            assert number not in self.got, "a result came twice"
            self.got.append(number)
            self.supervisor.release(payload)

    # Steps

    def send(self) -> None:
        number = self.unsent.popleft()
        data = BODIES[number]
        if len(data) <= INLINE:
            self.supervisor.send(CALL, number, data)
        else:
            stored = self.arena.store(data)
            parcel = self.arena.kept(data) if stored is None else stored
            self.parcels[number] = cast("int", parcel)
            self.supervisor.send_parcel(CALL, number, self.parcels[number], Ticket(self.parcels, number))

    def read(self) -> None:
        number, body = self.unread.popleft()
        assert bytes(self.worker.read(body)) == BODIES[number], "another call's arguments, or half of them"
        if type(body) is int:
            self.worker.send(UNPICKLED, number, None)
        self.unanswered.append(number)

    def answer(self) -> None:
        number = self.unanswered.popleft()
        self.worker.send_payload(RESULT, number, BODIES[number])

    def steps(self) -> Iterator[tuple[str, Callable[[], object]]]:
        """Name what can be done now."""
        if self.unsent:
            yield "send", self.send
        for side, loop, bell in zip("sw", self.loops, self.bells, strict=True):
            if side == "w" and self.is_dead:
                continue
            if loop.soon:
                yield f"{side} iterates", loop.iterate
            if loop.timers:
                yield f"{side} expires", loop.expire
            if loop.reader is not None and bell.rings():
                yield f"{side} hears", loop.reader
        if self.unread and not self.is_dead:
            yield "w reads", self.read
        if self.unanswered and not self.is_dead:
            yield "w answers", self.answer

    def take(self, name: str) -> None:
        dict(self.steps())[name]()
        assert not self.broken, self.broken

    def state(self) -> object:
        """Return all that decides what can happen next."""
        sides = [
            (
                *(channel.tx.written, channel.tx.acknowledged, channel.rx.read, channel._told, channel._frame),
                *(tuple(channel._queue), channel._ends_turn, channel._is_lazy, channel._is_ring_due, channel.haste.rung > 0),
                (bell.waiting, len(loop.soon), len(loop.timers), channel.outgoing.in_use, len(channel.outgoing._waiters)),
            )
            for channel, bell, loop in zip((self.supervisor, self.worker), self.bells, self.loops, strict=True)
        ]
        heard = tuple(self.unsent), tuple(self.unread), tuple(self.unanswered), tuple(self.got), tuple(sorted(self.parcels.items()))
        return tuple(sides), heard

    # Ends

    def finish(self) -> None:
        """Go on fairly until nothing can be done any more: everything has arrived then, and no slot is in use."""
        for _ in range(400):
            steps = list(self.steps())
            if not steps:
                break
            for name, _ in steps:
                if name in dict(self.steps()):
                    self.take(name)
        assert sorted(self.got) == sorted(BODIES), f"only {self.got} arrived, and nothing can be done any more"
        assert (self.arena.in_use, self.results.in_use) == (0, 0), "a slot was not given back"
        assert self.supervisor.is_flushed()
        assert self.worker.is_flushed()

    def die(self) -> None:
        """The worker is gone: what it has published arrives, and nothing of it stays in use."""
        published = self._published()
        self.is_dead = True
        self.supervisor.receive()
        assert not self.broken
        assert sorted(self.got) == sorted(published), "a published result was lost"
        self.supervisor.close()
        for parcel in self.parcels.values():
            self.arena.discard(parcel)
        assert self.arena.in_use == 0

    def _published(self) -> list[int]:
        """Return the results that have arrived, and those that lie in the ring: each frame there has been rung for."""
        ring = RingReader(self.supervisor.rx._view)
        ring.read, ring.end = self.supervisor.rx.read, self.worker.tx.written
        found = list(self.got)
        while ring.read != ring.end:
            found += [number for op, number, _ in decode(ring.next()) if op == RESULT]
        return found

    def close(self) -> None:
        for channel in (self.supervisor, self.worker):
            channel.close()
            channel.close()
        self.broken.clear()
        for memory in self.memories:
            memory.close()


W = TypeVar("W", bound=World)


@contextmanager
def world(make: Callable[[], W], path: tuple[str, ...]) -> Iterator[W]:
    """Take the steps of a path in a new world."""
    one = make()
    try:
        for name in path:
            one.take(name)
        yield one
    except AssertionError as error:
        error.add_note("after: " + ", ".join(path))
        raise
    finally:
        one.close()


def explore(make: Callable[[], World], most: int) -> int:
    """Look at each state, breadth first, up to so many. Return how many there were."""
    seen: set[object] = set()
    paths: deque[tuple[str, ...]] = deque([()])
    while paths and len(seen) < most:
        path = paths.popleft()
        with world(make, path) as one:
            state = one.state()
            if state in seen:
                continue
            seen.add(state)
            paths.extend((*path, name) for name, _ in one.steps())
            one.finish()
        with world(make, path) as one:
            one.die()
    return len(seen)


def make_small(ring: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let frames fit into rings of this size, and all but a few bytes need a slot."""
    for module in (arena_module, channel_module):
        monkeypatch.setattr(module, "INLINE_LIMIT", INLINE)
    monkeypatch.setattr(frames, "MAX_FRAME", ring // 2)
    monkeypatch.setattr(frames, "LARGEST_FRAME", largest_frame(ring))


@pytest.mark.long
@pytest.mark.parametrize("sizes", SIZES)
def test_in_every_order_of_steps_everything_arrives_and_a_death_loses_nothing_published(
    sizes: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    make_small(sizes[0], monkeypatch)
    assert explore(lambda: World(*sizes), times(300, 10**7)) >= 300
