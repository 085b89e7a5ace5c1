"""Who gets which call: the rules of places, turns, keys, batches and recalls, held by a model that plays the shell."""

import contextlib
import gc
import itertools
import sys
import weakref
from collections import Counter, deque
from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass, field
from random import Random
from types import CodeType
from typing import Any, TypeAlias

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from percore._protocol.messages import Kind
from percore._scheduler import keys as keys_module
from percore._scheduler.batching import Batches, Run
from percore._scheduler.choice import BLOCKED, Choice
from percore._scheduler.dispatch import Dispatch
from percore._scheduler.keys import weight
from percore._scheduler.levels import LEAST_ASIDE, MOST_ASIDE
from percore._scheduler.places import AHEAD, MOST_BROADCASTS, ROOM_OF_NONE, places_at_first, places_for, room_of
from percore._scheduler.queues import Queue
from percore._scheduler.recalls import Recall
from tests.counts import times
from tests.strikes import Fault, Strike

TASK, THREAD = Kind.TASK, Kind.THREAD
KINDS = (TASK, THREAD)


@dataclass(eq=False)
class Call:
    kind: int
    number: int = 0
    key: Hashable | None = None
    home: "Line | None" = None
    is_done: bool = False
    size: int = 1

    def done(self) -> bool:
        return self.is_done


@dataclass(eq=False)
class FakeBatch:
    """A batch: its items are named by numbers."""

    home: "Line"
    run: Run
    kind: int = THREAD
    key: None = None

    @property
    def size(self) -> int:
        return len(self.run.bodies)

    def done(self) -> bool:
        return False


Unit: TypeAlias = Any
"""A Call or a FakeBatch."""


@dataclass(eq=False)
class Seat:
    index: int = 0
    load: list[int] = field(default_factory=lambda: [0, 0])
    recalling: bool = False
    silent: int = 0
    unread: bool = False
    is_holding: bool = False
    tickets: int = sys.maxsize
    calls: list[Unit] = field(default_factory=list)

    def silence(self) -> int:
        return self.silent

    def has_read(self) -> bool:
        return not (self.silent or self.unread)

    @property
    def items(self) -> int:
        batched: int = sum(call.size - 1 for call in self.calls)
        return self.load[THREAD] + batched

    def send(self, call: Unit) -> None:
        self.calls.append(call)
        self.load[call.kind] += 1

    def take(self, call: Unit) -> None:
        self.calls.remove(call)
        self.load[call.kind] -= 1


def withdrawn_from(dispatch: Dispatch[Any, Any]) -> list[Any]:
    """Withdraw all calls that wait. Return those that were not cancelled."""
    calls: list[Any] = []
    dispatch.withdraw(calls)
    return [call for call in calls if not call.done()]


class Line:
    """What the model knows to wait in one queue."""

    def __init__(self, name: str, kind: int, queue: Any, *, is_batched: bool = False) -> None:
        """`queue`: a Queue; None: that of the single calls."""
        self.name = name
        self.kind = kind
        self.queue = queue
        self.is_batched = is_batched
        self.calls: deque[Call] = deque()
        self.lanes: dict[Hashable, deque[Call]] = {}
        self.items: list[int] = []
        self.next_item = 0

    def __repr__(self) -> str:
        return self.name

    def live(self) -> list[Call]:
        return [call for call in (*self.calls, *(call for lane in self.lanes.values() for call in lane)) if not call.is_done]

    def live_keys(self) -> list[Hashable]:
        return [key for key, lane in self.lanes.items() if any(not call.is_done for call in lane)]

    def has_plain(self) -> bool:
        """Whether something waits here that any worker may take."""
        return bool(self.items) or any(not call.is_done for call in self.calls)


class Turns:
    """Holds those who wait for one thing to their turns: while one waits, no other is served twice."""

    def __init__(self) -> None:
        self.served_since: dict[object, set[object]] = {}

    def keep(self, waiting: Iterable[object]) -> None:
        """Only these still wait; who comes later waits anew."""
        waiting = set(waiting)
        self.served_since = {who: seen for who, seen in self.served_since.items() if who in waiting}

    def serve(self, served: object, waiting: Iterable[object]) -> None:
        """One was served, while these could have been."""
        self.keep(waiting)
        for who in set(waiting) - {served}:
            seen = self.served_since.setdefault(who, set())
            assert served not in seen, f"{served} was served twice while {who} waited"
            seen.add(served)
        self.served_since.pop(served, None)


