"""One worker as the supervisor sees it: its state, the calls it holds and its counts.

The pool creates a `PoolWorker` for each worker it starts. Each call in `PoolWorker.calls` holds one place in the worker until the
worker reports an outcome, hands the call back or dies.
"""

import sys
from array import array
from math import frexp
from typing import TYPE_CHECKING, Any, Final, Protocol

from percore._calls.calls import PendingCall
from percore._calls.functions import Function
from percore._common.measuring import Histogram
from percore._common.worker_errors import WorkerDied
from percore._protocol.interfaces import Exit, Fate
from percore._protocol.messages import BATCH, BEGIN_BY, DEFINE_OPS, ID_MASK, ONCE_OPS, RECALL, TERMS, TIMEOUT, Kind
from percore._scheduler.lifecycle import Deadline, Life, State
from percore._scheduler.places import ROOM_OF_NONE, places_at_first, places_for

if TYPE_CHECKING:
    from collections.abc import Callable

    from percore._calls.shared_objects import Shares
    from percore._protocol.interfaces import Channel, Worker
    from percore._protocol.messages import Body
    from percore._scheduler.dispatch import Dispatch
    from percore._supervisor.timing import DeadlineTimer, Turn


_LATE: Final = 0.005
"""Seconds after which a worker that has messages but reads none counts as behind. Reading takes far less."""


class Relatives(Protocol):
    """The nested calls of one call, as its worker sees them."""

    def end(self) -> None:
        """End them, because the call has left the worker."""


