"""Where tests look into a runner: its workers, its calls and its memory slots, which `statistics()` and `usage()` do not show.

A test needs this to kill a particular worker, to see that a call has left nothing behind, or to make a fault happen. It is the
one way in, so that a change within percore changes these lines and no test. Programs under test import it, and so do their workers:
it imports nothing that a worker does without.
"""

import sys
from collections import Counter
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from percore import Map, Runner, Stream
    from percore._supervisor.pool_worker import PoolWorker
    from percore._supervisor.supervisor import Supervisor


def supervisor_of(runner: "Runner") -> "Supervisor":
    """The part of a runner that owns its workers and calls."""
    return runner._supervisor


def audit_of(runner: "Runner") -> Any:
    """What compares the parts of a runner (PERCORE_DEBUG=1)."""
    return runner._supervisor._audit


def members_of(runner: "Runner") -> "list[PoolWorker]":
    """The workers of now, as the supervisor sees them: also those that start and those that drain."""
    return list(runner._supervisor.members)


def replace_members(runner: "Runner", members: "set[PoolWorker]") -> None:
    """Have all parts of the supervisor use this set of its workers from now on."""
    supervisor = runner._supervisor
    supervisor.members = supervisor.pool.members = supervisor.calls.limits.members = members


def current_member(runner: "Runner", index: int = 0) -> "PoolWorker | None":
    """The worker that has a slot of the pool."""
    return runner._supervisor.slots[index].current


def current_pid(runner: "Runner") -> int | None:
    """The process of the first worker of the pool; None until it has one. The first start of a program may still import modules."""
    supervisor: Supervisor | None = getattr(runner, "_supervisor", None)
    member = supervisor.slots[0].current if supervisor is not None else None
    return member.pid if member is not None else None


@contextmanager
def sent_by(runner: "Runner") -> "Iterator[list[Any]]":
    """Record the calls that are sent to the workers of now, in order."""
    sent: list[Any] = []

    def recorded(send: "Callable[[Any], None]") -> "Callable[[Any], None]":
        def note(call: Any) -> None:
            sent.append(call)
            send(call)

        return note

    members: list[Any] = members_of(runner)
    for member in members:
        member.send = recorded(member.send)
    try:
        yield sent
    finally:
        for member in members:
            del member.send


@contextmanager
def seats_at_each_change(runner: "Runner") -> "Iterator[list[int]]":
    """Record how many workers take calls, each time that one begins or ceases to."""
    dispatch: Any = runner._supervisor.dispatch
    counts: list[int] = []

    def recorded(step: "Callable[[PoolWorker], None]") -> "Callable[[PoolWorker], None]":
        def change(seat: "PoolWorker") -> None:
            before = list(dispatch.seats)
            step(seat)
            if dispatch.seats != before:
                counts.append(len(dispatch.seats))

        return change

    dispatch.seat, dispatch.unseat = recorded(dispatch.seat), recorded(dispatch.unseat)
    try:
        yield counts
    finally:
        del dispatch.seat, dispatch.unseat


def keys_of(runner: "Runner") -> list[Any]:
    """The keys that the supervisor knows of, idle ones too, in the order in which it came to know them."""
    keys: Any = runner._supervisor.dispatch.keys
    return [name.value for name in keys._keys]


def channel_of(member: "PoolWorker") -> Any:
    """The channel of a worker in a process or of a fake one, with all that is known of it."""
    return member.worker.channel


def arena_of(runner: "Runner") -> Any:
    """The store of a runner whose workers map it."""
    return runner._supervisor.store


def sent_messages(runner: "Runner") -> Counter[int]:
    """How often each message is sent to the workers of now, from now on."""
    sent: Counter[int] = Counter()
    for member in members_of(runner):
        of: Any = member
        send = of.tell

        def counted(op: int, call_id: int, body: Any, send: Any = send) -> None:
            sent[op] += 1
            send(op, call_id, body)

        of.tell = counted
    return sent


