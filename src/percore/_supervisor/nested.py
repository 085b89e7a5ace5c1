"""Nested calls, which calls in workers make: it turns requests of workers into calls, and their outcomes into answers.

    worker ── ASK ──▶ Nested ─▶ NestedCall ─▶ CallRegistry, as any call
    worker ◀─ ANSWER_… ── Nested ◀─ outcome

The pickles pass through as bytes: the supervisor unpickles neither the function and its arguments nor the outcome.

How nobody waits for itself: a call with nested calls steps aside, that is, gives its place back, until its last nested call has
ended (`percore._scheduler.levels`). A nested call therefore finds a place even where all places were taken by calls that wait. It
takes no key that its caller, or the caller's caller, holds. And it needs no slot to be accepted: a pickle that finds none waits as
private bytes.

A family ends with its call: when the call leaves its worker, for whatever reason, its nested calls are cancelled.
"""

from collections import deque
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any, Final

from percore._calls.calls import PendingCall
from percore._calls.nested import ForeignFunction, NestedCall
from percore._calls.policy import DEFAULT, CallPlan, Policy
from percore._common.errors import as_error
from percore._common.fault_points import POINTS, point
from percore._common.worker_errors import WorkerDied
from percore._protocol.messages import (
    ANSWER_ERROR,
    ANSWER_RESULT,
    ANSWER_VALUE,
    ASK,
    ASKED,
    DROP,
    TAKEN,
    Body,
    BrokenFrame,
    Kind,
    Payload,
)
from percore._protocol.nested_calls import CALLER_ENDED, NestedRequest
from percore._scheduler.key_names import Name
from percore._scheduler.levels import MOST_ASIDE, Family
from percore._serialization.exceptions import dump_exception
from percore._serialization.pickler import main_info
from percore._supervisor.call_registry import CallRegistry
from percore._supervisor.pool_worker import PoolWorker

if TYPE_CHECKING:
    from pickle import PickleBuffer

_TOO_MANY: Final = f"more than {MOST_ASIDE} calls of this worker wait for calls that they have made: make fewer calls at once"


class _File:
    """A file for the pickle of an exception."""

    def __init__(self) -> None:
        self.data = bytearray()

    def write(self, data: "bytes | bytearray | memoryview | PickleBuffer", /) -> None:
        """Append `data`."""
        self.data += memoryview(data).cast("B")

    def contains(self, needle: bytes) -> bool:
        """Return whether `needle` was written."""
        return needle in self.data

    def reset(self) -> None:
        """Forget everything written."""
        self.data.clear()


class Parent(Family):
    """A call with nested calls, in its worker."""

    __slots__ = ("_name", "answer", "call", "depth", "keys", "member", "nested", "room")

    def __init__(self, nested: "Nested", room: "Room", call: PendingCall) -> None:
        super().__init__(waits_for_place=call.kind == Kind.TASK)
        self.nested = nested
        self.room = room
        self.member = room.member
        self.call = call
        above = call.asker if isinstance(call, NestedCall) else None
        assert above is None or isinstance(above, Parent)
        self.depth: int = 1 if above is None else above.depth + 1
        self.keys: dict[Hashable, str] = {} if above is None else dict(above.keys)
        """The keys that the call and its callers hold, and their holders."""
        if call.key is not None:
            self.keys[call.key] = call.function.name
        self.answer: tuple[int, Body] | None = None
        """The held answer."""
        self._name: Name | None = None

    def key(self) -> Name | None:
        """Return the key of nested calls without a key of their own; None if the call has none.

        It has the same worker as the call's key, and does not wait for it: the call holds that key for them.
        """
        if self.call.key is not None and self._name is None:
            self._name = Name(self.call.key.value, self.call.key.key_hash)
            self.nested.dispatch.keys.join(self._name, self.member)
        return self._name

    # As an Asker

    def returned(self, call: NestedCall, value: object) -> None:
        self.nested.answer(self, call.number, ANSWER_VALUE, value)

    def sent(self, call: NestedCall, data: memoryview | bytes, *, is_error: bool) -> None:
        self.nested.answer(self, call.number, ANSWER_ERROR if is_error else ANSWER_RESULT, self.nested.store.adopt(data))

    def failed(self, call: NestedCall, error: BaseException) -> None:
        if isinstance(error, WorkerDied):
            member, function = self.member, self.call.function
            module = function.module if isinstance(function, ForeignFunction) else getattr(function.fn, "__module__", "")
            error.add_note(f"called by {module}.{function.name} in worker {member.index} (pid {member.pid})")
        self.nested.answer(self, call.number, ANSWER_ERROR, self.nested.pickled(error))

    # As Relatives

    def end(self) -> None:
        self.nested.end(self)


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


