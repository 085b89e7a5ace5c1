"""Nested calls, which calls in workers make: it turns requests of workers into calls.

    worker ── ASK ──▶ Nested ─▶ NestedCall ─▶ CallRegistry, as any call
    worker ◀─ ANSWER_… ── NestedAnswers ◀─ outcome

The pickles pass through as bytes: the supervisor unpickles neither the function and its arguments nor the outcome. There is one
exception: to decide whether a failed call gets another attempt, the supervisor looks at the type of its exception.

Why no call waits for itself: a call with nested calls steps aside, that is, gives its place back, until its last nested call has
ended (`percore._scheduler.levels`). A nested call therefore finds a place even where all places were taken by calls that wait. It
takes no key that its caller, or the caller's caller, holds, and none by which callers would wait for each other
(`percore._scheduler.key_waits`). And it needs no slot to be accepted: a pickle that finds none waits as
private bytes.

A family ends with its call: when the call leaves its worker, for whatever reason, its nested calls are cancelled.
"""

from collections.abc import Callable, Iterable
from functools import lru_cache
from typing import Any, Final, cast

from percore._calls.calls import PendingCall
from percore._calls.meters import Meters
from percore._calls.nested import ForeignFunction, NestedCall, NestedStream
from percore._calls.policy import DEFAULT, CallPlan, Policy
from percore._common.call_options import CallOptions, checked
from percore._common.callables import name_in
from percore._common.fault_points import POINTS, point
from percore._common.log import Faults
from percore._protocol.messages import (
    ANSWER_ERROR,
    ANSWER_VALUE,
    ASK,
    ASKED,
    CANCEL,
    CLOSE,
    CREDIT,
    DROP,
    GRANT,
    TAKEN,
    BrokenFrame,
    Kind,
    Payload,
)
from percore._protocol.nested_calls import CALLER_ENDED, NestedRequest, RequestOptions, is_plain_key
from percore._scheduler.key_waits import Knot, knot
from percore._scheduler.levels import MOST_ASIDE
from percore._serialization.pickler import load
from percore._supervisor.call_registry import CallRegistry
from percore._supervisor.nested_answers import NestedAnswers, Parent, Room
from percore._supervisor.pool_worker import PoolWorker

_TOO_MANY: Final = f"more than {MOST_ASIDE} calls of this worker wait for calls that they have made: make fewer calls at once"


