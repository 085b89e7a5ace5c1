"""Replacement: when a slot of the pool gets another worker, when that worker takes over, and when the slot is given up.

    empty ──started──▶ served ──started──▶ followed
      ▲ │                ▲ │                 │
      │ └─▶ delayed      │ └─▶ served, delayed
      │ └─▶ waiting      │ └─▶ served, waiting
      └────── the current worker is gone, or is no longer used

| event                               | the slot gets another worker                                                   |
|-------------------------------------|--------------------------------------------------------------------------------|
| the current worker died             | at once if it had begun a call or has lasted, else after the budget's delay    |
| it was asked to end from outside    | at once                                                                        |
| it may begin few more calls         | ahead of time; the next worker takes over once the current one may begin none  |
| a worker could not start, or died before it took over | after the delay given by the budget                          |
| there was no place for a worker     | when the engine has one. A worker that is done ends before, to free its place |
| it is to be renewed                 | at once. The next worker takes over as soon as it is ready. Without a place    |
|                                     | for it within a time the current one goes on                                   |

In each row but the last, the next worker takes over at once if there is one. A slot has at most one start scheduled. During the
first start nothing is attempted twice, nor is a renewal. A runner that closes replaces workers only as far as its phase allows
(`Replaces`).

Invariant: a slot without a current worker has a start scheduled, waits for a place or was given up, or its runner is closing or has
failed to start, or it is not used: it was removed, or was added and its first worker could not start.
"""

from enum import Enum
from typing import Any, Final, Generic, NamedTuple, Protocol, TypeVar

from percore._common.errors import IllegalEvent
from percore._scheduler.phase import Replaces

LIMIT: Final = 10
"""Early deaths in a row after which a slot is given up."""

LASTING: Final = 60.0
"""Seconds after its start from which on the death of a ready worker is no early one, also if it had begun no call."""

_FIRST_DELAY: Final = 0.1
LONGEST_DELAY: Final = 5.0


class RestartBudget:
    """The number of early deaths in a row in one slot: those of workers that had begun no call and had not lasted.

    The first replacement starts at once, the next ones after 0.1 · 2ⁿ seconds, at most 5.
    """

    __slots__ = ("deaths",)

    def __init__(self) -> None:
        self.deaths = 0

    def began(self) -> None:
        """Reset the count, because the slot's worker has begun a call or has lasted."""
        self.deaths = 0

    def died(self) -> float | None:
        """Count an early death. Return the seconds until the replacement starts, or None if the slot is given up."""
        self.deaths += 1
        if self.deaths >= LIMIT:
            return None
        return 0.0 if self.deaths == 1 else min(LONGEST_DELAY, _FIRST_DELAY * 2.0 ** (self.deaths - 2))


def has_lasted(*, was_ready: bool, age: float) -> bool:
    """Whether a worker that died was ready and had run so long that its start and its imports are not to blame.

    `age`: seconds since it was started.
    """
    return was_ready and age >= LASTING


class Occupancy(Enum):
    """The states of a slot, as in the diagram above."""

    EMPTY = "empty"
    """It has no worker and gets none: the slot is not used, or the runner has not started, is closing, or has failed to start."""

    DELAYED = "delayed"
    """It has no worker. One starts after a delay."""

    SERVED = "served"
    SERVED_DELAYED = "served, delayed"
    """It has a worker. The next one starts after a delay."""

    WAITING = "waiting"
    """It has no worker. One starts when there is a place for it."""

    SERVED_WAITING = "served, waiting"
    """It has a worker. The next one starts when there is a place for it."""

    FOLLOWED = "followed"
    """It has a worker, and the next one starts or is ready."""

    FAILED = "failed"
    """It was given up."""


class Change(Enum):
    """A change of a slot's workers or starts."""

    STARTED = "started"
    LEFT = "left"
    """The current worker is gone, or no longer used."""

    NEXT_LEFT = "next left"
    DELAYED = "delayed"
    NO_PLACE = "no place"
    FORGOT = "forgot"
    """The delay or the wait for a place is over, or the start was dropped."""

    FAILED = "failed"
    REVIVED = "revived"
    """A slot that was given up is tried again, or is removed."""


