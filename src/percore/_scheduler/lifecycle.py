"""The life of a worker: a table of its states, the events allowed in each, and how long each state may last.

    starting ──ready──▶ ready ──drain──▶ draining ──▶ gone
        │                 │ └────finish──▶ finishing ──▶ gone
        └──────fail───────┴──────────────▶ failed ────▶ gone

The system may report a worker's death in any state, so gone may follow every other state.
"""

from enum import Enum
from typing import Final, NamedTuple

from percore._common.errors import IllegalEvent


class State(Enum):
    """The states of a worker, as in the diagram above."""

    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    FINISHING = "finishing"
    FAILED = "failed"
    GONE = "gone"


class Event(Enum):
    """An event that changes a worker's state."""

    READY = "ready"
    """The worker has entered its lifespan and can take calls."""

    FAIL = "fail"
    """The worker's start or its lifespan has failed, and it is about to end."""

    DRAIN = "drain"
    """The worker gets no more calls, and ends after those that it has."""

    FINISH = "finish"
    """The worker was asked to end when no call may run any more."""

    EXIT = "exit"
    """The worker's process has ended."""


class Deadline(Enum):
    """A time limit for a state. A worker that is still in the state when it expires is killed."""

    START = "start"
    """The worker must be ready `start_timeout` seconds after its start."""

    END = "end"
    """Its process must end within `kill_after` seconds after it was asked to end, or announced that it ends."""

    IDLE_END = "idle end"
    """As END, but the seconds count from the end of its last call. There is no limit for its calls."""


class _Row(NamedTuple):
    deadline: Deadline | None
    following: dict[Event, State]


_TABLE: Final[dict[State, _Row]] = {
    State.STARTING: _Row(
        Deadline.START,
        {
            Event.READY: State.READY,
            Event.FAIL: State.FAILED,
            Event.DRAIN: State.DRAINING,
            Event.FINISH: State.FINISHING,
            Event.EXIT: State.GONE,
        },
    ),
    State.READY: _Row(
        None,
        {
            Event.FAIL: State.FAILED,  # its lifespan failed while it was serving calls
            Event.DRAIN: State.DRAINING,
            Event.FINISH: State.FINISHING,
            Event.EXIT: State.GONE,
        },
    ),
    State.DRAINING: _Row(
        Deadline.IDLE_END,
        {
            Event.READY: State.DRAINING,  # it was asked to end while it was starting, and still reports that it is ready
            Event.FAIL: State.FAILED,
            Event.DRAIN: State.DRAINING,
            Event.FINISH: State.FINISHING,
            Event.EXIT: State.GONE,
        },
    ),
    State.FINISHING: _Row(
        Deadline.END,
        {
            Event.READY: State.FINISHING,
            Event.FAIL: State.FINISHING,
            Event.DRAIN: State.FINISHING,
            Event.FINISH: State.FINISHING,
            Event.EXIT: State.GONE,
        },
    ),
    State.FAILED: _Row(
        Deadline.END,
        {
            Event.FAIL: State.FAILED,  # a worker reports its failure twice: first that it fails, then the error
            Event.DRAIN: State.FAILED,
            Event.FINISH: State.FAILED,
            Event.EXIT: State.GONE,
        },
    ),
    State.GONE: _Row(None, {}),
}


class Life:
    """The state of a worker."""

    __slots__ = ("_story", "state")

    def __init__(self) -> None:
        self.state = State.STARTING
        self._story: list[Event] = []

    def advance(self, event: Event) -> State:
        """Take `event` and return the new state.

        Raises:
            IllegalEvent: the event is not allowed in this state; the message lists the latest events.
        """
        following = _TABLE[self.state].following.get(event)
        if following is None:
            story = " ".join(e.value for e in self._story)
            raise IllegalEvent(f"{event.value} in state {self.state.value} after: {story}")
        self._story = [*self._story[-7:], event]
        self.state = following
        return following

    def deadline(self, *, has_calls: bool) -> Deadline | None:
        """Return the deadline of the current state; None if the state may last as long as it takes.

        Two states with the same deadline share it: a worker that moves from one to the other gets no additional time.
        """
        deadline = _TABLE[self.state].deadline
        if deadline is Deadline.IDLE_END:
            return None if has_calls else Deadline.END
        return deadline

    @property
    def is_gone(self) -> bool:
        return self.state is State.GONE
