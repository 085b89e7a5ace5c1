"""Who gets which call: the rules of places, queues and recalls, held by a model that plays the shell."""

from collections import deque
from dataclasses import dataclass, field

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from percore._core.dispatch import AHEAD, Dispatch
from percore._messages import Kind

TASK, THREAD = Kind.TASK, Kind.THREAD
KINDS = (TASK, THREAD)


@dataclass(eq=False)
class Call:
    kind: int
    number: int = 0
    is_done: bool = False

    def done(self) -> bool:
        return self.is_done


@dataclass(eq=False)
class Seat:
    load: list[int] = field(default_factory=lambda: [0, 0])
    recalling: bool = False
    behind: bool = False
    calls: list[Call] = field(default_factory=list)

    def silence(self) -> int:
        return int(self.behind)

    def send(self, call: Call) -> None:
        self.calls.append(call)
        self.load[call.kind] += 1

    def take(self, call: Call) -> None:
        self.calls.remove(call)
        self.load[call.kind] -= 1


def dispatch_of(*loads: tuple[int, int], concurrency: int = 2, threads: int = 2) -> Dispatch[Call, Seat]:
    """With workers that hold so many calls of each kind, all of them sent by the Dispatch."""
    dispatch: Dispatch[Call, Seat] = Dispatch(concurrency, threads)
    seats = []
    for load in loads:
        seat = Seat()
        dispatch.seats = [seat]
        for kind in KINDS:
            for _ in range(load[kind]):
                assert dispatch.submitted(Call(kind)) is seat
                seat.load[kind] += 1
        seats.append(seat)
    dispatch.seats = seats
    return dispatch


