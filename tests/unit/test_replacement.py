"""Replacement: when a slot gets another worker. After early deaths: at once, then 0.1 · 2ⁿ up to 5 s, then never."""

from dataclasses import dataclass

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from percore._common.errors import IllegalEvent
from percore._scheduler.phase import Replaces
from percore._scheduler.replacement import (
    LASTING,
    LIMIT,
    LONGEST_DELAY,
    Act,
    Decision,
    Occupancy,
    Renewal,
    Replacement,
    RestartBudget,
    has_lasted,
)
from tests.counts import times

DELAYS = [0.0, 0.1, 0.2, 0.4, 0.8, 1.6, 3.2, 5.0, 5.0]


def test_ten_deaths_in_a_row() -> None:
    budget = RestartBudget()
    assert [budget.died() for _ in range(LIMIT - 1)] == pytest.approx(DELAYS)
    assert budget.died() is None
    assert budget.died() is None


def test_ten_it_is() -> None:
    assert LIMIT == 10


def test_a_ready_worker_has_lasted_after_a_minute() -> None:
    assert has_lasted(was_ready=True, age=LASTING)
    assert not has_lasted(was_ready=True, age=LASTING - 1)
    assert not has_lasted(was_ready=False, age=LASTING)


def test_a_begun_call_forgives_everything() -> None:
    budget = RestartBudget()
    for _ in range(LIMIT - 1):
        assert budget.died() is not None
    budget.began()
    assert [budget.died() for _ in range(LIMIT - 1)] == pytest.approx(DELAYS)
    assert budget.died() is None


@given(st.lists(st.booleans(), max_size=60))
def test_only_deaths_in_a_row_count(story: list[bool]) -> None:
    budget, row = RestartBudget(), 0
    for began in story:
        if began:
            budget.began()
            row = 0
            continue
        row += 1
        delay = budget.died()
        assert (delay is None) == (row >= LIMIT)
        assert budget.deaths == row
        if delay is not None:
            assert delay == pytest.approx(DELAYS[row - 1])


# A slot and its workers


@dataclass(eq=False)
class Worker:
    is_ready: bool = False
    is_spent: bool = False
    is_done: bool = False


ALL, SPENT, NONE = Replaces.ALL, Replaces.SPENT, Replaces.NONE


def served(*, is_ready: bool = True, is_spent: bool = False) -> tuple[Replacement[Worker], Worker]:
    slot: Replacement[Worker] = Replacement()
    worker = Worker(is_ready, is_spent)
    slot.started(worker)
    return slot, worker


def followed(*, is_spent: bool = False) -> tuple[Replacement[Worker], Worker, Worker]:
    slot, worker = served(is_spent=is_spent)
    following = Worker()
    slot.started(following)
    return slot, worker, following


@pytest.mark.parametrize(
    ("rule", "began", "is_first", "decision"),
    [
        (ALL, True, False, Decision(Act.START)),
        (ALL, False, False, Decision(Act.START_LATER, 0.0)),
        (SPENT, True, False, Decision(Act.NOTHING)),
        (NONE, True, False, Decision(Act.NOTHING)),
        (NONE, False, False, Decision(Act.NOTHING)),
        (ALL, True, True, Decision(Act.START)),  # it was asked to end while it started
        (ALL, False, True, Decision(Act.FAIL_START)),
        (SPENT, True, True, Decision(Act.FAIL_START)),
    ],
)
def test_a_death_without_a_next_worker(rule: Replaces, began: bool, is_first: bool, decision: Decision[Worker]) -> None:
    slot, worker = served()
    assert slot.died(worker, rule, began=began, is_first=is_first) == decision
    assert slot.current is None
    assert slot.restarts == (decision.act in {Act.START, Act.START_LATER})


