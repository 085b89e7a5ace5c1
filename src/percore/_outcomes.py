"""What workers say, and what becomes of it: outcomes to futures, places to the next call."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from percore._errors import RemoteError
from percore._ipc.exceptions import load_exception
from percore._ipc.pickles import load
from percore._ipc.ring import BrokenFrame
from percore._member import Member
from percore._messages import (
    CANCELLED,
    DRAINING,
    ERROR,
    READY,
    RELEASE,
    RESULT,
    RETURNED,
    SLOT_BITS,
    SLOT_MASK,
    UNPICKLED,
    UNREADY,
    VALUE,
    Body,
    Payload,
)
from percore._points import POINTS, point

if TYPE_CHECKING:
    from percore._supervisor import Slot, Supervisor


class Outcomes:
    """Receives the messages of all workers of a supervisor."""

    def __init__(self, supervisor: "Supervisor") -> None:
        self._supervisor = supervisor

    def receiver(self, slot: "Slot", member: Member) -> Callable[[int, int, Body], None]:
        """What to call with each message of one worker. Raises whatever a broken worker deserves: the channel then breaks."""
        handlers: dict[int, Callable[[int, Any], None]] = {
            RESULT: lambda call_id, body: self._result(member, call_id, body),
            ERROR: lambda call_id, body: self._error(member, call_id, body),
            CANCELLED: lambda call_id, _: self._cancelled(member, call_id),
            RETURNED: lambda call_id, _: self._returned(member, call_id),
            UNPICKLED: lambda call_id, _: self._supervisor.release(member.calls[call_id]),
            READY: lambda _, pid: self._ready(slot, member, pid),
            UNREADY: lambda _, body: self._unready(member, body),
            DRAINING: lambda _, __: self._supervisor.draining(slot, member),
        }

        calls, free, stride, load = member.calls, member.free, member.stride, member.load

        def receive(op: int, call_id: int, body: Body) -> None:
            if op == VALUE:
                # As `member.take` and `_ended`, without the calls: this is the path of most outcomes.
                call = calls[call_id]
                if not call.done():
                    call.set_result(body)
                del calls[call_id]
                free.append(call_id + stride)
                load[call.kind] -= 1
                call.member = None
                member.done += 1
                if type(call.body) is not tuple:  # a future may be held for long, its arguments need not
                    self._supervisor.release(call)
                if POINTS:
                    point("supervisor.outcome.delivered")
            elif op in handlers:
                handlers[op](call_id, body)
            else:
                raise BrokenFrame(f"message {op} does not exist")

        return receive

    def _ready(self, slot: "Slot", member: Member, pid: int) -> None:
        member.told_pid = pid
        self._supervisor.ready(slot, member)

    def _unready(self, member: Member, payload: Payload) -> None:
        error = load_exception(self._bytes(member, payload))
        self._supervisor.unready(member, error, _text(error))

    def _bytes(self, member: Member, payload: Payload) -> memoryview | bytes:
        return member.worker.channel.incoming.read(payload)

    def _release(self, member: Member, payload: Payload) -> None:
        if type(payload) is int:
            member.worker.channel.send(RELEASE, payload & SLOT_MASK, payload >> SLOT_BITS)

    # Until its future is done a call stays its worker's: whatever breaks the channel before that, it ends when the worker does.

    def _result(self, member: Member, call_id: int, payload: Payload) -> None:
        call = member.calls[call_id]
        data = self._bytes(member, payload)
        if call.done():  # cancelled: nobody will look at it, and unpickling would run user code for nothing
            self._release(member, payload)
            self._ended(member, call_id)
            return
        result: Any = None
        failure: BaseException | None = None
        try:
            result = load(data)
        except BaseException as error:  # user code: whatever it raises is this call's, converted
            failure = error
        if isinstance(data, memoryview):
            data.release()
        if not call.done():
            if failure is None:
                call.set_result(result)
            else:
                call.set_exception(_unloadable(failure))
        self._release(member, payload)
        self._ended(member, call_id, failed=failure is not None)
        if isinstance(failure, KeyboardInterrupt):  # taken for the terminal's: to swallow that would be worse than one worker less
            raise failure

    def _error(self, member: Member, call_id: int, payload: Payload) -> None:
        call = member.calls[call_id]
        data = self._bytes(member, payload)
        error = load_exception(data)
        if isinstance(data, memoryview):
            data.release()
        if not call.done():
            call.set_exception(error)
        self._release(member, payload)
        self._ended(member, call_id, failed=True)

    def _cancelled(self, member: Member, call_id: int) -> None:
        call = member.calls[call_id]
        if not call.done():
            # Not by its caller (the future would be done): by closing.
            call.cut_off()
        self._ended(member, call_id)

    def _returned(self, member: Member, call_id: int) -> None:
        supervisor = self._supervisor
        if call_id == 0:  # a recall has been answered in full
            member.recalling = False
            if not member.gave_back:
                supervisor.dispatch.nothing_is_ahead()  # what it holds waits for a slot: asking again would go on for ever
            member.gave_back = False
            return
        member.gave_back = True
        call = member.take(call_id)
        if call.done():
            supervisor.release(call)
        elif supervisor.is_cut or supervisor.broken is not None:
            supervisor.refuse(call)
        else:
            supervisor.dispatch.returned([call])

    def _ended(self, member: Member, call_id: int, *, failed: bool = False) -> None:
        self._supervisor.release(member.take(call_id))
        member.done += 1
        member.failed += failed
        if POINTS:
            point("supervisor.outcome.delivered")


def _unloadable(error: BaseException) -> Exception:
    """What a caller gets whose result could not be unpickled here."""
    failure = RemoteError(type(error).__qualname__, f"the result could not be unpickled here: {error!r}")
    failure.__cause__ = error if isinstance(error, Exception) else None
    return failure


def _text(error: BaseException) -> str:
    cause = error.__cause__
    while cause is not None and cause.__cause__ is not None and cause.__cause__ is not cause:
        cause = cause.__cause__
    return str(cause) if cause is not None else f"{type(error).__name__}: {error}"
