"""Handlers for the messages of workers about their calls: they end calls, and take back those that workers hand back.

The pool opens each channel with `Outcomes.receiver`. A call stays its worker's until it is done. So if anything breaks the channel
before that, the call ends when the supervisor processes the worker's death.
"""

from asyncio import InvalidStateError
from collections.abc import Callable, Iterable
from contextlib import suppress
from time import monotonic, monotonic_ns
from typing import Any, Final, Protocol

from percore._calls.calls import Awaited, Outcome, PendingCall, Planned
from percore._calls.items import Batch
from percore._calls.meters import ALL, Meter, Tally
from percore._common.errors import IllegalEvent, RemoteError, overrun, shown
from percore._common.fault_points import POINTS, point
from percore._common.measuring import count_in
from percore._protocol.messages import (
    CANCELLED,
    ENDED,
    ERROR,
    FORGOTTEN,
    ID_MASK,
    ITEM,
    ITEM_SHIFT,
    ITEMS,
    RESULT,
    RETURNED,
    STARTED,
    TIMED_OUT,
    UNPICKLED,
    VALUE,
    VALUES,
    BrokenFrame,
    Kind,
    Message,
    Payload,
)
from percore._serialization.exception_state import type_name_of
from percore._serialization.exceptions import load_exception
from percore._serialization.pickler import load
from percore._supervisor.call_registry import CallRegistry, was_read
from percore._supervisor.measuring import measure_wait
from percore._supervisor.pool_worker import PoolWorker
from percore._supervisor.time_limits import is_late

_OF_CALLS: Final = frozenset((CANCELLED, ENDED, ERROR, ITEM, ITEMS, RESULT, RETURNED, STARTED, TIMED_OUT, UNPICKLED, VALUE, VALUES))
"""Messages whose id is that of a call of the worker, or of an item of one."""

_BEFORE_OUTCOME: Final = (UNPICKLED, TIMED_OUT, STARTED, ITEMS, ITEM)
"""Messages about a call that are followed by its outcome. The worker holds the call until then."""


class MessageHandlers(Protocol):
    """Handlers of further messages."""

    def handlers(self, member: PoolWorker) -> dict[int, Callable[[int, Any], None]]:
        """Return the handlers of the messages of one worker, by op."""