class DispatchMachine(RuleBasedStateMachine):
    """Does with a Dispatch what the supervisor does, and checks each decision."""

    dispatch: Dispatch[Unit, Seat]

    def __init__(self) -> None:
        super().__init__()
        self.count = self.opened = 0
        self.leavers: list[Seat] = []
        self.resting: list[Seat] = []
        self.maps: list[Line] = []
        self.turns = (Turns(), Turns())
        self.sorts: dict[Line, Turns] = {}
        self.workers: dict[Line, Turns] = {}
        self.lanes: dict[tuple[Line, Seat], Turns] = {}
        self.unfinished: set[object] = set()

    @initialize(
        concurrency=st.integers(1, 3),
        threads=st.integers(1, 2),
        seats=st.integers(0, 7),
        per_key=st.one_of(st.none(), st.integers(1, 3)),
        piece=st.sampled_from([1, keys_module.PIECE]),
    )
    def start(self, concurrency: int, threads: int, seats: int, per_key: int | None, piece: int) -> None:
        self.patch = pytest.MonkeyPatch()
        self.patch.setattr(keys_module, "PIECE", piece)
        self.places = (concurrency, threads)
        self.room = (concurrency, threads * (1 + AHEAD))
        self.limit = per_key or 1 << 30
        self.dispatch = Dispatch(concurrency, threads, per_key)
        self.singles = (Line("coroutines", TASK, None), Line("plain calls", THREAD, None))
        for index in range(seats):
            self.dispatch.seat(Seat(index))

    def teardown(self) -> None:
        if hasattr(self, "patch"):
            self.patch.undo()

    # What the model knows

    def lines(self) -> list[Line]:
        return [*self.singles, *self.maps]

    def everyone(self) -> list[Seat]:
        return [*self.dispatch.seats, *self.leavers]

    def under_way(self, key: Hashable) -> list[Seat]:
        return [seat for seat in self.everyone() for call in seat.calls if call.key == key]

    def seat_of(self, key: Hashable) -> Seat | None:
        """Where a key with waiting calls belongs, and whether that is a worker that takes calls."""
        known = self.dispatch.keys._keys[key]
        if known.round != self.dispatch.keys.round:  # it finds that out when it is used
            self.dispatch.keys._place(known)
        awake = [seat for seat in self.dispatch.seats if seat not in self.resting]
        if not known.running and awake:
            assert known.seat in awake
        return known.seat if known.seat in awake else None

    def listed_keys(self, line: Line, seat: Seat) -> list[Hashable]:
        """Keys of the line's calls that may go to this worker, as soon as it has room."""
        keys = line.live_keys()
        return [key for key in keys if len(self.under_way(key)) < self.limit and self.seat_of(key) is seat]

    def has_listed(self, line: Line) -> bool:
        return any(self.listed_keys(line, seat) for seat in self.dispatch.seats)

    def sendable_keys(self, line: Line, seat: Seat) -> list[Hashable]:
        return self.listed_keys(line, seat) if seat.load[line.kind] < self.room[line.kind] else []

    def can_send_lanes(self, line: Line) -> bool:
        return any(self.sendable_keys(line, seat) for seat in self.dispatch.seats)

    # What each decision has to be

    def level(self, kind: int) -> list[Seat]:
        """The workers with a free place; else those to queue ahead in."""
        seats = self.dispatch.seats
        at_once = [seat for seat in seats if seat.load[kind] < self.places[kind]]
        return at_once or [seat for seat in seats if seat.load[kind] < self.room[kind]]

    def may_wait(self, kind: int) -> bool:
        """Whether a blocked worker has less to do than the others, which have not read what they were sent."""
        level = self.level(kind)
        awake = [seat for seat in level if seat.silent < BLOCKED]
        return bool(awake) and len(awake) < len(level) and not any(seat.has_read() for seat in awake)

    def check_choice(self, kind: int, chosen: Seat) -> None:
        """The one with the least load and silence, where it can begin at once; a blocked one only if it is alone."""
        level = self.level(kind)
        assert chosen in level
        awake = [seat for seat in level if seat.silent < BLOCKED] or level
        assert chosen in awake
        least = min(seat.load[kind] + seat.silent for seat in awake)
        is_beaten = any(seat.load[kind] + seat.silent <= least for seat in level if seat not in awake)
        assert is_beaten or chosen.load[kind] + chosen.silent == least

    def check_turns(self, call: Unit, seat: Seat) -> None:
        """Queues take turns; in a queue those with keys and those without; among keys the workers, and the keys of a worker."""
        line, kind = call.home, call.kind
        may_wait = call.key is not None and self.may_wait(kind)  # whatever has no key
        candidates = [
            other
            for other in self.lines()
            if other.kind == kind and ((other.has_plain() and not may_wait) or self.can_send_lanes(other))
        ]
        self.turns[kind].serve(line, candidates)
        sorts = [
            is_keyed for is_keyed, has in ((False, line.has_plain() and not may_wait), (True, self.can_send_lanes(line))) if has
        ]
        self.sorts.setdefault(line, Turns()).serve(call.key is not None, sorts)
        if call.key is not None:
            seats = [other for other in self.dispatch.seats if self.sendable_keys(line, other)]
            if len(candidates) > 1:  # else all of them are filled, in any order
                self.workers.setdefault(line, Turns()).serve(seat, seats)
            self.lanes.setdefault((line, seat), Turns()).serve(call.key, self.listed_keys(line, seat))

    def check_keyed(self, call: Call, seat: Seat) -> None:
        assert seat in self.dispatch.seats
        others = self.under_way(call.key)
        assert set(others) <= {seat}
        assert len(others) < self.limit

    def forget_served(self) -> None:
        """Who does not wait any more has no claim; a key that is at its limit has none either."""
        for turns, kind in zip(self.turns, KINDS, strict=True):
            turns.keep(line for line in self.lines() if line.kind == kind and (line.has_plain() or self.has_listed(line)))
        for line, turns in self.sorts.items():
            turns.keep([False] * line.has_plain() + [True] * self.has_listed(line))
        for line, turns in self.workers.items():
            turns.keep(seat for seat in self.dispatch.seats if self.listed_keys(line, seat))
        for (line, seat), turns in self.lanes.items():
            turns.keep(self.listed_keys(line, seat))

    def take_from_line(self, call: Unit) -> None:
        line = call.home
        if isinstance(call, FakeBatch):
            assert not any(not waiting.is_done for waiting in line.calls)  # single calls of a map come first
            assert call.run.bodies == line.items[: call.size] == list(range(call.run.start, call.run.start + call.size))
            del line.items[: call.size]
            return
        waiting = line.calls if call.key is None else line.lanes[call.key]
        while waiting[0].is_done:
            waiting.popleft()
        assert call is waiting.popleft()  # first come, first served
        if call.key is not None and not waiting:
            del line.lanes[call.key]

    def pump(self) -> None:
        while not self.dispatch.is_settled():
            self.dispatch.settle()
        for kind in KINDS:
            for call, seat in self.dispatch.fill(kind):
                assert call.kind == kind
                assert seat.load[kind] < self.room[kind]
                if call.key is None:
                    self.check_choice(kind, seat)
                self.check_turns(call, seat)
                if call.key is not None:
                    # The keys have counted it already, which the model does when it is sent.
                    self.check_keyed(call, seat)
                self.take_from_line(call)
                seat.send(call)
                self.forget_served()
        self.workers.clear()
        self.check_nothing_is_held_up()

    def check_nothing_is_held_up(self) -> None:
        """What still waits could not go anywhere, or need not yet."""
        for line in self.lines():
            if self.is_well_filled(line.kind):
                continue
            if line.has_plain() and not self.may_wait(line.kind):
                assert all(seat.load[line.kind] >= self.room[line.kind] for seat in self.dispatch.seats)
            assert not self.can_send_lanes(line)

    def is_well_filled(self, kind: int) -> bool:
        """Whether no worker has a free place, nor room for as many calls ahead as it has threads."""
        return kind == THREAD and all(seat.load[kind] > self.places[kind] * AHEAD for seat in self.dispatch.seats)

    # Calls

    def line(self, number: int, kind: int) -> Line:
        lines = [self.singles[kind], *(line for line in self.maps if line.kind == kind)]
        return lines[number % len(lines)]

    @rule(
        kind=st.sampled_from(KINDS),
        line=st.integers(0, 3),
        keys=st.lists(st.sampled_from([None, None, 1, 2, 3, 4]), min_size=1, max_size=12),
    )
    def submit(self, kind: int, line: int, keys: list[int | None]) -> None:
        home = self.line(line, kind)
        for key in keys:
            self.count += 1
            call = Call(kind, self.count, key, home)
            self.unfinished.add(call)
            seat = self.dispatch.submitted(call, home.queue)
            if seat is not None:
                self.check_direct(call, seat)
                seat.send(call)
            elif key is None:
                is_full = all(seat.load[kind] >= self.room[kind] for seat in self.dispatch.seats)
                assert is_full or self.is_well_filled(kind) or self.may_wait(kind)
                home.calls.append(call)
            else:
                own = self.seat_of(key)
                is_blocked = len(self.under_way(key)) >= self.limit or key in home.live_keys()
                assert own is None or own.load[kind] >= self.places[kind] or is_blocked
                home.lanes.setdefault(key, deque()).append(call)

    def check_direct(self, call: Call, seat: Seat) -> None:
        if call.key is None:
            assert not any(line.has_plain() for line in self.lines() if line.kind == call.kind)
            self.check_choice(call.kind, seat)
        else:
            assert seat.load[call.kind] < self.places[call.kind]
            assert call.home is not None
            assert call.key not in call.home.live_keys()
            self.check_keyed(call, seat)

    @rule(data=st.data(), many=st.integers(1, 4))
    def end(self, data: st.DataObject, many: int) -> None:
        """So many calls end before anything is sent, as when a worker has told several outcomes at once."""
        for _ in range(many):
            seats = [seat for seat in self.everyone() if seat.calls]
            if seats:
                seat = data.draw(st.sampled_from(seats))
                self.finish(seat, data.draw(st.sampled_from(seat.calls)))
        self.pump()

    def finish(self, seat: Seat, call: Unit) -> None:
        self.leave(seat, call)
        if isinstance(call, FakeBatch):
            self.finish_items(call.home, call.run.bodies)
        elif not call.is_done:
            self.unfinished.remove(call)
        self.leavers = [leaver for leaver in self.leavers if leaver.calls]

    def finish_items(self, line: Line, items: list[int]) -> None:
        if line in self.maps:
            self.unfinished.difference_update((line, item) for item in items)

    def leave(self, seat: Seat, call: Unit) -> None:
        seat.take(call)
        self.dispatch.lowered(seat)
        if call.key is not None:
            self.dispatch.left(call)
        self.forget_served()

    @rule(data=st.data(), many=st.integers(1, 5))
    def cancel(self, data: st.DataObject, many: int) -> None:
        for _ in range(many):
            waiting = [call for line in self.lines() for call in line.live()]
            if waiting:
                self.cancel_waiting(data.draw(st.sampled_from(waiting)))

    def cancel_waiting(self, call: Call) -> None:
        assert call.home is not None
        call.is_done = True
        self.unfinished.remove(call)
        self.dispatch.ended(call, call.home.queue)
        self.forget_served()

    @rule(data=st.data())
    def cancel_running(self, data: st.DataObject) -> None:
        running = [call for seat in self.everyone() for call in seat.calls if isinstance(call, Call) and not call.is_done]
        if running:
            call = data.draw(st.sampled_from(running))
            call.is_done = True
            self.unfinished.remove(call)

    # Maps

    @precondition(lambda self: len(self.maps) < 3)
    @rule(kind=st.sampled_from(KINDS), is_batched=st.booleans())
    def open(self, kind: int, is_batched: bool) -> None:
        self.opened += 1
        name, is_batched = f"map {self.opened}", is_batched and kind == THREAD
        line: Line
        queue: Queue[Unit, Seat] = Queue(kind, Batches(lambda run: FakeBatch(line, run), 65_536) if is_batched else None)
        line = Line(name, kind, queue, is_batched=is_batched)
        self.dispatch.open(queue)
        self.maps.append(line)

    @precondition(lambda self: any(line.is_batched for line in self.maps))
    @rule(data=st.data(), count=st.integers(1, 40), seconds=st.sampled_from([None, 1e-6, 1e-4, 1.0]))
    def append(self, data: st.DataObject, count: int, seconds: float | None) -> None:
        line = data.draw(st.sampled_from([line for line in self.maps if line.is_batched]))
        batches = line.queue.batches
        if seconds is not None:
            batches.cost.measured(1, seconds)
        items = list(range(line.next_item, line.next_item + count))
        line.next_item += count
        line.items += items
        self.unfinished.update((line, item) for item in items)
        batches.append(Run(items[0], list(items), True, 16))
        self.dispatch.appended(line.queue)
        self.pump()

    @precondition(lambda self: self.maps)
    @rule(data=st.data())
    def close(self, data: st.DataObject) -> None:
        line = data.draw(st.sampled_from(self.maps))
        for call in line.live():
            self.cancel_waiting(call)
        if line.is_batched:
            line.queue.batches.drop_from(0)
        for seat in self.everyone():
            for call in seat.calls:
                if isinstance(call, Call) and call.home is line and not call.is_done:
                    call.is_done = True
                    self.unfinished.remove(call)
        self.unfinished = {one for one in self.unfinished if not (isinstance(one, tuple) and one[0] is line)}
        self.dispatch.close(line.queue)
        self.maps.remove(line)
        self.sorts.pop(line, None)
        self.workers.pop(line, None)
        self.lanes = {place: turns for place, turns in self.lanes.items() if place[0] is not line}
        self.forget_served()
        self.pump()

    # Workers

    @rule(seat=st.integers(0, 3), silent=st.sampled_from([0, 0, 1, 3, BLOCKED, BLOCKED + 3]), unread=st.booleans())
    def read(self, seat: int, silent: int, unread: bool) -> None:
        if seat < len(self.dispatch.seats):
            self.dispatch.seats[seat].silent = silent
            self.dispatch.seats[seat].unread = unread
            self.pump()

    @precondition(lambda self: len(self.dispatch.seats) < 4)
    @rule()
    def seat(self) -> None:
        index = min(set(range(4)) - {seat.index for seat in self.dispatch.seats})
        self.dispatch.seat(Seat(index))
        self.begin_lanes_anew()
        self.pump()

    def begin_lanes_anew(self) -> None:
        """Keys may have moved: their lanes wait elsewhere from now on."""
        self.workers.clear()
        self.lanes.clear()
        self.forget_served()

    @precondition(lambda self: self.dispatch.seats)
    @rule(data=st.data())
    def drain(self, data: st.DataObject) -> None:
        """A worker takes no more calls; what it has runs on."""
        seat = data.draw(st.sampled_from(self.dispatch.seats))
        self.resting = [other for other in self.resting if other is not seat]
        self.dispatch.unseat(seat)
        self.dispatch.unseat(seat)  # it may be told twice: when it drains and when it dies
        if seat.calls:
            self.leavers.append(seat)
        self.begin_lanes_anew()
        self.pump()

    @precondition(lambda self: self.dispatch.seats or self.leavers)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        """What the worker had begun has ended with it, the rest comes back."""
        seat = data.draw(st.sampled_from(self.everyone()))
        self.resting = [other for other in self.resting if other is not seat]
        self.dispatch.unseat(seat)
        self.leavers = [leaver for leaver in self.leavers if leaver is not seat]
        self.begin_lanes_anew()
        back = []
        for call in list(seat.calls):
            if isinstance(call, FakeBatch):
                begun = data.draw(st.integers(0, call.size))
                self.leave(seat, call)
                self.split(call, begun)
            elif call.is_done or data.draw(st.booleans()):
                self.finish(seat, call)
            else:
                self.leave(seat, call)
                back.append(call)
        self.give_back(back)
        self.pump()

    @precondition(lambda self: len(self.resting) < len(self.dispatch.seats))
    @rule(data=st.data(), gives_back=st.booleans())
    def rest(self, data: st.DataObject, gives_back: bool) -> None:
        """A worker takes no calls for a while, and may hand back those that it has not begun."""
        seat = data.draw(st.sampled_from([seat for seat in self.dispatch.seats if seat not in self.resting]))
        self.resting.append(seat)
        for kind in KINDS:
            seat.load[kind] += ROOM_OF_NONE
        self.dispatch.rest(seat, is_resting=True)
        self.begin_lanes_anew()
        back = [call for call in seat.calls if isinstance(call, Call) and call.kind == THREAD and not call.is_done] * gives_back
        for call in back:
            self.leave(seat, call)
        self.give_back(back)
        self.pump()

    @precondition(lambda self: self.resting)
    @rule(data=st.data())
    def go_on(self, data: st.DataObject) -> None:
        self.wake(data.draw(st.sampled_from(self.resting)))
        self.begin_lanes_anew()
        self.pump()

    def wake(self, seat: Seat) -> None:
        self.resting.remove(seat)
        for kind in KINDS:
            seat.load[kind] -= ROOM_OF_NONE
        self.dispatch.lowered(seat)
        self.dispatch.rest(seat, is_resting=False)

    def split(self, batch: FakeBatch, begun: int) -> None:
        """Items of a batch have begun and end, the others come back."""
        line, run = batch.home, batch.run
        self.finish_items(line, run.bodies[:begun])
        if begun < batch.size and line in self.maps:
            line.items = sorted([*line.items, *run.bodies[begun:]])
            line.queue.batches.put_back(run._replace(start=run.start + begun, bodies=run.bodies[begun:]))
            self.dispatch.appended(line.queue)

    def give_back(self, calls: list[Call]) -> None:
        """Calls come back that were sent, in the order in which they were."""
        self.dispatch.returned((call, call.home.queue) for call in calls if call.home)
        for call in reversed(calls):
            assert call.home is not None
            waiting = call.home.calls if call.key is None else call.home.lanes.setdefault(call.key, deque())
            waiting.appendleft(call)

    # Recalls

    @rule()
    def recall(self) -> None:
        asked = self.dispatch.recall()
        seats = self.dispatch.seats
        threads = self.places[THREAD]
        free = sum(max(0, threads - seat.load[THREAD]) for seat in seats)
        surplus = {seat: seat.items - min(threads, seat.load[THREAD]) for seat in seats}
        waits = any(line.has_plain() for line in self.lines() if line.kind == THREAD)
        if asked is None:
            candidates = [seat for seat in seats if surplus[seat] > 0]
            barren = [seat for seat in candidates if self.dispatch.recalls.barren.get(seat) == self.dispatch.times_ahead]
            assert not free or waits or not self.is_ahead() or candidates == barren
            return
        assert free
        assert not waits
        assert not asked.seat.recalling
        assert self.dispatch.recalls.barren.get(asked.seat) != self.dispatch.times_ahead
        others = [
            seat for seat in seats if surplus[seat] > 0 and self.dispatch.recalls.barren.get(seat) != self.dispatch.times_ahead
        ]
        awake = [seat for seat in others if not seat.silent] or others
        assert asked.seat in awake
        assert asked.seat.items == max(seat.items for seat in awake)
        assert 1 <= asked.wanted <= surplus[asked.seat]
        asked.seat.recalling = True
        again = self.dispatch.recall()
        assert again is None or asked.seat.silent
        self.answer(asked)
        self.pump()

    def is_ahead(self) -> bool:
        return self.dispatch.recalls.is_ahead

    def answer(self, asked: Recall[Seat]) -> None:
        """Hand back the newest that has not begun, and say when that is all. Calls with keys stay."""
        seat = asked.seat
        threads = self.places[THREAD]
        plain = [call for call in seat.calls if call.kind == THREAD]
        given = 0
        for call in reversed(plain[threads:]):
            if given < asked.wanted and call.key is None:
                given += call.size
                self.leave(seat, call)
                if isinstance(call, FakeBatch):
                    self.split(call, 0)
                elif call.is_done:
                    continue
                else:
                    self.give_back([call])
        if not given:
            for call in plain[:threads]:
                if isinstance(call, FakeBatch) and call.size > 1:
                    given += call.size // 2
                    half = call.size - call.size // 2
                    self.split(call, half)
                    self.unfinished.update((call.home, item) for item in call.run.bodies[:half] if call.home in self.maps)
                    call.run = call.run._replace(bodies=call.run.bodies[:half])
        seat.recalling = False
        if not given:
            self.dispatch.gave_nothing(seat, self.dispatch.times_ahead)

    @rule()
    def withdraw(self) -> None:
        withdrawn = withdrawn_from(self.dispatch)
        calls = [call for call in withdrawn if isinstance(call, Call)]
        items = [(call.home, item) for call in withdrawn if isinstance(call, FakeBatch) for item in call.run.bodies]
        for line in self.lines():
            own = [call for call in calls if call.home is line]
            live = [call for call in line.calls if not call.is_done]
            assert [call for call in own if call.key is None] == live
            for key in line.live_keys():
                assert [call for call in own if call.key == key] == [call for call in line.lanes[key] if not call.is_done]
            assert [item for home, item in items if home is line] == line.items
        assert len(calls) == sum(len(line.live()) for line in self.lines())
        self.unfinished -= {*calls, *items}
        for line in self.lines():
            line.calls.clear()
            line.lanes.clear()
            line.items.clear()
        self.forget_served()

    # What always holds

    @invariant()
    def nothing_is_exceeded(self) -> None:
        if not hasattr(self, "dispatch"):
            return
        for seat in self.everyone():
            load = [some % ROOM_OF_NONE for some in seat.load]
            assert load[TASK] <= self.places[TASK]
            assert load[THREAD] <= self.room[THREAD]
            assert sum(load) + MOST_BROADCASTS <= self.dispatch.room
            keyed = Counter(call.key for call in seat.calls if call.key is not None)
            for key, count in keyed.items():
                assert count <= self.limit
                assert set(self.under_way(key)) == {seat}

    @invariant()
    def nothing_is_lost_or_kept(self) -> None:
        if not hasattr(self, "dispatch"):
            return
        waiting = [*(call for line in self.lines() for call in line.live())]
        items = [(line, item) for line in self.lines() for item in line.items]
        assert Counter(call for call in self.dispatch.calls() if not call.is_done) == Counter(waiting)
        assert self.dispatch.waiting() == len(waiting) + len(items)
        sent = [call for seat in self.everyone() for call in seat.calls if isinstance(call, Call) and not call.is_done]
        sent_items = [
            (call.home, item)
            for seat in self.everyone()
            for call in seat.calls
            if call.size and isinstance(call, FakeBatch)
            for item in call.run.bodies
            if call.home in self.maps
        ]
        everything = [*waiting, *items, *sent, *sent_items]
        assert len(everything) == len(set(everything))
        assert set(everything) == self.unfinished
        for line in self.lines():
            queue = self.dispatch.singles[line.kind] if line.queue is None else line.queue
            live = sum(not call.is_done for call in line.calls)
            assert len(queue.calls) <= max(64 + live + 1, 2 * live + 1)

    @invariant()
    def keys_are_remembered_while_they_matter(self) -> None:
        if not hasattr(self, "dispatch"):
            return
        keys = self.dispatch.keys._keys
        wanted = {call.key for seat in self.everyone() for call in seat.calls} | {
            key for line in self.lines() for key in line.live_keys()
        }
        assert wanted - {None} <= set(keys)
        for name, key in keys.items():
            assert key.running == len(self.under_way(name))

    @invariant()
    def keys_that_take_the_shorter_ways_are_held_back_by_nothing(self) -> None:
        if not hasattr(self, "dispatch"):
            return
        keys = self.dispatch.keys
        for key in keys._keys.values():
            if key.calm == keys.round:
                assert key.round == keys.round
                assert key.seat in keys._seats
                assert key.seat is keys._home(key.name)
                assert key.gate is None
                assert keys._limit == keys_module._WORD

    @rule()
    def run_dry(self) -> None:
        """With a worker, everything that was not cancelled is sent and ends."""
        for seat in list(self.resting):
            self.wake(seat)
        if not self.dispatch.seats:
            self.dispatch.seat(Seat(0))
        for seat in self.dispatch.seats:
            seat.silent, seat.unread = 0, False
        self.begin_lanes_anew()
        self.pump()
        while any(seat.calls for seat in self.everyone()):
            for seat in self.everyone():
                for call in list(seat.calls)[:1]:
                    self.finish(seat, call)
            self.pump()
        assert self.unfinished == set()
        assert self.dispatch.waiting() == 0
        assert len(self.dispatch.keys) == 0
        assert self.dispatch._turns == (deque(), deque())


