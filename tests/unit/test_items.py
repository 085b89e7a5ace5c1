"""The inputs of a map on their way: what a worker says of a batch, told to the map item by item, once each."""

from itertools import count
from types import SimpleNamespace
from typing import Any, cast

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from percore._calls.functions import Function
from percore._calls.items import Batch, BatchItem, Item, size_of
from percore._calls.policy import CallPlan, Policy
from percore._common.errors import RunnerClosed
from percore._protocol.messages import BrokenFrame, Kind
from percore._scheduler.batching import Run
from percore._scheduler.queues import Queue
from percore._transport.codec import pack_items, unpack_items
from tests.counts import times
from tests.strikes import Strike

START = 100


class Running:
    """A map: notes what its items tell."""

    def __init__(self) -> None:
        self.function = Function(len, Kind.THREAD)
        self.function.number = 7
        self.queue: Queue[Any, Any] = Queue(Kind.THREAD)
        self.store = cast("Any", SimpleNamespace(pack_items=pack_items))
        self.told: list[tuple[int, object]] = []
        self.arguments = self.sizes = 0
        self.withdrawn: list[object] = []
        self.policy = Policy(retries=1)

    @property
    def owner(self) -> "Running":
        return self

    def cancelled(self, call: Any) -> None:
        self.withdrawn.append(call)

    def ended(self, number: int, results: list[Any], arguments: int, size: int) -> None:
        self.told += enumerate(results, number)
        self.arguments += arguments
        self.sizes += size

    def broke(self, error: BaseException) -> None:
        raise error

    def failed(self, number: int, error: BaseException, arguments: int) -> None:
        self.told.append((number, error))
        self.arguments += arguments

    def plan(self) -> CallPlan:
        return CallPlan(self.policy)

    def runs_alone(self, item: Item) -> None:
        self.told.append((item.number, "alone"))

    def runs_on(self, item: Item) -> None:
        self.told.append((item.number, "runs on"))

    def left(self, batch: Batch) -> None:
        self.told.append((batch.run.start, "left"))


def batch_of(count: int, running: Running | None = None, *, is_bare: bool = False) -> Batch:
    """Each of its items carries its number: bare, or as a pickle of as many bytes."""
    bodies: list[Any] = [START + index if is_bare else b"x" * index for index in range(count)]
    batch = Batch(running or Running(), Run(START, bodies, is_bare, 16), None)
    batch.member = object()  # a worker holds it
    return batch


def told(batch: Batch) -> list[tuple[int, object]]:
    assert isinstance(batch.map, Running)
    return batch.map.told