class Nested:
    """The nested calls of one runner. The loop calls the methods."""

    def __init__(self, calls: CallRegistry, concurrency: int) -> None:
        self._calls = calls
        self._phase = calls.phase
        self._concurrency = concurrency
        self.dispatch = calls.dispatch
        self.store = calls.store
        self._rooms: dict[PoolWorker, Room] = {}
        self.held: deque[Parent] = deque()
        """Calls whose answer waits for their place."""

    def handlers(self, member: PoolWorker) -> dict[int, Callable[[int, Any], None]]:
        """Return the handlers of the messages of one worker, by op."""
        return {
            ASK: lambda number, body: self._ask(member, number, body),
            ASKED: lambda number, body: self._asked(member, number, body),
            DROP: lambda number, _: self._drop(member, number),
            TAKEN: lambda number, _: self._taken(member, number),
        }

    # Requests

    def _ask(self, member: PoolWorker, number: int, body: object) -> None:
        request = NestedRequest.checked(body)
        room = self._rooms.get(member)
        if room is None:
            room = self._rooms[member] = Room(member)
        if number in room.asked or number in room.announced:
            raise BrokenFrame(f"nested call {number} was made twice")
        if POINTS:
            point("supervisor.nested.asked")
        if request.pickle is None:
            room.announced[number] = True
        parent, refusal = self._parent(room, request)
        if parent is None or refusal is not None:
            self._refuse(room, number, RuntimeError(CALLER_ENDED) if refusal is None else refusal)
            return
        try:
            call = self._call(parent, number, request)
        except Exception as error:
            self._refuse(room, number, error)
            return
        room.asked[number] = parent, call
        if (held := parent.asks(number)) is not None:
            self._send_held(parent, held)
        if request.pickle is not None:
            self._accept(call, request.pickle)

    def _parent(self, room: Room, request: NestedRequest) -> tuple[Parent | None, Exception | None]:
        """Return the caller, whose place is free by now; or the error that it gets, None if it has ended."""
        member = room.member
        parent = member.families.get(request.caller)
        caller = member.calls.get(request.caller)
        if caller is None:
            return None, None
        if not self._phase.begins:
            return None, self._phase.refusal()
        if not isinstance(parent, Parent):
            parent = Parent(self, room, caller)
            if caller.kind != Kind.BROADCAST:
                if not member.step_aside(caller.kind):
                    return None, RuntimeError(_TOO_MANY)
                parent.is_aside = True
            member.families[request.caller] = parent
        return parent, None

    def _call(self, parent: Parent, number: int, request: NestedRequest) -> NestedCall:
        """Make a nested call. Nothing is sent yet.

        Raises:
            ValueError: the call or one of its callers holds the key.
        """
        key = parent.key() if request.inherits else None
        if request.key is not None:
            key = self.dispatch.names.of(request.key)
            if key in parent.keys:
                raise ValueError(
                    f"a call with the key {request.key!r} would wait for itself: {parent.keys[key]}, which has made it directly or "
                    "indirectly, holds this key until it ends. Leave the key out: nested calls belong to the key of their caller"
                )
        plan = None
        if request.timeout is not None or request.context is not None:
            plan = CallPlan(DEFAULT if request.timeout is None else Policy(timeout=request.timeout), request.context)
        function = ForeignFunction(request.name, request.module, request.kind)
        call = NestedCall(parent, self._calls, number, function, self.dispatch.level(parent.depth, request.kind), key, plan)
        if request.shares:
            self._calls.shares.hold_numbers(call, request.shares)
        return call

    def _refuse(self, room: Room, number: int, error: Exception) -> None:
        """Answer a request that becomes no call."""
        if number in room.announced:
            room.announced[number] = False
        self._tell(room, number, ANSWER_ERROR, self.pickled(error))

    def _asked(self, member: PoolWorker, number: int, payload: Payload) -> None:
        """The pickle of an announced call has arrived. It is copied, because the worker needs its slot for others."""
        room = self._rooms.get(member)
        if room is None or number not in room.announced:
            raise BrokenFrame(f"a pickle of nested call {number}, which was not announced")
        channel = member.worker.channel
        is_wanted = room.announced.pop(number)
        data = channel.read(payload)
        body = self.store.adopt(data) if is_wanted else None
        del data
        channel.release(payload)
        if body is not None:
            self._accept(room.asked[number][1], body)

    def _accept(self, call: NestedCall, body: Payload) -> None:
        call.body = body
        if POINTS:
            point("supervisor.nested.accepted")
        if self._phase.begins:
            self._calls.accept(call)
        else:
            self._calls.refuse(call)

    def _drop(self, member: PoolWorker, number: int) -> None:
        """The caller does not want a nested call any more: cancel it, or forget its answer."""
        room = self._rooms.get(member)
        if room is None:
            return
        parent, call = room.asked.pop(number, (None, None))
        if call is not None:
            self._cancel(room, call)
        else:
            parent = next((one for one in self.held if one.member is member and one.held == number), None)
        if parent is not None and parent.dropped(number):
            self._forget_held(parent)
            self._look_over(parent)

    def _cancel(self, room: Room, call: NestedCall) -> None:
        if room.announced.get(call.number):  # its pickle is still to come
            room.announced[call.number] = False
            self._calls.release(call)
        else:
            call.cancel()

    def _taken(self, member: PoolWorker, number: int) -> None:
        room = self._rooms.get(member)
        if room is None or number not in room.lent:
            raise BrokenFrame(f"an answer {number} was read that was not sent")
        self.store.discard(room.lent.pop(number))

    # Answers

    def answer(self, parent: Parent, number: int, op: int, body: Body) -> None:
        """Answer a nested call that has ended, or hold the answer until its caller has its place again."""
        room = parent.room
        if room.asked.pop(number, None) is None:
            self._discard(op, body)
            return
        if number in room.announced:  # it has ended before it was accepted
            room.announced[number] = False
        has_place = self._phase.is_cut or parent.member.has_place(Kind.TASK, self._concurrency)
        if parent.answered(number, has_place=has_place):
            self._tell(room, number, op, body)
            self._look_over(parent)
        else:
            parent.answer = op, body
            self.held.append(parent)

    def resume(self) -> None:
        """Let calls go on that have an answer, as far as their workers have places. To be called when calls have ended."""
        for _ in range(len(self.held)):
            if not self.held:
                return
            parent = self.held[0]
            self.held.rotate(-1)
            if self._phase.is_cut or parent.member.has_place(Kind.TASK, self._concurrency):
                held, parent.held = parent.held, None
                assert held is not None
                self._send_held(parent, held)
                self._look_over(parent)

    def _send_held(self, parent: Parent, number: int) -> None:
        answer, parent.answer = parent.answer, None
        self.held.remove(parent)
        assert answer is not None
        self._tell(parent.room, number, *answer)

    def _forget_held(self, parent: Parent) -> None:
        if parent.answer is not None:
            self.held.remove(parent)
            (op, body), parent.answer = parent.answer, None
            self._discard(op, body)

    def _look_over(self, parent: Parent) -> None:
        """Let a call come back that has no nested calls left."""
        if parent.is_over:
            if parent.member.families.get(parent.call.call_id) is parent:
                del parent.member.families[parent.call.call_id]
            self._come_back(parent)

    def _come_back(self, parent: Parent) -> None:
        if parent.is_aside:
            parent.is_aside = False
            parent.member.come_back(parent.call.kind)

    def _tell(self, room: Room, number: int, op: int, body: Body) -> None:
        if POINTS:
            point("supervisor.nested.answered")
        if op == ANSWER_VALUE or type(body) is not int:
            room.member.tell(op, number, body)
            return
        room.lent[number] = body
        room.member.worker.channel.send_parcel(op, number, body, _Lent(room, number))

    def _discard(self, op: int, body: Body) -> None:
        if op != ANSWER_VALUE and type(body) is int:
            self.store.discard(body)

    def pickled(self, error: BaseException) -> Payload:
        """Return an exception of this process as an answer."""
        file = dump_exception(as_error(error, "percore"), _File, main_by_value=bool(main_info().by_value))
        return self.store.adopt(bytes(file.data))

    # Ends

    def end(self, parent: Parent) -> None:
        """Cancel the nested calls of a call that has left its worker."""
        self._come_back(parent)
        self._forget_held(parent)
        room = parent.room
        numbers = list(parent.children)
        parent.children.clear()
        for number in numbers:
            _, call = room.asked.pop(number, (None, None))
            if call is not None:
                self._cancel(room, call)

    def buried(self, member: PoolWorker) -> None:
        """Forget a worker that is dead, and whose calls have ended."""
        for parent in list(member.families.values()):
            parent.end()
        member.families.clear()
        room = self._rooms.pop(member, None)
        if room is not None:
            while room.lent:
                self.store.discard(room.lent.popitem()[1])


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
