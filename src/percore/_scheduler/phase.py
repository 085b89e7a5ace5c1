"""The phases of a runner: which event leads from one to the next, and which steps each phase allows.

    open ──close──▶ closing ──cut──▶ cut ──finish──▶ finishing ──end──▶ ended
      │                │ └──────────finish──────────────▲
    break            break
      ▼                ▼
    broken ──close──▶ broken, closing ──cut──▶ cut
                       └────────────────────finish──────▶ finishing

`Closing` carries out the events. Every other part reads the permissions.
"""

from enum import Enum
from typing import Final, NamedTuple

from percore._common.errors import CUT_OFF, IllegalEvent, PercoreError, RunnerClosed


class Phase(Enum):
    """The phases of a runner, as in the diagram above."""

    OPEN = "open"
    CLOSING = "closing"
    """The accepted calls run to their end."""

    BROKEN = "broken"
    """No worker can be started any more. Calls that run in the last workers may end."""

    BROKEN_CLOSING = "broken, closing"
    CUT = "cut"
    """The waiting calls have ended, and the running ones were cancelled or their workers killed."""

    FINISHING = "finishing"
    """No call is left, and the workers were asked to end."""

    ENDED = "ended"
    """All workers have ended."""


class PhaseEvent(Enum):
    """An event that leads from one phase to the next."""

    CLOSE = "close"
    BREAK = "break"
    CUT = "cut"
    FINISH = "finish"
    END = "end"


class Replaces(Enum):
    """Which workers get a replacement."""

    ALL = "all"
    SPENT = "spent"
    """Only those that may begin no more calls, and only while calls wait."""

    NONE = "none"


class Permissions(NamedTuple):
    """The steps that a phase allows.

    Attributes:
        accepts: the runner accepts new calls.
        begins: a call that waits may begin, and a failed one may be attempted again at once.
        delays: a failed call may wait for its next attempt.
        replaces: which workers get a replacement.
        is_closing: the runner is closing, so that deaths of workers are expected.
        is_cut: calls that are under way end with RunnerClosed.
    """

    accepts: bool
    begins: bool
    delays: bool
    replaces: Replaces
    is_closing: bool
    is_cut: bool


class _Row(NamedTuple):
    permissions: Permissions
    following: dict[PhaseEvent, Phase]


_BROKEN: Final = Permissions(False, False, False, Replaces.NONE, is_closing=False, is_cut=False)
_CUT: Final = Permissions(False, False, False, Replaces.NONE, is_closing=True, is_cut=True)

_TABLE: Final[dict[Phase, _Row]] = {
    Phase.OPEN: _Row(
        Permissions(True, True, True, Replaces.ALL, is_closing=False, is_cut=False),
        {PhaseEvent.CLOSE: Phase.CLOSING, PhaseEvent.BREAK: Phase.BROKEN, PhaseEvent.CUT: Phase.CUT},
    ),
    Phase.CLOSING: _Row(
        Permissions(False, True, False, Replaces.SPENT, is_closing=True, is_cut=False),
        {
            PhaseEvent.CLOSE: Phase.CLOSING,
            PhaseEvent.BREAK: Phase.BROKEN_CLOSING,
            PhaseEvent.CUT: Phase.CUT,
            PhaseEvent.FINISH: Phase.FINISHING,
        },
    ),
    Phase.BROKEN: _Row(_BROKEN, {PhaseEvent.CLOSE: Phase.BROKEN_CLOSING, PhaseEvent.CUT: Phase.CUT}),
    Phase.BROKEN_CLOSING: _Row(
        _BROKEN._replace(is_closing=True),
        {PhaseEvent.CLOSE: Phase.BROKEN_CLOSING, PhaseEvent.CUT: Phase.CUT, PhaseEvent.FINISH: Phase.FINISHING},
    ),
    Phase.CUT: _Row(
        _CUT,
        {
            PhaseEvent.CLOSE: Phase.CUT,
            PhaseEvent.BREAK: Phase.CUT,  # the last replacement of a spent worker could not be started
            PhaseEvent.CUT: Phase.CUT,
            PhaseEvent.FINISH: Phase.FINISHING,
        },
    ),
    Phase.FINISHING: _Row(
        _CUT,
        {
            PhaseEvent.CLOSE: Phase.FINISHING,
            PhaseEvent.BREAK: Phase.FINISHING,  # as above
            PhaseEvent.CUT: Phase.FINISHING,
            PhaseEvent.END: Phase.ENDED,
        },
    ),
    Phase.ENDED: _Row(_CUT, {PhaseEvent.CLOSE: Phase.ENDED, PhaseEvent.CUT: Phase.ENDED}),
}


class RunnerPhase:
    """The phase of one runner. The permissions are attributes, since every call reads some of them."""

    __slots__ = ("accepts", "begins", "broken", "delays", "is_closing", "is_cut", "now", "replaces")

    accepts: bool
    begins: bool
    delays: bool
    replaces: Replaces
    is_closing: bool
    is_cut: bool

    def __init__(self) -> None:
        self.broken: PercoreError | None = None
        """The error that broke the runner. It stays when the runner closes."""
        self.now = Phase.OPEN
        self.accepts, self.begins, self.delays, self.replaces, self.is_closing, self.is_cut = _TABLE[Phase.OPEN].permissions

    def advance(self, event: PhaseEvent) -> None:
        """Take an event. An event that has no effect in this phase changes nothing.

        Raises:
            IllegalEvent: the event cannot happen in this phase.
        """
        while True:
            now = self.now
            following = _TABLE[now].following.get(event)
            if following is None:
                raise IllegalEvent(f"{event.value} of a runner that is {now.value}")
            accepts, begins, delays, replaces, is_closing, is_cut = _TABLE[following].permissions
            if self.now is now:  # else a garbage collection has run user code that closes the runner: look again from there
                # Nothing is called here: a phase and its permissions change together.
                self.now = following
                self.accepts = accepts
                self.begins = begins
                self.delays = delays
                self.replaces = replaces
                self.is_closing = is_closing
                self.is_cut = is_cut
                return

    def due(self, *, has_calls: bool, has_workers: bool) -> PhaseEvent | None:
        """Return the event that is due in the closing of a runner with, or without, calls and workers; None if it waits."""
        if self.now is Phase.FINISHING:
            return None if has_workers else PhaseEvent.END
        if self.now is Phase.ENDED or (has_calls and has_workers):
            return None
        return PhaseEvent.FINISH

    def fail(self, error: PercoreError) -> None:
        """Break the runner with this error."""
        self.advance(PhaseEvent.BREAK)
        self.broken = error

    def refusal(self) -> PercoreError:
        """Return a new instance of the error for calls that the runner does not accept or will not run."""
        broken = self.broken
        if broken is None:
            return RunnerClosed(CUT_OFF)
        refusal = type(broken)(*(getattr(broken, field) for field in broken._fields))
        refusal.__cause__ = broken.__cause__
        return refusal
