"""Keys over workers: spread evenly, moved little, one worker at a time, and so many calls at once."""

import random
from collections import Counter, deque
from collections.abc import Hashable, Iterable
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from weakref import ref

import pytest
from hypothesis import given
from hypothesis import strategies as st

from percore._scheduler import keys as module
from percore._scheduler.keys import KEPT, PIECE, Keys, weight
from percore._scheduler.lanes import Lanes, purge
from tests.counts import times

pytestmark = pytest.mark.long

KEYS = times(4_000, 10_000)


@dataclass(eq=False)
class Seat:
    index: int
    load: list[int] = field(default_factory=lambda: [0, 0])


@dataclass(eq=False)
class Call:
    number: int = 0
    is_done: bool = False
    key: Hashable = "key"
    kind: int = 0

    def done(self) -> bool:
        return self.is_done


Queue = Lanes[Call, Seat]


def seats_of(workers: int) -> list[Seat]:
    return [Seat(index) for index in range(workers)]


def forgotten(keys: Keys[Call, Seat], queue: Queue) -> list[Call]:
    """Forget the calls that wait in a queue. Return those that were not cancelled."""
    calls: list[Call] = []
    keys.forget(queue, calls)
    return [call for call in calls if not call.done()]


def keys_with(seats: list[Seat], limit: int | None = None) -> Keys[Call, Seat]:
    keys: Keys[Call, Seat] = Keys(limit)
    assert list(keys.seated(seats)) == []
    return keys


FULL, ROOM = 0, 10_000
"""Places of a worker."""


def wait(keys: Keys[Call, Seat], name: Hashable, call: Call, queue: Queue) -> bool:
    """A call finds no place. Whether it may be sent as soon as there is one."""
    call.key = name
    before = sum(map(len, queue.by_seat.values()))
    assert keys.submitted(call, queue, FULL) is None
    return sum(map(len, queue.by_seat.values())) > before


def entered(keys: Keys[Call, Seat], name: Hashable, queue: Queue) -> Seat | None:
    """Where a call goes that finds a place; it is under way there."""
    return keys.submitted(Call(key=name), queue, ROOM)


def would_go(keys: Keys[Call, Seat], name: Hashable, queue: Queue) -> Seat | None:
    """As `entered`, of a call that has ended at once, or is cancelled where it has to wait."""
    call = Call(key=name)
    seat = keys.submitted(call, queue, ROOM)
    if seat is None:
        call.is_done = True
        keys.cancelled(name, queue)
    else:
        keys.ended(Call(key=name))
    return seat


def homes(seats: list[Seat], names: Iterable[int]) -> dict[int, int]:
    """The worker of each key, none of which has calls."""
    keys, queue = keys_with(seats), Queue()
    found = {}
    for name in names:
        seat = would_go(keys, name, queue)
        assert seat is not None
        found[name] = seat.index
    return found


def names(seed: int) -> list[int]:
    """What hashes of strings look like. Those of ints are the ints, so that these tests do not depend on a hash seed."""
    numbers = random.Random(seed)
    return [numbers.getrandbits(60) for _ in range(KEYS)]


# Where a key is at home


def test_keys_spread_evenly(subtests: pytest.Subtests) -> None:
    for workers, sort in [
        *((workers, "random") for workers in (2, 3, 4, 7, 8, 12, 16)),
        *((w, sort) for w in (2, 8, 13) for sort in ("consecutive", "strided")),
    ]:
        with subtests.test(workers=workers, sort=sort):
            given = {"random": names(workers), "consecutive": range(KEYS), "strided": range(0, 64 * KEYS, 64)}[sort]
            counts = Counter(homes(seats_of(workers), given).values())
            fair = KEYS / workers
            # Five standard deviations of a fair throw: none of these rows would be beyond that in a million runs.
            spread = 5 * (fair * (1 - 1 / workers)) ** 0.5
            assert set(counts) == set(range(workers))
            assert all(abs(count - fair) < spread for count in counts.values())