@pytest.mark.parametrize("rule", list(Replaces))
def test_the_next_worker_takes_over_from_a_dead_one(rule: Replaces) -> None:
    slot, worker, following = followed()
    assert slot.died(worker, rule, began=False, is_first=False).act is Act.TAKE_OVER
    assert (slot.current, slot.next, slot.state) == (following, None, Occupancy.SERVED)
    assert slot.died(worker, rule, began=False, is_first=False).act is Act.NOTHING  # it is no worker of this slot any more


def test_a_worker_that_is_asked_to_end_is_replaced_at_once() -> None:
    slot, worker = served()
    assert slot.asked_to_end(worker, SPENT) == slot.asked_to_end(worker, NONE) == Decision(Act.NOTHING)
    assert slot.asked_to_end(worker, ALL).act is Act.START
    slot.started(Worker())
    assert slot.asked_to_end(worker, ALL).act is Act.NOTHING  # it is asked again
    assert slot.died(worker, ALL, began=True, is_first=False).act is Act.NOTHING
    assert slot.state is Occupancy.SERVED


@pytest.mark.parametrize("rule", [ALL, SPENT, NONE])  # also in a close, where calls may wait for a worker
def test_the_next_worker_takes_over_from_one_that_is_asked_to_end(rule: Replaces) -> None:
    slot, worker, following = followed()
    assert slot.asked_to_end(worker, rule).act is Act.TAKE_OVER
    assert (slot.current, slot.state) == (following, Occupancy.SERVED)


def test_a_replacement_starts_ahead_of_time_and_takes_over_once_the_worker_may_begin_no_more() -> None:
    slot, worker = served()
    assert slot.low(ALL, has_waiting=False).act is Act.START
    following = Worker()
    slot.started(following)
    assert slot.low(ALL, has_waiting=False).act is Act.NOTHING
    following.is_ready = True
    assert slot.ready(following).act is Act.NOTHING
    assert slot.low(ALL, has_waiting=False).act is Act.NOTHING
    worker.is_spent = True
    assert slot.low(ALL, has_waiting=False).act is Act.TAKE_OVER
    assert slot.current is following


@pytest.mark.parametrize(("is_ready", "is_spent"), [(True, True), (False, False)])
def test_a_next_worker_that_gets_ready_takes_over_from_one_that_begins_no_calls(is_ready: bool, is_spent: bool) -> None:
    slot, worker, following = followed()
    worker.is_ready, worker.is_spent, following.is_ready = is_ready, is_spent, True
    assert slot.ready(worker).act is Act.NOTHING
    assert slot.ready(following).act is Act.TAKE_OVER
    assert slot.current is following


@pytest.mark.parametrize(
    ("rule", "is_spent", "has_waiting", "act"),
    [
        (SPENT, True, True, Act.START),
        (SPENT, True, False, Act.NOTHING),
        (SPENT, False, True, Act.NOTHING),
        (NONE, True, True, Act.NOTHING),
    ],
)
def test_a_closing_runner_replaces_spent_workers_while_calls_wait(
    rule: Replaces, is_spent: bool, has_waiting: bool, act: Act
) -> None:
    slot, _ = served(is_spent=is_spent)
    assert slot.low(rule, has_waiting=has_waiting).act is act


@pytest.mark.parametrize("rule", list(Replaces))
@pytest.mark.parametrize("is_spent", [False, True])
def test_a_start_that_failed_is_repeated_as_far_as_the_runner_replaces(rule: Replaces, is_spent: bool) -> None:
    """All workers, those that are spent while calls wait, or none."""
    is_allowed = rule is ALL or (rule is SPENT and is_spent)
    slot, worker, following = followed(is_spent=is_spent)
    for is_dead in (True, False):
        decision = (
            slot.died(following, rule, began=False, is_first=False) if is_dead else slot.could_not_start(rule, is_first=False)
        )
        assert decision.act is (Act.START_LATER if is_allowed else Act.NOTHING)
        assert slot.is_delayed is is_allowed
        assert slot.current is worker
        if is_allowed:
            slot.forget_delay()
    empty: Replacement[Worker] = Replacement()
    assert empty.could_not_start(rule, is_first=False).act is (Act.START_LATER if rule is ALL else Act.NOTHING)