class Nested:
    """The nested calls of one runner. The loop calls the methods."""

    def __init__(self, calls: CallRegistry, concurrency: int, retries: int, meters: Meters) -> None:
        """`retries`: those of calls without options of their own."""
        self._calls = calls
        self._meters = meters
        self._phase = calls.phase
        self._retries = retries
        self._policy = Policy(retries=retries) if retries else None
        self._dispatch = calls.dispatch
        self._store = calls.store
        self.rooms: dict[PoolWorker, Room] = {}
        self.answers = NestedAnswers(calls, concurrency)
        self.held = self.answers.held
        self.resume = self.answers.resume
        self._seen = 0
        """`Keys.changes` at the last look for callers that wait for each other."""

    def handlers(self, member: PoolWorker) -> dict[int, Callable[[int, Any], None]]:
        """Return the handlers of the messages of one worker, by op."""
        return {
            ASK: lambda number, body: self._ask(member, number, body),
            ASKED: lambda number, body: self._asked(member, number, body),
            DROP: lambda number, _: self._drop(member, number),
            TAKEN: lambda number, _: self._taken(member, number),
            GRANT: lambda number, items: self._grant(member, number, items),
            CLOSE: lambda number, _: self._close(member, number),
        }

    # Requests

    def _ask(self, member: PoolWorker, number: int, body: object) -> None:
        request = NestedRequest.checked(body)
        room = self.rooms.get(member)
        if room is None:
            room = self.rooms[member] = Room(member)
            _ = self.answers.no_memory
        if number in room.asked or number in room.announced or number in room.lent:
            raise BrokenFrame(f"nested call {number} was made twice")
        if POINTS:
            point("supervisor.nested.asked")
        if request.pickle is None:
            room.announced[number] = True
        parent, refusal = self._parent(room, request)
        if parent is None:
            self._refuse(room, number, RuntimeError(CALLER_ENDED) if refusal is None else refusal)
            return
        try:
            self._make_room(parent.call)
            call = self._call(parent, number, request)
        except Exception as error:
            self._refuse(room, number, error)
            self.answers.look_over(parent)
            return
        room.asked[number] = parent, call
        if (held := parent.asks(number)) is not None:
            self.answers.send_held(parent, held)
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
            parent = Parent(self.answers, room, caller)
            if caller.kind != Kind.BROADCAST:
                if not member.step_aside(caller):
                    return None, RuntimeError(_TOO_MANY)
                parent.is_aside = True
            member.families[request.caller] = parent
        return parent, None

    def _make_room(self, caller: PendingCall) -> None:
        """Keep the arguments of a caller, if another attempt may need them, where they take no room that nested calls need."""
        if type(caller.body) is int and caller.kind != Kind.BROADCAST and caller.call_id not in caller.member.parked:
            caller.body = self._store.unplaced(caller.body)

    def _call(self, parent: Parent, number: int, request: NestedRequest) -> NestedCall:
        """Make a nested call or stream. Nothing is sent yet.

        Raises:
            ValueError: the call or one of its callers holds the key.
            RuntimeError: callers would wait for each other's keys.
            Exception: an option is invalid, or could not be unpickled.
        """
        key = parent.key(is_stream=request.prefetch > 0) if request.inherits else None
        if request.key is not None:
            key = self._dispatch.names.of(request.key)
            if key in parent.keys:
                raise ValueError(
                    f"a call with the key {request.key!r} would wait for itself: {parent.keys[key]}, which has made it directly or "
                    "indirectly, holds this key until it ends. Leave the key out: nested calls belong to the key of their caller"
                )
            if stuck := self._knot(key, parent):
                raise _endless(stuck)
        meter = self._meters.named(name_in(request.module, request.name))
        function = ForeignFunction(request.name, request.module, request.kind, meter)
        queue = self._dispatch.level(parent.depth, request.kind)
        policy = self._policy if request.options is None else self._policy_of(RequestOptions(*request.options))
        call: NestedCall
        if request.prefetch:
            plan = CallPlan(Policy(prefetch=request.prefetch), request.context, prefetch=request.prefetch)
            call = NestedStream(parent, self._calls, number, function, queue, key, plan)
        else:
            needs_plan = request.context is not None or (policy is not None and policy.needs_plan)
            call_plan = CallPlan(policy or DEFAULT, request.context) if needs_plan else None
            call = NestedCall(parent, self._calls, number, function, queue, key, call_plan)
        if request.shares:
            self._calls.shares.hold_numbers(call, request.shares)
        return call

    def _policy_of(self, options: RequestOptions) -> Policy:
        retry_on, backoff = (None, 0.0) if options.retry is None else _retry_of(options.retry)
        given = CallOptions(
            retries=options.retries,
            retry_on=retry_on,
            backoff=backoff,
            timeout=options.timeout,
            queue_timeout=options.queue_timeout,
            hard_timeout=options.hard_timeout,
        )
        return Policy.of(checked(given, self._retries), self._retries)

    def _refuse(self, room: Room, number: int, error: Exception) -> None:
        """Answer a request that becomes no call."""
        if number in room.announced:
            room.announced[number] = False
        self.answers.tell(room, number, ANSWER_ERROR, self.answers.pickled(error))

    def _asked(self, member: PoolWorker, number: int, payload: Payload) -> None:
        """The pickle of an announced call has arrived. It is copied, because the worker needs its slot for others."""
        room = self.rooms.get(member)
        if room is None or number not in room.announced:
            raise BrokenFrame(f"a pickle of nested call {number}, which was not announced")
        channel = member.worker.channel
        is_wanted = room.announced.pop(number)
        data = channel.read(payload)
        try:
            if is_wanted:
                self._accept(room.asked[number][1], self._store.adopt(data))
        except Exception as error:  # there is no memory for it
            self._calls.failed_with(room.asked[number][1], error)
        finally:
            del data
            channel.release(payload)

    def _accept(self, call: NestedCall, body: Payload) -> None:
        call.body = body
        call.function.meter.sized(self._store.size(body) if type(body) is int else len(cast("bytes", body)))
        if POINTS:
            point("supervisor.nested.accepted")
        if self._phase.begins:
            if call.plan is not None and call.plan.policy.is_limited:
                self._calls.limits.limit(call, call.plan.policy)
            self._calls.accept(call)
        else:
            self._calls.refuse(call)

    def _drop(self, member: PoolWorker, number: int) -> None:
        """The caller does not want a nested call any more: cancel it, or forget its answer."""
        room = self.rooms.get(member)
        if room is None:
            return
        parent, call = room.asked.pop(number, (None, None))
        if call is not None:
            self.answers.cancel(room, call)
        else:
            parent = next((one for one in self.held if one.member is member and one.held == number), None)
        if parent is not None and parent.dropped(number):
            self.answers.forget_held(parent)
            self.answers.look_over(parent)

    def _taken(self, member: PoolWorker, number: int) -> None:
        room = self.rooms.get(member)
        if room is None:
            raise BrokenFrame(f"an answer {number} was read that was not sent")
        self.answers.taken(room, number)

    # Streams

    def _grant(self, member: PoolWorker, number: int, items: object) -> None:
        """The consumer of a stream has taken items."""
        room = self.rooms.get(member)
        found = None if room is None else room.stream(number)
        if found is None:  # it was dropped, or has ended
            return
        if type(items) is not int:
            raise BrokenFrame("items of a stream that are no number")
        stream = found[1]
        count = stream.taken(items)
        if stream.member is not None and not stream.done():
            stream.member.tell(CREDIT, stream.call_id, count)

    def _close(self, member: PoolWorker, number: int) -> None:
        """The consumer of a stream takes no more items, and waits for its end."""
        room = self.rooms.get(member)
        found = None if room is None else room.stream(number)
        if found is None:
            return
        parent, stream = found
        if stream.done() or stream.is_closing:
            return
        stream.is_closing = True
        at = stream.member
        if number in parent.room.announced or at is None or stream.call_id in at.parked:  # no worker has it
            self.answers.cancel(parent.room, stream)
            self.answers.answer(parent, number, ANSWER_VALUE, None)
        elif not self._phase.is_cut:
            at.tell(CANCEL, stream.call_id, None)

    # Keys

    def _knot(self, key: Any, parent: Parent) -> "list[Knot[PendingCall]]":
        """Return the callers that would wait for each other if this call wanted this key."""
        if not self._dispatch.keys.is_taken(key):
            return []
        wanting = dict.fromkeys(parent.callers(), key)
        return knot(key, self._holders, lambda call: _wanted(call, wanting))

    def _holders(self, key: Any) -> "Iterable[PendingCall]":
        """Return the calls for which a call with this key has to wait; none if it need not wait."""
        if not self._dispatch.keys.is_taken(key):
            return ()
        held = [call for member in list(self._calls.members) for call in list(member.calls.values())]
        return [call for call in held if call.key is key and call.kind != Kind.BROADCAST]

    def look_at_keys(self) -> None:
        """End calls of callers that wait for each other since the workers have changed, because a key has lost its worker."""
        if self._seen == self._dispatch.keys.changes:
            return
        self._seen = self._dispatch.keys.changes
        faults = Faults("the workers have changed")
        for parent, call in [pair for room in list(self.rooms.values()) for pair in list(room.asked.values())]:
            if call.key is None or call.member is not None or call.done() or call.number in parent.room.announced:
                continue
            if (parent.room.asked.get(call.number) or (None, None))[1] is call and (stuck := self._knot(call.key, parent)):
                self._calls.give_up(call, _endless(stuck), faults)
        faults.finish()

    # Ends

    def buried(self, member: PoolWorker) -> None:
        """Forget a worker that is dead, and whose calls have ended."""
        for parent in list(member.families.values()):
            parent.end()
        member.families.clear()
        room = self.rooms.pop(member, None)
        if room is not None:
            while room.lent:
                self._store.discard(room.lent.popitem()[1])