TestDispatch = DispatchMachine.TestCase
TestDispatch.settings = settings(max_examples=times(30, 3000), stateful_step_count=40, deadline=None)
TestDispatch.pytestmark = [pytest.mark.long]  # type: ignore[attr-defined]


def dispatch_of(
    *loads: tuple[int, int], concurrency: int = 2, threads: int = 2, per_key: int | None = None
) -> Dispatch[Unit, Seat]:
    """With workers that hold so many calls of each kind, all of them sent by the Dispatch."""
    dispatch: Dispatch[Unit, Seat] = Dispatch(concurrency, threads, per_key)
    seats = [Seat(index) for index in range(len(loads))]
    for seat, load in zip(seats, loads, strict=True):
        dispatch.seat(seat)
        for kind in KINDS:
            for _ in range(load[kind]):
                send(dispatch, Call(kind), seat)
        dispatch.unseat(seat)
    for seat in seats:
        dispatch.seat(seat)
    return dispatch


def send(dispatch: Dispatch[Unit, Seat], call: Call, expected: Seat | None, queue: "Queue[Unit, Seat] | None" = None) -> None:
    """Submit a call, which goes there; None: it waits."""
    seat = dispatch.submitted(call, queue)
    assert seat is expected
    if seat is not None:
        seat.send(call)


