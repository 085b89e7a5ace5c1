"""Shared objects on the supervisor's side. Each is pickled once, into a slot of the arena, which is freed when nothing needs it.

    handle dies, or close() ─▶ no call holds it ─▶ workers that know it are asked to forget it ─▶ all have ─▶ the slot is free

A pickled handle is a number. Before a worker is sent the first call that refers to it, it is sent the parcel of that number.

A call holds all shared objects that were part of its pickle, from the pickling until the call has ended. Every worker that
unpickles the call therefore finds them, even on a retry. Workers are asked to forget an object only when no call holds it, so they
cannot meet it again.
"""

import asyncio
import itertools
import os
import threading
from collections.abc import Callable, Sequence
from typing import Any, Final, Protocol, TypeVar
from weakref import WeakValueDictionary, ref

from percore._common.endings import Endings, settle_by
from percore._common.errors import RunnerClosed
from percore._protocol import shared
from percore._protocol.interfaces import Store
from percore._protocol.messages import FORGET, SHARE, Body, BrokenFrame
from percore._protocol.shared import CLOSED, Copy, Shared

P = TypeVar("P")


class Reader(Protocol):
    """A worker, as shared objects see it."""

    tell: Callable[[int, int, Body], None]
    """Sends a message to the worker."""

    def tell_parcel(self, op: int, number: int, parcel: int) -> None:
        """Send a message with a placed parcel, in order with other messages. The parcel stays its owner's."""


_numbers = itertools.count()
_live: Final[WeakValueDictionary[int, "Share"]] = WeakValueDictionary()
"""The shared objects of all runners in this process, by number."""


def _begin() -> None:
    """Choose the numbers of this process (see `shared.COUNTED`)."""
    global _numbers
    _numbers = itertools.count(int.from_bytes(os.urandom(8), "big") * (shared.COUNTED + 1) + 1)


_begin()
os.register_at_fork(after_in_child=_begin)


class Share:
    """One shared object. Implements `Source` for its handle."""

    def __init__(self, shares: "Shares", payload: int) -> None:
        self.number = next(_numbers)
        self.payload = payload
        self.holders = 0
        self.members: set[Reader] = set()
        """Workers that were told about the object and have not forgotten it."""
        self._shares = shares
        self._copy = Copy(shares.store.load, payload, self._forgotten_here)
        self._handle: ref[Shared[Any]] | None = None
        self._is_closed = False
        self.is_ending = False
        """Whether the object is no longer available. Views of it may still exist."""
        self._is_looked_at = True
        """Whether something in this process may still refer to the object's memory."""
        _live[self.number] = self

    def handle(self) -> Shared[Any]:
        """Return the handle: the one that exists, else a new one."""
        handle = None if self._handle is None else self._handle()
        if handle is None:
            handle = Shared(self)
            self._handle = ref(handle)
        return handle

    # Source

    def value(self) -> Any:
        if self._is_closed:
            raise RuntimeError(CLOSED)
        return self._copy.value()

    def close(self) -> None:
        self._shares.check_thread("closed")
        self._is_closed = True
        self.look()

    def travel(self) -> int:
        if self._is_closed:
            raise RuntimeError(CLOSED)
        self._shares.met(self)
        return self.number

    def left(self) -> None:
        self._shares.endings.add(self.look)

    def __str__(self) -> str:
        state = "closed" if self._is_closed else f"{self._shares.store.size(self.payload)} bytes"
        return f"number {self.number & shared.COUNTED}, {state}"

    # Ending

    def shut(self) -> None:
        """Close the object, because the runner is closed and its memory is released."""
        self._is_closed = True
        if not self.is_ending:
            self.is_ending = True
            self._copy.forget()

    def look(self) -> None:
        """End the object if it has no holders, and no open handle refers to it."""
        has_handle = self._handle is not None and self._handle() is not None
        if self.is_ending or self.holders or (has_handle and not self._is_closed):
            return
        self._is_closed = self.is_ending = True
        for member in list(self.members):
            member.tell(FORGET, self.number, None)
        self._copy.forget()

    def forgotten(self, member: Reader) -> None:
        """Note that a worker has forgotten the object, or is dead."""
        self.members.discard(member)
        self._look_free()

    def _forgotten_here(self) -> None:
        self._is_looked_at = False
        self._look_free()

    def _look_free(self) -> None:
        if self.is_ending and not self.members and not self._is_looked_at:
            self._shares.free(self)