def test_nothing_is_put_off_by_default() -> None:
    assert [Decision[Worker](act) for act in Act] == [Decision[Worker](act, 0.0, None) for act in Act]


def test_a_place_has_one_start_scheduled_at_most() -> None:
    slot, worker = served(is_spent=True)
    assert slot.low(ALL, has_waiting=True).act is Act.START
    assert slot.could_not_start(ALL, is_first=False) == Decision(Act.START_LATER, 0.0)
    assert slot.low(ALL, has_waiting=True).act is Act.NOTHING
    assert slot.could_not_start(ALL, is_first=False).act is Act.NOTHING
    assert slot.is_delayed
    assert slot.asked_to_end(worker, ALL).act is Act.START  # at once, in place of the delayed start
    assert not slot.is_delayed


def test_a_death_before_the_first_call_counts_for_the_next_worker_too() -> None:
    slot, _, following = followed()
    assert slot.died(following, ALL, began=False, is_first=False) == Decision(Act.START_LATER, 0.0)
    slot.forget_delay()
    assert slot.could_not_start(ALL, is_first=False) == Decision(Act.START_LATER, 0.1)


@pytest.mark.parametrize("is_spent", [False, True])
def test_a_place_whose_next_workers_die_is_given_up_only_if_its_worker_is_spent(is_spent: bool) -> None:
    slot, worker = served(is_spent=is_spent)
    for _ in range(LIMIT - 1):
        assert slot.could_not_start(ALL, is_first=False).act is Act.START_LATER
        slot.forget_delay()
    last = slot.could_not_start(ALL, is_first=False)
    if is_spent:
        assert (last.act, slot.current, slot.state) == (Act.GIVE_UP, None, Occupancy.FAILED)
    else:
        assert (last, slot.current) == (Decision(Act.START_LATER, LONGEST_DELAY), worker)
        assert slot.budget.deaths == 0


@pytest.mark.parametrize("change", ["started", "asked_to_end"])
def test_a_place_that_was_given_up_gets_no_worker(change: str) -> None:
    slot, worker = served()
    slot.budget.deaths = LIMIT
    assert slot.died(worker, ALL, began=False, is_first=False).act is Act.GIVE_UP
    if change == "started":
        with pytest.raises(IllegalEvent, match="started in a slot that is failed"):
            slot.started(Worker())
    else:
        assert slot.asked_to_end(worker, ALL).act is Act.NOTHING
    slot.forget_delay()
    assert slot.state is Occupancy.FAILED


# Places


def test_a_slot_without_a_place_waits_for_one() -> None:
    slot: Replacement[Worker] = Replacement()
    assert slot.no_place().act is Act.NOTHING
    assert slot.lacks_place
    assert slot.could_not_start(ALL, is_first=False).act is Act.NOTHING
    assert slot.has_place(ALL, has_waiting=False).act is Act.START
    assert not slot.lacks_place
    assert slot.has_place(ALL, has_waiting=False).act is Act.NOTHING
    slot.started(Worker())


def test_a_worker_that_is_done_gives_its_place_to_its_replacement() -> None:
    slot, worker = served()
    assert slot.low(ALL, has_waiting=False).act is Act.START
    assert slot.no_place().act is Act.NOTHING
    worker.is_spent = True
    assert slot.low(ALL, has_waiting=False).act is Act.NOTHING
    worker.is_done = True
    assert slot.low(ALL, has_waiting=False).act is Act.TAKE_OVER
    assert (slot.current, slot.state) == (None, Occupancy.WAITING)
    assert slot.died(worker, ALL, began=True, is_first=False).act is Act.NOTHING
    assert slot.has_place(ALL, has_waiting=False).act is Act.START


def test_a_death_asks_again_for_a_place() -> None:
    slot, worker = served()
    assert slot.no_place().act is Act.NOTHING
    assert slot.died(worker, ALL, began=True, is_first=False).act is Act.START
    assert slot.no_place().act is Act.NOTHING
    assert slot.state is Occupancy.WAITING