def sent(dispatch: Dispatch[Unit, Seat], kind: int) -> Iterator[Unit]:
    """What is sent now, in order."""
    for call, seat in dispatch.fill(kind):
        seat.send(call)
        yield call


def end(dispatch: Dispatch[Unit, Seat], seat: Seat, call: Unit) -> None:
    seat.take(call)
    dispatch.lowered(seat)
    if call.key is not None:
        dispatch.left(call)


def map_of(dispatch: Dispatch[Unit, Seat], kind: int, *, is_batched: bool = False) -> Queue[Unit, Seat]:
    home = Line("map", kind, None)
    queue: Queue[Unit, Seat] = Queue(kind, Batches(lambda run: FakeBatch(home, run), 65_536) if is_batched else None)
    dispatch.open(queue)
    return queue


# Places


class Turnstile:
    """A gate that lets calls pass when it is told to."""

    is_shut = False
    lets = False

    def take(self, _call: Call, _seat: Seat) -> bool:
        self.is_shut = not self.lets
        return self.lets

    def left(self, call: Call) -> None: ...

    unsent = left


def test_a_call_that_its_gate_turns_away_does_not_count_as_under_way() -> None:
    dispatch: Dispatch[Call, Seat] = Dispatch(4, 1, per_key=1)
    seat, gate, call = Seat(0), Turnstile(), Call(TASK, key="k")
    dispatch.seat(seat)
    dispatch.guard("k", gate)
    assert dispatch.submitted(call) is None
    assert not dispatch.keys.is_taken("k")
    gate.is_shut, gate.lets = False, True
    dispatch.opened("k")
    assert list(dispatch.fill(TASK)) == [(call, seat)]
    assert dispatch.keys.is_taken("k")


def test_a_worker_that_has_left_is_forgotten() -> None:
    """Also one that got calls in place of a blocked one: a service would keep each such worker."""
    dispatch: Dispatch[Call, Seat] = Dispatch(100, 1)
    blocked, other = Seat(0, silent=BLOCKED), Seat(1, load=[BLOCKED + 1, 0], unread=True)
    for seat in (blocked, other):
        dispatch.seat(seat)
    assert dispatch.submitted(Call(TASK)) is other
    dispatch.unseat(other)
    left = weakref.ref(other)
    del other, seat
    gc.collect()
    assert left() is None


@pytest.mark.parametrize("kind", KINDS)
def test_while_nested_calls_go_first_others_wait_and_lose_no_turn(kind: int, subtests: pytest.Subtests) -> None:
    """As many calls are aside as there may be, and a nested call waits: whatever else is submitted begins after it."""
    for key in (None, "k"):
        for is_of_map in (False, True):
            with subtests.test(key=key, is_of_map=is_of_map):
                dispatch: Dispatch[Call, Seat] = Dispatch(1, 1)
                seat = Seat()
                dispatch.seat(seat)
                dispatch.moved(kind, LEAST_ASIDE)
                seat.load[kind] = dispatch.room_for(kind)
                nested = [Call(kind, number) for number in (1, 2)]
                for depth, call in enumerate(nested, 1):
                    assert dispatch.submitted(call, dispatch.level(depth, kind)) is None
                home: Queue[Call, Seat] | None = None
                if is_of_map:
                    home = Queue(kind)
                    dispatch.open(home)
                seat.load[kind] = 0
                later = [Call(kind, number, key) for number in (3, 4)]
                for call in later:
                    assert dispatch.submitted(call, home) is None
                assert dispatch.keys.is_idle("k") is (key is None)  # the calls of a key wait in its lane
                assert [dispatch.next(kind) for _ in range(2)] == [(nested[1], seat), (nested[0], seat)]
                assert dispatch.next(kind) == (later[0], seat)  # no nested call waits any more
                dispatch.moved(kind, -LEAST_ASIDE)
                assert dispatch.next(kind) == (later[1], seat)
                assert dispatch.next(kind) is None
                assert dispatch.submitted(Call(kind, 5)) is seat


@pytest.mark.parametrize("kind", KINDS)
def test_a_nested_call_that_must_wait_for_its_worker_does_not_hold_up_others(kind: int) -> None:
    dispatch: Dispatch[Call, Seat] = Dispatch(1, 1)
    seats = [Seat(0), Seat(1)]
    for seat in seats:
        dispatch.seat(seat)
        seat.load[kind] = dispatch.room_for(kind)
    dispatch.moved(kind, 2 * LEAST_ASIDE)
    deep, shallow, other = Call(kind, 1, "k"), Call(kind, 2), Call(kind, 3)
    assert dispatch.submitted(deep, dispatch.level(2, kind)) is None
    assert dispatch.submitted(shallow, dispatch.level(1, kind)) is None
    assert dispatch.submitted(other) is None
    (home,) = dispatch.level(2, kind).by_seat
    (free,) = [seat for seat in seats if seat is not home]
    free.load[kind] = 0
    dispatch.lowered(free)
    assert dispatch.next(kind) == (shallow, free)
    assert dispatch.next(kind) is None  # the deepest one still waits, and those that are not nested with it
    home.load[kind] = 0
    dispatch.lowered(home)
    assert dispatch.next(kind) == (deep, home)
    found = dispatch.next(kind)
    assert found is not None
    assert found[0] is other


def test_a_worker_that_is_expelled_gets_nothing_more() -> None:
    """Also if it was added twice, because an error came half-way; and also if it rests."""
    for is_resting in (False, True):
        dispatch: Dispatch[Call, Seat] = Dispatch(4, 1)
        gone, stays = Seat(0), Seat(1)
        for seat in (gone, stays, gone):
            dispatch.seats.append(seat)
        dispatch._seated()
        waits = [Call(TASK, number, f"k{number}") for number in range(20)]
        gone.load[TASK] = stays.load[TASK] = 4
        for call in waits:
            assert dispatch.submitted(call) is None
        if is_resting:
            dispatch.rest(gone, is_resting=True)
        dispatch.expel(gone)
        gone.load[TASK] = stays.load[TASK] = 0
        dispatch.lowered()
        assert dispatch.submitted(Call(TASK)) is stays
        taken = []
        while (found := dispatch.next(TASK)) is not None:
            taken.append(found)
        assert {seat for _, seat in taken} == {stays}
        assert {call for call, _ in taken} == {*waits}
        dispatch.expel(gone)  # once more does nothing
        assert dispatch.seats == [stays]


def test_a_worker_that_was_asked_in_vain_is_forgotten_when_it_leaves() -> None:
    dispatch: Dispatch[Call, Seat] = Dispatch(4, 1)
    seat = Seat()
    dispatch.seat(seat)
    dispatch.recalls.barren[seat] = 3
    dispatch.unseat(seat)
    assert not dispatch.recalls.barren


def test_a_key_is_taken_at_its_limit_and_while_its_worker_has_left() -> None:
    dispatch: Dispatch[Call, Seat] = Dispatch(4, 1, per_key=2)
    seat = Seat(0)
    dispatch.seat(seat)
    first, second = Call(TASK, key="k"), Call(TASK, key="k")
    assert not dispatch.keys.is_taken("k")
    assert dispatch.submitted(first) is seat
    assert not dispatch.keys.is_taken("k")
    assert dispatch.submitted(second) is seat
    assert dispatch.keys.is_taken("k"), "two of two run"
    dispatch.left(second)
    assert not dispatch.keys.is_taken("k")
    dispatch.seat(Seat(1))
    dispatch.unseat(seat)
    assert dispatch.keys.is_taken("k"), "one runs in a worker that takes no more"
    dispatch.left(first)
    assert not dispatch.keys.is_taken("k")


def test_keys_move_from_a_worker_that_rests_and_come_back() -> None:
    dispatch: Dispatch[Call, Seat] = Dispatch(4, 1)
    resting, other = Seat(0), Seat(1)
    for seat in (resting, other):
        dispatch.seat(seat)
    first, second, *_ = [key for key in range(100) if weight(hash(key), 0) > weight(hash(key), 1)]
    dispatch.rest(resting, is_resting=True)
    assert dispatch.submitted(Call(TASK, key=first)) is other
    dispatch.rest(resting, is_resting=False)
    assert dispatch.submitted(Call(TASK, key=second)) is resting
    dispatch.unseat(resting)
    dispatch.rest(resting, is_resting=True)  # it has left, and changes nothing any more
    assert dispatch.is_settled()


def test_a_call_goes_where_it_can_begin_at_once() -> None:
    dispatch = dispatch_of((1, 2), (0, 2), (1, 1))
    assert dispatch.submitted(Call(TASK)) is dispatch.seats[1]
    assert dispatch.submitted(Call(THREAD)) is dispatch.seats[2]


@pytest.mark.parametrize("workers", [2, 3, 8])
def test_calls_of_both_kinds_go_to_different_workers_while_one_is_idle(workers: int) -> None:
    """A coroutine may block its worker's loop, and then a plain call that was sent with it waits."""
    for first in KINDS:
        dispatch = dispatch_of(*[(0, 0)] * workers)
        for place in range(2 * workers):
            call = Call(first if place % 2 else 1 - first)
            seat = dispatch.submitted(call)
            assert seat is not None
            seat.send(call)
            held = [sum(other.load) for other in dispatch.seats]
            assert max(held) <= 1 + (place >= workers), (place, held)


