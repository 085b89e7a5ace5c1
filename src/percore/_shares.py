"""Shared objects at the supervisor: each pickled once into a slot of the arena, which stays until nobody needs it.

    handle dies, or close() ─▶ no call holds it ─▶ workers that have met it are asked to forget it ─▶ all have ─▶ the slot is free

A call holds what was met while it was pickled, from then until it has ended: however its worker fares, what unpickles it finds the
object. So a worker that is asked to forget one can meet it no more.
"""

import asyncio
import itertools
import threading
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Final
from weakref import WeakValueDictionary, ref

from percore import _shared
from percore._errors import RunnerClosed, as_error
from percore._ipc.advice import unsendable
from percore._ipc.copies import CLOSED, Copy
from percore._ipc.exports import Endings
from percore._ipc.leases import Leases
from percore._ipc.pickles import CANNOT, dump
from percore._ipc.ring import BrokenFrame
from percore._ipc.slots import Sink, SlotWriter
from percore._messages import FORGET, SLOT_BITS, Payload
from percore._shared import Shared

if TYPE_CHECKING:
    from percore._member import Member

_numbers: Final = itertools.count(1)
_live: Final[WeakValueDictionary[int, "Share"]] = WeakValueDictionary()
"""By number, those of all runners of this process."""


class Share:
    """One shared object."""

    def __init__(self, shares: "Shares", payload: int) -> None:
        self.number = next(_numbers)
        self.payload = payload
        self.holders = 0
        self.members: set[Member] = set()
        """Workers that have met it and not forgotten it."""
        self._shares = shares
        self._copy = Copy(shares.leases, payload, self._forgotten_here)
        self._handle: ref[Shared[Any]] | None = None
        self._is_closed = False
        self.is_ending = False
        """Whether nobody gets it any more; views may still be looked at."""
        self._is_looked_at = True
        """Whether something in this process may look at it."""
        _live[self.number] = self

    def handle(self) -> Shared[Any]:
        """The handle; while there is one, always the same."""
        handle = None if self._handle is None else self._handle()
        if handle is None:
            handle = Shared(self)
            self._handle = ref(handle)
        return handle

    # As a Source

    def value(self) -> Any:
        if self._is_closed:
            raise RuntimeError(CLOSED)
        return self._copy.value()

    def close(self) -> None:
        self._shares.check_thread("closed")
        self._is_closed = True
        self.look()

    def travel(self) -> tuple[int, int]:
        if self._is_closed:
            raise RuntimeError(CLOSED)
        self._shares.met(self)
        return self.number, self.payload

    def left(self) -> None:
        self._shares.endings.add(self.look)

    def __str__(self) -> str:
        state = "closed" if self._is_closed else f"{self.payload >> SLOT_BITS} bytes"
        return f"number {self.number}, {state}"

    # Its end

    def shut(self) -> None:
        """The runner is closed: its memory goes."""
        self._is_closed = True
        if not self.is_ending:
            self.is_ending = True
            self._copy.forget()

    def look(self) -> None:
        """Whether it is of no use any more: then it ends."""
        has_handle = self._handle is not None and self._handle() is not None
        if self.is_ending or self.holders or (has_handle and not self._is_closed):
            return
        self._is_closed = self.is_ending = True
        for member in list(self.members):
            member.worker.channel.send(FORGET, self.number, None)
        self._copy.forget()

    def forgotten(self, member: "Member") -> None:
        """This worker has forgotten it, or is dead."""
        self.members.discard(member)
        self._look_free()

    def _forgotten_here(self) -> None:
        self._is_looked_at = False
        self._look_free()

    def _look_free(self) -> None:
        if self.is_ending and not self.members and not self._is_looked_at:
            self._shares.free(self)