@pytest.mark.parametrize(
    ("rule", "is_served", "has_waiting", "act"),
    [
        (SPENT, False, True, Act.START),
        (SPENT, False, False, Act.NOTHING),
        (SPENT, True, True, Act.NOTHING),
        (NONE, False, True, Act.NOTHING),
    ],
)
def test_a_closing_runner_takes_a_place_only_for_calls_that_wait(
    rule: Replaces, is_served: bool, has_waiting: bool, act: Act
) -> None:
    slot: Replacement[Worker] = served()[0] if is_served else Replacement()
    slot.no_place()
    assert slot.has_place(rule, has_waiting=has_waiting).act is act
    assert not slot.lacks_place


# Renewal and removal


def test_a_renewed_worker_is_replaced_by_one_that_is_ready() -> None:
    slot, worker = served()
    assert slot.renew() == Decision(Act.START)
    following = Worker()
    slot.started(following)
    assert slot.renew().act is Act.NOTHING  # twice is as once
    following.is_ready = True
    assert slot.ready(following) == Decision(Act.TAKE_OVER, retired=worker)
    assert (slot.current, slot.restarts) == (following, 1)
    assert slot.low(ALL, has_waiting=False).act is Act.START  # and the next one waits for its turn again
    after = Worker(is_ready=True)
    slot.started(after)
    assert slot.ready(after).act is Act.NOTHING


def test_a_renewal_lets_a_next_worker_that_is_ready_take_over_now() -> None:
    slot, worker, following = followed()
    following.is_ready = True
    assert slot.renew() == Decision(Act.TAKE_OVER, retired=worker)


def test_a_renewal_that_fails_leaves_the_current_worker_and_tries_nothing_again() -> None:
    slot, worker = served()
    assert slot.renew().act is Act.START
    following = Worker()
    slot.started(following)
    assert slot.died(following, ALL, began=False, is_first=False).act is Act.NOTHING
    assert slot.renew().act is Act.START
    assert slot.could_not_start(ALL, is_first=False).act is Act.NOTHING
    assert (slot.current, slot.state, slot.budget.deaths) == (worker, Occupancy.SERVED, 0)


def test_a_renewal_that_fails_after_its_worker_died_is_repeated_like_any_start() -> None:
    slot, worker, following = followed()
    assert slot.renew().act is Act.NOTHING
    assert slot.died(worker, ALL, began=True, is_first=False).act is Act.TAKE_OVER
    assert slot.died(following, ALL, began=False, is_first=False) == Decision(Act.START_LATER, 0.0)
    assert slot.renew() == Decision(Act.START)  # at once
    assert not slot.is_delayed


def test_a_worker_that_is_low_is_replaced_once() -> None:
    slot, _ = served()
    assert slot.low(ALL, has_waiting=False).act is Act.START
    assert slot.restarts == 1


def test_a_renewal_counts_as_a_replacement_where_none_was_counted() -> None:
    added: Replacement[Worker] = Replacement()
    assert added.renew().act is Act.START
    assert added.restarts == 0, "its first worker replaces nobody"
    slot, worker = served()
    assert slot.died(worker, ALL, began=False, is_first=False).act is Act.START_LATER
    assert slot.restarts == 1
    assert slot.renew().act is Act.START
    assert slot.restarts == 1, "the delayed start was counted"


def test_a_renewal_waits_for_a_place() -> None:
    slot, worker = served()
    assert slot.renew().act is Act.START
    assert slot.no_place().act is Act.NOTHING
    assert slot.renew().act is Act.NOTHING
    assert slot.has_place(ALL, has_waiting=False).act is Act.START
    following = Worker(is_ready=True)
    slot.started(following)
    assert slot.ready(following) == Decision(Act.TAKE_OVER, retired=worker)