@pytest.mark.parametrize("workers", [2, 3, 8, 16])
def test_when_a_worker_leaves_its_own_keys_move_alone_and_spread(workers: int) -> None:
    seats, keys = seats_of(workers), names(1)
    before = homes(seats, keys)
    gone = seats.pop(workers // 2)
    after = homes(seats, keys)
    moved = [key for key in keys if before[key] != after[key]]
    assert moved == [key for key in keys if before[key] == gone.index]
    if workers > 2:
        counts = Counter(after[key] for key in moved)
        fair = len(moved) / (workers - 1)
        assert all(abs(counts[seat.index] - fair) < 5 * fair**0.5 for seat in seats)


@pytest.mark.parametrize("workers", [2, 3, 8, 16])
def test_when_a_worker_comes_keys_move_to_it_alone(workers: int) -> None:
    seats, keys = seats_of(workers), names(2)
    before = homes(seats, keys)
    after = homes([*seats, Seat(workers)], keys)
    assert {after[key] for key in keys if before[key] != after[key]} == {workers}


def test_a_replacement_gets_the_keys_of_the_one_it_replaces() -> None:
    keys = names(3)
    assert homes(seats_of(7), keys) == homes(list(reversed(seats_of(7))), keys)


def test_workers_are_chosen_alike_however_many_keys_were_asked_for() -> None:
    keys, queue = keys_with(seats_of(3)), Queue()
    first = [would_go(keys, name, queue) for name in range(3000)]
    for name in range(20_000):
        would_go(keys, name, queue)
    assert len(keys._keys) <= 2000  # what it keeps is bounded
    assert len(keys) == 0
    assert [would_go(keys, name, queue) for name in range(3000)] == first


def test_idle_keys_are_dropped_and_busy_ones_kept() -> None:
    (seat,) = seats = seats_of(1)
    keys, queue = keys_with(seats), Queue()
    for name in range(0, 10_000, 2):
        assert entered(keys, name, queue) is seat
        assert would_go(keys, name + 1, queue) is seat
    assert len(keys) == 5000
    for name in range(0, 10_000, 2):
        keys.ended(Call(key=name))
    for name in range(10_000, 30_000):
        would_go(keys, name, queue)
    assert len(keys._keys) <= 2000


def test_idle_keys_are_dropped_when_the_last_call_of_many_has_ended() -> None:
    """Nothing need come after them."""
    (seat,) = seats = seats_of(1)
    keys, queue = keys_with(seats), Queue()
    for name in range(20_000):
        assert entered(keys, name, queue) is seat
    for name in range(20_000):
        keys.ended(Call(key=name))
    assert len(keys._keys) == len(queue.lanes) <= KEPT
    assert len(keys._noted) <= KEPT


@pytest.mark.parametrize("taken", [False, True])
def test_idle_keys_are_dropped_when_their_calls_were_cancelled(taken: bool) -> None:
    (seat,) = seats = seats_of(1)
    keys, queue = keys_with(seats), Queue()
    for name in range(10_000):
        call = Call()
        wait(keys, name, call, queue)
        call.is_done = True
        keys.cancelled(name, queue)
    if taken:
        assert keys.take(queue, seat) is None
    else:
        assert forgotten(keys, queue) == []
    assert len(keys._keys) <= KEPT


def test_a_key_that_is_used_again_and_again_is_kept() -> None:
    (seat,) = seats = seats_of(1)
    keys, queue = keys_with(seats), Queue()
    assert would_go(keys, "often", queue) is seat
    for name in range(20_000):
        if name % (KEPT // 2) == 0:
            assert entered(keys, "often", queue) is seat
        would_go(keys, name, queue)
        if name % (KEPT // 2) == KEPT // 4:
            keys.ended(Call(key="often"))
    assert len(keys._keys) <= KEPT + 1
    assert would_go(keys, "often", queue) is seat


class Whole(dict[Any, Any]):
    """Nobody goes through it."""

    def _refuse(self) -> Any:
        raise AssertionError("somebody went through all keys")

    __iter__ = items = values = keys = _refuse


def test_a_queue_is_forgotten_without_a_look_at_the_keys_of_others() -> None:
    keys = keys_with(seats_of(1))
    queue, other = Queue(), Queue()
    for name in range(100):
        wait(keys, name, Call(), other)
    call = Call()
    wait(keys, 7, call, queue)
    keys._keys, other.lanes = Whole(keys._keys), Whole(other.lanes)
    assert forgotten(keys, queue) == [call]
    assert other.count == 100


@pytest.mark.parametrize("which", range(8))
def test_a_key_is_not_dropped_between_two_steps_by_what_its_hash_runs(which: int) -> None:
    """While a call comes in, so many others do that idle keys are dropped, this one among them."""
    (seat,) = seats = seats_of(1)
    keys, queue = keys_with(seats), Queue()
    hashed = 0

    class Name:
        def __hash__(self) -> int:
            nonlocal hashed
            hashed += 1
            if hashed == which + 1:
                for name in range(3000):
                    would_go(keys, name, queue)
            return 7

        def __eq__(self, other: object) -> bool:
            return self is other

    name = Name()
    for _ in range(3):
        assert entered(keys, name, queue) is seat
        assert wait(keys, name, Call(), queue)
        assert keys.take(queue, seat) is not None
        for _ in range(2):
            assert list(keys.ended(Call(key=name))) == []
    assert hashed > which
    assert len(keys) == 0


@given(st.integers(-(1 << 63), (1 << 63) - 1), st.integers(0, 1 << 20))
def test_weights_are_64_bits(key_hash: int, index: int) -> None:
    assert 0 <= weight(key_hash, index) < 1 << 64
    assert weight(key_hash, index) == weight(key_hash, index)


def test_weights_of_one_key_differ_between_workers() -> None:
    assert len({weight(hash(7), index) for index in range(10_000)}) == 10_000


# What a key may do


@pytest.mark.parametrize(
    ("limit", "under_way", "may_enter"),
    [
        (None, 0, True),
        (None, 1, True),
        (None, 10_000, True),
        (1, 0, True),
        (1, 1, False),
        (2, 1, True),
        (2, 2, False),
        (3, 2, True),
        (3, 3, False),
    ],
)
def test_a_limit_bounds_what_is_under_way(limit: int | None, under_way: int, may_enter: bool) -> None:
    (seat,) = seats = seats_of(1)
    keys, queue = keys_with(seats, limit), Queue()
    for _ in range(under_way):
        assert entered(keys, "key", queue) is seat
    assert would_go(keys, "other", queue) is seat
    assert wait(keys, "key", Call(), queue) is may_enter  # it is listed while it may be sent
    assert would_go(keys, "key", Queue()) is (seat if may_enter else None)
    assert (keys.take(queue, seat) is not None) is may_enter


@pytest.mark.parametrize("limit", [1, 2, 3])
def test_an_end_lets_the_next_one_go(limit: int) -> None:
    (seat,) = seats = seats_of(1)
    keys, queue = keys_with(seats, limit), Queue()
    calls = [Call(number) for number in range(5)]
    for call in calls:
        wait(keys, "key", call, queue)
    taken = []
    while (following := keys.take(queue, seat)) is not None:
        taken.append(following)
    assert taken == calls[:limit]
    for expected in calls[limit:]:
        assert list(keys.ended(Call(key="key"))) == [queue]
        assert keys.take(queue, seat) is expected
        assert keys.take(queue, seat) is None
    for _ in range(limit):
        assert len(keys) == 1
        keys.ended(Call(key="key"))
    assert len(keys) == 0


def test_keys_of_a_worker_take_turns() -> None:
    (seat,) = seats = seats_of(1)
    keys, queue = keys_with(seats), Queue()
    for name in ("a", "a", "a", "a", "b", "b", "c"):
        wait(keys, name, Call(ord(name)), queue)
    seen = ""
    while (call := keys.take(queue, seat)) is not None:
        seen += chr(call.number)
    assert seen == "abcabaa"


def test_one_limit_holds_over_all_queues() -> None:
    (seat,) = seats = seats_of(1)
    keys = keys_with(seats, 1)
    one, other = Queue(), Queue()
    first, second = Call(1), Call(2)
    assert wait(keys, "key", first, one)
    assert wait(keys, "key", second, other)
    assert keys.take(one, seat) is first
    assert keys.take(other, seat) is None
    assert list(keys.ended(Call(key="key"))) == [other]
    assert keys.take(other, seat) is second
    assert keys.take(one, seat) is None


def test_what_comes_back_goes_first() -> None:
    (seat,) = seats = seats_of(1)
    keys, queue = keys_with(seats), Queue()
    calls = [Call(number) for number in range(3)]
    wait(keys, "key", calls[1], queue)
    wait(keys, "key", calls[2], queue)
    keys.returned(calls[0], queue)
    assert [keys.take(queue, seat) for _ in range(4)] == [*calls, None]


def test_cancelled_calls_are_skipped_and_leave_nothing() -> None:
    (seat,) = seats = seats_of(1)
    keys, queue = keys_with(seats), Queue()
    calls = [Call(number) for number in range(3)]
    for call in calls:
        wait(keys, "key", call, queue)
    for call in (calls[0], calls[2]):
        call.is_done = True
        keys.cancelled("key", queue)
    assert queue.count == 1
    assert keys.take(queue, seat) is calls[1]
    keys.ended(Call(key="key"))
    assert keys.take(queue, seat) is None
    assert len(keys) == 0
    assert queue.by_seat == {}


def test_a_call_goes_before_cancelled_ones_and_behind_others() -> None:
    (seat,) = seats = seats_of(1)
    keys, queue = keys_with(seats), Queue()
    calls = [Call(1), Call(2)]
    for call in calls:
        wait(keys, "key", call, queue)
    assert would_go(keys, "key", queue) is None
    assert would_go(keys, "key", Queue()) is seat
    for call in calls:
        call.is_done = True
        keys.cancelled("key", queue)
    assert would_go(keys, "key", queue) is seat


def test_what_is_forgotten_is_given_back() -> None:
    keys = keys_with([])
    one, other = Queue(), Queue()
    calls = {"a": Call(), "b": Call()}
    for name in ("a", "b"):
        wait(keys, name, calls[name], one)
    wait(keys, "a", Call(), other)
    calls["b"].is_done = True
    keys.cancelled("b", one)
    assert forgotten(keys, one) == [calls["a"]]
    assert (one.count, len(keys)) == (0, 1)
    assert len(forgotten(keys, other)) == 1
    assert len(keys) == 0


# Workers that come and go


def test_without_workers_calls_wait_for_one() -> None:
    keys, queue = keys_with([]), Queue()
    assert would_go(keys, "key", queue) is None
    assert not wait(keys, "key", Call(), queue)
    (seat,) = seats = seats_of(1)
    assert list(keys.seated(seats)) == [queue]
    assert keys.take(queue, seat) is not None


def test_a_key_stays_with_a_worker_that_leaves_until_it_has_ended_there() -> None:
    old, new = seats_of(2)
    keys, queue = keys_with([old]), Queue()
    for _ in range(2):
        assert entered(keys, "key", queue) is old
    waiting = Call()
    wait(keys, "key", waiting, queue)
    assert list(keys.seated([new])) == []
    other = Queue()
    assert would_go(keys, "key", other) is None
    assert forgotten(keys, other) == []
    assert list(keys.ended(Call(key="key"))) == []
    assert keys.take(queue, new) is None
    assert list(keys.ended(Call(key="key"))) == [queue]
    assert keys.take(queue, old) is None
    assert keys.take(queue, new) is waiting


def test_what_is_kept_of_keys_that_have_moved_does_not_grow() -> None:
    """A key that is dropped, since a worker came that it would rather have, leaves its note among those of idle keys."""
    few, many, queue = seats_of(1), seats_of(40), Queue()
    keys = keys_with(few)
    for _ in range(KEPT // 4):
        for name in ("a", "b", "c"):
            assert entered(keys, name, queue) is few[0]
            keys.left(Call(key=name))
            assert entered(keys, name, queue) is few[0]
        keys.seated([*few, *many[1:]])
        for name in ("a", "b", "c"):
            keys.left(Call(key=name))
        keys.seated(few)
    assert len(keys._noted) <= 8
    assert len(keys) == 0


def test_a_key_under_way_stays_when_a_worker_comes_that_it_would_rather_have() -> None:
    seats = seats_of(2)
    name = next(name for name in range(100) if weight(name, 1) > weight(name, 0))
    keys, queue = keys_with(seats[:1]), Queue()
    assert entered(keys, name, queue) is seats[0]
    keys.seated(seats)
    assert would_go(keys, name, queue) is seats[0]
    keys.ended(Call(key=name))
    assert would_go(keys, name, queue) is seats[1]


@pytest.mark.parametrize("limit", [None, 1, 2])
def test_a_key_under_way_elsewhere_serves_what_waits_there(limit: int | None) -> None:
    seats = seats_of(2)
    name = next(name for name in range(100) if weight(name, 1) > weight(name, 0))
    keys, queue = keys_with(seats[:1], limit), Queue()
    assert entered(keys, name, queue) is seats[0]
    keys.seated(seats)
    calls = [Call(number) for number in range(2)]
    for call in calls:
        wait(keys, name, call, queue)
    for call in calls:
        keys.ended(Call(key=name))
        assert keys.take(queue, seats[1]) is None
        assert keys.take(queue, seats[0]) is call
    assert list(keys.ended(Call(key=name))) == []
    assert would_go(keys, name, queue) is seats[1]


@pytest.mark.parametrize("way", ["death", "death of the last", "birth"])
def test_ten_thousand_waiting_keys_move_in_pieces(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    before, after = {"death": ([0, 1], [1]), "death of the last": ([0], []), "birth": ([0], [0, 1])}[way]
    seats = seats_of(2)
    keys, queue = keys_with([seats[index] for index in before]), Queue()
    for name in range(10_000):
        assert wait(keys, name, Call(name), queue)
    placed = 0

    def counted(self: Keys[Call, Seat], key: Any) -> None:
        nonlocal placed
        placed += 1
        place(self, key)

    place = Keys._place
    monkeypatch.setattr(Keys, "_place", counted)
    keys.seated([seats[index] for index in after])
    if not after:
        assert placed == 0
        assert keys.is_settled()  # nothing to be done
        after = [1]
        keys.seated([seats[1]])
    pieces = 1
    while not keys.is_settled():
        assert placed == pieces * PIECE
        assert list(keys.settle()) == [queue]
        pieces += 1
    assert placed == 10_000
    found = []
    for index in after:
        while (call := keys.take(queue, seats[index])) is not None:
            assert index == max(after, key=lambda one: weight(call.number, one))
            found.append(call.number)
    assert sorted(found) == list(range(10_000))


def test_a_key_that_has_not_moved_yet_is_on_one_worker(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE", 0)
    seats = seats_of(2)
    name = next(name for name in range(100) if weight(name, 1) > weight(name, 0))
    keys, queue, other = keys_with(seats[:1]), Queue(), Queue()
    assert wait(keys, name, Call(1), queue)
    assert list(keys.seated(seats)) == []
    assert not keys.is_settled()
    assert entered(keys, name, other) is seats[1]  # another queue: calls there hold it up as little as ever
    assert keys.take(queue, seats[0]) is None
    assert not wait(keys, name, Call(2), queue)
    assert list(keys.ended(Call(key=name))) == []
    monkeypatch.undo()
    assert list(keys.settle()) == [queue]
    assert [call.number for _ in range(2) if (call := keys.take(queue, seats[1])) is not None] == [1, 2]


def test_what_was_forgotten_does_not_move(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "PIECE", 0)
    keys, queue = keys_with(seats_of(1)), Queue()
    wait(keys, "key", Call(), queue)
    assert list(keys.seated(seats_of(2))) == []
    assert len(forgotten(keys, queue)) == 1
    monkeypatch.undo()
    assert list(keys.settle()) == []
    assert keys.is_settled()
    assert len(keys) == 0


def test_waiting_keys_with_nothing_under_way_move_at_once() -> None:
    old, new = seats_of(2)
    keys, queue = keys_with([old]), Queue()
    call = Call()
    assert wait(keys, "key", call, queue)
    assert list(keys.seated([new])) == [queue]
    assert keys.take(queue, old) is None
    assert keys.take(queue, new) is call


# Gates


class Gate:
    """Lets so many calls pass, and is shut then."""

    def __init__(self, passes: int, error: Exception | None = None) -> None:
        self.passes = passes
        self.error = error
        self.is_shut = False
        self.taken: list[tuple[Call, Seat]] = []
        self.gone: list[tuple[str, Call]] = []
        self.opens_on_end = False

    def take(self, call: Call, seat: Seat) -> bool:
        if self.error is not None:
            raise self.error
        if not self.passes:
            self.is_shut = True
            return False
        self.passes -= 1
        self.taken.append((call, seat))
        return True

    def left(self, call: Call) -> None:
        self._gone("left", call)

    def unsent(self, call: Call) -> None:
        self._gone("unsent", call)

    def _gone(self, how: str, call: Call) -> None:
        self.gone.append((how, call))
        if self.opens_on_end:
            self.passes += 1
            self.is_shut = False


def test_a_shut_gate_holds_its_key_and_no_other() -> None:
    (seat,) = seats = seats_of(1)
    keys, queue, gate = keys_with(seats), Queue(), Gate(1)
    keys.guard("gated", gate)
    gated = [Call(number) for number in range(3)]
    for call in gated:
        wait(keys, "gated", call, queue)
    others = [Call(number) for number in range(3)]
    for number, call in enumerate(others):
        wait(keys, f"other {number}", call, queue)
    taken = []
    while (following := keys.take(queue, seat)) is not None:
        taken.append(following)
    assert taken == [gated[0], *others]
    assert queue.count == 2
    assert not wait(keys, "gated", Call(3), queue), "a gate that is shut lists nothing"
    gate.passes, gate.is_shut = 3, False
    assert list(keys.opened("gated")) == [queue]
    assert [keys.take(queue, seat) for _ in range(2)] == gated[1:]
    assert [call for call, _ in gate.taken] == gated


def test_a_new_call_passes_the_gate_unless_others_wait() -> None:
    (seat,) = seats = seats_of(1)
    keys, queue, gate = keys_with(seats), Queue(), Gate(2)
    keys.guard("gated", gate)
    assert entered(keys, "gated", queue) is seat
    assert not gate.gone
    assert would_go(keys, "gated", queue) is seat
    assert [how for how, _ in gate.gone] == ["left"]
    assert entered(keys, "gated", queue) is None
    assert keys.submitted(Call(key="free"), queue, ROOM) is seat


def test_the_end_of_a_call_may_open_the_gate() -> None:
    (seat,) = seats = seats_of(1)
    keys, queue, gate = keys_with(seats), Queue(), Gate(1)
    keys.guard("gated", gate)
    first, second = Call(1, key="gated"), Call(2)
    assert keys.submitted(first, queue, ROOM) is seat
    wait(keys, "gated", second, queue)
    assert keys.take(queue, seat) is None
    gate.opens_on_end = True
    assert list(keys.ended(first, was_sent=False)) == [queue]
    assert gate.gone == [("unsent", first)]
    assert keys.take(queue, seat) is second


def test_a_gate_hears_of_each_call_that_has_left_its_worker() -> None:
    (seat,) = seats = seats_of(1)
    keys, queue, gate = keys_with(seats), Queue(), Gate(2)
    listed: list[object] = []
    keys.on_listed = listed.append
    keys.guard("gated", gate)
    calls = [Call(number, key="gated") for number in range(3)]
    assert [keys.submitted(call, queue, ROOM) for call in calls] == [seat, seat, None]
    assert keys.take(queue, seat) is None, "the gate is shut"
    keys.left(calls[0])
    assert not listed, "it is still shut"
    gate.opens_on_end = True
    keys.left(calls[1])
    assert listed == [queue]
    assert keys.take(queue, seat) is calls[2]
    keys.left(calls[2])
    assert [call for _, call in gate.gone] == calls
    assert keys.is_idle("gated")
    assert keys.submitted(calls[0], queue, ROOM) is seat
    keys.left(calls[0])
    assert gate.gone[3:] == [("left", calls[0])], "also while the gate is open"
    assert keys.is_idle("gated")


def test_a_gated_key_moves_with_the_workers() -> None:
    old, new = seats_of(2)
    keys, queue, gate = keys_with([old]), Queue(), Gate(0)
    keys.guard("gated", gate)
    call = Call(1)
    wait(keys, "gated", call, queue)
    assert keys.take(queue, old) is None
    assert list(keys.seated([new])) == []
    assert keys.is_settled()
    gate.passes, gate.is_shut = 1, False
    assert list(keys.opened("gated")) == [queue]
    assert keys.take(queue, new) is call
    assert gate.taken == [(call, new)]
    assert list(keys.seated([])) == []
    waiting = Call(2)
    gate.is_shut = True
    wait(keys, "gated", waiting, queue)
    keys.ended(call)
    gate.passes, gate.is_shut = 1, False
    assert list(keys.opened("gated")) == []
    assert list(keys.seated([old])) == [queue]
    assert keys.take(queue, old) is waiting


def test_a_gate_outlives_its_idle_key() -> None:
    (seat,) = seats = seats_of(1)
    keys, queue, gate = keys_with(seats), Queue(), Gate(1)
    keys.guard("gated", gate)
    assert keys.is_idle("gated")
    assert would_go(keys, "gated", queue) is seat
    for number in range(3 * KEPT):
        assert would_go(keys, number, queue) is seat
    assert "gated" not in keys._keys
    assert entered(keys, "gated", queue) is None, "its gate has counted one"
    assert not keys.is_idle("gated")
    keys.guard("gated", None)
    assert list(keys.opened("gated")) == [queue]
    assert keys.take(queue, seat) is not None


@pytest.mark.parametrize("is_waiting", [True, False])
def test_an_error_of_a_gate_loses_no_call(is_waiting: bool) -> None:
    (seat,) = seats = seats_of(1)
    keys, queue, gate = keys_with(seats), Queue(), Gate(1, ZeroDivisionError())
    keys.guard("gated", gate)
    call = Call(key="gated")
    if is_waiting:
        wait(keys, "gated", call, queue)
        with pytest.raises(ZeroDivisionError):
            keys.take(queue, seat)
        assert [lane.calls[0] for lane in queue.by_seat[seat]] == [call], "it is tried again"
        assert forgotten(keys, queue) == [call]
    else:
        with pytest.raises(ZeroDivisionError):
            keys.submitted(call, queue, ROOM)
    assert keys.is_idle("gated")
    assert len(keys) == 0


def test_a_key_that_was_dropped_while_its_lane_was_listed_takes_no_new_key_of_its_name_with_it() -> None:
    (seat,) = seats = seats_of(1)
    keys, queue, other = keys_with(seats), Queue(), Queue()
    calls = [Call() for _ in range(65)]
    for call in calls:
        wait(keys, "k", call, queue)
    for call in calls:  # so many are dropped at once, while their lane is still listed
        call.is_done = True
        keys.cancelled("k", queue)
    assert not queue.lanes["k"].calls
    for name in range(2 * KEPT):
        would_go(keys, name, other)
    assert "k" not in keys._keys
    assert entered(keys, "k", queue) is seat
    assert keys.take(queue, seat) is None
    for name in range(2 * KEPT):
        would_go(keys, name, other)
    keys.ended(Call(key="k"))


@pytest.mark.parametrize(
    ("ended", "live", "is_purged"), [(64, 0, False), (65, 65, False), (65, 64, True), (65, 0, True), (1, 0, False)]
)
def test_cancelled_calls_are_looked_for_once_they_are_many_and_most(ended: int, live: int, is_purged: bool) -> None:
    """A look takes as long as there are calls: one for each cancelled call would take a runner with many of them ever longer."""
    calls = [Call(number, is_done=number < ended) for number in range(ended + live)]
    random.Random(1).shuffle(calls)
    waiting = SimpleNamespace(calls=deque(calls), ended=ended)
    purge(waiting)
    left = [call for call in calls if not call.is_done] if is_purged else calls
    assert (list(waiting.calls), waiting.ended) == (left, 0 if is_purged else ended)


def test_a_key_joins_a_worker_unless_it_has_one() -> None:
    seats = seats_of(4)
    keys, queue = keys_with(seats), Queue()
    home = keys._home("a")
    other = next(seat for seat in seats if seat is not home)
    assert keys.submitted(Call(key="a"), queue, ROOM) is home
    keys.join("a", other)  # too late: one of its calls is under way
    assert keys.submitted(Call(key="a"), queue, ROOM) is home
    for number, seat in enumerate(seats):
        keys.join(number, seat)
        keys.join(number, seats[number - 1])
        assert keys.submitted(Call(key=number), queue, ROOM) is seat
    keys.join("gone", Seat(9))  # it takes no calls
    assert keys.submitted(Call(key="gone"), queue, ROOM) in seats


def test_a_lent_key_stays_until_it_is_given_back() -> None:
    """Among more idle keys than are kept. `runs`: a call of it is under way when it is given back."""
    for runs in (False, True):
        seats = seats_of(4)
        keys, queue = keys_with(seats), Queue()
        home = keys._home("lent")
        assert home is not None
        keys.join("lent", home, is_lent=True)
        lent = keys._keys["lent"]
        for name in range(KEPT + 10):
            would_go(keys, name, queue)
        assert keys._keys["lent"] is lent
        assert would_go(keys, "lent", queue) is home
        if runs:
            assert entered(keys, "lent", queue) is home
        keys.leave("lent")
        keys.leave("unknown")
        assert ("lent" in keys._keys) is runs
        if runs:
            keys.left(Call(key="lent"))
        assert "lent" not in keys._keys
        assert "lent" not in queue.lanes
        assert all(key.name != "lent" for key in keys._noted)


def test_idle_keys_refer_to_no_worker_that_has_gone() -> None:
    seats = seats_of(3)
    keys, queue = keys_with(seats), Queue()
    for name in range(60):
        would_go(keys, name, queue)
    first, second, third = seats
    del seats
    used = [ref(seat) for seat in (first, second)]
    busy = next(name for name in range(60) if keys._home(name) is first)
    assert entered(keys, busy, queue) is first
    keys.seated([third, second], [first])  # it rests, and may come back
    keys.seated([third])
    del first, second
    assert [one() is None for one in used] == [False, True]  # one of them runs a call of a key
    keys.left(Call(key=busy))
    assert [one() is None for one in used] == [True, True]
    assert all(would_go(keys, name, queue) is third for name in range(60))


def test_a_call_that_is_removed_is_one_less_that_waits() -> None:
    (seat,) = seats = seats_of(1)
    keys, queue = keys_with(seats), Queue()
    calls = [Call(number, key=number % 2) for number in range(6)]
    for call in calls:
        assert keys.submitted(call, queue, FULL) is None
    for left, call in ((5, calls[2]), (5, calls[2]), (4, calls[5])):  # the second time it waits no more
        keys.remove(call, queue)
        assert queue.count == left
    keys.remove(Call(key="unknown"), queue)
    assert queue.count == 4
    order = []
    while (taken := keys.take(queue, seat)) is not None:
        order.append(taken.number)
    assert order == [0, 1, 4, 3]
    assert queue.count == 0


def test_keys_whose_only_call_was_removed_are_dropped() -> None:
    keys, queue = keys_with(seats_of(1)), Queue()
    for name in range(10_000):
        call = Call()
        wait(keys, name, call, queue)
        keys.remove(call, queue)
    assert len(keys._keys) <= KEPT


def test_keys_leave_a_worker_that_rests_and_come_back() -> None:
    first, second = seats_of(2)
    keys, queue, waiting = keys_with([first, second]), Queue(), Call()
    held, other, last = [name for name in range(50) if keys._home(name) is second][:3]
    assert entered(keys, held, queue) is second
    assert wait(keys, other, waiting, queue)
    assert list(keys.seated([first], [second])) == [queue]
    assert keys.take(queue, first) is waiting
    assert entered(keys, held, queue) is None  # the other call of its key runs there
    assert not keys.is_taken(held)
    assert list(keys.seated([first, second])) == [queue]
    assert keys.take(queue, second) is not None
    assert entered(keys, last, queue) is second
    assert list(keys.seated([first])) == []  # it has rested and is asked to end
    assert keys.is_taken(held)


@pytest.mark.parametrize("limit", [None, 2])
def test_a_key_that_waits_for_a_worker_that_rests_waits_no_longer_than_that(limit: int | None) -> None:
    """Whatever ends meanwhile: a lane that is not listed when the worker goes on would wait for ever."""
    for ends_while_it_rests, ends_later in ((0, 0), (1, 0), (1, 1), (2, 0)):
        first, second = seats_of(2)
        keys, queue = keys_with([first, second], limit), Queue()
        name = next(name for name in range(50) if keys._home(name) is second)
        running = [Call(key=name) for _ in range(2)]
        assert [keys.submitted(call, queue, ROOM) for call in running] == [second, second]
        list(keys.seated([first], [second]))
        waiting = [Call(key=name) for _ in range(3)]
        assert [keys.submitted(call, queue, ROOM) for call in waiting] == [None] * 3
        for _ in range(ends_while_it_rests):
            list(keys.ended(running.pop()))
        if running:
            assert keys.take(queue, first) is keys.take(queue, second) is None
        list(keys.seated([first, second]))
        while not keys.is_settled():
            list(keys.settle())
        for _ in range(ends_later):
            list(keys.ended(running.pop()))
        ended: list[Call | None] = []
        while len(ended) < 3:
            call = keys.take(queue, second)
            if call is None:
                list(keys.ended(running.pop()))
            else:
                ended.append(call)
                list(keys.ended(call))
        assert ended == waiting
