"""Every order of steps in the life of slots and their leases, over the two real sides of a channel (see `test_channel_orders`).

The arguments and the result of each call have an array, for which the receiver leases the slot: it keeps the array for a while,
writes to it, and drops it. A slot is taken, perhaps after a wait, told, read and leased (LEASED before UNPICKLED). It is free when
both its owner and its lease have ended (UNLEASED, or RELEASE in the other direction). Calls are cancelled meanwhile. In each state
the test asks:

- Do all calls end if both sides go on fairly, also if nobody drops an array any more? And is each slot free when all are dropped?
- Does each array have the bytes of its own call, whatever another receiver has written to the slot before?
- If the worker dies right here: do the arguments of each call still have their bytes, for another attempt, is no slot left, and can
  the arrays of the dead worker be read, and dropped at any time?

`make long` looks at all of them, 49,382 in the three sizes, and at random histories of larger ones.
"""

import pickle
import random
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, Final, NamedTuple, cast

import pytest

from percore._protocol.messages import CANCEL, CANCELLED, LEASED, RESULT, UNPICKLED, BrokenFrame, Message
from percore._transport.buffers import ALIGNMENT, table_of
from percore._transport.channel import Channel
from percore._transport.leases import Leases
from percore._transport.slots import SlotReader, SlotWriter
from percore._transport.supervisor_side import SupervisorSide
from percore._transport.worker_side import WorkerSide
from tests.counts import times
from tests.unit.test_channel_orders import CALL, World, explore, make_small

SIZE: Final = 64
WRITTEN: Final = b"\xff" * SIZE
"""What a receiver writes to its arrays."""


def array_of(number: int) -> bytes:
    return bytes([number]) * SIZE


def payload_of(number: int) -> bytes:
    """Return a payload that consists of one array."""
    arrays: list[pickle.PickleBuffer] = []
    pickled = pickle.dumps(pickle.PickleBuffer(bytearray(array_of(number))), 5, buffer_callback=arrays.append)
    gap = bytes(-len(pickled) % ALIGNMENT)
    return b"".join((pickled, gap, array_of(number), table_of(len(pickled), [(len(pickled) + len(gap), SIZE)])))


class Sizes(NamedTuple):
    """Bytes of a ring, slots of each side, leases of each, calls, how many are cancelled, and where there are arrays."""

    ring: int
    slots: int
    leases: int
    calls: int
    cancels: int
    arrays: tuple[bool, bool]
    """Of the arguments and of the results."""
    taken: int = 0
    """How many slots of each side others have at first."""


class Ticket:
    """A call that waits for a slot."""

    def __init__(self, one: "Leased", number: int) -> None:
        self._one = one
        self._number = number

    def is_wanted(self) -> bool:
        return self._number in self._one.waiting

    def stored(self, parcel: int) -> bool:
        if not self.is_wanted():
            return False
        self._one.waiting.discard(self._number)
        self._one.parcels[self._number] = parcel
        return True


