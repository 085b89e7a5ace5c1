"""One worker as the supervisor keeps it: its life, what it was sent, what it has done."""

import asyncio
import sys
from array import array
from math import frexp
from typing import TYPE_CHECKING, Any, Final, TypeAlias

from percore._calls import Awaited, Call, Function
from percore._core.dispatch import Dispatch, places_for
from percore._core.lifecycle import Deadline, Life, State
from percore._ipc.slots import INLINE_LIMIT
from percore._items import Batch, Item
from percore._messages import BATCH, DEFINE, ID_MASK, ONCE_OPS, RECALL, TERMS, Kind

if TYPE_CHECKING:
    from collections.abc import Callable

    from percore._engine import Worker
    from percore._ipc.ring import RingWriter
    from percore._messages import Body
    from percore._patience import Patience


Unit: TypeAlias = Awaited | Call | Item | Batch
"""What is sent to a worker, and takes one of its places."""

_LATE: Final = 0.005
"""Seconds without reading anything after which a worker with something to read is behind. Reading takes far less."""


class Turn:
    """The time at which this iteration of the loop began to be looked at, the same until the iteration ends.

    What workers say is heard between two iterations: however long one takes, in it nobody is silent any longer.
    """

    def __init__(self, loop: asyncio.AbstractEventLoop) -> None:
        self.loop = loop
        self._time: float | None = None

    def time(self) -> float:
        """As `loop.time()`, frozen."""
        if self._time is None:
            self._time = self.loop.time()
            self.loop.call_soon(self._end)
        return self._time

    def _end(self) -> None:
        self._time = None


