"""The life of a map: its phases, which event leads from one to the next, and the steps that each phase allows.

    new ──begin──▶ begun ──feed──▶ feeding ──exhaust──▶ fed ──stop──▶ stopped ──close──▶ closed

A map never goes back. It may skip phases: `stop` also leads from feeding to stopped, `exhaust` from begun to fed (a feeder that is
cancelled before its first step), and `close` from each phase to closed.
"""

from enum import Enum
from typing import Final, NamedTuple

from percore._common.errors import IllegalEvent


class MapPhase(Enum):
    """The phases of a map, as in the diagram above."""

    NEW = "new"
    """No result was requested. Nothing is open yet."""

    BEGUN = "begun"
    """The feeder's task exists, but has not run. A task that is cancelled now runs none of its code."""

    FEEDING = "feeding"
    FED = "fed"
    """No further inputs are pulled. The results of the pulled ones are still handed over."""

    STOPPED = "stopped"
    """An error is to be raised instead of any further result."""

    CLOSED = "closed"
    """No item is under way, and none ends for the map any more."""


class MapEvent(Enum):
    """An event that leads from one phase to a later one."""

    BEGIN = "begin"
    FEED = "feed"
    EXHAUST = "exhaust"
    """The inputs have ended, or an error or the runner has cut them short."""

    STOP = "stop"
    CLOSE = "close"


class _Row(NamedTuple):
    """A phase.

    Attributes:
        pulls: inputs are pulled, and their items taken.
        gives: results are handed over.
        following: the phase after each event that may happen.
    """

    pulls: bool
    gives: bool
    following: dict[MapEvent, MapPhase]


_CLOSE: Final = {MapEvent.CLOSE: MapPhase.CLOSED}
_STOP: Final = {MapEvent.STOP: MapPhase.STOPPED, **_CLOSE}

_TABLE: Final[dict[MapPhase, _Row]] = {
    MapPhase.NEW: _Row(True, True, {MapEvent.BEGIN: MapPhase.BEGUN, **_CLOSE}),
    MapPhase.BEGUN: _Row(True, True, {MapEvent.FEED: MapPhase.FEEDING, MapEvent.EXHAUST: MapPhase.FED, **_CLOSE}),
    MapPhase.FEEDING: _Row(True, True, {MapEvent.EXHAUST: MapPhase.FED, **_STOP}),
    # In the later phases the feeder may still report the end of the inputs, and an item an error of percore.
    MapPhase.FED: _Row(False, True, {MapEvent.EXHAUST: MapPhase.FED, **_STOP}),
    MapPhase.STOPPED: _Row(False, False, {MapEvent.EXHAUST: MapPhase.STOPPED, **_STOP}),
    # And a garbage collection may run user code that closes the map while it begins.
    MapPhase.CLOSED: _Row(False, False, dict.fromkeys(MapEvent, MapPhase.CLOSED)),
}


class MapLife:
    """The phase of one map, and the error that ends it. Its permissions are attributes, since every item reads them."""

    __slots__ = ("error", "failure", "gives", "is_closed", "now", "pulls")

    pulls: bool
    gives: bool

    def __init__(self) -> None:
        self.error: BaseException | None = None
        """An error to raise as soon as possible."""
        self.failure: BaseException | None = None
        """An error to raise after the results of all pulled inputs."""
        self.now = MapPhase.NEW
        self.pulls = self.gives = True
        self.is_closed = False

    def advance(self, event: MapEvent) -> None:
        """Take an event. An event that has no effect in this phase changes nothing.

        Raises:
            IllegalEvent: the event cannot happen in this phase.
        """
        while True:
            now = self.now
            following = _TABLE[now].following.get(event)
            if following is None:
                raise IllegalEvent(f"{event.value} of a map that is {now.value}")
            pulls, gives, _ = _TABLE[following]
            if self.now is now:  # else a garbage collection has run user code that has closed the map: look again from there
                self.now = following
                self.pulls = pulls
                self.gives = gives
                self.is_closed = following is MapPhase.CLOSED
                return

    def stop(self, error: BaseException) -> None:
        """Stop the map with this error. The first error is kept."""
        if self.error is None:
            self.error = error
        self.advance(MapEvent.STOP)

    def check(self) -> None:
        """Raise the error that ends the map, if there is one. Call it once, when the map is over.

        Raises:
            BaseException: this error. Its traceback refers to the callers' frames, and these to this object. So neither this object
                nor this frame keeps the error: a cycle would keep what those frames hold until a garbage collection.
        """
        error = self.failure if self.error is None else self.error
        self.error = self.failure = None
        try:
            if error is not None:
                raise error
        finally:
            del error