class Leased(World):
    """Two sides whose messages have arrays."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__(sizes.ring, sizes.slots, sizes.leases)
        self.sizes = sizes
        self.unsent.clear()
        self.unsent.extend(range(1, sizes.calls + 1))
        self.cancels = sizes.cancels
        self.waiting: set[int] = set()
        """Calls whose arguments wait for a slot."""
        self.cancelled: set[int] = set()
        self.ended: set[int] = set()
        self.kept: tuple[dict[int, Any], dict[int, Any]] = ({}, {})
        """The arrays that the supervisor's user and the worker keep, by the calls."""
        self.taken = [[cast("int", slots.take()) for _ in range(sizes.taken)] for slots in (self.arena, self.results)]
        """The slots that others have."""

    # What the two do with messages

    def _calls(self, messages: list[Message]) -> None:
        for op, number, body in messages:
            if op in self.worker.own:
                self.worker.own[op](number, body)
            elif op == CALL:
                self.unread.append((number, body))
            else:
                assert op == CANCEL
                self._withdraw(number)

    def _withdraw(self, number: int) -> None:
        unread = [one for one in self.unread if one[0] == number]
        if unread or number in self.unanswered:
            for one in unread:
                self.unread.remove(one)
            if number in self.unanswered:
                self.unanswered.remove(number)
            self.worker.send(CANCELLED, number, bool(unread))

    def _outcomes(self, messages: list[Message]) -> None:
        for op, number, body in messages:
            if op in self.supervisor.own:
                self.supervisor.own[op](number, body)
            elif op == UNPICKLED:
                self.arena.discard(self.parcels.pop(number))
            else:
                self._outcome(op, number, cast("Any", body))

    def _outcome(self, op: int, number: int, payload: Any) -> None:
        assert number not in self.ended, "two outcomes"
        self.ended.add(number)
        if op == RESULT:
            self.got.append(number)
            if number in self.cancelled:
                self.supervisor.release(payload)
            elif self.sizes.arrays[1]:
                received = self.supervisor.load(payload)
                self.kept[0][number] = self._checked(number, received.load())
                if not received.is_leased:
                    self.supervisor.release(payload)
        if number in self.parcels:
            self.arena.discard(self.parcels.pop(number))

    def _checked(self, number: int, array: memoryview) -> memoryview:
        assert bytes(array) == array_of(number), "the bytes of another call, or those that a receiver has written"
        array[:] = WRITTEN
        return array

    # Steps

    def send(self) -> None:
        number = self.unsent.popleft()
        if not self.sizes.arrays[0]:
            self.supervisor.send(CALL, number, b"small")
            return
        data = payload_of(number)
        stored = self.arena.store(data)
        self.parcels[number] = cast("int", self.arena.kept(data) if stored is None else stored)
        self.waiting.add(number)
        self.supervisor.send_parcel(CALL, number, self.parcels[number], Ticket(self, number))

    def read(self) -> None:
        number, payload = self.unread.popleft()
        if self.sizes.arrays[0]:
            received = self.worker.load(payload)
            self.kept[1][number] = self._checked(number, received.load())
            self.worker.send(UNPICKLED, number, None)
        self.unanswered.append(number)

    def answer(self) -> None:
        number = self.unanswered.popleft()
        self.worker.send_payload(RESULT, number, payload_of(number) if self.sizes.arrays[1] else b"small")

    def cancel(self, number: int) -> None:
        self.cancels -= 1
        self.cancelled.add(number)
        if number in self.waiting:
            self.waiting.discard(number)
            self.arena.discard(self.parcels.pop(number))
            self.ended.add(number)
        else:
            self.supervisor.send(CANCEL, number, None)

    def frees(self) -> Iterator[tuple[str, Callable[[], object]]]:
        for side, slots, taken in zip("sw", (self.arena, self.results), self.taken, strict=True):
            if taken and (side == "s" or not self.is_dead):
                yield f"{side} frees", lambda slots=slots, taken=taken: slots.give(taken.pop(), 1)  # type: ignore[misc]

    def drops(self) -> Iterator[tuple[str, Callable[[], object]]]:
        for side, kept in zip("sw", self.kept, strict=True):
            if side == "s" or not self.is_dead:
                for number in kept:
                    yield f"{side} drops {number}", partial(kept.pop, number)

    def steps(self) -> Iterator[tuple[str, Callable[[], object]]]:
        yield from super().steps()
        yield from self.frees()
        yield from self.drops()
        if self.cancels:
            for number in range(1, self.sizes.calls + 1):
                if number not in self.unsent and number not in self.ended:
                    yield f"s cancels {number}", partial(self.cancel, number)

    def state(self) -> object:
        sides = [
            (channel.leases.count, len(channel.leases._endings._ended), channel.leases._endings._is_due, sorted(kept))
            for channel, kept in zip((self.supervisor, self.worker), self.kept, strict=True)
        ]
        slots = (tuple(self.arena._holders), tuple(self.results._holders), tuple(self.supervisor._held))
        calls = (frozenset(self.waiting), frozenset(self.cancelled), frozenset(self.ended), self.cancels, *map(len, self.taken))
        return super().state(), str(sides), slots, calls

    # Ends

    def finish(self) -> None:
        """Go on without dropping an array: all calls end. Then drop them: nothing is in use any more."""
        self.cancels = 0
        self._go_on(lambda name: " drops " not in name)
        assert self.ended == set(range(1, self.sizes.calls + 1)), f"only {self.ended} ended, and nothing can be done any more"
        assert not self.parcels
        assert self.arena.in_use == self.worker.leases.count == len(self.supervisor._held)
        assert self.results.in_use == self.supervisor.leases.count
        assert max(self.worker.leases.count, self.supervisor.leases.count) <= self.sizes.leases
        self._go_on(lambda _: True)
        assert (self.arena.in_use, self.results.in_use) == (0, 0), "a slot was not given back"
        assert (self.worker.leases.count, self.supervisor.leases.count, self.supervisor._held) == (0, 0, [])
        assert self.supervisor.is_flushed()
        assert self.worker.is_flushed()

    def _go_on(self, is_fair: Callable[[str], bool]) -> None:
        for _ in range(400):
            names = [name for name, _ in self.steps() if is_fair(name)]
            if not names:
                return
            for name in names:
                if name in dict(self.steps()):
                    self.take(name)
        raise AssertionError("it never ends")

    def die(self) -> None:
        published = self._published()
        self.is_dead = True
        self.supervisor.receive()
        assert not self.broken
        assert sorted(self.got) == sorted(published), "a published result was lost"
        self.supervisor.close()
        for number, parcel in self.parcels.items():
            if parcel >= 0:
                assert bytes(self.arena.read(parcel)) == payload_of(number), "another attempt would get other arguments"
            self.arena.discard(parcel)
        assert self.arena.in_use == len(self.taken[0]), "a lease of the dead worker holds a slot"
        for memory in self.memories[3:]:
            memory.close()
        assert all(bytes(array) == WRITTEN for array in self.kept[0].values())
        self.kept[0].clear()
        while self.loops[0].soon:
            self.loops[0].iterate()
        assert self.supervisor.leases.count == 0

    def close(self) -> None:
        try:
            super().close()
        finally:
            self.bells[0].close()
            self.bells[1].close()
            for memory in self.memories:
                memory.close()
            for kept in self.kept:
                kept.clear()