class Member:
    """A worker of a slot, from its start to its end."""

    tickets = sys.maxsize
    """Calls that it may still begin."""

    def __init__(self, index: int, generation: int, dispatch: "Dispatch[Any, Member]", turn: "Turn") -> None:
        self.index = index
        self.generation = generation
        self.life = Life()
        self.worker: Worker
        self._tx: RingWriter
        self._send: Callable[[int, int, Body], None]
        self.calls: dict[int, Unit] = {}
        self.parked: set[int] = set()
        """Ids of calls that wait for a slot for their arguments, and so have not been sent after all."""
        self.defined: set[int] = set()
        self.leases: list[int] = []
        """Payloads whose slots its arrays lie in. It holds a few at most."""
        self.load = [0, 0, 0]
        self._batched = 0
        self.recalling = self.gave_back = False
        self.asked_at = 0
        self.told_pid: int | None = None
        self.done = 0
        self.failed = 0
        self.retried = 0
        self._left, self._lowered = dispatch.left, dispatch.lowered
        self._turn = turn
        self.started_at = turn.loop.time()
        self.killed_why = ""
        self.was_ready = False
        self.failure: BaseException | None = None
        """Why its start or its lifespan has failed."""
        self.is_interrupted = False
        self.deadline: Deadline | None = None
        self.timer: Patience | None = None
        """While a deadline runs."""
        # An id is a place and how often it was used. So it names the place of its start mark, and comes again only after
        # 2**48 / stride uses of one place.
        self.stride = places_for(dispatch.room)
        self.free = [place + self.stride for place in reversed(range(self.stride))]

    @property
    def pid(self) -> int | None:
        # A worker may be ready before its launcher has heard of its birth; then its own word counts.
        return self.told_pid if self.worker.pid is None else self.worker.pid

    def attach(self, worker: "Worker") -> None:
        """The worker runs."""
        self.worker = worker
        self._tx = worker.channel.tx
        self._send = worker.channel.send

    def silence(self) -> int:
        """For how long the worker has read nothing, while there was something to read: 0 when that is not worth mentioning.

        Above it, the worker's loop may be blocked. A step is twice as long as the one before, so that of two workers that read
        equally late the less loaded one gets the next call.
        """
        tx = self._tx
        if tx.written == tx.acknowledged:
            return 0
        seconds = self._turn.time() - self.worker.channel.waits_since
        if seconds <= 0:  # it was sent later than this iteration of the loop began, so nothing can have been heard of it yet
            return 0
        return max(0, frexp(seconds / _LATE)[1])

    def has_read(self) -> bool:
        """Whether the worker has read all that it was sent. If it has not, `advance` is called when it has."""
        return self.worker.channel.has_read()

    @property
    def items(self) -> int:
        """Plain calls sent and not ended, those in batches counted one by one."""
        return self.load[Kind.THREAD] + self._batched

    def send(self, call: Unit) -> None:
        """Send a call or a batch. The worker must have room."""
        number = call.function.number
        if number not in self.defined:
            number = self._define(call.function)
        call_id = self.free.pop()
        if call_id > ID_MASK:  # the bits above it are for the numbers of items
            call_id = call_id % self.stride + self.stride
        call.call_id = call_id
        call.member = self
        self.calls[call_id] = call
        self.load[call.kind] += 1
        body = call.body
        if body is None:
            self._batched += call.size - 1
        if call.plan is not None and call.plan.terms is not None:
            self._send(TERMS, call_id, call.plan.terms)
        if body is None:
            self._send(BATCH, call_id, call.message())  # type: ignore[union-attr]  # no other has none
        elif type(body) is bytes and len(body) > INLINE_LIMIT:
            self.parked.add(call_id)
            self.worker.channel.send_payload(number, call_id, body, ticket=_Parked(self, call))  # type: ignore[arg-type]  # no batch
        else:
            self._send(number, call_id, body)

    def ask_back(self, wanted: int, times_ahead: int) -> None:
        """Ask for so many calls that have not begun. Those with a key stay: their key is here."""
        self.recalling = True
        self.asked_at = times_ahead
        calls = self.calls.items()
        stay = [call_id % self.stride for call_id, call in calls if call.key is not None and call.kind == Kind.THREAD]
        self.worker.channel.send(RECALL, wanted, array("I", stay).tobytes())

    def shrink(self, items: int) -> None:
        """So many items of a batch have ended or come back."""
        self._batched -= items

    def _define(self, function: Function) -> int:
        """How to name the function: by its number, told now, or not at all, since it travels with the call."""
        if not function.number:
            return ONCE_OPS[function.kind]
        self.defined.add(function.number)
        self._send(DEFINE, function.number, (function.kind, function.payload))
        return function.number

    def take(self, call_id: int) -> Unit:
        """The call of that id, which the worker is done with; its place is free.

        Raises:
            KeyError: it has no such call.
        """
        call = self.calls.pop(call_id)
        if call_id in self.parked:
            self.parked.discard(call_id)
            if call.plan is not None and call.plan.terms is not None:
                self._send(TERMS, call_id, None)  # the call they were for will not come
        self.free.append(call_id + self.stride)
        self.load[call.kind] -= 1
        self._lowered()
        call.member = None
        if type(call) is Batch:
            self._batched -= call.outstanding - 1
            call.flow.left(call)
        if call.key is not None:
            self._left(call)
        return call

    def give_up(self, call: Unit) -> None:
        """Take a call of which the worker may not have heard, and let it forget what it was told of it."""
        if call.plan is not None and call.plan.terms is not None and call.call_id not in self.parked:
            self._send(TERMS, call.call_id, None)
        self.take(call.call_id)

    def began(self, call: Unit) -> tuple[float, int] | None:
        """When a call had begun here, by `time.monotonic`, and how many of its items; None: it had not.

        A decision needs a dead worker: the marks of one that lives may be out of date.
        """
        return self.worker.began(call.call_id % self.stride, call.call_id)

    def statistics(self, threads: int, *, may_look: bool) -> tuple[int, int]:
        """Calls running and calls queued ahead, as far as the supervisor knows.

        A worker that has not read all it was sent, since its loop is blocked or only busy, runs what its start marks say.
        `may_look`: whether they may be read, which another thread without a GIL must not.
        """
        if may_look and (self.parked or not self.has_read()):
            ids = [call_id for call_id in list(self.calls) if call_id not in self.parked]
            try:
                running = sum(self.worker.began(call_id % self.stride, call_id) is not None for call_id in ids)
            except ValueError:  # the marks are released: the loop's thread has buried it while another one was asking
                return 0, 0
            return running, max(0, len(self.calls) - running) + self._batched
        tasks, plain = self._held()
        running = tasks + self.load[Kind.BESIDE] + min(threads, plain)
        return running, max(0, plain - threads) + self._batched

    def _held(self) -> tuple[int, int]:
        """The coroutines and the plain calls that it has."""
        return self.load[Kind.TASK], self.load[Kind.THREAD]

    @property
    def is_spent(self) -> bool:
        """Whether it has been sent all the calls that it may begin."""
        return False

    def unbegun(self, calls: int) -> None:
        """So many calls came back that it had not begun."""

    def stop_timer(self) -> None:
        """No deadline runs any more. Idempotent."""
        self.deadline = None
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    @property
    def is_ready(self) -> bool:
        return self.life.state is State.READY


class _Parked:
    """A call whose arguments wait for a slot: the worker does not know of it yet."""

    __slots__ = ("_call", "_call_id", "_member")

    def __init__(self, member: Member, call: Awaited | Call | Item) -> None:
        self._member = member
        self._call = call
        self._call_id = call.call_id

    def is_wanted(self) -> bool:
        return self._call_id in self._member.parked

    def stored(self, payload: int) -> bool:
        parked = self._member.parked
        if self._call_id not in parked:  # a `__del__`, run by a collection while it was stored, has cancelled the call
            return False
        # The slot is the call's from now on, as if it had been pickled there.
        self._call.body = payload
        parked.discard(self._call_id)
        return True