class PoolWorker:
    """One worker of a pool slot, from its start to its end."""

    # Of an instance with more than thirty attributes, CPython looks up each of them in a dictionary: calls took the program 3 to
    # 5 % longer. `__dict__` is for the `send` of `limit`.
    __slots__ = (
        "__dict__", "__weakref__", "_aside", "_batched", "_begin_by", "_channel", "_holders", "_left", "_lowered", "_moved",
        "_note_ahead", "_ran", "_reasons", "_shares", "_spares", "_timeout", "_turn", "asked_at", "calls",
        "deadline", "defined", "done", "end", "failed", "failure", "families", "free", "gave_back", "generation", "index",
        "is_holding", "is_interrupted", "is_sending", "killed_why", "life", "load", "memory", "parked", "places", "recalling",
        "retried", "run_times", "started_at", "stride", "tell", "timer", "was_ready", "worker"
    )  # fmt: skip

    tickets = sys.maxsize
    """Number of calls that the worker may still begin."""

    def __init__(  # noqa: PLR0915  # one state
        self, index: int, generation: int, dispatch: "Dispatch[Any, PoolWorker]", turn: "Turn"
    ) -> None:
        self.index = index
        self.generation = generation
        self.life = Life()
        self.worker: Worker
        self._channel: Channel
        self.tell: Callable[[int, int, Body], None]
        """Sends a message to the worker: op, id, body. Bound once, in `attach`, since every call uses it."""
        self.calls: dict[int, PendingCall] = {}
        self.parked: set[int] = set()
        """Ids of calls whose arguments wait for room in the store. The worker has not been sent these calls yet."""
        self.defined: set[int] = set()
        self.load = [0, 0, 0]
        self._batched = 0
        self.recalling = self.gave_back = False
        self.asked_at = 0
        self.done = 0
        self.failed = 0
        self.retried = 0
        self.run_times = Histogram()
        """For how many nanoseconds its calls have run."""
        self._ran: dict[str, int] = {}
        """How many calls ran when the worker died, by the name of the function."""
        self._begin_by: float | None = None
        """The body of the last BEGIN_BY."""
        self._timeout: float | None = None
        """The body of the last TIMEOUT."""
        self._left, self._lowered, self._moved = dispatch.left, dispatch.lowered, dispatch.moved
        self._note_ahead = dispatch.recalls.note_ahead
        self.is_sending = False
        """Whether a call is being sent. Code that a garbage collection runs meanwhile must not overtake it by a CANCEL."""
        self.is_holding = False
        self.families: dict[int, Relatives] = {}
        """The nested calls of calls, by the id of the call that has made them."""
        self._aside = [0, 0]
        """By kind, the calls that wait for their nested calls and have given their places back."""
        self._reasons: dict[int, int] = {}
        """How many reasons to be aside each of these calls has, by id."""
        self._spares = 0
        """How many places were added because calls are, or were, aside."""
        self._turn = turn
        self.started_at = turn.loop.time()
        self.killed_why = ""
        self.memory: int | None = None
        """How many bytes of memory it had at the last sample; None: there was none."""
        self.end = Exit(None)
        """How the worker has ended, once it has."""
        self.was_ready = False
        self.failure: BaseException | None = None
        """The error by which the worker's start or lifespan failed."""
        self.is_interrupted = False
        self.deadline: Deadline | None = None
        self.timer: DeadlineTimer | None = None
        """The timer of `deadline`; None if no deadline runs."""
        # A call id combines a place (id % stride) with a use count (id // stride). So the id gives the place of the call's start
        # mark, and an id repeats only after 2**48 / stride uses of one place.
        self.stride = places_for(dispatch.room)
        self.places = places_at_first(dispatch.room)
        """How many places are in use. It grows with the number of calls that are aside."""
        self.free = [place + self.stride for place in reversed(range(self.places))]

    @property
    def pid(self) -> int | None:
        return self.worker.pid

    @property
    def name(self) -> str:
        """The worker's name in messages. A worker whose process never started has no pid."""
        return f"worker {self.index}" + ("" if self.pid is None else f" (pid {self.pid})")

    def attach(self, worker: "Worker", shares: "Shares") -> None:
        """Attach the worker that the engine has started."""
        self._shares, self._holders = shares, shares.held
        self.worker = worker
        self._channel = worker.channel
        self.tell = worker.channel.send

    def silence(self) -> int:
        """Return how long the worker has had messages but read none, in coarse steps; 0 if that is negligible.

        From 1 on, the worker's loop may be blocked. Each step is twice as long as the previous one. So two workers that are about
        equally late get the same step, and the less loaded one gets the next call.
        """
        since = self._channel.waits_since
        if not since:
            return 0
        seconds = self._turn.time() - since
        if seconds <= 0:  # sent after this iteration's time was taken: the loop cannot have read an answer yet
            return 0
        return max(0, frexp(seconds / _LATE)[1])

    def has_read(self) -> bool:
        """Return whether the worker has read all it was sent. If not, the channel calls `Supervisor.advance` once it has."""
        return self.worker.channel.has_read()  # statistics ask, also while `attach` has not succeeded

    @property
    def pending(self) -> int:
        """Number of calls sent and not ended. Each item of a batch counts."""
        return len(self.calls) + self._batched

    @property
    def items(self) -> int:
        """Number of plain calls sent and not ended. Each item of a batch counts."""
        return self._held()[1] + self._batched

    def send(self, call: PendingCall) -> None:  # noqa: PLR0912  # a function more would cost each call
        """Send a call or a batch. The worker must have a free place."""
        call_id = self.free.pop()
        if call_id > ID_MASK:  # the bits above ID_MASK hold the numbers of items
            call_id = call_id % self.stride + self.stride
        call.call_id = call_id
        self.calls[call_id] = call
        call.member = self  # last: a cancellation by user code that a garbage collection runs goes by it
        self.load[call.kind] += 1
        body = call.body
        if body is None:
            self._batched += call.size - 1
        # A garbage collection may run user code that cancels the call. From here on, that code finds the call here, and the CANCEL
        # waits until the call is sent. Before this line, `CallRegistry.withdrawn` takes the call.
        was_sending, self.is_sending = self.is_sending, True
        try:
            number = call.function.number
            if number not in self.defined:
                number = self._define(call.function)
            if call.plan is not None and call.plan.terms is not None:
                self.tell(TERMS, call_id, call.plan.terms)
            if type(body) is tuple:
                self.tell(number, call_id, body)
            elif body is None:
                self.tell(BATCH, call_id, call.message())
            else:
                if self._holders and call in self._holders:
                    self._shares.introduce(self, call)
                if type(body) is int:
                    self.parked.add(call_id)
                    self._channel.send_parcel(number, call_id, body, _Parked(self, call))
                else:
                    self.tell(number, call_id, body)
        finally:
            self.is_sending = was_sending

    def limit(self) -> None:
        """From now on, tell the worker by when calls must begin, and for how long they may run.

        Only runners in which a call has such a limit pay for this.
        """
        unlimited = self.send

        def send(call: PendingCall) -> None:
            if call.begin_by != self._begin_by or call.timeout != self._timeout or type(call.body) is int:
                self._tell_limits(call)
            unlimited(call)

        self.send = send  # type: ignore[method-assign]

    def _tell_limits(self, call: PendingCall) -> None:
        begin_by, timeout = call.begin_by, call.timeout
        if type(call.body) is int and (begin_by is not None or timeout is not None):
            call.retry_plan().set_begin_by(begin_by)  # type: ignore[union-attr]  # a limited call has a policy
            return
        if begin_by != self._begin_by:
            self.tell(BEGIN_BY, 0, begin_by)
            self._begin_by = begin_by
        if timeout != self._timeout:
            self.tell(TIMEOUT, 0, timeout)
            self._timeout = timeout

    def ask_back(self, wanted: int, times_ahead: int) -> None:
        """Ask the worker to hand back up to `wanted` plain calls that have not begun.

        Calls with a key stay, since their key is bound to this worker. `times_ahead`: `Dispatch.times_ahead` at this moment.
        """
        calls = self.calls.copy().items()  # a garbage collection may run user code that makes or cancels calls
        stay = [call_id % self.stride for call_id, call in calls if call.key is not None and call.kind == Kind.THREAD]
        self.recalling = True
        self.asked_at = times_ahead
        self.tell(RECALL, wanted, array("I", stay).tobytes())

    def holds(self, is_holding: bool) -> None:
        """Note whether the worker holds plain calls that it does not begin for now, although it has threads for them."""
        self.is_holding = is_holding
        if is_holding:
            self._note_ahead()

    def pause(self, times_ahead: int) -> None:
        """Take no more calls for now, and ask for all calls that have not begun, those with a key too."""
        self.load[Kind.TASK] += ROOM_OF_NONE
        self.load[Kind.THREAD] += ROOM_OF_NONE
        self.recalling = True
        self.asked_at = times_ahead
        self.tell(RECALL, self.stride, b"")

    def go_on(self) -> None:
        """Take calls again after `pause`."""
        self.load[Kind.TASK] -= ROOM_OF_NONE
        self.load[Kind.THREAD] -= ROOM_OF_NONE
        self._lowered(self)

    def shrink(self, items: int) -> None:
        """Note that this many items of a batch have ended or were handed back."""
        self._batched -= items

    def _define(self, function: Function) -> int:
        """Return the op that calls the function.

        A function with a number is sent to the worker first. One without a number travels with each call, under an op of its kind.
        """
        if not function.number:
            return ONCE_OPS[function.kind]
        if function in self._holders:
            self._shares.introduce(self, function)
        op, number, payload = DEFINE_OPS[function.kind], function.number, function.payload
        if type(payload) is int:
            self.tell_parcel(op, number, payload)
        else:
            self.tell(op, number, payload)
        self.defined.add(number)  # only now: if it was not sent, the next call sends it
        return number

    def tell_parcel(self, op: int, number: int, parcel: int) -> None:
        """Send a message with a placed parcel, in order with other messages. The parcel stays its owner's, who discards it."""
        self._channel.send_parcel(op, number, parcel, _Lent(parcel))

    def take(self, call_id: int) -> PendingCall:
        """Remove and return the call of that id, and free its place. The worker is done with the call.

        Raises:
            KeyError: the worker has no such call.
        """
        # First all counts, with nothing between them that can fail: they must agree with `calls`. Up to `append` no function is
        # called, at whose end a Ctrl-C may come.
        call = self.calls[call_id]
        del self.calls[call_id]
        self.load[call.kind] -= 1
        self._batched -= call.outstanding - 1
        call.member = None
        is_parked = call_id in self.parked
        try:
            self.free.append(call_id + self.stride)
            if self._reasons and self._reasons.pop(call_id, 0):
                self._come_back(call.kind)
            self.parked.discard(call_id)
            self._lowered(self)
            if call.key is not None:
                self._left(call)
        finally:  # also after a Ctrl-C: nobody else wakes those who wait for its end. Its key is counted again by `recount`.
            call.left()
        if is_parked and call.plan is not None and call.plan.terms is not None:
            self.tell(TERMS, call_id, None)  # withdraw the terms, since their call will not be sent
        if self.families and (family := self.families.pop(call_id, None)) is not None:
            family.end()
        return call

    def check_empty(self) -> None:
        """Check that nothing is left of the calls of a dead worker: a call here would never end, and its place is counted.

        `send`, `take` and the short ways of `Outcomes.receiver` each change `calls`, `free`, `load` and `_batched` together.
        """
        counts = len(self.calls), *self._held(), self.load[Kind.BROADCAST], self._batched, self.places - len(self.free)
        assert not any(counts), f"calls, tasks, plain calls, broadcasts, items, places: {counts}"

    # Calls that give their places back while they wait

    def step_aside(self, call: PendingCall) -> bool:
        """Free the place of a call until `come_back`, once for each reason. Return False if too many calls do so."""
        reasons = self._reasons.get(call.call_id, 0)
        if not reasons:
            if sum(self._aside) >= self._spares:
                if self.places == self.stride:
                    return False
                self.free.append(self.places + self.stride)
                self.places += 1
                self._spares += 1
            self._aside[call.kind] += 1
            self.load[call.kind] -= 1
            self._moved(call.kind, 1)
        self._reasons[call.call_id] = reasons + 1
        return True

    def come_back(self, call: PendingCall) -> None:
        """Take the place again once no reason is left, even if none is free. Does nothing once the call has left."""
        if self.calls.get(call.call_id) is not call:
            return
        reasons = self._reasons[call.call_id] = self._reasons[call.call_id] - 1
        if not reasons:
            del self._reasons[call.call_id]
            self._come_back(call.kind)

    def _come_back(self, kind: int) -> None:
        self._aside[kind] -= 1
        self.load[kind] += 1
        self._moved(kind, -1)

    @property
    def is_attached(self) -> bool:
        """Whether `attach` has succeeded."""
        return hasattr(self, "tell")

    @property
    def aside(self) -> tuple[int, int]:
        """By kind, the number of calls that have given their places back while they wait."""
        tasks, plain = self._aside
        return tasks, plain

    def has_place(self, kind: int, places: int) -> bool:
        """Return whether fewer than `places` calls of this kind have places here."""
        return self._held()[kind] < places

    def give_up(self, call: PendingCall) -> None:
        """Remove a call that the worker may not have been sent, and withdraw the terms sent for it."""
        if call.plan is not None and call.plan.terms is not None and call.call_id not in self.parked:
            self.tell(TERMS, call.call_id, None)
        self.take(call.call_id)

    def fate(self, call: PendingCall) -> Fate:
        """Return how far the call has come. Decide by the answer only after the worker's death (`Worker.fate`)."""
        return self.worker.fate(call.call_id)

    def note_running(self) -> None:
        """Note which calls the dead worker was running, for the errors of its calls. To be called before any of them is ended."""
        for call in list(self.calls.values()):
            running = call.running(self.fate(call))
            if running:
                self._ran[call.function.name] = self._ran.get(call.function.name, 0) + running

    def death(self, call: PendingCall, age: float | None = None, *, started: bool = True) -> WorkerDied:
        """Return the error of a call that this worker's end has ended. `age`: seconds since it began; None: unknown."""
        attempts, name = started + (0 if call.plan is None else call.plan.failed), call.function.name
        others = dict(self._ran)
        if started and others.get(name):
            others[name] -= 1
        others = {other: count for other, count in others.items() if count}
        memory = self.memory if self.end.peak is None else self.end.peak
        death = WorkerDied(
            *(self.pid, self.end.code, name, age, started, attempts, self.killed_why, self.end.why, others, memory),
            self.worker.node,
        )
        death.__cause__ = self.failure
        return death

    def statistics(self, threads: int, *, may_look: bool) -> tuple[int, int]:
        """Return the numbers of running calls and of calls queued ahead, as far as the supervisor knows.

        If the worker has not read all messages (its loop is busy or blocked), the fate of each call tells, if the engine knows it.
        `may_look`: whether the caller may do so. Without a GIL, only the loop's thread may.
        """
        if may_look and (self.parked or self.is_holding or not self.has_read()):
            ids = [call_id for call_id in list(self.calls) if call_id not in self.parked]
            try:
                begun = [self.worker.fate(call_id).begun for call_id in ids]
            except ValueError:  # the worker died, and the loop's thread closed it during this call
                return 0, 0
            if None not in begun:
                running = sum(map(bool, begun))
                return running, max(0, len(self.calls) - running) + self._batched
        tasks, plain = self._held()
        some = min(1 if self.is_holding else threads, plain)
        return tasks + self.load[Kind.BROADCAST] + some + sum(self._aside), plain - some + self._batched

    def running(self, threads: int, *, may_look: bool) -> list[tuple[int, PendingCall]]:
        """Return the calls that run, with their ids and the oldest first, as far as the supervisor knows. As `statistics`."""
        calls = [(call_id, call) for call_id, call in self.calls.copy().items() if call_id not in self.parked]
        has_read, free = self.has_read(), (1 if self.is_holding else threads) + self._aside[Kind.THREAD]
        running: list[tuple[int, PendingCall]] = []
        for call_id, call in calls:
            is_plain = call.kind == Kind.THREAD
            begun = self._has_begun(call_id) if may_look and (is_plain or not has_read) else None
            if begun is None:  # nobody can tell: threads take plain calls in order, and the loop all others at once
                begun = not is_plain or free > 0
            free -= is_plain
            if begun:
                running.append((call_id, call))
        return running

    def _has_begun(self, call_id: int) -> bool | None:
        try:
            return self.worker.fate(call_id).begun
        except ValueError:  # as in `statistics`
            return False

    def age(self, call_id: int, *, may_look: bool) -> float | None:
        """Return for how many seconds a call has run; None if nobody can tell. `may_look` as in `statistics`."""
        try:
            return self.worker.fate(call_id).age if may_look else None
        except ValueError:
            return None

    def _held(self) -> tuple[int, int]:
        """Return the numbers of coroutine calls and of plain calls (a batch counts once) in the worker."""
        # Take the remainders instead of checking what has added to the loads: another thread may read them while they change.
        tasks, plain, _ = self.load
        return tasks % ROOM_OF_NONE, plain % ROOM_OF_NONE

    @property
    def is_spent(self) -> bool:
        """Whether the worker has been sent all the calls it may begin."""
        return False

    @property
    def is_done(self) -> bool:
        return self.is_spent and not self.calls

    def unbegun(self, calls: int) -> None:
        """Note that the worker handed back this many calls that it had not begun."""

    def stop_timer(self) -> None:
        """Stop the running deadline, if any. Idempotent."""
        self.deadline = None
        if self.timer is not None:
            self.timer.cancel()
            self.timer = None

    @property
    def is_ready(self) -> bool:
        return self.life.state is State.READY


class _Lent:
    """The channel's ticket for a placed parcel that a function or a shared object keeps, to send it to other workers too."""

    __slots__ = ("_parcel",)

    def __init__(self, parcel: int) -> None:
        self._parcel = parcel

    def is_wanted(self) -> bool:
        return True

    def stored(self, parcel: int) -> bool:
        assert parcel == self._parcel, "a placed parcel keeps its number: its owner would discard another one"
        return True


class _Parked:
    """The channel's ticket for a call whose arguments are a parcel. The worker has not been sent the call yet."""

    __slots__ = ("_call", "_call_id", "_member")

    def __init__(self, member: PoolWorker, call: PendingCall) -> None:
        self._member = member
        self._call = call
        self._call_id = call.call_id

    def is_wanted(self) -> bool:
        return self._call_id in self._member.parked

    def stored(self, parcel: int) -> bool:
        parked = self._member.parked
        if self._call_id not in parked:  # a `__del__`, run by a garbage collection during the storing, cancelled the call
            return False
        self._call.body = parcel
        parked.discard(self._call_id)
        return True
