"""One worker's life: a table of what may follow what.

    starting ──ready──▶ ready ──drain──▶ draining ──▶ gone
        │                 └────finish──▶ finishing ──▶ gone
        └── fail ──▶ finishing

Every state may end in gone: the system's word on a death is always believed.
"""

from enum import Enum
from typing import Final


class State(Enum):
    STARTING = "starting"
    READY = "ready"
    DRAINING = "draining"
    FINISHING = "finishing"
    GONE = "gone"


class Event(Enum):
    READY = "ready"
    FAIL = "fail"
    DRAIN = "drain"
    FINISH = "finish"
    EXIT = "exit"


_TABLE: Final[dict[State, dict[Event, State]]] = {
    State.STARTING: {
        Event.READY: State.READY,
        Event.FAIL: State.FINISHING,
        Event.DRAIN: State.DRAINING,
        Event.FINISH: State.FINISHING,
        Event.EXIT: State.GONE,
    },
    State.READY: {Event.DRAIN: State.DRAINING, Event.FINISH: State.FINISHING, Event.EXIT: State.GONE},
    State.DRAINING: {
        Event.READY: State.DRAINING,  # asked to end while it was starting, it tells all the same how that went
        Event.FAIL: State.FINISHING,
        Event.DRAIN: State.DRAINING,
        Event.FINISH: State.FINISHING,
        Event.EXIT: State.GONE,
    },
    State.FINISHING: {
        Event.READY: State.FINISHING,
        Event.FAIL: State.FINISHING,
        Event.DRAIN: State.FINISHING,
        Event.FINISH: State.FINISHING,
        Event.EXIT: State.GONE,
    },
    State.GONE: {},
}


class IllegalEvent(Exception):
    """An event that the table does not know: a fault of percore or of a broken worker."""


class Life:
    """Where a worker stands."""

    __slots__ = ("_story", "state")

    def __init__(self) -> None:
        self.state = State.STARTING
        self._story: list[Event] = []

    def advance(self, event: Event) -> State:
        """Take `event` and return the new state.

        Raises:
            IllegalEvent: it cannot happen in this state; the message tells the story so far.
        """
        following = _TABLE[self.state].get(event)
        if following is None:
            story = " ".join(e.value for e in self._story)
            raise IllegalEvent(f"{event.value} in state {self.state.value} after: {story}")
        self._story = [*self._story[-7:], event]
        self.state = following
        return following

    @property
    def is_gone(self) -> bool:
        return self.state is State.GONE
