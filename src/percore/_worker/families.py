"""The nested calls of a worker's calls: they ask the supervisor, and take its answers.

Why no call waits for itself: while a call has nested calls that have not ended, it gives its place back to its worker and takes it
again before it goes on. A coroutine call gets its last answer only when it has its place. The thread of a plain call that waits
lets another thread run in its place (`Threads.step_aside`), and goes on once it is among the first `threads` again.
"""

import asyncio
import itertools
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TYPE_CHECKING, Any, Final, TypeVar

from percore._common.errors import RemoteError, shown
from percore._common.fault_points import POINTS, point
from percore._common.steps import is_in_step, step
from percore._protocol.messages import (
    ANSWER_ERROR,
    ANSWER_ITEM,
    ANSWER_ITEMS,
    ANSWER_RESULT,
    ANSWER_VALUE,
    ASK,
    ASKED,
    DROP,
    ID_MASK,
    TAKEN,
    Body,
)
from percore._protocol.nested_calls import CALLER_ENDED, NestedRequest
from percore._protocol.shared import others_may_build
from percore._serialization.exceptions import load_exception
from percore._worker.plain_calls import caller_overran

if TYPE_CHECKING:
    from percore._protocol.interfaces import Send, WorkerChannel
    from percore._protocol.messages import Payload
    from percore._worker.plain_calls import PlainCalls
    from percore._worker.shared_objects import WorkerShares
    from percore._worker.terms import Variables

_FEW: Final = 64

_INLINE: Final = 16_384
"""Bytes of the largest pickle that is part of an ASK."""


class Child:
    """A nested call. `tell` is called in the loop once the answer is there, or by `Family.fail`."""

    copies = False
    """Whether the answer is copied as soon as it arrives, since its reader may come late. Else it stays in its slot."""

    def __init__(self, family: "Family", number: int, tell: Callable[[Any], object]) -> None:
        self.family = family
        self.number = number
        self.tell = tell
        self.answer: tuple[int, Any] | None = None
        self.failure: BaseException | None = None

    def take_answer(self) -> tuple[int, Any] | None:
        """Return the answer once: who gets it also reports that it was read."""
        answer, self.answer = self.answer, None
        return answer


class StreamChild(Child):
    """A nested stream. `arrived` is called in the loop with items, and with whether each is a pickle."""

    copies = True

    def __init__(self, family: "Family", number: int, tell: Callable[[Any], object]) -> None:
        super().__init__(family, number, tell)
        self.arrived: Callable[[list[tuple[Any, bool]]], object]


class ItemChild(Child):
    """An item of a nested map."""

    copies = True


C = TypeVar("C", bound=Child)


