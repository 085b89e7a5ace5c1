"""The decision when a worker that reads nothing is examined, and what is told of it.

A worker reads its messages as soon as its event loop runs. One that has read nothing for `blocked_after` seconds is examined: its
loop is blocked, or its process does not run. Each obstacle is told once, and so is the end of it.

    CLEAR ── reads nothing for long ──▶ EXAMINED ── runs ───────────▶ BLOCKED ── reads ──▶ CLEAR
                                            ▲ └──── does not run ───▶ HELD ───── reads ──▶ CLEAR
                                            └──────── later ─────────┘
"""

from enum import Enum, auto


class Stillness(Enum):
    """What is known of a worker that may read nothing."""

    CLEAR = auto()
    EXAMINED = auto()
    BLOCKED = auto()
    HELD = auto()


class Step(Enum):
    """What to do about a worker."""

    NOTHING = auto()
    EXAMINE = auto()
    TELL_END = auto()


class LoopWatch:
    """Decides for one worker. Each `since` is the present `Channel.waits_since`, which changes whenever the worker reads."""

    def __init__(self, after: float) -> None:
        """`after`: how many seconds a worker may read nothing."""
        self._after = after
        self._state = Stillness.CLEAR
        self._since = 0.0
        self._examined_at = 0.0
        self._told = ""

    @property
    def is_told(self) -> bool:
        """Whether an obstacle was told whose end was not."""
        return self._told != ""

    @property
    def blocked_since(self) -> float | None:
        """The time since which the worker's loop has been blocked; None if it is not."""
        return self._since if self._state is Stillness.BLOCKED else None

    def look(self, now: float, since: float) -> Step:
        """Return what to do about the worker now."""
        if self._state is not Stillness.CLEAR and since != self._since:
            was_told = self.is_told
            self._state, self._told = Stillness.CLEAR, ""
            return Step.TELL_END if was_told else Step.NOTHING
        if not since:
            return Step.NOTHING
        last = self._examined_at if self._state is Stillness.HELD else since
        if self._state in (Stillness.EXAMINED, Stillness.BLOCKED) or now - last < self._after:
            return Step.NOTHING
        self._state, self._since = Stillness.EXAMINED, since
        return Step.EXAMINE

    def examined(self, now: float, since: float, obstacle: str) -> bool:
        """Note what the examination has found, and return whether to tell it.

        `obstacle`: why the process does not run; empty if it runs, so that its loop is blocked.
        """
        if since != self._since or self._state is not Stillness.EXAMINED:  # it has read meanwhile
            return False
        self._state = Stillness.HELD if obstacle else Stillness.BLOCKED
        self._examined_at = now
        kind = obstacle.partition("(")[0] or "blocked"  # what follows are figures, which differ each time
        is_news, self._told = kind != self._told, kind
        return is_news

    def silence(self, now: float) -> float:
        """Return for how many seconds the worker has read nothing, or had until it read again."""
        return now - self._since