class Outcomes:
    """Handles the messages of all workers of a runner."""

    def __init__(self, calls: CallRegistry, *further: MessageHandlers) -> None:
        """`further` handle the messages that are about no outcome of a call."""
        self._calls = calls
        self._further = further

    def receiver(self, member: PoolWorker) -> Callable[[Iterable[Message]], None]:  # noqa: C901, PLR0915  # counts the inner function
        """Return the function that the channel calls with the messages of one worker.

        It raises for a message that no healthy worker sends. The channel then breaks, and the pool kills the worker.
        """
        handlers: dict[int, Callable[[int, Any], None]] = {
            VALUE: lambda call_id, body: self._value(member, call_id, body),
            VALUES: lambda call_id, body: self._values(member, call_id, body),
            RESULT: lambda call_id, body: self._result(member, call_id, body),
            ERROR: lambda call_id, body: self._error(member, call_id, body),
            CANCELLED: lambda call_id, body: self._cancelled(member, call_id, is_unbegun=body is True),
            RETURNED: lambda call_id, body: self._returned(member, call_id, body),
            STARTED: lambda call_id, _: self._started(member, call_id),
            TIMED_OUT: lambda call_id, _: self._timed_out(member, call_id),
            UNPICKLED: lambda call_id, _: self._unpickled(member, call_id),
            FORGOTTEN: lambda number, _: self._calls.shares.forgotten(member, number),
        }
        for one in self._further:
            handlers |= one.handlers(member)

        channel = member.worker.channel
        handlers |= channel.own
        has_objects = self._calls.store.has_objects
        calls, free, stride, load_of, families = member.calls, member.free, member.stride, member.load, member.families
        left, lowered = self._calls.dispatch.left, self._calls.dispatch.lowered

        # The calls of one function that have taken a shorter way, to be counted together: a local count costs half.
        # Not the function itself: it would live on until the worker's next call of another one.
        counted: Meter | None = None
        tally = Tally()
        count = 0

        def flush() -> None:
            nonlocal count
            member.done += count
            tally.ended += count
            count = 0

        def receive(messages: Iterable[Message]) -> None:
            try:
                take(messages)
            finally:
                flush()

        def take(messages: Iterable[Message]) -> None:  # noqa: C901, PLR0912, PLR0915  # one function: a call would slow down every outcome
            nonlocal counted, count, tally
            for op, call_id, body in messages:
                # Most outcomes take one of two shorter ways, in which `_value`, `_result` and `_ended` are inlined. On CPython 3.11
                # a scalar for `run` takes 0.26 µs instead of 1.0, and a small pickle 0.64 instead of 1.9. For another call they
                # take 0.31 instead of 1.0, and 0.84 instead of 1.8. A call takes about 5 in all.
                call = calls.get(call_id)
                try:
                    if families and call_id in families and op in handlers:
                        # A healthy worker drops the nested calls of a call before it answers. The shorter ways rely on that: a
                        # call with nested calls has given its place back already.
                        handlers[op](call_id, body)
                    elif (type(call) is Awaited or (isinstance(call, Planned) and call.plan is None)) and (
                        op == VALUE or (op == RESULT and type(body) is bytes and body[-1:] == b".")
                    ):
                        if op == RESULT and not call.future.done():
                            loads = call.function.meter.loads
                            loads.left -= 1
                            try:
                                body = load(body) if loads.left >= 0 else _timed(call.function.meter, body)
                            except BaseException as error:
                                self._not_loaded(member, call, error)
                                if not channel.is_open:
                                    return
                                continue
                        if not call.future.done():
                            try:
                                call.future.set_result(body)
                            except InvalidStateError:
                                """Its task was cancelled since it was asked: see `endings`."""
                        call.is_over = True
                        del calls[call_id]
                        load_of[call.kind] -= 1
                        free.append(call_id + stride)
                        if call.key is not None:
                            left(call)
                        if (meter := call.function.meter) is counted:
                            count += 1
                        else:
                            flush()
                            counted, count, tally = meter, 1, meter.at(member.index)
                        if call.accepted:
                            measure_wait(member, call)
                        if POINTS:
                            point("supervisor.outcome.delivered")
                        if op == VALUE:
                            continue
                    elif (
                        (op == VALUE or (op == RESULT and type(body) is bytes and body[-1:] == b"."))
                        and call is not None
                        and (call.plan is None or call.plan.late is None)
                        and call.is_short
                    ):
                        if op == VALUE:
                            if not call.done():
                                try:
                                    call.set_result(body)
                                except InvalidStateError:
                                    """As above."""
                        elif not self._delivered(member, call, body):
                            if not channel.is_open:
                                return
                            continue
                        del calls[call_id]
                        load_of[call.kind] -= 1
                        free.append(call_id + stride)
                        call.member = None
                        if call.key is not None:
                            left(call)
                        if (meter := call.function.meter) is counted:
                            count += 1
                        else:
                            flush()
                            counted, count, tally = meter, 1, meter.at(member.index)
                        if call.accepted:
                            measure_wait(member, call)
                        if (
                            has_objects or type(call.body) is not tuple
                        ):  # free the arguments now: the caller may keep the future for long
                            self._calls.release(call)
                        if POINTS:
                            point("supervisor.outcome.delivered")
                    elif op in handlers:
                        handlers[op](call_id, body)
                    else:
                        raise BrokenFrame(f"message {op} does not exist")
                except (BrokenFrame, IllegalEvent):
                    raise
                except BaseException as error:
                    self._isolate(member, op, call_id, call, error)
                if not channel.is_open:  # user code, or a message sent because of it, closed the channel
                    return
            lowered(member)

        return receive

    def _isolate(self, member: PoolWorker, op: int, call_id: int, call: PendingCall | None, error: BaseException) -> None:
        """End only this call: its message was valid, but handling the message raised this error.

        An Exception in a batch ends its map, and breaks the channel.

        Raises:
            BaseException: `error` itself, if the message is not about a single call, or if the error is no Exception. It breaks
                the channel, and the death of the worker ends its calls.
        """
        if op not in _OF_CALLS:  # the number may be that of another call all the same
            raise error
        held = member.calls.get(call_id & ID_MASK)
        batch = held or call
        if type(batch) is Batch and isinstance(error, Exception):
            # Results that it has counted may not have reached the map, or items that came back no queue. A KeyboardInterrupt costs
            # the worker alone: the death of the worker ends what it held.
            batch.map.broke(error)
        if type(held) is not Batch and call is not None and isinstance(error, Exception):
            self._calls.failed_with(call, error, stays=op in _BEFORE_OUTCOME)
            return
        raise error

    def _unpickled(self, member: PoolWorker, call_id: int) -> None:
        """The worker has read the arguments: free their slot, unless arrays use it or another attempt may need it."""
        call = member.calls[call_id]
        if call.plan is None or not call.plan.policy.retries:
            self._calls.unpickled(call)

    def _target(self, member: PoolWorker, call_id: int) -> Outcome:
        """Return the call or the item of a batch that this outcome is for.

        Raises:
            KeyError, BrokenFrame: the worker has no such call or item.
        """
        return member.calls[call_id & ID_MASK].target((call_id >> ITEM_SHIFT) - 1)

    # Outcomes of calls
    def _value(self, member: PoolWorker, call_id: int, value: object) -> None:
        target = self._target(member, call_id)
        if self._is_late(member, target):
            return
        if not target.done():
            with suppress(InvalidStateError):
                target.set_result(value)
        self._calls.ended(member, target)

    def _values(self, member: PoolWorker, call_id: int, body: bytes) -> None:
        """Take the results of several items of a batch."""
        batch = member.calls[call_id]
        if type(batch) is not Batch:
            raise BrokenFrame(f"results of batch {call_id}, which is none")
        first, seconds, results, pickled = self._calls.store.unpack_values(body)
        count = len(results)
        if batch.queue.batches is not None and count and seconds >= 0:
            batch.queue.batches.cost.measured(count, seconds)
        size, failures = self._load_results(batch, results, pickled) if pickled else (0, {})
        batch.values(first, results, size, failures)
        member.done += count
        member.failed += len(failures)
        meter = batch.function.meter
        tally = meter.at(member.index)
        tally.ended += count
        tally.failed += len(failures)
        if not first and batch.accepted:
            tally.batches = batches = tally.batches + 1
            if batches <= ALL or not batches % 4:
                measure_wait(member, batch, batch.size if batches <= ALL else 4 * batch.size)
        if count and seconds >= 0 and meter.name:
            tally.parts = parts = tally.parts + 1
            if parts <= ALL or not parts % 4:
                weight = count if parts <= ALL else 4 * count
                count_in((meter.run, tally.run, member.run_times), int(seconds / count * 1e9), weight)
        member.shrink(count)
        if not batch.outstanding:
            member.take(call_id)
        if POINTS:
            point("supervisor.outcome.delivered")

    @staticmethod
    def _load_results(batch: Batch, results: list[Any], pickled: list[int]) -> tuple[int, dict[int, Exception]]:
        """Unpickle these results of a batch. Return the size of their pickles, and the failures by place."""
        size, began = sum(len(results[place]) for place in pickled), monotonic_ns()
        failures = load_all(results, pickled)
        if batch.function.meter.name:
            batch.function.meter.loaded_all(len(pickled), monotonic_ns() - began, size)
        return size, failures

    def _result(self, member: PoolWorker, call_id: int, payload: Payload) -> None:
        target, channel = self._target(member, call_id), member.worker.channel
        if target.is_dropped():
            target.drop()
        if target.done():  # cancelled: do not run user code (unpickling) for a result that is dropped
            channel.release(payload)
            self._calls.ended(member, target)
            return
        if self._is_late(member, target):
            channel.release(payload)
            return
        if target.forwards:
            self._forward(member, target, payload, is_error=False)
            return
        received, meter = channel.load(payload), target.function.meter
        meter.loads.left -= 1
        began = monotonic_ns() if meter.loads.left < 0 else 0
        try:
            result = received.load()
        except BaseException as error:
            if not received.is_leased:
                channel.release(payload)
            self._not_loaded(member, target, error)
            return
        if began:
            meter.loaded(monotonic_ns() - began, received.size)
        if not target.done():
            target.deliver(result, received.size)
        if not received.is_leased:
            channel.release(payload)
        self._calls.ended(member, target)

    def _forward(self, member: PoolWorker, target: Outcome, payload: Payload, *, is_error: bool) -> None:
        """End a nested call with the bytes that have arrived. The payload is released, though there may be no memory for a copy."""
        channel = member.worker.channel
        data = channel.read(payload)
        try:
            if not is_error:
                target.function.meter.sized(len(data))
            if not target.done():
                target.forward(data, is_error=is_error)
        finally:
            del data
            channel.release(payload)
        self._calls.ended(member, target, failed=is_error)

    def _delivered(self, member: PoolWorker, call: PendingCall, pickled: Any) -> bool:
        """End a call with a small pickled result. Return False if that could not be unpickled: then the call has left, too."""
        if call.is_dropped():
            call.drop()
        if call.done():  # cancelled: as in `_result`
            return True
        loads = call.function.meter.loads
        loads.left -= 1
        try:
            result = load(pickled) if loads.left >= 0 else _timed(call.function.meter, pickled)
        except BaseException as error:
            self._not_loaded(member, call, error)
            return False
        if not call.done():
            call.deliver(result, len(pickled))
        return True

    def _not_loaded(self, member: PoolWorker, target: Outcome, error: BaseException) -> None:
        """End a call whose result could not be unpickled."""
        if not target.done():
            target.set_exception(unloadable(error))
        self._calls.ended(member, target, failed=True)
        # It may be the user's Ctrl-C. Raise it, although that breaks the channel and costs this worker.
        if issubclass(type(error), KeyboardInterrupt):
            raise error

    def _error(self, member: PoolWorker, call_id: int, payload: Payload) -> None:
        target = self._target(member, call_id)
        channel = member.worker.channel
        if target.forwards and ((plan := target.plan) is None or (plan.late is None and plan.failed >= plan.policy.retries)):
            self._forward(member, target, payload, is_error=True)
            return
        received = channel.load(payload)
        try:
            data = bytes(channel.read(payload)) if target.forwards else b""
            error = received.load(load_exception)
        finally:
            channel.release(payload)
        if self._is_late(member, target):
            return
        if not target.done():
            raised = error
            delay, error = self._calls.retries.next(target, error)
            if not target.done():  # retry_on or backoff may have cancelled the call
                if delay is not None:
                    self._try_again(member, target, delay)
                    return
                if target.forwards and error is raised:
                    target.forward(data, is_error=True)
                else:
                    target.set_exception(error)
        else:
            target.failed_late(error)
        self._calls.ended(member, target, failed=True)

    def _is_late(self, member: PoolWorker, target: Outcome) -> bool:
        """End this call, or start its next attempt, if it timed out earlier and has ended only now. Return whether it did."""
        plan = target.plan
        if plan is None or plan.late is None or target.done() or target.is_dropped():
            return False
        if plan.verdict is None:
            self._try_again(member, target, plan.late)
        else:
            target.set_exception(plan.verdict)
            self._calls.ended(member, target, failed=True)
        return True

    def _try_again(self, member: PoolWorker, target: Outcome, delay: float) -> None:
        member.retried += 1
        calls, call = self._calls, target.renewed()
        outer, calls.is_moving = calls.is_moving, True
        try:
            target.leave(member)
            calls.again(call, delay)
        except BaseException as error:
            calls.failed_with(call, error)
        finally:
            calls.is_moving = outer
            calls.moved()

    def _started(self, member: PoolWorker, call_id: int) -> None:
        call = member.calls[call_id]
        if call.plan is not None:
            call.plan.started = monotonic()
        if call.key is not None:
            self._calls.rates.began(call)

    def _timed_out(self, member: PoolWorker, call_id: int) -> None:
        """A plain function exceeded its timeout. Its thread runs on, and the next attempt begins only after that."""
        call = member.calls.get(call_id)
        plan = None if call is None else call.retry_plan()
        if call is None or plan is None or call.done() or plan.late is not None:
            return  # the call has ended meanwhile, was cancelled, or has exceeded its hard timeout before
        seconds = plan.policy.timeout
        if seconds is None:
            raise BrokenFrame(f"call {call_id} is said to have exceeded a timeout, and has none")
        delay, error = self._calls.retries.next(call, overrun(call.function.name, seconds))
        if call.done():
            return
        if delay is None:
            call.abandon(error)
        else:
            plan.late = delay

    def _cancelled(self, member: PoolWorker, call_id: int, *, is_unbegun: bool) -> None:
        target = self._target(member, call_id)
        plan = target.plan
        if plan is not None and plan.late is not None and not self._calls.phase.is_cut and self._is_late(member, target):
            return
        if not target.done():
            # Its caller did not cancel it, or the future would be done. The runner's closing did.
            target.cut_off()
        self._calls.ended(member, target, began=not is_unbegun)

    def _returned(self, member: PoolWorker, call_id: int, count: int | None) -> None:
        calls = self._calls
        if call_id == 0:  # the end of the answer to a recall
            member.recalling = False
            if not member.gave_back:  # its calls may wait for payload slots; without this note it would be asked again for ever
                calls.dispatch.gave_nothing(member, member.asked_at)
            member.gave_back = False
            return
        member.gave_back = True
        call = member.calls[call_id]
        if type(call) is Batch:
            self._returned_items(member, call, count)
            return
        if was_read(call) or member.fate(call).begun:  # it would run twice, or without its arguments
            raise BrokenFrame(f"call {call_id} came back, which has begun")
        outer, calls.is_moving = calls.is_moving, True
        try:
            self._came_back(member, call)
        except BaseException as error:
            calls.failed_with(call, error)
        finally:
            calls.is_moving = outer
            calls.moved()

    def _came_back(self, member: PoolWorker, call: PendingCall) -> None:
        calls = self._calls
        member.take(call.call_id)
        if call.kind != Kind.BROADCAST:
            member.unbegun(1)
        if call.done():
            calls.release(call)
        elif not calls.phase.begins:
            calls.refuse(call)
        elif call.kind == Kind.BROADCAST and not is_late(call):
            calls.hand_on(member, call)
        else:
            calls.returned(call)

    def _returned_items(self, member: PoolWorker, batch: Batch, count: int | None) -> None:
        if type(count) is not int:
            raise BrokenFrame("a batch came back without a number of items")
        run = batch.gave_back(count)
        try:
            member.shrink(count)
            member.unbegun(count)
            if not batch.outstanding:
                member.take(batch.call_id)
            if run is not None:
                self._calls.put_back(batch.map, run)
        except BaseException as error:  # a Ctrl-C: they left the batch, so the death of the worker will not tell the map of them
            batch.map.broke(error)
            raise


def _timed(meter: Meter, pickled: Any) -> Any:
    """Unpickle a result, and measure how long that takes."""
    began = monotonic_ns()
    result = load(pickled)
    meter.loaded(monotonic_ns() - began, len(pickled))
    return result


def load_all(results: list[Any], places: list[int], what: str = "result") -> dict[int, Exception]:
    """Unpickle the results in these places of the list, and return the failures by place. Runs user code."""
    failures: dict[int, Exception] = {}
    for place in places:
        try:
            results[place] = load(results[place])
        except KeyboardInterrupt:  # maybe the user's Ctrl-C: raise it, as for a single call
            raise
        except BaseException as error:
            failures[place] = unloadable(error, what)
    return failures


def unloadable(error: BaseException, what: str = "result") -> Exception:
    """Return the exception for a caller whose result, or item, could not be unpickled in this process."""
    failure = RemoteError(type_name_of(error), f"the {what} could not be unpickled here: {shown(error)}")
    failure.__cause__ = error if issubclass(type(error), Exception) else None
    return failure