class Family:
    """The nested calls of one call. Any thread may use it."""

    def __init__(self, families: "Families", call_id: int) -> None:
        self.families = families
        self.call_id = call_id
        self.lock = threading.RLock()  # a garbage collection under it may run code that makes or withdraws a nested call
        self._waiting = threading.Lock()
        """Not `lock`, which the loop takes: a thread holds this one until it has its place again."""
        self.children: dict[int, Child] = {}
        self.is_over = self.is_cancelled = False
        self.refusal: Callable[[], BaseException] | None = None
        """Makes the error of further nested calls, because the call was cancelled or has timed out, and goes on."""
        self.waits = 0
        """How many threads wait for nested calls."""
        self.enders: dict[Callable[[], object], None] = {}
        """The loop calls them when the call ends. They belong to maps that have tasks of their own."""

    def child(self, kind: type[C], tell: Callable[[C], object]) -> C:
        """Return a new nested call, which is not made yet."""
        return kind(self, next(self.families.numbers), tell)

    @step
    def ask(self, request: NestedRequest, child: Child, send: "Send | None" = None) -> None:
        """Make a nested call. `send`: the method of the channel that sends the request; None: it is sent now.

        Raises:
            RuntimeError: the call has ended.
            CancelledError, TimeoutError: the call was cancelled, or has exceeded its timeout.
        """
        channel, number, pickle = self.families.channel, child.number, request.pickle
        send = channel.send_from_thread if send is None else send
        is_large = pickle is not None and len(pickle) > _INLINE
        with self.lock:
            if self.is_over:
                raise RuntimeError(CALLER_ENDED)
            if self.refusal is not None:
                raise self.refusal()
            self.children[number] = self.families.children[number] = child
            send(ASK, number, tuple(request._replace(pickle=None) if is_large else request))
            if is_large:
                channel.send_payload(ASKED, number, pickle, channel.send_from_thread)
        if POINTS:
            point("worker.nested.asked")

    @step
    def drop(self, child: Child) -> bool:
        """Withdraw a nested call, which is not wanted any more. Return False if it was answered before: then drop the answer."""
        with self.lock:
            if self.children.pop(child.number, None) is not None:
                self.families.forget(child)
                self.families.channel.send_from_thread(DROP, child.number, None)
                return True
        answer = child.take_answer()
        if answer is not None:
            self.families.read(child, *answer)
        return False

    def drop_soon(self, child: Child) -> None:
        """As `drop`, from any thread, also while it holds the lock: from `__del__`."""
        with suppress(RuntimeError):  # the loop is closed
            self.families.channel.loop.call_soon_threadsafe(self.drop, child)

    @step
    def fail(self, error: Callable[[], BaseException]) -> None:
        """End all nested calls with an error, because the call was cancelled or has timed out."""
        for child in list(self.children.values()):
            failure = error()
            with self.lock:
                if self.children.pop(child.number, None) is None:
                    continue  # it was answered meanwhile, in another thread, and told
                self.families.forget(child)
                self.families.channel.send_from_thread(DROP, child.number, None)
                child.failure = failure
            child.tell(child)

    @step
    def end(self) -> None:
        """End the family with its call."""
        with self.lock:
            self.is_over = True
        self.fail(asyncio.CancelledError)
        for end in list(self.enders):
            self.families.channel.loop.call_soon_threadsafe(end)

    @step
    def wait(self, until: Callable[[], object]) -> None:
        """Call `until`, which blocks this thread. A thread of a plain call gives its place back meanwhile.

        Raises:
            RuntimeError: a garbage collection has run the code that waits, in the middle of a step of percore on which others wait.
        """
        if is_in_step(sys._getframe(1)):
            raise RuntimeError(
                "a __del__ that a garbage collection has run waits for a call, in the middle of a step of percore that has to "
                "end first: make such calls before, in a `with` block or a method that closes the object"
            )
        plain = self.families.plain
        with others_may_build():
            with self._waiting:
                if not self.waits:
                    plain.step_aside(self.call_id & ID_MASK)
                self.waits += 1
            try:
                until()
            finally:
                with self._waiting:
                    self.waits -= 1
                    if not self.waits:
                        plain.come_back(self.call_id & ID_MASK)


