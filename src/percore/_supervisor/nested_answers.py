"""The answers to nested calls: on their way to the workers of the callers, or held until a caller has its place again."""

from collections import deque
from functools import cached_property
from typing import TYPE_CHECKING, Any, Final

from percore._calls.calls import PendingCall
from percore._calls.nested import ForeignFunction, NestedCall, NestedStream
from percore._common.errors import as_error
from percore._common.fault_points import POINTS, point
from percore._common.worker_errors import WorkerDied
from percore._protocol.messages import (
    ANSWER_ERROR,
    ANSWER_ITEM,
    ANSWER_ITEMS,
    ANSWER_RESULT,
    ANSWER_VALUE,
    Body,
    BrokenFrame,
    Kind,
    Payload,
)
from percore._scheduler.key_names import Name
from percore._scheduler.levels import Family
from percore._serialization.exceptions import dump_exception
from percore._serialization.pickler import MemoryFile, main_info
from percore._supervisor.call_registry import CallRegistry
from percore._supervisor.pool_worker import PoolWorker

if TYPE_CHECKING:
    from collections.abc import Hashable

_BARE: Final = frozenset({ANSWER_VALUE, ANSWER_ITEMS})
"""The answers whose bodies are no payloads."""


class Parent(Family):
    """A call with nested calls, in its worker. It is the `Asker` of its nested calls."""

    __slots__ = ("_name", "above", "answer", "answers", "call", "depth", "keys", "member", "room")

    def __init__(self, answers: "NestedAnswers", room: "Room", call: PendingCall) -> None:
        super().__init__(waits_for_place=call.kind == Kind.TASK)
        self.answers = answers
        self.room = room
        self.member = room.member
        self.call = call
        above = call.asker if isinstance(call, NestedCall) else None
        assert above is None or isinstance(above, Parent)
        self.above = above
        self.depth: int = 1 if above is None else above.depth + 1
        self.keys: dict[Hashable, str] = {} if above is None else dict(above.keys)
        """The keys that the call and its callers hold, and their holders."""
        if call.key is not None:
            self.keys[call.key] = call.function.name
        self.answer: tuple[int, Body] | None = None
        """The held answer."""
        self._name: Name | None = None

    def key(self, *, is_stream: bool = False) -> Name | None:
        """Return the key of nested calls without a key of their own; None if the call has none.

        It has the same worker as the call's key, and does not wait for it: the call holds that key for them. Each stream has one
        for itself, since it ends only when its consumer goes on, and that may be waiting for another nested call.
        """
        if self.call.key is None or (self._name is not None and not is_stream):
            return self._name
        name = Name(self.call.key.value, self.call.key.key_hash)
        self.answers.dispatch.keys.join(name, self.member, is_lent=not is_stream)
        if not is_stream:
            self._name = name
        return name

    def drop_key(self) -> None:
        """Forget the key that nested calls have had from this one: no other call can have it."""
        name, self._name = self._name, None
        if name is not None:
            self.answers.dispatch.keys.leave(name)

    def callers(self) -> list[PendingCall]:
        """Return the call, its caller, the caller's caller, and so on."""
        found: list[PendingCall] = []
        parent: Parent | None = self
        while parent is not None:
            found.append(parent.call)
            parent = parent.above
        return found

    # As an Asker

    def returned(self, call: NestedCall, value: object) -> None:
        self.answers.pass_on(self, call, ANSWER_VALUE, value)

    def sent(self, call: NestedCall, data: memoryview | bytes, *, is_error: bool) -> None:
        self.answers.pass_on(self, call, ANSWER_ERROR if is_error else ANSWER_RESULT, self.answers.store.adopt(data))

    def failed(self, call: NestedCall, error: BaseException) -> None:
        if isinstance(error, WorkerDied):
            member, function = self.member, self.call.function
            module = function.module if isinstance(function, ForeignFunction) else getattr(function.fn, "__module__", "")
            error.add_note(f"called by {module}.{function.name} in worker {member.index} (pid {member.pid})")
        self.answers.pass_on(self, call, ANSWER_ERROR, self.answers.pickled(error))

    def items(self, call: NestedStream, values: list[Any], pickled: list[int]) -> None:
        self.answers.pass_on(self, call, ANSWER_ITEMS, (values, pickled))
        self._look_at(call)

    def item(self, call: NestedStream, data: memoryview | bytes) -> None:
        self.answers.pass_on(self, call, ANSWER_ITEM, self.answers.store.adopt(data))
        self._look_at(call)

    def _look_at(self, call: NestedStream) -> None:
        if call.is_aside and call.key is not None:  # calls that want its key now wait for its consumer
            self.answers.dispatch.keys.changes += 1

    # As Relatives

    def end(self) -> None:
        self.answers.end(self)


class Room:
    """What the supervisor keeps for the nested calls of one worker."""

    def __init__(self, member: PoolWorker) -> None:
        self.member = member
        self.asked: dict[int, tuple[Parent, NestedCall]] = {}
        """The nested calls without an answer, by their numbers."""
        self.announced: dict[int, bool] = {}
        """The nested calls whose pickle is still to come, and whether it is wanted."""
        self.lent: dict[int, int] = {}
        """Parcels of answers that the worker has not read yet."""

    def stream(self, number: int) -> tuple[Parent, NestedStream] | None:
        """Return the stream of this number and its consumer; None if it has ended."""
        parent, call = self.asked.get(number, (None, None))
        if parent is None:
            return None
        if not isinstance(call, NestedStream):
            raise BrokenFrame(f"nested call {number} is no stream")
        return parent, call