def is_of_nodes(engine: Any) -> bool:
    """Whether its workers are on several nodes. A program that has no such engine does not import it, which takes a while."""
    module = sys.modules.get("percore._engines.nodes.engine")
    return module is not None and isinstance(engine, module.NodesEngine)


def slots_used(runner: "Runner") -> int:
    """How many memory slots are taken by what is sent to workers."""
    return runner._supervisor.store.in_use


def slots_at_all(runner: "Runner") -> int:
    """How many memory slots there are for what is sent to workers; with nodes, in the host of one."""
    engine: Any = runner._supervisor.engine
    if is_of_nodes(engine):
        from tests.hosts import inner_hosts

        engine = inner_hosts(engine)[0].engine
    return int(engine.store.count)


def nodes_of(runner: "Runner") -> list[str]:
    """The names of the nodes on which its workers ran at last; none if they ran on this machine."""
    engine: Any = runner._supervisor.engine
    return sorted({link.node for link in engine._slots.values()}) if is_of_nodes(engine) else []


def is_leased(runner: "Runner") -> bool:
    """Whether anything that was read is still used by arrays; with nodes, where results have own memory, by those of workers."""
    engine: Any = runner._supervisor.engine
    if is_of_nodes(engine):
        from tests.hosts import inner_hosts

        return any(host.engine.store.in_use for host in inner_hosts(engine))
    members = [slot.current for slot in runner._supervisor.slots]
    return any(channel_of(member).leases.count for member in members if member is not None)


def items_ready(stream: "Stream[Any]") -> int:
    """How many items of a stream have arrived and were not taken."""
    call: Any = stream._call
    return len(call._ready)


def close_call(stream: "Stream[Any]") -> None:
    """Have the consumer of a stream leave it."""
    stream._call.close()


@dataclass
class Held:
    """What a map that has begun holds at a moment.

    Attributes:
        pulled, ended, handed_over: how many items were, ever.
        items: items that have not ended: they wait for a batch, are in a batch that was sent, or are under way singly.
        inputs: inputs kept to give pairs.
        admitted: items that count for `max_pending`.
        inside: calls of anybody that count for it.
        is_open: whether the dispatch has its queue, or the supervisor an end to call.
    """

    pulled: int
    ended: int
    handed_over: int
    items: int
    inputs: int
    admitted: int
    inside: int
    is_open: bool


def held_by(runner: "Runner", mapped: "Map[Any]") -> Held | None:
    """What a map holds; None if it has not begun."""
    run: Any = mapped._run
    parts = run._parts
    if parts is None:
        return None
    items, feeder = parts
    window, supervisor = items.window, runner._supervisor
    sent = sum(index < batch.wanted for batch in items._sent for index in batch.began(batch.size))
    return Held(
        window.pulled,
        window.ended,
        window.handed_over,
        len(items.batches or ()) + len(items._alive) + sent,
        len(items.given),
        items.admitted,
        supervisor.admission._inside if supervisor.admission is not None else 0,
        items.queue in supervisor.dispatch._maps or feeder.end in supervisor.closing.enders,
    )


def rests(mapped: "Map[Any]") -> bool:
    """Whether all items that a map has pulled have ended, and it pulls no more before results are handed over."""
    run: Any = mapped._run
    parts = run._parts
    if parts is None:
        return False
    items, _ = parts
    waiter = items.space_waiter
    return waiter is not None and not waiter.done() and items.window.ended == items.window.pulled


def pulls(mapped: "Map[Any]") -> bool:
    """Whether a map still pulls inputs."""
    run: Any = mapped._run
    return bool(run._life.pulls)


def is_at_rest(supervisor: Any) -> bool:
    """Whether no timer of a supervisor runs that watches calls or publishes figures."""
    return supervisor._publication._timer is None and supervisor._blocked_loops._timer is None