class Shares:
    """The shared objects of one runner. Methods are the loop's."""

    def __init__(self, loop: asyncio.AbstractEventLoop, arena: SlotWriter, *, main_by_value: bool) -> None:
        self._loop = loop
        self._thread = threading.get_ident()
        self._arena = arena
        self._main_by_value = main_by_value
        self._limit = arena.count // 4  # and as many again that views still refer to
        self._pending = 0
        self._shares: set[Share] = set()
        self.held: dict[Any, list[Share]] = {}
        """By the call or function that uses them."""
        self._waiters: set[asyncio.Future[Payload]] = set()
        self._met: Sequence[Share] | None = None
        self.endings = Endings(loop)
        self.leases = Leases(arena.reader(), self.endings, 0)

    # Making one

    async def share(self, obj: object) -> Shared[Any]:
        """Pickle `obj` in a thread of its own, and keep it. Cancelled: the pickling runs on, and nothing is kept.

        Raises:
            RunnerClosed: the runner was closed meanwhile.
            RuntimeError: too many are shared.
            Exception: whatever pickling it raises.
        """
        live = sum(not share.is_ending for share in self._shares) + self._pending
        if live >= self._limit or len(self._shares) + self._pending >= 2 * self._limit:
            raise RuntimeError(
                f"{len(self._shares)} shared objects are open, or closed but still referenced by views; at most {self._limit} of "
                f"this runner's {self._arena.count} slots may hold shared objects. Close some, drop views of closed ones, share "
                "several as one (a dict of them), or make the runner with a smaller max_message, which gives more slots"
            )
        waiter: asyncio.Future[Payload] = self._loop.create_future()
        self._pending += 1
        self._waiters.add(waiter)
        try:
            # Not by the loop's executor: the user may have filled it with calls that never end.
            threading.Thread(target=self._pickle, args=(obj, waiter), name="percore-share", daemon=True).start()
            payload = await waiter
        finally:
            self._pending -= 1
            self._waiters.discard(waiter)
        assert isinstance(payload, int)
        share = Share(self, payload)
        self._shares.add(share)
        return share.handle()

    def _pickle(self, obj: object, waiter: "asyncio.Future[Payload]") -> None:
        """In a thread."""
        sink = Sink(self._arena)
        try:
            dump(obj, sink, main_by_value=self._main_by_value, beside=sink)
            payload: Payload | BaseException = sink.payload()
        except CANNOT as error:
            payload = unsendable("share(): the object", obj, error)
        except BaseException as error:
            payload = error
        del obj, sink
        try:
            self._loop.call_soon_threadsafe(self._pickled, waiter, payload)
        except RuntimeError:  # the loop was closed, and with it all that could be told
            return

    def _pickled(self, waiter: "asyncio.Future[Payload]", payload: Payload | BaseException) -> None:
        if isinstance(payload, BaseException):
            if not waiter.done():
                waiter.set_exception(as_error(payload, "pickling"))
        elif isinstance(payload, int):
            self._stored(waiter, payload)
        elif not waiter.done():
            # Too small for a slot of its own, or none was free. It waits for one, so as to travel as a name.
            stored = self._arena.store(payload)
            if stored is None:
                self._arena.wait(lambda: self._store_later(waiter, payload))
            else:
                self._stored(waiter, stored)

    def _store_later(self, waiter: "asyncio.Future[Payload]", payload: bytes) -> bool:
        """In whatever thread gave the slot back."""
        if waiter.done():
            return False
        self._loop.call_soon_threadsafe(self._pickled, waiter, payload)
        return False

    def _stored(self, waiter: "asyncio.Future[Payload]", payload: int) -> None:
        if waiter.done():  # nobody waits for it any more
            self._arena.discard(payload)
        else:
            waiter.set_result(payload)

    # Calls that use them

    def check_thread(self, what: str) -> None:
        """That this is the thread of the runner.

        Raises:
            RuntimeError: it is another one.
        """
        if threading.get_ident() != self._thread:
            raise RuntimeError(f"a shared object can be {what} only in the thread that its runner was started in")

    def met(self, share: Share) -> None:
        """It is being pickled, as part of something.

        Raises:
            TypeError: which is no call of its runner.
        """
        if self._met is None or threading.get_ident() != self._thread:
            raise TypeError(
                "a Shared can be sent only in the arguments of its own runner's calls; "
                "to share several objects, share them as one: `await runner.share((a, b))`"
            )
        self._met = (*self._met, share)

    def watch(self) -> Sequence[Share] | None:
        """Something of a call is about to be pickled: `seen` tells which shared objects it has in it, and wants what this gives.

        In between user code runs, which may submit another call.
        """
        outer, self._met = self._met, ()
        return outer

    def seen(self, outer: Sequence[Share] | None) -> Sequence[Share]:
        """What was met since that `watch`."""
        met, self._met = self._met, outer
        assert met is not None
        return met

    def hold(self, holder: Any, shares: Sequence[Share]) -> None:
        """A call, or a function, uses these, until it is dropped."""
        self.held.setdefault(holder, []).extend(shares)
        for share in shares:
            share.holders += 1

    def drop(self, holder: Any) -> None:
        """It uses none any more. Nothing happens if it used none."""
        for share in self.held.pop(holder, ()):
            share.holders -= 1
            share.look()

    # What workers say

    def known(self, member: "Member", number: int) -> None:
        """A worker has met one."""
        share = _live.get(number)
        if share is None or share not in self._shares:
            raise BrokenFrame(f"shared object {number} was met, which does not exist")
        share.members.add(member)

    def forgotten(self, member: "Member", number: int) -> None:
        """A worker has forgotten one, as it was asked to."""
        share = _live.get(number)
        if share is None or member not in share.members:
            raise BrokenFrame(f"shared object {number} was forgotten, which was not known")
        share.forgotten(member)

    def buried(self, member: "Member") -> None:
        """A worker is dead."""
        for share in list(self._shares):
            if member in share.members:
                share.forgotten(member)

    # Ending

    def free(self, share: Share) -> None:
        """Nobody looks at it any more."""
        if share in self._shares:
            self._shares.discard(share)
            _live.pop(share.number, None)
            self._arena.discard(share.payload)

    def refuse(self) -> None:
        """No more calls are taken: nobody waits for one to be pickled."""
        for waiter in self._waiters:
            if not waiter.done():
                waiter.set_exception(RunnerClosed("the runner was closed before the object was shared"))

    def shut(self) -> None:
        """The runner is closed, and its memory goes."""
        self.refuse()
        for share in list(self._shares):
            share.shut()
        self._shares.clear()


def _find(number: int, _payload: int) -> Shared[Any] | None:
    share = _live.get(number)
    return None if share is None else share.handle()


_shared.sides.append(_find)