_TABLE: Final[dict[Occupancy, dict[Change, Occupancy]]] = {
    Occupancy.EMPTY: {
        Change.STARTED: Occupancy.SERVED,
        Change.DELAYED: Occupancy.DELAYED,
        Change.NO_PLACE: Occupancy.WAITING,
        Change.FORGOT: Occupancy.EMPTY,
        Change.FAILED: Occupancy.FAILED,
    },
    Occupancy.DELAYED: {Change.FORGOT: Occupancy.EMPTY},
    Occupancy.WAITING: {Change.FORGOT: Occupancy.EMPTY},
    Occupancy.SERVED: {
        Change.STARTED: Occupancy.FOLLOWED,
        Change.LEFT: Occupancy.EMPTY,
        Change.DELAYED: Occupancy.SERVED_DELAYED,
        Change.NO_PLACE: Occupancy.SERVED_WAITING,
        Change.FORGOT: Occupancy.SERVED,
        Change.FAILED: Occupancy.FAILED,
    },
    Occupancy.SERVED_DELAYED: {Change.FORGOT: Occupancy.SERVED, Change.LEFT: Occupancy.DELAYED},
    Occupancy.SERVED_WAITING: {Change.FORGOT: Occupancy.SERVED, Change.LEFT: Occupancy.WAITING},
    Occupancy.FOLLOWED: {Change.LEFT: Occupancy.SERVED, Change.NEXT_LEFT: Occupancy.SERVED, Change.FORGOT: Occupancy.FOLLOWED},
    Occupancy.FAILED: {Change.FORGOT: Occupancy.FAILED, Change.REVIVED: Occupancy.EMPTY},
}


class Renewal(Enum):
    """What becomes of a renewal that fails: a worker could not be started, or died before it took over."""

    NONE = "none"
    """There is no renewal."""

    OF_WORKER = "of worker"
    """The current worker goes on, if there still is one."""

    OF_FAILED = "of failed"
    """The slot is given up again."""

    FIRST = "first"
    """The slot stays without a worker: it was added, and is removed again."""


class Serving(Protocol):
    """A worker, as its slot sees it."""

    @property
    def is_ready(self) -> bool: ...

    @property
    def is_spent(self) -> bool:
        """Whether it may begin no more calls."""

    @property
    def is_done(self) -> bool:
        """Whether it may begin no more calls and has none left."""


class Act(Enum):
    """An action of the pool."""

    NOTHING = "nothing"
    START = "start"
    START_LATER = "start later"
    """Start a worker after `Decision.delay` seconds, never at once."""

    TAKE_OVER = "take over"
    """The current worker is another one now, or none. It gets calls once it is ready."""

    GIVE_UP = "give up"
    """Give the slot up."""

    FAIL_START = "fail start"
    """The first start of the runner fails."""


W = TypeVar("W", bound=Serving)


class Decision(NamedTuple, Generic[W]):
    """The action that the pool has to carry out.

    Attributes:
        delay: seconds until then.
        retired: the worker that is the current one no more, and gets no more calls.
    """

    act: Act
    delay: float = 0.0
    retired: W | None = None


_NOTHING: Final = Decision[Any](Act.NOTHING)