ARGUMENTS, RESULTS, BOTH = (True, False), (False, True), (True, True)

SIZES: Final = [Sizes(96, 2, 1, 1, 1, BOTH, 2), Sizes(96, 2, 1, 2, 0, ARGUMENTS), Sizes(96, 2, 1, 2, 0, RESULTS)]
"""A slot beside the one that may be leased. One call waits for slots and is cancelled; two share them."""

LARGE: Final = [Sizes(96, 2, 1, 4, 2, BOTH, 1), Sizes(192, 3, 2, 5, 2, BOTH), Sizes(96, 2, 1, 6, 1, ARGUMENTS)]
"""Calls that wait for slots: too many states to look at all of them."""


def stroll(sizes: Sizes, chance: random.Random) -> int:
    """Take steps as they come, then let the worker die, or all go on. Return how many steps there were."""
    path: list[str] = []
    one = Leased(sizes)
    try:
        for _ in range(chance.randrange(80)):
            names = [name for name, _ in one.steps()]
            if not names:
                break
            path.append(chance.choice(names))
            one.take(path[-1])
        if chance.randrange(3):
            one.finish()
        else:
            one.die()
    except AssertionError as error:
        error.add_note("after: " + ", ".join(path))
        raise
    finally:
        one.close()
    return len(path)