class NestedAnswers:
    """The answers of one runner. The loop calls the methods."""

    def __init__(self, calls: CallRegistry, concurrency: int) -> None:
        self._calls = calls
        self._phase = calls.phase
        self._concurrency = concurrency
        self.dispatch = calls.dispatch
        self.store = calls.store
        self.held: deque[Parent] = deque()
        """Calls whose answer waits for their place."""

    @cached_property
    def no_memory(self) -> Payload:
        """The answer if there is no memory to pickle another one. To be asked for before that."""
        return self._pickled(MemoryError("the program had no memory for the outcome of a call"))

    def pass_on(self, parent: Parent, call: NestedCall, op: int, body: Body) -> None:
        """Send items, or answer a nested call that has ended.

        Later messages could overtake a parcel that waits for a slot. So those of a stream wait until its last parcel was read.
        """
        if isinstance(call, NestedStream) and (call.outbox or call.number in parent.room.lent):
            call.outbox.append((op, body))
        else:
            self._send(parent, call.number, op, body)

    def _send(self, parent: Parent, number: int, op: int, body: Body) -> None:
        if op in (ANSWER_ITEMS, ANSWER_ITEM):
            self.tell(parent.room, number, op, body)
        else:
            self.answer(parent, number, op, body)

    def taken(self, room: Room, number: int) -> None:
        """The worker has read a parcel."""
        if number not in room.lent:
            raise BrokenFrame(f"an answer {number} was read that was not sent")
        self.store.discard(room.lent.pop(number))
        parent, call = room.asked.get(number, (None, None))
        if parent is not None and isinstance(call, NestedStream):
            while call.outbox and number not in room.lent:
                self._send(parent, number, *call.outbox.popleft())

    def answer(self, parent: Parent, number: int, op: int, body: Body) -> None:
        """Answer a nested call that has ended, or hold the answer until its caller has its place again."""
        room = parent.room
        if room.asked.pop(number, None) is None:
            self._discard(op, body)
            return
        if number in room.announced:  # it has ended before it was accepted
            room.announced[number] = False
        if parent.answered(number, has_place=self._has_place(parent)):
            self.tell(room, number, op, body)
            self.look_over(parent)
        else:
            parent.answer = op, body
            self.held.append(parent)

    def _has_place(self, parent: Parent) -> bool:
        return self._phase.is_cut or parent.member.has_place(Kind.TASK, self._concurrency)

    def resume(self) -> None:
        """Let calls go on that have an answer, as far as their workers have places. To be called when calls have ended."""
        for _ in range(len(self.held)):
            if not self.held:
                return
            parent = self.held[0]
            self.held.rotate(-1)
            if self._has_place(parent):
                held, parent.held = parent.held, None
                assert held is not None
                self.send_held(parent, held)
                self.look_over(parent)

    def send_held(self, parent: Parent, number: int) -> None:
        """Send the held answer, which is that of this nested call."""
        answer, parent.answer = parent.answer, None
        self.held.remove(parent)
        assert answer is not None
        self.tell(parent.room, number, *answer)

    def forget_held(self, parent: Parent) -> None:
        """Drop the held answer, if there is one."""
        if parent.answer is not None:
            self.held.remove(parent)
            (op, body), parent.answer = parent.answer, None
            self._discard(op, body)

    def look_over(self, parent: Parent) -> None:
        """Let a call come back that has no nested calls left."""
        if parent.is_over:
            if parent.member.families.get(parent.call.call_id) is parent:
                del parent.member.families[parent.call.call_id]
            self._come_back(parent)
            parent.drop_key()

    def _come_back(self, parent: Parent) -> None:
        if parent.is_aside:
            parent.is_aside = False
            parent.member.come_back(parent.call)

    def tell(self, room: Room, number: int, op: int, body: Body) -> None:
        """Send a message to the worker of a caller."""
        if POINTS:
            point("supervisor.nested.answered")
        if op in _BARE or type(body) is not int:
            room.member.tell(op, number, body)
            return
        room.lent[number] = body
        room.member.worker.channel.send_parcel(op, number, body, _Lent(room, number))

    def _discard(self, op: int, body: Body) -> None:
        if op not in _BARE and type(body) is int:
            self.store.discard(body)

    def pickled(self, error: BaseException) -> Payload:
        """Return an exception of this process as an answer. Each caller gets one: without memory for it, MemoryError."""
        try:
            return self._pickled(error)
        except MemoryError:
            return self.no_memory

    def _pickled(self, error: BaseException) -> Payload:
        file = dump_exception(as_error(error, "percore"), MemoryFile, main_by_value=bool(main_info().by_value))
        return self.store.adopt(bytes(file.data))

    # Ends

    def cancel(self, room: Room, call: NestedCall) -> None:
        """Cancel a nested call that was removed from `asked`."""
        if isinstance(call, NestedStream):
            while call.outbox:
                self._discard(*call.outbox.popleft())
        if room.announced.get(call.number):  # its pickle is still to come
            room.announced[call.number] = False
            self._calls.release(call)
        else:
            call.cancel()

    def end(self, parent: Parent) -> None:
        """Cancel the nested calls of a call that has left its worker."""
        self._come_back(parent)
        self.forget_held(parent)
        room = parent.room
        numbers = list(parent.children)
        parent.children.clear()
        for number in numbers:
            _, call = room.asked.pop(number, (None, None))
            if call is not None:
                self.cancel(room, call)
        parent.drop_key()


class _Lent:
    """The channel's ticket for the parcel of an answer."""

    __slots__ = ("_number", "_room")

    def __init__(self, room: Room, number: int) -> None:
        self._room = room
        self._number = number

    def is_wanted(self) -> bool:
        return self._number in self._room.lent

    def stored(self, parcel: int) -> bool:
        lent = self._room.lent
        if self._number not in lent:
            return False
        lent[self._number] = parcel
        return True