class BatchMachine(RuleBasedStateMachine):
    """A worker that tells the truth about a batch, and sometimes not; compared with a list of what becomes of each item."""

    @initialize(count=st.integers(1, 12), is_bare=st.booleans())
    def start(self, count: int, is_bare: bool) -> None:
        self.running = Running()
        self.batch = batch_of(count, self.running, is_bare=is_bare)
        self.batch.call_id = 9
        self.is_bare = is_bare
        # Of each item: "waiting", then "late" where the loop awaits it, "ended", or "back".
        self.state = ["waiting"] * count
        self.wanted = count
        self.expected: list[tuple[int, object]] = []
        self.arguments = 0

    def places(self, *states: str) -> list[int]:
        return [index for index, state in enumerate(self.state) if state in states]

    def tell(self, index: int, result: object) -> None:
        self.state[index] = "ended"
        if index < self.wanted:
            self.expected.append((START + index, result))
            self.arguments += 0 if self.is_bare else index

    @precondition(lambda self: self.places("waiting"))
    @rule(count=st.integers(1, 5), skipped=st.integers(0, 3), has_failures=st.booleans())
    def values(self, count: int, skipped: int, has_failures: bool) -> None:
        """The thread has run some on, and then some whose results it tells."""
        waiting = self.places("waiting")
        late, ended = waiting[:skipped], waiting[skipped : skipped + count]
        if not ended:
            return
        for index in late:
            self.state[index] = "late"
        failures: dict[int, Exception] = {1: ValueError()} if has_failures and len(ended) > 1 else {}
        for place, index in enumerate(ended):
            self.tell(index, failures.get(place, index))
        self.batch.values(ended[0], list(ended), 0, failures)

    @precondition(lambda self: self.places("waiting", "late"))
    @rule(data=st.data(), is_error=st.booleans())
    def item(self, data: st.DataObject, is_error: bool) -> None:
        """One ends by itself: with an error, or when the loop has awaited it."""
        index = data.draw(st.sampled_from([*self.places("late"), *self.places("waiting")[:3]]))
        for earlier in self.places("waiting"):
            if earlier < index:
                self.state[earlier] = "late"
        item = self.batch.target(index)
        assert item.done() is (index >= self.wanted)
        outcome: object = ValueError() if is_error else index
        self.tell(index, outcome)
        if not item.done():
            if isinstance(outcome, ValueError):
                item.set_exception(outcome)
            else:
                item.set_result(outcome)
        item.leave(Holder())

    @rule(count=st.integers(0, 6))
    def give_back(self, count: int) -> None:
        back = self.places("waiting")[::-1][:count][::-1]
        run = self.batch.gave_back(len(back))
        still_wanted = [index for index in back if index < self.wanted]
        assert self.numbers(run) == still_wanted
        for index in back:
            self.state[index] = "back"
        if back:
            self.wanted = min(self.wanted, back[0])

    @rule(number=st.integers(START - 2, START + 14))
    def cancel(self, number: int) -> None:
        before = len(self.running.withdrawn)
        self.batch.cancel_from(number)
        wanted = max(0, number - START)
        assert len(self.running.withdrawn) - before == (wanted < self.wanted)
        self.wanted = min(self.wanted, wanted)

    @rule(data=st.data())
    def lie(self, data: st.DataObject) -> None:
        """What cannot be breaks the channel, and changes nothing."""
        begun = self.places("late", "ended")
        first_waiting = begun[-1] + 1 if begun else 0
        size = self.batch.size
        first = data.draw(st.integers(-2, size + 2))
        count = data.draw(st.integers(1, 4))
        if first < first_waiting or first + count > size:
            with pytest.raises(BrokenFrame):
                self.batch.values(first, [None] * count, 0, {})
        wrong = [index for index in range(-2, size + 3) if index not in self.places("waiting", "late")]
        with pytest.raises(BrokenFrame):
            self.batch.target(data.draw(st.sampled_from(wrong)))
        too_many = len(self.places("waiting")) + data.draw(st.integers(1, 3))
        for back in (too_many, -1):
            with pytest.raises(BrokenFrame):
                self.batch.gave_back(back)

    def numbers(self, run: Run | None) -> list[int]:
        """The items of a run, by their place in the batch."""
        if run is None:
            return []
        assert run.bodies == self.batch.run.bodies[run.start - START :][: len(run.bodies)]
        assert run.is_bare is self.is_bare
        return [run.start - START + place for place in range(len(run.bodies))]

    @invariant()
    def it_knows_what_is_outstanding(self) -> None:
        assert self.batch.outstanding == len(self.places("waiting", "late"))
        assert self.batch.size == len(self.state) - len(self.places("back"))
        assert self.batch.done() is (self.wanted == 0)

    @invariant()
    def each_outcome_is_told_once(self) -> None:
        assert self.running.told == self.expected
        assert self.running.arguments == self.arguments

    @invariant()
    def it_knows_what_a_death_leaves(self) -> None:
        waiting, late = self.places("waiting"), self.places("late")
        first = waiting[0] if waiting else self.batch.size
        for begun in range(first, self.batch.size + 1):
            assert self.batch.began(begun) == [*late, *range(first, begun)]
            assert self.numbers(self.batch.rest(begun)) == [index for index in waiting if begun <= index < self.wanted]

    @rule()
    def fail(self) -> None:
        """What has not ended ends with an error, whatever the worker may yet say of it."""
        error = OSError()
        open_items = [index for index in self.places("late", "waiting") if index < self.wanted]
        self.expected += [(START + index, error) for index in sorted(open_items)]
        self.arguments += 0 if self.is_bare else sum(open_items)
        self.wanted = 0
        self.batch.refuse(lambda: error)


TestBatch = BatchMachine.TestCase
TestBatch.settings = settings(max_examples=times(40, 3000), stateful_step_count=20, deadline=None)
TestBatch.pytestmark = [pytest.mark.long]  # type: ignore[attr-defined]


# Batches


@pytest.mark.parametrize("is_bare", [False, True])
def test_the_worker_is_told_the_function_and_the_bodies(is_bare: bool) -> None:
    batch = batch_of(3, is_bare=is_bare)
    assert unpack_items(cast("bytes", batch.message())) == (7, [100, 101, 102] if is_bare else [b"", b"x", b"xx"], is_bare)


def test_results_are_told_all_at_once() -> None:
    calls: list[tuple[Any, ...]] = []

    class Listening(Running):
        def ended(self, *told: Any) -> None:
            calls.append(told)

    batch = batch_of(4, Listening())
    batch.values(1, ["a", "b"], 0, {})
    assert calls == [(START + 1, ["a", "b"], 1 + 2, 2)]


def test_p6_results_that_an_interrupt_keeps_from_the_map_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """They count as ended, so the death of their worker would not tell the map of them, and it would wait for ever."""

    def interrupted(*_: object) -> int:
        raise KeyboardInterrupt

    broken: list[BaseException] = []
    running = Running()
    monkeypatch.setattr(running, "broke", broken.append, raising=False)
    monkeypatch.setattr(Batch, "_arguments", interrupted)
    with pytest.raises(KeyboardInterrupt):
        batch_of(4, running).values(0, [1, 2], 0, {})
    assert [type(error) for error in broken] == [KeyboardInterrupt]


