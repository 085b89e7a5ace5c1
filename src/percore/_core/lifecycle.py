"""One worker's life: a table of what may follow what, and of how long each state may last.

    starting ──ready──▶ ready ──drain──▶ draining ──▶ gone
        │                 │ └────finish──▶ finishing ──▶ gone
        └──────fail───────┴──────────────▶ failed ────▶ gone

Every state may end in gone: the system's report of a death is always believed.
"""

from enum import Enum
from typing import Final, NamedTuple


class State(Enum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    FINISHING = "finishing"
    FAILED = "failed"
    GONE = "gone"


class Event(Enum):
    READY = "ready"
    FAIL = "fail"
    DRAIN = "drain"
    FINISH = "finish"
    EXIT = "exit"


class Deadline(Enum):
    """By when a worker must have left its state. A worker that has not is killed."""

    START = "start"
    """It must be ready `start_timeout` seconds after its start."""

    END = "end"
    """Its process must have ended `kill_after` seconds after it was asked to end, or said that it ends."""

    IDLE_END = "idle end"
    """As END, but the seconds count from the end of its last call: its calls may take as long as they need."""


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
            Event.FAIL: State.FAILED,  # its lifespan has failed while it served
            Event.DRAIN: State.DRAINING,
            Event.FINISH: State.FINISHING,
            Event.EXIT: State.GONE,
        },
    ),
    State.DRAINING: _Row(
        Deadline.IDLE_END,
        {
            Event.READY: State.DRAINING,  # asked to end while it was starting, it still reports how the start went
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
            Event.FAIL: State.FAILED,  # first that it fails, then by which error
            Event.DRAIN: State.FAILED,
            Event.FINISH: State.FAILED,
            Event.EXIT: State.GONE,
        },
    ),
    State.GONE: _Row(None, {}),
}


class IllegalEvent(Exception):
    """An event that the table does not know: a fault of percore or of a broken worker."""


class Life:
    """The state of a worker."""

    __slots__ = ("_story", "state")

    def __init__(self) -> None:
        self.state = State.STARTING
        self._story: list[Event] = []

    def advance(self, event: Event) -> State:
        """Take `event` and return the new state.

        Raises:
            IllegalEvent: it cannot happen in this state; the message tells the story so far.
        """
        following = _TABLE[self.state].following.get(event)
        if following is None:
            story = " ".join(e.value for e in self._story)
            raise IllegalEvent(f"{event.value} in state {self.state.value} after: {story}")
        self._story = [*self._story[-7:], event]
        self.state = following
        return following

    def deadline(self, *, has_calls: bool) -> Deadline | None:
        """The deadline that runs in this state. None: the worker has all the time it needs.

        Two states with the same deadline share it: a worker that goes from one to the other gets no more time.
        """
        deadline = _TABLE[self.state].deadline
        if deadline is Deadline.IDLE_END:
            return None if has_calls else Deadline.END
        return deadline

    @property
    def is_gone(self) -> bool:
        return self.state is State.GONE