@pytest.mark.long
@pytest.mark.parametrize("sizes", SIZES)
def test_in_every_order_of_steps_each_slot_has_its_call_s_bytes_and_is_given_back(
    sizes: Sizes, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_small(sizes.ring, monkeypatch)
    assert explore(lambda: Leased(sizes), times(100, 10**7)) >= 100


@pytest.mark.long
@pytest.mark.parametrize("sizes", LARGE)
def test_in_random_orders_of_more_steps(sizes: Sizes, monkeypatch: pytest.MonkeyPatch) -> None:
    make_small(sizes.ring, monkeypatch)
    chance = random.Random(1)
    assert sum(stroll(sizes, chance) for _ in range(times(20, 5000))) > 100


def test_v9_a_worker_that_leases_more_slots_than_it_may_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    """It would keep all of them from the other workers, whose calls would wait for ever."""
    make_small(192, monkeypatch)
    one = Leased(Sizes(192, 3, 1, 2, 0, ARGUMENTS))
    try:
        one.send()
        one.send()
        for parcel in one.parcels.values():
            one.worker.send(LEASED, 0, parcel)
        one.loops[1].iterate()
        cast("Any", one.loops[0].reader)()
        assert [str(error) for error in one.broken] == ["more than 1 slots were leased"]
        one.supervisor.close()
        for parcel in one.parcels.values():
            one.arena.discard(parcel)
        assert one.arena.in_use == 0
    finally:
        one.close()


def _takes(others: list[str]) -> bool:
    others.append("a call for another worker")
    return True


class Interrupted:
    """Memory at whose next copy Ctrl-C is pressed."""

    def __init__(self, memory: Any) -> None:
        self._memory = memory
        self.view = self
        self.is_pressed = False

    def __setitem__(self, part: slice, data: bytes) -> None:
        self._memory.view[part] = data
        if not self.is_pressed:
            self.is_pressed = True
            raise KeyboardInterrupt

    def __getattr__(self, name: str) -> Any:
        return getattr(self._memory, name)


def test_an_interrupt_while_a_call_that_has_waited_is_copied_costs_its_worker_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """A long copy is where Ctrl-C strikes. The call would never be sent, its slot be lost, and the others wait for ever."""
    make_small(192, monkeypatch)
    one = Leased(Sizes(192, 3, 1, 1, 0, ARGUMENTS, taken=3))
    try:
        one.send()
        others: list[str] = []
        one.arena.wait(partial(_takes, others))
        memory: Any = Interrupted(one.arena._memory)
        one.arena._memory = memory
        with pytest.raises(KeyboardInterrupt):
            dict(one.steps())["s frees"]()
        assert [type(error) for error in one.broken] == [KeyboardInterrupt]
        assert one.arena.in_use == 2
        assert others
        one.broken.clear()
        one.die()
    finally:
        one.close()


class Fault(NamedTuple):
    """A part of a channel that does something else."""

    name: str
    owner: Any
    method: str
    does: Callable[..., Any]


def _told_late(side: Any, payload: Any) -> Any:
    """The worker tells of the lease when it has told that the arguments are read."""
    received = side.leases.receive(payload)
    side.loop.call_soon(side.keep, LEASED, 0, payload)
    return received


FAULTS: Final = [
    Fault("the supervisor does not hold the slot of a lease", SupervisorSide, "_hold", lambda *_: None),
    Fault("the supervisor does not end a lease", SupervisorSide, "_let_go", lambda *_: None),
    Fault("the supervisor does not release results", SupervisorSide, "release", lambda *_: None),
    Fault("the leases of a dead worker stay", SupervisorSide, "close", Channel.close),
    Fault("a call that waits for a slot is forgotten", SupervisorSide, "_retry", lambda *_: True),
    Fault("the worker tells of no end of a lease", WorkerSide, "_unleased", lambda *_: None),
    Fault("the worker tells of a lease too late", WorkerSide, "load", _told_late),
    Fault("the worker frees no slot of a result", WorkerSide, "_release", lambda *_: None),
    Fault("a result that waits for a slot is forgotten", Channel, "_retry_payload", lambda *_: True),
    Fault("a receiver keeps seeing what it has written", SlotReader, "forget", lambda *_: None),
    Fault("more slots are leased than may be", Leases, "_begin", lambda leases, slot: leases._leased.add(slot) or True),
    Fault("a lease never ends", Leases, "_give_up", lambda *_: None),
    Fault("a slot is given back with its first holder", SlotWriter, "hold", lambda *_: None),
]


def test_the_explorer_finds_faults(monkeypatch: pytest.MonkeyPatch, subtests: pytest.Subtests) -> None:
    make_small(96, monkeypatch)
    for fault in FAULTS:
        chance = random.Random(2)
        with subtests.test(fault.name), monkeypatch.context() as patch:
            patch.setattr(fault.owner, fault.method, fault.does)
            with pytest.raises((AssertionError, BrokenFrame)):  # noqa: PT012  # the strolls that find nothing, and the one that does
                for _ in range(500):
                    stroll(LARGE[0], chance)