@pytest.mark.parametrize(
    ("results", "pickled", "size"),
    [([1, 2, 3], 0, 0), (["ab", "c", ""], 0, 3), ([b"ab", b"c", b""], 0, 3), ([[1], 2, 3], 40, 40), (["ab", 1, None], 0, 2)],
)
def test_results_are_weighed(results: list[Any], pickled: int, size: int) -> None:
    batch = batch_of(3)
    batch.values(0, results, pickled, {})
    assert isinstance(batch.map, Running)
    assert batch.map.sizes == size


def test_an_empty_message_of_results_is_nothing() -> None:
    batch = batch_of(2)
    batch.values(0, [], 0, {})
    assert (told(batch), batch.outstanding) == ([], 2)


def test_bare_scalars_are_no_pickled_arguments() -> None:
    # An int that is a body is a slot; one that is an argument is itself.
    batch = batch_of(3, is_bare=True)
    batch.values(0, [1, 2, 3], 0, {})
    assert isinstance(batch.map, Running)
    assert batch.map.arguments == 0


@pytest.mark.parametrize(("is_bare", "body"), [(False, b"xx"), (True, (102,))])
def test_an_item_is_attempted_again_alone(is_bare: bool, body: object) -> None:
    batch = batch_of(4, is_bare=is_bare)
    found = batch.target(2)
    again = found.renewed()
    assert (again.number, again.body, again.plan) == (START + 2, body, found.plan)
    assert (again.function, again.queue, again.kind, again.key) == (batch.function, batch.queue, Kind.THREAD, None)
    assert not again.done()
    again.set_result("at last")
    assert told(batch) == [(START + 2, "at last")]
    assert isinstance(batch.map, Running)
    assert batch.map.arguments == (0 if is_bare else 2)


def test_an_item_of_a_batch_ends_in_every_way() -> None:
    batch = batch_of(4)
    error = ValueError()
    batch.target(0).set_result(1)
    batch.target(1).deliver([2], 30)
    batch.target(2).set_exception(error)
    batch.target(3).cut_off()
    assert told(batch)[:3] == [(START, 1), (START + 1, [2]), (START + 2, error)]
    assert isinstance(told(batch)[3][1], RunnerClosed)
    assert isinstance(batch.map, Running)
    assert (batch.map.sizes, batch.map.arguments) == (30, 1 + 2 + 3)


def test_a_batch_is_refused_each_item_with_an_error_of_its_own() -> None:
    batch = batch_of(3)
    batch.values(0, [1], 0, {})
    for _ in range(2):
        batch.refuse(lambda: RunnerClosed("closed"))
    assert batch.done()
    assert [number for number, _ in told(batch)] == [START, START + 1, START + 2]
    errors = [error for _, error in told(batch)[1:]]
    assert all(isinstance(error, RunnerClosed) for error in errors)
    assert errors[0] is not errors[1]


def test_an_item_has_the_plan_of_a_call_that_was_not_attempted() -> None:
    found = batch_of(1).target(0)
    assert isinstance(found, BatchItem)
    assert found.plan is not None
    assert (found.plan.failed, found.plan.policy.retries) == (0, 1)


class Holder:
    """A worker that holds batches, as their items see it."""

    def __init__(self) -> None:
        self.shrunk = 0
        self.taken: list[int] = []

    def shrink(self, items: int) -> None:
        self.shrunk += items

    def take(self, call_id: int) -> None:
        self.taken.append(call_id)


def test_the_last_item_to_leave_frees_the_place_of_the_batch() -> None:
    batch, holder = batch_of(3), Holder()
    batch.call_id = 9
    for index, taken in ((2, []), (0, []), (1, [9])):  # 0 and 1 are late, since the loop awaits them
        batch.target(index).leave(holder)
        assert (holder.shrunk, holder.taken) == (3 - batch.outstanding, taken)
        with pytest.raises(BrokenFrame, match="an outcome of item"):
            batch.target(index)