def test_a_renewal_that_waits_for_a_place_for_too_long_is_given_up() -> None:
    slot, first = served()
    assert slot.renew().act is Act.START
    assert slot.no_place().act is Act.NOTHING
    slot.stay()
    assert (slot.current, slot.restarts, slot.renewal) == (first, 0, Renewal.NONE)
    assert slot.has_place(ALL, has_waiting=True).act is Act.NOTHING
    slot.stay()
    assert slot.renew().act is Act.START, "another one may be asked for"


def test_a_slot_that_was_given_up_gets_one_more_try() -> None:
    slot, worker = served()
    slot.budget.deaths = LIMIT
    assert slot.died(worker, ALL, began=False, is_first=False).act is Act.GIVE_UP
    assert slot.renew().act is Act.START
    following = Worker()
    slot.started(following)
    assert slot.died(following, ALL, began=False, is_first=False).act is Act.GIVE_UP
    assert slot.state is Occupancy.FAILED
    assert slot.renew().act is Act.START
    following = Worker(is_ready=True)
    slot.started(following)
    assert slot.ready(following).act is Act.NOTHING
    assert slot.died(following, ALL, began=True, is_first=False).act is Act.START  # as any worker


@pytest.mark.parametrize("has_started", [False, True])
def test_the_first_worker_of_an_added_slot_is_tried_once(has_started: bool) -> None:
    slot: Replacement[Worker] = Replacement()
    assert slot.renew().act is Act.START
    if has_started:
        worker = Worker()
        slot.started(worker)
        assert slot.died(worker, ALL, began=False, is_first=False).act is Act.NOTHING
    else:
        assert slot.could_not_start(ALL, is_first=False).act is Act.NOTHING
    assert (slot.state, slot.current) == (Occupancy.EMPTY, None)


def test_once_an_added_slot_has_had_its_first_worker_further_ones_are_tried_again() -> None:
    slot: Replacement[Worker] = Replacement()
    assert slot.renew().act is Act.START
    worker = Worker()
    slot.started(worker)
    worker.is_ready = True
    assert slot.ready(worker).act is Act.NOTHING
    assert slot.died(worker, ALL, began=False, is_first=False) == Decision(Act.START_LATER, 0.0)


def test_a_removed_slot_gives_its_workers_back_and_starts_anew() -> None:
    slot, worker, following = followed()
    assert slot.remove() == [worker, following]
    for dead in (worker, following):
        assert slot.died(dead, ALL, began=True, is_first=False).act is Act.NOTHING
    assert slot.remove() == []
    assert slot.renew().act is Act.START


CAN = st.sampled_from(["start", "fail", "no place"])