def _wanted(call: PendingCall, wanting: "dict[PendingCall, Any]") -> set[Any]:
    """Return the keys for which this call waits: nested calls that it has made, directly or indirectly, want them.

    The generator of a stream that may produce no more waits for what its consumer waits for. `wanting`: callers of a call that is
    about to be made, and the key that it wants.
    """
    wanted: set[Any] = set()
    todo, seen = [call], {id(call)}
    while todo:
        call = todo.pop()
        if call in wanting:
            wanted.add(wanting[call])
        related: list[PendingCall] = []
        if isinstance(call, NestedStream) and call.is_aside and isinstance(call.asker, Parent):
            related.append(call.asker.call)
        member: PoolWorker | None = call.member
        family = None if member is None else member.families.get(call.call_id)
        if isinstance(family, Parent):
            asked = family.room.asked
            nested = [asked[number][1] for number in family.children if number in asked]
            wanted.update(one.key for one in nested if one.member is None and one.key is not None)
            related += [one for one in nested if one.member is not None and not (isinstance(one, NestedStream) and one.is_aside)]
        todo += [one for one in related if id(one) not in seen]
        seen.update(map(id, related))
    return wanted


def _endless(stuck: "list[Knot[PendingCall]]") -> RuntimeError:
    """Return the error of a call for which callers would wait for each other."""
    waits = "; ".join(
        f"{one.caller.function.name} holds {_shown(one.key)} and waits for {', '.join(sorted(map(_shown, one.wanted)))}"
        for one in stuck
    )
    return RuntimeError(
        f"calls would wait for each other for ever: {waits}. Let all calls take their keys in the same order, "
        "or give such calls one key that they have in common"
    )


def _shown(key: Any) -> str:
    return f"the key {key.value!r}" if is_plain_key(key.value) else f"a key of the class {type(key.value).__name__}"


@lru_cache(64)
def _retry_of(data: bytes) -> tuple[Any, Any]:
    """Unpickle retry_on and backoff. Runs user code."""
    retry_on, backoff = cast("tuple[Any, Any]", load(data))
    return retry_on, backoff