@pytest.mark.parametrize("is_error", [False, True], ids=["result", "error"])
def test_p6_an_item_of_a_batch_that_an_interrupt_keeps_in_it_has_one_outcome(
    is_error: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The death of its worker tells the map of each item that has begun and not ended."""

    def interrupt() -> None:
        raise KeyboardInterrupt

    places = []
    for at in count():
        running, broken = Running(), []  # type: tuple[Running, list[BaseException]]
        monkeypatch.setattr(running, "broke", broken.append)
        batch, strike = batch_of(3, running), Strike(at, lambda code: "/percore/" in code.co_filename, interrupt)
        item, holder = batch.target(1), Holder()
        try:
            with strike.on():
                item.set_exception(ValueError()) if is_error else item.set_result(1)
                item.leave(holder)
        except KeyboardInterrupt:
            ended = [number for number, _ in running.told]
            ended += [START + index for index in batch.began(3)]  # what the death tells of
            assert len(ended) == len(set(ended)), strike.name
            assert broken or START + 1 in ended, strike.name
        if not strike.name:
            break
        places.append(strike.name)
    assert len(places) > 4, places
    assert not broken


def test_a_result_that_comes_late_for_a_cut_off_item_is_dropped() -> None:
    batch = batch_of(3)
    batch.cut_off()
    told_before = list(told(batch))
    assert [type(error) for _, error in told_before] == [RunnerClosed] * 3
    assert batch.target(1).done()
    batch.values(0, [1, 2, 3], 0, {2: ValueError()})
    assert (told(batch), batch.done(), batch.outstanding, batch.rest(0)) == (told_before, True, 0, None)


def test_a_batch_that_comes_back_as_a_whole_leaves_nothing_behind() -> None:
    batch = batch_of(3)
    back = batch.gave_back(3)
    assert back == batch.run
    assert (batch.size, batch.outstanding, batch.done(), batch.began(3), batch.rest(0)) == (0, 0, True, [], None)
    batch.refuse(OSError)
    assert told(batch) == []


def test_encoded_bodies_are_split_with_their_items() -> None:
    run = Run(START, [1, 2, 3, 4], True, 5, b"i0001i0002i0003i0004")
    batch = Batch(Running(), run, None)
    batch.cancel_from(START + 3)
    assert batch.gave_back(2) == Run(START + 2, [3], True, 5, b"i0003")  # nobody wants the fourth
    assert batch.rest(1) == Run(START + 1, [2], True, 5, b"i0002")


def test_a_batch_that_no_worker_holds_asks_nobody_to_cancel_items() -> None:
    batch = batch_of(3)
    batch.member = None
    batch.cancel_from(START + 1)
    batch.cancel_from(START + 2)  # wider than before: nothing
    assert isinstance(batch.map, Running)
    assert (batch.map.withdrawn, batch.wanted, batch.done()) == ([], 1, False)


def test_an_outcome_of_a_batch_as_a_whole_is_none() -> None:
    batch = batch_of(2)
    batch.call_id = 9
    with pytest.raises(BrokenFrame, match="a result of batch 9 as a whole"):
        batch.set_result(1)
    with pytest.raises(BrokenFrame, match="a result of batch 9 as a whole"):
        batch.deliver([1], 8)
    with pytest.raises(OSError, match="percore's own"):  # this map raises it
        batch.set_exception(OSError("percore's own"))
    assert (told(batch), batch.outstanding) == ([], 2)


# Items that go alone


def item_of(running: Running, body: Any = b"12345") -> Item:
    return Item(running, 3, body, size_of(body), None, "key")


@pytest.mark.parametrize(("value", "size"), [(7, 0), (None, 0), ("abc", 3), (b"abcd", 4)], ids=["int", "none", "str", "bytes"])
def test_an_item_ends_with_a_scalar(value: object, size: int) -> None:
    running = Running()
    item = item_of(running)
    assert (item.size, item.done(), item.key) == (1, False, "key")
    item.set_result(value)
    assert item.done()
    assert (running.told, running.arguments, running.sizes) == ([(3, value)], 5, size)


def test_an_item_ends_with_anything() -> None:
    running = Running()
    item = item_of(running)
    item.deliver([1], 50)
    assert (running.told, running.arguments, running.sizes, item.done()) == ([(3, [1])], 5, 50, True)


def test_an_item_fails() -> None:
    running = Running()
    item, error = item_of(running), ValueError()
    item.set_exception(error)
    assert (running.told, running.arguments, item.done()) == ([(3, error)], 5, True)


def test_an_item_is_cut_off() -> None:
    running = Running()
    item_of(running).cut_off()
    assert isinstance(running.told[0][1], RunnerClosed)


def test_a_cancelled_item_is_withdrawn_once_and_tells_nothing() -> None:
    running = Running()
    item = item_of(running)
    item.cancel()
    item.cancel()
    assert item.done()
    assert (running.withdrawn, running.told) == ([item], [])


def test_an_item_that_has_ended_is_not_withdrawn() -> None:
    running = Running()
    item = item_of(running)
    item.set_result(1)
    item.cancel()
    assert running.withdrawn == []


@pytest.mark.parametrize(
    ("body", "size"),
    [((1, "text"), 0), (b"", 0), (b"12345", 5)],
    ids=["scalars", "", "pickle"],
)
def test_the_bytes_of_a_body(body: object, size: int) -> None:
    assert size_of(body) == size