class Shares:
    """The shared objects of one runner. Call its methods in the runner's event loop."""

    def __init__(self, loop: asyncio.AbstractEventLoop, store: Store) -> None:
        self._loop = loop
        self._thread = threading.get_ident()
        self.store = store
        self._limit, self._most_kept = store.most_shared, store.most_kept
        self._pending = 0
        self._shares: set[Share] = set()
        self.held: dict[Any, list[Share]] = {}
        """Shared objects by the call or the function that holds them."""
        self._waiters: set[asyncio.Future[int]] = set()
        self._met: Sequence[Share] | None = None
        """The shared objects that the part of a call which is being pickled refers to; None: none is being pickled."""
        self.endings = Endings(loop)

    # Making one

    async def share(self, obj: object) -> Shared[Any]:
        """Store `obj` where all workers can read it, and return its handle.

        If cancelled, the storing continues, and its result is discarded.

        Raises:
            RunnerClosed: the runner was closed meanwhile.
            RuntimeError: too many objects are shared.
            Exception: any error of pickling the object.
        """
        live, known = sum(not share.is_ending for share in self._shares) + self._pending, len(self._shares) + self._pending
        if live >= self._limit or known >= self._most_kept:
            raise RuntimeError(
                f"{known} shared objects are open, or closed but still referenced by views; this runner has room for "
                f"{self._limit}. Close some, drop views of closed ones, share several as one (a dict of them), or make the runner "
                "with a smaller max_message, which gives more room"
            )
        waiter: asyncio.Future[int] = self._loop.create_future()
        self._pending += 1
        self._waiters.add(waiter)
        try:
            self.store.share(obj, waiter)
            payload = await waiter
        except BaseException:
            if waiter.done() and not waiter.cancelled() and waiter.exception() is None:
                self.store.discard(waiter.result())  # 1. it is stored  2. the task is cancelled before it resumes
            raise
        finally:
            self._pending -= 1
            self._waiters.discard(waiter)
            del waiter  # it may hold an error, whose traceback holds this frame: a cycle
        share = Share(self, payload)
        self._shares.add(share)
        return share.handle()

    # Calls that hold shared objects

    def check_thread(self, what: str) -> None:
        """Check that the current thread is the runner's.

        Raises:
            RuntimeError: it is another thread.
        """
        if threading.get_ident() != self._thread:
            raise RuntimeError(f"a shared object can be {what} only in the thread that its runner was started in")

    def met(self, share: Share) -> None:
        """Note that a shared object is being pickled as part of a call.

        Raises:
            TypeError: it is not being pickled as part of a call of its runner.
        """
        if self._met is None or threading.get_ident() != self._thread:
            raise TypeError(
                "a Shared can be sent only in the arguments of its own runner's calls; "
                "to share several objects, share them as one: `await runner.share((a, b))`"
            )
        share.holders += 1  # now: what is pickled after it, or a garbage collection, may close the object
        self._met = (*self._met, share)

    def met_in(self, pickle: Callable[[Any], P], obj: object) -> tuple[P, Sequence[Share]]:
        """Pickle a part of a call. Return its payload, and the shared objects that were met.

        They are held: pass them to `hold` or to `let_go`. Calls of this may be nested: pickling runs user code, which may submit
        another call.
        """
        outer, self._met = self._met, ()
        try:
            payload = pickle(obj)
        except BaseException:
            met, self._met = self._met, outer
            self.let_go(met)
            raise
        met, self._met = self._met, outer
        return payload, met

    def hold(self, holder: Any, met: Sequence[Share]) -> None:
        """Let a call or a function hold the shared objects that `met_in` has returned until `drop`."""
        self.held.setdefault(holder, []).extend(met)

    def let_go(self, met: Sequence[Share]) -> None:
        """Release the shared objects that `met_in` has returned: what refers to them is not sent."""
        for share in met:
            share.holders -= 1
            share.look()

    def hold_numbers(self, holder: Any, numbers: Sequence[int]) -> None:
        """Let a call hold shared objects, by their numbers, until `drop`.

        Raises:
            RuntimeError: one of them was closed.
        """
        shares = [_live.get(number) for number in numbers]
        if any(share is None or share not in self._shares or share.is_ending for share in shares):
            raise RuntimeError(CLOSED)
        found = [share for share in shares if share is not None]
        for share in found:
            share.holders += 1
        self.hold(holder, found)

    def drop(self, holder: Any) -> None:
        """Release the shared objects that a call or a function holds. Does nothing if it holds none."""
        self.let_go(self.held.pop(holder, ()))

    # What workers know

    def introduce(self, member: Reader, holder: Any) -> None:
        """Tell a worker about the shared objects that a call or a function holds, which it is about to be sent."""
        for share in self.held[holder]:
            if member not in share.members:
                member.tell_parcel(SHARE, share.number, share.payload)
                share.members.add(member)  # only now: a worker that does not know the object cannot forget it

    def forgotten(self, member: Reader, number: int) -> None:
        """Note that a worker has forgotten a shared object, as it was asked to.

        Raises:
            BrokenFrame: the worker had not met such an object.
        """
        share = _live.get(number)
        if share is None or member not in share.members:
            raise BrokenFrame(f"shared object {number} was forgotten, which was not known")
        share.forgotten(member)

    def buried(self, member: Reader) -> None:
        """Note that a worker is dead, so that it refers to no shared objects."""
        for share in list(self._shares):
            if member in share.members:
                share.forgotten(member)

    # Ending

    def free(self, share: Share) -> None:
        """Free the slot of a shared object that nothing refers to any more."""
        if share in self._shares:
            self._shares.discard(share)
            _live.pop(share.number, None)
            self.store.discard(share.payload)

    def refuse(self) -> None:
        """End every waiting `share` with RunnerClosed, because the runner takes no more calls."""
        for waiter in list(self._waiters):
            settle_by(waiter, RunnerClosed("the runner was closed before the object was shared"))

    def shut(self) -> None:
        """Close all shared objects, because the runner is closed and its memory is released."""
        self.refuse()
        for share in list(self._shares):
            share.shut()
        self._shares.clear()


def _find(number: int) -> Shared[Any] | None:
    share = _live.get(number)
    return None if share is None else share.handle()


shared.sides.append(_find)