class Replacement(Generic[W]):
    """The workers of one slot, and the decisions about the next one. The pool carries the decisions out at once."""

    def __init__(self) -> None:
        self.state = Occupancy.EMPTY
        self.current: W | None = None
        self.next: W | None = None
        """The replacement of the current worker. It starts, or is ready and takes over later."""
        self.budget = RestartBudget()
        self.restarts = 0
        """Workers replaced so far."""
        self.renewal = Renewal.NONE

    def _change(self, change: Change) -> None:
        following = _TABLE[self.state].get(change)
        if following is None:
            raise IllegalEvent(f"{change.value} in a slot that is {self.state.value}")
        self.state = following

    # Workers

    def started(self, worker: W) -> None:
        """A worker was started. It is the current one if the slot had none, else the next one."""
        self._change(Change.STARTED)
        if self.current is None:
            self.current = worker
        else:
            self.next = worker

    def ready(self, worker: W) -> Decision[W]:
        """The next worker is ready: it takes over, or waits until the current one may begin no more calls."""
        current = self.current
        if self.next is not worker:
            if self.state is Occupancy.SERVED:
                self.renewal = Renewal.NONE  # an added slot has its first worker
            return _NOTHING
        is_waiting = current is not None and current.is_ready and not current.is_spent
        return _NOTHING if is_waiting and self.renewal is Renewal.NONE else self._take_over()

    def _take_over(self) -> Decision[W]:
        self.renewal = Renewal.NONE
        self._change(Change.LEFT)
        retired, self.current, self.next = self.current, self.next, None
        return Decision(Act.TAKE_OVER, retired=retired)

    def low(self, rule: Replaces, *, has_waiting: bool) -> Decision[W]:
        """The current worker may begin few more calls, or none. `has_waiting`: whether calls wait for a worker."""
        current, following = self.current, self.next
        assert current is not None
        if self.state is Occupancy.FOLLOWED:
            assert following is not None
            return self._take_over() if following.is_ready and current.is_spent else _NOTHING
        if self.state is Occupancy.SERVED_WAITING:
            return self._make_place()
        if self.state is not Occupancy.SERVED:
            return _NOTHING
        if rule is Replaces.ALL or (rule is Replaces.SPENT and current.is_spent and has_waiting):
            self.restarts += 1
            return Decision(Act.START)
        return _NOTHING

    def renew(self) -> Decision[W]:
        """Give the slot another worker, which takes over as soon as it is ready. Twice is as once.

        A slot that was given up is tried again, and a delayed start begins now. Call it only while `Replaces.ALL` is the rule.
        """
        if self.state is Occupancy.FOLLOWED:
            self.renewal = Renewal.OF_WORKER
            return self._take_over() if self.next is not None and self.next.is_ready else _NOTHING
        if self.lacks_place:
            if self.current is not None:
                self.renewal = Renewal.OF_WORKER
            return _NOTHING
        was, is_delayed = self.state, self.is_delayed
        if was is Occupancy.FAILED:
            self._revive()
            self.renewal = Renewal.OF_FAILED
        else:
            self.renewal = Renewal.FIRST if was is Occupancy.EMPTY else Renewal.OF_WORKER
        self._change(Change.FORGOT)
        self.restarts += not (is_delayed or was is Occupancy.EMPTY)  # a delayed start is counted already
        return Decision(Act.START)

    def _revive(self) -> None:
        self._change(Change.REVIVED)
        self.budget.began()

    def remove(self) -> list[W]:
        """The slot is not used any more. Return its workers, which get no more calls."""
        if self.state is Occupancy.FAILED:
            self._revive()
        workers = [worker for worker in (self.current, self.next) if worker is not None]
        if self.next is not None:
            self._change(Change.NEXT_LEFT)
        if self.current is not None:
            self._change(Change.LEFT)
        self._change(Change.FORGOT)
        self.current = self.next = None
        self.renewal = Renewal.NONE
        self.budget.began()
        return workers

    def asked_to_end(self, worker: W, rule: Replaces) -> Decision[W]:
        """Something outside percore asked a worker to end, and it gets no more calls."""
        if worker is not self.current:
            return _NOTHING
        if self.state is Occupancy.FOLLOWED:
            return self._take_over()
        if rule is not Replaces.ALL:
            return _NOTHING
        self._leave()
        self.restarts += 1
        return Decision(Act.START)

    def _leave(self) -> None:
        self._change(Change.LEFT)
        self._change(Change.FORGOT)
        self.current = None

    def died(self, worker: W, rule: Replaces, *, began: bool, is_first: bool) -> Decision[W]:
        """A worker died.

        Args:
            worker: the dead worker.
            rule: which workers get a replacement now.
            began: whether it had begun a call, has lasted, or was asked to end.
            is_first: whether the runner is in its first start.
        """
        if worker is self.next:
            self._change(Change.NEXT_LEFT)
            self.next = None
            return self.could_not_start(rule, is_first=is_first)
        if worker is not self.current:
            return _NOTHING
        if self.state is Occupancy.FOLLOWED:
            return self._take_over()
        self._leave()
        if is_first and (rule is not Replaces.ALL or not began):  # no other worker gets ready for it
            return Decision(Act.FAIL_START)
        if rule is not Replaces.ALL:
            return _NOTHING
        self.restarts += 1
        return Decision(Act.START) if began else self.could_not_start(rule, is_first=is_first)

    def could_not_start(self, rule: Replaces, *, is_first: bool) -> Decision[W]:
        """A worker could not be started, or died before it took over."""
        renewal, self.renewal = self.renewal, Renewal.NONE
        if is_first:
            return Decision(Act.FAIL_START)
        if renewal is Renewal.FIRST or (renewal is Renewal.OF_WORKER and self.state is Occupancy.SERVED):
            return _NOTHING
        if renewal is Renewal.OF_FAILED:
            self._change(Change.FAILED)
            return Decision(Act.GIVE_UP)
        is_spent = self.current is not None and self.current.is_spent
        is_allowed = rule is Replaces.ALL or (rule is Replaces.SPENT and is_spent)
        if not is_allowed or self.state not in (Occupancy.EMPTY, Occupancy.SERVED):
            return _NOTHING
        delay = self.budget.died()
        if delay is None and self.state is Occupancy.SERVED and not is_spent:  # the current worker goes on; try later
            self.budget.began()
            delay = LONGEST_DELAY
        if delay is None:
            self._change(Change.FAILED)
            retired, self.current = self.current, None
            return Decision(Act.GIVE_UP, retired=retired)
        self._change(Change.DELAYED)
        return Decision(Act.START_LATER, delay)

    def no_place(self) -> Decision[W]:
        """There is no place for a worker yet, so none was started."""
        self._change(Change.NO_PLACE)
        return self._make_place()

    def _make_place(self) -> Decision[W]:
        """Give up a current worker that is done, because the next one may get its place."""
        return self._take_over() if self.current is not None and self.current.is_done else _NOTHING

    def has_place(self, rule: Replaces, *, has_waiting: bool) -> Decision[W]:
        """There may be a place for a worker again. `has_waiting`: whether calls wait for a worker."""
        if not self.lacks_place:
            return _NOTHING
        self._change(Change.FORGOT)
        is_allowed = rule is Replaces.ALL or (rule is Replaces.SPENT and self.current is None and has_waiting)
        return Decision(Act.START) if is_allowed else _NOTHING

    def stay(self) -> None:
        """A renewal has waited for a place for too long: the current worker goes on. Does nothing if none waits for a place."""
        if self.state is Occupancy.SERVED_WAITING:
            self._change(Change.FORGOT)
            self.renewal = Renewal.NONE
            self.restarts -= 1  # it was counted when it was decided

    @property
    def can_renew(self) -> bool:
        """Whether the slot has a worker, and none that takes over as soon as it is ready is under way or has failed just now."""
        return self.state is Occupancy.SERVED or (self.state is Occupancy.FOLLOWED and self.renewal is Renewal.NONE)

    @property
    def lacks_place(self) -> bool:
        """Whether a start waits for a place."""
        return self.state in (Occupancy.WAITING, Occupancy.SERVED_WAITING)

    @property
    def is_delayed(self) -> bool:
        """Whether a start is delayed."""
        return self.state in (Occupancy.DELAYED, Occupancy.SERVED_DELAYED)

    def forget_delay(self) -> None:
        """The delay is over, or the runner closes: no start is delayed any more, or waits for a place."""
        self._change(Change.FORGOT)