def test_a_coroutine_never_waits_behind_plain_calls() -> None:
    dispatch = dispatch_of((0, 10), concurrency=1, threads=2)
    assert dispatch.submitted(Call(THREAD)) is None
    assert dispatch.submitted(Call(TASK)) is dispatch.seats[0]


def test_a_plain_call_never_waits_behind_coroutines() -> None:
    dispatch = dispatch_of((1, 0), concurrency=1, threads=2)
    assert dispatch.submitted(Call(TASK)) is None
    assert dispatch.submitted(Call(THREAD)) is dispatch.seats[0]


def test_coroutines_are_not_queued_ahead() -> None:
    dispatch = dispatch_of((2, 0), (2, 0))
    assert dispatch.submitted(Call(TASK)) is None


def test_plain_calls_are_queued_ahead_where_nobody_has_a_free_place() -> None:
    dispatch = dispatch_of((0, 2), (0, 2))
    for number in range(2 * 2 * AHEAD):
        send(dispatch, Call(THREAD), dispatch.seats[number % 2])
    assert dispatch.submitted(Call(THREAD)) is None


def test_what_is_queued_ahead_goes_when_there_is_room_for_as_many_as_there_are_threads() -> None:
    dispatch = dispatch_of((0, 2 + 2 * AHEAD), threads=2)
    calls = [Call(THREAD) for _ in range(3)]
    for call in calls:
        send(dispatch, call, None)
    seat = dispatch.seats[0]
    end(dispatch, seat, seat.calls[0])
    assert list(sent(dispatch, THREAD)) == []
    end(dispatch, seat, seat.calls[0])
    assert list(sent(dispatch, THREAD)) == calls[:2]


def test_a_free_place_comes_before_queueing_ahead() -> None:
    dispatch = dispatch_of((0, 2), (0, 1))
    dispatch.seats[1].silent = BLOCKED
    assert dispatch.submitted(Call(THREAD)) is dispatch.seats[1]


@pytest.mark.parametrize("kind", KINDS)
def test_who_is_blocked_gets_nothing_while_another_has_a_free_place(kind: int) -> None:
    dispatch = dispatch_of((0, 0), (1, 1))
    dispatch.seats[0].silent = BLOCKED
    assert dispatch.submitted(Call(kind)) is dispatch.seats[1]
    dispatch.seats[1].load = [2, 2]
    assert dispatch.submitted(Call(kind)) is dispatch.seats[0]


def test_who_is_blocked_is_not_queued_ahead_in_while_another_has_room() -> None:
    dispatch = dispatch_of((0, 2), (0, 9))
    dispatch.seats[0].silent = BLOCKED
    assert dispatch.submitted(Call(THREAD)) is dispatch.seats[1]
    dispatch.seats[1].load[THREAD] = 10
    assert dispatch.submitted(Call(THREAD)) is dispatch.seats[0]


def test_a_burst_is_shared_with_a_worker_that_is_behind(subtests: pytest.Subtests) -> None:
    """Each coroutine may take the CPU: then a worker is silent because it has begun one."""
    for behind in [0, 1]:
        for silent in range(BLOCKED):
            with subtests.test(silent=silent, behind=behind):
                dispatch = dispatch_of((1, 0), (1, 0), concurrency=100)
                dispatch.seats[behind].silent = silent
                for seat in dispatch.seats:
                    seat.unread = True
                for _ in range(20):
                    chosen = dispatch.submitted(Call(TASK))
                    assert chosen is not None
                    chosen.send(Call(TASK))
                assert dispatch.seats[1 - behind].load[TASK] - dispatch.seats[behind].load[TASK] in (silent, silent + 1, silent - 1)


def burst(dispatch: Dispatch[Unit, Seat], count: int) -> int:
    """So many coroutines are submitted, or waited already: how many are sent."""
    calls = [Call(TASK) for _ in range(count)]
    for call in calls:
        seat = dispatch.submitted(call)
        if seat is not None:
            seat.send(call)
    return sum(len(seat.calls) for seat in dispatch.seats)


def test_a_blocked_worker_does_not_make_another_one_take_all() -> None:
    dispatch = dispatch_of((1, 0), (1, 0), concurrency=100)
    blocked, other = dispatch.seats
    blocked.silent, other.unread = BLOCKED, True
    sent_at_once = burst(dispatch, 50)
    assert len(blocked.calls) == 1
    assert len(other.calls) <= 2 * (1 + BLOCKED)
    assert list(sent(dispatch, TASK)) == []  # they wait: the other one has not read those that it has got
    other.unread = False
    more = len(list(sent(dispatch, TASK)))
    assert more == 50 - (sent_at_once - 2)
    assert len(blocked.calls) == 1


def test_what_waits_for_others_to_read_goes_to_whoever_reads_first() -> None:
    dispatch = dispatch_of((1, 0), (1, 0), concurrency=100)
    blocked, other = dispatch.seats
    blocked.silent, other.unread = BLOCKED, True
    burst(dispatch, 50)
    taken = len(other.calls)
    blocked.silent = 0
    list(sent(dispatch, TASK))
    assert dispatch.waiting() == 0
    assert len(blocked.calls) >= taken


def test_a_blocked_worker_does_not_hold_up_calls_with_keys_of_another() -> None:
    dispatch = dispatch_of((1, 0), (1, 0), concurrency=100, per_key=1)
    blocked, other = dispatch.seats
    key = next(key for key in range(100) if weight(key, other.index) > weight(key, blocked.index))
    first, second = Call(TASK, key=key), Call(TASK, key=key)
    send(dispatch, first, other)
    send(dispatch, second, None)
    blocked.silent, other.unread = BLOCKED, True
    burst(dispatch, 50)
    end(dispatch, other, first)
    assert list(sent(dispatch, TASK)) == [second]


@dataclass(eq=False)
class Watched(Seat):
    looks: int = 0

    def silence(self) -> int:
        self.looks += 1
        return super().silence()


def test_of_many_workers_not_all_are_looked_at_for_each_call() -> None:
    dispatch: Dispatch[Unit, Any] = Dispatch(10, 2)
    seats = [Watched(index) for index in range(64)]
    for seat in seats:
        dispatch.seat(seat)
    for place in range(4 * 64):
        send(dispatch, Call(TASK), seats[place % 64])
    assert sum(seat.looks for seat in seats) < 2 * 4 * 64
    for seat in (seats[40], seats[7]):
        end(dispatch, seat, seat.calls[0])
    send(dispatch, Call(TASK), seats[7])
    send(dispatch, Call(TASK), seats[40])
    send(dispatch, Call(TASK), seats[0])


def test_of_many_workers_one_that_was_behind_is_seen_when_it_reads_again() -> None:
    dispatch = dispatch_of(*[(1, 0)] * 8, concurrency=9)
    dispatch.seats[3].silent = 1
    end(dispatch, dispatch.seats[3], dispatch.seats[3].calls[0])
    for seat in dispatch.seats[:2]:
        send(dispatch, Call(TASK), seat)
    dispatch.seats[3].silent = 0
    send(dispatch, Call(TASK), dispatch.seats[3])


@pytest.mark.parametrize("seed", range(20))
def test_of_many_workers_the_best_one_is_chosen_with_what_is_remembered_in_a_turn(seed: int) -> None:
    random, time = Random(seed), [0.0]
    seats = [Seat(index) for index in range(9)]
    choice = Choice(seats, (8, 6), (8, 12), lambda: time[0])
    choice.lowered()

    def weight(seat: Seat, kind: int) -> float:
        """As far as a full comparison sees it, but for the half of a call that decides between equal loads."""
        return seat.load[kind] + seat.silent + (1000 if seat.load[kind] >= (8, 6)[kind] else 0)

    compared = 0
    for _ in range(2000):
        kind, room = random.choice(((TASK, 8), (THREAD, 12)))
        what = random.random()
        if what < 0.02:
            time[0] += 1
            for seat in seats:
                seat.silent = random.choice((0, 0, 0, 1, 3))
        elif what < 0.05:
            random.choice(seats).load[kind] += 1  # a call with a key
        elif what < 0.1:
            seat = random.choice([seat for seat in seats if not seat.silent])  # it has just sent an answer
            for _ in range(random.randint(1, 8)):
                seat.load[kind] = max(0, seat.load[kind] - 1)
                choice.lowered(seat)
        else:
            chosen = choice.of_many(kind)
            least = min((weight(seat, kind) for seat in seats if seat.load[kind] < room), default=None)
            assert (chosen is None) is (least is None)
            if chosen is not None:
                assert weight(chosen, kind) == least
                chosen.load[kind] += 1
                compared += 1
    assert compared > 300


def test_a_burst_of_results_of_one_of_many_workers_needs_no_comparison_for_each_next_call() -> None:
    seats = [Watched(index) for index in range(64)]
    dispatch: Dispatch[Unit, Any] = Dispatch(100, 2, None, lambda: 1.0)
    for seat in seats:
        dispatch.seat(seat)
    for place in range(50 * 64):
        send(dispatch, Call(TASK), seats[place % 64])
    seats[5].silent = 1  # it has calls that it has not read
    for call in list(seats[9].calls):
        end(dispatch, seats[9], call)
    for seat in seats:
        seat.looks = 0
    for _ in range(48):
        send(dispatch, Call(TASK), seats[9])
    assert sum(seat.looks for seat in seats) < 4 * 64


