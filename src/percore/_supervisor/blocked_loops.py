"""Reports workers whose event loop is blocked: which functions have begun there, and where all its threads are."""

import asyncio
import logging
from collections import Counter
from time import monotonic
from typing import TYPE_CHECKING, Final

from percore._common.log import report
from percore._scheduler.blocking import LoopWatch, Step
from percore._scheduler.lifecycle import State
from percore._supervisor.timing import SOONEST, is_lost

if TYPE_CHECKING:
    from collections.abc import Callable, Collection

    from percore._calls.calls import PendingCall
    from percore._protocol.interfaces import Condition
    from percore._supervisor.pool_worker import PoolWorker

_MOST_NAMES: Final = 3


class BlockedLoops:
    """Watches the loops of a runner's workers. A timer runs only while workers have calls."""

    def __init__(self, loop: asyncio.AbstractEventLoop, members: "Collection[PoolWorker]", after: float | None) -> None:
        """`after`: how many seconds a worker may read nothing. None: no worker is watched."""
        self.is_armed = after is None
        """Whether `arm` has nothing to do. Every call that is sent asks."""
        self.told: set[PoolWorker] = set()
        """Workers whose obstacle was told, and not its end."""
        self._loop = loop
        self._members = members
        self._after = after
        self._watches: dict[PoolWorker, LoopWatch] = {}
        self._blocking: dict[PoolWorker, str] = {}
        """The functions that block workers, as far as they are known."""
        self._timer: asyncio.TimerHandle | None = None
        self.on_look: Callable[[], None] = lambda: None
        """Called at each look that another one follows, since workers have calls."""
        self.on_rest: Callable[[], None] = lambda: None
        """Called when no worker is watched any more, so that the next call arms the watch."""

    def arm(self) -> None:
        """Watch the workers for as long as they have calls. To be called with the first call."""
        assert self._after is not None, "it stays armed"
        self.is_armed = True
        if self._timer is None:  # a log handler that submits within `_look` has armed it
            self._timer = self._loop.call_later(max(SOONEST, self._after / 2), self._look)

    def catch_up(self) -> None:
        """Go on watching if the loop has lost the timer."""
        if self._timer is not None and is_lost(self._timer, self._loop):
            self._timer.cancel()
            self._timer = None
            self.arm()

    def look_members(self) -> None:
        """Stop the watch if no worker is left. To be called when a worker has ended. The next call arms the watch again."""
        if self._members:
            return
        self._watches.clear()
        self._blocking.clear()
        self.told.clear()
        if self._timer is not None:
            self._timer.cancel()
            self._timer, self.is_armed = None, False
            self.on_rest()

    def since(self, member: "PoolWorker") -> float | None:
        """Return the time (`time.monotonic`) since which the worker's loop has been blocked, or None. Any thread may ask."""
        watch = self._watches.get(member)
        return None if watch is None else watch.blocked_since

    def by(self, member: "PoolWorker") -> str | None:
        """Return the function that blocks the worker's loop; None: nobody can tell, or it is not blocked. Any thread may ask."""
        return None if self.since(member) is None else self._blocking.get(member) or None

    def look_again(self) -> None:
        """Tell which workers go on. To be called when workers have read something, while `told` is not empty."""
        for member in list(self.told):
            self._step(member, monotonic())

    def _look(self) -> None:
        is_late = is_lost(self._timer, self._loop)
        self._timer, self.is_armed = None, False
        for gone in self._watches.keys() - set(self._members):
            del self._watches[gone]
            self._blocking.pop(gone, None)
            self.told.discard(gone)
        watched = [member for member in self._members if member.calls]
        try:
            if not is_late:  # else the workers were stopped together with this process, or their messages are still unread here
                for member in watched:
                    if member.life.state in (State.READY, State.DRAINING):
                        self._step(member, monotonic())
        finally:
            if watched or self.told:
                self.arm()
                if watched:
                    self.on_look()
            else:
                self.on_rest()

    def _step(self, member: "PoolWorker", now: float) -> None:
        watch = self._watches.get(member)
        if watch is None:
            assert self._after is not None
            watch = self._watches[member] = LoopWatch(self._after)
        seconds = watch.silence(now)
        step = watch.look(now, member.worker.channel.waits_since)
        if step is Step.EXAMINE:
            member.worker.examine(lambda condition: self._examined(member, watch, condition))
        elif step is Step.TELL_END:
            self.told.discard(member)
            report(logging.WARNING, "%s goes on, after %s s", member.name, f"{seconds:.1f}", of=member)

    def _examined(self, member: "PoolWorker", watch: LoopWatch, condition: "Condition") -> None:
        now, obstacle = monotonic(), condition.obstacle
        is_news = watch.examined(now, member.worker.channel.waits_since, obstacle)
        if watch.blocked_since is not None:
            self._blocking[member] = _blocking(member, condition)
        if not is_news:
            return
        self.told.add(member)
        name, seconds = member.name, f"{watch.silence(now):.1f}"
        if obstacle:
            report(logging.WARNING, "%s has read nothing for %s s: %s", name, seconds, obstacle, of=member)
            return
        by = self._blocking[member]
        stacks = f". The stacks of its threads:\n{condition.stacks}" if condition.stacks else ""
        report(
            logging.WARNING,
            "%s has read nothing for %s s: its event loop is blocked%s",
            name,
            seconds,
            (f" by {by}" if by else _begun(member)) + stacks,
            of=member,
        )


def _blocking(member: "PoolWorker", condition: "Condition") -> str:
    """Return the function whose code runs in the worker's loop, or keeps it from running; empty if nobody can tell."""
    call = None if condition.call is None else member.calls.get(condition.call)
    if call is not None:
        return _name(call)
    names = {_name(call) for call in list(member.calls.values())}
    alike = [name for name in names if name.rpartition(".")[2] == condition.frame]
    return alike[0] if len(alike) == 1 else condition.frame


def _name(call: "PendingCall") -> str:
    return call.function.meter.name or call.function.name


def _begun(member: "PoolWorker") -> str:
    """Return the functions of the calls that have begun in the worker, or may have, as the end of a sentence."""
    fates = [(call.function.name, member.fate(call).begun) for call in list(member.calls.values())]
    is_known = all(begun is not None for _, begun in fates)
    names = Counter(name for name, begun in fates if begun is not False)
    shown = [name if count == 1 else f"{name} ({count} times)" for name, count in names.most_common(_MOST_NAMES)]
    more = len(names) - len(shown)
    does = "runs" if is_known else "has calls of"
    return f" while it {does} {', '.join(shown)}{f' and {more} more functions' if more else ''}" if shown else ""