class Families:
    """All families of one worker."""

    def __init__(
        self, channel: "WorkerChannel", plain: "PlainCalls", variables: "Variables", shares: "WorkerShares", noted: set[int]
    ) -> None:
        """`noted`: the server tells `left` when a call in this set ends."""
        self.channel = channel
        self.plain = plain
        self.variables = variables
        self.shares = shares
        self.numbers = itertools.count(1)
        self.children: dict[int, Child] = {}
        self.open: dict[int, Family] = {}
        self._cancelled: set[int] = set()
        """Plain calls that were cancelled and run on. Some may have ended since."""
        self.runs: Callable[[int], bool] = plain.threads.runs
        """Whether a call runs. The server sets it, to ask for tasks, too."""
        self._enough = _FEW
        self._noted = noted
        self.handlers: dict[int, Callable[[int, Any], object]] = {
            op: lambda number, body, op=op: self._answer(number, op, body) for op in (ANSWER_VALUE, ANSWER_RESULT, ANSWER_ERROR)
        } | {ANSWER_ITEMS: self._items, ANSWER_ITEM: self._item}

    def of(self, call_id: int) -> Family:
        """Return the family of a call that runs."""
        family = self.open.get(call_id)
        if family is None:
            family = self.open.setdefault(call_id, Family(self, call_id))
            self._noted.add(call_id)
            if len(self.open) > self._enough:
                self._enough = 2 * len(self.open)
                self.channel.loop.call_soon_threadsafe(self._drop_left_behind)
            # It may have been no family yet when `fail` looked for it.
            if self.plain.has_expired(call_id):
                family.refusal = caller_overran
            elif call_id in self._cancelled:
                family.refusal, family.is_cancelled = asyncio.CancelledError, True
        return family

    def _drop_left_behind(self) -> None:
        """Drop the families of calls that have ended: tasks that they have left behind have asked for them. In the loop."""
        for call_id in list(self.open):
            if not self.runs(call_id):
                self.open.pop(call_id, None)
                self._noted.discard(call_id)
        self._enough = max(_FEW, 2 * len(self.open))

    def left(self, call_id: int) -> bool:
        """A call ends: end its family, if it has one. Return whether the call was cancelled before."""
        family = self.open.pop(call_id, None)
        if family is None:
            return False
        self._noted.discard(call_id)
        is_cancelled = family.is_cancelled
        family.end()
        return is_cancelled

    def fail(self, call_id: int, error: Callable[[], BaseException], *, refuses: bool = True) -> None:
        """End the nested calls of a call that goes on. `refuses`: it can make no more."""
        if refuses and error is asyncio.CancelledError:
            runs = self.plain.threads.runs
            self._cancelled = set(filter(runs, (*self._cancelled, call_id)))  # before the look for a family: see `of`
        family = self.open.get(call_id)
        if family is not None:
            family.is_cancelled |= error is asyncio.CancelledError
            with family.lock:
                family.refusal = error if refuses else None
            family.fail(error)

    def forget(self, child: Child) -> None:
        self.children.pop(child.number, None)

    def _answer(self, number: int, op: int, body: Body) -> None:
        child = self.children.get(number)
        if child is None:
            if op != ANSWER_VALUE and type(body) is int:
                self.channel.send_later(TAKEN, number, None)
            return
        if child.copies and op != ANSWER_VALUE and type(body) is int:
            body = self._copied(number, body)
        with child.family.lock:
            is_wanted = child.family.children.pop(number, None) is not None
            if is_wanted:
                self.forget(child)
                child.answer = op, body
        if is_wanted:
            child.tell(child)
        else:  # a thread has withdrawn it since this found it
            self.read(child, op, body)

    def _copied(self, number: int, parcel: int) -> bytes:
        data = bytes(self.channel.read(parcel))
        self.channel.send_later(TAKEN, number, None)
        return data

    def _items(self, number: int, body: tuple[list[Any], list[int]]) -> None:
        child = self.children.get(number)
        if isinstance(child, StreamChild):
            values, pickled = body
            places = set(pickled)
            child.arrived([(value, place in places) for place, value in enumerate(values)])

    def _item(self, number: int, body: "Payload") -> None:
        child = self.children.get(number)
        if isinstance(child, StreamChild):
            child.arrived([(self._copied(number, body) if type(body) is int else body, True)])
        elif type(body) is int:
            self.channel.send_later(TAKEN, number, None)

    def read(self, child: Child, op: int, body: Body) -> None:
        """Report that an answer is not needed any more, in any thread."""
        if op != ANSWER_VALUE and type(body) is int:
            self.channel.send_from_thread(TAKEN, child.number, None)

    def unpack(self, child: Child) -> Any:
        """Return the result of an answered call, or raise its exception. Runs user code, in any thread."""
        if child.failure is not None:
            raise child.failure
        answer = child.take_answer()
        assert answer is not None
        op, body = answer
        if op == ANSWER_VALUE:
            return body
        try:
            received = self.channel.load(body)
            result = received.load(load_exception) if op == ANSWER_ERROR else received.load()
        except Exception as error:
            raise unloadable("exception" if op == ANSWER_ERROR else "result", error) from error
        finally:
            self.read(child, op, body)
        if op == ANSWER_ERROR:
            raise result
        return result


def unloadable(what: str, error: Exception) -> RemoteError:
    """Return the error of a call or an item whose pickle could not be read here."""
    return RemoteError(type(error).__qualname__, f"the {what} could not be unpickled here: {shown(error)}")