class Walk(RuleBasedStateMachine):
    """A pool that carries out what is decided about one slot, with workers that start, get ready, are spent and end."""

    def __init__(self) -> None:
        super().__init__()
        self.slot: Replacement[Worker] = Replacement()
        self.rule = Replaces.ALL
        self.alive: list[Worker] = []
        self.has_timer = False
        self.is_first = True
        self.has_failed_start = False
        self.is_used = True
        self.start(can="start")

    def start(self, *, can: str) -> None:
        self.slot.forget_delay()
        self.has_timer = False
        if can == "start":
            worker = Worker()
            self.slot.started(worker)
            self.alive.append(worker)
        elif can == "no place":
            self.carry_out(self.slot.no_place(), can="start")
        else:
            self.carry_out(self.slot.could_not_start(self.rule, is_first=self.is_first), can="start")

    def carry_out(self, decision: Decision[Worker], *, can: str) -> None:
        self.has_timer &= self.slot.is_delayed
        if decision.act is Act.START:
            self.start(can=can)
        elif decision.act is Act.START_LATER:
            self.has_timer = True  # in place of an earlier one
        elif decision.act is Act.FAIL_START:
            self.has_failed_start = True
        if decision.retired is not None:
            decision.retired.is_ready = False  # it drains

    @precondition(lambda self: self.alive)
    @rule(which=st.integers(0, 100))
    def ready(self, which: int) -> None:
        worker = self.alive[which % len(self.alive)]
        if worker in {self.slot.current, self.slot.next} and not worker.is_ready:
            worker.is_ready = True
            self.is_first = False
            self.carry_out(self.slot.ready(worker), can="start")

    @precondition(lambda self: self.slot.current is not None and self.slot.current.is_ready)
    @rule(is_spent=st.booleans(), has_waiting=st.booleans(), can=CAN)
    def low(self, is_spent: bool, has_waiting: bool, can: str) -> None:
        current = self.slot.current
        assert current is not None
        current.is_done |= current.is_spent and is_spent
        current.is_spent |= is_spent
        self.carry_out(self.slot.low(self.rule, has_waiting=has_waiting), can=can)

    @precondition(lambda self: self.alive)
    @rule(which=st.integers(0, 100), can=CAN)
    def asked_to_end(self, which: int, can: str) -> None:
        worker = self.alive[which % len(self.alive)]
        worker.is_ready = False
        is_trial = self.slot.renewal is Renewal.FIRST
        self.carry_out(self.slot.asked_to_end(worker, self.rule), can=can)
        self.is_used &= not (is_trial and self.slot.state is Occupancy.EMPTY)  # a resize that fails removes the slot

    @precondition(lambda self: self.alive)
    @rule(which=st.integers(0, 100), began=st.booleans(), can=CAN)
    def dies(self, which: int, began: bool, can: str) -> None:
        worker = self.alive.pop(which % len(self.alive))
        worker.is_ready = False
        if began:
            self.slot.budget.began()
        is_trial = self.slot.renewal is Renewal.FIRST
        self.carry_out(self.slot.died(worker, self.rule, began=began, is_first=self.is_first), can=can)
        self.is_used &= not (is_trial and self.slot.state is Occupancy.EMPTY)

    @precondition(lambda self: self.has_timer)
    @rule(can=CAN)
    def delay_is_over(self, can: str) -> None:
        self.start(can=can)

    @rule(has_waiting=st.booleans(), can=CAN)
    def has_place(self, has_waiting: bool, can: str) -> None:
        is_trial = self.slot.renewal is Renewal.FIRST
        self.carry_out(self.slot.has_place(self.rule, has_waiting=has_waiting), can=can)
        self.is_used &= not (is_trial and self.slot.state is Occupancy.EMPTY)

    @precondition(lambda self: self.rule is ALL and not self.is_first)
    @rule(can=CAN)
    def renew(self, can: str) -> None:
        self.is_used = True
        self.carry_out(self.slot.renew(), can=can)
        self.is_used = self.slot.state is not Occupancy.EMPTY  # the first worker of an added slot could not be started

    @rule()
    def stay(self) -> None:
        self.slot.stay()
        assert self.slot.restarts >= 0

    @precondition(lambda self: not self.is_first)
    @rule()
    def remove(self) -> None:
        assert set(self.slot.remove()) <= set(self.alive)
        self.has_timer &= self.slot.is_delayed
        self.is_used = False

    @rule(rule=st.sampled_from([SPENT, NONE]))
    def closes(self, rule: Replaces) -> None:
        self.rule = rule if self.rule is not NONE else NONE

    @invariant()
    def has_a_worker_or_gets_one(self) -> None:
        slot = self.slot
        assert (
            slot.current is not None
            or self.has_timer
            or slot.lacks_place
            or slot.state is Occupancy.FAILED
            or self.rule is not ALL
            or self.has_failed_start
            or not self.is_used
        )
        assert self.has_timer == slot.is_delayed
        assert (slot.next is not None) == (slot.state is Occupancy.FOLLOWED)
        assert slot.current in {None, *self.alive}
        assert slot.next in {None, *self.alive}


TestWalk = Walk.TestCase
TestWalk.settings = settings(deadline=None, max_examples=times(60, 3000), stateful_step_count=40)
TestWalk.pytestmark = [pytest.mark.long]  # type: ignore[attr-defined]