def test_of_many_workers_none_takes_over_the_share_of_a_blocked_one_within_a_turn() -> None:
    def taken(turn: Callable[[], float] | None) -> int:
        """The calls of a burst that others get in place of a blocked worker, before they have read them."""
        dispatch: Dispatch[Unit, Seat] = Dispatch(100, 2, None, turn)
        for index in range(9):
            dispatch.seat(Seat(index))
        for seat in dispatch.seats:
            seat.load[TASK] = 8 if seat.index else 0
            seat.unread = bool(seat.index)
        dispatch.seats[0].silent = BLOCKED
        dispatch.lowered()
        return burst(dispatch, 200)

    assert taken(lambda: 1.0) == taken(None) <= 8 * (1 + 8 // 2)


def test_without_workers_calls_wait() -> None:
    dispatch = dispatch_of()
    calls = [Call(kind) for kind in (TASK, THREAD, TASK)]
    assert [dispatch.submitted(call) for call in calls] == [None] * 3
    assert dispatch.waiting() == 3
    assert dispatch.next(TASK) is None
    dispatch.seat(Seat())
    assert dispatch.next(TASK) == (calls[0], dispatch.seats[0])
    assert dispatch.waiting() == 2


def test_places_and_room() -> None:
    dispatch = dispatch_of(concurrency=7, threads=3)
    assert (dispatch.room_for(TASK), dispatch.room_for(THREAD)) == (7, 3 * (1 + AHEAD))
    assert dispatch.room == room_of(7, 3) == 7 + 3 * (1 + AHEAD) + MOST_BROADCASTS


@pytest.mark.parametrize(
    ("room", "places"), [(1, 2), (2, 4), (3, 4), (63, 64), (64, 96), (138, 256), (100_000, 131_072 - MOST_ASIDE)]
)
def test_start_marks_suffice_for_calls_that_are_aside(room: int, places: int) -> None:
    all_places = places_for(room)
    assert all_places & (all_places - 1) == 0
    assert room < places_at_first(room) == places <= all_places - MOST_ASIDE


# The queue


def test_what_comes_back_is_first_in_its_order() -> None:
    dispatch = dispatch_of()
    waiting = Call(THREAD, 1)
    dispatch.submitted(waiting)
    back = [Call(THREAD, 2), Call(TASK, 3), Call(THREAD, 4), Call(TASK, 5, "key"), Call(TASK, 6, "key")]
    dispatch.returned((call, None) for call in back)
    assert withdrawn_from(dispatch) == [back[1], back[3], back[4], back[0], back[2], waiting]
    assert dispatch.waiting() == 0


def test_a_cancelled_call_is_dropped_when_its_turn_comes() -> None:
    dispatch = dispatch_of()
    calls = [Call(TASK, number) for number in range(3)]
    for call in calls:
        dispatch.submitted(call)
    for call in calls[:2]:
        call.is_done = True
        dispatch.ended(call)
    assert dispatch.waiting() == 1
    dispatch.seat(Seat())
    assert dispatch.next(TASK) == (calls[2], dispatch.seats[0])
    assert dispatch.next(TASK) is None
    assert dispatch.waiting() == 0
    assert dispatch.is_quiet()


@pytest.mark.parametrize("key", [None, "key"])
@pytest.mark.parametrize("kind", KINDS)
def test_cancelled_calls_do_not_pile_up(kind: int, key: str | None) -> None:
    dispatch = dispatch_of()
    keeper = Call(kind, key=key)
    dispatch.submitted(keeper)
    queue = dispatch.singles[kind]
    for _ in range(10_000):
        call = Call(kind, key=key)
        dispatch.submitted(call)
        call.is_done = True
        dispatch.ended(call)
        lanes = dispatch.keys._keys["key"].lanes if key else {}
        assert len(queue.calls) + sum(len(lane.calls) for lane in lanes.values()) <= 67
    assert dispatch.waiting() == 1
    assert withdrawn_from(dispatch) == [keeper]


# Turns


@pytest.mark.parametrize("kind", KINDS)
def test_a_single_call_waits_for_one_of_each_map(kind: int) -> None:
    dispatch = dispatch_of((2, 10))
    queues = [map_of(dispatch, kind) for _ in range(3)]
    for number in range(100):
        for queue in queues:
            send(dispatch, Call(kind, number), None, queue)
    single = Call(kind, -1)
    send(dispatch, single, None)
    seat = dispatch.seats[0]
    seen: list[Unit] = []
    for _ in range(4):
        end(dispatch, seat, next(call for call in seat.calls if call.kind == kind))
        seen += sent(dispatch, kind)
    assert len(seen) == 4
    assert single in seen
    assert sorted(call.number for call in seen) == [-1, 0, 0, 0]


def test_maps_of_batches_take_turns_with_single_calls() -> None:
    dispatch = dispatch_of((0, 8))
    queues = [map_of(dispatch, THREAD, is_batched=True) for _ in range(2)]
    for queue in queues:
        assert queue.batches is not None
        queue.batches.append(Run(0, list(range(1000)), True, 16))
        dispatch.appended(queue)
    seat = dispatch.seats[0]
    assert [call.size for call in sent(dispatch, THREAD)] == [1, 1]
    single = Call(THREAD)
    send(dispatch, single, None)
    seen: list[Unit] = []
    for _ in range(4):
        end(dispatch, seat, seat.calls[0])
        seen += sent(dispatch, THREAD)
    assert single in seen
    assert len({id(call.home) for call in seen if isinstance(call, FakeBatch)}) == 2


def test_a_closed_map_waits_no_more() -> None:
    dispatch = dispatch_of((2, 10))
    queue = map_of(dispatch, TASK)
    calls = [Call(TASK, key=key) for key in (None, "key", "key")]
    for call in calls:
        send(dispatch, call, None, queue)
        call.is_done = True
        dispatch.ended(call, queue)
    dispatch.close(queue)
    dispatch.close(queue)
    assert dispatch.waiting() == 0
    assert len(dispatch.keys) == 0
    assert not dispatch._turns[TASK]


# Keys


def test_a_coroutine_without_a_key_does_not_wait_behind_keys_of_a_busy_worker() -> None:
    # 1. calls of one key fill their worker, and more of them wait for it; 2. another worker idles; 3. a call may go anywhere.
    dispatch = dispatch_of((0, 0), (0, 0))
    calls = [Call(TASK, key=7) for _ in range(5)]
    for call in calls[:2]:
        seat = dispatch.submitted(call)
        assert seat is not None
        seat.send(call)
    for call in calls[2:]:
        send(dispatch, call, None)
    idle = next(seat for seat in dispatch.seats if not seat.calls)
    assert list(sent(dispatch, TASK)) == []
    assert dispatch.submitted(Call(TASK)) is idle


def test_a_coroutine_does_not_wait_behind_plain_calls_of_its_key() -> None:
    dispatch = dispatch_of((0, 10))
    send(dispatch, Call(THREAD, key="key"), None)
    send(dispatch, Call(TASK, key="key"), dispatch.seats[0])


def test_a_call_does_not_wait_behind_cancelled_ones_of_its_key() -> None:
    dispatch = dispatch_of((2, 0))
    seat = dispatch.seats[0]
    cancelled = Call(TASK, key="key")
    send(dispatch, cancelled, None)
    cancelled.is_done = True
    dispatch.ended(cancelled)
    end(dispatch, seat, seat.calls[0])
    send(dispatch, Call(TASK, key="key"), seat)


def test_ten_thousand_calls_of_one_key_do_not_hold_up_the_others() -> None:
    dispatch = dispatch_of((2, 0))
    seat = dispatch.seats[0]
    for number in range(10_000):
        send(dispatch, Call(TASK, number, "many"), None)
    others = [Call(TASK, number, number) for number in range(20)] + [Call(TASK, 20)]
    for call in others:
        send(dispatch, call, None)
    seen: list[Unit] = []
    while not set(others) <= set(seen):
        end(dispatch, seat, seat.calls[0])
        seen += sent(dispatch, TASK)
    assert len(seen) <= 2 * len(others)


def test_keys_of_each_worker_get_their_part_of_a_maps_turns() -> None:
    # Another map takes every second place, and whenever this map has its turn both workers have one.
    dispatch = dispatch_of((1, 0), (1, 0), concurrency=1)
    keyed, other = map_of(dispatch, TASK), map_of(dispatch, TASK)
    for number in range(200):
        send(dispatch, Call(TASK, number, number % 20), None, keyed)
        send(dispatch, Call(TASK, number), None, other)
    keys_of: list[list[Hashable]] = [[], []]
    for _ in range(10):
        for seat in dispatch.seats:
            end(dispatch, seat, seat.calls[0])
        assert len([call for call in sent(dispatch, TASK) if call.key is not None]) == 1
        for seat in dispatch.seats:
            keys_of[seat.index] += [call.key for call in seat.calls if call.key is not None]
    assert [len(keys) for keys in keys_of] == [5, 5]
    assert [len(set(keys)) for keys in keys_of] == [5, 5]


@pytest.mark.parametrize("limit", [1, 2, 5])
def test_so_many_calls_of_a_key_are_under_way_over_all_workers(limit: int) -> None:
    dispatch = dispatch_of(*((0, 0),) * 3, concurrency=100, per_key=limit)
    for number in range(20):
        for kind in KINDS:
            call = Call(kind, number, "key")
            seat = dispatch.submitted(call)
            if seat is not None:
                seat.send(call)
    under_way = [call for seat in dispatch.seats for call in seat.calls]
    assert len(under_way) == limit
    assert dispatch.waiting() == 40 - limit
    assert sum(bool(seat.calls) for seat in dispatch.seats) == 1


def test_a_key_whose_worker_left_moves_when_nothing_of_it_is_under_way() -> None:
    dispatch = dispatch_of((0, 0), (0, 0), concurrency=2)
    calls = [Call(TASK, number, "key") for number in range(4)]
    old = dispatch.submitted(calls[0])
    assert old is not None
    old.send(calls[0])
    send(dispatch, calls[1], old)
    for call in calls[2:]:
        send(dispatch, call, None)
    dispatch.unseat(old)
    (new,) = dispatch.seats
    assert list(sent(dispatch, TASK)) == []
    end(dispatch, old, calls[0])
    assert list(sent(dispatch, TASK)) == []
    end(dispatch, old, calls[1])
    assert list(sent(dispatch, TASK)) == calls[2:]
    assert new.calls == calls[2:]


def test_a_key_goes_where_its_hash_is_highest() -> None:
    dispatch = dispatch_of(*((0, 0),) * 5, concurrency=1000)
    for key in range(200):
        seat = dispatch.submitted(Call(TASK, key=key))
        assert seat is max(dispatch.seats, key=lambda seat: weight(hash(key), seat.index))


# Recall


@pytest.mark.parametrize(
    ("loads", "count"),
    [
        ([0, 10], 2),  # two free threads
        ([1, 10], 1),
        ([0, 3], 1),
        ([0, 5], 2),
        ([0, 0, 10], 4),  # half of what waits there
        ([0, 0, 0, 10], 4),
    ],
)
def test_a_recall_takes_what_free_threads_can_run_and_half_at_most(loads: list[int], count: int) -> None:
    dispatch = dispatch_of(*((0, load) for load in loads))
    assert dispatch.recall() == (dispatch.seats[-1], count)


@pytest.mark.parametrize(
    "loads", [[], [10], [2, 2], [0, 0], [0, 2], [0, 1], [10, 10], [2, 10]], ids=lambda loads: "-".join(map(str, loads))
)
def test_no_recall_where_it_would_not_help(loads: list[int]) -> None:
    assert dispatch_of(*((0, load) for load in loads)).recall() is None


def test_calls_that_a_worker_holds_are_recalled_by_one_that_has_none() -> None:
    dispatch = dispatch_of((0, 0), (0, 3), threads=4)
    assert dispatch.recall() is None
    holding = dispatch.seats[1]
    holding.is_holding = True
    dispatch.recalls.note_ahead()
    assert dispatch.recall() == (holding, 1)
    dispatch.seats[0].load[THREAD] = 1
    assert dispatch.recall() == (holding, 1)
    dispatch.seats[0].is_holding = True  # the one call that it runs computes, too
    assert dispatch.recall() is None


@pytest.mark.parametrize("others", [1, 2])
def test_half_of_a_batch_is_recalled_whatever_is_free(others: int) -> None:
    dispatch = dispatch_of((0, 0), threads=1)
    queue = map_of(dispatch, THREAD, is_batched=True)
    assert queue.batches is not None
    queue.batches.cost.measured(1, 1e-6)
    queue.batches.append(Run(0, list(range(101)), True, 16))
    dispatch.appended(queue)
    assert [call.size for call in sent(dispatch, THREAD)] == [101]
    for index in range(others):
        dispatch.seat(Seat(1 + index))
    assert dispatch.recall() == (dispatch.seats[0], 50)


def test_a_batch_is_shared_among_the_threads_of_one_worker() -> None:
    dispatch = dispatch_of((0, 0), threads=4)
    queue = map_of(dispatch, THREAD, is_batched=True)
    assert queue.batches is not None
    queue.batches.cost.measured(1, 1e-6)
    queue.batches.append(Run(0, list(range(101)), True, 16))
    dispatch.appended(queue)
    assert [call.size for call in sent(dispatch, THREAD)] == [101]
    assert dispatch.recall() == (dispatch.seats[0], 50)


def test_a_recall_is_asked_once() -> None:
    dispatch = dispatch_of((0, 0), (0, 10))
    asked = dispatch.recall()
    assert asked is not None
    asked.seat.recalling = True
    assert dispatch.recall() is None
    asked.seat.recalling = False
    assert dispatch.recall() is not None


def test_another_worker_is_asked_when_the_fullest_one_has_nothing_to_give() -> None:
    """All that waits there may be calls of one key, which have to stay."""
    dispatch = dispatch_of((0, 0), (0, 5), (0, 4), threads=1)
    idle, fullest, other = dispatch.seats
    assert dispatch.recall() == (fullest, 1)
    dispatch.gave_nothing(fullest, dispatch.times_ahead)
    assert not dispatch.is_quiet()
    assert dispatch.recall() == (other, 1)
    dispatch.gave_nothing(other, dispatch.times_ahead)
    assert dispatch.recall() is None
    assert dispatch.is_quiet()
    assert idle.items == 0


@pytest.mark.parametrize("silent", [1, BLOCKED])
def test_another_worker_is_asked_when_the_fullest_one_does_not_answer(silent: int) -> None:
    dispatch = dispatch_of((0, 0), (0, 5), (0, 4), threads=1)
    _, fullest, other = dispatch.seats
    assert dispatch.recall() == (fullest, 1)
    fullest.recalling = True
    assert dispatch.recall() is None  # it is about to answer
    fullest.silent = silent
    assert dispatch.recall() == (other, 1)
    other.recalling = True
    assert dispatch.recall() is None


def test_a_silent_worker_is_asked_when_there_is_no_other() -> None:
    dispatch = dispatch_of((0, 0), (0, 5), (0, 4), threads=1)
    _, fullest, other = dispatch.seats
    fullest.silent = BLOCKED
    assert dispatch.recall() == (other, 1)
    dispatch.gave_nothing(other, dispatch.times_ahead)
    assert dispatch.recall() == (fullest, 1)
    fullest.recalling = True
    assert dispatch.recall() is None


def test_what_was_queued_ahead_since_a_worker_was_asked_is_asked_for_again() -> None:
    # 1. the worker is asked  2. a call is queued ahead there  3. its answer, of before that, is that it has nothing
    dispatch = dispatch_of((0, 0), (0, 9))
    assert dispatch.recall() is not None
    asked_at = dispatch.times_ahead
    dispatch.seats[0].load[THREAD] = 2
    send(dispatch, Call(THREAD), dispatch.seats[0])
    dispatch.seats[0].load[THREAD] = 0
    dispatch.gave_nothing(dispatch.seats[1], asked_at)
    assert dispatch.recall() is not None


def test_who_had_nothing_to_give_is_asked_no_more_until_more_is_queued_ahead() -> None:
    dispatch = dispatch_of((0, 0), (0, 9))
    assert dispatch.recall() is not None
    dispatch.gave_nothing(dispatch.seats[1], dispatch.times_ahead)
    assert dispatch.recall() is None
    assert dispatch.is_quiet()
    for _ in range(2):
        send(dispatch, Call(THREAD), dispatch.seats[0])
    send(dispatch, Call(THREAD), dispatch.seats[0])
    dispatch.seats[0].load[THREAD] = 0
    assert dispatch.recall() is not None


def test_no_recall_while_calls_wait_here() -> None:
    dispatch = dispatch_of((0, 10), (0, 10))
    dispatch.submitted(Call(THREAD))
    dispatch.seats[0].load[THREAD] = 0
    assert dispatch.recall() is None


def test_coroutines_are_never_recalled() -> None:
    assert dispatch_of((0, 2), (2, 2)).recall() is None


# Collections: a garbage collection may begin behind any call, and a `__del__` that it runs submit or cancel something


@dataclass(eq=False)
class ActingCall(Call):
    """Acts when it is asked whether it is done, once: as a collection that begins there."""

    act: Callable[[], object] | None = None

    def done(self) -> bool:
        if (act := self.act) is not None:
            self.act = None
            act()
        return self.is_done


@pytest.mark.parametrize("key", [None, "key"])
def test_s6_a_collection_that_submits_and_cancels_while_cancelled_calls_are_dropped(key: Hashable | None) -> None:
    dispatch: Dispatch[Any, Seat] = Dispatch(2, 1)
    waiting: list[Call] = [ActingCall(TASK, number, key) for number in range(300)]
    for call in waiting:
        assert dispatch.submitted(call) is None
    late = [Call(TASK, 1000 + number, key) for number in range(200)]
    behind = waiting[-1]
    assert isinstance(behind, ActingCall)

    def act() -> None:
        assert [dispatch.submitted(call) for call in late] == [None] * len(late)
        for call in late[:100]:
            call.is_done = True
            dispatch.ended(call)

    behind.act = act
    for call in waiting[:200]:
        call.is_done = True
        dispatch.ended(call)
    assert dispatch.waiting() == 200
    assert {call.number for call in withdrawn_from(dispatch)} == {call.number for call in (*waiting[200:], *late[100:])}
    assert dispatch.waiting() == 0


class _ActingCalls(deque[Any]):
    """Acts when it is asked whether there are any."""

    def __init__(self, act: Callable[[], object]) -> None:
        super().__init__()
        self.act = act

    def __bool__(self) -> bool:
        self.act()
        return len(self) > 0


def test_s6_a_collection_that_submits_while_everything_is_withdrawn() -> None:
    dispatch: Dispatch[Any, Seat] = Dispatch(2, 1)
    first, late = Call(TASK, 1), Call(TASK, 7)
    rest = [late]
    dispatch.singles[TASK].calls = _ActingCalls(lambda: rest and dispatch.submitted(rest.pop()))
    dispatch.singles[TASK].calls.append(first)
    assert withdrawn_from(dispatch) == [first, late]


@pytest.mark.parametrize("kind", KINDS)
def test_s6_a_collection_that_takes_a_turn_in_the_midst_of_one_loses_no_queue(kind: int) -> None:
    dispatch: Dispatch[Any, Seat] = Dispatch(20, 20)
    empty, full = (Queue[Any, Seat](kind) for _ in range(2))
    for queue in (empty, full):
        dispatch.open(queue)
        dispatch.appended(queue)
    waiting = [Call(kind, number) for number in range(4)]
    full.calls.extend(waiting)
    taken: list[Any] = []

    def take_a_turn() -> None:
        if not taken:
            taken.append(None)
            taken[0] = dispatch.next(kind)

    empty.calls = _ActingCalls(take_a_turn)
    dispatch.seat(Seat())
    while (found := dispatch.next(kind)) is not None:
        taken.append(found)
    assert [call for call, _ in taken] == waiting
    assert dispatch.waiting() == 0


@pytest.mark.parametrize("kind", KINDS)
def test_s6_a_collection_that_lists_a_queue_while_the_queues_are_looked_through(kind: int) -> None:
    dispatch: Dispatch[Any, Seat] = Dispatch(2, 1)
    queues: list[Queue[Any, Seat]] = [Queue(kind) for _ in range(3)]
    for queue in queues[:2]:
        dispatch.open(queue)
        dispatch.appended(queue)
    queues[0].calls = _ActingCalls(lambda: dispatch.appended(queues[2]))
    dispatch.seat(Seat())
    dispatch._note_ahead()
    dispatch.recall()
    assert dispatch.submitted(Call(kind, 1), queues[1]) is dispatch.seats[0]


# Errors on the way from a queue to a worker


@pytest.mark.parametrize("after_builtins", [False, True])
@pytest.mark.parametrize("per_key", [None, 1])
def test_an_error_on_the_way_loses_no_call(per_key: int | None, after_builtins: bool) -> None:
    at = 0
    while _is_hit(at, per_key, after_builtins):
        at += 1
    assert at > 20


@pytest.mark.parametrize("key", [None, "a"])
def test_a_ctrl_c_as_the_calls_of_one_queue_are_taken_loses_none(key: str | None) -> None:
    """No other queue takes turns with it."""
    for at in itertools.count():
        dispatch: Dispatch[Unit, Seat] = Dispatch(4, 1)
        calls = [Call(TASK, number, key) for number in range(4)]
        for call in calls:
            dispatch.submitted(call)
        dispatch.seat(Seat())
        strike = Strike(at, _decides, after_builtins=True)
        sent: list[Unit] = []
        for one in (strike, Strike(-1, _decides)):
            with contextlib.suppress(Fault):
                _hand_out(dispatch, sent, one)
        assert sent == calls, strike.name
        assert dispatch.waiting() == 0
        if not strike.name:
            break
    assert at > 5


@pytest.mark.parametrize("key", [None, "a"])
def test_a_ctrl_c_as_calls_are_withdrawn_leaves_no_count(key: str | None) -> None:
    """A runner that closes would wait for ever for a call that is counted and does not wait."""
    for at in itertools.count():
        dispatch: Dispatch[Unit, Seat] = Dispatch(4, 1)
        calls = [Call(TASK, number, key) for number in range(4)]
        for call in calls:
            dispatch.submitted(call)
        for call in calls[1:3]:
            call.is_done = True
            dispatch.ended(call)
        withdrawn: list[Unit] = []
        strike = Strike(at, lambda code: code.co_name in {"done", "move", "forget"})
        for _ in range(2):
            with contextlib.suppress(Fault), strike.on():
                dispatch.withdraw(withdrawn)
        assert withdrawn == calls
        assert dispatch.waiting() == 0, strike.name
        dispatch.check_counts()
        if not strike.name:
            break
    assert at > 3


@pytest.mark.parametrize("key", [None, "a"])
@pytest.mark.parametrize("per_key", [None, 1])
def test_a_ctrl_c_as_a_call_begins_to_wait_leaves_no_count(key: str | None, per_key: int | None) -> None:
    """The call that ends with it is removed."""
    for at in itertools.count():
        dispatch: Dispatch[Unit, Seat] = Dispatch(1, 1, per_key)
        call = Call(TASK, 1, key)
        strike = Strike(at, _decides, after_builtins=True)
        with contextlib.suppress(Fault), strike.on():
            dispatch.submitted(call)
        dispatch.remove(call)
        assert dispatch.waiting() == 0, strike.name
        if not strike.name:
            break
    assert at > 0


def _decides(code: CodeType) -> bool:
    return "/_scheduler/" in code.co_filename and code.co_name not in {"done", "untaken", "<genexpr>"}


@dataclass
class Waiting:
    """Calls of every kind and items of a map that wait, numbered from 0."""

    dispatch: Dispatch[Unit, Seat]
    calls: list[Call]

    def check(self, found: list[Unit], when: str) -> None:
        """Check that each of them was found once."""
        assert sorted(call.number for call in found if isinstance(call, Call)) == sorted(call.number for call in self.calls), when
        items = [number for batch in found if isinstance(batch, FakeBatch) for number in batch.run.bodies]
        assert sorted(items) == list(range(30)), when


def _waiting(per_key: int | None) -> Waiting:
    dispatch: Dispatch[Unit, Seat] = Dispatch(2, 2, per_key)
    calls = [Call(kind, number, key) for kind in KINDS for number, key in enumerate([None, "a", None, "b", "a"])]
    for call in calls:
        assert dispatch.submitted(call) is None
    line = Line("map", THREAD, None, is_batched=True)
    batches: Batches[Any] = Batches(lambda run: FakeBatch(line, run), 65_536)
    queue: Queue[Any, Seat] = Queue(THREAD, batches)
    dispatch.open(queue)
    for start in (0, 10, 20):
        batches.append(Run(start, list(range(start, start + 10)), start != 10, 16))
    dispatch.appended(queue)
    return Waiting(dispatch, calls)


def _is_hit(at: int, per_key: int | None, after_builtins: bool) -> bool:
    """Hand out calls of every kind with a fault at one step; look for all of them. Whether the fault happened."""
    waiting = _waiting(per_key)
    dispatch = waiting.dispatch
    for seat in (Seat(0), Seat(1)):
        dispatch.seat(seat)
    spared = () if after_builtins else ("fill",)  # its entry is no step: nothing is taken yet
    strike = Strike(at, lambda code: _decides(code) and code.co_name not in spared, after_builtins=after_builtins)
    sent: list[Unit] = []
    with contextlib.suppress(Fault):
        _hand_out(dispatch, sent, strike)
    _hand_out(dispatch, sent, strike)
    waiting.check(sent, strike.name)
    return bool(strike.name)


@pytest.mark.long
@pytest.mark.parametrize("has_seats", [False, True])
def test_an_error_while_calls_are_withdrawn_loses_no_call(has_seats: bool) -> None:
    """Each step is struck, and then some steps of the second try."""
    spared = {"part", "<genexpr>"}
    at = [0, 0]
    hits, step = 0, times(11, 3)
    while True:
        waiting = _waiting(1)
        dispatch = waiting.dispatch
        if has_seats:
            dispatch.seat(Seat(0))
        withdrawn: list[Unit] = []
        strikes = [Strike(place, lambda code: "/_scheduler/" in code.co_filename and code.co_name not in spared) for place in at]
        for strike in strikes:
            with contextlib.suppress(Fault), strike.on():
                dispatch.withdraw(withdrawn)
        assert dispatch.waiting() + sum(call.size for call in withdrawn) == 40, at
        dispatch.withdraw(withdrawn)
        waiting.check(withdrawn, str(at))
        assert (dispatch.waiting(), len(dispatch.keys)) == (0, 0)
        if not strikes[0].name:
            break
        hits += 1
        at = [at[0], at[1] + step] if strikes[1].name else [at[0] + 1, at[0] % step]
    assert hits > 20


def _hand_out(dispatch: "Dispatch[Unit, Seat]", sent: list[Unit], strike: Strike) -> None:
    """Send all calls; each ends at once."""
    is_over = False
    while not is_over:
        before = len(sent)
        for kind in KINDS:
            fill = dispatch.fill(kind)
            while True:
                with strike.on():
                    found = next(fill, None)
                if found is None:
                    break
                call, seat = found
                sent.append(call)
                seat.send(call)
        is_over = before == len(sent) and not any(seat.calls for seat in dispatch.seats)
        for seat in dispatch.seats:
            for call in list(seat.calls):
                seat.take(call)
                dispatch.lowered(seat)
                if call.key is not None:
                    dispatch.left(call)


def test_a_call_with_a_key_that_was_not_sent_does_not_count_as_sent() -> None:
    dispatch: Dispatch[Unit, Seat] = Dispatch(2, 2, per_key=1)
    dispatch.seat(seat := Seat())
    call, other = Call(TASK, 0, "a"), Call(TASK, 1, "a")
    assert dispatch.submitted(call) is seat
    assert dispatch.submitted(other) is None
    dispatch.untaken(call, None)
    assert dispatch.next(TASK) == (call, seat)
    dispatch.left(call)
    assert dispatch.next(TASK) == (other, seat)


def test_calls_come_and_go_while_the_waiting_ones_are_read() -> None:
    """A garbage collection may run user code at any moment."""
    dispatch: Dispatch[Unit, Seat] = Dispatch(1, 1)
    waiting = [Call(THREAD, number, key) for number, key in enumerate([None, None, "a", "a", "b"])]
    for call in waiting:
        dispatch.submitted(call)
    read = []
    for call in dispatch.calls():
        read.append(call)
        dispatch.submitted(Call(THREAD, 9))
        dispatch.submitted(Call(THREAD, 9, f"new {len(read)}"))
    assert [call for call in read if call.number < 9] == waiting


class Counting(Seat):
    """A worker that counts how often its load is looked at."""

    looks = 0

    def __getattribute__(self, name: str) -> Any:
        if name == "load":
            Counting.looks += 1
        return super().__getattribute__(name)


def test_among_many_workers_one_that_has_just_ended_a_call_is_found_without_looking_at_all() -> None:
    """A thousand nodes have thousands of workers, and a call that ends makes room for the next one."""
    dispatch: Dispatch[Unit, Seat] = Dispatch(100, 4)
    seats = [Counting(index) for index in range(1000)]
    for seat in seats:
        seat.load[TASK] = 50
        dispatch.seat(seat)
    call = Call(TASK)
    assert dispatch.submitted(call) is seats[0]  # by a full comparison
    Counting.looks = 0
    for place in (7, 999, 0, 500, 500, 3):
        seats[place].load[TASK] -= 1
        dispatch.lowered(seats[place])
        assert dispatch.submitted(call) is seats[place]
        seats[place].load[TASK] += 1
    for place in (8, 9):
        seats[place].load[TASK] -= 1
        dispatch.lowered(seats[place])
    for place in (8, 9):
        assert dispatch.submitted(call) is seats[place]
        seats[place].load[TASK] += 1
    assert Counting.looks < 200
    dispatch.unseat(seats[5])
    seats[5].load[TASK] = 0  # it drains
    dispatch.lowered(seats[5])
    assert dispatch.submitted(call) is seats[0]
