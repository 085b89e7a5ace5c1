"""Reads the statistics of a runner from its supervisor, its pool and its workers."""

from __future__ import annotations

import heapq
from collections import Counter
from time import monotonic
from typing import TYPE_CHECKING, Final, Protocol, TypeAlias

from percore._calls.meters import Tally
from percore._common.measuring import merged
from percore._common.system import has_gil
from percore._monitor.functions import FunctionStatistics, Percentiles, Pickling, RunningCall, WorkerFunctionStatistics
from percore._monitor.statistics import Statistics, WorkerStatistics

if TYPE_CHECKING:
    from collections.abc import Collection, Mapping, Sequence

    from percore._calls.calls import PendingCall
    from percore._calls.functions import Function
    from percore._calls.meters import Meter, Meters
    from percore._common.measuring import Histogram
    from percore._common.options import RunnerOptions
    from percore._supervisor.call_registry import CallRegistry
    from percore._supervisor.pool import Pool
    from percore._supervisor.pool_worker import PoolWorker
    from percore._supervisor.worker_slot import WorkerSlot

_MOST_CURRENT: Final = 16
"""Running calls of a worker that statistics show."""

_NONE: Final = Tally()

Running: TypeAlias = "Mapping[PoolWorker, list[tuple[int, PendingCall]]]"
"""The calls that run in each worker, with their ids and the oldest first."""


class Supervised(Protocol):
    """A supervisor, as its statistics see it."""

    @property
    def options(self) -> RunnerOptions: ...
    @property
    def slots(self) -> Sequence[WorkerSlot]: ...
    @property
    def members(self) -> Collection[PoolWorker]: ...
    @property
    def pool(self) -> Pool: ...
    @property
    def calls(self) -> CallRegistry: ...
    @property
    def meters(self) -> Meters: ...


def snapshot(supervisor: Supervised, *, is_here: bool, most: int | None = None) -> Statistics:
    """Return the statistics of a runner.

    Any thread may call this. `is_here`: whether this is the thread of its loop. `most`: of so many functions at most each worker
    has figures; None: of all.
    """
    may_look = is_here or has_gil()
    in_use = len(supervisor.slots)
    threads = supervisor.options.threads
    running = {member: member.running(threads, may_look=may_look) for member in list(supervisor.members)}
    slots = tuple(supervisor.pool.all_slots)  # also those that were removed
    meters = supervisor.meters.all() if supervisor.meters.is_on else []
    workers = tuple(_of_slot(supervisor, slot, running, meters, may_look=may_look, most=most) for slot in slots)
    return Statistics(
        running=sum(worker.running for worker in workers),
        queued=sum(worker.queued for worker in workers) + supervisor.calls.waiting(),
        done=sum(worker.done for worker in workers),
        failed=sum(worker.failed for worker in workers),
        retried=sum(worker.retried for worker in workers),
        restarts=sum(worker.restarts for worker in workers),
        workers=workers[:in_use],
        functions=_functions(meters, running),
        given_up=sum(worker.given_up for worker in workers),
    )


def _functions(meters: Sequence[Meter], running: Running) -> tuple[FunctionStatistics, ...]:
    """Return the figures of all functions of which a call has begun."""
    counts = Counter(call.function.meter for calls in running.values() for _, call in calls)
    figures = (_of_function(meter, counts[meter]) for meter in meters)
    return tuple(one for one in figures if one.begun)


def _of_function(meter: Meter, running: int) -> FunctionStatistics:
    tallies = list(meter.tallies.values())
    ended = sum(tally.ended for tally in tallies)
    return FunctionStatistics(
        name=meter.name,
        begun=ended + running,
        ended=ended,
        failed=sum(tally.failed for tally in tallies),
        running=running,
        wait=_percentiles(meter.wait, 1e9),
        run=_percentiles(meter.run, 1e9),
        payload=_percentiles(meter.payload, 1),
        pickling=_pickling(meter),
        advice=meter.advice(),
    )


