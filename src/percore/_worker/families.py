"""The nested calls of a worker's calls: they ask the supervisor, and take its answers.

How nobody waits for itself: while a call has nested calls that have not ended, it gives its place back to its worker and takes it
again before it goes on. A coroutine call gets its last answer only when it has its place. The thread of a plain call that waits
lets another thread run in its place (`Threads.step_aside`), and goes on once it is among the first `threads` again.
"""

import asyncio
import itertools
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Final

from percore._common.errors import RemoteError, shown
from percore._common.fault_points import POINTS, point
from percore._protocol.messages import ANSWER_ERROR, ANSWER_RESULT, ANSWER_VALUE, ASK, ASKED, DROP, ID_MASK, TAKEN, Body
from percore._protocol.nested_calls import CALLER_ENDED, NestedRequest
from percore._serialization.exceptions import load_exception

if TYPE_CHECKING:
    from percore._protocol.interfaces import WorkerChannel
    from percore._worker.plain_calls import PlainCalls
    from percore._worker.shared_objects import WorkerShares
    from percore._worker.terms import Variables

_INLINE: Final = 16_384
"""Bytes of the largest pickle that is part of an ASK."""


class Child:
    """A nested call. `tell` is called in the loop once the answer is there, or by `Family.fail`."""

    def __init__(self, family: "Family", number: int, tell: Callable[["Child"], object]) -> None:
        self.family = family
        self.number = number
        self.tell = tell
        self.answer: tuple[int, Any] | None = None
        self.failure: BaseException | None = None

    def take_answer(self) -> tuple[int, Any] | None:
        """Return the answer once: who gets it also reports that it was read."""
        answer, self.answer = self.answer, None
        return answer


class Family:
    """The nested calls of one call. Any thread may use it."""

    def __init__(self, families: "Families", call_id: int) -> None:
        self.families = families
        self.call_id = call_id
        self.lock = threading.Lock()
        self._waiting = threading.Lock()
        """Not `lock`, which the loop takes: a thread holds this one until it has its place again."""
        self.children: dict[int, Child] = {}
        self.is_over = self.is_cancelled = False
        self.waits = 0
        """How many threads wait for nested calls."""

    def ask(self, request: NestedRequest, tell: Callable[[Child], object]) -> Child:
        """Make a nested call.

        Raises:
            RuntimeError: the call has ended.
        """
        channel, number, pickle = self.families.channel, next(self.families.numbers), request.pickle
        child = Child(self, number, tell)
        is_large = pickle is not None and len(pickle) > _INLINE
        with self.lock:
            if self.is_over:
                raise RuntimeError(CALLER_ENDED)
            self.children[number] = self.families.children[number] = child
            channel.send_from_thread(ASK, number, tuple(request._replace(pickle=None) if is_large else request))
            if is_large:
                channel.send_payload(ASKED, number, pickle, channel.send_from_thread)
        if POINTS:
            point("worker.nested.asked")
        return child

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

    def end(self) -> None:
        """End the family with its call."""
        with self.lock:
            self.is_over = True
        self.fail(asyncio.CancelledError)

    def wait(self, gate: threading.Lock) -> None:
        """Wait in this thread until `gate` is released. A thread of a plain call gives its place back meanwhile."""
        plain = self.families.plain
        with self._waiting:
            if not self.waits:
                plain.step_aside(self.call_id & ID_MASK)
            self.waits += 1
        try:
            gate.acquire()
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
        self._noted = noted
        self.handlers: dict[int, Callable[[int, Any], object]] = {
            op: lambda number, body, op=op: self._answer(number, op, body)  # type: ignore[misc]
            for op in (ANSWER_VALUE, ANSWER_RESULT, ANSWER_ERROR)
        }

    def of(self, call_id: int) -> Family:
        """Return the family of a call that runs."""
        family = self.open.get(call_id)
        if family is None:
            family = self.open.setdefault(call_id, Family(self, call_id))
            self._noted.add(call_id)
        return family

    def left(self, call_id: int) -> bool:
        """A call ends: end its family, if it has one. Return whether the call was cancelled before."""
        family = self.open.pop(call_id, None)
        if family is None:
            return False
        is_cancelled = family.is_cancelled
        family.end()
        return is_cancelled

    def fail(self, call_id: int, error: Callable[[], BaseException]) -> None:
        """End the nested calls of a call that goes on."""
        family = self.open.get(call_id)
        if family is not None:
            family.is_cancelled |= error is asyncio.CancelledError
            family.fail(error)

    def forget(self, child: Child) -> None:
        self.children.pop(child.number, None)

    def _answer(self, number: int, op: int, body: Body) -> None:
        child = self.children.get(number)
        if child is None:
            if op != ANSWER_VALUE and type(body) is int:
                self.channel.send_later(TAKEN, number, None)
            return
        with child.family.lock:
            child.family.children.pop(number, None)
            self.forget(child)
            child.answer = op, body
        child.tell(child)

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
            what = "exception" if op == ANSWER_ERROR else "result"
            raise RemoteError(type(error).__qualname__, f"the {what} could not be unpickled here: {shown(error)}") from error
        finally:
            self.read(child, op, body)
        if op == ANSWER_ERROR:
            raise result
        return result