class DispatchMachine(RuleBasedStateMachine):
    """Does with a Dispatch what the supervisor does, and checks each decision."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0
        self.queues: tuple[deque[Call], deque[Call]] = (deque(), deque())

    @initialize(concurrency=st.integers(1, 3), threads=st.integers(1, 2), seats=st.integers(0, 3))
    def start(self, concurrency: int, threads: int, seats: int) -> None:
        self.places = (concurrency, threads)
        self.room = (concurrency, threads * (1 + AHEAD))
        self.dispatch: Dispatch[Call, Seat] = Dispatch(concurrency, threads)
        self.dispatch.seats = [Seat() for _ in range(seats)]

    def check_choice(self, kind: int, chosen: Seat) -> None:
        """The least loaded that has a free place, else one to queue ahead in; at each step one that is not behind first."""
        seats = self.dispatch.seats
        at_once = [seat for seat in seats if seat.load[kind] < self.places[kind]]
        level = at_once or [seat for seat in seats if seat.load[kind] < self.room[kind]]
        assert chosen in level
        awake = [seat for seat in level if not seat.behind] or level
        assert chosen in awake
        assert chosen.load[kind] == min(seat.load[kind] for seat in awake)

    def pump(self, kind: int) -> None:
        queue = self.queues[kind]
        for call, seat in self.dispatch.fill(kind):
            while queue and queue[0].is_done:
                queue.popleft()
            assert call is queue.popleft()  # first come, first served
            self.check_choice(kind, seat)
            seat.send(call)
        if any(not call.is_done for call in queue):
            assert all(seat.load[kind] >= self.room[kind] for seat in self.dispatch.seats)

    @rule(kind=st.sampled_from(KINDS), many=st.integers(1, 12))
    def submit(self, kind: int, many: int) -> None:
        for _ in range(many):
            self.count += 1
            call = Call(kind, self.count)
            seat = self.dispatch.submitted(call)
            if seat is None:
                assert all(seat.load[kind] >= self.room[kind] for seat in self.dispatch.seats)
                self.queues[kind].append(call)
            else:
                assert not any(not waiting.is_done for waiting in self.queues[kind])
                self.check_choice(kind, seat)
                seat.send(call)

    @rule(data=st.data())
    def end(self, data: st.DataObject) -> None:
        seats = [seat for seat in self.dispatch.seats if seat.calls]
        if seats:
            seat = data.draw(st.sampled_from(seats))
            call = data.draw(st.sampled_from(seat.calls))
            seat.take(call)
            self.pump(call.kind)

    @rule(data=st.data(), many=st.integers(1, 5))
    def cancel(self, data: st.DataObject, many: int) -> None:
        for _ in range(many):
            waiting = [call for queue in self.queues for call in queue if not call.is_done]
            if waiting:
                call = data.draw(st.sampled_from(waiting))
                call.is_done = True
                self.dispatch.ended(call)

    @rule(seat=st.integers(0, 3), is_behind=st.booleans())
    def read(self, seat: int, is_behind: bool) -> None:
        if seat < len(self.dispatch.seats):
            self.dispatch.seats[seat].behind = is_behind

    @precondition(lambda self: len(self.dispatch.seats) < 4)
    @rule()
    def seat(self) -> None:
        self.dispatch.seats.append(Seat())
        for kind in KINDS:
            self.pump(kind)

    @precondition(lambda self: self.dispatch.seats)
    @rule(data=st.data())
    def die(self, data: st.DataObject) -> None:
        seat = data.draw(st.sampled_from(self.dispatch.seats))
        self.dispatch.seats.remove(seat)
        unstarted = [call for call in seat.calls if data.draw(st.booleans())]
        self.dispatch.returned(unstarted)
        for kind in KINDS:
            self.queues[kind].extendleft(call for call in reversed(unstarted) if call.kind == kind)
            self.pump(kind)

    @rule()
    def recall(self) -> None:
        asked = self.dispatch.recall()
        threads = self.places[THREAD]
        free = sum(max(0, threads - seat.load[THREAD]) for seat in self.dispatch.seats)
        fullest = max((seat.load[THREAD] for seat in self.dispatch.seats), default=0)
        waits = any(not call.is_done for call in self.queues[THREAD])
        if asked is None:
            assert not free or fullest <= threads or waits
            return
        assert asked.seat in self.dispatch.seats
        assert not asked.seat.recalling
        surplus = asked.seat.load[THREAD] - threads
        assert 1 <= asked.wanted <= min(free, surplus)
        asked.seat.recalling = True
        again = self.dispatch.recall()
        assert again is None or again.seat is not asked.seat
        back = asked.seat.calls[::-1]
        back = [call for call in back if call.kind == THREAD][: asked.wanted]
        for call in back:
            asked.seat.take(call)
        asked.seat.recalling = False
        self.dispatch.returned(back)
        self.queues[THREAD].extendleft(reversed(back))
        self.pump(THREAD)

    @rule()
    def withdraw(self) -> None:
        live = [call for queue in self.queues for call in queue if not call.is_done]
        assert self.dispatch.withdraw() == live
        for queue in self.queues:
            queue.clear()

    @invariant()
    def nothing_is_exceeded(self) -> None:
        if not hasattr(self, "dispatch"):
            return
        for seat in self.dispatch.seats:
            assert seat.load[TASK] <= self.places[TASK]
            assert seat.load[THREAD] <= self.room[THREAD]
            assert sum(seat.load) <= self.dispatch.room
        live = sum(not call.is_done for queue in self.queues for call in queue)
        assert self.dispatch.waiting() == live
        for queue in self.dispatch._queues:
            live = sum(not call.is_done for call in queue)
            assert len(queue) <= max(64 + live, 2 * live)


TestDispatch = DispatchMachine.TestCase
TestDispatch.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)


# Places


def test_a_call_goes_where_it_can_begin_at_once() -> None:
    dispatch = dispatch_of((1, 2), (0, 2), (1, 1))
    assert dispatch.submitted(Call(TASK)) is dispatch.seats[1]
    assert dispatch.submitted(Call(THREAD)) is dispatch.seats[2]


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
        seat = dispatch.submitted(Call(THREAD))
        assert seat is dispatch.seats[number % 2]
        seat.load[THREAD] += 1
    assert dispatch.submitted(Call(THREAD)) is None


def test_a_free_place_comes_before_queueing_ahead() -> None:
    dispatch = dispatch_of((0, 2), (0, 1))
    dispatch.seats[1].behind = True
    assert dispatch.submitted(Call(THREAD)) is dispatch.seats[1]


@pytest.mark.parametrize("kind", KINDS)
def test_who_is_behind_gets_nothing_while_another_has_a_free_place(kind: int) -> None:
    dispatch = dispatch_of((0, 0), (1, 1))
    dispatch.seats[0].behind = True
    assert dispatch.submitted(Call(kind)) is dispatch.seats[1]
    dispatch.seats[1].load = [2, 2]
    assert dispatch.submitted(Call(kind)) is dispatch.seats[0]


def test_who_is_behind_is_not_queued_ahead_in_while_another_has_room() -> None:
    dispatch = dispatch_of((0, 2), (0, 9))
    dispatch.seats[0].behind = True
    assert dispatch.submitted(Call(THREAD)) is dispatch.seats[1]
    dispatch.seats[1].load[THREAD] = 10
    assert dispatch.submitted(Call(THREAD)) is dispatch.seats[0]


def test_without_workers_calls_wait() -> None:
    dispatch = dispatch_of()
    calls = [Call(kind) for kind in (TASK, THREAD, TASK)]
    assert [dispatch.submitted(call) for call in calls] == [None] * 3
    assert dispatch.waiting() == 3
    assert dispatch.next(TASK) is None
    dispatch.seats.append(Seat())
    assert dispatch.next(TASK) == (calls[0], dispatch.seats[0])
    assert dispatch.waiting() == 2


# The queue


def test_what_comes_back_is_first_in_its_order() -> None:
    dispatch = dispatch_of()
    waiting = Call(THREAD, 1)
    dispatch.submitted(waiting)
    back = [Call(THREAD, 2), Call(TASK, 3), Call(THREAD, 4)]
    dispatch.returned(call for call in back)
    assert dispatch.withdraw() == [back[1], back[0], back[2], waiting]
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
    dispatch.seats.append(Seat())
    assert dispatch.next(TASK) == (calls[2], dispatch.seats[0])
    assert dispatch.next(TASK) is None
    assert dispatch.waiting() == 0


@pytest.mark.parametrize("kind", KINDS)
def test_cancelled_calls_do_not_pile_up(kind: int) -> None:
    dispatch = dispatch_of()
    keeper = Call(kind)
    dispatch.submitted(keeper)
    for _ in range(10_000):
        call = Call(kind)
        dispatch.submitted(call)
        call.is_done = True
        dispatch.ended(call)
        assert len(dispatch._queues[kind]) <= 66
    assert dispatch.waiting() == 1
    assert dispatch.withdraw() == [keeper]


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


def test_a_recall_is_asked_once() -> None:
    dispatch = dispatch_of((0, 0), (0, 10))
    asked = dispatch.recall()
    assert asked is not None
    asked.seat.recalling = True
    assert dispatch.recall() is None
    asked.seat.recalling = False
    assert dispatch.recall() is not None


def test_no_recall_while_calls_wait_here() -> None:
    dispatch = dispatch_of((0, 10), (0, 10))
    dispatch.submitted(Call(THREAD))
    dispatch.seats[0].load[THREAD] = 0
    assert dispatch.recall() is None


def test_coroutines_are_never_recalled() -> None:
    assert dispatch_of((0, 2), (2, 2)).recall() is None


def test_places_and_room() -> None:
    dispatch = dispatch_of(concurrency=7, threads=3)
    assert (dispatch.room_for(TASK), dispatch.room_for(THREAD)) == (7, 3 * (1 + AHEAD))
    assert dispatch.room == 7 + 3 * (1 + AHEAD)