def _of_worker(
    slot: int, members: Sequence[PoolWorker], running: Running, meters: Sequence[Meter], most: int | None
) -> tuple[WorkerFunctionStatistics, ...]:
    """Return the figures of functions in one slot, the one that has run longest in all first."""
    counts = Counter(call.function.meter for member in members for _, call in running.get(member, ()))
    begun = [(meter, meter.tallies.get(slot, _NONE)) for meter in meters if slot in meter.tallies or counts[meter]]
    longest = heapq.nlargest(len(begun) if most is None else most, begun, key=lambda one: one[1].run.total)
    return tuple(
        WorkerFunctionStatistics(meter.name, counts[meter], tally.ended, tally.failed, _percentiles(tally.run, 1e9))
        for meter, tally in longest
    )


def _pickling(meter: Meter) -> Pickling:
    (dumps, dumped), (loads, loaded), (worker_loads, worker_loaded), (worker_dumps, worker_dumped) = meter.pickled
    return Pickling(
        *(dumps, dumped / 1e9, loads, loaded / 1e9),
        *(worker_loads, worker_loaded / 1e9, worker_dumps, worker_dumped / 1e9),
    )


def _percentiles(histogram: Histogram, unit: float) -> Percentiles | None:
    """Return the percentiles of a histogram whose values are given in this part of the unit that users see."""
    if not histogram.count:
        return None
    return Percentiles(histogram.count, *(value / unit for value in histogram.percentiles(0.5, 0.9, 0.99)))


def _current(member: PoolWorker, running: Running, may_look: bool) -> tuple[RunningCall, ...]:
    calls = running.get(member, [])[:_MOST_CURRENT]
    return tuple(_running_call(member, call_id, call.function, may_look) for call_id, call in calls)


def _running_call(member: PoolWorker, call_id: int, function: Function, may_look: bool) -> RunningCall:
    return RunningCall(function.meter.name or function.name, member.age(call_id, may_look=may_look), call_id)


def _of_slot(  # one reading
    supervisor: Supervised, slot: WorkerSlot, running: Running, meters: Sequence[Meter], *, may_look: bool, most: int | None
) -> WorkerStatistics:
    # The loop's thread may bury a worker meanwhile. It adds the worker's counts to slot.past before it removes the worker from the
    # members; so read both again until slot.past is unchanged.
    past, members = slot.past, list(supervisor.members)
    while past is not slot.past:
        past, members = slot.past, list(supervisor.members)
    member = slot.current
    # A worker that drains counts together with its replacement.
    members = [other for other in members if other.index == slot.index and other.generation != past.generation]
    counts = [other.statistics(supervisor.options.threads, may_look=may_look) for other in members]
    channel = None if member is None else member.worker.channel
    blocked_since = None if member is None else supervisor.pool.blocked_loops.since(member)
    return WorkerStatistics(
        index=slot.index,
        generation=slot.generation,
        pid=None if member is None else member.pid,
        state="failed" if slot.is_failed else "gone" if member is None else member.life.state.value,
        running=sum(count for count, _ in counts),
        queued=sum(queued for _, queued in counts),
        done=past.done + sum(other.done for other in members),
        failed=past.failed + sum(other.failed for other in members),
        retried=past.retried + sum(other.retried for other in members),
        started_at=None if member is None else member.started_at,
        loop_lag=None if channel is None else channel.lag(),
        blocked_for=0.0 if blocked_since is None else monotonic() - blocked_since,
        blocked_by=None if member is None else supervisor.pool.blocked_loops.by(member),
        bytes_in=0 if channel is None else channel.sent,
        bytes_out=0 if channel is None else channel.received,
        restarts=slot.restarts,
        restarts_for_memory=slot.restarts_for_memory,
        memory=None if member is None else member.memory,
        run=_percentiles(merged([past.run_times, *(other.run_times for other in members)]), 1e9),
        current=() if member is None else _current(member, running, may_look),
        node=None if member is None else member.worker.node,
        functions=_of_worker(slot.index, members, running, meters, most),
        given_up=past.given_up,
        thread_ids=() if member is None else member.worker.thread_ids,
    )
